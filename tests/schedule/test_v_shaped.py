# SPDX-License-Identifier: Apache-2.0
"""The orders of V placements, against torch's classes of the same names and the figures of their papers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_simulator import random_costs
from support.torch_stages import torch_stages
from torch.distributed.pipelining import schedules as torch_schedules

from adaptra_megatron.schedule.bounds import lower_bound
from adaptra_megatron.schedule.classic import one_f_one_b
from adaptra_megatron.schedule.costs import Costs, uniform_costs
from adaptra_megatron.schedule.csv_format import schedule_from_csv, schedule_to_csv
from adaptra_megatron.schedule.ir import Kind, Schedule, ScheduleError, v_shape
from adaptra_megatron.schedule.planner import plan
from adaptra_megatron.schedule.schedule_checks import check_schedule
from adaptra_megatron.schedule.simulator import Simulation, simulate
from adaptra_megatron.schedule.v_shaped import dualpipe_v, v_half, v_min, v_orders, zb_v

MAKERS = (zb_v, dualpipe_v, v_half, v_min)
COUNTS = [(stages, count) for stages in (1, 2, 3, 4, 7, 8) for count in (1, 2, stages, 2 * stages, 3 * stages + 1)]


def uniform(stages: int, micro_batches: int, chunks: int = 2) -> Costs:
    costs = uniform_costs(
        stages, micro_batches, chunks=chunks, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0
    )
    return costs.placed(v_shape(stages)) if chunks == 2 else costs


def simulated(schedule: Schedule) -> Simulation:
    return simulate(schedule, uniform(schedule.stages, schedule.micro_batches))


@pytest.mark.parametrize(("stages", "micro_batches"), COUNTS)
@pytest.mark.parametrize("make", MAKERS)
def test_every_order_is_valid_here_and_in_torch(
    make: Callable[[int, int], Schedule], stages: int, micro_batches: int
) -> None:
    schedule = make(stages, micro_batches)
    check_schedule(schedule)
    assert schedule.placement == v_shape(stages)
    assert schedule_from_csv(schedule_to_csv(schedule)) == schedule
    assert lower_bound(uniform(stages, micro_batches)).seconds <= simulated(schedule).makespan_s
    kinds = {kind.value: torch_schedules._ComputationType.from_str(kind.value) for kind in Kind}
    theirs = {
        stage: [
            torch_schedules._Action(schedule.placement.virtual_stage(stage, chunk), kinds[kind.value], number)
            for _, kind, chunk, number, _ in order
        ]
        for stage, order in enumerate(schedule.orders)
    }
    torch_schedules._validate_schedule(theirs, stages, 2 * stages, micro_batches)


@pytest.mark.parametrize(
    ("make", "name", "least"), [(zb_v, "ScheduleZBVZeroBubble", 1), (dualpipe_v, "ScheduleDualPipeV", 2)]
)
@pytest.mark.parametrize("stages", [2, 3, 4, 7])
@pytest.mark.parametrize("more", [0, 5])
def test_torch_has_the_same_order(
    make: Callable[[int, int], Schedule], name: str, least: int, stages: int, more: int
) -> None:
    micro_batches = least * stages + more
    schedule = make(stages, micro_batches)
    theirs = getattr(torch_schedules, name)(torch_stages(v_shape(stages)), micro_batches, loss_fn=object())
    for stage, order in enumerate(schedule.orders):
        actions = [
            (part.stage_index, part.computation_type.value, part.microbatch_index)
            for action in theirs.pipeline_order[stage]
            if action is not None
            for part in action.sub_actions or (action,)  # an overlapped pair
        ]
        virtual_stages = [schedule.placement.virtual_stage(stage, chunk) for chunk in (0, 1)]
        assert actions == [(virtual_stages[chunk], kind.value, number) for _, kind, chunk, number, _ in order]


@pytest.mark.parametrize("make", [zb_v, v_half])
def test_torch_loads_what_we_write_and_we_read_what_it_writes(
    make: Callable[[int, int], Schedule], tmp_path: Path
) -> None:
    schedule = make(4, 9)
    ours, theirs = tmp_path / "ours.csv", tmp_path / "theirs.csv"
    ours.write_text(schedule_to_csv(schedule))
    runtime = torch_schedules._PipelineScheduleRuntime(torch_stages(schedule.placement), 9)
    runtime._load_csv(str(ours), format="compute_only")
    runtime._dump_csv(str(theirs), format="compute_only")
    assert schedule_from_csv(theirs.read_text()) == schedule
    made_there = torch_schedules.ScheduleZBVZeroBubble(torch_stages(v_shape(4)), 9, loss_fn=object())
    torch_schedules.PipelineScheduleMulti._dump_csv(made_there, str(theirs))
    assert schedule_from_csv(theirs.read_text(), chunks=2) == zb_v(4, 9)


@pytest.mark.parametrize("stages", [2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("extra", [0, 3])
def test_zb_v_has_no_bubble_at_the_memory_of_1f1b(stages: int, extra: int) -> None:
    """Section 6 of the paper: nothing idles between first and last action, and 1F1B's memory on every stage alike."""
    micro_batches = 2 * stages + extra
    simulation = simulated(zb_v(stages, micro_batches))
    spans = [ends[-1] - starts[0] for starts, ends in zip(simulation.start_s, simulation.end_s, strict=True)]
    assert spans == [6.0 * micro_batches] * stages
    whole = uniform(stages, micro_batches, chunks=1)
    assert set(simulation.peak_in_flight) == {
        2 * max(simulate(one_f_one_b(stages, micro_batches), whole).peak_in_flight)
    }


