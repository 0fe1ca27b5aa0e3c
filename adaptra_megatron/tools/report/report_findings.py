# SPDX-License-Identifier: Apache-2.0
"""Find what a report says of a run's parts: use of time, messages of links, cost of their delays. Group similar parts
and changes."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean, median

from adaptra_megatron.schedule.costs import CostError, Costs, LinkCost, PerChunk
from adaptra_megatron.schedule.ir import Action, Kind, Schedule, ScheduleError
from adaptra_megatron.schedule.jobs.job_simulation import Progress
from adaptra_megatron.schedule.simulator import simulate
from adaptra_megatron.telemetry.events import PlanSwitched
from adaptra_megatron.tools.recordings.run_record import Part, RunIteration, RunRecord
from adaptra_megatron.tools.report.waiting import Cause, CauseKind, Flight, IterationAnalysis, WaitingPhase

Link = tuple[int, int]

MOST_RECORDS = 300_000
"""Maximum number of records analysed in total, which takes seconds; of a longer run, fewer iterations of each part are
used."""
REPORT_SLOW_SHARE = 0.25
"""A link counts as slow if three of four messages take more than this share of a mean action."""
CREDIBLE = 0.1
"""If a model of an iteration differs more from its measured time, no what-if question is asked."""


class Use(str, enum.Enum):
    """Use of a stage's time, in the order in which charts stack them."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    LINK = "link"
    STAGE = "stage"
    FILL = "fill"
    DRAIN = "drain"
    OVERHEAD = "overhead"

    @property
    def idle(self) -> bool:
        return self not in (Use.FORWARD, Use.BACKWARD, Use.BACKWARD_INPUT, Use.BACKWARD_WEIGHT)


@dataclass(frozen=True, kw_only=True)
class LinkFinding:
    """One directed link during one part."""

    median_s: float
    """Seconds from the end of the sending action to the arrival."""
    worst_s: float
    messages: int
    idle_share: float
    """Share of all stages' time that was idle because a message of this link was in transit."""
    slow: bool


@dataclass(frozen=True, kw_only=True)
class PartFinding:
    """One part of a run. Times are means over the analysed iterations and, unless per stage, over the stages. They are
    empty if none was traced."""

    part: Part
    use_s: Mapping[Use, float]
    """Seconds of an iteration by use; they add up to its time."""
    stage_use_s: tuple[Mapping[Use, float], ...]
    causes: Mapping[Cause, float]
    """Idle share of all stages' time by cause, without the drain; largest first."""
    links: Mapping[Link, LinkFinding]
    without: Mapping[Link, float]
    """Seconds of an iteration in the same order of actions if a slow pair of stages (a < b) had no delay."""
    alike: int = 0
    """Number of similar parts that this one represents."""

    @property
    def seconds(self) -> float:
        return self.part.seconds

    @property
    def traced(self) -> bool:
        """Whether iterations were traced, and not only timed."""
        return bool(self.use_s)

    @property
    def idle_share(self) -> float:
        """Idle share of all stages' time, 0..1, in traced iterations."""
        total_s = sum(self.use_s.values())
        return sum(seconds for use, seconds in self.use_s.items() if use.idle) / total_s

    def share(self, use: Use) -> float:
        """Return the share of all stages' time that went into `use`, 0..1."""
        return self.use_s.get(use, 0.0) / sum(self.use_s.values())

    @property
    def slow_links(self) -> list[Link]:
        """Slow links, the slowest first."""
        slow = [link for link, found in self.links.items() if found.slow]
        return sorted(slow, key=lambda link: -self.links[link].median_s)


def use_of(phase: WaitingPhase, cause: Cause) -> Use:
    """Return the use that an idle period counts as."""
    if cause.kind is CauseKind.LINK:
        return Use.LINK
    if phase is WaitingPhase.END:
        return Use.DRAIN
    if phase is WaitingPhase.START:
        return Use.FILL
    return Use.STAGE if cause.kind in (CauseKind.STAGE, CauseKind.REPLICA) else Use.OVERHEAD


def find(run: RunRecord, progress: Progress | None = None) -> list[PartFinding]:
    """Return a finding for each part of `run`."""
    largest = max((len(iteration.records) for iteration in run.iterations), default=0)
    each = max(1, int(MOST_RECORDS / max(1, largest) / max(1, len(run.parts))))
    found = []
    for number, part in enumerate(run.parts, start=1):
        found.append(_finding(part, each))
        if progress is not None:
            progress("looking at parts of the run", number, len(run.parts))
    return found


