# SPDX-License-Identifier: Apache-2.0
"""Relate the monotonic clocks of the job's hosts, at start-up and during the training, to compare times across hosts.

The first stage of each pipeline runs a clock server. The ranks of its pipeline on other hosts query it every few
seconds, over a TCP connection that begins with the job's handshake. If it does not answer, a rank keeps the latest
offset and drift, logs that once, and tries again. No training waits for any of this.

A message stamped by the remote clock bounds the offset from one side, because none arrives before it is sent. With
offset = remote - local, a request gives offset <= received - sent, its answer offset >= sent - received. A round of
messages gives an interval for the offset, as wide as the fastest request and the fastest answer take together. Earlier
rounds count, too: shifted by the drift that a linear fit gives, and widened by the error of that drift.

At start-up, ranks meet in pairs, and only pairs with different clocks: each rank with the first stage of its pipeline,
and one first stage of each host with the job's first.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from adaptra_megatron.common.backoff import Backoff
from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.common.gathering import epoch_group
from adaptra_megatron.common.handshake import (
    SESSION_NBYTES,
    Acceptor,
    ConnectionEndedError,
    HandshakeError,
    HandshakeRefusal,
    Purpose,
    connect,
    receive_exactly,
    tune_connection,
)
from adaptra_megatron.common.layout import JobLayout
from adaptra_megatron.common.log import logger_of
from adaptra_megatron.common.ports import PortRange
from adaptra_megatron.common.typed_messages import packed, unpacked
from adaptra_megatron.transport.message_keys import TransportError
from adaptra_megatron.transport.setup.host_placement import listen_tcp, listening_host

MAX_DRIFT = 500e-6
"""Fastest drift of two clocks, in seconds per second: the most that NTP steers a clock by; crystals differ by a tenth.
"""
WANDER = 1e-6
"""Largest difference between a drift and its mean over the kept rounds, as temperatures change."""
KEPT_ROUNDS = 32


class Stamps(NamedTuple):
    """Times of one request and its answer, in seconds: the outer two on the local clock, the inner two on the remote
    one."""

    sent_s: float
    received_s: float
    answered_s: float
    back_s: float


class Round(NamedTuple):
    """Bounds on the offset from a few exchanges in a row."""

    at_s: float
    """Local time."""
    lower_s: float
    """Lower bound of the seconds to add to the local clock to get the remote one."""
    upper_s: float
    """Upper bound of the same."""

    @property
    def middle_s(self) -> float:
        return (self.lower_s + self.upper_s) / 2

    @property
    def half_s(self) -> float:
        """Half the time that the fastest request and the fastest answer took together."""
        return (self.upper_s - self.lower_s) / 2


class ClockLine(NamedTuple):
    """Offset of a remote clock as a linear function of local time."""

    at_s: float
    offset_s: float
    """Seconds to add to the local clock at `at_s`."""
    drift: float
    """Change of the offset per second."""
    half_s: float
    """Largest error of the offset at `at_s`."""
    rate: float
    """Growth of that error, per second before or after `at_s`."""

    def offset_at(self, local_s: float) -> float:
        """Return the seconds to add to `local_s`."""
        return self.offset_s + self.drift * (local_s - self.at_s)

    def error_at(self, local_s: float) -> float:
        """Return the largest error of `offset_at`, for clocks whose drift keeps to MAX_DRIFT and WANDER."""
        return self.half_s + self.rate * abs(local_s - self.at_s)


def round_of(exchanges: Iterable[Stamps]) -> Round:
    """Return the bounds that consecutive exchanges (at least one) give."""
    stamps = list(exchanges)
    upper_s = min(entry.received_s - entry.sent_s for entry in stamps)
    lower_s = max(entry.answered_s - entry.back_s for entry in stamps)
    return Round((stamps[0].sent_s + stamps[-1].back_s) / 2, lower_s, upper_s)


class ClockFit:
    """Fits a line to rounds of exchanges. If a clock jumps, earlier rounds are dropped."""

    def __init__(self) -> None:
        self._rounds: deque[Round] = deque(maxlen=KEPT_ROUNDS)

    def add(self, entry: Round) -> ClockLine:
        """Add a round, later than all before, and return the line at its time."""
        self._rounds.append(entry)
        # At the latest, the round itself is left, which agrees with itself.
        while (line := _line(self._rounds)) is None:
            self._rounds.popleft()  # at the latest, the round itself is left, and agrees with itself
        return line


def _line(rounds: Sequence[Round]) -> ClockLine | None:
    """Return the line through the rounds; None if they contradict each other, which one alone does not."""
    latest = rounds[-1]
    drift, rate = _drift(rounds)
    lower_s, upper_s = float("-inf"), float("inf")
    for entry in rounds:
        age_s = latest.at_s - entry.at_s
        lower_s = max(lower_s, entry.lower_s + (drift - rate) * age_s)
        upper_s = min(upper_s, entry.upper_s + (drift + rate) * age_s)
    if lower_s > upper_s and len(rounds) > 1:
        return None
    return ClockLine(latest.at_s, (lower_s + upper_s) / 2, drift, abs(upper_s - lower_s) / 2, rate)


def _drift(rounds: Sequence[Round]) -> tuple[float, float]:
    """Return the drift by least squares, weighted by the width of the rounds, and its largest error.

    The error sums, over the rounds, weight in the slope times half the width. It shrinks as rounds span more time.
    """
    weights = [1.0 / max(entry.half_s, 1e-9) ** 2 for entry in rounds]
    total = sum(weights)
    mean_at_s = sum(weight * entry.at_s for weight, entry in zip(weights, rounds, strict=True)) / total
    spread = sum(weight * (entry.at_s - mean_at_s) ** 2 for weight, entry in zip(weights, rounds, strict=True))
    if spread <= 0.0:
        return 0.0, MAX_DRIFT
    slope = off = 0.0
    for weight, entry in zip(weights, rounds, strict=True):
        share = weight * (entry.at_s - mean_at_s) / spread
        slope += share * (entry.middle_s - rounds[0].middle_s)
        off += abs(share) * entry.half_s
    rate = WANDER + off
    # A fit less precise than the general bound on drifts adds nothing.
    return (0.0, MAX_DRIFT) if rate + abs(slope) >= MAX_DRIFT else (slope, rate)


logger = logger_of(__name__)

INTERVAL_S = 10.0
EXCHANGES = 8
"""Exchanges per round; the fastest ones count."""
_ANSWER_S = 2.0
"""Longest wait for an answer, a connection or a handshake."""
_REST_S = (1.0, 60.0)
"""Pauses after failures: the first and the longest; each is twice the one before."""
_ASKED = b"clock?\0\0"
_ANSWER = struct.Struct("<dd")
_PURPOSE = Purpose(b"adaptra: a clock", 0, 0, bytes(SESSION_NBYTES), 0, 1)
"""Fixed, whereas names of pipelines are random: a connection for a link is refused here, and the other way round."""

Clock = Callable[[], float]
Address = tuple[str, int]


class ClockServer:
    """Answers each peer that knows the job's secret with the time of this rank's clock."""

    def __init__(self, listener: socket.socket, secret: bytes, clock: Clock = time.monotonic) -> None:
        """Start the thread. `listener`: a listening socket, owned by the server from now on."""
        self._listener, self._secret, self._clock = listener, secret, clock
        self._loop = asyncio.new_event_loop()
        self._work = self._loop.create_task(self._serve())
        self._thread = threading.Thread(target=self._run, name="adaptra-clock", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and all connections. May be called twice."""
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._work.cancel)
        self._thread.join(_ANSWER_S)
        self._listener.close()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._work)
        except asyncio.CancelledError:
            pass
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        acceptor = Acceptor(self._secret, _ANSWER_S, self._answer)
        acceptor.listen(self._listener)
        try:
            await asyncio.get_running_loop().create_future()  # until this task is cancelled
        finally:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    async def _answer(self, purpose: Purpose, connection: socket.socket) -> None:
        """Answer requests until the connection ends. Raises HandshakeError if it has another purpose."""
        if purpose != _PURPOSE:
            raise HandshakeError(HandshakeRefusal.MISDIRECTED, "this is a clock")
        loop = asyncio.get_running_loop()
        with connection, contextlib.suppress(OSError):
            tune_connection(connection)
            while await receive_exactly(connection, len(_ASKED)) == _ASKED:
                received_s = self._clock()
                await loop.sock_sendall(connection, _ANSWER.pack(received_s, self._clock()))


