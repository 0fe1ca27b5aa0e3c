# SPDX-License-Identifier: Apache-2.0
"""The exact reference for routed plans: cells and orders as one CP-SAT model.

Seconds are whole, links free, and micro-batches alike: by order of their first forwards, and with what each cell has to
do as a bound of its own, small jobs are proven within seconds.
"""

from __future__ import annotations

from typing import NamedTuple

from ortools.sat.python import cp_model

from adaptra_megatron.common.layout import Cell
from adaptra_megatron.schedule.routing.routed_costs import RoutedCosts, seconds_of_cells


class _Run(NamedTuple):
    """One kind of action of a micro-batch at a stage: when, and on each cell, if there."""

    start: cp_model.IntVar
    end: cp_model.IntVar


def routed_optimum(costs: RoutedCosts, known_s: float, *, limit_s: float) -> tuple[float, float]:
    """The least makespan of split backwards: proven below `known_s`, and found."""
    model = cp_model.CpModel()
    horizon = round(known_s)
    assert abs(known_s - horizon) < 1e-6, "the model is exact for whole seconds only"
    assert not any(each.micro_batch_factors for each in costs.replicas), "the model is for equal micro-batches"
    tables = [seconds_of_cells(costs.replicas, name) for name in ("forward_s", "backward_input_s", "backward_weight_s")]
    makespan = model.new_int_var(0, horizon, "makespan")
    on_cell: dict[Cell, list[cp_model.IntervalVar]] = {cell: [] for cell in costs.cells}
    held: dict[Cell, list[cp_model.IntervalVar]] = {cell: [] for cell in costs.cells}
    load_s: dict[Cell, cp_model.LinearExprT] = dict.fromkeys(costs.cells, 0)
    runs: dict[tuple[int, int, int], _Run] = {}
    for job in range(costs.job_micro_batches):
        for stage in range(costs.stages):
            live = [cell for cell in costs.cells if cell.stage == stage and cell not in costs.dead]
            hosts = {cell: model.new_bool_var("") for cell in live}
            model.add_exactly_one(hosts.values())
            for kind, table in enumerate(tables):
                run = _Run(model.new_int_var(0, horizon, ""), model.new_int_var(0, horizon, ""))
                runs[kind, job, stage] = run
                model.add(run.end <= makespan)
                for cell, is_host in hosts.items():
                    seconds = round(table[cell.replica][stage])
                    interval = model.new_optional_interval_var(run.start, seconds, run.end, is_host, "")
                    on_cell[cell].append(interval)
            for cell, is_host in hosts.items():
                load_s[cell] += is_host * sum(round(table[cell.replica][stage]) for table in tables)
                start, end = runs[0, job, stage].start, runs[2, job, stage].end
                length = model.new_int_var(0, horizon, "")
                held[cell].append(model.new_optional_interval_var(start, length, end, is_host, ""))
        for stage in range(costs.stages):
            forward, backward, weight = (runs[kind, job, stage] for kind in range(3))
            model.add(forward.end <= backward.start)
            model.add(backward.end <= weight.start)
            if stage + 1 < costs.stages:
                model.add(forward.end <= runs[0, job, stage + 1].start)
                model.add(runs[1, job, stage + 1].end <= backward.start)
    for job in range(1, costs.job_micro_batches):  # alike: any other order is this one with other names
        model.add(runs[0, job - 1, 0].start <= runs[0, job, 0].start)
    for cell in costs.cells:
        model.add_no_overlap(on_cell[cell])
        model.add(load_s[cell] <= makespan)
        cap = costs.replicas[cell.replica].max_in_flight[cell.stage]
        if cap is not None:
            model.add_cumulative(held[cell], [1] * len(held[cell]), int(cap))
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_time_in_seconds = limit_s
    status = solver.solve(model)
    found = solver.objective_value if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else float(horizon)
    return solver.best_objective_bound, found
