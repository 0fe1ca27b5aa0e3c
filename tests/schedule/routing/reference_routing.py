# SPDX-License-Identifier: Apache-2.0
"""The slow, obvious replay of routed schedules that the native one must agree with, and random jobs for both."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import defaultdict

from hypothesis import strategies as st

from adaptra_megatron.common.layout import Cell
from adaptra_megatron.schedule.costs import Costs, LinkCost
from adaptra_megatron.schedule.ir import Kind
from adaptra_megatron.schedule.jobs.job_costs import job_of
from adaptra_megatron.schedule.routing.routed_costs import RoutedCosts
from adaptra_megatron.schedule.routing.routed_plans import RoutedAction, RoutedSchedule

Times = list[list[float]]
# What an action needs: its kind (B for either backward), stage, replica and micro-batch.
Result = tuple[Kind, int, int, int]

TABLES = {
    Kind.FORWARD: "forward_s",
    Kind.BACKWARD: "backward_s",
    Kind.BACKWARD_INPUT: "backward_input_s",
    Kind.BACKWARD_WEIGHT: "backward_weight_s",
}


def duration(costs: RoutedCosts, cell: Cell, action: RoutedAction) -> float:
    """The cell's own seconds, times the factor of the micro-batch, which it has from its own replica."""
    if action.kind is Kind.BACKWARD and costs.replicas[0].backward_s is None:
        halves = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
        return sum(duration(costs, cell, action._replace(kind=half)) for half in halves)
    name = TABLES[action.kind]
    seconds = getattr(costs.replicas[cell.replica], name)[cell.stage][0]
    return seconds * costs.replicas[action.replica].factors_of(name, cell.stage, 0)[action.micro_batch]


def link(costs: RoutedCosts, source: Cell, target: Cell) -> LinkCost:
    if (source, target) in costs.links:
        return costs.links[source, target]
    own = [costs.replicas[cell.replica].link(source.stage, target.stage) for cell in (source, target)]
    own = [LinkCost(0.0, one.latency_s + one.occupancy_s) if one.rendezvous else one for one in own]
    return LinkCost(max(one.latency_s for one in own), max(one.occupancy_s for one in own))


def reference_replay(schedule: RoutedSchedule, costs: RoutedCosts) -> tuple[Times, Times] | None:
    """Start and end seconds of each action, or None if the orders deadlock: one event after the other in time."""
    cells = costs.cells
    starts: Times = [[] for _ in cells]
    ends: Times = [[] for _ in cells]
    busy = [False] * len(cells)
    link_free_s: dict[tuple[Cell, Cell], float] = defaultdict(float)
    places = [(d, m) for d in range(costs.job.replicas) for m in range(costs.micro_batches)]
    arrived: set[Result] = {(Kind.FORWARD, 0, d, m) for d, m in places}
    sequence = itertools.count()
    events: list[tuple[float, int, int | Result]] = []

    def needed(cell: Cell, action: RoutedAction) -> Result:
        kind = Kind.BACKWARD if action.kind is Kind.BACKWARD_INPUT else action.kind
        return (kind, cell.stage, action.replica, action.micro_batch)

    def finish(number: int, now_s: float) -> None:
        cell, action = cells[number], schedule.orders[number][len(ends[number])]
        ends[number].append(now_s)
        busy[number] = False
        place = (action.replica, action.micro_batch)
        if action.kind is Kind.BACKWARD_WEIGHT:
            return
        if action.kind is Kind.BACKWARD_INPUT:
            arrived.add((Kind.BACKWARD_WEIGHT, cell.stage, *place))
        forward = action.kind is Kind.FORWARD
        stage = cell.stage + (1 if forward else -1)
        if forward and stage == costs.stages:
            arrived.add((Kind.BACKWARD, cell.stage, *place))
        elif stage >= 0:
            target = schedule.routing.cell(stage, *place)
            cost = link(costs, cell, target)
            link_free_s[cell, target] = max(now_s, link_free_s[cell, target]) + cost.occupancy_s
            result = (Kind.FORWARD if forward else Kind.BACKWARD, stage, *place)
            heapq.heappush(events, (link_free_s[cell, target] + cost.latency_s, next(sequence), result))

    def start_what_can(now_s: float) -> None:
        for number, (cell, order) in enumerate(zip(cells, schedule.orders, strict=True)):
            if not busy[number] and len(starts[number]) < len(order):
                action = order[len(starts[number])]
                if needed(cell, action) in arrived:
                    busy[number] = True
                    starts[number].append(now_s)
                    heapq.heappush(events, (now_s + duration(costs, cell, action), next(sequence), number))

    start_what_can(0.0)
    while events:
        now_s, _, event = heapq.heappop(events)
        if isinstance(event, int):
            finish(event, now_s)
        else:
            arrived.add(event)
        start_what_can(now_s)
    complete = all(len(ends[number]) == len(order) for number, order in enumerate(schedule.orders))
    return (starts, ends) if complete else None