class ClockFollower:
    """Measures, again and again, the offset of this rank's clock to that of a ClockServer."""

    def __init__(
        self,
        address: Address,
        secret: bytes,
        beginning: ClockLine,
        *,
        name: str = "",
        clock: Clock = time.monotonic,
        interval_s: float = INTERVAL_S,
    ) -> None:
        """Start the thread. `beginning`: the relation until the first answer. `name`: this rank, for the log."""
        self._address, self._secret = address, secret
        self._name, self._clock, self._interval_s = name, clock, interval_s
        self._fit = ClockFit()
        self.line = beginning
        """The latest relation; replaced as a whole, so any thread may read it."""
        self.rounds = 0
        self._logged_lost = False
        self._closing = threading.Event()
        self._connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._follow, name="adaptra-clock", daemon=True)
        self._thread.start()

    @property
    def connected(self) -> bool:
        """Return whether the server has ever accepted a TCP connection, with or without a handshake."""
        return self._connection is not None

    def close(self) -> None:
        """End the thread and the connection. May be called twice."""
        self._closing.set()
        if (connection := self._connection) is not None:
            with contextlib.suppress(OSError):  # it has ended by itself
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(2 * _ANSWER_S)

    def _follow(self) -> None:
        backoff = Backoff(*_REST_S)
        while not self._closing.is_set():
            before = self.rounds
            try:
                self._query_until_disconnected()
            except (OSError, HandshakeError) as cause:
                # Not while closing, nor at the first failure: at the end of a job, the first stage may go first.
                if self.rounds == before and not self._closing.is_set():
                    self._log_unreachable(cause)
            if self.rounds > before:
                backoff.reset()
            self._closing.wait(backoff.next_s())

    def _query_until_disconnected(self) -> None:
        with socket.create_connection(self._address, _ANSWER_S) as connection:
            self._connection = connection
            tune_connection(connection)
            connection.setblocking(False)
            asyncio.run(connect(connection, self._secret, _PURPOSE, _ANSWER_S))
            connection.settimeout(_ANSWER_S)
            while not self._closing.is_set():
                stamps = [self._ask(connection) for _ in range(EXCHANGES)]
                self.line = self._fit.add(round_of(stamps))
                self.rounds += 1
                # Not all ranks of a pipeline at the same moments.
                self._closing.wait(self._interval_s * random.uniform(0.9, 1.1))

    def _ask(self, connection: socket.socket) -> Stamps:
        sent_s = self._clock()
        connection.sendall(_ASKED)
        answer = b""
        while len(answer) < _ANSWER.size:
            part = connection.recv(_ANSWER.size - len(answer))
            if not part:
                raise ConnectionEndedError("the other side ended the connection")
            answer += part
        back_s = self._clock()
        received_s, answered_s = _ANSWER.unpack(answer)
        return Stamps(sent_s, received_s, answered_s, back_s)

    def _log_unreachable(self, cause: Exception) -> None:
        if not self._logged_lost:
            self._logged_lost = True
            logger.warning(
                "%s: the clock of its pipeline's first stage does not answer at %s:%d (%s: %s); one-way times "
                "use the last measured offset and drift",
                *(self._name, *self._address, type(cause).__name__, cause),
            )


