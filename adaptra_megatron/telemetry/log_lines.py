# SPDX-License-Identifier: Apache-2.0
"""Write the leader's events to the training's own log: one line each, with Megatron's iteration numbers.

Lines are made from events alone, so that the log, the event log and the report agree.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from statistics import median

from adaptra_megatron.common.log import RateLimitedLog, logger_of
from adaptra_megatron.telemetry.event_wording import (
    cable_of,
    cost_since,
    ends_of,
    finding_text,
    links_in_words,
    listed,
    memory_text,
    numbers_in_words,
    short_duration,
    touched_in_words,
)
from adaptra_megatron.telemetry.events import (
    Event,
    LinkDetection,
    MemoryWanted,
    PathChosen,
    PlanMade,
    PlanSwitched,
    PolicyChanged,
    RoutesChosen,
    StageDetection,
    StragglerDetection,
    SwitchMeasured,
    short_reason,
)

Detection = LinkDetection | StageDetection
Numbered = Callable[[int], int]
"""Returns Megatron's number of an iteration that is counted from the start of the process."""

MOST_IN_A_ROW = 8
"""Lines of findings, and lines of plans, before each are limited to one a minute."""
PATIENCE = 3
"""Iterations that a finding must last before it is logged, unless it leads to a plan: shorter ones do not matter."""


