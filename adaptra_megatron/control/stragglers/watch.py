# SPDX-License-Identifier: Apache-2.0
"""One rank's part in finding stragglers, in a thread beside the training: what its cell reports, what the job's lowest
rank makes of all reports, and what this host does of that.

Replicas decide on plans apart, and jobs of one stage have no deciding rank, so reports of all cells go by the job's
store: each cell's first rank replaces its own now and then, and the lowest rank of the job reads them. No collective,
and nothing that the training waits for.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from adaptra_megatron.authentication.sealed_store import SealedStore
from adaptra_megatron.control.stragglers.host import HostSampler
from adaptra_megatron.control.stragglers.host_policy import HostPolicy
from adaptra_megatron.control.stragglers.judge import ArrivalJudge
from adaptra_megatron.control.stragglers.reports import (
    MOST_ROWS,
    PLACE,
    VERDICT_KEY,
    CellReport,
    Verdict,
    report_of,
    verdict_of,
)
from adaptra_megatron.control.wire_format import encoded
from adaptra_megatron.detector.stragglers import Row
from adaptra_megatron.job.control_store import ControlStore
from adaptra_megatron.job.layout import JobLayout
from adaptra_megatron.log import logger_of
from adaptra_megatron.telemetry.events.events import Event
from adaptra_megatron.telemetry.figures.scalars import ArrivalFigures

logger = logger_of(__name__)

FIRST_S, LEAST_S, PER_CELL_S = 0.5, 5.0, 0.02
"""Between two looks: at first; later; and of jobs with many cells, for each of these."""
_GROWTH = 1.5
_OVERLAP = 3
"""Looks for which an iteration is reported again."""
_END_S = 2.0
"""Longest wait for the thread at the end."""


class Telemetry(Protocol):
    """What this needs of RunTelemetry."""

    def log(self, event: Event) -> None:
        """Something happened."""

    def arrivals(self, figures: ArrivalFigures) -> None:
        """How cells arrive, for those that show it."""


class StragglerWatch:
    """One rank's. `add` is for the training thread and costs microseconds."""

    def __init__(
        self,
        layout: JobLayout,
        control: ControlStore,
        telemetry: Telemetry,
        host_policy: str,
        sampler: Callable[[], HostSampler] = HostSampler,
    ) -> None:
        """`host_policy`: see --adaptra-host-policy. `sampler`: called in the thread."""
        self._layout, self._control, self._telemetry = layout, control, telemetry
        self._cell = layout.cell
        self._reports = layout.rank == layout.reporter(layout.cell)
        self._judges = layout.rank == min(layout.workers)
        shows = layout.rank == max(layout.workers)  # where Megatron's writers are
        self._policy = HostPolicy(host_policy, layout.rank) if host_policy != "off" else None
        self._reads = not self._judges and (shows or self._policy is not None)
        self._make_sampler = sampler
        self._added: deque[tuple[float, Row]] = deque(maxlen=MOST_ROWS)
        """With the moment at which each was added."""
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="adaptra-stragglers", daemon=True)
        if self._reports or self._judges or self._reads:
            self._thread.start()

    @property
    def measures(self) -> bool:
        """Return whether this rank's iterations count: it speaks for its cell."""
        return self._reports

    def add(self, row: Row) -> None:
        """Take in what this rank measured in an iteration."""
        self._added.append((time.monotonic(), row))

    def close(self) -> None:
        """End the thread, and have helpers back what they had. The judge looks once more."""
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
        cells = self._layout.cells
        judge = None
        if self._judges:
            names = {cell: (ranks[0], self._layout.workers[ranks[0]].host) for cell, ranks in cells.items()}
            judge = ArrivalJudge(names, self._telemetry.log)
        sampler = self._make_sampler() if self._reports else None
        most_s, pause_s = max(LEAST_S, PER_CELL_S * len(cells)), FIRST_S
        while not self._ending.wait(pause_s):
            if sampler is not None:
                report = self._report(sampler, _OVERLAP * most_s)
                store.set(str(self._cell), encoded(report))
            if judge is not None:
                verdict = self._judge(judge, store)
                store.set(VERDICT_KEY, encoded(verdict))
                self._follow(verdict)
            elif self._reads and (entry := store.peek(VERDICT_KEY)) is not None:
                self._follow(verdict_of(entry))
            pause_s = min(most_s, _GROWTH * pause_s)
        if judge is not None:
            self._judge(judge, store)
            judge.tell()

    def _report(self, sampler: HostSampler, back_s: float) -> CellReport:
        since_s = time.monotonic() - back_s
        rows = tuple(row for at_s, row in self._added.copy() if at_s >= since_s)
        return CellReport(rows=rows, host=sampler.sample(), missing=tuple(sampler.missing))

    def _judge(self, judge: ArrivalJudge, store: SealedStore) -> Verdict:
        found = {cell: entry for cell in self._layout.cells if (entry := store.peek(str(cell))) is not None}
        return judge.look({cell: report_of(entry) for cell, entry in found.items()}, time.monotonic())

    def _follow(self, verdict: Verdict) -> None:
        cells = {
            (replica, stage): lag_s
            for stage, lags_s in enumerate(verdict.lags_s)
            for replica, lag_s in enumerate(lags_s)
        }
        if cells:
            self._telemetry.arrivals(ArrivalFigures(lags_s=cells, late=[each.cell.replica for each in verdict.late]))
        if self._policy is not None:
            self._policy.follow(next((each.cpu for each in verdict.late if each.cell == self._cell), ""))
