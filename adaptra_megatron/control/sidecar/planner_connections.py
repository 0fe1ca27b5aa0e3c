# SPDX-License-Identifier: Apache-2.0
"""Connect a planner process: by a channel with its rank, and by TCP with all other ranks, which send it reports.

The channel is a unix socket. Each frame is a message and raw bytes (`along`). If the channel ends, the other process
has ended. Over TCP, ranks send reports and receive decisions, which are in the job's store, too, for ranks without a
connection. This module must not import torch, since planner processes import it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import queue
import random
import select
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from adaptra_megatron.common.backoff import Backoff
from adaptra_megatron.common.child_process import ChildProcess
from adaptra_megatron.common.handshake import (
    JOB_NBYTES,
    MOST_UNPROVEN,
    SESSION_NBYTES,
    Acceptor,
    HandshakeError,
    HandshakeRefusal,
    Purpose,
    connect,
    receive_exactly,
    send_descriptor,
    tune_connection,
)
from adaptra_megatron.common.log import logger_of
from adaptra_megatron.common.typed_messages import Decoder, TaggedMessage, encoded
from adaptra_megatron.control.decisions import MAX_DECISION_NBYTES
from adaptra_megatron.control.measurements import MAX_REPORT_NBYTES, StageMeasurement, measurement_of
from adaptra_megatron.telemetry.events import Event, decode

_MOST_NBYTES = 1 << 26
_MOST_ALONG_NBYTES = 1 << 30
_HEAD = struct.Struct("<II")
"""Bytes of the message, and of the raw bytes after it."""
_MOST_UNSENT_NBYTES = 1 << 20
"""Number of bytes queued for a process that does not read; then further decisions are dropped."""


class ChannelEndedError(ConnectionError):
    """The other process has ended, or sent something invalid."""


class ChannelClosedError(ChannelEndedError):
    """The other process has closed its end."""


Received = TypeVar("Received", bound=TaggedMessage)


def packed(message: TaggedMessage, along: Sequence[bytes] = ()) -> bytes:
    """Return the frame of a message. `along`: raw bytes to append."""
    body = encoded(message)
    return b"".join((_HEAD.pack(len(body), sum(map(len, along))), body, *along))


def send(channel: socket.socket, message: TaggedMessage, along: Sequence[bytes] = ()) -> None:
    """Send a message and raw bytes. Raises ChannelEndedError if the other process has ended, or does not read them
    within the channel's timeout."""
    try:
        channel.sendall(packed(message, along))
    except OSError as cause:
        raise ChannelEndedError(f"does not listen: {cause}") from cause


class SidecarMessages(Generic[Received]):
    """Decoder of all messages of one channel in one direction."""

    def __init__(self, kinds: Any) -> None:
        """`kinds`: the type of the messages, or a union of types."""
        self._decode: Decoder[Received] = Decoder(kinds, _MOST_NBYTES)

    def receive(self, channel: socket.socket) -> tuple[Received, bytes]:
        """Return the next message and its raw bytes, on a blocking channel. Raises ChannelEndedError, also if none
        comes within the timeout."""
        try:
            body_nbytes, along_nbytes = _sizes(_exactly(channel, _HEAD.size))
            return self._message(_exactly(channel, body_nbytes)), _exactly(channel, along_nbytes)
        except TimeoutError as cause:
            raise ChannelEndedError(f"did not answer within {channel.gettimeout():g} s") from cause
        except ChannelEndedError:
            raise
        except OSError as cause:
            raise ChannelEndedError(str(cause)) from cause

    async def receive_async(self, channel: socket.socket) -> tuple[Received, bytes]:
        """Return the next message and its raw bytes, on a channel that does not block. Raises ChannelEndedError."""
        try:
            body_nbytes, along_nbytes = _sizes(await receive_exactly(channel, _HEAD.size))
            body = await receive_exactly(channel, body_nbytes)
            return self._message(body), await receive_exactly(channel, along_nbytes)
        except OSError as cause:
            raise ChannelEndedError(str(cause)) from cause

    def _message(self, body: bytes) -> Received:
        try:
            return self._decode(body)
        except ValueError as cause:
            raise ChannelEndedError(f"sent an invalid message: {cause}") from cause