class RunLog:
    """Log lines of one replica's leader. `take` is thread-safe; the rest is for the training thread.

    All findings on one cable (directions, paths, lanes, replicas) make one line.
    """

    def __init__(self, *, word: str = "", first: bool = True) -> None:
        """Set up. `word`: prefix of lines that concern this replica alone, such as "replica 3: ". `first`: whether
        this rank logs the findings of the whole job; leaders of other replicas log them at DEBUG."""
        self._word, self._first = word, first
        logger = logger_of(__name__)
        self._found, self._planned = RateLimitedLog(logger, MOST_IN_A_ROW), RateLimitedLog(logger, MOST_IN_A_ROW)
        # By cable (both directions and paths, all pipelines), stage or replica:
        self._unhealthy: dict[Hashable, dict[object, Detection]] = {}
        """Findings of slow or dead links and stages, by direction, path and pipeline."""
        self._latest: dict[Hashable, Detection] = {}
        self._said: dict[Hashable, str] = {}
        """State in the latest line."""
        self._changed: dict[Hashable, int] = {}
        """Iteration from which on the state differs from that."""
        self._ends: dict[Hashable, str] = {}
        """Text for the last line of the run."""
        self._pending: deque[tuple[Event, int | None]] = deque()
        """Each with its replica; None for this rank's."""
        self._others: dict[int, PlanSwitched] = {}
        """By replica, plans of others that no line has reported yet."""
        self._others_since = 0
        self._reasons: dict[int, list[str]] = {}
        """By plan number, for plans that do not run yet."""
        self._bounds_s: dict[int, float | None] = {}
        self._predicted_s: float | None = None
        self._gains = True
        """Whether the current plan is to be faster than the one before, and not only to hold less."""
        self._plans = 0

    def take(self, event: Event, replica: int | None = None) -> None:
        """Keep `event` until the next `say`. `replica`: its replica; None: this rank's."""
        self._pending.append((event, replica))

    def say(self, iteration: int, numbered: Numbered, seconds: Mapping[int, float] | None = None) -> None:
        """Log the events since the last call. `iteration`: the current one. `seconds`: durations of the latest
        iterations."""
        if not self._pending and not self._changed and not self._others:
            return
        taken = [self._pending.popleft() for _ in range(len(self._pending))]
        self._follow((event for event, _ in taken if isinstance(event, LinkDetection | StageDetection)), iteration)
        events = [event for event, replica in taken if replica is None]
        for event, replica in taken:
            if replica is not None and isinstance(event, PlanSwitched):
                self._others_since = self._others_since if self._others else iteration
                self._others[replica] = event
        planned = any(isinstance(event, PlanSwitched) for event in events)
        due = [name for name, since in self._changed.items() if planned or iteration - since >= PATIENCE]
        head = f"{self._word}iteration {numbered(iteration)}: "
        for event in events:
            if isinstance(event, StragglerDetection):
                level, text = self._straggler(event, numbered)
                self._found.log(level, "iteration %d: %s", numbered(iteration), text)
        for names in self._alike(due):
            level, text = self._finding(names, numbered, seconds or {})
            self._found.log(self._level(level), "iteration %d: %s", numbered(iteration), text)
        for text in self._plan_lines(events):
            self._planned.log(self._level(logging.INFO), "%s%s", head, text)
        if self._others and iteration - self._others_since >= PATIENCE:
            if any(self._ends.values()):
                self._planned.log(logging.INFO, "iteration %d: %s", numbered(iteration), _plans_of(self._others))
            self._others.clear()

    def _level(self, level: int) -> int:
        return level if self._first else logging.DEBUG

    def end(self, iterations: int, saved_s: float, reason: str, report: str) -> None:
        """Log how the run went, in one line. `reason`: text of an error, or "". `report`: command for more details, or
        ""."""
        if not self._first:
            return
        parts = [f"{self._plans} plan{'' if self._plans == 1 else 's'}"]
        if saved_s > 0.0:
            parts.append(f"about {short_duration(saved_s)} saved by them")
        parts += dict.fromkeys(text for text in self._ends.values() if text)
        head = f"ended by {reason}" if reason else "done"
        text = f"{self._word}{head} after {iterations} iterations: {', '.join(parts)}"
        logger_of(__name__).info("%s", f"{text}; {report}" if report else text)

    def _follow(self, found: Iterable[Detection], iteration: int) -> None:
        """Update the findings, and since when each state differs from what was logged."""
        for event in found:
            name = cable_of(event) if isinstance(event, LinkDetection) else f"stage {event.stage}"
            places = self._unhealthy.setdefault(name, {})
            places.pop(_place(event), None)
            if event.after != "healthy":
                places[_place(event)] = event
            self._latest[name] = event
            if self._state(name) == self._said.get(name, "healthy"):
                self._changed.pop(name, None)
            else:
                self._changed.setdefault(name, iteration)

    def _alike(self, names: Iterable[Hashable]) -> list[list[Hashable]]:
        """Group names that share a line: links between the same stages in the same state. Removes them from the
        changes."""
        found: dict[object, list[Hashable]] = {}
        for name in names:
            del self._changed[name]
            events = self._events(name)
            links = frozenset(ends_of(event) for event in events if isinstance(event, LinkDetection))
            found.setdefault((self._state(name), links or name), []).append(name)
        return list(found.values())

    def _events(self, name: Hashable) -> list[Detection]:
        """Return the unhealthy findings of `name`; the latest finding if all are healthy."""
        return list(self._unhealthy[name].values()) or [self._latest[name]]

    def _state(self, name: Hashable) -> str:
        states = {event.after for event in self._unhealthy[name].values()}
        return next((state for state in ("dead", "slow") if state in states), "healthy")

    def _finding(self, names: Sequence[Hashable], numbered: Numbered, seconds: Mapping[int, float]) -> tuple[int, str]:
        """Return level and text of one line about `names`, which are in the same state."""
        events = sorted((event for name in names for event in self._events(name)), key=_since)
        state = self._state(names[0])
        first = _since(events[0])
        since = "" if first < 0 else f" since iteration {numbered(first)}"
        links = [event for event in events if isinstance(event, LinkDetection)]
        what = links_in_words(links) if links else str(names[0])
        for name in names:
            self._said[name] = state
            self._ends[name] = f"{what} {state}{since}" if state != "healthy" else ""
        touched = touched_in_words(links)
        what += "" if touched else _pipelines(events)
        at, reason = (None if first < 0 else numbered(first)), short_reason(events[0])
        if state == "healthy":
            return logging.INFO, finding_text(what, state, at, reason)
        touched, cost = touched or _hosts_of_stage(events), cost_since(seconds, first)
        return logging.WARNING, finding_text(what, state, at, reason, touched, cost, brief=True)

    def _straggler(self, event: StragglerDetection, numbered: Numbered) -> tuple[int, str]:
        """Return level and text of a line about a straggling replica, which is not delayed: it lasts for many
        iterations already."""
        name, since = f"replica {event.replica}", ""
        if event.since_iteration is not None:
            since = f" since iteration {numbered(event.since_iteration)}"
        if event.after == "healthy":
            self._ends[name] = ""
            return logging.INFO, f"{name} does not come last to gradient synchronisation any more: {event.reason}"
        self._ends[name] = f"{name} late{since}"
        text = f"{event.describe()} comes last to gradient synchronisation{since}, {event.reason}"
        return logging.WARNING, f"{text}; {event.remedy}" if event.remedy else text

    def _plan_lines(self, events: Iterable[Event]) -> Iterator[str]:
        """Yield lines about new plans, and about the time that the last one takes."""
        for event in events:
            if isinstance(event, PlanMade | PathChosen | RoutesChosen | PolicyChanged):
                self._remember(event)
            elif isinstance(event, PlanSwitched):
                yield self._in_force(event)
            elif isinstance(event, MemoryWanted):
                yield memory_text(event)
            elif isinstance(event, SwitchMeasured) and self._gains:
                predicted = "" if self._predicted_s is None else f", {short_duration(self._predicted_s)} predicted"
                yield (
                    f"plan {event.number} takes {short_duration(event.after_measured_s)} an iteration{predicted}, "
                    f"{short_duration(event.before_measured_s)} before"
                )

    def _remember(self, event: PlanMade | PathChosen | RoutesChosen | PolicyChanged) -> None:
        """Note why the next plan differs."""
        reasons = self._reasons.setdefault(event.number, [])
        if isinstance(event, PolicyChanged):
            reasons.append(f"policy {event.after}, as asked for, instead of {event.before}")
        elif isinstance(event, PathChosen):
            reasons.append(f"link {event.source}->{event.target} takes the {event.after} path")
        elif isinstance(event, RoutesChosen):
            reasons.append(event.reason)
            self._bounds_s[event.number] = event.lower_bound_s
        elif event.adopted:
            self._bounds_s[event.number] = event.lower_bound_s
            if event.findings:  # which lines of their own say
                reasons += [event.memory] if event.memory else []
            else:
                reasons.append(event.reason)

    def _in_force(self, event: PlanSwitched) -> str:
        self._plans += 1
        self._predicted_s = event.predicted_s
        numbers = [number for number in sorted(self._reasons) if number <= event.number]
        reasons = list(dict.fromkeys(reason for number in numbers for reason in self._reasons.pop(number)))
        bound_s = next((self._bounds_s.pop(number) for number in reversed(numbers) if number in self._bounds_s), None)
        why = f" ({'; '.join(reasons)})" if reasons else ""
        text = f"plan {event.number} in force{why}"
        if event.predicted_s is not None:
            expected, before_s = short_duration(event.predicted_s), event.before_predicted_s
            self._gains = before_s is None or short_duration(before_s) != expected
            text += f": {expected} an iteration expected{'' if self._gains else ', as before'}"
            if before_s is not None and self._gains:
                text += f" instead of {short_duration(before_s)}"
            if bound_s is not None:
                text += f"; no order takes less than {short_duration(bound_s)}"
        return text