def period_s(costs: RoutedCosts, starts: Times, ends: Times) -> float:
    found = 0.0
    for stage in range(costs.stages):
        here = [number for number, cell in enumerate(costs.cells) if cell.stage == stage and starts[number]]
        first = min(starts[number][0] for number in here) if costs.staggered else 0.0
        found = max(found, max(ends[number][-1] for number in here) - first + costs.job.gradient_sync_s[stage])
    return found


def random_job(seed: int, *, max_stages: int = 5, max_replicas: int = 4, max_micro_batches: int = 7) -> RoutedCosts:
    """Any job: slow and dead cells, links with latency and occupancy, caps, micro-batches that differ, by `seed`."""
    rng = random.Random(seed)
    stages, replicas = rng.randint(1, max_stages), rng.randint(1, max_replicas)
    micro_batches = rng.randint(1, max_micro_batches)
    whole, varied = rng.random() < 0.3, rng.random() < 0.4
    released = rng.choice([0.0, 0.5, 1.0, -0.5])
    cap = rng.choice([None, float(stages), 1.5, 2.0 * stages])

    def seconds() -> float:
        return rng.choice([0.0, 0.02, rng.uniform(0.001, 0.1)])

    def table() -> tuple[tuple[float, ...], ...]:
        return tuple((seconds(),) for _ in range(stages))

    def any_link() -> LinkCost:
        return LinkCost(seconds(), seconds(), rng.random() < 0.2)

    def factors() -> tuple[tuple[tuple[float, ...], ...], ...]:
        return tuple((tuple(rng.choice([0.5, 1.0, 3.0]) for _ in range(micro_batches)),) for _ in range(stages))

    neighbours = [(s, s + step) for s in range(stages) for step in (1, -1) if 0 <= s + step < stages]
    pipelines = [
        Costs(
            stages=stages,
            chunks=1,
            micro_batches=micro_batches,
            forward_s=table(),
            backward_input_s=table(),
            backward_weight_s=table(),
            backward_s=table() if whole else None,
            links={ends: any_link() for ends in neighbours if rng.random() < 0.4},
            max_in_flight=(cap,) * stages,
            released_at_backward_input=(released,) * stages,
            micro_batch_factors={
                name: factors() for name in ("forward_s", "backward_input_s", "backward_weight_s") if varied
            },
        )
        for _ in range(replicas)
    ]
    cells = [Cell(d, s) for d in range(replicas) for s in range(stages)]
    dead = {Cell(d, s) for s in range(stages) for d in rng.sample(range(replicas), rng.randint(0, replicas - 1) // 2)}
    pairs = [(a, b) for a in cells for b in cells if abs(a.stage - b.stage) == 1]
    given = {ends: LinkCost(seconds(), seconds()) for ends in rng.sample(pairs, min(len(pairs), rng.randint(0, 6)))}
    job = job_of(pipelines, gradient_sync_s=[seconds() for _ in range(stages)])
    return RoutedCosts(job=job, dead=frozenset(dead), links=given, staggered=rng.random() < 0.3)


random_jobs = st.integers(0, 1 << 32).map(random_job)
