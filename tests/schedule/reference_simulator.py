# SPDX-License-Identifier: Apache-2.0
"""The slow, obvious simulator that the native one must agree with, and the random costs both are run on."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict

from hypothesis import strategies as st
from support.schedules import random_placements

from adaptra_megatron.schedule.costs import Costs, LinkCost
from adaptra_megatron.schedule.ir import Action, Kind, Order, Placement, Schedule, units

Times = list[list[float]]
# A message or result: the kind that needs it, and its virtual stage and micro-batch.
Result = tuple[Kind, int, int]

_NEEDS = {Kind.FORWARD: Kind.FORWARD, Kind.BACKWARD: Kind.BACKWARD, Kind.BACKWARD_INPUT: Kind.BACKWARD}


def duration(costs: Costs, action: Action) -> float:
    name = {
        Kind.FORWARD: "forward_s",
        Kind.BACKWARD: "backward_s",
        Kind.BACKWARD_INPUT: "backward_input_s",
        Kind.BACKWARD_WEIGHT: "backward_weight_s",
    }[action.kind]
    return costs.micro_batch_s(name, action.stage, action.chunk)[action.micro_batch]


def unit_s(costs: Costs, unit: Order) -> float:
    """Seconds of an action, or of a combined one."""
    each_s = [duration(costs, action) for action in unit]
    if len(unit) == 1 or not costs.combined_saving:
        return sum(each_s)
    forward, backward = unit
    apart_s = each_s[0] + duration(costs, backward._replace(kind=Kind.BACKWARD))
    saved_s = costs.combined_saving[forward.stage][forward.chunk][backward.chunk] * apart_s
    return max(*each_s, sum(each_s) - saved_s)


def sent_s(costs: Costs, unit: Order, start_s: float) -> float:
    """When messages leave."""
    return start_s + unit_s(costs, unit) * (costs.combined_sends_at if len(unit) == 2 else 1.0)


def virtual_stage(action: Action, placement: Placement) -> int:
    """The stage's virtual stages in the order of the model are its chunks."""
    return [v for v, stage in enumerate(placement.stage_of) if stage == action.stage][action.chunk]


def needed(action: Action, placement: Placement) -> Result:
    kind = _NEEDS.get(action.kind, Kind.BACKWARD_WEIGHT)
    return (kind, virtual_stage(action, placement), action.micro_batch)


def produced(action: Action, placement: Placement) -> list[Result]:
    """What the end of an action makes available, by whom it is needed."""
    v, m = virtual_stage(action, placement), action.micro_batch
    if action.kind is Kind.FORWARD:
        return [(Kind.FORWARD, v + 1, m)] if v + 1 < len(placement.stage_of) else [(Kind.BACKWARD, v, m)]
    if action.kind is Kind.BACKWARD_WEIGHT:
        return []
    results: list[Result] = [(Kind.BACKWARD, v - 1, m)] if v > 0 else []
    if action.kind is Kind.BACKWARD_INPUT:
        results.append((Kind.BACKWARD_WEIGHT, v, m))
    return results


