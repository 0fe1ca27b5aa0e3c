# SPDX-License-Identifier: Apache-2.0
"""Lay out the chart of iteration times, its numbered marks, and the table of the marked events."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from adaptra_megatron.telemetry.event_wording import change_of_seconds, event_text
from adaptra_megatron.telemetry.events import (
    ArrivalsSeen,
    Event,
    Fault,
    IterationsTimed,
    LinkDetection,
    PathChanged,
    PlanMade,
    PlanSwitched,
    RanksLost,
    RunEnded,
    RunStarted,
    StageDetection,
    StampedEvent,
    StragglerDetection,
)
from adaptra_megatron.telemetry.log_lines import cable_of
from adaptra_megatron.tools.recordings.run_record import RunIteration, RunRecord, began_at, replicas_of
from adaptra_megatron.tools.report.report_findings import PartFinding

_MOST_DOTS = 400
"""Maximum number of iterations that are drawn as dots; of more, only the line is drawn."""
_MOST_POINTS = 2000


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A numbered flag on the chart."""

    number: int
    iteration: int
    tone: str
    """CSS class: "bad", "good" or "plain"."""
    text: str


class IterationChart:
    """Layout of the chart. Positions are in units of the drawing; y counts from the top."""

    width, height = 900, 300
    left, right, top, bottom = 72, 888, 34, 260
    """Edges of the plot inside the drawing."""
    flag_width = 18

    def __init__(
        self, run: RunRecord, slow: Sequence[tuple[int, int]], marks: Sequence[Mark], counted: str = "iteration"
    ) -> None:
        """`slow`: first and last iteration of each period in which a link was slow. `counted`: the recording's
        word for an iteration."""
        self.slow = slow
        self.counted = counted
        self._marks = sorted(marks, key=lambda mark: mark.iteration)
        self._first, self._last = run.iterations[0].number, run.iterations[-1].number
        self.iterations = _drawn(run.iterations)
        self.dots = self.iterations if len(self.iterations) <= _MOST_DOTS else ()
        self.bounds = self._bounds(run)
        longest_s = max([seconds for _first, _end, seconds in self.bounds] + [each.seconds for each in self.iterations])
        # About five ticks of time and twelve of iterations, at round numbers.
        step_s = round_step(longest_s / 4, (1, 2, 2.5, 5, 10))
        self.time_ticks_s = [index * step_s for index in range(math.ceil(longest_s / step_s) + 1)]
        step = round(round_step(max(1.0, (self._last - self._first) / 12), (1, 2, 5, 10)))
        self.iteration_ticks = range(-(-self._first // step) * step, self._last + 1, step)

    def x(self, number: float) -> float:
        """Return the x position of an iteration (its middle; it begins half an iteration earlier)."""
        share = (number - self._first + 0.5) / (self._last - self._first + 1)
        return self.left + (self.right - self.left) * share

    def y(self, seconds: float) -> float:
        """Return the y position of an iteration time."""
        return self.bottom - (self.bottom - self.top) * seconds / self.time_ticks_s[-1]

    @property
    def flags(self) -> Iterator[tuple[Mark, float, float]]:
        """Yield the marks, their x, and the left edges of their flags, which move right if they would overlap. Marks
        without room are left out; the table of events has them all."""
        taken_to = -math.inf
        for mark in self._marks:
            at = self.x(self._within(mark.iteration) - 0.5)
            left = max(at - 1, taken_to + 2)
            taken_to = left + self.flag_width
            if taken_to > self.width:
                return
            yield mark, at, left

    def _bounds(self, run: RunRecord) -> list[tuple[int, int, float]]:
        """Return the proven lower bounds of plans: first iteration, end, seconds."""
        found: dict[int, float] = {}
        for stamped in run.own_events:
            event = stamped.event
            if isinstance(event, PlanMade) and event.lower_bound_s is not None and math.isfinite(event.lower_bound_s):
                found[self._within(stamped.stamp.iteration)] = event.lower_bound_s
        return [(first, end, found[first]) for first, end in pairwise([*sorted(found), self._last + 1])]

    def _within(self, number: int) -> int:
        return min(max(number, self._first), self._last)


def _drawn(iterations: Sequence[RunIteration]) -> Sequence[RunIteration]:
    """Return the iterations to draw: all, or the longest of each group if there are very many."""
    few = -(-len(iterations) // _MOST_POINTS)
    return [max(iterations[at : at + few], key=lambda entry: entry.seconds) for at in range(0, len(iterations), few)]


def round_step(rough: float, factors: Sequence[float]) -> float:
    """Return the smallest round number that is at least `rough`: one of `factors` times a power of ten."""
    magnitude = 10.0 ** math.floor(math.log10(rough))
    return next(magnitude * factor for factor in factors if magnitude * factor >= rough)


ALIKE = 3
"""Iterations within which findings on one cable share a row."""


class EventRow(NamedTuple):
    """One event, as text."""

    mark: Mark | None
    replica: str
    """Replica of the rank that logged it; "" in a job with one replica."""
    iteration: str
    time: str
    """Hours, minutes and seconds since the first event of the log."""
    what: str
    why: str
    effect: str
    """Iteration times before and after an event that began a part of the run; "" for others."""


def event_rows(run: RunRecord, findings: Sequence[PartFinding]) -> list[EventRow]:
    """Return the rows of events worth showing, by time; empty for a run without a log."""
    effects = {
        found.stamp: change_of_seconds(before.seconds, after.seconds)
        for before, after in pairwise(findings)
        for found in after.part.beginning
    }
    replicas = replicas_of(run.events)
    several = len(set(replicas.values())) > 1
    rows: list[EventRow] = []
    own = {found.stamp for found in run.own_events}
    marks = 0
    for found, alike in _once(filter(worth_a_row, run.events)):
        what, why = event_text(found.event, alike)
        mark = None
        if found.stamp in own and (tone := _tone(found.event)) is not None:
            marks += 1
            mark = Mark(number=marks, iteration=began_at(found), tone=tone, text=f"{what}: {why}" if why else what)
        replica = str(replicas.get(found.stamp.rank, "")) if several else ""
        iteration = str(found.stamp.iteration) if found.stamp.iteration >= 0 else ""
        time = _clock(found.stamp.monotonic_s - run.events[0].stamp.monotonic_s)
        rows.append(EventRow(mark, replica, iteration, time, what, why, effects.get(found.stamp, "")))
    return rows


def _once(events: Iterable[StampedEvent]) -> list[tuple[StampedEvent, list[LinkDetection]]]:
    """Return `events`, each with all findings on links that share its row: of one cable, within ALIKE iterations."""
    found: list[tuple[StampedEvent, list[LinkDetection]]] = []
    latest: dict[object, int] = {}
    for stamped in events:
        event = stamped.event
        if not isinstance(event, LinkDetection):
            found.append((stamped, []))
            continue
        name = cable_of(event), event.after
        at = latest.get(name)
        if at is not None and stamped.stamp.iteration - found[at][0].stamp.iteration <= ALIKE:
            found[at][1].append(event)
            continue
        latest[name] = len(found)
        found.append((stamped, [event]))
    return found


def worth_a_row(found: StampedEvent) -> bool:
    """Return whether the event gets a row. A plan that was not adopted does only if a detection triggered it."""
    event = found.event
    if isinstance(event, PlanMade):
        return event.adopted or event.findings > 0
    if isinstance(event, (RunStarted, RunEnded)):
        return found.stamp.rank == 0
    return not isinstance(event, (IterationsTimed, ArrivalsSeen))


def _tone(event: Event) -> str | None:
    """Return the colour of an event's mark; None if it has no mark."""
    if isinstance(event, (LinkDetection, StageDetection, StragglerDetection)):
        return "good" if event.after == "healthy" else "bad"
    if isinstance(event, PlanSwitched):
        return "good"
    if isinstance(event, PathChanged):
        return "bad" if event.failover else "plain"
    return "bad" if isinstance(event, (Fault, RanksLost)) else None


def _clock(seconds: float) -> str:
    minutes, rest = divmod(max(seconds, 0.0), 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours}:{minutes:02}:{rest:04.1f}" if hours else f"{minutes}:{rest:04.1f}"