class RelatedClock:
    """This rank's clock, with its offset to the clocks of its pipeline and of the job."""

    def __init__(
        self,
        offset_s: float,
        to_job_s: float = 0.0,
        *,
        server: ClockServer | None = None,
        follower: ClockFollower | None = None,
    ) -> None:
        """`offset_s`: the offset to the pipeline's clock if there is no follower. `to_job_s`: the offset from
        the pipeline's clock to the job's. `server`, `follower`: this rank's, closed with this."""
        self._offset_s, self._to_job_s = offset_s, to_job_s
        self._server, self._follower = server, follower

    @property
    def first_offset_s(self) -> float:
        """Seconds to add to this rank's monotonic clock to get the job's, as measured at start-up."""
        return self._offset_s + self._to_job_s

    def offset_at(self, local_s: float) -> float:
        """Return the seconds to add to `local_s`, a time of this rank's monotonic clock, to get the pipeline's."""
        return self._offset_s if self._follower is None else self._follower.line.offset_at(local_s)

    def drifted(self, local_s: float) -> float | None:
        """Return the seconds to add to `local_s` to get the job's clock; None if they never change."""
        return None if self._follower is None else self.offset_at(local_s) + self._to_job_s

    def close(self) -> None:
        """Close server and follower. May be called twice."""
        if self._follower is not None:
            self._follower.close()
        if self._server is not None:
            self._server.close()


