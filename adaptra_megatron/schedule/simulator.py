# SPDX-License-Identifier: Apache-2.0
"""Simulate a schedule: exact, event-driven simulation of fixed orders and of online dispatch.

A stage runs its actions one after another. F of virtual stage v needs the activation from v-1, a backward of v the
gradient from v+1 (the last virtual stage: its own F), W its own I. When the action that makes a message ends, it hands
the message to the directed link between the two ranks; if one rank runs both virtual stages, the message arrives at
once. The halves of a combined action start once both have what they need, take `Costs.combined_saving` less than one
after the other, and hand over their messages together, the forward's first, once `Costs.combined_sends_at` of that is
over. A link carries messages in the order in which they were handed over: each starts when the link is free, keeps it
busy for `occupancy_s` and arrives `latency_s` after that. With two stages and several chunks, or a V placement, one
directed link carries activations and gradients.

A rendezvous link is busy during both times, and a transfer starts once both of its ends have started. Hosts issue all
work far ahead, in the launch order (see `launch_order`). With separate queues every receive is therefore posted in
time. With `Costs.shared_queue` a stage's operations start in the order of issue. None starts while an earlier one
waits: an action for its message, a send for its action, or a receive for the link's previous message. With
`Costs.serial_queue` none starts before the earlier ones have ended, either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from adaptra_megatron.schedule import _native
from adaptra_megatron.schedule.costs import CostError, Costs, Released, released_per_stage
from adaptra_megatron.schedule.ir import Action, Kind, Schedule, ScheduleError
from adaptra_megatron.schedule.native import decode_orders, encode_schedule, problem_from_costs

Times = tuple[tuple[float, ...], ...]


class SimulationError(ScheduleError):
    """A schedule cannot be simulated: it does not fit the costs, or it deadlocks."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Simulation:
    """Times of one simulated iteration. `start_s[stage][k]` and `end_s[stage][k]` are seconds of
    `schedule.orders[stage][k]`."""

    schedule: Schedule
    """The simulated schedule; for online dispatch, the resulting orders."""
    makespan_s: float
    start_s: Times
    end_s: Times
    peak_in_flight: tuple[float, ...]
    """Most activations each stage holds at once."""

    def __repr__(self) -> str:
        return f"<Simulation: {self.makespan_s:.6g} s of {self.schedule!r}>"

    @property
    def bubble_fraction(self) -> tuple[float, ...]:
        """Fraction of the makespan for which each stage idles."""
        return tuple(
            1.0 - math.fsum(end - start for start, end in zip(starts, ends, strict=True)) / self.makespan_s
            if self.makespan_s
            else 0.0
            for starts, ends in zip(self.start_s, self.end_s, strict=True)
        )


def sent_s(simulation: Simulation, costs: Costs) -> Times:
    """Return when the message of each action leaves: at its end, or before, if it is combined."""
    found = []
    for order, starts, ends in zip(simulation.schedule.orders, simulation.start_s, simulation.end_s, strict=True):
        leave_s = list(ends)
        for place, action in enumerate(order):
            if action.combined:
                moment_s = starts[place] + costs.combined_sends_at * (ends[place] - starts[place])
                leave_s[place : place + 2] = [moment_s, moment_s]
        found.append(tuple(leave_s))
    return tuple(found)


def simulate(schedule: Schedule, costs: Costs, *, blocking: bool = False) -> Simulation:
    """Replay the fixed orders of `schedule`; caps are not enforced.

    With `blocking` the sends and receives are those of stock Megatron-core (see `blocking`), else
    sends never block and receives are posted early. Raises SimulationError if the schedule does not fit `costs`, or if
    the orders deadlock: it names the stages and the actions that wait. Raises ScheduleError for `blocking` with orders
    that stock does not run.
    """
    return simulation_of(schedule, runner(schedule, costs, blocking=blocking)(costs), costs)


def simulate_online(costs: Costs) -> Simulation:
    """Dispatch online: each stage runs the first of B > F > W that is ready and within its cap, else waits.

    F and B of a chunk run in ascending micro-batch order, W in the order of their I. Among ready chunks, Megatron's
    interleaved order decides. Where F and B could both start, costs that gain by it have them run as one. Stages that
    decide at the same instant do so in ascending order. A stage whose cap has no room for the addition of an input
    gradient runs whole backwards. Shared queues are ignored. Raises CostError if some stage's cap cannot hold one
    activation of each of its chunks.
    """
    return simulation_of(None, runner(None, costs)(costs), costs)


Runner = Callable[[Costs], _native.Run]
"""Function that runs one order, or dispatches online, under given costs, without the GIL."""


