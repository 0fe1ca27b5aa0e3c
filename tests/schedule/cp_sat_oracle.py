# SPDX-License-Identifier: Apache-2.0
"""The exact reference for planner and bounds: the whole scheduling problem as a CP-SAT model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from ortools.sat.python import cp_model
from reference_simulator import unit_s

from adaptra_megatron.schedule.costs import Costs, LinkCost
from adaptra_megatron.schedule.ir import Action, Kind, Schedule
from adaptra_megatron.schedule.simulator import Simulation

TICKS_PER_SECOND = 8000
"""Eighths of milliseconds: what combined actions of the tests save are such shares of whole milliseconds."""


class Optimum(NamedTuple):
    """`proven_s` is a proven lower bound, `found_s` the best makespan found; equal when solved to the end."""

    proven_s: float
    found_s: float


_Place = tuple[int, int]
"""Virtual stage and micro-batch."""


class _Action(NamedTuple):
    start: cp_model.IntVar
    end: cp_model.IntVar
    interval: cp_model.IntervalVar


def ticks(seconds: float) -> int:
    """Seconds as whole ticks; the model is exact only for costs that are whole ticks."""
    whole = round(seconds * TICKS_PER_SECOND)
    assert abs(whole - seconds * TICKS_PER_SECOND) < 1e-6, f"{seconds} s is not a whole number of ticks"
    return whole


class Model:
    """A whole backward is an I as long as it, and a W of no length right after. There are none where they do no better
    than I and W in one go: without `Costs.backward_s` or combined actions, if input gradients add nothing to what is
    held. The halves of a combined action start and end together, and only its F occupies the stage.

    F, I and W run in ascending micro-batch order, which loses nothing where all cost the same, and is the rule where
    they do not. What a shared queue delays is left out, and that messages leave before a combined action ends.
    """

    def __init__(self, costs: Costs, *, horizon_s: float) -> None:
        self.costs = costs
        self.model = cp_model.CpModel()
        self.horizon = ticks(horizon_s)
        self.makespan = self.model.new_int_var(0, self.horizon, "makespan")
        self.virtual_stages = costs.stages * costs.chunks
        tables = {
            Kind.FORWARD: "forward_s",
            Kind.BACKWARD_INPUT: "backward_input_s",
            Kind.BACKWARD_WEIGHT: "backward_weight_s",
        }
        places = [(v, m) for v in range(self.virtual_stages) for m in range(costs.micro_batches)]
        adds = min(costs.released_at_backward_input) < 0.0
        may_be_whole = costs.backward_s is not None or adds or costs.can_combine
        self.whole = {place: self.model.new_bool_var("") for place in places} if may_be_whole else {}
        self.pairs = self._pairs(places)
        self.actions = {
            (kind, v, m): self._action(kind, (v, m), self._duration(kind, table, v, m))
            for kind, table in tables.items()
            for v, m in places
        }
        self._add_pairs()
        self._add_stages()
        self._add_messages()
        self.model.minimize(self.makespan)

    def solve(self, limit_s: float, hint: Simulation | None = None) -> Optimum:
        """Deterministic up to the time limit: one worker, one seed."""
        if hint is not None:
            self._add_hint(hint)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.max_time_in_seconds = limit_s
        status = solver.solve(self.model)
        assert status not in (cp_model.INFEASIBLE, cp_model.MODEL_INVALID), (
            "the model excludes a schedule that is known to run"
        )
        found = solver.objective_value if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else float(self.horizon)
        return Optimum(solver.best_objective_bound / TICKS_PER_SECOND, found / TICKS_PER_SECOND)

    def _duration(self, kind: Kind, table: str, v: int, m: int) -> cp_model.LinearExprT:
        stage, chunk = self.costs.placement.places[v]
        split = ticks(self.costs.micro_batch_s(table, stage, chunk)[m])
        if kind is Kind.FORWARD:
            mine = {key: pair for key, pair in self.pairs.items() if key[0] == (v, m)}
            if not mine:
                return split
            self.model.add_at_most_one(mine.values())
            duration = self.model.new_int_var(0, self.horizon, "")
            self.model.add(
                duration == split + sum(pair * (self._pair_ticks(*key) - split) for key, pair in mine.items())
            )
            return duration
        if not self.whole:
            return split
        whole = ticks(self.costs.micro_batch_s("backward_s", stage, chunk)[m]) if kind is Kind.BACKWARD_INPUT else 0
        return split + (whole - split) * self.whole[v, m]

    def _action(self, kind: Kind, place: _Place, duration: cp_model.LinearExprT) -> _Action:
        start, end = (self.model.new_int_var(0, self.horizon, f"{kind}{place}.{name}") for name in ("start", "end"))
        alone = self.model.new_bool_var("")
        behind = kind is Kind.BACKWARD_INPUT
        self.model.add_exactly_one(alone, *(pair for key, pair in self.pairs.items() if behind and key[1] == place))
        interval = self.model.new_optional_interval_var(start, duration, end, alone, "")
        self.model.add(end <= self.makespan)
        return _Action(start, end, interval)

    def _pairs(self, places: Sequence[_Place]) -> dict[tuple[_Place, _Place, Kind], cp_model.IntVar]:
        """Return variables that say whether an F is combined with a B or an I of its stage.

        The F is of a later micro-batch, because a backward needs all forwards of its own.
        """
        stage_of = self.costs.placement.stage_of
        return {
            (ahead, behind, kind): self.model.new_bool_var("")
            for ahead, behind in itertools.product(places if self.costs.can_combine else (), repeat=2)
            if stage_of[ahead[0]] == stage_of[behind[0]] and ahead[1] > behind[1]
            for kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)
        }

    def _pair_ticks(self, ahead: _Place, behind: _Place, kind: Kind) -> int:
        (stage, chunk), (_, other) = (self.costs.placement.places[v] for v, _ in (ahead, behind))
        unit = Action(stage, Kind.FORWARD, chunk, ahead[1], True), Action(stage, kind, other, behind[1])
        return ticks(unit_s(self.costs, unit))

    def _add_pairs(self) -> None:
        for (ahead, behind, kind), pair in self.pairs.items():
            forward, backward = self.actions[(Kind.FORWARD, *ahead)], self.actions[(Kind.BACKWARD_INPUT, *behind)]
            self.model.add(forward.start == backward.start).only_enforce_if(pair)
            self.model.add(forward.end == backward.end).only_enforce_if(pair)
            self.model.add(self.whole[behind] == int(kind is Kind.BACKWARD)).only_enforce_if(pair)

    def _add_stages(self) -> None:
        costs = self.costs
        for (kind, v, m), action in self.actions.items():
            if m + 1 < costs.micro_batches:
                self.model.add(action.end <= self.actions[kind, v, m + 1].start)
            if kind is Kind.BACKWARD_WEIGHT:
                self.model.add(self.actions[Kind.BACKWARD_INPUT, v, m].end <= action.start)
                if self.whole:
                    end = self.actions[Kind.BACKWARD_INPUT, v, m].end
                    self.model.add(action.start == end).only_enforce_if(self.whole[v, m])
        for stage, cap in enumerate(costs.max_in_flight):
            mine = {key: action for key, action in self.actions.items() if costs.placement.stage_of[key[1]] == stage}
            self.model.add_no_overlap([action.interval for action in mine.values()])
            if cap is None:
                continue
            held, sizes = [], []
            released = Fraction(costs.released_at_backward_input[stage])
            given, added = max(released, Fraction(0)), max(-released, Fraction(0))
            for (kind, v, m), forward in mine.items():
                if kind is Kind.FORWARD:
                    for until, size in ((Kind.BACKWARD_INPUT, given), (Kind.BACKWARD_WEIGHT, 1 - given)):
                        held.append(self._span(forward.start, mine[until, v, m].end))
                        sizes.append(int(size * released.denominator))
                    if added:
                        input_start, end = mine[Kind.BACKWARD_INPUT, v, m].start, mine[Kind.BACKWARD_WEIGHT, v, m].end
                        held.append(self._span(input_start, end, unless=self.whole[v, m]))
                        sizes.append(int(added * released.denominator))
            self.model.add_cumulative(held, sizes, int(Fraction(cap) * released.denominator))

    def _span(
        self, start: cp_model.IntVar, end: cp_model.IntVar, unless: cp_model.IntVar | None = None
    ) -> cp_model.IntervalVar:
        length = self.model.new_int_var(0, self.horizon, "")
        if unless is None:
            return self.model.new_interval_var(start, length, end, "")
        return self.model.new_optional_interval_var(start, length, end, ~unless, "")

    def _add_messages(self) -> None:
        costs = self.costs
        on_link: dict[tuple[int, int], list[cp_model.IntervalVar]] = {}
        for v in range(self.virtual_stages):
            for m in range(costs.micro_batches):
                forward, backward = self.actions[Kind.FORWARD, v, m], self.actions[Kind.BACKWARD_INPUT, v, m]
                if v + 1 == self.virtual_stages:
                    self.model.add(forward.end <= backward.start)
                else:
                    ends = costs.placement.stage_of[v], costs.placement.stage_of[v + 1]
                    self._send(on_link, ends, forward, self.actions[Kind.FORWARD, v + 1, m])
                    self._send(on_link, ends[::-1], self.actions[Kind.BACKWARD_INPUT, v + 1, m], backward)
        for intervals in on_link.values():
            self.model.add_no_overlap(intervals)

    def _send(
        self,
        on_link: dict[tuple[int, int], list[cp_model.IntervalVar]],
        ends: tuple[int, int],
        sender: _Action,
        receiver: _Action,
    ) -> None:
        # Whether messages leave in hand-over order does not matter to the optimum of one message kind per link; with
        # two kinds (two stages, several chunks) free order makes the optimum a lower bound of the real one.
        cost = self.costs.link(*ends) if ends[0] != ends[1] else LinkCost()
        latency_s, occupancy_s = (0.0, cost.transfer_s) if cost.rendezvous else (cost.latency_s, cost.occupancy_s)
        start = self.model.new_int_var(0, self.horizon, "")
        end = self.model.new_int_var(0, self.horizon, "")
        on_link.setdefault(ends, []).append(self.model.new_interval_var(start, ticks(occupancy_s), end, ""))
        self.model.add(start >= sender.end)
        self.model.add(receiver.start >= end + ticks(latency_s))

    def _add_hint(self, simulation: Simulation) -> None:
        schedule: Schedule = simulation.schedule
        for order, starts in zip(schedule.orders, simulation.start_s, strict=True):
            for position, (action, start_s) in enumerate(zip(order, starts, strict=True)):
                v = schedule.placement.virtual_stage(action.stage, action.chunk)
                is_whole = action.kind is Kind.BACKWARD
                kind = Kind.BACKWARD_INPUT if is_whole else action.kind
                self.model.add_hint(self.actions[kind, v, action.micro_batch].start, ticks(start_s))
                if self.whole and kind is Kind.BACKWARD_INPUT:
                    self.model.add_hint(self.whole[v, action.micro_batch], is_whole)
                if action.combined:
                    behind = order[position + 1]
                    other = schedule.placement.virtual_stage(behind.stage, behind.chunk), behind.micro_batch
                    self.model.add_hint(self.pairs[(v, action.micro_batch), other, behind.kind], True)


def optimum(costs: Costs, known: Simulation, *, limit_s: float) -> Optimum:
    """The least makespan of `costs`, starting the search from the schedule `known`."""
    return Model(costs, horizon_s=known.makespan_s).solve(limit_s, known)
