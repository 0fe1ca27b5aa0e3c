# SPDX-License-Identifier: Apache-2.0
"""Control connections: one per link, between its two training processes, independent of both paths and the delegates.

1. They carry control messages that the host path has not acknowledged in time, and failures of ranks, whatever happens
   to paths, delegates and the job's store. They carry no training data.
2. They detect the state of the peer. A process that has ended closes its connections, and nothing listens in its place:
   it has failed. A process that sends no heartbeat for SILENT_S while its kernel answers is stopped, and the link waits
   for it. A host that acknowledges nothing for UNREACHABLE_S is unreachable, and the link decides how long to wait.
3. Of several failures the first is the cause: it is sent before anything else, and once for each opening of a link.
4. A process that closes on purpose sends Fin first. An end without Fin is a failure.
5. The lower rank connects. A broken connection is made again, with a back-off, until either end is closed.
6. Messages are lost with their connection. ControlChannel sends them again; failures are sent again on the next
   connection.

Wire format: one JSON object per line of text, at most LINE_NBYTES. One event loop serves all connections of a rank.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
import secrets
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

from adaptra_megatron.common import handshake
from adaptra_megatron.common.backoff import Backoff
from adaptra_megatron.common.handshake import Acceptor, HandshakeError, HandshakeRefusal, Purpose
from adaptra_megatron.common.log import logger_of
from adaptra_megatron.common.typed_messages import Natural, TaggedMessage, packed, plain_text, unpacked
from adaptra_megatron.transport.failover.control_messages import NOTE_NBYTES
from adaptra_megatron.transport.lines.connection_loop import ConnectionLoop

LINE_NBYTES = 4 * NOTE_NBYTES
"""Largest message: a note whose text is quoted once more."""


class Beat(TaggedMessage, tag="beat", frozen=True):
    """Heartbeat: the sending process runs."""


class LinkNote(TaggedMessage, tag="note", frozen=True):
    """A note of the link (control_messages.py), which the host path may bring too."""

    number: Natural
    text: str


class LinkNoteAck(TaggedMessage, tag="noted", frozen=True):
    """Acknowledgement: all notes below this number have arrived."""

    below: Natural


class RankFailed(TaggedMessage, tag="lost", frozen=True):
    """Permanent failure of a rank."""

    rank: Natural
    cause: str


class Fin(TaggedMessage, tag="bye", frozen=True):
    """Intentional end of the connection by the sending process."""

    cause: str | None = None
    """Why it aborts the link while messages may be in flight; None: it has no further use for the link."""


LineMessage = Beat | LinkNote | LinkNoteAck | RankFailed | Fin


def decode_line(packet: bytes) -> LineMessage:
    """Decode a message (`typed_messages.packed`). Raises ValueError for one that no peer of ours sends."""
    try:
        message: LineMessage = unpacked(packet, LineMessage, LINE_NBYTES)
    except ValueError as cause:
        raise ValueError(f"this is no message of a line ({cause}): {packet[:200]!r}") from cause
    return message


logger = logger_of(__name__)

BEAT_S = 0.5
SILENT_S = 2.0
"""Time without a heartbeat after which a process counts as stopped."""
UNREACHABLE_S = 3.0
"""Time without acknowledgements after which a host counts as unreachable."""
_SILENT_BEATS = 8
"""To a stopped process, one heartbeat in so many is sent: it does not read them."""
_CONNECT_S = 0.5
_HANDSHAKE_S = 5.0
_AGAIN_S = 0.1
_LONGEST_PAUSE_S = 8.0
"""Longest pause between attempts at a peer that answers but does not authenticate: each attempt stays in its queue."""
_FIN_S = 2.0
"""Longest time for closing to bring up connections on which FIN is still to be sent."""
_CLOSE_S = _FIN_S + 1.0
_FIN_RETRY_S = 10.0
"""Longest time for a connection that was down when its link was aborted to send the cause."""


class ConnectionPlace(NamedTuple):
    """Address at which a peer listens for its connections."""

    address: Sequence[str | int]
    """Name of the abstract unix socket, or host and port."""
    source: str
    """Address to connect from; "": any."""


class LineEnd(Protocol):
    """Callbacks to a link, made in the connections' loop; they must not block."""

    def on_connected(self) -> None:
        """Record that the connection is up. After a reconnection, messages sent before may be lost."""

    def on_disconnected(self, cause: str) -> None:
        """Record that the peer's host does not answer."""

    def on_peer_running(self, running: bool) -> None:
        """Record that the peer's process is stopped, or runs again."""

    def on_rank_failed(self, rank: int, cause: str) -> None:
        """Record that a rank has failed for good, the peer or another one; `cause` begins with its name."""

    def ended(self, cause: str) -> None:
        """Abort the link: the peer has aborted it while messages may be in flight."""

    def on_note_received(self, number: int, packet: bytes) -> int:
        """Process a note; return the number below which all notes have arrived."""

    def noted(self, below: int) -> None:
        """Release notes below this number, which the peer has."""


