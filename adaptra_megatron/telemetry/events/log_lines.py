# SPDX-License-Identifier: Apache-2.0
"""What the leading rank says in the training's own log: one line per thing that happened, in Megatron's numbers.

Everything is made from events, so the log, the event log and the report tell the same story.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from adaptra_megatron.log import logger_of
from adaptra_megatron.sparing_log import SparingLog
from adaptra_megatron.telemetry.events.events import (
    Event,
    LinkDetection,
    MemoryWanted,
    PathChosen,
    PlanMade,
    PlanSwitched,
    RoutesChosen,
    StageDetection,
    StragglerDetection,
    SwitchMeasured,
)

Detection = LinkDetection | StageDetection
Numbered = Callable[[int], int]
"""Megatron's number of an iteration that is counted from the start of the process."""

MOST_IN_A_ROW = 8
"""Lines of findings, and lines of plans, before they are at most one a minute."""
PATIENCE = 3
"""Iterations that a finding must stand before it is said, unless a plan follows from it: what has gone by then was no
news."""
MEMORY = re.compile(r"it holds [^;]*|stage \d+ would hold [^;]*|stage \d+ may hold [^;]*")
"""Parts of a plan's reason that no finding's line has said."""


class RunLog:
    """Lines of one replica's leading rank. `take` is for any thread, the rest for the training thread."""

    def __init__(self, *, word: str = "", first: bool = True) -> None:
        """`word`: before each line, such as "replica 3: ". `first`: this rank says what concerns the whole job: other
        replicas' leading ranks keep quiet until something is found."""
        self._word, self._first = word, first
        logger = logger_of(__name__)
        self._found, self._planned = SparingLog(logger, MOST_IN_A_ROW), SparingLog(logger, MOST_IN_A_ROW)
        # By name of a link (both directions, all pipelines) or of a stage:
        self._unhealthy: dict[str, dict[object, Detection]] = {}
        """What is slow or dead, by direction and pipeline."""
        self._latest: dict[str, Detection] = {}
        self._said: dict[str, str] = {}
        """State in the latest line."""
        self._changed: dict[str, int] = {}
        """Iteration since when the state is another one."""
        self._ends: dict[str, str] = {}
        """What the last line of the run says of it."""
        self._pending: deque[Event] = deque()
        self._reasons: dict[int, list[str]] = {}
        """By plan number, of those that are not in force yet."""
        self._bounds_s: dict[int, float | None] = {}
        self._predicted_s: float | None = None
        self._gains = True
        """Whether the plan in force is to be faster than the one before, and not only to hold less."""
        self._plans = 0

    def take(self, event: Event) -> None:
        """Keep `event` until the next `say`."""
        self._pending.append(event)

    def say(self, iteration: int, numbered: Numbered) -> None:
        """Log what has happened since the last call; `iteration` runs now."""
        if not self._pending and not self._changed:
            return
        events = [self._pending.popleft() for _ in range(len(self._pending))]
        self._follow((event for event in events if isinstance(event, LinkDetection | StageDetection)), iteration)
        planned = any(isinstance(event, PlanSwitched) for event in events)
        due = [name for name, since in self._changed.items() if planned or iteration - since >= PATIENCE]
        head = f"{self._word}iteration {numbered(iteration)}: "
        for event in events:
            if isinstance(event, StragglerDetection):
                level, text = self._straggler(event, numbered)
                self._found.log(level, "iteration %d: %s", numbered(iteration), text)
        for name in due:
            del self._changed[name]
            level, text = self._finding(name, numbered)
            self._found.log(level, "%s%s", head, text)
        level = logging.INFO if self._first or any(self._ends.values()) else logging.DEBUG
        for text in self._plan_lines(events):
            self._planned.log(level, "%s%s", head, text)

    def end(self, iterations: int, saved_s: float, reason: str, report: str) -> None:
        """Log how the run went, in one line. `reason`: an error's text, or "". `report`: how to learn more, or ""."""
        if not self._first:
            return
        parts = [f"{self._plans} plan{'' if self._plans == 1 else 's'}"]
        if saved_s > 0.0:
            parts.append(f"about {duration(saved_s)} saved by them")
        parts += [text for text in self._ends.values() if text]
        head = f"ended by {reason}" if reason else "done"
        text = f"{self._word}{head} after {iterations} iterations: {', '.join(parts)}"
        logger_of(__name__).info("%s", f"{text}; {report}" if report else text)

    def _follow(self, found: Iterable[Detection], iteration: int) -> None:
        """Note what is slow or dead now, and since when that is something else than what was said."""
        for event in found:
            name = _name(event)
            places = self._unhealthy.setdefault(name, {})
            places.pop(_place(event), None)
            if event.after != "healthy":
                places[_place(event)] = event
            self._latest[name] = event
            if self._state(name) == self._said.get(name, "healthy"):
                self._changed.pop(name, None)
            else:
                self._changed.setdefault(name, iteration)

    def _state(self, name: str) -> str:
        states = {event.after for event in self._unhealthy[name].values()}
        return next((state for state in ("dead", "slow") if state in states), "healthy")

    def _finding(self, name: str, numbered: Numbered) -> tuple[int, str]:
        """Level and text of one line."""
        events = list(self._unhealthy[name].values()) or [self._latest[name]]
        state = self._said[name] = self._state(name)
        sinces = [event.since_iteration for event in events if event.since_iteration is not None]
        since = f" since iteration {numbered(min(sinces))}" if sinces else ""
        self._ends[name] = f"{name} {state}{since}" if state != "healthy" else ""
        text = f"{name}{_pipelines(events)} is {state}{since}: {_short(events[0].reason)}"
        return logging.INFO if state == "healthy" else logging.WARNING, text

    def _straggler(self, event: StragglerDetection, numbered: Numbered) -> tuple[int, str]:
        """Level and text of a line about a replica, which is not the one that says it. What is found of one has stood
        for many iterations."""
        name, since = f"replica {event.replica}", ""
        if event.since_iteration is not None:
            since = f" since iteration {numbered(event.since_iteration)}"
        if event.after == "healthy":
            self._ends[name] = ""
            return logging.INFO, f"{name} does not come last to gradient synchronisation any more: {event.reason}"
        self._ends[name] = f"{name} late{since}"
        place = "" if event.first_rank is None else f" (stage {event.stage}, rank {event.first_rank} on {event.host})"
        text = f"{name}{place} comes last to gradient synchronisation{since}, {event.reason}"
        return logging.WARNING, f"{text}; {event.remedy}" if event.remedy else text

    def _plan_lines(self, events: Iterable[Event]) -> Iterator[str]:
        """Lines of plans that are in force from now on, and of what they turned out to take."""
        for event in events:
            if isinstance(event, PlanMade | PathChosen | RoutesChosen):
                self._remember(event)
            elif isinstance(event, PlanSwitched):
                yield self._in_force(event)
            elif isinstance(event, MemoryWanted):
                yield memory_text(event)
            elif isinstance(event, SwitchMeasured) and self._gains:
                predicted = "" if self._predicted_s is None else f", {duration(self._predicted_s)} predicted"
                yield (
                    f"plan {event.number} takes {duration(event.after_measured_s)} an iteration{predicted}, "
                    f"{duration(event.before_measured_s)} before"
                )

    def _remember(self, event: PlanMade | PathChosen | RoutesChosen) -> None:
        """Note why the next plan is another one."""
        reasons = self._reasons.setdefault(event.number, [])
        if isinstance(event, PathChosen):
            reasons.append(f"link {event.source}->{event.target} takes the {event.after} path")
        elif isinstance(event, RoutesChosen):
            reasons.append(event.reason)
            self._bounds_s[event.number] = event.lower_bound_s
        elif event.adopted:
            self._bounds_s[event.number] = event.lower_bound_s
            reasons += [event.reason] if "since iteration" not in event.reason else MEMORY.findall(event.reason)

    def _in_force(self, event: PlanSwitched) -> str:
        self._plans += 1
        self._predicted_s = event.predicted_s
        numbers = [number for number in sorted(self._reasons) if number <= event.number]
        reasons = list(dict.fromkeys(reason for number in numbers for reason in self._reasons.pop(number)))
        bound_s = next((self._bounds_s.pop(number) for number in reversed(numbers) if number in self._bounds_s), None)
        why = f" ({'; '.join(reasons)})" if reasons else ""
        text = f"plan {event.number} in force{why}"
        if event.predicted_s is not None:
            expected, before_s = duration(event.predicted_s), event.before_predicted_s
            self._gains = before_s is None or duration(before_s) != expected
            text += f": {expected} an iteration expected{'' if self._gains else ', as before'}"
            if before_s is not None and self._gains:
                text += f" instead of {duration(before_s)}"
            if bound_s is not None:
                text += f"; no order takes less than {duration(bound_s)}"
        return text


