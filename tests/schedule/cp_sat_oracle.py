# SPDX-License-Identifier: Apache-2.0
"""The exact reference for planner and bounds: the whole scheduling problem as a CP-SAT model."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from ortools.sat.python import cp_model

from adaptra_megatron.schedule.actions import Kind, Schedule
from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.schedule.simulator import Simulation

TICKS_PER_SECOND = 1000


class Optimum(NamedTuple):
    """`proven_s` is a proven lower bound, `found_s` the best makespan found; equal when solved to the end."""

    proven_s: float
    found_s: float


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
    """Split backwards only: a whole backward is a split one with I and W in one go, so it never does better.

    Micro-batches of a virtual stage cost the same, so F, I and W in ascending micro-batch order lose nothing.
    """

    def __init__(self, costs: Costs, *, horizon_s: float) -> None:
        self.costs = costs
        self.model = cp_model.CpModel()
        self.horizon = ticks(horizon_s)
        self.makespan = self.model.new_int_var(0, self.horizon, "makespan")
        self.virtual_stages = costs.stages * costs.chunks
        tables = {
            Kind.FORWARD: costs.forward_s,
            Kind.BACKWARD_INPUT: costs.backward_input_s,
            Kind.BACKWARD_WEIGHT: costs.backward_weight_s,
        }
        self.actions = {
            (kind, v, m): self._action(f"{kind}{v}.{m}", ticks(table[v % costs.stages][v // costs.stages]))
            for kind, table in tables.items()
            for v in range(self.virtual_stages)
            for m in range(costs.micro_batches)
        }
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
        found = solver.objective_value if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else float(self.horizon)
        return Optimum(solver.best_objective_bound / TICKS_PER_SECOND, found / TICKS_PER_SECOND)

    def _action(self, name: str, duration: int) -> _Action:
        start = self.model.new_int_var(0, self.horizon, f"{name}.start")
        end = self.model.new_int_var(0, self.horizon, f"{name}.end")
        interval = self.model.new_interval_var(start, duration, end, name)
        self.model.add(end <= self.makespan)
        return _Action(start, end, interval)

    def _add_stages(self) -> None:
        costs = self.costs
        for (kind, v, m), action in self.actions.items():
            if m + 1 < costs.micro_batches:
                self.model.add(action.end <= self.actions[kind, v, m + 1].start)
            if kind is Kind.BACKWARD_WEIGHT:
                self.model.add(self.actions[Kind.BACKWARD_INPUT, v, m].end <= action.start)
        released = Fraction(costs.released_at_backward_input)
        for stage, cap in enumerate(costs.max_in_flight):
            mine = {key: action for key, action in self.actions.items() if key[1] % costs.stages == stage}
            self.model.add_no_overlap([action.interval for action in mine.values()])
            if cap is None:
                continue
            held, sizes = [], []
            for (kind, v, m), forward in mine.items():
                if kind is Kind.FORWARD:
                    for until, size in ((Kind.BACKWARD_INPUT, released), (Kind.BACKWARD_WEIGHT, 1 - released)):
                        held.append(self._span(forward.start, mine[until, v, m].end))
                        sizes.append(int(size * released.denominator))
            self.model.add_cumulative(held, sizes, int(Fraction(cap) * released.denominator))

    def _span(self, start: cp_model.IntVar, end: cp_model.IntVar) -> cp_model.IntervalVar:
        length = self.model.new_int_var(0, self.horizon, "")
        return self.model.new_interval_var(start, length, end, "")

    def _add_messages(self) -> None:
        costs = self.costs
        on_link: dict[tuple[int, int], list[cp_model.IntervalVar]] = {}
        for v in range(self.virtual_stages):
            for m in range(costs.micro_batches):
                forward, backward = self.actions[Kind.FORWARD, v, m], self.actions[Kind.BACKWARD_INPUT, v, m]
                if v + 1 == self.virtual_stages:
                    self.model.add(forward.end <= backward.start)
                else:
                    ends = (v % costs.stages, (v + 1) % costs.stages)
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
        latency_s, occupancy_s = self.costs.link(*ends) if ends[0] != ends[1] else (0.0, 0.0)
        start = self.model.new_int_var(0, self.horizon, "")
        end = self.model.new_int_var(0, self.horizon, "")
        on_link.setdefault(ends, []).append(self.model.new_interval_var(start, ticks(occupancy_s), end, ""))
        self.model.add(start >= sender.end)
        self.model.add(receiver.start >= end + ticks(latency_s))

    def _add_hint(self, simulation: Simulation) -> None:
        schedule: Schedule = simulation.schedule
        for order, starts in zip(schedule.orders, simulation.start_s, strict=True):
            for action, start_s in zip(order, starts, strict=True):
                v = action.chunk * schedule.stages + action.stage
                self.model.add_hint(self.actions[action.kind, v, action.micro_batch].start, ticks(start_s))


def optimum(costs: Costs, known: Simulation, *, limit_s: float) -> Optimum:
    """The least makespan of `costs`, starting the search from the schedule `known`."""
    return Model(costs, horizon_s=known.makespan_s).solve(limit_s, known)
