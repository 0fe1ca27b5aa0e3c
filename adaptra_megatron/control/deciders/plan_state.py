# SPDX-License-Identifier: Apache-2.0
"""Choose the schedule of an iteration."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from adaptra_megatron.common.log import logger_of
from adaptra_megatron.config import AdaptraConfig, read_costs, read_plan
from adaptra_megatron.control.decisions import Decision, Order, TelemetrySection
from adaptra_megatron.schedule.classic import forward_only, split_every_other, stock_order
from adaptra_megatron.schedule.costs import Costs, Released, costs_to_json, released_per_stage, uniform_costs
from adaptra_megatron.schedule.csv_format import schedule_to_csv
from adaptra_megatron.schedule.ir import Schedule
from adaptra_megatron.schedule.schedule_checks import check_schedule
from adaptra_megatron.schedule.simulator import peak_in_flight

if TYPE_CHECKING:
    from adaptra_megatron.schedule.planner import Plan

logger = logger_of(__name__)

RELEASED_AT_BACKWARD_INPUT = 0.0
"""Megatron's native layers keep inputs and output gradients of their linears until W: about the whole activation."""
PLANNING_S = 0.2
"""Work on one plan, on one core of the leading rank, concurrently with training."""


class PlanMismatchError(ValueError):
    """A given plan is for other iterations than those that run."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """The pipeline a plan is for."""

    stages: int
    chunks: int
    group_size: int | None
    rendezvous: bool = False
    """True where a message of the device path starts only when its receive has been posted, as over NCCL."""
    shared_queue: bool = False
    """True where a stage's computation and its messages of that path stand in one hardware queue."""
    serial_queue: bool = False
    """True if plans are to reckon with that each of them waits there for the end of the one before."""
    whole_first: bool = False
    """True where backwards run whole until memory has been measured: where layers are recomputed within the backward, a
    W that waits holds what they hold, and an activation does not."""
    staggered: bool = False
    """True where stages begin an iteration when their own part of the one before is over."""

    def plan(self, costs: Costs, *, deadline_s: float, patience_s: float = 0.0, split: bool = True) -> Plan:
        """The best schedule for its iterations; see `schedule.planner.plan`."""
        from adaptra_megatron.schedule.periods import (
            plan_for_period,  # a planner is imported where something is planned
        )
        from adaptra_megatron.schedule.planner import plan

        planner = plan_for_period if self.staggered else plan
        return planner(costs, deadline_s=deadline_s, patience_s=patience_s, split=split)


Caps = tuple[float | None, ...]


@dataclasses.dataclass(frozen=True)
class _Installed:
    schedule: Schedule
    caps: Caps
    released_at_backward_input: Released = RELEASED_AT_BACKWARD_INPUT
    costs: Costs | None = None