class Outbox:
    """Messages of several threads to a sidecar process, and one thread's wait for its answers. Thread-safe; only
    `wait_readable` waits.

    What the process does not read at once is kept. It is sent with the next message, or while `wait_readable` waits.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        """Held for system calls that never wait."""
        self._unsent = bytearray()
        self._interjected: list[Callable[[], object]] = []
        self._waits = False
        """True while a thread is in `wait_readable`, which calls what is interjected."""
        # A socket pair, because that thread sleeps in one poll() for this and for the channel.
        self._waker, self._woken = socket.socketpair()

    def has_room(self) -> bool:
        """Return whether messages that can be spared are to be put: not if too much is unsent. Raises
        ChannelEndedError if the process has ended."""
        with self._lock:
            self._send_at_once()
            return len(self._unsent) <= _MOST_UNSENT_NBYTES

    def put(self, message: TaggedMessage, along: Sequence[bytes] = ()) -> None:
        """Send a message and raw bytes, or keep them. Raises ChannelEndedError if the process has ended."""
        frame = packed(message, along)
        with self._lock:
            self._unsent += frame
            self._send_at_once()

    def interject(self, work: Callable[[], object]) -> bool:
        """Have the thread that is in `wait_readable` call `work` now, and return True; return False if none is."""
        with self._lock:
            if self._waits:
                if not self._interjected:  # one byte at a time: there is always room for it
                    self._waker.send(b"+")
                self._interjected.append(work)
            return self._waits

    def wait_readable(self) -> None:
        """Wait until the process has sent something or has ended, and send meanwhile what it reads. Raises
        ChannelEndedError once the channel's timeout is over."""
        timeout_s = self._channel.gettimeout()
        assert timeout_s is not None, "this would wait without end"
        until_s, events = time.monotonic() + timeout_s, 0
        while not events & ~select.POLLOUT:
            ready = self._poll(max(0.0, until_s - time.monotonic()))
            if not ready:
                raise ChannelEndedError(f"did not answer within {timeout_s:g} s")
            events = ready.get(self._channel.fileno(), 0)
            if not events & (select.POLLHUP | select.POLLERR):
                with self._lock:
                    self._send_at_once()

    def _poll(self, within_s: float) -> dict[int, int]:
        """Wait for an event of the channel or of `interject`, and call what is interjected. Return the events by file
        descriptor."""
        waiting = select.poll()
        with self._lock:
            waiting.register(self._channel, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            waiting.register(self._woken, select.POLLIN)
            self._waits = True
        ready = dict(waiting.poll(1e3 * within_s))
        with self._lock:
            self._waits = False
            interjected, self._interjected = self._interjected, []
            if interjected:
                self._woken.recv(1)
        for work in interjected:
            work()
        return ready

    def close(self) -> None:
        """End what `interject` needs. The channel stays open."""
        with self._lock:
            self._waits = False
            self._waker.close()
            self._woken.close()

    def _send_at_once(self) -> None:
        """Send what the channel takes now. The caller holds `_lock`."""
        writable = select.poll()
        try:
            writable.register(self._channel, select.POLLOUT)
            # Nobody else writes, so `send` does not wait once there is room.
            while self._unsent and writable.poll(0):
                del self._unsent[: self._channel.send(self._unsent)]
        except (OSError, ValueError) as cause:  # ValueError: the channel is closed
            raise ChannelEndedError(f"does not listen: {cause}") from cause


class Sidecar(ChildProcess):
    """A sidecar process that serves a listener of its rank, and the channel of messages to it."""

    def __init__(self, module: str, listener: socket.socket, begin: TaggedMessage, timeout_s: float) -> None:
        """Start the process (see ChildProcess). `begin`: its first message. `timeout_s`: of the channel."""
        super().__init__(module, socket.SOCK_STREAM)
        self.channel.settimeout(timeout_s)
        with contextlib.suppress(OSError):  # it has ended: seen where the channel is used next
            send_descriptor(self.channel, listener.fileno())
            send(self.channel, begin)

    def close(self) -> str:
        """End the process. Return how it ended."""
        with contextlib.suppress(OSError):  # it has ended by itself
            self.channel.shutdown(socket.SHUT_RDWR)
        return self.end(1.0)


class HostedChannels:
    """Channels of one thread of this rank to a second service in its planner processes, one per process.

    The process's end of a channel is sent to it right after its first message. A channel ends with its process, and
    the next process gets another. Thread-safe.
    """

    def __init__(self) -> None:
        self._made: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self.closed = False
        """True once no planner process follows."""

    def connect(self, process: Sidecar) -> None:
        """Make the channel to a new planner process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs, contextlib.suppress(OSError):  # it has ended: seen where the channel is used next
            send_descriptor(process.channel, theirs.fileno())
        self._made.put(ours)

    def take(self) -> socket.socket | None:
        """Return the channel to the latest planner process, which the caller owns; None if it has been taken."""
        latest = None
        while not self._made.empty():
            if latest is not None:
                latest.close()
            latest = self._made.get()
        return latest


def _sizes(head: bytes) -> tuple[int, int]:
    sizes: tuple[int, int] = _HEAD.unpack(head)
    if sizes[0] > _MOST_NBYTES or sizes[1] > _MOST_ALONG_NBYTES:
        raise ChannelEndedError(f"announces {sizes[0]} and {sizes[1]} bytes")
    return sizes


def _exactly(channel: socket.socket, nbytes: int) -> bytes:
    found = bytearray(nbytes)
    rest = memoryview(found)
    while rest:
        received = channel.recv_into(rest)
        if not received:
            raise ChannelClosedError("ended")
        rest = rest[received:]
    return bytes(found)


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line for the log."""

    module: str
    level: int
    text: str


def log_lines(lines: tuple[Line, ...], word: str = "") -> None:
    """Log lines of a sidecar process of this rank. `word`: prefix of each."""
    for line in lines:
        logger_of(line.module).log(line.level, "%s%s", word, line.text)


def log_events(events: tuple[str, ...], log: Callable[[Event], None]) -> None:
    """Pass the events of a sidecar process of this rank to its telemetry."""
    for event in events:
        log(decode(event).event)


HEAD = struct.Struct("<QI")
"""Header of a report to the planner process, or of a decision from it: iteration, bytes."""

PLANNER_KEY = "planner"
"""Key in the job's store: the address that the other ranks connect to."""

MOST_AWAITED = 8
"""Maximum number of iterations kept open for missing reports: ranks of a replica are at most two iterations apart."""


class Address(NamedTuple):
    """Address at which the planner process listens."""

    host: str
    port: int


address_of: Decoder[Address] = Decoder(Address, 1 << 10)
"""Decode an address. Raises ValueError if it is malformed."""
Round = Sequence[StageMeasurement]
"""Measurements of all ranks in one iteration, by pipeline and stage."""


def framed(iteration: int, body: bytes) -> bytes:
    """Return the frame of a report or a decision."""
    return HEAD.pack(iteration, len(body)) + body


class Reported(NamedTuple):
    """Reports of an iteration that is complete, or not waited for any longer."""

    iteration: int
    reports: Mapping[int, bytes]
    """By rank: an encoded `StageMeasurement`."""
    lost: Sequence[int]
    """Ranks whose reports are missing for good."""


class Gathering:
    """Reports of all ranks that one planner decides for.

    An iteration is over once each rank has reported it or a later one: ranks report in ascending order, so a missing
    report was lost, with a connection or with an earlier planner process. An iteration is also over once MOST_AWAITED
    later ones are awaited: a rank that cannot connect, and never reports, must not fill the memory.
    """

    def __init__(self, reporters: Collection[int]) -> None:
        self._reporters = reporters
        self._reports: dict[int, dict[int, bytes]] = defaultdict(dict)
        self._latest = dict.fromkeys(reporters, -1)
        """The latest iteration that each rank has reported."""
        self._awaited: deque[int] = deque()
        self._behind: set[int] = set()
        """Ranks that have not reported the first awaited iteration, or a later one."""
        self._over = -1
        """The latest iteration that has been taken."""

    @property
    def awaited(self) -> int | None:
        """The earliest iteration without a decision; None if there is none."""
        return self._awaited[0] if self._awaited else None

    @property
    def missing(self) -> Sequence[int]:
        """Ranks that have not reported that iteration."""
        return sorted(self._behind)

    def expect(self, iteration: int) -> None:
        """Add the next iteration to decide on. Call in ascending order."""
        self._awaited.append(iteration)
        if len(self._awaited) == 1:
            self._look_for_first()

    def add(self, rank: int, iteration: int, report: bytes) -> bool:
        """Keep a report. Repeated ones are ignored. Return whether an iteration is over."""
        if iteration > self._over:
            self._reports[iteration][rank] = report
        self._latest[rank] = max(iteration, self._latest[rank])
        if self._awaited and iteration >= self._awaited[0]:
            self._behind.discard(rank)
        return self.over

    @property
    def over(self) -> bool:
        """Whether an awaited iteration is over."""
        return bool(self._awaited) and (not self._behind or len(self._awaited) > MOST_AWAITED)

    def take(self) -> list[Reported]:
        """Return all iterations that are over, and remove them."""
        taken = []
        while self.over:
            self._over = self._awaited.popleft()
            reports = self._reports.pop(self._over, {})
            lost = [rank for rank in self._reporters if rank not in reports]
            taken.append(Reported(self._over, reports, lost))
            self._look_for_first()
        for iteration in [earlier for earlier in self._reports if earlier <= self._over]:
            del self._reports[iteration]
        return taken

    def _look_for_first(self) -> None:
        if self._awaited:
            self._behind = {rank for rank, latest in self._latest.items() if latest < self._awaited[0]}


def round_of(reported: Reported) -> Round:
    """Decode the reports. Raises ValueError if one is malformed."""
    return sorted(map(measurement_of, reported.reports.values()), key=lambda one: (one.pipeline, one.stage))


HANDSHAKE_S = 10.0
"""Longest wait for the next message of a handshake."""


def purpose_of(place: str, rank: int, leader: int) -> Purpose:
    """Return the purpose of the connection of `rank`. `place`: prefix of the decisions' keys in the job's store."""
    name = hashlib.sha256(f"adaptra: reports of {place}".encode()).digest()[:JOB_NBYTES]
    return Purpose(name, rank, leader, bytes(SESSION_NBYTES), 0, 1)


class ReportServer:
    """Receives reports from ranks, which prove the job's secret, and sends decisions to all connected ranks.

    A rank reconnects if its connection is lost. If it has two, decisions take the later one.
    """

    def __init__(
        self, secret: bytes, place: str, reporters: Collection[int], reported: Callable[[int, int, bytes], object]
    ) -> None:
        """`reporters`: the ranks that it decides for; the lowest is the leader. `reported(rank, iteration,
        report)` takes in a report."""
        self._place, self._reporters, self._leader = place, frozenset(reporters), min(reporters)
        self._reported = reported
        # Once the leader has published its address, all ranks connect at once.
        self._acceptor = Acceptor(secret, HANDSHAKE_S, self._serve, max(MOST_UNPROVEN, len(reporters)))
        self._writers: dict[int, asyncio.StreamWriter] = {}

    def listen(self, listener: socket.socket) -> None:
        """Accept connections on a listening socket from now on."""
        self._acceptor.listen(listener)

    def send_all(self, iteration: int, decision: bytes) -> None:
        """Send a decision to all connected ranks; never waits."""
        frame = framed(iteration, decision)
        for writer in self._writers.values():
            if writer.transport.get_write_buffer_size() < _MOST_UNSENT_NBYTES:
                writer.write(frame)

    async def _serve(self, purpose: Purpose, connection: socket.socket) -> None:
        """Receive reports until the connection ends. Raises HandshakeError if it has another purpose."""
        rank = purpose.source
        if rank not in self._reporters or purpose != purpose_of(self._place, rank, self._leader):
            raise HandshakeError(HandshakeRefusal.MISDIRECTED, "this takes in reports of other ranks")
        tune_connection(connection)
        reader, writer = await asyncio.open_connection(sock=connection)
        self._writers[rank] = writer
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, OSError):
                while True:
                    iteration, nbytes = HEAD.unpack(await reader.readexactly(HEAD.size))
                    if nbytes > MAX_REPORT_NBYTES:
                        break
                    self._reported(rank, iteration, await reader.readexactly(nbytes))
        finally:
            if self._writers.get(rank) is writer:
                del self._writers[rank]
            writer.close()