@pytest.mark.parametrize("stages", [2, 3, 4, 5, 8, 16])
def test_dualpipe_v_idles_and_holds_no_more_than_published(stages: int) -> None:
    """DualPipe's README: bubble (PP / 2 - 1)(F&B + B - 3W), activations PP + 1, where PP counts virtual stages."""
    micro_batches = 3 * stages
    simulation = simulated(dualpipe_v(stages, micro_batches))
    forward_and_backward, backward, weight = 3.0, 2.0, 1.0
    published_s = (stages - 1) * (forward_and_backward + backward - 3 * weight)
    assert simulation.makespan_s - 6.0 * micro_batches == stages - 1 <= published_s
    assert max(simulation.peak_in_flight) == 2 * stages + 1


@pytest.mark.parametrize("stages", [2, 3, 4, 5, 6, 7, 12, 24])
def test_v_half_and_v_min_hold_about_a_half_and_a_third_of_1f1b(stages: int) -> None:
    """In activations of one chunk, of which 1F1B's first stage holds 2 per stage."""
    half, third = (simulated(make(stages, 3 * stages)) for make in (v_half, v_min))
    assert max(half.peak_in_flight) <= stages + 3
    assert max(third.peak_in_flight) <= 2 * (stages + 4) / 3
    for simulation in (half, third):  # more micro-batches lengthen neither fill nor drain
        longer = simulated((v_half, v_min)[simulation is third](stages, 4 * stages))
        assert longer.makespan_s - simulation.makespan_s == 6.0 * stages


@settings(max_examples=30, deadline=None)
@given(
    costs=random_costs(max_stages=6, max_micro_batches=12, least_chunks=2, max_chunks=2, added=True, whole=True),
    split=st.booleans(),
)
def test_a_plan_is_valid_and_never_slower_than_an_order_of_the_v(costs: Costs, split: bool) -> None:
    costs = costs.placed(v_shape(costs.stages))
    planned = plan(costs, split=split, deadline_s=0.0)
    check_schedule(
        planned.schedule,
        max_in_flight=costs.max_in_flight,
        released_at_backward_input=costs.released_at_backward_input,
    )
    assert planned.lower_bound.seconds <= planned.makespan_s
    assert planned.makespan_s == pytest.approx(simulate(planned.schedule, costs).makespan_s, rel=1e-12)
    assert split or not planned.schedule.splits_backward
    for schedule in v_orders(costs.micro_batches, costs.placement) if split else ():
        simulation = simulate(schedule, costs)
        if not costs.stages_over_cap(simulation.peak_in_flight):
            assert planned.makespan_s <= simulation.makespan_s * (1 + 1e-9)


def test_a_plan_reaches_the_bound_of_a_v() -> None:
    """With equal times ZB-V takes the bound; without a fault nothing is to be gained."""
    costs = uniform(8, 24)
    assert plan(costs).gap == pytest.approx(0.0, abs=1e-9)
    assert v_orders(24, uniform(8, 24).placement)[0] == zb_v(8, 24)
    assert v_orders(24, uniform(8, 24, chunks=1).placement) == []


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("counts", [(0, 4), (4, 0), (4, True), (2.0, 4)])
def test_counts_are_whole_numbers(make: Callable[[int, int], Schedule], counts: tuple[int, int]) -> None:
    with pytest.raises(ScheduleError, match="must be a whole number of at least 1"):
        make(*counts)
