# SPDX-License-Identifier: Apache-2.0
"""Word findings, and write the leader's events to the training's own log: one line each, with Megatron's iteration
numbers.

Lines are made from events alone, so that the log, the event log and the report agree. The detector judges each
direction and each path of each pipeline's link separately. If a cable becomes slow, all of these show it, in every
replica and lane. So findings on links between the same two hosts are worded as one, with their hosts, ranks, replicas
and cost.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from adaptra_megatron.common.log import RateLimitedLog, logger_of
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

RECENT = 16
"""Number of iterations whose median counts as their duration."""
MEASURABLE = 0.01
"""Share of an iteration below which no cost is named."""
MOST_PAIRS = 3
"""Pairs of hosts that a line names."""


class Cable(NamedTuple):
    """Connection of two hosts or, within a host or if hosts are unknown, of two stages."""

    hosts: tuple[str, ...]
    ends: tuple[int, ...]
    """The stages; empty if two hosts identify it."""


class CableCost(NamedTuple):
    """Median seconds of an iteration, before and since a change."""

    before_s: float
    now_s: float

    @property
    def seconds(self) -> float:
        """Seconds that it costs in each iteration."""
        return max(0.0, self.now_s - self.before_s)

    @property
    def share(self) -> float:
        """The cost as a share of the iteration, 0..1."""
        return self.seconds / self.now_s if self.now_s > 0.0 else 0.0


def ends_of(event: LinkDetection) -> tuple[int, int]:
    """Return the two stages of a link, the lower one first."""
    return min(event.source, event.target), max(event.source, event.target)


def cable_of(event: LinkDetection) -> Cable:
    """Return the cable that a link's messages take."""
    if event.source_host and event.target_host and event.source_host != event.target_host:
        return Cable(tuple(sorted((event.source_host, event.target_host))), ())
    return Cable((event.source_host,) if event.source_host else (), ends_of(event))


def cost_since(seconds: Mapping[int, float], since: int) -> CableCost | None:
    """Return the cost of a change in iteration `since`; None if iterations before or after it are unknown. `seconds`:
    durations by iteration, ascending."""
    before = [each for at, each in seconds.items() if at < since][-RECENT:]
    after = [each for at, each in seconds.items() if at >= since][-RECENT:]
    return CableCost(median(before), median(after)) if before and after else None


def finding_text(
    what: str,
    state: str,
    since: int | None,
    reason: str,
    touched: str = "",
    cost: CableCost | None = None,
    *,
    brief: bool = False,
) -> str:
    """Return a sentence on what is slow, late or dead: "link 1>2 is slow since iteration 13: ...", with its cost.

    Costs below MEASURABLE are left out. `brief`: numbers as in the training's log.
    """
    text = f"{what} is {state}{'' if since is None else f' since iteration {since}'}: {reason}"
    text += f"; {touched}" if touched else ""
    if cost is not None and cost.share >= MEASURABLE:
        seconds, share = (
            (short_duration(cost.seconds), f"{cost.share:.0%}")
            if brief
            else (duration(cost.seconds), percent(cost.share))
        )
        text += f"; it costs {seconds} of each iteration ({share})"
    return text


def percent(share: float) -> str:
    """Format a share as a percentage, with one decimal below 10 %."""
    return f"{share:.1%}" if 0.0 < share < 0.0995 else f"{share:.0%}"


def links_in_words(events: Iterable[LinkDetection], both: str = "<->", one: str | None = None) -> str:
    """Name links, such as "link 1<->2", "link 1->2, host path,", "links 0<->3 and 1<->2". `one`: arrow for a link with
    findings in one direction only; None: use `both`."""
    events = list(events)
    directions: dict[tuple[int, int], set[int]] = defaultdict(set)
    for event in events:
        directions[ends_of(event)].add(event.source)
    names = []
    for (low, high), sources in sorted(directions.items()):
        source = low if one is None else min(sources)
        arrow = both if one is None or len(sources) > 1 else one
        names.append(f"{source}{arrow}{low + high - source}")
    path = ", host path," if all(event.path == "host" for event in events) else ""
    return f"link{'s' * (len(names) > 1)} {listed(names)}{path}"


