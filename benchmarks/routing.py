# SPDX-License-Identifier: Apache-2.0
"""How good and how fast routed plans are. Prints tables and writes them to benchmarks/results/routing.md.

    python benchmarks/routing.py [--cases 500] [--limit 10]

Needs the test extra (OR-Tools) for the comparison with proven optima.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "schedule" / "routing"))

from cp_sat_routing import routed_optimum
from reference_routing import random_job
from routing_cases import check_plan, closed_form_s, equal_cells, random_dead, small_job

from adaptra_megatron.schedule.classic import one_f_one_b
from adaptra_megatron.schedule.costs import LinkCost, uniform_costs
from adaptra_megatron.schedule.jobs.job_costs import JobCosts, Override
from adaptra_megatron.schedule.routing.routed_costs import RoutedCosts
from adaptra_megatron.schedule.routing.routed_planner import plan_routed
from adaptra_megatron.schedule.simulator import simulate

RESULT = Path(__file__).resolve().parent / "results" / "routing.md"


def toy_table() -> list[str]:
    lines = [
        "## ReCycle's toy case",
        "",
        "3 replicas, 4 stages, 6 micro-batches each, F = I = W = 1 slot. ReCycle's talk gives 27, 36, 29 and 27.",
        "",
        "| dead | backwards | stages | slots | bound |",
        "|---|---|---|---|---|",
    ]
    for dead, split, staggered in (
        (set(), False, False),
        ({(1, 2)}, False, False),
        ({(1, 2)}, True, False),
        ({(1, 2)}, True, True),
    ):
        plan = plan_routed(equal_cells(3, 4, 6, dead, staggered), split=split)
        lines.append(
            f"| {'1.2' if dead else 'none'} | {'split' if split else 'whole'} | "
            f"{'staggered' if staggered else 'together'} | {plan.simulation.period_s:g} "
            f"| {plan.lower_bound.seconds:.2f} |"
        )
    return [*lines, ""]


def random_table(cases: int) -> list[str]:
    gaps = []
    for seed in range(cases):
        costs = random_job(seed)
        plan = plan_routed(costs, split=seed % 4 > 0, deadline_s=0.05)
        check_plan(plan, costs)
        gaps.append(plan.gap)
    attained = optimal = 0
    for seed in range(cases):
        costs = random_dead(seed)
        plan = plan_routed(costs)
        reaches = plan.simulation.period_s <= closed_form_s(costs) * (1 + 1e-9)
        attained += reaches
        optimal += not reaches and plan.gap <= 1e-9
    return [
        "## Random jobs",
        "",
        f"{cases} jobs of 1..4 replicas, 1..5 stages, 1..7 micro-batches; any seconds, links, caps, dead cells and",
        "lengths: every plan is complete, within its caps, and takes exactly what a slow replay in Python takes.",
        f"Gap to the proven bound, which knows no caps: median {statistics.median(gaps):.1%}, 9th decile "
        f"{statistics.quantiles(gaps, n=10)[-1]:.1%}.",
        "",
        "ReCycle's closed form (equal cells, free memory, staggered; 2..6 replicas, 2..8 stages, 2..16 micro-batches,",
        f"up to 4 dead cells) is attained in {attained} of {cases}; in {optimal} more the plan is at the proven bound,",
        "which is longer there: with few micro-batches the way to the last stage and back counts.",
        "",
    ]


def optimum_table(cases: int, limit_s: float) -> list[str]:
    over, solved = [], 0
    for seed in range(cases):
        costs = small_job(seed)
        plan = plan_routed(costs, least_gain=0.0)
        proven_s, found_s = routed_optimum(costs, plan.simulation.period_s, limit_s=limit_s)
        proven_s = max(proven_s, plan.lower_bound.seconds)
        solved += found_s <= proven_s * (1 + 1e-9)
        over.append(plan.simulation.period_s / proven_s - 1.0)
    return [
        "## Small jobs against CP-SAT",
        "",
        f"2 replicas, 2..3 stages, 2..3 micro-batches; CP-SAT chooses cells and orders, {limit_s:g} s per case. How",
        "much longer than the optimum a plan takes (where none was proven in time: than what was proven).",
        "",
        "| cases | optimum proven | median | max | within 5% |",
        "|---|---|---|---|---|",
        f"| {cases} | {solved} | {statistics.median(over):.2%} | {max(over):.2%} | {sum(x <= 0.05 for x in over)} |",
        "",
    ]


def dead_table() -> list[str]:
    lines = [
        "## Dead cells",
        "",
        "Equal cells, 4 micro-batches per stage and replica (16 stages: 2), free memory, split backwards, staggered.",
        "Throughput relative to 1F1B without a fault: of the live cells' share of all, routed (10 draws of dead cells:",
        "mean and least), and with the replicas of the dead cells dropped, their micro-batches run by the others,",
        "planned as well (the same draws; - where none is left in any of them).",
        "",
        "| stages | replicas | dead | live share | routed, mean | routed, least | dropped, mean | dropped, least |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for stages in (4, 8, 16):
        for replicas in (2, 4, 8):
            for count in (1, 2, 4, 8):
                if count < stages * (replicas - 1):
                    lines.append(dead_row(stages, replicas, count))
    return [*lines, ""]


def dead_row(stages: int, replicas: int, count: int) -> str:
    micro_batches = stages * (2 if stages == 16 else 4)
    healthy_s = 3.0 * (micro_batches + stages - 1)
    routed, dropped = [], []
    rng = random.Random(stages * 100 + replicas * 10 + count)
    cells = [(d, s) for d in range(replicas) for s in range(stages)]
    while len(routed) < 10:
        dead = set(rng.sample(cells, count))
        if any(all((d, s) in dead for d in range(replicas)) for s in range(stages)):
            continue
        routed.append(
            healthy_s / plan_routed(equal_cells(replicas, stages, micro_batches, dead, True)).simulation.period_s
        )
        left = replicas - len({d for d, _ in dead})
        if left:
            each = -(-micro_batches * replicas // left)
            dropped.append(healthy_s / plan_routed(equal_cells(1, stages, each, staggered=True)).simulation.period_s)
            assert routed[-1] >= dropped[-1] * (1 - 1e-9), (stages, replicas, dead)
    share = 1.0 - count / len(cells)
    drop = f"{statistics.fmean(dropped):.3f} | {min(dropped):.3f}" if dropped else "- | -"
    found = f"{statistics.fmean(routed):.3f} | {min(routed):.3f}"
    return f"| {stages} | {replicas} | {count} | {share:.3f} | {found} | {drop} |"


def slow_table() -> list[str]:
    lines = [
        "## Slow cells",
        "",
        "One cell of 4 replicas x 2 stages at 0.42 of its speed; 20 ms for F, I, W. Stock: 1F1B with blocking sends.",
        "",
        "| micro-batches | link | cap | stock | routed | gain | bound | gap | moved |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for micro_batches in (8, 16, 32):
        for cap in (2.0, 5.0, None):
            for link in (LinkCost(), LinkCost(0.003, 0.001)):
                base = uniform_costs(
                    2,
                    micro_batches,
                    forward_s=0.02,
                    backward_input_s=0.02,
                    backward_weight_s=0.02,
                    links={(0, 1): link, (1, 0): link},
                    max_in_flight=cap,
                )
                slow = Override(replicas=(0,), slow_stages={0: 1 / 0.42})
                job = JobCosts(base, replicas=4, overrides=[slow])
                order = one_f_one_b(2, micro_batches)
                stock_s = max(simulate(order, group.costs, blocking=True).makespan_s for group in job.groups)
                plan = plan_routed(RoutedCosts(job=job))
                took_s = plan.simulation.period_s
                moved = sum(len(move.micro_batches) for move in plan.routing.moves())
                lines.append(
                    f"| {micro_batches} | {1000 * link.latency_s:g} + {1000 * link.occupancy_s:g} ms | {cap or 'none'} "
                    f"| {stock_s:.3f} | {took_s:.3f} | {stock_s / took_s:.2f} x | {plan.lower_bound.seconds:.3f} "
                    f"| {plan.gap:.1%} | {moved} |"
                )
    return [*lines, ""]


def time_table() -> list[str]:
    lines = [
        "## Time of a whole `plan_routed()` call",
        "",
        "Two dead cells and three slow ones, cap: stages + 3; median of 3, one core.",
        "",
        "| stages | replicas | micro-batches each | wall s | processor s | gap |",
        "|---|---|---|---|---|---|",
    ]
    for stages, replicas, micro_batches in ((4, 4, 32), (8, 16, 32), (16, 64, 64), (16, 128, 64)):
        base = uniform_costs(
            stages,
            micro_batches,
            forward_s=0.02,
            backward_input_s=0.02,
            backward_weight_s=0.02,
            max_in_flight=stages + 3.0,
        )
        slow = [Override(replicas=(number,), slow_stages={number % stages: 1.5}) for number in range(3)]
        dead = equal_cells(replicas, stages, 1, {(3, 1), (1, 2)}).dead
        costs = RoutedCosts(job=JobCosts(base, replicas=replicas, overrides=slow), dead=frozenset(dead))
        wall, processor, gap = [], [], 0.0
        for _ in range(3):
            start = time.perf_counter(), time.process_time()
            gap = plan_routed(costs).gap
            wall.append(time.perf_counter() - start[0])
            processor.append(time.process_time() - start[1])
        lines.append(
            f"| {stages} | {replicas} | {micro_batches} | {statistics.median(wall):.3f} "
            f"| {statistics.median(processor):.3f} | {gap:.1%} |"
        )
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500, help="random jobs")
    parser.add_argument("--small", type=int, default=60, help="small jobs for CP-SAT")
    parser.add_argument("--limit", type=float, default=10.0, help="seconds of CP-SAT per job")
    arguments = parser.parse_args()
    lines = ["# Routing micro-batches between replicas", "", "Written by `python benchmarks/routing.py`.", ""]
    tables = (
        toy_table,
        slow_table,
        dead_table,
        lambda: random_table(arguments.cases),
        lambda: optimum_table(arguments.small, arguments.limit),
        time_table,
    )
    for table in tables:
        found = table()
        print("\n".join(found), flush=True)
        lines += found
    RESULT.write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