class Links:
    """Delivers results; each directed link carries one message at a time in hand-over order."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.free_s: dict[tuple[int, int], float] = defaultdict(float)

    def arrival(self, source: int, result: Result, end_s: float) -> float:
        target = self.costs.placement.stage_of[result[1]]
        if target == source:
            return end_s
        cost = self.costs.link(source, target)
        busy_s = cost.occupancy_s + cost.latency_s if cost.rendezvous else cost.occupancy_s
        self.free_s[source, target] = max(end_s, self.free_s[source, target]) + busy_s
        return self.free_s[source, target] + (0.0 if cost.rendezvous else cost.latency_s)


def reference_replay(schedule: Schedule, costs: Costs) -> tuple[Times, Times] | None:
    """Start and end seconds of each action, or None if the orders deadlock: one event after the other in time."""
    stages = schedule.stages
    starts: Times = [[] for _ in range(stages)]
    ends: Times = [[] for _ in range(stages)]
    busy = [False] * stages
    arrived = {(Kind.FORWARD, 0, m) for m in range(schedule.micro_batches)}
    links = Links(costs)
    sequence = itertools.count()
    events: list[tuple[float, int, tuple[Order, bool] | Result]] = []
    order_of = [list(units(order)) for order in schedule.orders]

    def start_what_can(now_s: float) -> None:
        for stage, order in enumerate(order_of):
            if not busy[stage] and order and all(needed(half, schedule.placement) in arrived for half in order[0]):
                unit = order.pop(0)
                busy[stage] = True
                starts[stage] += [now_s] * len(unit)
                heapq.heappush(events, (sent_s(costs, unit, now_s), next(sequence), (unit, False)))
                heapq.heappush(events, (now_s + unit_s(costs, unit), next(sequence), (unit, True)))

    start_what_can(0.0)
    while events:
        now_s, _, event = heapq.heappop(events)
        if len(event) == 3:
            arrived.add(event)
            start_what_can(now_s)
            continue
        unit, ended = event
        stage = unit[0].stage
        if ended:
            busy[stage] = False
            ends[stage] += [now_s] * len(unit)
        else:
            for result in (result for half in unit for result in produced(half, schedule.placement)):
                heapq.heappush(events, (links.arrival(stage, result, now_s), next(sequence), result))
        start_what_can(now_s)
    complete = all(len(ends[stage]) == len(order) for stage, order in enumerate(schedule.orders))
    return (starts, ends) if complete else None


def reference_table(micro_batches: int, chunks: int, group: int) -> list[tuple[int, int]]:
    """(chunk, micro-batch) in the order in which Megatron's interleaved schedule runs forwards."""
    return [
        (chunk, micro_batch)
        for first in range(0, micro_batches, group)
        for chunk in range(chunks)
        for micro_batch in range(first, min(first + group, micro_batches))
    ]


