# SPDX-License-Identifier: Apache-2.0
"""Connect ranks to a sidecar process of another rank: reports of an iteration go there, and decisions come back.

Decisions are in the job's store as well: a rank that this does not reach looks there.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from adaptra_megatron.common.backoff import Backoff
from adaptra_megatron.common.handshake import (
    JOB_NBYTES,
    MOST_UNPROVEN,
    SESSION_NBYTES,
    Acceptor,
    HandshakeError,
    HandshakeRefusal,
    Purpose,
    connect,
    tune_connection,
)
from adaptra_megatron.common.log import logger_of
from adaptra_megatron.common.typed_messages import Decoder
from adaptra_megatron.control.decisions import MAX_DECISION_NBYTES
from adaptra_megatron.control.measurements import MAX_REPORT_NBYTES, StageMeasurement, measurement_of

HEAD = struct.Struct("<QI")
"""In front of a rank's report to the planner process, and of a decision that it passes on: iteration, and bytes."""

PLANNER_KEY = "planner"
"""In the job's store: the address to which ranks that follow connect."""

MOST_AWAITED = 8
"""Iterations kept open for reports that have not come: ranks of a replica are at most two apart."""


class Address(NamedTuple):
    """Address at which the planner process listens."""

    host: str
    port: int


address_of: Decoder[Address] = Decoder(Address, 1 << 10)
"""An address as it is in the store."""
Round = Sequence[StageMeasurement]
"""What all ranks measured in one iteration, by pipeline and stage."""


def framed(iteration: int, body: bytes) -> bytes:
    """A report, or a decision, as it travels."""
    return HEAD.pack(iteration, len(body)) + body


class Reported(NamedTuple):
    """Reports of an iteration that is over."""

    iteration: int
    reports: Mapping[int, bytes]
    """By rank: each a `StageMeasurement`, not looked at yet."""
    lost: Sequence[int]
    """Ranks whose reports do not come any more."""


class Gathering:
    """Reports of all ranks that are planned for together, for the planner process.

    An iteration is over once each rank has reported it, or a later one: ranks report in ascending order, so what is
    missing then was lost, with a connection or with the planner process before this. It is over as well, without the
    reports that are missing, once MOST_AWAITED later ones are awaited: a rank that never reports, because it cannot
    connect, costs plans and not memory.
    """

    def __init__(self, reporters: Collection[int]) -> None:
        self._reporters = reporters
        self._reports: dict[int, dict[int, bytes]] = defaultdict(dict)
        self._latest = dict.fromkeys(reporters, -1)
        """The latest iteration that each rank has reported."""
        self._awaited: deque[int] = deque()
        self._behind: set[int] = set()
        """Ranks whose reports of the first awaited iteration are missing."""
        self._over = -1
        """The latest iteration that has been taken."""

    @property
    def awaited(self) -> int | None:
        """The earliest iteration that is to be decided on."""
        return self._awaited[0] if self._awaited else None

    @property
    def missing(self) -> Sequence[int]:
        """Ranks that have not reported it."""
        return sorted(self._behind)

    def expect(self, iteration: int) -> None:
        """`iteration`, the next one in ascending order, is to be decided on."""
        self._awaited.append(iteration)
        if len(self._awaited) == 1:
            self._look_for_first()

    def add(self, rank: int, iteration: int, report: bytes) -> bool:
        """Keep a report of one of the reporters; twice the same is once. Returns whether an iteration may be taken."""
        if iteration > self._over:
            self._reports[iteration][rank] = report
        self._latest[rank] = max(iteration, self._latest[rank])
        if self._awaited and iteration >= self._awaited[0]:
            self._behind.discard(rank)
        return self.over

    @property
    def over(self) -> bool:
        """Return whether an iteration may be taken."""
        return bool(self._awaited) and (not self._behind or len(self._awaited) > MOST_AWAITED)

    def take(self) -> list[Reported]:
        """Take all that are awaited and over."""
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
    """Raises ValueError for what is no measurement."""
    return sorted(map(measurement_of, reported.reports.values()), key=lambda one: (one.pipeline, one.stage))


HANDSHAKE_S = 10.0
"""Longest wait for the next word of a peer that has not proven itself."""
_MOST_UNSENT_NBYTES = 1 << 20
"""To a rank that does not read: more of it is not kept for it."""