def runner(schedule: Schedule | None, costs: Costs, *, blocking: bool = False) -> Runner:
    """Return a function that runs `schedule` (None: dispatches online) under any costs of the same pipeline as `costs`.

    It and the function raise the errors of `simulate` and `simulate_online`.
    """
    if schedule is None:
        require_room_for_chunks(costs)
        return lambda other: _native.dispatch(problem_from_costs(other))
    check_fits(schedule, costs)
    if blocking:
        from adaptra_megatron.schedule.transfers.blocking import encoded_programs  # stock's programs, for analyses

        orders = encoded_programs(schedule)
    else:
        orders = _native.EncodedOrders(encode_schedule(schedule))

    def replay(other: Costs) -> _native.Run:
        run = _native.replay(problem_from_costs(other), orders)
        if math.isinf(run.makespan_s):
            raise SimulationError(_describe_deadlock(schedule, run.position))
        return run

    return replay


def simulation_of(schedule: Schedule | None, run: _native.Run, costs: Costs) -> Simulation:
    """Return the times of `run`, which a runner of `schedule` made with `costs`."""
    return Simulation(
        schedule=schedule or decode_orders(run.orders, costs),
        makespan_s=run.makespan_s,
        start_s=tuple(map(tuple, run.start_s)),
        end_s=tuple(map(tuple, run.end_s)),
        peak_in_flight=tuple(run.peaks),
    )


def peak_in_flight(schedule: Schedule, released_at_backward_input: Released) -> tuple[float, ...]:
    """Return the most activations that each stage holds at once, which its order determines.

    F takes 1 at its start, I releases `released_at_backward_input` at its end (below 0: takes more, at its start), W
    the rest, B all.
    """
    released = released_per_stage(released_at_backward_input, schedule.stages)
    return tuple(_native.peak_in_flight(encode_schedule(schedule), released))


def require_room_for_chunks(costs: Costs) -> None:
    """Raise CostError unless each cap holds one activation per chunk, which micro-batch 0 alone needs.

    Memory that its input gradients add is required only where backwards are split.
    """
    for stage, cap in enumerate(costs.max_in_flight):
        if cap is not None and cap < costs.chunks:
            raise CostError(
                f"max_in_flight of stage {stage} is {cap}, but {costs.chunks} chunks need at least {costs.chunks}: a "
                "micro-batch runs forward through all chunks of a stage before its first backward there; raise the cap"
            )


def check_fits(schedule: Schedule, costs: Costs) -> None:
    """Raise SimulationError unless `costs` have the shape and placement of `schedule`."""
    for name in ("stages", "chunks", "micro_batches"):
        if getattr(schedule, name) != getattr(costs, name):
            raise SimulationError(
                f"the schedule has {getattr(schedule, name)} {name}, the costs have {getattr(costs, name)}"
            )
    if schedule.placement != costs.placement:
        raise SimulationError(
            f"the schedule places virtual stages on stages {list(schedule.placement.stage_of)}, the costs on "
            f"{list(costs.placement.stage_of)}"
        )
    if len(schedule.orders) != schedule.stages:
        raise SimulationError(f"the schedule has {len(schedule.orders)} orders for {schedule.stages} stages")
    for stage, order in enumerate(schedule.orders):
        for position, action in enumerate(order):
            if action.combined and not (
                action.kind is Kind.FORWARD and order[position + 1 :] and order[position + 1].kind.sends_gradient
            ):
                raise SimulationError(
                    f"{action}, but no backward follows it in the order of stage {stage}", stage=stage, action=action
                )
            inside = 0 <= action.chunk < schedule.chunks and 0 <= action.micro_batch < schedule.micro_batches
            if action.stage != stage or not inside:
                raise SimulationError(
                    f"{action} in the order of stage {stage} is outside the schedule's {schedule.stages} stages, "
                    f"{schedule.chunks} chunks, {schedule.micro_batches} micro-batches or belongs to another stage",
                    stage=stage,
                    action=action,
                )


def _describe_deadlock(schedule: Schedule, position: Sequence[int]) -> str:
    waits = []
    for stage, order in enumerate(schedule.orders):
        if position[stage] < len(order):
            action = order[position[stage]]
            halves = (action, order[position[stage] + 1]) if action.combined else (action,)
            needed = [str(other) for half in halves if (other := _needed_by(half, schedule)) is not None]
            waits.append(f"{action} waits for {' and '.join(needed)}")
    return "the orders wait on each other for ever: " + "; ".join(waits)


def _needed_by(action: Action, schedule: Schedule) -> Action | None:
    """Return the action whose result `action` needs; None for forwards of the first virtual stage."""
    if action.kind is Kind.BACKWARD_WEIGHT:
        return action._replace(kind=Kind.BACKWARD_INPUT)
    placement, forward = schedule.placement, action.kind is Kind.FORWARD
    place = (placement.previous_place if forward else placement.next_place)(action.stage, action.chunk)
    if place is None:
        return None if forward else action._replace(kind=Kind.FORWARD)
    return Action(place.stage, action.kind, place.chunk, action.micro_batch)
