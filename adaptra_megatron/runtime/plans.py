# SPDX-License-Identifier: Apache-2.0
"""Which schedule an iteration runs, and when a new one is worth a switch."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.schedule.actions import Schedule
from adaptra_megatron.schedule.checks import check_schedule
from adaptra_megatron.schedule.classic import forward_only, stock_order
from adaptra_megatron.schedule.costs import Costs, costs_to_json, uniform_costs
from adaptra_megatron.schedule.csv_format import schedule_from_csv
from adaptra_megatron.schedule.errors import ScheduleError
from adaptra_megatron.schedule.job_costs import worst_costs
from adaptra_megatron.schedule.job_json import job_costs_from_json
from adaptra_megatron.schedule.planner import plan
from adaptra_megatron.schedule.simulator import peak_in_flight, simulate
from adaptra_megatron.schedule.split import split_backward
from adaptra_megatron.telemetry.events import PlanMade

logger = logging.getLogger("adaptra_megatron.runtime")

RELEASED_AT_BACKWARD_INPUT = 0.0
"""Megatron's native layers keep inputs and output gradients of their linears until W: about the whole activation."""
PLANNING_S = 0.2
"""Work on one plan, on one core of the leading rank, beside the training."""
PLANNING_SHARE = 0.1
"""And no more than this of an iteration."""
WORTH_A_SWITCH = 0.02
"""Predicted gain below which a running plan is kept."""
AS_FAST = 0.002
"""A plan that takes no more than this longer is as fast, and replaces one that holds many more activations:"""
WORTH_SAVING = 0.5
"""per stage, on average."""
MATERIAL_CHANGE = 0.1
"""Change of a cost, relative to the mean action, that makes planning anew worth the effort."""


class PlanMismatchError(ValueError):
    """A given plan or given costs are for another pipeline than the one that runs."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """The pipeline a plan is for."""

    stages: int
    chunks: int
    group_size: int | None
    can_split: bool
    """False: weight gradients stay in the backward (full recompute would hold whole layers for each pending W)."""


Caps = tuple[float | None, ...]


@dataclasses.dataclass(frozen=True)
class _Installed:
    schedule: Schedule
    caps: Caps
    released_at_backward_input: float = RELEASED_AT_BACKWARD_INPUT


class PlanBook:
    """The schedule to run, from a file, from costs, or stock's until there is something better.

    Every rank has one. Plans from a file or from given costs are computed by every rank alike; measured ones are
    computed by one rank and installed by all.
    """

    def __init__(self, config: AdaptraConfig, layout: Layout, *, measures_memory: bool = False) -> None:
        """`measures_memory`: whether caps that nobody gave come from the memory that ranks measure."""
        self.layout = layout
        self.measures_memory = measures_memory
        self.number = 0
        """Counts installed plans; 0 while none is."""
        self._config = config
        self._plans: dict[int, _Installed] = {}
        """By number of micro-batches."""
        self._stock: dict[int, Schedule] = {}
        self._peaks: dict[int, Sequence[float]] = {}
        """Of stock's order, by number of micro-batches."""
        self._evaluation: dict[int, Schedule] = {}
        self._given_costs = _read_costs(config.costs_json, layout) if config.costs_json is not None else None
        if config.plan_csv is not None:
            self._install_file(config.plan_csv)

    @property
    def measures(self) -> bool:
        """Whether costs are of interest: to plan from, or to be told."""
        return self.adapts or self._config.policy == "observe"

    @property
    def adapts(self) -> bool:
        """Whether measured costs decide."""
        return self._config.policy == "adapt" and self._config.plan_csv is None and self._given_costs is None

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
        """What the executor must not pass; None where nobody set a cap: stock's order, or a user's own plan."""
        installed = self._plans.get(micro_batches)
        return None if installed is None else installed.caps[stage]

    def released_at_backward_input(self, micro_batches: int) -> float:
        """The fraction that the cap's count gives back after an input gradient."""
        installed = self._plans.get(micro_batches)
        return RELEASED_AT_BACKWARD_INPUT if installed is None else installed.released_at_backward_input

    def schedule_for(self, micro_batches: int) -> Schedule:
        """The schedule for an iteration of `micro_batches`. Raises PlanMismatchError, ScheduleError or PlanError."""
        if self._config.policy == "observe":
            return self._stock_schedule(micro_batches)
        if micro_batches not in self._plans:
            if self._config.plan_csv is not None:
                (planned_for,) = self._plans
                raise PlanMismatchError(
                    f"--adaptra-plan-csv {self._config.plan_csv} is a plan for {planned_for} micro-batches, but an "
                    f"iteration has {micro_batches}; write a plan for {micro_batches}, or drop --rampup-batch-size"
                )
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

    def install(
        self, schedule: Schedule, number: int, caps: Caps, released: float = RELEASED_AT_BACKWARD_INPUT
    ) -> None:
        """Run `schedule` from now on. Raises ScheduleError and changes nothing if it is not valid under the caps.

        `released`: the fraction of an activation that input gradients give back, by which the caps count.
        """
        check_schedule(schedule, max_in_flight=caps, released_at_backward_input=released)
        self._plans[schedule.micro_batches] = _Installed(schedule, caps, released)
        self.number = number

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
        """What runs until costs are known: stock's order with W right after I, if that is within the caps."""
        layout, caps = self.layout, self.caps(micro_batches)
        stock = self._stock_schedule(micro_batches)
        if all(cap is None or peak <= cap for peak, cap in zip(self._stock_peaks(micro_batches), caps, strict=True)):
            return split_backward(stock, 0) if layout.can_split else stock
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
        return plan(equal, split=layout.can_split).schedule

    def _install_file(self, path: Path) -> None:
        layout = self.layout
        try:
            schedule = schedule_from_csv(_read_text("--adaptra-plan-csv", path), chunks=layout.chunks)
            if schedule.stages != layout.stages:
                raise PlanMismatchError(
                    f"--adaptra-plan-csv {path} is a plan for {schedule.stages} stages, "
                    f"but this pipeline has {layout.stages}; write one row of actions per stage"
                )
            # A user's own plan: the cap counts only if the user has set one.
            self.install(schedule, 1, (self._config.max_in_flight,) * layout.stages)
        except ScheduleError as error:
            message = f"--adaptra-plan-csv {path}: {error}"
            raise ScheduleError(message, stage=error.stage, action=error.action) from error
        if schedule.splits_backward and not layout.can_split:
            logger.warning("%s splits backwards under full recompute: each pending W holds whole layers", path)

    def _install_given(self, costs: Costs, micro_batches: int) -> None:
        caps = costs.max_in_flight
        if self._config.max_in_flight is not None or all(cap is None for cap in caps):
            caps = self.caps(micro_batches)
        costs = dataclasses.replace(
            costs,
            micro_batches=micro_batches,
            max_in_flight=caps,
            released_at_backward_input=RELEASED_AT_BACKWARD_INPUT,
        )
        chosen = plan(costs, deadline_s=PLANNING_S, split=self.layout.can_split)
        self.install(chosen.schedule, self.number + 1, caps)


