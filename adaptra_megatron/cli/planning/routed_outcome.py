# SPDX-License-Identifier: Apache-2.0
"""What `adaptra plan` and `adaptra simulate` print for a job whose micro-batches run at other replicas' cells."""

from __future__ import annotations

import json
from dataclasses import dataclass

from adaptra_megatron.cli.planning.picture import picture
from adaptra_megatron.cli.tables import print_table
from adaptra_megatron.schedule.jobs.costs import ranges
from adaptra_megatron.schedule.routing.costs import RoutedCosts
from adaptra_megatron.schedule.routing.planner import RoutedPlan

_MOST_ROWS = 16
"""Most rows of the table of moves."""


@dataclass(frozen=True, kw_only=True)
class RoutedOutcome:
    """A routed plan, beside what the job takes without it."""

    name: str
    """The schedule that every replica would run for itself."""
    unrouted_s: float | None
    """What that takes; None where a dead cell stops it."""
    costs: RoutedCosts
    plan: RoutedPlan
    planning_s: float

    def show(self, *, as_json: bool) -> None:
        """Print it: one JSON object on one line, or tables and a picture."""
        (self._print_json if as_json else self._print_text)()

    def _print_json(self) -> None:
        plan, costs = self.plan, self.costs
        peaks = plan.simulation.peak_in_flight
        orders = zip(costs.cells, plan.schedule.orders, strict=True)
        document = {
            "makespan_s": plan.simulation.period_s,
            "lower_bound_s": plan.lower_bound.seconds,
            "gap": plan.gap,
            "peak_in_flight": [max(peaks[stage :: costs.stages]) for stage in range(costs.stages)],
            "planning_s": self.planning_s,
            "unrouted": {"schedule": self.name, "makespan_s": self.unrouted_s, "planned_s": plan.present_s},
            "dead": [str(cell) for cell in sorted(costs.dead)],
            "moves": [
                {"from": str(move.source), "to": str(move.target), "micro_batches": list(move.micro_batches)}
                for move in plan.routing.moves()
            ],
            "orders": {
                str(cell): [f"{action.kind}{action.replica}.{action.micro_batch}" for action in order]
                for cell, order in orders
            },
        }
        print(json.dumps(document, allow_nan=False))

    def _print_text(self) -> None:
        plan, costs = self.plan, self.costs
        print(
            f"routed: {costs.stages} stages x {len(costs.replicas)} replicas, {costs.micro_batches} micro-batches each"
        )
        stopped = "stops: " + ", ".join(f"cell {cell} is dead" for cell in sorted(costs.dead))
        rows = [
            (
                self.name,
                stopped if self.unrouted_s is None else f"{self.unrouted_s:.6g} s",
                self._gain(self.unrouted_s),
            ),
            (
                "planned, not routed",
                "-" if plan.present_s is None else f"{plan.present_s:.6g} s",
                self._gain(plan.present_s),
            ),
            ("routed", f"{plan.simulation.period_s:.6g} s", ""),
            ("lower bound", f"{plan.lower_bound.seconds:.6g} s ({plan.lower_bound.where})", f"gap {plan.gap:.2%}"),
        ]
        print_table(("", "makespan", "routed is"), rows)
        print(f"  planned in   {self.planning_s:.3g} s")
        self._print_moves()
        for line in picture(plan.simulation, costs):
            print(line)

    def _gain(self, seconds: float | None) -> str:
        return "" if seconds is None else f"{seconds / self.plan.simulation.period_s:.3g} x faster"

    def _print_moves(self) -> None:
        moves = self.plan.routing.moves()
        if not moves:
            print("  nothing is moved: it would not pay")
            return
        moved = sum(len(move.micro_batches) for move in moves)
        print(f"  moved        {moved} of {sum(map(len, self.plan.routing.hosts))} micro-batches of a stage")
        rows = [(str(move.source), str(move.target), ranges(move.micro_batches)) for move in moves[:_MOST_ROWS]]
        print_table(("from cell", "to cell", "micro-batches"), rows)
        if len(moves) > _MOST_ROWS:
            print(f"  and {len(moves) - _MOST_ROWS} more pairs of cells")