def saved_seconds(findings: Sequence[PartFinding]) -> float:
    """Return the seconds that plan switches saved: each until the next change, compared with the iterations just
    before."""
    return sum(
        max(0.0, before.seconds - after.seconds) * len(after.part.iterations)
        for before, after in pairwise(findings)
        if any(isinstance(found.event, PlanSwitched) for found in after.part.beginning)
    )


def _finding(part: Part, most: int) -> PartFinding:
    if not part.traced:
        return PartFinding(part=part, use_s={}, stage_use_s=(), causes={}, links={}, without={})
    chosen = _spread(part, most)
    analyses = [IterationAnalysis(iteration.records, iteration.arrivals) for iteration in chosen]
    stages = analyses[0].stages
    stage_use_s: list[dict[Use, float]] = [defaultdict(float) for _ in range(stages)]
    causes: dict[Cause, float] = defaultdict(float)
    flights: dict[Link, list[Flight]] = defaultdict(list)
    stage_time_s = stages * sum(analysis.seconds for analysis in analyses)
    for analysis in analyses:
        for stage, computed_s in enumerate(analysis.compute_s()):
            for kind, seconds in computed_s.items():
                stage_use_s[stage][Use(kind)] += seconds / len(analyses)
        for period in analysis.idle_periods():
            stage_use_s[period.stage][use_of(period.phase, period.cause)] += period.seconds / len(analyses)
            causes[period.cause] += period.seconds / stage_time_s
        for flight in analysis.flights():
            flights[flight.source, flight.target].append(flight)
    action_s = mean(record.compute_s for iteration in chosen for record in iteration.records)
    links = {link: _link_finding(flights[link], link, causes, action_s) for link in sorted(flights)}
    if not any(iteration.arrivals for iteration in chosen):
        links = _credible(links)
    use_s = {use: mean(stage[use] for stage in stage_use_s) for use in Use}
    return PartFinding(
        part=part,
        use_s=use_s,
        stage_use_s=tuple(stage_use_s),
        causes=dict(sorted(causes.items(), key=lambda entry: -entry[1])),
        links=links,
        without=_without_delays(part.typical, links),
    )


