# SPDX-License-Identifier: Apache-2.0
"""Report the arrivals of one rank's cell, and apply the job's verdict on stragglers to this host.

Replicas decide on plans separately, and jobs of one stage have no leader. So one process finds stragglers for the job:
the planner process of its lowest rank, or one of its own if that rank has none. The first rank of each cell connects to
it. Its verdict is in the job's store, which ranks poll that act on it. There is no collective, and the training waits
for none of this.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.common.handshake import send_descriptor
from adaptra_megatron.common.layout import JobLayout
from adaptra_megatron.common.log import logger_of
from adaptra_megatron.common.sealed_store import SealedStore
from adaptra_megatron.common.typed_messages import encoded
from adaptra_megatron.control.detector.straggler_arrivals import LEAST, UNUSUAL, Row
from adaptra_megatron.control.sidecar.planner_connections import (
    Address,
    ChannelEndedError,
    HostedChannels,
    ReportLink,
    Sidecar,
    address_of,
    log_events,
    log_lines,
    purpose_of,
    send,
)
from adaptra_megatron.control.stragglers.straggler_reports import (
    ADDRESS_KEY,
    FROM_JUDGE,
    LAGS_KEY,
    LATE_KEY,
    MOST_ROWS,
    PLACE,
    CellReport,
    Finish,
    JudgeBegin,
    LateCell,
    ReportPace,
    StragglerServiceReply,
    StragglerVerdict,
    lags_of,
    late_of,
)
from adaptra_megatron.telemetry.events import Event
from adaptra_megatron.telemetry.scalars import ArrivalFigures
from adaptra_megatron.transport.lines.connection_loop import ConnectionLoop, in_thread

if TYPE_CHECKING:
    from adaptra_megatron.control.stragglers.straggler_host import HostPolicy, HostSampler

logger = logger_of(__name__)

FIRST_S, LEAST_S, PER_CELL_S = 0.5, 5.0, 0.02
"""Seconds between two polls: the first pause, the longest, and instead of that in large jobs, seconds per cell."""
JUDGED_FROM = UNUSUAL + LEAST // 2
"""Iterations before a cell reports and the straggler service starts. Nothing can be found earlier, and shorter jobs
need no process."""
_OVERLAP = 3
"""Reports that an iteration is in: one that comes with the next one is never looked at."""
_PATIENCE_S, _END_S = 10.0, 2.0
"""Longest wait for the rest of a message, and for the end of the last look in `close`."""


class StragglerTelemetry(Protocol):
    """The part of RunTelemetry that the watch uses."""

    def log(self, event: Event) -> None:
        """Record an event."""

    def arrivals(self, figures: ArrivalFigures) -> None:
        """Export how cells arrive, on the rank that exports figures."""


class StragglerServiceClient:
    """The lowest rank's handle of the process that finds stragglers: copies its verdicts to the job's store. A process
    of its own ends with the thread that makes this. Raises OSError if the host cannot start one."""

    def __init__(
        self,
        control: ControlStore,
        store: SealedStore,
        layout: JobLayout,
        pace: ReportPace,
        listener: socket.socket,
        telemetry: StragglerTelemetry,
        hosted: socket.socket | None = None,
    ) -> None:
        """Start the service. `listener`: bound to the address that cells connect to, and owned by this from now on.
        `hosted`: channel to the planner process that is to find stragglers; None: a process of its own is started."""
        self._store, self._telemetry, self._hosted = store, telemetry, hosted is not None
        self._late: tuple[LateCell, ...] | None = None
        cells = layout.cells
        begin = JudgeBegin(
            secret=control.secret.hex(),
            place=control.seal(PLACE).place,
            cells=tuple((cell, ranks[0], layout.workers[ranks[0]].host) for cell, ranks in cells.items()),
            pace=pace,
            log_level=logging.getLogger("adaptra_megatron").getEffectiveLevel(),
        )
        with listener:
            listener.listen(len(cells))  # all of them connect at once
            host, port = listener.getsockname()[:2]
            if hosted is None:
                process = Sidecar("adaptra_megatron.control.sidecar.planner_process", listener, begin, _PATIENCE_S)
                self._channel, self._end = process.channel, process.close
            else:
                self._channel, self._end = hosted, functools.partial(_closed, hosted)
                hosted.settimeout(_PATIENCE_S)
                with contextlib.suppress(OSError):  # it has ended: seen where the channel is used next
                    send_descriptor(hosted, listener.fileno())
                    send(hosted, begin)
        store.set(ADDRESS_KEY, encoded(Address(str(host), int(port))))

    def look(self) -> bool:
        """Write a new verdict to the store, and log what came with it. Return False once there will be none any more.
        Waits for the store alone."""
        verdict: StragglerVerdict | None = None
        try:
            while self._readable(0.0):
                verdict = self._take().verdict
        except ChannelEndedError:
            ended_by = self._end()
            if not self._hosted:
                logger.warning(
                    "the process that judges stragglers ended by %s; replicas that come last are not found any more",
                    ended_by,
                )
                self._store.set(ADDRESS_KEY, b"")
            self._store.set(LATE_KEY, encoded(()))  # what hosts do about it ends
            return False
        if verdict is not None and verdict.lags_s:
            self._store.set(LAGS_KEY, encoded(verdict.lags_s))
            self._telemetry.arrivals(ArrivalFigures(lags_s=verdict.lags_s, late=_replicas(verdict.late)))
        if verdict is not None and verdict.late != self._late:
            self._late = verdict.late
            self._store.set(LATE_KEY, encoded(verdict.late))
        return True

    def close(self) -> None:
        """Have the service judge once more, log its last findings, and end it. Waits for half of `_END_S` at most."""
        with contextlib.suppress(ChannelEndedError):  # a planner process that has ended has said its last by itself
            send(self._channel, Finish())
        until_s = time.monotonic() + _END_S / 2
        with contextlib.suppress(ChannelEndedError):
            while self._readable(max(0.0, until_s - time.monotonic())) and not self._take().last:
                pass
        self._end()

    def _readable(self, timeout_s: float) -> bool:
        return bool(select.select([self._channel], [], [], timeout_s)[0])

    def _take(self) -> StragglerServiceReply:
        judged, _ = FROM_JUDGE.receive(self._channel)
        log_lines(judged.lines)
        log_events(judged.events, self._telemetry.log)
        return judged


def _closed(channel: socket.socket) -> str:
    channel.close()
    return "the end of the planner process"


# Imported when a cell is late or a policy is set: no host counters are read before.


def _host_policy(mode: str, rank: int) -> HostPolicy:
    from adaptra_megatron.control.stragglers.straggler_host import HostPolicy

    return HostPolicy(mode, rank)


def _host_sampler() -> HostSampler:
    from adaptra_megatron.control.stragglers.straggler_host import HostSampler

    return HostSampler()


class StragglerWatch:
    """One rank's part in finding stragglers. The training thread calls `add`, which takes microseconds."""

    def __init__(
        self,
        layout: JobLayout,
        control: ControlStore,
        telemetry: StragglerTelemetry,
        host_policy: str,
        listen: Callable[[], socket.socket],
        sampler: Callable[[], HostSampler] | None = None,
        host: Callable[[], HostedChannels] | None = None,
        loop: ConnectionLoop | None = None,
    ) -> None:
        """`host_policy`: see --adaptra-host-policy. `listen`: makes a socket bound to the address that the
        job's other hosts connect to. `sampler`: makes a sampler; None: of this host. Neither is called here. `host`:
        has the planner processes of this rank find stragglers; None if it has none. `loop`: starts the threads that
        look; without one, and for a process of its own, which the kernel ties to its thread, there is one that stays.
        """
        self._layout, self._control, self._telemetry = layout, control, telemetry
        self._cell, self._listen = layout.cell, listen
        self._reports = layout.rank == layout.reporter(layout.cell)
        self._judge_rank = min(ranks[0] for ranks in layout.cells.values())
        self._judges = layout.rank == self._judge_rank
        self._hosted = host() if host is not None and self._judges else None
        self._shows = layout.rank == max(layout.workers)  # where Megatron's writers are
        self._policy = None if host_policy == "off" else _host_policy(host_policy, layout.rank)
        self._make_sampler = sampler or _host_sampler
        self._sampler: HostSampler | None = None
        """Not None while a cell of this rank's stage is late."""
        self._pace = ReportPace(first_s=FIRST_S, most_s=max(LEAST_S, PER_CELL_S * len(layout.cells)))
        self._added: deque[tuple[float, Row]] = deque(maxlen=MOST_ROWS)
        """Each with the time at which it was added."""
        self._sent_s: deque[float] = deque([time.monotonic()], maxlen=_OVERLAP)
        """Times of the latest reports, or this one's beginning."""
        self._iteration_s = 0.0
        self._late: tuple[LateCell, ...] = ()
        """Late cells, as last read from the store."""
        self._acts = self._reports or self._judges or self._shows or self._policy is not None
        """False: nothing is left to do."""
        self._number, self._backoff = 0, self._pace.backoff()
        """Number of looks so far, and the pauses between them."""
        self._store: SealedStore | None = None
        self._link: ReportLink | None = None
        self._judge: StragglerServiceClient | None = None
        self._ending, self._woken = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._stay, name="adaptra-stragglers", daemon=True)
        self._loop = None if self._judges and self._hosted is None else loop
        self._served: Future[None] | None = None
        if self._acts and self._loop is not None:
            self._served = self._loop.begin(self._come_and_go())
        elif self._acts:
            self._thread.start()

    @property
    def measures(self) -> bool:
        """Whether this rank reports for its cell, so that its iterations are measured."""
        return self._reports

    def lasts(self, iteration_s: float) -> None:
        """Note the seconds of the latest iteration: the longer, the rarer the looks. On all ranks."""
        self._iteration_s = iteration_s

    def add(self, row: Row) -> None:
        """Take in this rank's measurements of one iteration."""
        self._added.append((time.monotonic(), row))

    def close(self) -> None:
        """End the looks, and release pinned helpers. The straggler service judges once more."""
        self._ending.set()
        if self._loop is not None:
            self._loop.call(self._woken.set)
            self._loop.end(self._served, _END_S)
        elif self._thread.is_alive():
            self._thread.join(_END_S)

    def _stay(self) -> None:
        while self._acts and not self._ending.wait(self._pause_s()):
            self._try_to_look()
        self._end()

    async def _come_and_go(self) -> None:
        while self._acts:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._woken.wait(), self._pause_s())
                break
            await in_thread(self._try_to_look)
        await in_thread(self._end)

    def _try_to_look(self) -> None:
        try:
            self._look()
        except RuntimeError:  # at the end of a job the store goes with its process
            self._acts = False
        except Exception:  # a bug of ours: the training goes on
            logger.exception("stragglers are not looked for any more")
            self._acts = False

    def _end(self) -> None:
        if self._judge is not None:
            self._judge.close()
        if self._link is not None:
            self._link.close()
        if self._policy is not None:
            self._policy.undo()

    def _pause_s(self) -> float:
        return self._pace.pause_s(self._backoff.pause_s, self._iteration_s, self._late)

    def _look(self) -> None:
        if self._reports and len(self._added) < JUDGED_FROM:
            return
        if self._store is None:
            self._store = self._control.client(PLACE)
            self._link = self._make_link() if self._reports else None
        store = self._store
        if self._judges and self._judge is None:
            self._judge = self._make_judge(store)
        if self._link is not None and not self._hand_in(self._link, store, self._number):
            self._link.close()
            self._link = None
        if self._judge is not None and not self._judge.look():
            self._judge = None  # the next planner process finds them, from new reports
            self._acts = self._hosted is not None
        self._follow(store)
        self._number += 1
        self._backoff.next_s()

    def _make_judge(self, store: SealedStore) -> StragglerServiceClient | None:
        """Return a new judge; None while it has to wait for a planner process, and once there will be none."""
        channel = None
        if self._hosted is not None and (self._hosted.closed or (channel := self._hosted.take()) is None):
            return None
        given = self._control, store, self._layout, self._pace, self._listen(), self._telemetry, channel
        return StragglerServiceClient(*given)

    def _make_link(self) -> ReportLink:
        purpose = purpose_of(self._control.seal(PLACE).place, self._layout.rank, self._judge_rank)
        effect = "Replicas that come last are not found until there is one"
        return ReportLink(
            *(self._control.secret, purpose, 1, lambda: None), process="judge of stragglers", effect=effect
        )

    def _hand_in(self, link: ReportLink, store: SealedStore, number: int) -> bool:
        """Send a report, connecting first if need be. Return False once the straggler service has ended."""
        if link.connection is None and (entry := store.peek(ADDRESS_KEY)) is not None:
            if not entry:
                return False
            link.keep(address_of(entry))
        now_s = time.monotonic()
        report = CellReport(rows=tuple(row for at_s, row in self._added.copy() if at_s >= self._sent_s[0]))
        if (sampler := self._sampler) is not None:
            report = replace(report, host=sampler.sample(), missing=tuple(sampler.missing))
        link.report(number, encoded(report))
        if link.connection is not None:
            self._sent_s.append(now_s)
        return True

    def _follow(self, store: SealedStore) -> None:
        """Read the latest verdict, and apply it."""
        entry = store.peek(LATE_KEY)
        late = self._late = () if entry is None else late_of(entry)
        if self._shows and not self._judges and (entry := store.peek(LAGS_KEY)) is not None:
            self._telemetry.arrivals(ArrivalFigures(lags_s=lags_of(entry), late=_replicas(late)))
        if self._reports:
            wanted = any(each.cell.stage == self._cell.stage for each in late)
            self._sampler = (self._sampler or self._make_sampler()) if wanted else None
        if self._policy is not None:
            self._policy.follow(next((each.cpu for each in late if each.cell == self._cell), ""))


def _replicas(late: tuple[LateCell, ...]) -> list[int]:
    return [each.cell.replica for each in late]
