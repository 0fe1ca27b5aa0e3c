# SPDX-License-Identifier: Apache-2.0
"""Savings of combined actions are measured as they were simulated, and stay known while no action is combined."""

from __future__ import annotations

import dataclasses

import pytest

from adaptra_megatron.control.deciders.combined_savings import REMEMBERED, CombinedSavings
from adaptra_megatron.control.deciders.decider import estimate_costs, iteration_sample
from adaptra_megatron.control.deciders.plan_state import Layout
from adaptra_megatron.control.detector.detector import Detector
from adaptra_megatron.control.detector.observations import DetectorSettings
from adaptra_megatron.control.measurements import StageMeasurement, stage_measurement
from adaptra_megatron.schedule.classic import interleaved_combined, interleaved_split, split_every_other
from adaptra_megatron.schedule.costs import Costs, PerPair, uniform_costs
from adaptra_megatron.schedule.ir import Kind, Schedule
from adaptra_megatron.schedule.simulator import simulate
from adaptra_megatron.telemetry.action_records import ActionRecord

STAGES, CHUNKS, MICRO_BATCHES = 2, 2, 8
LAYOUT = Layout(stages=STAGES, chunks=CHUNKS, group_size=None, combined=True)
STOCK = interleaved_combined(STAGES, MICRO_BATCHES, CHUNKS)
CALIBRATION = split_every_other(STOCK)
SAVING: PerPair = (((0.1, 0.15), (0.2, 0.25)), ((0.3, 0.35), (0.28, -0.05)))
COSTS = dataclasses.replace(
    uniform_costs(STAGES, MICRO_BATCHES, chunks=CHUNKS, forward_s=2.0, backward_input_s=2.0, backward_weight_s=1.0),
    forward_s=((2.0, 3.0), (2.5, 3.5)),
    combined_saving=SAVING,
)


def measured(
    schedule: Schedule, costs: Costs, iteration: int, pipeline: int = 0, disturbance: str | None = None
) -> list[StageMeasurement]:
    simulation = simulate(schedule, costs)
    found = []
    for stage, order in enumerate(schedule.orders):
        records, behind = [], False
        for action, start_s, end_s in zip(order, simulation.start_s[stage], simulation.end_s[stage], strict=True):
            # The backward of a pair is recorded at its end, and takes no time.
            moments = (end_s,) * 3 if behind else (start_s, start_s, end_s)
            place = iteration, stage, action.kind.value, action.chunk, action.micro_batch
            records.append(ActionRecord(*place, *moments, action.combined or behind))
            behind = action.combined
        found.append(stage_measurement(pipeline, stage, MICRO_BATCHES, records, ([], []), 0.0, disturbance=disturbance))
    return found


class SavingsSeen:
    def __init__(self, planned_for: PerPair = ()) -> None:
        self.detector = Detector(DetectorSettings(ignored_iterations=0))
        self.savings = CombinedSavings(STAGES, CHUNKS, planned_for)
        self.iteration = 0

    def see(self, schedule: Schedule, costs: Costs = COSTS, times: int = 1, disturbance: str | None = None) -> None:
        for _ in range(times):
            self.iteration += 1
            measurements = measured(schedule, costs, self.iteration, disturbance=disturbance)
            self.detector.observe(iteration_sample(measurements))
            self.savings.observe(measurements, self.detector.estimates())

    def costs(self) -> Costs:
        found = estimate_costs(
            self.detector.estimates(),
            {},
            LAYOUT,
            micro_batches=MICRO_BATCHES,
            can_split=True,
            caps=(None,) * STAGES,
            released_at_backward_input=(0.0,) * STAGES,
            combined_saving=self.savings.table(),
        )
        assert found is not None, "every action has been measured"
        return found


def ran(schedule: Schedule) -> set[tuple[int, int, int]]:
    """Stage and chunks of each pair that a schedule combines."""
    return {
        (order[place].stage, order[place].chunk, order[place + 1].chunk)
        for order in schedule.orders
        for place, action in enumerate(order)
        if action.combined
    }


def assert_close(found: PerPair, expected: PerPair) -> None:
    for stage, ahead, behind in ran(STOCK):
        assert found[stage][ahead][behind] == pytest.approx(expected[stage][ahead][behind], abs=1e-5)


def test_costs_of_stocks_order_come_out_as_they_went_in() -> None:
    seen = SavingsSeen()
    seen.see(CALIBRATION)
    found = seen.costs()
    assert_close(found.combined_saving, SAVING)
    for name in ("forward_s", "backward_input_s", "backward_weight_s", "whole_backward_s"):
        for row, expected in zip(getattr(found, name), getattr(COSTS, name), strict=True):
            assert row == pytest.approx(expected, rel=1e-5), name
    assert simulate(STOCK, found).makespan_s == pytest.approx(simulate(STOCK, COSTS).makespan_s, rel=1e-5)


