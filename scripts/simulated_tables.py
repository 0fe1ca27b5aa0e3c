# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/tuning.md that are simulated: what memory and micro-batches are good for under a slow link."""

from __future__ import annotations

from markdown_table import markdown_table

from adaptra_megatron.schedule.bounds import lower_bound
from adaptra_megatron.schedule.classic import one_f_one_b
from adaptra_megatron.schedule.costs import Costs, LinkCost, uniform_costs
from adaptra_megatron.schedule.planner import plan
from adaptra_megatron.schedule.simulator import simulate

STAGES = 8
CLOSE = 1.01
"""A plan this close to the bound of any memory has enough of it."""


def costs(delay: float, micro_batches: int, cap: float | None = None) -> Costs:
    """F, I and W of one second each; `delay` in seconds, thus in forwards, on the middle link, both ways."""
    upper, slow = STAGES // 2 - 1, LinkCost(latency_s=delay)
    return uniform_costs(
        STAGES,
        micro_batches,
        forward_s=1.0,
        backward_input_s=1.0,
        backward_weight_s=1.0,
        links={(upper, upper + 1): slow, (upper + 1, upper): slow},
        max_in_flight=cap,
    )


def memory_table() -> str:
    """Activations that are needed to hide a delay, over the delay."""
    micro_batches = 24
    rows = []
    for delay in (0, 1, 2, 3, 4, 6):
        bound_s = lower_bound(costs(delay, micro_batches)).seconds
        stock_s = _stock_s(delay, micro_batches)
        tight_s = _planned_s(delay, micro_batches, STAGES)
        for cap in range(STAGES, micro_batches + 1):
            planned_s = _planned_s(delay, micro_batches, cap)
            if planned_s <= CLOSE * bound_s:
                break
        row = f"{delay}", f"{stock_s / tight_s:.2f}", f"{cap}", f"{cap / STAGES:.2f}", f"{stock_s / planned_s:.2f}"
        rows.append(row)
    head = (
        "delay, in forwards",
        f"stock / planned, {STAGES} activations",
        "activations that suffice",
        "per stage of the pipeline",
        "stock / planned, with these",
    )
    return markdown_table(head, rows)


def micro_batches_table() -> str:
    """What is left of a delay, and how idle stages are, over the number of micro-batches."""
    delay, cap = 3.0, 1.5 * STAGES
    rows = []
    for micro_batches in (8, 12, 16, 24, 32, 64, 128):
        healthy_s, planned_s = (_planned_s(each, micro_batches, cap) for each in (0.0, delay))
        work_s = 3.0 * micro_batches
        rows.append(
            (
                f"{micro_batches}",
                f"{1 - work_s / healthy_s:.1%}",
                f"{1 - work_s / planned_s:.1%}",
                f"{planned_s / healthy_s:.3f}",
                f"{_stock_s(delay, micro_batches) / planned_s:.2f}",
            )
        )
    head = ("micro-batches", "idle, healthy", "idle, slow link", "slow link / healthy", "stock / planned, slow link")
    return markdown_table(head, rows)


def _stock_s(delay: float, micro_batches: int) -> float:
    return simulate(one_f_one_b(STAGES, micro_batches), costs(delay, micro_batches), blocking=True).makespan_s


def _planned_s(delay: float, micro_batches: int, cap: float) -> float:
    return plan(costs(delay, micro_batches, cap)).makespan_s
