# SPDX-License-Identifier: Apache-2.0
"""What `adaptra plan` and `adaptra simulate` print: JSON for programs, a summary and a table per stage for people."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from adaptra_megatron.cli.tables import print_table
from adaptra_megatron.schedule.actions import Schedule
from adaptra_megatron.schedule.bounds import LowerBound
from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.schedule.csv_format import schedule_to_csv
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

    def show(self, *, as_json: bool) -> None:
        """Print it."""
        (_print_json if as_json else _print_text)(self)


def print_cap_warnings(costs: Costs, peaks: Sequence[float]) -> None:
    """A line for each cap that is passed."""
    for stage in costs.stages_over_cap(peaks):
        print(
            f"warning: stage {stage} holds {peaks[stage]:g} activations, its cap is {costs.max_in_flight[stage]:g}: "
            "this schedule would not fit; `adaptra plan` finds one that does"
        )


def main_figures(simulation: Simulation | JobSimulation, bound: LowerBound) -> dict[str, object]:
    """First entries of every JSON output. Its keys are an interface: add, never rename."""
    return {
        "makespan_s": simulation.makespan_s,
        "lower_bound_s": bound.seconds,
        "gap": bound.gap_of(simulation.makespan_s),
        "peak_in_flight": list(simulation.peak_in_flight),
    }


def _print_json(outcome: Outcome) -> None:
    """One JSON object on one line."""
    document = main_figures(outcome.simulation, outcome.lower_bound)
    if outcome.planning_s is not None:
        document["planning_s"] = outcome.planning_s
    if outcome.schedule is not None:
        document["schedule_csv"] = schedule_to_csv(outcome.schedule)
    print(json.dumps(document, allow_nan=False))


def _print_text(outcome: Outcome) -> None:
    """The figures in words, and one line per stage; a warning for each cap that is passed."""
    costs, bound = outcome.costs, outcome.lower_bound
    print(f"{outcome.name}: {costs.stages} stages x {costs.chunks} chunks, {costs.micro_batches} micro-batches")
    print(f"  makespan     {outcome.simulation.makespan_s:.6g} s")
    print(f"  lower bound  {bound.seconds:.6g} s ({bound.kind})")
    print(f"  gap          {outcome.gap:.2%}")
    if outcome.planning_s is not None:
        print(f"  planned in   {outcome.planning_s:.3g} s")
    print_table(_HEADINGS, _stage_rows(outcome))
    print_cap_warnings(costs, outcome.simulation.peak_in_flight)


def _stage_rows(outcome: Outcome) -> list[tuple[str, ...]]:
    simulation = outcome.simulation
    return [
        (str(stage), f"{peak:g}", "none" if cap is None else f"{cap:g}", f"{idle:.1%}")
        for stage, (peak, cap, idle) in enumerate(
            zip(simulation.peak_in_flight, outcome.costs.max_in_flight, simulation.bubble_fraction, strict=True)
        )
    ]
