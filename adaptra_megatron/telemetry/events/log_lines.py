# SPDX-License-Identifier: Apache-2.0
"""Log the leading rank's events in the training's own log: one line per thing that happened, in Megatron's numbers.

Everything is made from events, so the log, the event log and the report tell the same story.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from statistics import median

from adaptra_megatron.common.log import RateLimitedLog, logger_of
from adaptra_megatron.telemetry.events.event_wording import (
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
from adaptra_megatron.telemetry.events.events import (
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
"""Megatron's number of an iteration that is counted from the start of the process."""

MOST_IN_A_ROW = 8
"""Lines of findings, and lines of plans, before they are at most one a minute."""
PATIENCE = 3
"""Iterations that a finding must stand before it is said, unless a plan follows from it: what has gone by then was no
news."""


class RunLog:
    """Lines of one replica's leading rank. `take` is for any thread, the rest for the training thread.

    What several directions, paths, lanes and replicas show of one cable is one line.
    """

    def __init__(self, *, word: str = "", first: bool = True) -> None:
        """`word`: before lines that are about this replica alone, such as "replica 3: ". `first`: this rank says what
        is found in the whole job; other replicas' leading ranks say it to those who ask for debug lines."""
        self._word, self._first = word, first
        logger = logger_of(__name__)
        self._found, self._planned = RateLimitedLog(logger, MOST_IN_A_ROW), RateLimitedLog(logger, MOST_IN_A_ROW)
        # By cable (both directions and paths, all pipelines), stage or replica:
        self._unhealthy: dict[Hashable, dict[object, Detection]] = {}
        """What is slow or dead, by direction, path and pipeline."""
        self._latest: dict[Hashable, Detection] = {}
        self._said: dict[Hashable, str] = {}
        """State in the latest line."""
        self._changed: dict[Hashable, int] = {}
        """Iteration since when the state is another one."""
        self._ends: dict[Hashable, str] = {}
        """What the last line of the run says of it."""
        self._pending: deque[tuple[Event, int | None]] = deque()
        """With the replica, where that is another than this rank's."""
        self._others: dict[int, PlanSwitched] = {}
        """By replica, plans of others that no line has said."""
        self._others_since = 0
        self._reasons: dict[int, list[str]] = {}
        """By plan number, of those that are not in force yet."""
        self._bounds_s: dict[int, float | None] = {}
        self._predicted_s: float | None = None
        self._gains = True
        """Whether the plan in force is to be faster than the one before, and not only to hold less."""
        self._plans = 0

    def take(self, event: Event, replica: int | None = None) -> None:
        """Keep `event` until the next `say`. `replica`: the one that it is of; None: this rank's."""
        self._pending.append((event, replica))

    def say(self, iteration: int, numbered: Numbered, seconds: Mapping[int, float] | None = None) -> None:
        """Log what has happened since the last call; `iteration` runs now. `seconds`: what the latest ones took."""
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
        """Log how the run went, in one line. `reason`: an error's text, or "". `report`: how to learn more, or ""."""
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
        """Note what is slow or dead now, and since when that is something else than what was said."""
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
        """Return those that one line names: links between the same stages whose states are alike. They are taken out
        of what has changed."""
        found: dict[object, list[Hashable]] = {}
        for name in names:
            del self._changed[name]
            events = self._events(name)
            links = frozenset(ends_of(event) for event in events if isinstance(event, LinkDetection))
            found.setdefault((self._state(name), links or name), []).append(name)
        return list(found.values())

    def _events(self, name: Hashable) -> list[Detection]:
        """Return what is unhealthy there; where nothing is, what was found last."""
        return list(self._unhealthy[name].values()) or [self._latest[name]]

    def _state(self, name: Hashable) -> str:
        states = {event.after for event in self._unhealthy[name].values()}
        return next((state for state in ("dead", "slow") if state in states), "healthy")

    def _finding(self, names: Sequence[Hashable], numbered: Numbered, seconds: Mapping[int, float]) -> tuple[int, str]:
        """Level and text of one line about what is in the same state."""
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
        """Level and text of a line about a replica, which is not the one that says it. What is found of one has stood
        for many iterations."""
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
        """Lines of plans that are in force from now on, and of what they turned out to take."""
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
        """Note why the next plan is another one."""
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
    """Return the clause about the new plans of other replicas, as for the log."""
    text = f"{numbers_in_words('replica', others)}: other plans in force"
    expected = [(each.predicted_s, each.before_predicted_s) for each in others.values()]
    known = [(after_s, before_s) for after_s, before_s in expected if after_s is not None and before_s is not None]
    if not known:
        return text
    after, before = (short_duration(median(column)) for column in zip(*known, strict=True))
    return f"{text}: {after} an iteration expected{', as before' if after == before else f' instead of {before}'}"


def _hosts_of_stage(events: Iterable[Detection]) -> str:
    """Return where a stage runs; "" where that is not known."""
    places: dict[str, set[int]] = {}
    for event in events:
        if isinstance(event, StageDetection) and event.stage_rank is not None:
            places.setdefault(event.host, set()).add(event.stage_rank)
    texts = [f"{numbers_in_words('rank', ranks)} on {host}" for host, ranks in places.items()]
    return listed(texts) if texts else ""


def _since(event: Detection) -> int:
    """-1: it is not known."""
    return -1 if event.since_iteration is None else event.since_iteration


def _place(event: Detection) -> object:
    """Tells findings of one name apart."""
    if isinstance(event, StageDetection):
        return event.pipeline
    return event.source, event.target, event.pipeline, event.path


def _pipelines(events: Sequence[Detection]) -> str:
    """Return which of the job's pipelines a line is about, where it is not the first one alone."""
    pipelines = {event.pipeline or 0 for event in events}
    if len(pipelines) > 1:
        return f" of {len(pipelines)} pipelines"
    return f" of the pipeline of rank {next(iter(pipelines))}" if any(pipelines) else ""