class PlanState:
    """The schedule to run, from a file, from costs, or stock's until there is something better.

    Every rank has one. Plans from a file or from given costs are computed by every rank alike; measured ones are
    computed by one rank and installed by all.
    """

    def __init__(self, config: AdaptraConfig, layout: Layout, *, measures_memory: bool = False) -> None:
        """`measures_memory`: whether caps, where none was given, come from the memory that ranks measure."""
        self.layout = layout
        self.measures_memory = measures_memory
        self.number = 0
        """Counts installed plans; 0 while none is."""
        self._config = config
        self.policy = config.policy
        """What runs by: "adapt", "observe", or "off", which is that nothing is measured and told either."""
        self._plans: dict[int, _Installed] = {}
        """By number of micro-batches."""
        self._stock: dict[int, Schedule] = {}
        self._peaks: dict[int, Sequence[float]] = {}
        """Peaks of stock's order, by number of micro-batches."""
        self._evaluation: dict[int, Schedule] = {}
        self._given_costs: Costs | None = None
        if config.costs_json is not None:
            self._given_costs = read_costs(config.costs_json, stages=layout.stages, chunks=layout.chunks)
        if config.plan_csv is not None:
            self._install_file(config.plan_csv)

    @property
    def observes(self) -> bool:
        """Return whether stock's order runs, and nothing is decided."""
        return self.policy != "adapt"

    @property
    def adapts(self) -> bool:
        """Return whether measured costs decide on the order."""
        return self.policy == "adapt" and self._config.plan_csv is None and self._given_costs is None

    def follow(self, policy: str) -> None:
        """Go by another policy. What was planned for measured costs is forgotten, so that all ranks begin anew."""
        self.policy = policy
        if self._config.plan_csv is None and self._given_costs is None:
            self._plans.clear()

    def caps(self, micro_batches: int, rooms: Mapping[int, int] | None = None) -> Caps:
        """Activations each stage may hold in a planned order: the given cap, or else what there is memory for.

        `rooms`: that, by stage, where it has been measured; never less counts than what stock's order holds there.
        Where memory is not measured at all, every stage may hold what stock's fullest stage holds.
        """
        layout = self.layout
        if self._config.max_in_flight is not None:
            return (self._config.max_in_flight,) * layout.stages
        stock = self._stock_peaks(micro_batches)
        if not self.measures_memory:
            return (max(stock),) * layout.stages
        most = micro_batches * layout.chunks
        rooms = rooms or {}
        return tuple(max(held, min(rooms.get(stage, 0), most)) for stage, held in enumerate(stock))

    def enforced_cap(self, micro_batches: int, stage: int) -> float | None:
        """Return what the executor must not pass; None where no cap was set: stock's order, or a user's own plan."""
        installed = None if self.observes else self._plans.get(micro_batches)
        return None if installed is None else installed.caps[stage]

    def released_at_backward_input(self, micro_batches: int, stage: int) -> float:
        """The fraction that the cap's count gives back after an input gradient; below 0, it takes more."""
        installed = self._plans.get(micro_batches)
        released = RELEASED_AT_BACKWARD_INPUT if installed is None else installed.released_at_backward_input
        return released_per_stage(released, self.layout.stages)[stage]

    def planned_for(self, micro_batches: int) -> Costs | None:
        """The costs that `schedule_for` was planned for, equal on all ranks; None where it was made without."""
        installed = self._plans.get(micro_batches)
        return None if installed is None else installed.costs

    def check_count(self, micro_batches: int, *, forward_only: bool) -> None:
        """Raise ScheduleError for a number of micro-batches that Megatron refuses, and PlanMismatchError, for training,
        where the given plan is for another one."""
        self.evaluation_schedule(micro_batches)
        if forward_only or self.observes or self._config.plan_csv is None or micro_batches in self._plans:
            return
        (planned_for,) = self._plans
        raise PlanMismatchError(
            f"--adaptra-plan-csv {self._config.plan_csv} is a plan for {planned_for} micro-batches, but an "
            f"iteration has {micro_batches}; write a plan for {micro_batches}, or drop --rampup-batch-size"
        )

    def schedule_for(self, micro_batches: int) -> Schedule:
        """The schedule for an iteration of `micro_batches`. Raises PlanError, and as `check_count`."""
        self.check_count(micro_batches, forward_only=False)
        if self.observes:
            return self._stock_schedule(micro_batches)
        if micro_batches not in self._plans:
            if self._given_costs is not None:
                self._install_given(self._given_costs, micro_batches)
            else:
                caps = self.caps(micro_batches)
                self._plans[micro_batches] = _Installed(self.calibration_schedule(micro_batches), caps)
        return self._plans[micro_batches].schedule

    def evaluation_schedule(self, micro_batches: int) -> Schedule:
        """Forwards alone, in stock's order."""
        if micro_batches not in self._evaluation:
            layout = self.layout
            self._evaluation[micro_batches] = forward_only(
                layout.stages, micro_batches, layout.chunks, layout.group_size
            )
        return self._evaluation[micro_batches]

    def whole_schedule(self, micro_batches: int) -> Schedule:
        """Stock's order with whole backwards, or where that would hold more than the caps allow one that keeps them."""
        installed = self._plans.get(micro_batches)
        caps = self.caps(micro_batches) if installed is None else installed.caps
        return self._order_of_equal_costs(micro_batches, caps, split=False)

    def install(
        self,
        schedule: Schedule,
        number: int,
        caps: Caps,
        released: Released = RELEASED_AT_BACKWARD_INPUT,
        costs: Costs | None = None,
    ) -> None:
        """Run `schedule` from now on. Raises ScheduleError and changes nothing if it is not valid under the caps.

        `released`: the fraction of an activation that input gradients give back, by which the caps count. `costs`: what
        it was planned for.
        """
        check_schedule(schedule, max_in_flight=caps, released_at_backward_input=released)
        self._plans.pop(schedule.micro_batches, None)  # the latest is the last
        self._plans[schedule.micro_batches] = _Installed(schedule, caps, released, costs)
        self.number = number

    @property
    def in_force(self) -> Decision:
        """Return what was planned last, as it travels; without an order where none was planned for measured costs."""
        told = None if self.policy == self._config.policy else TelemetrySection(policy=self.policy)
        latest = next((each for each in reversed(self._plans.values()) if each.costs is not None), None)
        if latest is None or latest.costs is None or self.observes:
            return Decision(self.number, told=told)
        order = Order(
            schedule_to_csv(latest.schedule),
            json.dumps(costs_to_json(latest.costs)),
            latest.caps,
            released_per_stage(latest.released_at_backward_input, self.layout.stages),
        )
        return Decision(self.number, order, told=told)

    def forget(self) -> None:
        """Let all plans go that came of measured costs."""
        self._plans.clear()
        self.number = 0

    def _stock_schedule(self, micro_batches: int) -> Schedule:
        if micro_batches not in self._stock:
            layout = self.layout
            self._stock[micro_batches] = stock_order(layout.stages, micro_batches, layout.chunks, layout.group_size)
        return self._stock[micro_batches]

    def _stock_peaks(self, micro_batches: int) -> Sequence[float]:
        if micro_batches not in self._peaks:
            self._peaks[micro_batches] = peak_in_flight(self._stock_schedule(micro_batches), RELEASED_AT_BACKWARD_INPUT)
        return self._peaks[micro_batches]

    def calibration_schedule(self, micro_batches: int) -> Schedule:
        """Return what runs until costs are known: stock's order with every other B as I and W, if that is within the
        caps."""
        return self._order_of_equal_costs(micro_batches, self.caps(micro_batches), split=not self.layout.whole_first)

    def _order_of_equal_costs(self, micro_batches: int, caps: Caps, *, split: bool) -> Schedule:
        layout, stock = self.layout, self._stock_schedule(micro_batches)
        if all(cap is None or peak <= cap for peak, cap in zip(self._stock_peaks(micro_batches), caps, strict=True)):
            return split_every_other(stock) if split else stock
        equal = uniform_costs(
            layout.stages,
            micro_batches,
            chunks=layout.chunks,
            forward_s=1.0,
            backward_input_s=1.0,
            backward_weight_s=1.0,
            released_at_backward_input=RELEASED_AT_BACKWARD_INPUT,
        )
        equal = dataclasses.replace(equal, max_in_flight=caps)
        from adaptra_megatron.schedule.planner import plan

        return plan(equal, split=split).schedule

    def _install_file(self, path: Path) -> None:
        layout, cap = self.layout, self._config.max_in_flight
        schedule = read_plan(path, stages=layout.stages, chunks=layout.chunks, max_in_flight=cap)
        # A user's own plan: the cap counts only if the user has set one.
        self.install(schedule, 1, (cap,) * layout.stages)
        if schedule.splits_backward and layout.whole_first:
            logger.warning("%s splits backwards under full recompute: each pending W holds whole layers", path)

    def _install_given(self, costs: Costs, micro_batches: int) -> None:
        caps = costs.max_in_flight
        if self._config.max_in_flight is not None or all(cap is None for cap in caps):
            caps = self.caps(micro_batches)
        costs = dataclasses.replace(
            costs,
            micro_batches=micro_batches,
            max_in_flight=caps,
            released_at_backward_input=(RELEASED_AT_BACKWARD_INPUT,) * costs.stages,
        )
        chosen = self.layout.plan(costs, deadline_s=PLANNING_S, split=not self.layout.whole_first)
        self.install(chosen.schedule, self.number + 1, caps, costs=costs)
