# SPDX-License-Identifier: Apache-2.0
"""Cases and judgements that tests of routed plans and their benchmark share; random ones go by seed."""

from __future__ import annotations

import random

from reference_routing import period_s, reference_replay

from adaptra_megatron.common.layout import Cell
from adaptra_megatron.schedule.costs import Costs, uniform_costs
from adaptra_megatron.schedule.jobs.job_costs import JobCosts, job_of
from adaptra_megatron.schedule.routing.routed_costs import RoutedCosts
from adaptra_megatron.schedule.routing.routed_planner import RoutedPlan
from adaptra_megatron.schedule.routing.routed_simulator import check_routed, simulate_routed


def equal_cells(
    replicas: int, stages: int, micro_batches: int, dead: set[tuple[int, int]] | None = None, staggered: bool = False
) -> RoutedCosts:
    """Cells of one second per F, I and W, and free memory."""
    costs = uniform_costs(stages, micro_batches, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
    cells = frozenset(Cell(*cell) for cell in dead or ())
    return RoutedCosts(job=JobCosts(costs, replicas=replicas), dead=cells, staggered=staggered)


def closed_form_s(costs: RoutedCosts) -> float:
    """ReCycle's staggered period of `equal_cells`: that of 1F1B without a fault, or the work of the busiest peer."""
    micro_batches, replicas = costs.micro_batches, costs.job.replicas
    busiest = 0
    for stage in range(costs.stages):
        dead = sum(cell.stage == stage for cell in costs.dead)
        busiest = max(busiest, micro_batches + -(-micro_batches * dead // (replicas - dead)))
    return 3.0 * max(micro_batches + costs.stages - 1, busiest)


def small_job(seed: int) -> RoutedCosts:
    """2 replicas, 2 or 3 stages, 2 or 3 micro-batches each; whole seconds, a cap or none, a dead cell or none."""
    rng = random.Random(seed)
    stages, micro_batches = rng.randint(2, 3), rng.randint(2, 3)
    cap = rng.choice([None, stages])

    def pipeline(slow: float) -> Costs:
        return Costs(
            stages=stages,
            chunks=1,
            micro_batches=micro_batches,
            forward_s=tuple((slow * rng.randint(1, 3),) for _ in range(stages)),
            backward_input_s=tuple((slow * rng.randint(1, 3),) for _ in range(stages)),
            backward_weight_s=tuple((slow * rng.randint(1, 3),) for _ in range(stages)),
            max_in_flight=(cap,) * stages,
        )

    dead = frozenset({Cell(0, rng.randrange(stages))}) if rng.random() < 0.5 else frozenset()
    return RoutedCosts(job=job_of([pipeline(rng.choice([1.0, 2.0, 3.0])), pipeline(1.0)]), dead=dead)


def check_plan(plan: RoutedPlan, costs: RoutedCosts) -> None:
    check_routed(plan.schedule, costs)
    replayed = reference_replay(plan.schedule, costs)
    assert replayed is not None
    assert [list(map(list, times)) for times in (plan.simulation.start_s, plan.simulation.end_s)] == list(replayed)
    assert plan.simulation.period_s == period_s(costs, *replayed)
    assert simulate_routed(plan.schedule, costs) == plan.simulation
    assert plan.gap >= 0.0


def random_dead(seed: int) -> RoutedCosts:
    """`equal_cells` with up to 4 dead ones; stages start their next iteration themselves."""
    rng = random.Random(seed)
    stages, replicas = rng.randint(2, 8), rng.randint(2, 6)
    dead = {(rng.randrange(replicas - 1), rng.randrange(stages)) for _ in range(rng.randint(0, 4))}
    return equal_cells(replicas, stages, rng.randint(2, 16), dead, staggered=True)
