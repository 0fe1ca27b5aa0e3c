# SPDX-License-Identifier: Apache-2.0
"""Run one rank's thread for stragglers: report its cell's arrivals, and apply the job's verdict to this host.

Replicas decide on plans separately, and jobs of one stage have no leader. So one process finds stragglers for the job:
the planner process of its lowest rank, or one of its own if that rank has none. The first rank of each cell connects to
it. Its verdict is in the job's store,
which ranks poll that act on it. There is no collective, and the training waits for none of this.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
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

if TYPE_CHECKING:
    from adaptra_megatron.control.stragglers.straggler_host import HostPolicy, HostSampler

# The straggler service, seen from the job's lowest rank.

_PATIENCE_S = 10.0
"""Longest wait for the rest of a message."""


class StragglerServiceClient:
    """The lowest rank's handle of the straggler service. For one thread, which must live as long as the process.
    Raises OSError if the host cannot start one."""

    def __init__(
        self,
        control: ControlStore,
        place: str,
        layout: JobLayout,
        pace: ReportPace,
        listener: socket.socket,
        log: Callable[[Event], None],
        hosted: socket.socket | None = None,
    ) -> None:
        """Start the service. `place`: prefix of the reports' keys in the store. `listener`: bound to the address that
        cells connect to, and owned by this from now on. `log`: takes findings. `hosted`: channel to the planner process
        that is to find stragglers; None: a process of its own is started."""
        cells = layout.cells
        begin = JudgeBegin(
            secret=control.secret.hex(),
            place=place,
            cells=tuple((cell, ranks[0], layout.workers[ranks[0]].host) for cell, ranks in cells.items()),
            pace=pace,
            log_level=logging.getLogger("adaptra_megatron").getEffectiveLevel(),
        )
        self._log = log
        with listener:
            listener.listen(len(cells))  # all of them connect at once
            host, port = listener.getsockname()[:2]
            self.address = Address(str(host), int(port))
            module = "adaptra_megatron.control.sidecar.planner_process"
            if hosted is None:
                process = Sidecar(module, listener, begin, _PATIENCE_S)
                self._channel, self._end = process.channel, process.close
            else:
                self._channel, self._end = hosted, functools.partial(_closed, hosted)
                hosted.settimeout(_PATIENCE_S)
                with contextlib.suppress(OSError):  # it has ended: seen where the channel is used next
                    send_descriptor(hosted, listener.fileno())
                    send(hosted, begin)

    def latest(self) -> StragglerVerdict | None:
        """Return the latest verdict, and log what came with it; None if there is no new one.

        Never waits. Raises ChannelEndedError if the process has ended.
        """
        judged = None
        while self._readable(0.0):
            judged = self._take()
        return None if judged is None else judged.verdict

    def finish(self, patience_s: float) -> None:
        """Have the service judge once more and end; log its last findings. Waits at most `patience_s`. Raises
        ChannelEndedError if it has ended without."""
        with contextlib.suppress(ChannelEndedError):  # a planner process that has ended has said its last by itself
            send(self._channel, Finish())
        until_s = time.monotonic() + patience_s
        while self._readable(max(0.0, until_s - time.monotonic())):
            if self._take().last:
                return

    def close(self) -> str:
        """End the service. Return how its process ended."""
        return self._end()

    def _readable(self, timeout_s: float) -> bool:
        return bool(select.select([self._channel], [], [], timeout_s)[0])

    def _take(self) -> StragglerServiceReply:
        judged, _ = FROM_JUDGE.receive(self._channel)
        log_lines(judged.lines)
        log_events(judged.events, self._log)
        return judged


def _closed(channel: socket.socket) -> str:
    channel.close()
    return "the end of the planner process"


logger = logger_of(__name__)

FIRST_S, LEAST_S, PER_CELL_S = 0.5, 5.0, 0.02
"""Seconds between two polls: the first pause, the longest, and instead of that in large jobs, seconds per cell."""
JUDGED_FROM = UNUSUAL + LEAST // 2
"""Iterations before a cell reports and the straggler service starts. Nothing can be found earlier, and shorter jobs
need no process."""
_OVERLAP = 3
"""Looks for which an iteration is reported again."""
_END_S = 2.0
"""Longest wait for the thread in `close`."""


class StragglerTelemetry(Protocol):
    """The part of RunTelemetry that the watch uses."""

    def log(self, event: Event) -> None:
        """Record an event."""

    def arrivals(self, figures: ArrivalFigures) -> None:
        """Export how cells arrive, on the rank that exports figures."""


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
    ) -> None:
        """`host_policy`: see --adaptra-host-policy. `listen`: makes a socket bound to the address that the
        job's other hosts connect to. `sampler`: makes a sampler; None: of this host. Both are called in the thread.
        `host`: has the planner processes of this rank find stragglers; None if it has none."""
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
        self._reported_s = time.monotonic()
        """Rows added since then have not been reported."""
        self._iteration_s = 0.0
        self._late: tuple[LateCell, ...] = ()
        """Late cells, as last read from the store."""
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="adaptra-stragglers", daemon=True)
        if self._reports or self._judges or self._shows or self._policy is not None:
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
        """End the thread, and release pinned helpers. The straggler service judges once more."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(_END_S)

    def _run(self) -> None:
        try:
            with contextlib.suppress(RuntimeError):  # at the end of a job the store goes with its process
                self._work()
        except Exception:  # a bug of ours: the training goes on
            logger.exception("stragglers are not looked for any more")
        finally:
            if self._policy is not None:
                self._policy.undo()

    def _work(self) -> None:
        store = self._control.client(PLACE)
        with contextlib.ExitStack() as parts:
            link = judge = None
            if self._reports:
                link = self._make_link()
                parts.callback(link.close)
            number, backoff = 0, self._pace.backoff()
            while not self._ending.wait(self._pace.pause_s(backoff.pause_s, self._iteration_s, self._late)):
                if self._reports and len(self._added) < JUDGED_FROM:
                    continue
                if self._judges and judge is None and (judge := self._make_judge(store)) is not None:
                    parts.callback(judge.close)
                if link is not None and not self._hand_in(link, store, number):
                    link = None
                if judge is not None and not judge.look():
                    if self._hosted is None:
                        break
                    judge = None  # the next planner process finds them, from new reports
                self._follow(store)
                number += 1
                backoff.next_s()

    def _make_judge(self, store: SealedStore) -> _Judge | None:
        """Return a new judge; None while it has to wait for a planner process."""
        channel = None
        if self._hosted is not None and not self._hosted.closed and (channel := self._hosted.take()) is None:
            return None
        listener = self._listen()
        return _Judge(self._layout, self._control, store, self._pace, listener, self._telemetry, channel)

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
        pause_s = self._pace.pause_s(self._pace.most_s, self._iteration_s, self._late)
        since_s = min(self._reported_s, now_s - _OVERLAP * pause_s)
        report = CellReport(rows=tuple(row for at_s, row in self._added.copy() if at_s >= since_s))
        if (sampler := self._sampler) is not None:
            report = replace(report, host=sampler.sample(), missing=tuple(sampler.missing))
        link.report(number, encoded(report))
        if link.connection is not None:
            self._reported_s = now_s
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


class _Judge:
    """Copies the verdicts of the straggler service to the job's store."""

    def __init__(
        self,
        layout: JobLayout,
        control: ControlStore,
        store: SealedStore,
        pace: ReportPace,
        listener: socket.socket,
        telemetry: StragglerTelemetry,
        hosted: socket.socket | None,
    ) -> None:
        self._store, self._telemetry, self._hosted = store, telemetry, hosted is not None
        place = control.seal(PLACE).place
        self._keeper = StragglerServiceClient(control, place, layout, pace, listener, telemetry.log, hosted)
        self._late: tuple[LateCell, ...] | None = None
        self._ended = False
        store.set(ADDRESS_KEY, encoded(self._keeper.address))

    def look(self) -> bool:
        """Write a new verdict to the store. Return False once there will be none any more."""
        try:
            verdict = self._keeper.latest()
        except ChannelEndedError:
            self._ended, ended_by = True, self._keeper.close()
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
        """Have the process judge once more, and end it."""
        if not self._ended:
            with contextlib.suppress(ChannelEndedError):
                self._keeper.finish(_END_S / 2)
            self._keeper.close()


def _replicas(late: tuple[LateCell, ...]) -> list[int]:
    return [each.cell.replica for each in late]
