# SPDX-License-Identifier: Apache-2.0
"""Lines: a plain connection per link between its two training processes, beside both paths and the delegates.

A line carries what must get through whatever becomes of the paths and of the job's store: notes, and which rank was
lost. It also shows how the peer is: a process that dies ends its connections, and nothing listens in its place; one
that is stopped no longer beats, but its kernel still answers; a host that vanishes acknowledges nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from adaptra_megatron.transport import handshake
from adaptra_megatron.transport.gate import Gate
from adaptra_megatron.transport.handshake import HandshakeError, Purpose, Refusal
from adaptra_megatron.transport.line_messages import Beat, Bye, LineMessage, Lost, NoteCame, Noted, decode_line
from adaptra_megatron.transport.notes import NOTE_NBYTES
from adaptra_megatron.transport.tagged_json import packed

logger = logging.getLogger("adaptra_megatron.transport.lines")

BEAT_S = 0.5
SILENT_S = 2.0
"""Without a beat for so long, a process is taken to be stopped."""
UNREACHABLE_S = 3.0
"""A host that acknowledges nothing for so long is taken to have vanished."""
_SILENT_BEATS = 8
"""Of so many beats, one is sent to a process that does not read them."""
_CONNECT_S = 0.5
_HANDSHAKE_S = 5.0
_AGAIN_S = 0.1
_LONGEST_PAUSE_S = 8.0
"""Between two looks at a peer that answers, and does not bring up the line: each stays in its kernel's queue."""
_CLOSE_S = 2.0


class Place(NamedTuple):
    """Where a peer listens for its lines."""

    address: Sequence[str | int]
    """Name of the abstract unix socket, or host and port."""
    source: str
    """Address to connect from; "" for any."""


class LineEnd(Protocol):
    """A link as its line knows it. Called by the lines' thread, which is not to be kept waiting."""

    def line_up(self) -> None:
        """The line has come up, maybe again: what was said on it before may be lost."""

    def line_down(self, cause: str) -> None:
        """The peer's host does not answer."""

    def peer_runs(self, running: bool) -> None:
        """The peer's process has stopped running, or runs again."""

    def lost(self, stage: int, cause: str) -> None:
        """A stage of the pipeline, the peer or another one, is gone for good; `cause` begins with its name."""

    def note_came(self, number: int, packet: bytes) -> int:
        """A note has come. Returns below which number all notes have."""

    def noted(self, below: int) -> None:
        """The peer has all notes below this number."""


class _Line:
    """One peer's."""

    def __init__(self, peer: int, place: Place) -> None:
        self.peer, self.place = peer, place
        self.end: LineEnd
        self.admitted: asyncio.Queue[socket.socket] = asyncio.Queue()
        """Proven connections of a peer that connects."""
        self.writer: asyncio.StreamWriter | None = None
        """None while the line is down."""
        self.heard_s = 0.0
        self.runs = True
        self.reachable = True
        self.over = False
        """Whether the peer has said good-bye, or is gone."""

    def say(self, message: LineMessage) -> None:
        if self.writer is not None:
            self.writer.write(packed(message) + b"\n")