class OnlineReference:
    """Online dispatch, one decision after the other: the stage that can start something first decides next."""

    def __init__(self, costs: Costs, group: int) -> None:
        self.costs = costs
        self.table = reference_table(costs.micro_batches, costs.chunks, group)
        self.free_s = [0.0] * costs.stages
        self.done: list[list[Action]] = [[] for _ in range(costs.stages)]
        self.starts: Times = [[] for _ in range(costs.stages)]
        self.arrival_s = {(Kind.FORWARD, 0, m): 0.0 for m in range(costs.micro_batches)}
        self.links = Links(costs)

    def run(self) -> tuple[list[list[Action]], Times]:
        while True:
            choices = [self.choice(stage) for stage in range(self.costs.stages)]
            ready = [(choice[0], stage) for stage, choice in enumerate(choices) if choice is not None]
            if not ready:
                return self.done, self.starts
            stage = min(ready)[1]
            choice = choices[stage]
            assert choice is not None
            self.start(*choice)

    def start(self, start_s: float, unit: Order) -> None:
        stage = unit[0].stage
        self.starts[stage] += [start_s] * len(unit)
        self.done[stage] += unit
        self.free_s[stage] = start_s + unit_s(self.costs, unit)
        for result in (result for action in unit for result in produced(action, self.costs.placement)):
            self.arrival_s[result] = self.links.arrival(stage, result, sent_s(self.costs, unit, start_s))

    def choice(self, stage: int) -> tuple[float, Order] | None:
        """The earliest start, and the first of B > F > W that could start then, or F and B together."""
        able = []
        for rank, action in self.candidates(stage):
            arrival_s = self.arrival_s.get(needed(action, self.costs.placement))
            if arrival_s is not None:
                able.append((max(self.free_s[stage], arrival_s), rank, action))
        if not able:
            return None
        start_s, _, action = min(able)
        forward = min((entry for entry in able if entry[2].kind is Kind.FORWARD), default=None)
        if self.costs.combined_saving and action.kind.sends_gradient and forward and forward[0] == start_s:
            unit = (forward[2]._replace(combined=True), action)
            apart_s = start_s + duration(self.costs, action) + duration(self.costs, forward[2])
            done = [*self.done[stage], forward[2]]
            of_kind = {kind: [each for each in done if each.kind is kind] for kind in Kind}
            fits = action.kind is Kind.BACKWARD or self.input_fits(stage, of_kind)
            if fits and start_s + unit_s(self.costs, unit) < apart_s:
                return start_s, unit
        return start_s, (action,)

    def candidates(self, stage: int) -> list[tuple[tuple[int, int], Action]]:
        costs, done = self.costs, self.done[stage]
        of_kind = {kind: [action for action in done if action.kind is kind] for kind in Kind}
        candidates = []
        for chunk in range(costs.chunks):
            for kind in (self.backward_kind(stage), Kind.FORWARD):
                micro_batch = sum(action.chunk == chunk for action in of_kind[kind])
                if micro_batch == costs.micro_batches:
                    continue
                action = Action(stage, kind, chunk, micro_batch)
                if kind is Kind.FORWARD:
                    if self.fits(stage, action, of_kind):
                        candidates.append(((1, self.index(action)), action))
                elif kind is Kind.BACKWARD or self.input_fits(stage, of_kind):
                    mirrored = self.table.index((costs.chunks - 1 - chunk, micro_batch))
                    candidates.append(((0, mirrored), action))
        backwards, weights = of_kind[Kind.BACKWARD_INPUT], of_kind[Kind.BACKWARD_WEIGHT]
        if len(weights) < len(backwards):
            candidates.append(((2, 0), backwards[len(weights)]._replace(kind=Kind.BACKWARD_WEIGHT)))
        return candidates

    def index(self, action: Action) -> int:
        return self.table.index((action.chunk, action.micro_batch))

    def backward_kind(self, stage: int) -> Kind:
        """Split, where there is room for what the input gradient of the first micro-batch adds."""
        cap = self.costs.max_in_flight[stage]
        needed = self.costs.chunks + max(0.0, -self.costs.released_at_backward_input[stage])
        return Kind.BACKWARD_INPUT if cap is None or needed <= cap + 1e-9 else Kind.BACKWARD

    def input_fits(self, stage: int, of_kind: dict[Kind, list[Action]]) -> bool:
        """Return whether the cap would hold with one more input gradient."""
        cap = self.costs.max_in_flight[stage]
        held = len(of_kind[Kind.FORWARD]) - self.given_back(stage, of_kind, more_inputs=1)
        return cap is None or self.costs.released_at_backward_input[stage] >= 0.0 or held <= cap + 1e-9

    def fits(self, stage: int, action: Action, of_kind: dict[Kind, list[Action]]) -> bool:
        """Return whether the cap would hold with all forwards up to the latest in the reference order, and would still
        with one more input gradient once all weight gradients are over."""
        cap = self.costs.max_in_flight[stage]
        if cap is None:
            return True
        latest = max(self.index(forward) for forward in [action, *of_kind[Kind.FORWARD]])
        if latest + 1 - self.given_back(stage, of_kind) > cap + 1e-9:
            return False
        added = max(0.0, -self.costs.released_at_backward_input[stage])
        splits = self.backward_kind(stage) is Kind.BACKWARD_INPUT
        return not splits or latest + 1 - len(of_kind[Kind.BACKWARD_INPUT]) + added <= cap + 1e-9

    def given_back(self, stage: int, of_kind: dict[Kind, list[Action]], more_inputs: int = 0) -> float:
        released = self.costs.released_at_backward_input[stage]
        inputs, weights = len(of_kind[Kind.BACKWARD_INPUT]) + more_inputs, len(of_kind[Kind.BACKWARD_WEIGHT])
        return len(of_kind[Kind.BACKWARD]) + released * inputs + (1 - released) * weights