def touched_in_words(events: Iterable[LinkDetection]) -> str:
    """List hosts, ranks, RNICs, replicas and lanes of links; "" if unknown."""
    ends: dict[tuple[str, ...], dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    rnics: dict[str, set[str]] = defaultdict(set)
    replicas, lanes = set[int](), set[int]()
    for event in events:
        if event.source_rank is None or event.target_rank is None or not event.source_host or not event.target_host:
            continue
        pair = tuple(sorted((event.source_host, event.target_host)))
        ends[pair][event.source_host].add(event.source_rank)
        ends[pair][event.target_host].add(event.target_rank)
        rnics[event.source_host].update(event.source_rnics)
        rnics[event.target_host].update(event.target_rnics)
        replicas.update(() if event.replica is None else (event.replica,))
        lanes.update(() if event.lane is None else (event.lane,))
    if not ends:
        return ""
    pairs = [
        " to ".join(_host_in_words(host, ranks, rnics[host]) for host, ranks in sorted(of_hosts.items(), key=_first))
        for of_hosts in list(ends.values())[:MOST_PAIRS]
    ]
    if len(ends) > MOST_PAIRS:
        pairs.append(f"{len(ends) - MOST_PAIRS} more pairs of hosts")
    text = listed(pairs)
    text += f", {numbers_in_words('replica', replicas)}" if replicas else ""
    return text + (f", {numbers_in_words('lane', lanes)}" if lanes != {0} and lanes else "")


def numbers_in_words(what: str, numbers: Collection[int]) -> str:
    """Format numbers, such as "rank 3", "ranks 0-3, 8"."""
    ordered = sorted(numbers)
    starts = [0, *(at for at, (one, next_) in enumerate(pairwise(ordered), 1) if next_ != one + 1), len(ordered)]
    spans = [(ordered[begin], ordered[end - 1]) for begin, end in pairwise(starts)]
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"{what}{'s' * (len(ordered) > 1)} {text}"


def listed(parts: Sequence[str]) -> str:
    """Join parts, such as "A, B and C"."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _first(of_host: tuple[str, set[int]]) -> int:
    return min(of_host[1])


def _host_in_words(host: str, ranks: Collection[int], rnics: Collection[str]) -> str:
    by = f" ({', '.join(sorted(rnics))})" if rnics else ""
    return f"{numbers_in_words('rank', ranks)} on {host}{by}"


def duration(seconds: float) -> str:
    """Format seconds with three digits, in a suitable unit."""
    if seconds >= 99.95:
        return f"{seconds:,.0f} s"
    if seconds >= 0.9995:
        return f"{seconds:#.3g} s"
    if seconds >= 0.9995e-3:
        return f"{1e3 * seconds:#.3g}".rstrip(".") + " ms"
    return f"{1e6 * seconds:.0f} µs"


def memory_text(event: MemoryWanted) -> str:
    """Describe how much faster plans with more memory would be."""
    what = "the way through the pipeline" if event.source is None else f"link {event.source}<->{event.target}"
    given = ", ".join(f"{cap} would give {short_duration(seconds)}" for cap, seconds in event.caps.items())
    return (
        f"{what} cannot be hidden within {event.held:g} activations per stage: {short_duration(event.predicted_s)}; "
        f"{given} (--adaptra-max-in-flight)"
    )


def short_duration(seconds: float) -> str:
    """Format seconds for the training's log: in milliseconds, or in seconds from 10 s."""
    if seconds >= 10.0:
        return f"{seconds:.1f} s"
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"


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
        """`word`: prefix of lines that concern this replica alone, such as "replica 3: ". `first`: whether
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