class Lines:
    """All lines of one stage, and the thread that keeps them."""

    def __init__(
        self,
        stage: int,
        name: Callable[[int], str],
        pipeline: bytes,
        secret: bytes,
        listeners: Sequence[socket.socket],
        places: Mapping[int, Place],
    ) -> None:
        """`name`: of a stage, in messages. `secret`: the job's. `listeners`: become the lines'. `places`: by peer."""
        self._stage, self._name, self._pipeline, self._listeners = stage, name, pipeline, listeners
        self._secret = hashlib.sha256(b"lines" + secret).digest()  # or a delegate's connection would do for a line
        self._lines = {peer: _Line(peer, place) for peer, place in places.items()}
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._told_lost = False
        self._connections: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._thread = threading.Thread(target=self._run, name="adaptra-lines", daemon=True)
        leave = weakref.WeakMethod(self._leave_to_the_parent)
        os.register_at_fork(after_in_child=lambda: (bound := leave()) and bound())

    def begin(self, ends: Mapping[int, LineEnd]) -> None:
        """Bring the lines up. `ends`: by peer."""
        for peer, line in self._lines.items():
            line.end = ends[peer]
        self._thread.start()

    def say(self, peer: int, message: LineMessage) -> None:
        """Send a message where the line is up. Returns at once; for any thread."""
        self._call(functools.partial(self._lines[peer].say, message))

    def fail(self, cause: str) -> None:
        """Tell all stages of the pipeline that this one ends with an error. Returns at once; for any thread."""
        self._call(functools.partial(self._fail, cause))

    def close(self) -> None:
        """Say good-bye, and end. Safe to call twice."""
        if self._thread.ident is None:
            self._loop.close()
        self._call(self._closing.set)
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_S)
        for listener in self._listeners:
            listener.close()

    def _call(self, function: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # it has been closed
            self._loop.call_soon_threadsafe(function)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except Exception:
            logger.exception("the lines of stage %d stopped by a bug", self._stage)
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        gate = Gate(self._secret, _HANDSHAKE_S, self._admit)
        for listener in self._listeners:
            gate.listen(listener)
        tasks = [asyncio.ensure_future(self._keep(line)) for line in self._lines.values()]
        tasks.append(asyncio.ensure_future(self._beat()))
        await self._closing.wait()
        for line in self._lines.values():
            line.say(Bye())
        gate.close()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    async def _admit(self, purpose: Purpose, connection: socket.socket) -> None:
        line = self._lines.get(purpose.source)
        if line is None or (purpose.pipeline, purpose.target) != (self._pipeline, self._stage):
            raise HandshakeError(Refusal.MISDIRECTED, f"stage {self._stage} has no such line")
        line.admitted.put_nowait(connection)
        if line.writer is not None:  # what the peer has given up
            line.writer.transport.abort()

    async def _keep(self, line: _Line) -> None:
        """Bring a line up, again and again, until it is over."""
        pause_s = _AGAIN_S
        while not line.over:
            try:
                connection = await self._reach(line.place)
            except ConnectionRefusedError:
                self._lose(line.peer, f"{self._name(line.peer)} is gone: its process has ended")
                return
            except (OSError, asyncio.TimeoutError) as cause:
                line.reachable = False
                line.end.line_down(f"{cause}" or f"it did not answer within {_CONNECT_S:g} s")
                await asyncio.sleep(_AGAIN_S)
                continue
            try:
                connection = await self._proven(line, connection, pause_s)
            except (HandshakeError, asyncio.TimeoutError) as cause:
                logger.debug("line %d<->%d: %s", self._stage, line.peer, cause)
                await asyncio.sleep(_AGAIN_S)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            pause_s = _AGAIN_S
            await self._carry(line, connection)

    async def _reach(self, place: Place) -> socket.socket:
        """A connection to a peer. Raises ConnectionRefusedError where its process is gone, another OSError or
        TimeoutError where its host does not answer."""
        shared = len(place.address) == 1
        family = socket.AF_UNIX if shared else socket.AF_INET6 if ":" in str(place.address[0]) else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        self._connections.add(connection)
        connection.setblocking(False)
        address = "\0" + str(place.address[0]) if shared else (place.address[0], place.address[1])
        try:
            if not shared and place.source:
                connection.bind((place.source, 0))
            await asyncio.wait_for(self._loop.sock_connect(connection, address), _CONNECT_S)
        except BaseException:
            connection.close()
            raise
        return connection

    async def _proven(self, line: _Line, connection: socket.socket, patience_s: float) -> socket.socket:
        """The line's connection: the lower stage proves the one that it has made, which the higher one waits for.

        Raises HandshakeError, or TimeoutError where the peer has not made one.
        """
        if self._stage > line.peer:
            connection.close()
            connection = await asyncio.wait_for(line.admitted.get(), patience_s)
        else:
            purpose = Purpose(
                self._pipeline, self._stage, line.peer, secrets.token_bytes(handshake.SESSION_NBYTES), 0, 1
            )
            try:
                await handshake.connect(connection, self._secret, purpose, _HANDSHAKE_S)
            except BaseException:
                connection.close()
                raise
        self._connections.add(connection)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
                connection.setsockopt(socket.IPPROTO_TCP, option, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREACHABLE_S * 1e3))
        return connection

    async def _carry(self, line: _Line, connection: socket.socket) -> None:
        """Until the line breaks."""
        reader, line.writer = await asyncio.open_connection(sock=connection, limit=4 * NOTE_NBYTES)
        line.heard_s, line.reachable = time.monotonic(), True
        line.end.line_up()
        try:
            while packet := await reader.readline():
                line.heard_s = time.monotonic()
                self._take(line, decode_line(packet))
        except (OSError, ValueError) as cause:
            logger.debug("line %d<->%d: %s", self._stage, line.peer, cause)
        finally:
            line.writer.close()
            line.writer = None
            self._note_runs(line, True)

    def _take(self, line: _Line, message: LineMessage) -> None:
        if isinstance(message, NoteCame):
            line.say(Noted(line.end.note_came(message.number, message.text.encode())))
        elif isinstance(message, Noted):
            line.end.noted(message.below)
        elif isinstance(message, Lost):
            self._lose(message.stage, message.cause)
        elif isinstance(message, Bye):
            line.over = True

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
                    line.heard_s = now_s
                self._note_runs(line, now_s <= line.heard_s + SILENT_S)
                if line.runs or beats % _SILENT_BEATS == 0:
                    line.say(Beat())

    def _note_runs(self, line: _Line, running: bool) -> None:
        if line.runs != running:
            line.runs = running
            line.end.peer_runs(running)

    def _fail(self, cause: str) -> None:
        for line in self._lines.values():
            if not line.reachable:
                self._lose(line.peer, f"{self._name(line.peer)} is gone, or cut off: its host does not answer")
        self._lose(self._stage, f"{self._name(self._stage)} ended with an error: {cause}"[:NOTE_NBYTES])

    def _lose(self, stage: int, cause: str) -> None:
        """Pass on that a stage is lost, before anything else comes of it: of several, the first is the cause."""
        if self._told_lost:
            return
        self._told_lost = True
        for line in self._lines.values():
            line.say(Lost(stage, cause))
            line.over = line.over or line.peer == stage
        for line in self._lines.values():
            line.end.lost(stage, cause)

    def _leave_to_the_parent(self) -> None:
        """In a forked child: what it held open would outlive the parent."""
        for each in (*self._listeners, *self._connections):
            each.close()