ROUNDS = 8
_MOST_NBYTES = 1 << 10


@dataclass(frozen=True)
class ClockSettings:
    """Settings of the clock servers."""

    interface: str | None = None
    """Network interface that the server listens on; None: torch.distributed's, or the one that leads to the master."""
    bind: str | None = None
    """Address that the server listens on; overrides `interface`."""
    port_range: PortRange | None = None
    """TCP ports that the server may listen on; None: any free one."""
    interval_s: float = INTERVAL_S


class _FirstStage(NamedTuple):
    """Entry of a pipeline's first stage in the job's store: its clock, and the address of its server."""

    to_job_s: float
    """Seconds to add to this stage's clock to get the job's."""
    address: Address | None
    """Address of the clock server; None if there is none."""


def now_s() -> float:
    """Return the time of this rank's monotonic clock in seconds, the one that is related to other hosts' clocks."""
    return time.monotonic()


def relate_clocks(
    control: ControlStore, layout: JobLayout, timeout_s: float, settings: ClockSettings | None = None
) -> RelatedClock:
    """Return this rank's clock, with its offsets to the pipeline's clock and to the job's.

    The pipeline's clock is that of its first stage; the job's is that of the first of these.

    All ranks of the job call it; each waits only for the ranks that it needs. Links are timed on the pipeline's clock.
    Raises RuntimeError if one of those ranks does not come within the timeout.
    """
    if layout.share_clock(layout.workers):
        return RelatedClock(0.0)
    return _Relating(control, layout, timeout_s, settings or ClockSettings()).relate()