class _Line:
    """Control connection of one opening of the link to a peer."""

    def __init__(self, peer: int, place: ConnectionPlace, end: LineEnd, opening: int) -> None:
        self.peer, self.place, self.end, self.opening = peer, place, end, opening
        self.keeper: asyncio.Task[None] | None = None
        self.admitted: asyncio.Queue[socket.socket] = asyncio.Queue()
        """Authenticated connections from a peer that connects."""
        self.writer: asyncio.StreamWriter | None = None
        """None while the connection is down."""
        self.received_s = 0.0
        self.runs = True
        self.reachable = True
        self.over = False
        """True once the peer has sent FIN, or has failed."""
        self.failure_sent = False
        self.failures: list[RankFailed] = []
        """Failures to send first once the connection is up."""
        self.pending_fin: Fin | None = None
        """FIN to send once the connection is up; nothing else is left to send then."""

    def send(self, message: LineMessage) -> None:
        if self.writer is not None:
            self.writer.write(packed(message) + b"\n")
        elif isinstance(message, RankFailed):
            self.failures.append(message)


class ControlConnections:
    """Control connections of one rank."""

    def __init__(
        self,
        rank: int,
        name: Callable[[int], str],
        job: bytes,
        secret: bytes,
        listeners: Sequence[socket.socket],
        *,
        propagate_failures: bool = True,
        loop: ConnectionLoop | None = None,
    ) -> None:
        """`name`: returns the name of a rank for messages. `job`, `secret`: of the job. `listeners`: owned by this
        object from now on. `propagate_failures`: whether a failed rank ends all links of all ranks, or only its own.
        `loop`: of all connections of the rank; None: a new one.
        """
        self._propagate_failures = propagate_failures
        self._rank, self._name, self._job, self._listeners = rank, name, job, list(listeners)
        self._secret = hashlib.sha256(b"lines" + secret).digest()  # or a delegate's connection would do for a line
        self._lines: dict[int, _Line] = {}
        """By peer."""
        self._finishing: list[_Line] = []
        """Connections of ended openings, on which the cause is still to be sent."""
        self._failed_ranks: set[int] = set()
        """Ranks that have failed for good."""
        self._loop = ConnectionLoop() if loop is None else loop
        self._served: Future[None] | None = None
        self._closing = asyncio.Event()
        self._acceptor = Acceptor(self._secret, _HANDSHAKE_S, self._admit)
        self._connections: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        # Weak: a registered handler cannot be removed again, and would keep this object alive.
        leave = weakref.WeakMethod(self._leave_to_the_parent)
        os.register_at_fork(after_in_child=lambda: (bound := leave()) and bound())

    def begin(self) -> None:
        """Bring up all connections added before or later."""
        self._served = self._loop.begin(self._run())

    # These return at once; any thread may call them.

    def listen(self, listener: socket.socket) -> None:
        """Accept connections on this listener, too."""
        self._loop.call(functools.partial(self._listen, listener))

    def add(self, peer: int, place: ConnectionPlace, end: LineEnd, opening: int = 1) -> None:
        """Bring up the connection of this opening of a link. The connection of an earlier opening must have been
        removed.
        """
        self._loop.call(functools.partial(self._add, _Line(peer, place, end, opening)))

    def remove(self, end: LineEnd, cause: str | None = None) -> None:
        """Send Fin(`cause`) and close the connection."""
        self._loop.call(functools.partial(self._remove, end, cause))

    def send(self, end: LineEnd, message: LineMessage) -> None:
        """Send a message if the connection is up; otherwise drop it, unless it reports a failure."""
        self._loop.call(functools.partial(self._send, end, message))

    def fail(self, cause: str) -> None:
        """Report to all peers that this rank ends with an error; they pass it on."""
        self._loop.call(functools.partial(self._fail, cause))

    def close(self) -> None:
        """Send FIN to all peers and end all connections. May be called twice."""
        self._loop.call(self._closing.set)
        self._loop.end(self._served, _CLOSE_S)
        for listener in self._listeners:
            listener.close()

    async def _run(self) -> None:
        try:
            await self._serve()
        except Exception:
            logger.exception(
                "internal error in the lines of rank %d; control messages take the host path alone", self._rank
            )

    async def _serve(self) -> None:
        for listener in self._listeners:
            self._acceptor.listen(listener)
        beat = asyncio.ensure_future(self._beat())
        await self._closing.wait()
        keepers = [line.keeper for line in (*self._lines.values(), *self._finishing) if line.keeper is not None]
        for line in self._lines.values():
            line.send(Fin())
        # Without FIN, a peer would take the end of this process for a failure. So connections that are down get a
        # moment to come up.
        if coming_up := [line for line in self._lines.values() if line.keeper is not None and line.writer is None]:
            for line in coming_up:
                line.pending_fin = Fin()
            await asyncio.wait([line.keeper for line in coming_up if line.keeper is not None], timeout=_FIN_S)
        self._acceptor.close()
        for task in (beat, *keepers):
            task.cancel()
        await asyncio.wait([beat, *keepers])

    def _listen(self, listener: socket.socket) -> None:
        self._listeners.append(listener)
        self._acceptor.listen(listener)

    def _add(self, line: _Line) -> None:
        assert line.peer not in self._lines, f"there is a line to rank {line.peer} already"
        self._failed_ranks.discard(line.peer)  # or there would be no link to it
        self._lines[line.peer] = line
        line.keeper = asyncio.ensure_future(self._keep(line))

    def _remove(self, end: LineEnd, cause: str | None) -> None:
        line = self._line_of(end)
        if line is None:
            return
        assert line.keeper is not None
        del self._lines[line.peer]
        fin = Fin(None if cause is None else plain_text(cause)[:NOTE_NBYTES])
        line.send(fin)
        line.keeper.add_done_callback(lambda _: self._forget(line))
        # The peer must learn the cause even if the connection is down just now: it may wait for a message of the link.
        if line.writer is None and cause is not None and not line.keeper.done():
            line.pending_fin = fin
            self._finishing.append(line)
            self._loop.loop.call_later(_FIN_RETRY_S, line.keeper.cancel)
        else:
            line.keeper.cancel()  # what has been said still leaves

    def _forget(self, line: _Line) -> None:
        if line in self._finishing:
            self._finishing.remove(line)
        while not line.admitted.empty():
            line.admitted.get_nowait().close()

    def _send(self, end: LineEnd, message: LineMessage) -> None:
        if (line := self._line_of(end)) is not None:
            line.send(message)

    def _line_of(self, end: LineEnd) -> _Line | None:
        return next((line for line in self._lines.values() if line.end is end), None)

    async def _admit(self, purpose: Purpose, connection: socket.socket) -> None:
        lines, wanted = (*self._lines.values(), *self._finishing), (purpose.source, purpose.opening)
        line = next((line for line in lines if (line.peer, line.opening) == wanted), None)
        if line is None or (purpose.job, purpose.target) != (self._job, self._rank):
            raise HandshakeError(HandshakeRefusal.MISDIRECTED, f"rank {self._rank} has no such line")
        line.admitted.put_nowait(connection)
        if line.writer is not None:  # what the peer has given up
            line.writer.transport.abort()

    async def _keep(self, line: _Line) -> None:
        """Keep one connection up until its link is closed or has failed."""
        backoff = Backoff(_AGAIN_S, _LONGEST_PAUSE_S)
        while not line.over:
            try:
                reached = await self._reach(line.place) if line.admitted.empty() else None
            except ConnectionRefusedError:
                if not line.admitted.empty():  # which the peer has made before: its FIN may be on it
                    continue
                # Both processes are ending, and the peer was first.
                if self._closing.is_set():
                    return
                self._on_failure(line.peer, f"{self._name(line.peer)} is gone: its process has ended")
                return
            except (OSError, asyncio.TimeoutError) as cause:
                # A reset is the answer of a host whose process is just ending: the next attempt is refused.
                if not isinstance(cause, ConnectionResetError):
                    line.reachable = False
                    # Not a failure: the host may be cut off for a moment. The link's grace period decides.
                    line.end.on_disconnected(f"{cause}" or f"it did not answer within {_CONNECT_S:g} s")
                await asyncio.sleep(_AGAIN_S)
                continue
            try:
                connection = await self._proven(line, reached, backoff.pause_s)
            except (HandshakeError, asyncio.TimeoutError) as cause:
                logger.debug("line %d<->%d: %s", self._rank, line.peer, cause)
                await asyncio.sleep(_AGAIN_S)
                backoff.next_s()
                continue
            backoff.reset()
            await self._carry(line, connection)

    async def _reach(self, place: ConnectionPlace) -> socket.socket:
        """Connect to a peer.

        Raises ConnectionRefusedError if its process has ended, ConnectionResetError if it is ending, another OSError or
        TimeoutError if its host does not answer.
        """
        shared = len(place.address) == 1
        family = socket.AF_UNIX if shared else socket.AF_INET6 if ":" in str(place.address[0]) else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        self._connections.add(connection)
        connection.setblocking(False)
        address = "\0" + str(place.address[0]) if shared else (place.address[0], place.address[1])
        try:
            if not shared and place.source:
                connection.bind((place.source, 0))
            await asyncio.wait_for(self._loop.loop.sock_connect(connection, address), _CONNECT_S)
        except BaseException:
            connection.close()
            raise
        return connection

    async def _proven(self, line: _Line, reached: socket.socket | None, patience_s: float) -> socket.socket:
        """Return an authenticated connection. The lower rank authenticates the connection that it has made; the higher
        one waits for it.

        `reached`: the lower rank's connection. Raises HandshakeError, or TimeoutError if the peer makes none.
        """
        # Both ends connect, to find out whether the peer's process listens; one connection, the lower rank's, is kept.
        if reached is None or self._rank > line.peer:
            if reached is not None:
                reached.close()
            connection = await asyncio.wait_for(line.admitted.get(), patience_s)
        else:
            connection = reached
            session = secrets.token_bytes(handshake.SESSION_NBYTES)
            purpose = Purpose(self._job, self._rank, line.peer, session, 0, 1, opening=line.opening)
            try:
                await handshake.connect(connection, self._secret, purpose, _HANDSHAKE_S)
            except BaseException:
                connection.close()
                raise
        self._connections.add(connection)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            # Keepalives detect a dead host on an idle connection, TCP_USER_TIMEOUT on one with unacknowledged data.
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
                connection.setsockopt(socket.IPPROTO_TCP, option, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREACHABLE_S * 1e3))
        return connection

    async def _carry(self, line: _Line, connection: socket.socket) -> None:
        """Serve the connection until it breaks."""
        reader, line.writer = await asyncio.open_connection(sock=connection, limit=LINE_NBYTES)
        line.received_s, line.reachable = time.monotonic(), True
        try:
            for failed in line.failures:
                line.send(failed)
            line.failures.clear()
            if line.pending_fin is not None:
                line.send(line.pending_fin)
                line.over = True
                return
            line.end.on_connected()
            while packet := await reader.readline():
                line.received_s = time.monotonic()
                self._take(line, decode_line(packet))
        except (OSError, ValueError) as cause:
            logger.debug("line %d<->%d: %s", self._rank, line.peer, cause)
        finally:
            line.writer.close()
            line.writer = None
            self._note_runs(line, True)

    def _take(self, line: _Line, message: LineMessage) -> None:
        if isinstance(message, LinkNote):
            line.send(LinkNoteAck(line.end.on_note_received(message.number, message.text.encode())))
        elif isinstance(message, LinkNoteAck):
            line.end.noted(message.below)
        elif isinstance(message, RankFailed):
            self._on_failure(message.rank, message.cause)
        elif isinstance(message, Fin):
            line.over = True
            if message.cause is not None:
                line.end.ended(f"{self._name(line.peer)} has ended it: {message.cause}")

    async def _beat(self) -> None:
        last_s, beats = time.monotonic(), 0
        while True:
            await asyncio.sleep(BEAT_S)
            now_s, beats = time.monotonic(), beats + 1
            late, last_s = now_s > last_s + 2 * BEAT_S, now_s
            for line in self._lines.values():
                if line.writer is None:
                    continue
                if late:  # this process did not run: it could not receive
                    line.received_s = now_s
                self._note_runs(line, now_s <= line.received_s + SILENT_S)
                # A stopped process reads nothing: frequent heartbeats would fill its socket's buffer.
                if line.runs or beats % _SILENT_BEATS == 0:
                    line.send(Beat())

    def _note_runs(self, line: _Line, running: bool) -> None:
        if line.runs != running:
            line.runs = running
            line.end.on_peer_running(running)

    def _fail(self, cause: str) -> None:
        for line in self._lines.values():
            if not line.reachable:
                self._on_failure(line.peer, f"{self._name(line.peer)} is gone, or cut off: its host does not answer")
        self._on_failure(self._rank, f"{self._name(self._rank)} ended with an error: {plain_text(cause)}"[:NOTE_NBYTES])

    def _on_failure(self, rank: int, cause: str) -> None:
        """Report the failure of a rank to links and peers before any of its consequences, so that it counts as the
        cause.

        A link that has been opened since the rank failed is not notified again.
        """
        notified = [line for line in self._lines.values() if rank not in self._failed_ranks and not line.failure_sent]
        if not self._propagate_failures:
            notified = [line for line in notified if line.peer == rank]
        self._failed_ranks.add(rank)
        for line in notified:
            line.failure_sent = True
            line.send(RankFailed(rank, cause))
            line.over = line.over or line.peer == rank
        # Peers first, then our own links: their errors end this process, and the peers must have the cause by then.
        for line in notified:
            line.end.on_rank_failed(rank, cause)

    def _leave_to_the_parent(self) -> None:
        """Close inherited listeners and connections in a forked child: they would stay open after the parent's end."""
        for each in (*self._listeners, *self._connections):
            each.close()
