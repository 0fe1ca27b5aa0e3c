# SPDX-License-Identifier: Apache-2.0
"""What routing would give three production jobs. Prints tables and writes them to benchmarks/results/traces.md.

    python benchmarks/traces.py DIRECTORY

DIRECTORY holds trace-AR.parquet, trace-SE.parquet and trace-ST.parquet from the artifact of "Understanding Stragglers
in Large Model Training Using What-if Analysis" (OSDI '25; github.com/ByteDance-Seed/StragglerAnalysis, Apache-2.0).
Needs pyarrow, which is no dependency of the package: `pip install pyarrow`.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections import defaultdict
from pathlib import Path

import pyarrow.parquet

from adaptra_megatron.schedule.classic import one_f_one_b
from adaptra_megatron.schedule.costs import Costs, LinkCost, PerMicroBatch
from adaptra_megatron.schedule.jobs.job_costs import job_of
from adaptra_megatron.schedule.routing.balance import balanced_replicas
from adaptra_megatron.schedule.routing.routed_costs import RoutedCosts
from adaptra_megatron.schedule.routing.routed_planner import plan_routed
from adaptra_megatron.schedule.simulator import simulate

RESULT = Path(__file__).resolve().parent / "results" / "traces.md"
KINDS = {"forward-compute": "forward", "backward-compute": "backward"}
SENDS = {"forward-send": 1, "backward-send": -1}
HALVES = ("backward_input_s", "backward_weight_s")

Seconds = dict[tuple[str, int], dict[int, float]]
"""Recorded times of one step of one replica: by kind and stage, seconds of each micro-batch."""


@dataclasses.dataclass
class Trace:
    """What a recording says of computation, and of transfers that waited least."""

    name: str
    seconds: dict[tuple[int, int], Seconds]
    """By step and replica."""
    recorded_s: dict[tuple[int, int], float]
    """From the first forward's start to the last backward's end."""
    links: dict[tuple[int, int], LinkCost]

    @property
    def steps(self) -> list[int]:
        """In the order in which they were recorded."""
        return list(dict.fromkeys(step for step, _ in self.seconds))

    @property
    def replicas(self) -> int:
        return 1 + max(replica for _, replica in self.seconds)

    @property
    def stages(self) -> int:
        return 1 + max(stage for _, stage in next(iter(self.seconds.values())))

    @property
    def micro_batches(self) -> int:
        return len(next(iter(self.seconds.values()))["forward", 0])


def read(path: Path) -> Trace:
    seconds: dict[tuple[int, int], Seconds] = defaultdict(lambda: defaultdict(dict))
    ends: dict[tuple[int, int], list[float]] = defaultdict(list)
    sends: dict[tuple[int, int], float] = {}
    for row in pyarrow.parquet.read_table(path).to_pylist():
        kind, stage, taken_s = row["optype"], row["stage"], row["duration"]
        if kind in KINDS:
            key = (row["step"], row["dp_rank"])
            seconds[key][KINDS[kind], stage][row["mb_id"]] = taken_s
            ends[key] += [row["start_ts"], row["start_ts"] + taken_s]
        elif kind in SENDS:
            link = (stage, stage + SENDS[kind])
            sends[link] = min(taken_s, sends.get(link, taken_s))
    return Trace(
        name=path.stem.removeprefix("trace-"),
        seconds=dict(seconds),
        recorded_s={key: max(times) - min(times) for key, times in ends.items()},
        links={link: LinkCost(0.0, taken_s) for link, taken_s in sends.items()},
    )


def costs_of(trace: Trace, seconds: Seconds, cap: float | None = None) -> Costs:
    """A replica's costs with seconds per micro-batch; a backward is split in halves, as its parts were not recorded."""

    def table(kind: str, share: float) -> PerMicroBatch:
        numbers = range(trace.micro_batches)
        return tuple((tuple(share * seconds[kind, stage][m] for m in numbers),) for stage in range(trace.stages))

    nothing = ((0.0,),) * trace.stages
    costs = Costs(
        stages=trace.stages,
        chunks=1,
        micro_batches=trace.micro_batches,
        forward_s=nothing,
        backward_input_s=nothing,
        backward_weight_s=nothing,
        links=trace.links,
        max_in_flight=(cap,) * trace.stages,
    )
    return costs.with_micro_batches(
        {"forward_s": table("forward", 1.0), **{name: table("backward", 0.5) for name in HALVES}}
    )


def medians(costs: Costs) -> Costs:
    """The same pipeline with the median of its micro-batches for each."""
    tables = {
        name: tuple((statistics.median(costs.micro_batch_s(name, stage, 0)),) for stage in range(costs.stages))
        for name in costs.tables()
    }
    return dataclasses.replace(costs.with_tables(tables), micro_batch_factors={})


def stock_s(costs: Costs) -> float:
    return simulate(one_f_one_b(costs.stages, costs.micro_batches), costs, blocking=True).makespan_s


def replay_table(traces: list[Trace]) -> list[str]:
    lines = [
        "## Replays of what was recorded",
        "",
        "Replica 0, stock's 1F1B with sends that block: seconds from the first forward's start to the last backward's",
        "end, medians over all steps; with the median of a stage's micro-batches for all, and with each one's own.",
        "",
        "| trace | steps | recorded | simulated, medians | simulated, each its own | off by |",
        "|---|---|---|---|---|---|",
    ]
    for trace in traces:
        recorded = statistics.median(trace.recorded_s[step, 0] for step in trace.steps)
        each = [costs_of(trace, trace.seconds[step, 0]) for step in trace.steps]
        own = statistics.median(map(stock_s, each))
        same = statistics.median(stock_s(medians(costs)) for costs in each)
        lines.append(
            f"| {trace.name} | {len(each)} | {recorded:.3f} | {same:.3f} | {own:.3f} | {own / recorded - 1.0:+.2%} |"
        )
    return [*lines, ""]


