# SPDX-License-Identifier: Apache-2.0
"""Describe events and findings, for the log, `adaptra status`, the report and the analysis.

The detector judges each direction and each path of each pipeline's link separately. If a cable becomes slow, all of
these show it, in every replica and lane. So findings on links between the same two hosts are worded as one, with their
hosts, ranks, replicas and cost. The result is plain text; a page escapes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

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
    """Return a sentence on what is slow, late or dead: since when, why, where, and its cost.

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


def link_name(link: tuple[int, int]) -> str:
    """Format a link, such as "3→4"."""
    return f"{link[0]}→{link[1]}"


def place_of_stage(event: StageDetection) -> str:
    """Return rank and host of a slow stage, such as "rank 5 on node2"; "" if unknown."""
    return "" if event.stage_rank is None else f"rank {event.stage_rank} on {event.host}"


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


def duration(seconds: float) -> str:
    """Format seconds with three digits, in a suitable unit."""
    if seconds >= 99.95:
        return f"{seconds:,.0f} s"
    if seconds >= 0.9995:
        return f"{seconds:#.3g} s"
    if seconds >= 0.9995e-3:
        return f"{1e3 * seconds:#.3g}".rstrip(".") + " ms"
    return f"{1e6 * seconds:.0f} µs"


def age_text(seconds: float) -> str:
    """Format an age, in the largest unit that gives at least 2."""
    for unit, size_s in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size_s:
            return f"{seconds / size_s:.0f} {unit}"
    return duration(seconds)


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