logger = logger_of(__name__)

CONNECT_S = 10.0
"""Longest wait for a TCP connection: the leader listens before it publishes its address."""
CLIENT_HANDSHAKE_S = 60.0
"""Longest wait for the handshake: on a busy machine, a new planner process may have to start first."""
_PAUSE_S = (0.5, 1.5)
"""Seconds between two attempts to connect, at random so that ranks do not all connect at once. Doubled after each
failure."""
_MOST_DOUBLED = 32.0
"""Longest pause, as a multiple of the first one."""
_SEND_S = 1.0
"""Longest wait for a report to enter the kernel's buffer, which holds dozens."""
_PART_NBYTES = 1 << 16


class ReportLink:
    """A rank's connection to a sidecar process. For one thread, which never waits long: other threads connect.

    The latest reports are sent again over each new connection, since a new process has not seen them. If no connection
    can be made, the log says so once, and reports are lost.
    """

    def __init__(
        self,
        secret: bytes,
        purpose: Purpose,
        kept: int,
        wake: Callable[[], None],
        *,
        process: str = "planner process",
        effect: str = "Its replica keeps the plan that runs until there is one",
    ) -> None:
        """`kept`: number of reports that are sent again. `wake`: makes the thread call `keep`; called in any
        thread. `process`, `effect`: the peer, and the effect of a missing connection, as text for the log."""
        self._secret, self._purpose, self._wake = secret, purpose, wake
        self._process, self._effect = process, effect
        self._recent: deque[bytes] = deque(maxlen=kept)
        self._connection: socket.socket | None = None
        self._made: socket.socket | None = None
        """A new connection that is not in use yet."""
        self._making = False
        self._again_s, self._backoff = 0.0, Backoff(1.0, _MOST_DOUBLED)
        """Time of the next attempt, and the number of consecutive failures."""
        self._failure = ""
        """Address and error of the latest failed attempt."""
        self._failure_logged = False
        """Whether the log has said so since the last connection."""
        self._received = bytearray()
        self._closed = False

    @property
    def connection(self) -> socket.socket | None:
        """The socket; call `receive` when it is readable. None if there is no connection."""
        return self._connection

    def keep(self, address: Address) -> float | None:
        """Connect if need be. Return the seconds until the next call; None if no call is needed."""
        if self._connection is not None or self._making:
            return None
        if self._made is not None:
            self._connection, self._made = self._made, None
            self._backoff.reset()
            self._failure_logged = False
            for frame in list(self._recent):
                self._send(frame)
            return None
        if (rest_s := self._again_s - time.monotonic()) > 0.0:
            return rest_s
        self._making = True
        threading.Thread(target=self._make, args=(address,), name="adaptra-connecting", daemon=True).start()
        return None

    def report(self, iteration: int, report: bytes) -> None:
        """Send a report, now or over the next connection."""
        frame = framed(iteration, report)
        self._recent.append(frame)
        self._send(frame)
        # Not at the first failure: at the end of a job, the leader may end first.
        if self._backoff.failures > 1 and not self._failure_logged:
            self._failure_logged = True
            logger.warning(
                "rank %d cannot send its measurements: no connection to the %s of rank %d at %s. %s: allow TCP "
                "connections to that host between the job's hosts, or name another network by --adaptra-interface",
                *(self._purpose.source, self._process, self._purpose.target, self._failure, self._effect),
            )

    def receive(self) -> list[tuple[int, bytes]]:
        """Return the received decisions with their iterations. Call when the connection is readable."""
        assert self._connection is not None, "nothing can be readable"
        try:
            part = self._connection.recv(_PART_NBYTES)
        except OSError:
            part = b""
        if not part:
            self._lose()
        self._received += part
        found = []
        while len(self._received) >= HEAD.size:
            iteration, nbytes = HEAD.unpack_from(self._received)
            if nbytes > MAX_DECISION_NBYTES:
                self._lose()
                break
            if len(self._received) < HEAD.size + nbytes:
                break
            found.append((iteration, bytes(self._received[HEAD.size : HEAD.size + nbytes])))
            del self._received[: HEAD.size + nbytes]
        return found

    def close(self) -> None:
        """End the connection. A thread that is connecting ends within CONNECT_S + CLIENT_HANDSHAKE_S."""
        self._closed = True
        self._lose()
        if self._made is not None:
            self._made.close()

    def _send(self, frame: bytes) -> None:
        if self._connection is not None:
            try:
                self._connection.sendall(frame)
            except OSError:
                self._lose()

    def _lose(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        self._received.clear()

    def _make(self, address: Address) -> None:
        factor = 1.0
        try:
            connection = socket.create_connection(address, CONNECT_S)
            try:
                tune_connection(connection)
                connection.setblocking(False)
                asyncio.run(connect(connection, self._secret, self._purpose, CLIENT_HANDSHAKE_S))
            except BaseException:
                connection.close()
                raise
            connection.settimeout(_SEND_S)
            self._made = connection
            if self._closed:
                connection.close()
        except (OSError, HandshakeError) as cause:
            self._failure = f"{address.host}:{address.port} ({cause})"
            factor = self._backoff.next_s()
        self._again_s = time.monotonic() + random.uniform(*_PAUSE_S) * factor
        self._making = False
        self._wake()