def purpose_of(place: str, rank: int, leader: int) -> Purpose:
    """Purpose of the connection of `rank`. `place`: in the job's store, where decisions are."""
    name = hashlib.sha256(f"adaptra: reports of {place}".encode()).digest()[:JOB_NBYTES]
    return Purpose(name, rank, leader, bytes(SESSION_NBYTES), 0, 1)


class ReportServer:
    """Takes reports in from ranks, which prove the job's secret, and passes decisions on to all of them that are
    connected.

    A connection that is lost is the rank's to make again; of two, decisions go by the later one.
    """

    def __init__(
        self, secret: bytes, place: str, reporters: Collection[int], reported: Callable[[int, int, bytes], object]
    ) -> None:
        """`reporters`: the ranks that are decided for, the leading one among them, which is the first.
        `reported(rank, iteration, report)` takes a report in."""
        self._place, self._reporters, self._leader = place, frozenset(reporters), min(reporters)
        self._reported = reported
        # After the leading rank's first word in the job's store, all ranks connect at once.
        self._acceptor = Acceptor(secret, HANDSHAKE_S, self._serve, max(MOST_UNPROVEN, len(reporters)))
        self._writers: dict[int, asyncio.StreamWriter] = {}

    def listen(self, listener: socket.socket) -> None:
        """Accept on a listening socket from now on."""
        self._acceptor.listen(listener)

    def pass_on(self, iteration: int, decision: bytes) -> None:
        """Send a decision to all ranks that are connected; never waits."""
        frame = framed(iteration, decision)
        for writer in self._writers.values():
            if writer.transport.get_write_buffer_size() < _MOST_UNSENT_NBYTES:
                writer.write(frame)

    async def _serve(self, purpose: Purpose, connection: socket.socket) -> None:
        """Take reports in until the connection ends. Raises HandshakeError for one that is meant for something else."""
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
"""Longest wait for a TCP connection: the leading rank listens before it tells its address."""
CLIENT_HANDSHAKE_S = 60.0
"""Longest wait for the handshake: one planner process may have to take over from another, on a busy machine."""
_PAUSE_S = (0.5, 1.5)
"""From one attempt to connect to the next: not all ranks at the same moments. Twice as long after each failure."""
_MOST_DOUBLED = 32.0
"""Times the first pause."""
_SEND_S = 1.0
"""How long a report may take to get into the kernel's buffer, which holds dozens."""
_PART_NBYTES = 1 << 16


class ReportLink:
    """Connection for one thread, which it never holds up for long: connections are made in threads of their own.

    The latest reports are sent again over each new connection: another process may not have seen them. Where no
    connection can be made, one line of the log says so, and what is reported is lost.
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
        """`kept`: how many reports are sent again. `wake`: has the thread call `keep`, from any thread. `process`,
        `effect`: where this leads, and what comes of it while there is no connection, in words."""
        self._secret, self._purpose, self._wake = secret, purpose, wake
        self._process, self._effect = process, effect
        self._recent: deque[bytes] = deque(maxlen=kept)
        self._connection: socket.socket | None = None
        self._made: socket.socket | None = None
        """A connection that has been made, and is not in use yet."""
        self._making = False
        self._again_s, self._backoff = 0.0, Backoff(1.0, _MOST_DOUBLED)
        """When to try again, and how many attempts in a row have failed."""
        self._failure = ""
        """What the latest failed attempt says: where it led, and why it failed."""
        self._failure_logged = False
        """Set from the line in the log to the next connection."""
        self._received = bytearray()
        self._closed = False

    @property
    def connection(self) -> socket.socket | None:
        """The socket whose being readable calls for `receive`; None while there is none."""
        return self._connection

    def keep(self, address: Address) -> float | None:
        """See to it that there is a connection. Returns seconds until the next call; None: no need."""
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
        """Send a report, now or with the next connection."""
        frame = framed(iteration, report)
        self._recent.append(frame)
        self._send(frame)
        # Not when an attempt fails: at the end of a job, the leading rank may go first.
        if self._backoff.failures > 1 and not self._failure_logged:
            self._failure_logged = True
            logger.warning(
                "rank %d cannot hand in what it measures: no connection to the %s of rank %d at %s. %s: allow TCP "
                "connections to that host between the job's hosts, or name another network by --adaptra-interface",
                *(self._purpose.source, self._process, self._purpose.target, self._failure, self._effect),
            )

    def receive(self) -> list[tuple[int, bytes]]:
        """Return what has come: iterations and their decisions. To be called when the connection is readable."""
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
        """End the connection. A thread that is making one ends within CONNECT_S and CLIENT_HANDSHAKE_S."""
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
