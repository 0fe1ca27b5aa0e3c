# SPDX-License-Identifier: Apache-2.0
"""Rows of the table of events, and the numbered marks that some of them have on the chart of iteration times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from adaptra_megatron.telemetry.events.cables import cable_of
from adaptra_megatron.telemetry.events.event_wording import duration, event_text
from adaptra_megatron.telemetry.events.events import (
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
from adaptra_megatron.tools.recordings.run_record import RunRecord, began_at, replicas_of
from adaptra_megatron.tools.report.charts import Mark
from adaptra_megatron.tools.report.report_findings import PartFinding

ALIKE = 3
"""Iterations within which findings of one cable are one row."""


class EventRow(NamedTuple):
    """One event, in words."""

    mark: Mark | None
    replica: str
    """Replica of the rank that logged it; "" in a job of one replica."""
    iteration: str
    time: str
    """Hours, minutes and seconds since the first event of the log."""
    what: str
    why: str
    effect: str
    """Iteration times before and after an event that began a part of the run; "" for others."""


def event_rows(run: RunRecord, findings: Sequence[PartFinding]) -> list[EventRow]:
    """The events that are news, in order of time; none of a run without a log."""
    effects = {
        found.stamp: f"{duration(before.seconds)} → {duration(after.seconds)}"
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
    """`events` without those that say again what was found of a cable up to ALIKE iterations before; each with all that
    say it."""
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
    """Return whether an event is news: a plan that was not adopted is only where something had been found."""
    event = found.event
    if isinstance(event, PlanMade):
        return event.adopted or event.findings > 0
    if isinstance(event, (RunStarted, RunEnded)):
        return found.stamp.rank == 0
    return not isinstance(event, (IterationsTimed, ArrivalsSeen))


def _tone(event: Event) -> str | None:
    """The colour of an event's mark; None: it has no mark."""
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
