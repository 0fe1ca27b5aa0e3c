# SPDX-License-Identifier: Apache-2.0
"""Describe an event, for `adaptra status`, the report and exporters. The result is plain text; a page escapes it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from adaptra_megatron.telemetry.events import (
    ArrivalsSeen,
    Event,
    Fault,
    IterationsTimed,
    LinkDetection,
    MemoryWanted,
    PathChanged,
    PathChosen,
    PlanMade,
    PlanSwitched,
    PolicyChanged,
    RanksLost,
    RanksReturned,
    RoutesChosen,
    RunEnded,
    RunStarted,
    StageDetection,
    StragglerDetection,
    SwitchMeasured,
    short_reason,
)
from adaptra_megatron.telemetry.log_lines import duration, links_in_words, memory_text, touched_in_words


def link_name(link: tuple[int, int]) -> str:
    """Format a link, such as "3→4"."""
    return f"{link[0]}→{link[1]}"


def place_of_stage(event: StageDetection) -> str:
    """Return rank and host of a slow stage, such as "rank 5 on node2"; "" if unknown."""
    return "" if event.stage_rank is None else f"rank {event.stage_rank} on {event.host}"


def event_text(event: Event, alike: Sequence[LinkDetection] = ()) -> tuple[str, str]:
    """Return what happened, and why. `alike`: all findings of links in the same row, `event` included."""
    if isinstance(event, LinkDetection):
        name = links_in_words(alike or [event], "↔", "→")
        touched = touched_in_words(alike)
        return f"{name.capitalize()} is {_state(event)}", "; ".join(filter(None, (event.reason, touched)))
    if isinstance(event, StageDetection):
        return f"Stage {event.stage} is {_state(event)}", event.reason
    if isinstance(event, StragglerDetection):
        return _straggler_text(event), "; ".join(filter(None, (event.reason, event.remedy)))
    if isinstance(event, ArrivalsSeen):
        return f"Arrivals at gradient synchronisation in {event.iterations} iterations up to {event.until}", ""
    if isinstance(event, PlanMade):
        return _plan_text(event), short_reason(event)
    if isinstance(event, MemoryWanted):
        return "More activations per stage would make iterations shorter", memory_text(event)
    if isinstance(event, PolicyChanged):
        return f"Policy {event.after} was asked for, instead of {event.before}", f"it begins with plan {event.number}"
    if isinstance(event, PathChosen):
        gain_s = event.gain_s or 0.0
        gain = f": {duration(gain_s)} a message less, as predicted" if gain_s > 0.0 else ""
        what = f"Plan {event.number} sends link {event.source}→{event.target} over the {event.after} path"
        return f"{what} instead of the {event.before} path{gain}", event.reason
    if isinstance(event, RoutesChosen):
        return f"Plan {event.number} {_routes_text(event)}", event.reason
    if isinstance(event, PlanSwitched):
        return f"Plan {event.number} runs instead of {_plan_name(event.before)}", _switch_reason(event)
    if isinstance(event, SwitchMeasured):
        numbers = change_of_seconds(event.before_measured_s, event.after_measured_s)
        return f"Plan {event.number} turned out: {numbers} an iteration", f"median of {event.iterations} iterations"
    if isinstance(event, IterationsTimed):
        last = event.first + len(event.seconds) - 1
        return f"Iterations {event.first} to {last} took {duration(median(event.seconds))} each, by the median", ""
    if isinstance(event, PathChanged):
        what = "failed over" if event.failover else "moved"
        return (
            f"Link {event.source}→{event.target} {what} from the {event.before} to the {event.after} path",
            event.cause,
        )
    if isinstance(event, Fault):
        place = f" at stage {event.stage}" if event.stage is not None else ""
        place += f", link to stage {event.peer}" if event.peer is not None else ""
        return f"Fault{place}: {event.what}", event.detail
    if isinstance(event, RanksLost):
        failed = "; ".join(f"{rank}: {why}" for rank, why in event.ranks.items())
        cells = f"dead cells: {', '.join(event.dead_cells)}"
        return f"{len(event.ranks)} of the ranks died, and {event.live} went on {duration(event.seconds)} later", (
            f"{failed}; {cells}"
        )
    if isinstance(event, RanksReturned):
        text = f"{len(event.ranks)} of the ranks came back, and {event.live} went on {duration(event.seconds)} later"
        return text, "; ".join(event.ranks)
    if isinstance(event, RunEnded):
        return "The run ended", event.reason
    assert isinstance(event, RunStarted)
    return "The run started", f"on {event.host}" if event.host else ""


def _state(event: LinkDetection | StageDetection) -> str:
    return f"{event.after} (was {event.before})" if event.after != event.before else f"still {event.after}, but changed"


def _straggler_text(event: StragglerDetection) -> str:
    if event.after == "healthy":
        return f"Replica {event.replica} comes with the others again"
    what = event.describe()
    return f"{what[0].upper()}{what[1:]} {'still ' * (event.before == event.after)}comes last"


def _plan_name(number: int) -> str:
    return f"plan {number}" if number else "the first order"


def _plan_text(event: PlanMade) -> str:
    text = f"Plan {event.number} made" if event.adopted else f"{_plan_name(event.number).capitalize()} kept"
    return text + _predicted(event.predicted_s, event.current_predicted_s if event.adopted else None, "order")


def _routes_text(event: RoutesChosen) -> str:
    if not event.moved:
        return "computes every micro-batch in its own replica again"
    count = sum(move[-1] for move in event.moved)
    text = f"computes {count} micro-batches at other replicas"
    if event.predicted_s is not None and event.current_predicted_s is not None:
        text += _predicted(event.predicted_s, event.current_predicted_s, "routes")
    return text


def _switch_reason(event: PlanSwitched) -> str:
    if event.predicted_s is None or event.before_predicted_s is None:
        return ""
    return f"predicted: {change_of_seconds(event.before_predicted_s, event.predicted_s)} an iteration"


def _predicted(seconds: float, present_s: float | None, what: str) -> str:
    return f": {duration(seconds)} predicted" + (
        "" if present_s is None else f", {duration(present_s)} with the present {what}"
    )


def change_of_seconds(before_s: float, after_s: float) -> str:
    """Format a change, such as "1.55 s → 2.05 s"."""
    return f"{duration(before_s)} → {duration(after_s)}"


def age_text(seconds: float) -> str:
    """Format an age, in the largest unit that gives at least 2."""
    for unit, size_s in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size_s:
            return f"{seconds / size_s:.0f} {unit}"
    return duration(seconds)