def test_calibration_takes_no_longer_than_stock_and_splits_no_combined_backward() -> None:
    assert simulate(CALIBRATION, COSTS).makespan_s == pytest.approx(simulate(STOCK, COSTS).makespan_s)
    assert ran(CALIBRATION) == ran(STOCK)
    for order in CALIBRATION.orders:
        pairs = {order[place + 1] for place, action in enumerate(order) if action.combined}
        assert {each.kind for each in pairs} == {Kind.BACKWARD}
        assert {each.chunk for each in order if each.kind is Kind.BACKWARD_WEIGHT} == set(range(CHUNKS))


def test_a_saving_with_a_split_backward_is_that_with_a_whole_one() -> None:
    """A combined action takes as much less than its halves, whatever is left to W."""
    halves = {order[place + 1] for order in STOCK.orders for place, action in enumerate(order) if action.combined}
    split = dataclasses.replace(
        STOCK,
        orders=tuple(
            tuple(
                part
                for action in order
                for part in (
                    [action._replace(kind=kind) for kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)]
                    if action in halves
                    else [action]
                )
            )
            for order in STOCK.orders
        ),
    )
    seen = SavingsSeen()
    seen.see(CALIBRATION)
    seen.see(split, times=REMEMBERED)
    assert_close(seen.savings.table(), SAVING)


def test_what_is_known_stays_while_nothing_is_combined_and_stages_slow_down() -> None:
    seen = SavingsSeen()
    seen.see(CALIBRATION, times=3)
    slow = COSTS.with_tables({name: tuple(((2 * a, 2 * b) for a, b in t)) for name, t in COSTS.tables().items()})
    seen.see(interleaved_split(STAGES, MICRO_BATCHES, CHUNKS), slow, times=12)
    found = seen.costs()
    assert found.forward_s[0][0] == pytest.approx(2 * COSTS.forward_s[0][0], rel=1e-5), "they are known to be slow"
    assert_close(found.combined_saving, SAVING)


def test_one_odd_iteration_and_disturbed_ones_change_nothing() -> None:
    seen = SavingsSeen()
    seen.see(CALIBRATION, times=3)
    odd = dataclasses.replace(COSTS, combined_saving=(((-0.9,) * CHUNKS,) * CHUNKS,) * STAGES)
    seen.see(CALIBRATION, odd)
    seen.see(CALIBRATION, odd, times=REMEMBERED, disturbance="a checkpoint")
    assert_close(seen.savings.table(), SAVING)
    seen.see(CALIBRATION, odd, times=REMEMBERED)
    assert_close(seen.savings.table(), odd.combined_saving)


def test_a_pair_that_never_ran_saves_what_others_do() -> None:
    assert CombinedSavings(STAGES, CHUNKS).table() == (((0.0,) * CHUNKS,) * CHUNKS,) * STAGES
    seen = SavingsSeen()
    one = {(0, 0, 1)}
    assert one < ran(STOCK)
    alone = dataclasses.replace(
        STOCK,
        orders=tuple(
            tuple(
                action._replace(combined=action.combined and (stage, action.chunk, order[place + 1].chunk) in one)
                for place, action in enumerate(order)
            )
            for stage, order in enumerate(CALIBRATION.orders)
        ),
    )
    seen.see(alone)
    assert [value for rows in seen.savings.table() for row in rows for value in row] == pytest.approx([0.15] * 8)


def test_a_new_leader_knows_what_the_plan_was_made_for() -> None:
    seen = SavingsSeen(SAVING)
    assert seen.savings.table() == SAVING
    other = dataclasses.replace(COSTS, combined_saving=(((0.5,) * CHUNKS,) * CHUNKS,) * STAGES)
    seen.see(CALIBRATION, other)
    table = seen.savings.table()
    for stage, ahead, behind in {(s, f, b) for s in range(STAGES) for f in range(CHUNKS) for b in range(CHUNKS)}:
        capped = min(
            0.5,
            min(COSTS.forward_s[stage][ahead], COSTS.whole_backward_s[stage][behind])
            / (COSTS.forward_s[stage][ahead] + COSTS.whole_backward_s[stage][behind]),
        )
        known = capped if (stage, ahead, behind) in ran(STOCK) else SAVING[stage][ahead][behind]
        assert table[stage][ahead][behind] == pytest.approx(known, abs=1e-5)


def test_of_several_pipelines_the_one_that_saves_least_counts() -> None:
    better = dataclasses.replace(COSTS, combined_saving=(((0.45,) * CHUNKS,) * CHUNKS,) * STAGES)
    savings, detector = CombinedSavings(STAGES, CHUNKS), Detector(DetectorSettings(ignored_iterations=0))
    both = [*measured(CALIBRATION, COSTS, 1), *measured(CALIBRATION, better, 1, pipeline=100)]
    detector.observe(iteration_sample(both))
    savings.observe(both, detector.estimates())
    assert_close(savings.table(), SAVING)