class Replanner:
    """Decides, on one rank, whether measured costs call for another schedule."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._planned: Costs | None = None

    def decide(
        self, costs: Costs, current: Schedule, found: Sequence[str] = ()
    ) -> tuple[Schedule | None, PlanMade | None]:
        """A schedule to switch to, or None to keep `current`; and, where one was planned, the event. Logs why.

        `found`: what the detector has just found, in its words; planning is then due whatever the costs say.
        """
        reason = "; ".join(found)
        if not reason and self._planned is not None:
            change = material_change(self._planned, costs)
            if change is None:
                return None, None
            reason = change
        reason, self._planned = reason or "first costs", costs
        now_s = simulate(current, costs).makespan_s if current.micro_batches == costs.micro_batches else float("inf")
        # What is there before an iteration is over takes effect in the next but one; what is late, later.
        deadline_s = min(PLANNING_S, PLANNING_SHARE * now_s)
        begun_s = time.perf_counter()
        candidate = plan(costs, deadline_s=deadline_s, split=self._layout.can_split)
        held = peak_in_flight(current, costs.released_at_backward_input)
        over = _over_cap(held, costs)
        saved = None
        if candidate.makespan_s <= (1.0 + AS_FAST) * now_s and current.micro_batches == costs.micro_batches:
            saved = _saved_memory(held, candidate.peak_in_flight)
        adopted = over is not None or saved is not None or candidate.makespan_s <= (1.0 - WORTH_A_SWITCH) * now_s
        reason = "; ".join(part for part in (reason, over or saved) if part is not None)
        made = PlanMade(
            number=0,
            adopted=adopted,
            reason=reason,
            predicted_s=candidate.makespan_s if adopted else now_s,
            current_predicted_s=now_s,
            lower_bound_s=candidate.lower_bound.seconds,
            planning_s=time.perf_counter() - begun_s,
            costs=costs_to_json(costs),
        )
        if not adopted:
            logger.debug(
                "adaptra: plan kept: %.1f ms, best %.1f ms; %s", now_s * 1e3, candidate.makespan_s * 1e3, reason
            )
            return None, made
        logger.info(
            "adaptra: new plan: %.1f ms instead of %.1f ms, lower bound %.1f ms; %s; %s",
            candidate.makespan_s * 1e3,
            now_s * 1e3,
            candidate.lower_bound.seconds * 1e3,
            reason,
            describe(costs),
        )
        return candidate.schedule, made


def describe(costs: Costs) -> str:
    """Slowest stage and link, for the log."""
    work_s = [
        costs.micro_batches * (sum(forward) + sum(backward))
        for forward, backward in zip(costs.forward_s, costs.backward_s, strict=True)
    ]
    stage = max(range(costs.stages), key=work_s.__getitem__)
    text = f"slowest stage {stage}, {work_s[stage] * 1e3:.1f} ms of work"
    if costs.links:
        (source, target), cost = max(costs.links.items(), key=lambda item: item[1].latency_s)
        text += f"; slowest link {source}->{target}, {cost.latency_s * 1e3:.1f} ms"
    return text


def material_change(before: Costs, after: Costs) -> str | None:
    """The largest difference, in words, if it can matter to a plan: a cost moved by a tenth of the mean action."""
    if before.micro_batches != after.micro_batches:
        return f"{after.micro_batches} micro-batches instead of {before.micro_batches}"
    all_s = [seconds for name in _TABLES for row in getattr(after, name) for seconds in row]
    threshold_s = MATERIAL_CHANGE * sum(all_s) / len(all_s)
    if (before.max_in_flight, before.released_at_backward_input) != (
        after.max_in_flight,
        after.released_at_backward_input,
    ):
        return _change_of_memory(before, after)
    what, old_s, new_s = max(_pairs(before, after), key=lambda pair: abs(pair[2] - pair[1]))
    if abs(new_s - old_s) <= threshold_s:
        return None
    return f"{what}: {new_s * 1e3:.1f} ms instead of {old_s * 1e3:.1f} ms"


def _change_of_memory(before: Costs, after: Costs) -> str:
    for stage, (old, new) in enumerate(zip(before.max_in_flight, after.max_in_flight, strict=True)):
        if old != new and old is not None and new is not None:
            return f"stage {stage} may hold {new:g} activations instead of {old:g}"
    old_released, new_released = before.released_at_backward_input, after.released_at_backward_input
    return f"input gradients release {new_released:g} of an activation instead of {old_released:g}"


def _over_cap(held: Sequence[float], costs: Costs) -> str | None:
    """The first stage that would hold more than it may, in words. `held`: activations of each."""
    for stage in costs.stages_over_cap(held):
        cap = costs.max_in_flight[stage]
        return f"stage {stage} would hold {held[stage]:g} activations, but has memory for {cap:g}"
    return None


def _saved_memory(held: Sequence[float], planned: Sequence[float]) -> str | None:
    """How much less stages hold under a plan than now, in words, if it is worth a switch."""
    if sum(planned) > sum(held) - WORTH_SAVING * len(held):
        return None
    return f"it holds {sum(planned):g} activations instead of {sum(held):g}"


_TABLES = {"forward_s": "F", "backward_input_s": "input gradient", "backward_weight_s": "weight gradient"}


def _pairs(before: Costs, after: Costs) -> Iterator[tuple[str, float, float]]:
    """Every cost with its name, as it was and as it is."""
    for name, kind in _TABLES.items():
        for stage, rows in enumerate(zip(getattr(before, name), getattr(after, name), strict=True)):
            for chunk, (old_s, new_s) in enumerate(zip(*rows, strict=True)):
                yield f"{kind} of stage {stage}, chunk {chunk}", old_s, new_s
    for source, target in sorted({*before.links, *after.links}):
        old, new = before.link(source, target), after.link(source, target)
        yield f"latency of link {source}->{target}", old.latency_s, new.latency_s
        yield f"occupancy of link {source}->{target}", old.occupancy_s, new.occupancy_s


def _read_text(flag: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanMismatchError(f"{flag} {path} cannot be read as text: {error}") from error


def _read_costs(path: Path, layout: Layout) -> Costs:
    text = _read_text("--adaptra-costs", path)
    try:
        # All replicas run one plan here: the one for the slowest of every stage and link.
        costs = worst_costs(job_costs_from_json(json.loads(text)).groups)
    except ValueError as error:
        raise PlanMismatchError(f"--adaptra-costs {path}: {error}") from error
    if (costs.stages, costs.chunks) != (layout.stages, layout.chunks):
        raise PlanMismatchError(
            f"--adaptra-costs {path} is for {costs.stages} stages of {costs.chunks} chunks, "
            f"but this pipeline has {layout.stages} stages of {layout.chunks}"
        )
    return costs
