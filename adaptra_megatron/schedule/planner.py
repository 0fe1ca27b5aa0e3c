# SPDX-License-Identifier: Apache-2.0
"""Find the schedule of least makespan within the activation caps."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from adaptra_megatron.schedule import _native
from adaptra_megatron.schedule.bounds import LowerBound, bound_from_native, lower_bound
from adaptra_megatron.schedule.costs import CostError, Costs, PerChunk
from adaptra_megatron.schedule.ir import Schedule
from adaptra_megatron.schedule.native import decode_orders, encode_schedule, problem_from_costs
from adaptra_megatron.schedule.simulator import peak_in_flight, require_room_for_chunks, simulate
from adaptra_megatron.schedule.v_shaped import v_orders

ACTIONS_PER_SECOND = 50_000_000
"""Simulated actions per second of a deadline: what one slow core does. A constant, so that plans are repeatable."""

# Simulations of the whole schedule that a first search may take, and what long pipelines get more, because with few
# micro-batches most of their time is filling and draining. On one core: 5 ms for 8 stages and 32 micro-batches, 50 ms
# for 16 and 128, 0.5 s for 64 and 256.
_PASSES = 400
_ACTIONS_PER_STAGE_SQUARED = 4_000

_LATENCY_STRETCHES = (1.1, 1.2, 1.3, 1.0)
_NOISE = 0.06
"""Relative random change of compute times after scaling them alone has been tried."""
_NO_GAP = 1e-9
ENOUGH = 0.01
"""Gap to the bound below which no time is spent beyond the deadline."""
PATIENCE_S = 0.5
"""Default of `plan` without a deadline: longest search while the gap is larger than ENOUGH."""
_MOST_PASSES = 30_000
"""Most simulations of the whole schedule beyond the deadline, for small pipelines."""
_NEARBY_SHARE, _MOST_NEARBY = 0.3, 48
"""Share of the time, and most searches, for nearby costs, whose schedules the last search starts from."""
_STARTS = 3


class PlanError(CostError):
    """No schedule fits the caps; names the stage, the activations that it needs and its cap."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A schedule, its makespan, and the lower bound."""

    schedule: Schedule
    makespan_s: float
    lower_bound: LowerBound
    peak_in_flight: tuple[float, ...]

    @property
    def gap(self) -> float:
        """Return the relative gap to the lower bound: 0.02 is 2%."""
        return self.lower_bound.gap_of(self.makespan_s)


def default_deadline_s(costs: Costs, *, split: bool = True) -> float:
    """Return the default deadline of `plan`: one search, 0.5 s for 64 stages and 256 micro-batches on one core."""
    return _one_search(costs, split) / ACTIONS_PER_SECOND


