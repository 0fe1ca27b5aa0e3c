# SPDX-License-Identifier: Apache-2.0
"""What `adaptra plan` and `adaptra simulate` print: JSON for programs, a summary and a table per stage for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from adaptra_megatron.cli.planning.comparison import Comparison
from adaptra_megatron.cli.tables import print_table
from adaptra_megatron.schedule.actions import Schedule
from adaptra_megatron.schedule.bounds import LowerBound
from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.schedule.csv_format import schedule_to_csv
from adaptra_megatron.schedule.jobs.costs import ranges
from adaptra_megatron.schedule.jobs.simulation import JobSimulation
from adaptra_megatron.schedule.simulator import Simulation

_HEADINGS = ("stage", "in flight", "cap", "idle")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One schedule under one set of costs."""

    name: str
    costs: Costs
    simulation: Simulation
    lower_bound: LowerBound
    schedule: Schedule | None
    """None for online dispatch, which has no order until it runs."""
    planning_s: float | None = None

    @property
    def gap(self) -> float:
        """Excess over the lower bound: 0.02 is 2%. Below 0 only if a cap is passed."""
        return self.lower_bound.gap_of(self.simulation.makespan_s)

    def document(self) -> dict[str, object]:
        """For JSON."""
        document = main_figures(self.simulation, self.lower_bound)
        if self.planning_s is not None:
            document["planning_s"] = self.planning_s
        if self.schedule is not None:
            document["schedule_csv"] = schedule_to_csv(self.schedule)
        return document

    def print_text(self, comparison: Comparison, *, per_stage: bool) -> None:
        """The figures in words, what they compare with, and a warning if caps are passed; a line per stage if asked."""
        costs, bound = self.costs, self.lower_bound
        print(f"{self.name}: {costs.stages} stages x {costs.chunks} chunks, {costs.micro_batches} micro-batches")
        print(f"  makespan     {self.simulation.makespan_s:.6g} s")
        print(f"  lower bound  {bound.seconds:.6g} s ({bound.kind})")
        print(f"  gap          {self.gap:.2%}")
        if self.planning_s is not None:
            print(f"  planned in   {self.planning_s:.3g} s")
        comparison.print_text()
        if per_stage:
            print_table(_HEADINGS, _stage_rows(self))
        print_cap_warnings(costs, self.simulation.peak_in_flight)


def print_cap_warnings(costs: Costs, peaks: Sequence[float]) -> None:
    """A line if caps are passed."""
    over = costs.stages_over_cap(peaks)
    if not over:
        return
    caps = {costs.max_in_flight[stage] for stage in over}
    cap = f"{caps.pop():g}" if len(caps) == 1 else "lower"
    one = f"stage {over[0]}", "holds", "its"
    what, verb, their = one if len(over) == 1 else (f"stages {ranges(over)}", "hold", "their")
    most = max(peaks[stage] for stage in over)
    print(
        f"warning: {what} {verb} {'up to ' if len(over) > 1 else ''}{most:g} activations, {their} cap is {cap}: this "
        "schedule would not fit; `adaptra plan` finds one that does"
    )


def main_figures(simulation: Simulation | JobSimulation, bound: LowerBound) -> dict[str, object]:
    """First entries of every JSON output. Its keys are an interface: add, never rename."""
    return {
        "makespan_s": simulation.makespan_s,
        "lower_bound_s": bound.seconds,
        "gap": bound.gap_of(simulation.makespan_s),
        "peak_in_flight": list(simulation.peak_in_flight),
    }


def _stage_rows(outcome: Outcome) -> list[tuple[str, ...]]:
    simulation = outcome.simulation
    return [
        (str(stage), f"{peak:g}", "none" if cap is None else f"{cap:g}", f"{idle:.1%}")
        for stage, (peak, cap, idle) in enumerate(
            zip(simulation.peak_in_flight, outcome.costs.max_in_flight, simulation.bubble_fraction, strict=True)
        )
    ]
