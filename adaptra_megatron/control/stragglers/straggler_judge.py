# SPDX-License-Identifier: Apache-2.0
"""Find the replicas that come last, and why, from the reports of all cells."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from adaptra_megatron.common.layout import Cell
from adaptra_megatron.common.log import logger_of
from adaptra_megatron.control.detector.straggler_arrivals import WINDOW, HostFigures, Late, Row, Stragglers
from adaptra_megatron.control.detector.straggler_causes import StragglerCause, explain
from adaptra_megatron.control.stragglers.straggler_reports import (
    MOST_ROWS,
    CellReport,
    LateCell,
    Reports,
    StragglerVerdict,
)
from adaptra_megatron.telemetry.events import ArrivalsSeen, Event, StragglerDetection

logger = logger_of(__name__)

KEPT = 6
"""Looks for which a cause counts after it was last seen, so that a varying one is not logged again and again."""
_FIGURES_WITHIN = 12
"""Looks to wait for a host's figures. They are read only while a cell of its stage is late (HostSampler), so they come
some looks of its rank later, which may be rarer than these."""
_SEEN_EVERY_S, _SEEN_CELLS = 60.0, 256
"""Seconds between two events with the arrivals of all cells, and the number of cells up to which that holds; with more
cells, events are rarer in proportion."""


class StragglerDetector:
    """Finds stragglers of the whole job. Not thread-safe."""

    def __init__(self, names: Mapping[Cell, tuple[int, str]], log: Callable[[Event], None]) -> None:
        """`names`: rank and host of each cell. `log`: takes findings."""
        self._names, self._log = names, log
        self._replicas = 1 + max(cell.replica for cell in names)
        self._stages = 1 + max(cell.stage for cell in names)
        self._stragglers = Stragglers(self._replicas, self._stages)
        self._open: dict[int, dict[Cell, Row]] = defaultdict(dict)
        self._judged, self._count = -1, 0
        """The latest judged iteration, and the number of iterations since the last event with all arrivals."""
        self._causes: dict[int, dict[str, tuple[StragglerCause, int]]] = {}
        """By late replica and kind: the cause, and the look in which it was last seen."""
        self._unexplained: dict[int, tuple[int, Late]] = {}
        """By late replica that is not logged yet: the look in which it was found, and the finding."""
        self._looks = 0
        self._seen_s = float("-inf")
        self._logged_missing = False

    def take(self, cell: Cell, report: CellReport) -> None:
        """Take in the rows of a report. The next one may come before `look`, and each row is in a few reports only."""
        for row in report.rows:
            if row.iteration > self._judged:
                self._open[row.iteration][cell] = row

    def look(self, reports: Reports, now_s: float) -> StragglerVerdict:
        """Judge the rows that `take` has taken in since the last call. `reports`: the latest of each cell, for causes.
        `now_s`: seconds of a monotonic clock."""
        self._looks += 1
        found: list[Late] = []
        over: list[int] = []
        for rows in self._complete():
            self._stragglers.observe(rows)
            begun, ended = self._stragglers.judge()
            found, over = [*found, *begun], [*over, *ended]
        late = {each.replica: each for each in self._stragglers.late()}
        for replica in dict.fromkeys(over):
            if replica not in late:
                self._log_recovery(replica)
        for each in found:
            if each.replica in late:
                self._unexplained[each.replica] = self._looks, each
        self._explain_all(late, reports)
        lags_s = self._stragglers.lags_s()
        due_s = self._seen_s + _SEEN_EVERY_S * max(1.0, self._replicas * self._stages / _SEEN_CELLS)
        if self._count and (found or over or (now_s >= due_s and self._count >= WINDOW)):
            self._log_arrivals()
            self._seen_s = now_s
        cells = (
            LateCell(cell=Cell(replica, each.stage), cpu=self._cpu(each), logged=replica not in self._unexplained)
            for replica, each in late.items()
        )
        return StragglerVerdict(late=tuple(cells), lags_s=tuple(map(tuple, lags_s)))

    def finish(self) -> None:
        """Log what is left: findings whose causes are not known yet, and the arrivals of all cells."""
        for _, late in list(self._unexplained.values()):
            self._log_finding(late, "healthy")
        self._log_arrivals()

    def _log_arrivals(self) -> None:
        """Log the arrivals of all cells in the latest iterations, if there are new ones."""
        if self._count and self._stragglers.count:
            lags_s = [[round(lag_s, 6) for lag_s in lags_s] for lags_s in self._stragglers.lags_s()]
            last = self._stragglers.last()
            self._log(ArrivalsSeen(until=self._judged, iterations=self._stragglers.count, lags_s=lags_s, last=last))
        self._count = 0

    def _log_finding(self, late: Late, before: str) -> None:
        self._log(self._detection(late.replica, late, before, "late"))
        self._unexplained.pop(late.replica, None)

    def _log_recovery(self, replica: int) -> None:
        if replica in self._unexplained:
            self._log_finding(self._unexplained[replica][1], "healthy")
        self._causes.pop(replica, None)
        self._log(self._detection(replica, None, "late", "healthy"))

    def _explain_all(self, late: Mapping[int, Late], reports: Reports) -> None:
        """Log findings once their causes are known or have been awaited long enough, and causes found later."""
        hosts = {cell: report.host for cell, report in reports.items() if report.host is not None}
        for replica, each in sorted(late.items()):
            new = self._explain(each, late, hosts)
            cell = Cell(replica, each.stage)
            if replica not in self._unexplained:
                if new:
                    self._log_finding(each, "late")
                continue
            report = reports.get(cell)
            missing = report is not None and report.missing
            if cell in hosts or missing or self._looks - self._unexplained[replica][0] >= _FIGURES_WITHIN:
                self._log_finding(each, "healthy")
                self._log_missing(report)

    def _complete(self) -> list[dict[Cell, Row]]:
        """Return the iterations that all cells have reported since the last call, in ascending order."""
        whole = sorted(number for number, rows in self._open.items() if len(rows) == len(self._names))
        found = [self._open[number] for number in whole]
        if whole:
            self._judged, self._count = whole[-1], self._count + len(whole)
        for number in sorted(self._open):
            if number <= self._judged or len(self._open) > MOST_ROWS:
                del self._open[number]
        return found

    def _explain(self, late: Late, all_late: Mapping[int, Late], hosts: Mapping[Cell, HostFigures]) -> bool:
        """Update the causes of a late replica. Return whether a cause of a new kind was found."""
        others = [
            figures for cell, figures in hosts.items() if cell.stage == late.stage and cell.replica not in all_late
        ]
        known = self._causes.setdefault(late.replica, {})
        causes = explain(late, hosts.get(Cell(late.replica, late.stage)), others)
        new = [cause for cause in causes if cause.kind not in known]
        # The likeliest first, those that do not show now behind them.
        shown = {cause.kind.value: (cause, self._looks) for cause in causes}
        kept = {kind: each for kind, each in known.items() if kind not in shown and self._looks - each[1] < KEPT}
        self._causes[late.replica] = {**shown, **kept}
        return bool(new)

    def _detection(self, replica: int, late: Late | None, before: str, after: str) -> StragglerDetection:
        if late is None:
            reason = f"it comes with the others in most of the last {WINDOW} iterations"
            return StragglerDetection(replica=replica, before=before, after=after, reason=reason)
        causes = [cause for cause, _ in self._causes.get(replica, {}).values()]
        rank, host = self._names[Cell(replica, late.stage)]
        parts = [
            f"by {1e3 * late.lag_s:.3g} ms, the last one in {late.last} of the last {late.of} iterations, which costs "
            f"{late.share:.0%} of an iteration",
            *(cause.text for cause in causes),
        ]
        return StragglerDetection(
            replica=replica,
            before=before,
            after=after,
            reason="; ".join(parts),
            remedy="; ".join(dict.fromkeys(cause.remedy for cause in causes if cause.remedy)),
            stage=late.stage,
            first_rank=rank,
            host=host,
            lag_s=late.lag_s,
            last=late.last,
            of=late.of,
            share=late.share,
            causes=[cause.kind.value for cause in causes],
            since_iteration=late.since,
        )

    def _cpu(self, late: Late) -> str:
        causes = self._causes.get(late.replica, {}).values()
        return "; ".join(cause.text for cause, _ in causes if cause.kind.helped_by_pinning)

    def _log_missing(self, report: object) -> None:
        missing = getattr(report, "missing", ())
        if missing and not self._logged_missing:
            self._logged_missing = True
            logger.info(
                "causes on the host of a late replica are unknown without %s: pip install "
                "'adaptra-megatron[monitor]' on all hosts",
                " and ".join(missing),
            )