def _plans_of(others: Mapping[int, PlanSwitched]) -> str:
    """Return the clause about new plans of other replicas."""
    text = f"{numbers_in_words('replica', others)}: other plans in force"
    expected = [(each.predicted_s, each.before_predicted_s) for each in others.values()]
    known = [(after_s, before_s) for after_s, before_s in expected if after_s is not None and before_s is not None]
    if not known:
        return text
    after, before = (short_duration(median(column)) for column in zip(*known, strict=True))
    return f"{text}: {after} an iteration expected{', as before' if after == before else f' instead of {before}'}"


def _hosts_of_stage(events: Iterable[Detection]) -> str:
    """Return ranks and hosts of a stage, as text; "" if unknown."""
    places: dict[str, set[int]] = {}
    for event in events:
        if isinstance(event, StageDetection) and event.stage_rank is not None:
            places.setdefault(event.host, set()).add(event.stage_rank)
    texts = [f"{numbers_in_words('rank', ranks)} on {host}" for host, ranks in places.items()]
    return listed(texts) if texts else ""


def _since(event: Detection) -> int:
    """Return the first iteration of the change; -1 if unknown."""
    return -1 if event.since_iteration is None else event.since_iteration


def _place(event: Detection) -> object:
    """Return a key that distinguishes findings of one name."""
    if isinstance(event, StageDetection):
        return event.pipeline
    return event.source, event.target, event.pipeline, event.path


def _pipelines(events: Sequence[Detection]) -> str:
    """Name the pipelines of a line, unless it is only the first one."""
    pipelines = {event.pipeline or 0 for event in events}
    if len(pipelines) > 1:
        return f" of {len(pipelines)} pipelines"
    return f" of the pipeline of rank {next(iter(pipelines))}" if any(pipelines) else ""