def typical_seconds(trace: Trace, steps: list[int]) -> list[Seconds]:
    """Per replica: medians over `steps`, micro-batch by micro-batch."""
    return [
        {
            (kind, stage): {
                m: statistics.median(trace.seconds[step, replica][kind, stage][m] for step in steps)
                for m in range(trace.micro_batches)
            }
            for kind in KINDS.values()
            for stage in range(trace.stages)
        }
        for replica in range(trace.replicas)
    ]


def one_step(trace: Trace) -> list[Costs]:
    """A step whose slowest replica took the median time; all cells of a stage alike: micro-batches are what differs."""
    slowest = {step: max(trace.recorded_s[step, replica] for replica in range(trace.replicas)) for step in trace.steps}
    step = sorted(slowest, key=slowest.__getitem__)[len(slowest) // 2]
    own = [costs_of(trace, trace.seconds[step, replica]) for replica in range(trace.replicas)]
    usual = {
        name: tuple((statistics.fmean(each[stage][0] for each in tables),) for stage in range(trace.stages))
        for name in own[0].tables()
        if (tables := [costs.tables()[name] for costs in own])
    }
    return [with_usual(costs, usual) for costs in own]


def with_usual(costs: Costs, usual: dict[str, tuple[tuple[float], ...]]) -> Costs:
    """The same seconds, as factors on those of all replicas' cells."""
    factors = {
        name: tuple(
            (tuple(taken_s / usual[name][stage][0] for taken_s in costs.micro_batch_s(name, stage, 0)),)
            for stage in range(costs.stages)
        )
        for name in usual
    }
    return dataclasses.replace(costs.with_tables(usual), micro_batch_factors=factors)


def rebalanced(replicas: list[Costs]) -> list[Costs]:
    """Whole micro-batches swapped between replicas, by what they take in all stages together."""
    count = replicas[0].micro_batches
    stages = range(replicas[0].stages)
    names = tuple(replicas[0].tables())
    taken = [
        [sum(costs.micro_batch_s(name, stage, 0)[m] for name in names for stage in stages) for m in range(count)]
        for costs in replicas
    ]

    def factors(name: str, numbers: tuple[int, ...]) -> PerMicroBatch:
        found = [
            [replicas[job // count].factors_of(name, stage, 0)[job % count] for job in numbers] for stage in stages
        ]
        return tuple((tuple(row),) for row in found)

    return [
        dataclasses.replace(costs, micro_batch_factors={name: factors(name, numbers) for name in names})
        for costs, numbers in zip(replicas, balanced_replicas(taken), strict=True)
    ]


def routing_row(name: str, replicas: list[Costs], cap: float | None, split: bool = True) -> str:
    capped = [dataclasses.replace(costs, max_in_flight=(cap,) * costs.stages) for costs in replicas]
    stock = max(map(stock_s, capped))
    start = time.process_time()
    plan = plan_routed(RoutedCosts(job=job_of(capped)), split=split)
    planning_s = time.process_time() - start
    moved = sum(len(move.micro_batches) for move in plan.routing.moves())
    runs = sum(map(len, plan.routing.hosts))
    return (
        f"| {name} | {'none' if cap is None else f'{cap:g}'} | {'split' if split else 'whole'} | {stock:.2f} "
        f"| {plan.present_s:.2f} | {plan.simulation.period_s:.2f} | {plan.lower_bound.seconds:.2f} | {plan.gap:.1%} "
        f"| {moved} of {runs} | {planning_s:.2f} |"
    )


def routing_table(traces: list[Trace]) -> list[str]:
    lines = [
        "## Routed",
        "",
        "Simulated seconds of the pipelines' part of a step (the slowest replica's), without the synchronisation after",
        "it. Stock: 1F1B with sends that block. Planned: every micro-batch at its own replica. Routed: planned with",
        "cells of other replicas. The bound is that of any routing. AR and ST: medians of each cell over all steps, or",
        "over one. SE: one median step, its micro-batches' own seconds and cells that are alike; swapped: after whole",
        "micro-batches were exchanged between replicas. Backwards were not recorded in parts: halves. Cap: activations",
        "that a stage may hold; stock's 1F1B holds as many as there are stages.",
        "",
        "| trace | cap | backwards | stock | planned | routed | bound | gap | moved | planning s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for trace in traces:
        if trace.name == "SE":
            jobs = {"SE": one_step(trace)}
            jobs["SE, swapped"] = rebalanced(jobs["SE"])
        else:
            jobs = {
                f"{trace.name}, {name}": [medians(costs_of(trace, each)) for each in typical_seconds(trace, steps)]
                for name, steps in (("all steps", trace.steps), (f"step {trace.steps[3]}", [trace.steps[3]]))
            }
        for name, replicas in jobs.items():
            for cap in (trace.stages, trace.stages + 3.0, None):
                lines.append(routing_row(name, replicas, cap))
            lines.append(routing_row(name, replicas, trace.stages + 3.0, split=False))
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where trace-AR.parquet, trace-SE.parquet, trace-ST.parquet are")
    directory = parser.parse_args().directory
    traces = [read(directory / f"trace-{name}.parquet") for name in ("ST", "AR", "SE")]
    lines = ["# Production traces", "", "Written by `python benchmarks/traces.py`; all simulated.", ""]
    for table in (replay_table(traces), routing_table(traces)):
        print("\n".join(table), flush=True)
        lines += table
    RESULT.write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