def memory_text(event: MemoryWanted) -> str:
    """What more memory would buy."""
    what = "the way through the pipeline" if event.source is None else f"link {event.source}<->{event.target}"
    given = ", ".join(f"{cap} would give {duration(seconds)}" for cap, seconds in event.caps.items())
    return (
        f"{what} cannot be hidden within {event.held:g} activations per stage: {duration(event.predicted_s)}; {given} "
        "(--adaptra-max-in-flight)"
    )


def duration(seconds: float) -> str:
    """Milliseconds, or seconds above ten."""
    return f"{seconds:.1f} s" if seconds >= 10.0 else f"{1e3 * seconds:.0f} ms" if seconds >= 0.1 else _small(seconds)


def _small(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _name(event: Detection) -> str:
    if isinstance(event, StageDetection):
        return f"stage {event.stage}"
    ends = sorted((event.source, event.target))
    return f"link {ends[0]}<->{ends[1]}{', host path,' if event.path == 'host' else ''}"


def _place(event: Detection) -> object:
    """Tells findings of one name apart."""
    return (event.source, event.target, event.pipeline) if isinstance(event, LinkDetection) else event.pipeline


def _pipelines(events: Sequence[Detection]) -> str:
    """Which of the job's pipelines a line is about, where it is not the first one alone."""
    pipelines = {event.pipeline or 0 for event in events}
    if len(pipelines) > 1:
        return f" of {len(pipelines)} pipelines"
    return f" of the pipeline of rank {next(iter(pipelines))}" if any(pipelines) else ""


def _short(reason: str) -> str:
    """A finding's reason without the evidence behind it, which the event log has."""
    return re.sub(r" \(baseline [^)]*\)", "", reason.partition("; seen in")[0])
