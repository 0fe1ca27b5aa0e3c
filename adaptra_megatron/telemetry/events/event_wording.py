# SPDX-License-Identifier: Apache-2.0
"""Events in plain words: what happened, and why. Text only: the page that shows it escapes it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from adaptra_megatron.telemetry.events.cables import links_in_words, touched_in_words
from adaptra_megatron.telemetry.events.events import (
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
from adaptra_megatron.telemetry.events.log_lines import memory_text


def event_text(event: Event, alike: Sequence[LinkDetection] = ()) -> tuple[str, str]:
    """Return what happened, and why. `alike`: all findings of links that one row stands for, `event` among them."""
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
        numbers = f"{duration(event.before_measured_s)} → {duration(event.after_measured_s)} an iteration"
        return f"Plan {event.number} turned out: {numbers}", f"median of {event.iterations} iterations"
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
        lost = "; ".join(f"{rank}: {why}" for rank, why in event.ranks.items())
        cells = f"dead cells: {', '.join(event.dead_cells)}"
        return f"{len(event.ranks)} of the ranks died, and {event.live} went on {duration(event.seconds)} later", (
            f"{lost}; {cells}"
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
    text += f": {duration(event.predicted_s)} predicted"
    if event.adopted and event.current_predicted_s is not None:
        text += f", {duration(event.current_predicted_s)} with the present order"
    return text


def _routes_text(event: RoutesChosen) -> str:
    if not event.moved:
        return "computes every micro-batch in its own replica again"
    count = sum(move[-1] for move in event.moved)
    text = f"computes {count} micro-batches at other replicas"
    if event.predicted_s is not None and event.current_predicted_s is not None:
        text += (
            f": {duration(event.predicted_s)} predicted, {duration(event.current_predicted_s)} with the present routes"
        )
    return text


def _switch_reason(event: PlanSwitched) -> str:
    if event.predicted_s is None or event.before_predicted_s is None:
        return ""
    return f"predicted: {duration(event.before_predicted_s)} → {duration(event.predicted_s)} an iteration"


def duration(seconds: float) -> str:
    """Three digits, in the unit that suits."""
    if seconds >= 99.95:
        return f"{seconds:,.0f} s"
    if seconds >= 0.9995:
        return f"{seconds:#.3g} s"
    if seconds >= 0.9995e-3:
        return f"{1e3 * seconds:#.3g}".rstrip(".") + " ms"
    return f"{1e6 * seconds:.0f} µs"