class _Relating:
    def __init__(self, control: ControlStore, layout: JobLayout, timeout_s: float, settings: ClockSettings) -> None:
        self._control, self._layout, self._timeout_s, self._settings = control, layout, timeout_s, settings
        self._store = control.client("clocks")
        self._store.set_timeout(timedelta(seconds=timeout_s))

    def relate(self) -> RelatedClock:
        layout, first = self._layout, self._layout.pipeline[0]
        if layout.rank == first:
            return self._relate_first()
        near = layout.share_clock((layout.rank, first))
        offset_s = 0.0 if near else self._ask(first)
        to_job_s, address = self._read(first)
        if near or address is None:
            return RelatedClock(offset_s, to_job_s)
        follower = ClockFollower(
            address,
            self._control.secret,
            ClockLine(now_s(), offset_s, 0.0, float("inf"), MAX_DRIFT),
            name=f"rank {layout.rank}",
            clock=now_s,
            interval_s=self._settings.interval_s,
        )
        return RelatedClock(offset_s, to_job_s, follower=follower)

    def _relate_first(self) -> RelatedClock:
        layout, rank = self._layout, self._layout.rank
        to_job_s = self._to_job_s()
        remote = [other for other in layout.pipeline if not layout.share_clock((rank, other))]
        server, address = self._serve() if remote else (None, None)
        self._store.set(str(rank), packed(_FirstStage(to_job_s, address)))
        for other in remote:
            self._answer(other)
        return RelatedClock(0.0, to_job_s, server=server)

    def _to_job_s(self) -> float:
        """Return the seconds to add to the clock of this first stage to get the job's. One first stage of each host
        measures it for all."""
        layout, rank = self._layout, self._layout.rank
        hosts: dict[str, int] = {}
        for cell in layout.cells_of(0):
            for first in layout.cells[cell]:
                hosts.setdefault(layout.workers[first].boot, first)
        reference, *others = hosts.values()
        asks = hosts[layout.workers[rank].boot]
        if rank == reference:
            for other in others:
                self._answer(other)
        if asks == reference:
            return 0.0
        return self._ask(reference) if asks == rank else self._read(asks).to_job_s

    def _read(self, first: int) -> _FirstStage:
        try:
            said: _FirstStage = unpacked(self._store.get(str(first)), _FirstStage, _MOST_NBYTES)
        except ValueError as cause:
            raise RuntimeError(f"the clock entry of rank {first} in the job's store is invalid: {cause}") from cause
        return said

    def _ask(self, other: int) -> float:
        return offset_to(self._pair(other, self._layout.rank), 0)

    def _answer(self, other: int) -> None:
        serve_clock(self._pair(self._layout.rank, other), 1)

    def _pair(self, answers: int, asks: int) -> Any:
        ranks: Sequence[int] = (answers, asks)
        return epoch_group(self._control, f"clocks/{answers}-{asks}", ranks, self._layout.rank, self._timeout_s)

    def _serve(self) -> tuple[ClockServer | None, Address | None]:
        """Start this rank's clock server; return None twice, with a warning, if other hosts could not reach it."""
        try:
            host = self._settings.bind or listening_host(self._settings.interface, one_host=False)
            listener, (address, port) = listen_tcp(host, self._settings.port_range)
        except TransportError as cause:
            logger.warning("host clock offsets are measured at start-up only and will drift: %s", cause)
            return None, None
        return ClockServer(listener, self._control.secret, now_s), (str(address), int(port))


def serve_clock(group: Any, peer: int) -> None:
    """Answer `offset_to` of `peer` in an `epoch_group`. Raises RuntimeError when the group's timeout expires."""
    for _ in range(ROUNDS):
        group.recv([torch.zeros(1, dtype=torch.float64)], peer, 0).wait()
        group.send([torch.tensor([now_s()], dtype=torch.float64)], peer, 0).wait()


def offset_to(group: Any, peer: int) -> float:
    """Return the seconds to add to this rank's monotonic clock to get `peer`'s, within half the best round trip.

    `peer` must run `serve_clock` in the same `epoch_group` at the same time. Raises RuntimeError when the group's
    timeout expires.
    """
    best_round_trip, best_offset = float("inf"), 0.0
    answer = torch.zeros(1, dtype=torch.float64)
    for _ in range(ROUNDS):
        start = now_s()
        group.send([torch.zeros(1, dtype=torch.float64)], peer, 0).wait()
        group.recv([answer], peer, 0).wait()
        end = now_s()
        if end - start < best_round_trip:
            best_round_trip, best_offset = end - start, answer.item() - (start + end) / 2
    return best_offset
