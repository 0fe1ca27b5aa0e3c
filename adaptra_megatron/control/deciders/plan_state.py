# SPDX-License-Identifier: Apache-2.0
"""Choose the schedule of an iteration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from adaptra_megatron.common.log import logger_of
from adaptra_megatron.config import AdaptraConfig, ConfigError, read_costs, read_plan
from adaptra_megatron.control.decisions import Decision, Order, TelemetrySection
from adaptra_megatron.schedule.classic import forward_only, interleaved_combined, split_every_other, stock_order
from adaptra_megatron.schedule.costs import Costs, Released, released_per_stage, uniform_costs
from adaptra_megatron.schedule.ir import Schedule
from adaptra_megatron.schedule.schedule_checks import check_schedule
from adaptra_megatron.schedule.simulator import peak_in_flight

if TYPE_CHECKING:
    from adaptra_megatron.schedule.planner import Plan

logger = logger_of(__name__)

RELEASED_AT_BACKWARD_INPUT = 0.0
"""Fraction of an activation that an input gradient releases: Megatron's linear layers keep their inputs and output
gradients until W, nearly the whole activation."""
PLANNING_S = 0.2
"""Seconds to compute one plan, on one core of the leader, concurrently with training."""


class PlanMismatchError(ValueError):
    """A given plan is for another number of micro-batches."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Properties of the pipeline that plans depend on."""

    stages: int
    chunks: int
    group_size: int | None
    rendezvous: bool = False
    """Whether a message of the device path starts only when its receive is posted, as over NCCL."""
    shared_queue: bool = False
    """Whether a stage's computation and its messages on the device path share one hardware queue."""
    serial_queue: bool = False
    """Whether plans assume that each message in that queue waits for the one before."""
    whole_first: bool = False
    """Whether backwards run whole until memory is measured. With recompute, a pending W holds all activations of its
    layers, which the forward does not keep."""
    combined: bool = False
    """Whether Megatron trains with combined 1F1B. Stock's order then has combined actions, and plans may have some."""
    staggered: bool = False
    """Whether a stage begins an iteration as soon as its own part of the one before has ended."""

    def plan(self, costs: Costs, *, deadline_s: float, patience_s: float = 0.0, split: bool = True) -> Plan:
        """Return the best schedule found; see `schedule.planner.plan`."""
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
    """The schedule to run on one rank: from a file, from costs, or stock's until a plan is installed.

    Plans from a file or from given costs are computed by every rank alike. Plans from measured costs are computed by
    the leader and installed by all ranks.
    """

    def __init__(self, config: AdaptraConfig, layout: Layout, *, measures_memory: bool = False) -> None:
        """`measures_memory`: whether ranks measure their memory, which gives the caps unless a user sets
        one."""
        self.layout = layout
        self.measures_memory = measures_memory
        self.number = 0
        """Number of the latest plan; 0 if none is installed."""
        self._config = config
        self.policy = config.policy
        """Current policy: "adapt", "observe", or "off" (stock's order, nothing measured or logged)."""
        self._plans: dict[int, _Installed] = {}
        """By number of micro-batches."""
        self._stock: dict[int, Schedule] = {}
        self._peaks: dict[int, Sequence[float]] = {}
        """Largest number of activations that each stage holds in stock's order, by number of micro-batches."""
        self._evaluation: dict[int, Schedule] = {}
        self._given_costs: Costs | None = None
        if config.costs_json is not None:
            self._given_costs = read_costs(config.costs_json, stages=layout.stages, chunks=layout.chunks)
        if config.plan_csv is not None:
            self._install_file(config.plan_csv)

    @property
    def observes(self) -> bool:
        """Whether stock's order runs, and nothing is decided."""
        return self.policy != "adapt"

    @property
    def adapts(self) -> bool:
        """Whether the order follows measured costs."""
        given = self._config.plan_csv is not None or self._given_costs is not None
        return self.policy == "adapt" and not given

    def follow(self, policy: str) -> None:
        """Switch to another policy. Drops plans from measured costs, so that all ranks start from the same state."""
        self.policy = policy
        if self._config.plan_csv is None and self._given_costs is None:
            self._plans.clear()

    def caps(self, micro_batches: int, rooms: Mapping[int, int] | None = None) -> Caps:
        """Return the activations that each stage may hold in a planned order: the user's cap, else by available
        memory.

        `rooms`: activations that there is memory for, by stage, as measured. A cap is never below what stock's order
        holds. If memory is not measured at all, every stage may hold as much as stock's fullest stage.
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
        """Return the cap that the executor enforces, in activations; None for stock's order or a user's plan without a
        cap."""
        installed = None if self.observes else self._plans.get(micro_batches)
        return None if installed is None else installed.caps[stage]

    def released_at_backward_input(self, micro_batches: int, stage: int) -> float:
        """Return the fraction of an activation that the cap counts as freed by an input gradient (negative: taken)."""
        installed = self._plans.get(micro_batches)
        released = RELEASED_AT_BACKWARD_INPUT if installed is None else installed.released_at_backward_input
        return released_per_stage(released, self.layout.stages)[stage]

    def planned_for(self, micro_batches: int) -> Costs | None:
        """Return the costs behind `schedule_for`, equal on all ranks; None if it was made without costs."""
        installed = self._plans.get(micro_batches)
        return None if installed is None else installed.costs

    def check_count(self, micro_batches: int, *, forward_only: bool) -> None:
        """Check the number of micro-batches. Raises ScheduleError if Megatron refuses it, PlanMismatchError if the
        given plan is for another number (training only)."""
        self.evaluation_schedule(micro_batches)
        if forward_only or self.observes or self._config.plan_csv is None or micro_batches in self._plans:
            return
        (planned_for,) = self._plans
        raise PlanMismatchError(
            f"--adaptra-plan-csv {self._config.plan_csv} is a plan for {planned_for} micro-batches, but an "
            f"iteration has {micro_batches}; write a plan for {micro_batches}, or drop --rampup-batch-size"
        )

    def schedule_for(self, micro_batches: int) -> Schedule:
        """Return the schedule of an iteration of `micro_batches`. Raises PlanError, and the errors of `check_count`."""
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
        """Return the schedule of an evaluation: the forwards of stock's order."""
        if micro_batches not in self._evaluation:
            layout = self.layout
            self._evaluation[micro_batches] = forward_only(
                layout.stages, micro_batches, layout.chunks, layout.group_size
            )
        return self._evaluation[micro_batches]

    def whole_schedule(self, micro_batches: int) -> Schedule:
        """Return stock's order with whole backwards or, if that exceeds the caps, another order that does not."""
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
        """Run `schedule` from now on. Raises ScheduleError, changing nothing, if it is not valid under the caps.

        `released`: the fraction of an activation that the caps count as freed by an input gradient. `costs`: the costs
        it was planned for.
        """
        check_schedule(schedule, max_in_flight=caps, released_at_backward_input=released)
        # Removed first, so that the latest plan stands last: `in_force` looks there.
        self._plans.pop(schedule.micro_batches, None)  # the latest is the last
        self._plans[schedule.micro_batches] = _Installed(schedule, caps, released, costs)
        self.number = number

    @property
    def in_force(self) -> Decision:
        """Return the latest plan as a decision, from which a new leader or a rejoining rank continues; without an
        order if it was not planned for measured costs."""
        telemetry = None if self.policy == self._config.policy else TelemetrySection(policy=self.policy)
        latest = next((each for each in reversed(self._plans.values()) if each.costs is not None), None)
        if latest is None or latest.costs is None or self.observes:
            return Decision(self.number, telemetry=telemetry)
        return Decision(self.number, Order.of(latest.schedule, latest.costs), telemetry=telemetry)

    def forget(self) -> None:
        """Drop all plans, so that all ranks of a new set of live ranks start from the same state."""
        self._plans.clear()
        self.number = 0

    def _stock_schedule(self, micro_batches: int) -> Schedule:
        if micro_batches not in self._stock:
            layout = self.layout
            counts = layout.stages, micro_batches, layout.chunks, layout.group_size
            self._stock[micro_batches] = interleaved_combined(*counts) if layout.combined else stock_order(*counts)
        return self._stock[micro_batches]

    def _stock_peaks(self, micro_batches: int) -> Sequence[float]:
        if micro_batches not in self._peaks:
            self._peaks[micro_batches] = peak_in_flight(self._stock_schedule(micro_batches), RELEASED_AT_BACKWARD_INPUT)
        return self._peaks[micro_batches]

    def calibration_schedule(self, micro_batches: int) -> Schedule:
        """Return the order until costs are known: stock's with every other lone B as I and W, if the caps allow it."""
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
        if schedule.combines and not layout.combined:
            raise ConfigError(
                f"--adaptra-plan-csv {path} combines forwards and backwards (OVERLAP_F_B), which a job can only with "
                "--overlap-moe-expert-parallel-comm: give that flag, or a plan that does not combine any"
            )
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
            combined_saving=costs.combined_saving if self.layout.combined else (),
        )
        chosen = self.layout.plan(costs, deadline_s=PLANNING_S, split=not self.layout.whole_first)
        self.install(chosen.schedule, self.number + 1, caps, costs=costs)