def plan(
    costs: Costs,
    *,
    deadline_s: float | None = None,
    patience_s: float | None = None,
    split: bool = True,
    progress: Callable[[str, int, int], None] | None = None,
) -> Plan:
    """Return the best schedule found for `costs`; among equally fast ones, the one that holds the fewest activations.

    Deterministic: work is limited by a number of simulated actions, `deadline_s * ACTIONS_PER_SECOND`, never by a
    clock; at least one schedule is made. After a first search, the remaining work goes to searches for nearby costs,
    and then to a longer search that starts from the best of them. `progress` is called with the number of finished
    searches.

    While the plan is more than `ENOUGH` above its bound, the limit is `patience_s` if that is longer (None:
    `PATIENCE_S` without a deadline, else 0). Stages keep backwards whole if that is faster or holds less; with `split`
    False all do, for models whose backward cannot be split. Actions are combined where that is faster, if the costs
    have a `combined_saving`: without a deadline, such a plan is never slower than one that combines nothing, which is
    searched for as long where its bound does not rule it out. In a shared queue the plan is never slower than stock's
    order if that fits the caps; with a V placement, never slower than any order of `v_shaped` that does.

    Raises PlanError if no schedule fits the caps.
    """
    try:
        require_room_for_chunks(costs)
    except CostError as error:
        raise PlanError(f"no schedule fits the cap: {error}") from error
    one_search = _one_search(costs, split)
    budget = one_search if deadline_s is None else _actions("deadline_s", deadline_s)
    if patience_s is None:
        patience_s = PATIENCE_S if deadline_s is None else 0.0
    patience = min(_actions("patience_s", patience_s), _MOST_PASSES * _actions_of(costs, split))
    first_search, short_search = min(budget, one_search), one_search // 2
    tell = progress or (lambda doing, done, total: None)
    tell("planning", 0, 1)
    known = v_orders(costs.micro_batches, costs.placement)
    codes = [encode_schedule(schedule) for schedule in known]
    problem = problem_from_costs(costs)
    found = _native.plan(problem, split, first_search, codes)
    assert math.isfinite(found["makespan_s"])
    best = Plan(
        schedule=decode_orders(found["orders"], costs),
        makespan_s=found["makespan_s"],
        lower_bound=bound_from_native((found["bound_s"], found["bound_kind"], found["bound_place"]), costs),
        peak_in_flight=(),
    )
    goes_on = best.gap > ENOUGH and patience > budget
    enough, left = ENOUGH if goes_on else _NO_GAP, (patience if goes_on else budget) - first_search
    searches = min(_MOST_NEARBY, int(_NEARBY_SHARE * left) // short_search)
    starts = [(best.makespan_s, found["orders"])]
    apart = costs.can_combine and left >= short_search
    searches += apart
    for done, near in enumerate(_neighbours(costs, searches, apart=apart)):
        if best.gap <= enough:
            break
        tell("planning", 1 + done, 2 + searches)
        left -= short_search
        orders = _native.plan(problem_from_costs(near), split, short_search, codes)["orders"]
        schedule = decode_orders(orders, costs)
        makespan_s = simulate(schedule, costs).makespan_s
        starts.append((makespan_s, orders))
        best = _faster(best, schedule, makespan_s)
    if costs.can_combine and deadline_s is None:
        alone = dataclasses.replace(costs, combined_saving=())
        if lower_bound(alone).seconds < best.makespan_s * (1.0 - _NO_GAP):
            schedule = plan(alone, patience_s=patience_s, split=split).schedule
            makespan_s = simulate(schedule, costs).makespan_s
            starts.append((makespan_s, encode_schedule(schedule)))
            best = _faster(best, schedule, makespan_s)
    if left >= short_search and best.gap > enough:
        tell("planning", 1 + searches, 2 + searches)
        starts = sorted(starts, key=operator.itemgetter(0))[:_STARTS]
        orders = _native.plan(problem, split, left, [*codes, *(orders for _, orders in starts)], enough)["orders"]
        schedule = decode_orders(orders, costs)
        best = _faster(best, schedule, simulate(schedule, costs).makespan_s)
    # As they are: the search splits all backwards of a stage or none.
    for schedule in known if split else ():
        if not costs.stages_over_cap(peak_in_flight(schedule, costs.released_at_backward_input)):
            best = _faster(best, schedule, simulate(schedule, costs).makespan_s)
    peaks = peak_in_flight(best.schedule, costs.released_at_backward_input)
    return dataclasses.replace(best, peak_in_flight=peaks)


def _actions(name: str, seconds: float) -> int:
    """Convert seconds to simulated actions."""
    if not 0.0 <= seconds < math.inf:
        raise CostError(f"{name} must be seconds >= 0, got {seconds!r}")
    return int(seconds * ACTIONS_PER_SECOND)


def _actions_of(costs: Costs, split: bool) -> int:
    """Return the simulated actions of one whole schedule."""
    return costs.stages * costs.chunks * costs.micro_batches * (3 if split else 2)


def _one_search(costs: Costs, split: bool) -> int:
    """Return the simulated actions of a first search: twice as many if stages may keep backwards whole."""
    searches = 2 if split and (costs.backward_s is not None or min(costs.released_at_backward_input) < 0.0) else 1
    return searches * max(_PASSES * _actions_of(costs, split), _ACTIONS_PER_STAGE_SQUARED * costs.stages**2)


def _faster(best: Plan, schedule: Schedule, makespan_s: float) -> Plan:
    """Return `best`, or a plan of `schedule` if that is faster."""
    if makespan_s < best.makespan_s * (1.0 - _NO_GAP):
        return dataclasses.replace(best, schedule=schedule, makespan_s=makespan_s)
    return best


def _neighbours(costs: Costs, number: int, *, apart: bool) -> Iterator[Costs]:
    """Yield `number` costs whose plans may be better for `costs`: if `apart`, first those without combined actions."""
    if apart:
        yield dataclasses.replace(costs, combined_saving=())
    yield from (nearby_costs(costs, each) for each in range(number - apart))


def nearby_costs(costs: Costs, number: int) -> Costs:
    """Return the `number`-th neighbour of `costs`: the same every time, with the same caps.

    A plan for the neighbour may be better for `costs` than a plan made for them, since local search then stops at
    another optimum (noising method). Latencies are raised rather than lowered, since that only makes plans hold more
    activations.
    """
    random = Random(number)
    stretch = _LATENCY_STRETCHES[number % len(_LATENCY_STRETCHES)]
    noise = _NOISE if number >= len(_LATENCY_STRETCHES) else 0.0

    def noisy(table: PerChunk) -> PerChunk:
        return tuple(tuple(seconds * (1.0 + random.uniform(-noise, noise)) for seconds in row) for row in table)

    links = {link: cost._replace(latency_s=stretch * cost.latency_s) for link, cost in costs.links.items()}
    tables = {name: noisy(table) for name, table in costs.tables().items()}
    return dataclasses.replace(costs, links=links).with_tables(tables)