@st.composite
def random_costs(
    draw: st.DrawFn,
    *,
    max_stages: int = 6,
    max_micro_batches: int = 10,
    least_chunks: int = 1,
    max_chunks: int = 3,
    whole_milliseconds: bool = False,
    added: bool = False,
    whole: bool = False,
    rendezvous: bool = False,
    placed: bool = False,
    varied: bool = False,
    combined: bool = False,
) -> Costs:
    """Any costs: some actions and links may take no time at all.

    In whole milliseconds, for CP-SAT, only links may: there, an F and its I of no length would hold no memory, and
    messages leave at the end of combined actions. `added`: input gradients may add to what is held. `whole`: whole
    backwards may have seconds of their own. `rendezvous`: links may be such ones, and stages may share a queue.
    `placed`: virtual stages may be on any stages. `varied`: micro-batches may differ. `combined`: actions may be
    combined, at a saving or a loss.
    """
    stages = draw(st.integers(1, max_stages))
    chunks = draw(st.integers(least_chunks, max_chunks))
    if whole_milliseconds:
        seconds = st.integers(1, 40).map(lambda ticks: ticks / 1000)
        link_seconds = st.integers(0, 40).map(lambda ticks: ticks / 1000)
        released = st.sampled_from([0.0, 0.25, 0.5, 1.0, *([-0.5, -1.75] if added else [])])
    else:
        seconds = link_seconds = st.one_of(st.just(0.0), st.just(0.02), st.floats(1e-4, 0.1))
        released = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(-2.5 if added else 0.0, 1.0))

    def table() -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(draw(seconds) for _ in range(chunks)) for _ in range(stages))

    placement = draw(random_placements(stages, chunks)) if placed else None
    pairs = {(s, (s + step) % stages) for s in range(stages) for step in (1, -1)} if stages > 1 else set()
    if placement is not None:
        pairs = set(placement.links)
    slow = draw(st.lists(st.sampled_from(sorted(pairs)), unique=True, max_size=4)) if pairs else []
    cap = st.one_of(st.none(), st.integers(2 * chunks, 6 * stages * chunks).map(lambda halves: halves / 2))
    micro_batches = draw(st.integers(1, max_micro_batches))
    factor = st.integers(1, 3) if whole_milliseconds else st.sampled_from([0.0, 0.5, 1.0, 3.0]) | st.floats(0.0, 4.0)

    def factors() -> tuple[tuple[tuple[float, ...], ...], ...]:
        row = st.tuples(*[factor] * micro_batches)
        return tuple(tuple(draw(row) for _ in range(chunks)) for _ in range(stages))

    saving = st.sampled_from([0.0, 0.125, 0.25, 0.5, -0.125])
    saving = saving if whole_milliseconds else saving | st.floats(-0.2, 0.5)
    sends_at = st.just(1.0) if whole_milliseconds else st.sampled_from([0.25, 0.5, 0.875, 1.0])
    savings = st.tuples(*[st.tuples(*[saving] * chunks)] * chunks)
    names = ("forward_s", "backward_input_s", "backward_weight_s")
    return Costs(
        stages=stages,
        chunks=chunks,
        micro_batches=micro_batches,
        micro_batch_factors={name: factors() for name in names if varied and draw(st.booleans())},
        forward_s=table(),
        backward_input_s=table(),
        backward_weight_s=table(),
        links={
            ends: LinkCost(draw(link_seconds), draw(link_seconds), rendezvous and draw(st.booleans())) for ends in slow
        },
        max_in_flight=tuple(draw(cap) for _ in range(stages)),
        released_at_backward_input=tuple(draw(released) for _ in range(stages)),
        backward_s=table() if whole and draw(st.booleans()) else None,
        shared_queue=(shared := rendezvous and draw(st.booleans())),
        serial_queue=shared and draw(st.booleans()),
        custom_placement=placement,
        combined_saving=tuple(draw(savings) for _ in range(stages)) if combined else (),
        combined_sends_at=draw(sends_at) if combined else 1.0,
    )