def _spread(part: Part, most: int) -> Sequence[RunIteration]:
    """Return at most `most` iterations of typical length, evenly spread."""
    near = [entry for entry in part.traced if abs(entry.seconds / part.seconds - 1.0) < 0.1] or [part.typical]
    return near[:: -(-len(near) // most)]


def _link_finding(flights: Sequence[Flight], link: Link, causes: Mapping[Cause, float], action_s: float) -> LinkFinding:
    seconds = sorted(flight.seconds for flight in flights)
    # A receive that is bound to a send, as in stock's schedules, ends late now and then on the quickest link.
    quick_s = seconds[len(seconds) // 4]
    return LinkFinding(
        median_s=median(seconds),
        worst_s=seconds[-1],
        messages=len(flights),
        idle_share=causes.get(Cause(CauseKind.LINK, *link), 0.0),
        slow=quick_s > REPORT_SLOW_SHARE * action_s,
    )


def _credible(links: Mapping[Link, LinkFinding]) -> dict[Link, LinkFinding]:
    """Return `links` for traces without arrivals, as of stock. There, a receive that is bound to a send in the other
    direction ends with that, so a link counts as slow only if it is slow in both directions."""
    slow = {link for link, found in links.items() if found.slow}
    return {link: replace(found, slow=found.slow and link[::-1] in slow) for link, found in links.items()}


def _without_delays(iteration: RunIteration, links: Mapping[Link, LinkFinding]) -> dict[Link, float]:
    """Return the time without the delay of each slow pair: simulations of the iteration's order with its own times."""
    pairs = {(min(link), max(link)) for link, found in links.items() if found.slow}
    if not pairs:
        return {}
    schedule = schedule_of(iteration)
    delays_s = {link: found.median_s for link, found in links.items()}
    found = {}
    try:
        measured = costs_of(iteration, schedule, delays_s)
        if abs(simulate(schedule, measured).makespan_s / iteration.seconds - 1.0) > CREDIBLE:
            return {}
        for pair in sorted(pairs):
            kept = {link: delay_s for link, delay_s in delays_s.items() if (min(link), max(link)) != pair}
            found[pair] = simulate(schedule, costs_of(iteration, schedule, kept)).makespan_s
    except (ScheduleError, CostError):
        return {}  # a trace with gaps, or ranks that were not one pipeline: nothing can be said
    return found


def schedule_of(iteration: RunIteration) -> Schedule:
    """Return the order of actions that ran."""
    stages = 1 + max(record.stage for record in iteration.records)
    orders: list[list[Action]] = [[] for _ in range(stages)]
    for record in iteration.records:
        orders[record.stage].append(Action(record.stage, Kind(record.kind), record.chunk, record.micro_batch))
    return Schedule(
        stages=stages,
        chunks=1 + max(record.chunk for record in iteration.records),
        micro_batches=1 + max(record.micro_batch for record in iteration.records),
        orders=tuple(map(tuple, orders)),
    )


def costs_of(iteration: RunIteration, schedule: Schedule, delays_s: Mapping[Link, float]) -> Costs:
    """Return the costs from the iteration's actions. Raises CostError if actions are missing."""
    seconds: dict[tuple[int, int, str], list[float]] = defaultdict(list)
    for record in iteration.records:
        seconds[record.stage, record.chunk, record.kind].append(record.compute_s)

    def table(kinds: Iterable[str]) -> PerChunk:
        return tuple(tuple(_mean(seconds, stage, chunk, kinds) for chunk in chunks) for stage in range(schedule.stages))

    chunks = range(schedule.chunks)
    return Costs(
        stages=schedule.stages,
        chunks=schedule.chunks,
        micro_batches=schedule.micro_batches,
        forward_s=table("F"),
        backward_input_s=table("IB"),
        backward_weight_s=table("W"),
        links={link: LinkCost(latency_s=delay_s) for link, delay_s in delays_s.items()},
    )


def _mean(seconds: Mapping[tuple[int, int, str], list[float]], stage: int, chunk: int, kinds: Iterable[str]) -> float:
    """Return the mean seconds of the first of `kinds` that ran; 0 if none did."""
    return next((mean(seconds[stage, chunk, kind]) for kind in kinds if seconds.get((stage, chunk, kind))), 0.0)


ALIKE = 0.05
"""Relative difference of iteration times, or difference of idle shares, up to which parts count as similar."""
LEAST_TIMES = 3
MOST_PARTS_ALONE = 8
"""Number of parts up to which all are shown."""
Change = tuple[PartFinding, PartFinding]
"""A part of the run and the next one."""


def distinct(findings: Sequence[PartFinding]) -> list[PartFinding]:
    """Return the first of each group of similar parts, with the number of others, and the last part; all of a short
    run."""
    if len(findings) <= MOST_PARTS_ALONE:
        return list(findings)
    kinds: list[PartFinding] = []
    for finding in findings[:-1]:
        index = next((index for index, kind in enumerate(kinds) if _alike(kind, finding)), None)
        if index is None:
            kinds.append(finding)
        else:
            kinds[index] = replace(kinds[index], alike=kinds[index].alike + 1)
    return [*kinds, findings[-1]]


def repetitions(changes: Sequence[Change]) -> list[list[Change]]:
    """Return the changes of iteration time that occur at least `LEAST_TIMES` times, the most frequent first."""
    groups: list[list[Change]] = []
    for change in changes:
        group = next((group for group in groups if _same_change(group[0], change)), None)
        if group is None:
            groups.append([change])
        else:
            group.append(change)
    return sorted((group for group in groups if len(group) >= LEAST_TIMES), key=lambda group: -len(group))


def _near(first: float, second: float) -> bool:
    return abs(first - second) <= ALIKE * max(first, second)


def _alike(one: PartFinding, other: PartFinding) -> bool:
    if not _near(one.seconds, other.seconds) or one.traced != other.traced:
        return False
    if not one.traced:
        return True
    return abs(one.idle_share - other.idle_share) <= ALIKE and set(one.slow_links) == set(other.slow_links)


def _same_change(one: Change, other: Change) -> bool:
    kinds = [{type(found.event) for found in after.part.beginning} for _before, after in (one, other)]
    return kinds[0] == kinds[1] and _near(one[0].seconds, other[0].seconds) and _near(one[1].seconds, other[1].seconds)
