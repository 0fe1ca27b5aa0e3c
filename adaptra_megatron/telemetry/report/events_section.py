# SPDX-License-Identifier: Apache-2.0
"""What happened, as a table and as the flags on the chart of iteration times."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise

from adaptra_megatron.telemetry.events import (
    Event,
    Fault,
    IterationsTimed,
    LinkDetection,
    PathChanged,
    PlanMade,
    PlanSwitched,
    RunEnded,
    RunStarted,
    StageDetection,
    Stamp,
    StampedEvent,
)
from adaptra_megatron.telemetry.report.charts import Mark
from adaptra_megatron.telemetry.report.event_wording import event_text
from adaptra_megatron.telemetry.report.findings import PartFinding
from adaptra_megatron.telemetry.report.tables import table
from adaptra_megatron.telemetry.report.wording import duration
from adaptra_megatron.telemetry.run_record import RunRecord, began_at

MOST_EVENTS = 300


def marks_of(run: RunRecord) -> list[Mark]:
    """What the chart and the table of events show, numbered."""
    marks: list[Mark] = []
    for found in run.events:
        event = found.event
        tone = _tone(event)
        if tone is None:
            continue
        what, why = event_text(event)
        text = f"{what}: {why}" if why else what
        marks.append(Mark(number=len(marks) + 1, iteration=began_at(found), tone=tone, text=text))
    return marks


def _tone(event: Event) -> str | None:
    """The colour of an event's flag; None: it has no flag."""
    if isinstance(event, (LinkDetection, StageDetection)):
        return "good" if event.after == "healthy" else "bad"
    if isinstance(event, PlanSwitched):
        return "good"
    if isinstance(event, PathChanged):
        return "bad" if event.failover else "plain"
    return "bad" if isinstance(event, Fault) else None


def events_section(run: RunRecord, findings: Sequence[PartFinding], marks: Sequence[Mark]) -> str:
    """The table, numbered as the chart's flags; nothing of a run without a log."""
    if not run.events:
        return ""
    start_s = run.events[0].stamp.monotonic_s
    numbers = iter(marks)
    effects = _effects(findings)
    rows = []
    told = [found for found in run.events if _worth_a_row(found)]
    for found in told:
        mark = next(numbers) if _tone(found.event) is not None else None
        badge = f'<span class="badge {mark.tone}">{mark.number}</span>' if mark is not None else ""
        what, why = event_text(found.event)
        effect = effects.get(found.stamp, "")
        iteration = str(found.stamp.iteration) if found.stamp.iteration >= 0 else ""
        rows.append(
            f'<tr><td>{badge}</td><td class="number">{iteration}</td>'
            f'<td class="number">{_clock(found.stamp.monotonic_s - start_s)}</td>'
            f'<td class="what">{escape(what)}</td><td>{escape(why)}</td><td class="number">{escape(effect)}</td></tr>'
        )
    notes = []
    if (left_out := len(rows) - MOST_EVENTS) > 0:
        notes.append(f"The first {MOST_EVENTS}; {left_out} more are in the log.")
    if kept := sum(isinstance(found.event, PlanMade) and not _worth_a_row(found) for found in run.events):
        notes.append(f"{kept} times costs had moved a little, and no other plan was worth a switch.")
    note = f'<p class="note">{" ".join(notes)}</p>' if notes else ""
    headings = ("", "#iteration", "#time", "what", "why", "#an iteration took")
    return f"<section><h2>What happened</h2>{table(headings, rows[:MOST_EVENTS])}{note}</section>"


def _worth_a_row(found: StampedEvent) -> bool:
    """Whether an event is news: a plan that was not adopted is only where something had been found."""
    event = found.event
    if isinstance(event, PlanMade):
        return event.adopted or "since iteration" in event.reason
    if isinstance(event, (RunStarted, RunEnded)):
        return found.stamp.rank == 0
    return not isinstance(event, IterationsTimed)


def _effects(findings: Sequence[PartFinding]) -> dict[Stamp, str]:
    """Iteration times before and after each event that began a part of the run."""
    return {
        found.stamp: f"{duration(before.seconds)} → {duration(after.seconds)}"
        for before, after in pairwise(findings)
        for found in after.part.beginning
    }


def _clock(seconds: float) -> str:
    minutes, rest = divmod(max(seconds, 0.0), 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours}:{minutes:02}:{rest:04.1f}" if hours else f"{minutes}:{rest:04.1f}"
