# SPDX-License-Identifier: Apache-2.0
"""Costs that went into synthetic records come out of the estimate, by way of the detector."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from adaptra_megatron.common.typed_messages import encoded
from adaptra_megatron.control.deciders.decider import (
    BUFFERED_NBYTES,
    InUse,
    estimate_costs,
    iteration_sample,
    link_figures,
    paths_in_use,
)
from adaptra_megatron.control.deciders.plan_state import Layout
from adaptra_megatron.control.detector.detector import Detector
from adaptra_megatron.control.detector.observations import DetectorSettings, Estimates, LinkId, StageId
from adaptra_megatron.control.measurements import (
    BrokenPath,
    StageMeasurement,
    iteration_s,
    mean_idle_share,
    measurement_of,
    stage_measurement,
)
from adaptra_megatron.control.stage_memory import StageMemory
from adaptra_megatron.engine.execution.inbox import Addresses
from adaptra_megatron.schedule.classic import one_f_one_b, split_backward, stock_order
from adaptra_megatron.schedule.costs import Costs, LinkCost, uniform_costs
from adaptra_megatron.schedule.ir import Kind
from adaptra_megatron.schedule.simulator import simulate
from adaptra_megatron.schedule.transfers.launch_order import needed, produced
from adaptra_megatron.telemetry.action_records import ActionRecord
from adaptra_megatron.transport.link_paths import Path, ProbeTimes
from adaptra_megatron.transport.message_keys import Direction, MessageKey, MessageTimes

STAGES, MICRO_BATCHES = 4, 8
LAYOUT = Layout(stages=STAGES, chunks=1, group_size=None)
NBYTES = 1 << 20
CLOCK_OFFSETS_S = (0.0, 1000.0, -50.0, 3.0)
"""What each stage's own clock shows later than the common one."""


def costs_of(chunks: int = 1, **links: float) -> Costs:
    """Each stage and kind has seconds of its own."""

    def table(base_s: float) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(base_s + 0.1 * stage + 0.01 * chunk for chunk in range(chunks)) for stage in range(STAGES))

    return Costs(
        stages=STAGES,
        chunks=chunks,
        micro_batches=MICRO_BATCHES,
        forward_s=table(1.0),
        backward_input_s=table(2.0),
        backward_weight_s=table(3.0),
        links={(int(name[1]), int(name[3])): LinkCost(seconds) for name, seconds in links.items()},
    )


def measured(
    costs: Costs,
    *,
    pipeline: int = 0,
    split: bool = True,
    posted_ahead_s: float = 100.0,
    path: Path = Path.DEVICE,
    iteration: int = 5,
) -> list[StageMeasurement]:
    """What ranks would measure of a pipeline with `costs`: each on a clock of its own, put right by its offset."""
    schedule = stock_order(costs.stages, costs.micro_batches, costs.chunks)
    schedule = split_backward(schedule, 1) if split else schedule
    simulation = simulate(schedule, costs)
    measurements = []
    sent_at_s = {}
    for stage, order in enumerate(schedule.orders):
        for action, end_s in zip(order, simulation.end_s[stage], strict=True):
            message = produced(action, costs.placement)
            if message is not None:
                sent_at_s[message] = end_s
    for stage, order in enumerate(schedule.orders):
        late_s = CLOCK_OFFSETS_S[stage]
        records, sent, received = [], [], []
        for action, start_s, end_s in zip(order, simulation.start_s[stage], simulation.end_s[stage], strict=True):
            moments = (start_s + late_s - 0.5, start_s + late_s, end_s + late_s)
            records.append(
                ActionRecord(iteration, stage, action.kind.value, action.chunk, action.micro_batch, *moments)
            )
            leaving, coming = (f(action, costs.placement) for f in (produced, needed))
            if leaving is not None:
                left_s = end_s + late_s
                sent.append(
                    MessageTimes(Addresses((), iteration).key(leaving), leaving.target, left_s, left_s, NBYTES, path)
                )
            if coming is not None:
                sent_s = sent_at_s[coming] + late_s
                arrived_s = sent_s + costs.link(coming.source, stage).latency_s
                posted_s = sent_s - posted_ahead_s
                received.append(
                    MessageTimes(Addresses((), iteration).key(coming), coming.source, posted_s, arrived_s, NBYTES, path)
                )
        measurements.append(stage_measurement(pipeline, stage, costs.micro_batches, records, (sent, received), -late_s))
    return measurements


class Observed:
    """What is known after some iterations."""

    def __init__(self) -> None:
        self.detector = Detector(DetectorSettings(ignored_iterations=0))
        self.in_use: InUse = {}

    def see(self, *iterations: list[StageMeasurement]) -> Observed:
        for measurements in iterations:
            sample = iteration_sample(measurements)
            self.detector.observe(sample)
            self.in_use = paths_in_use(self.in_use, sample)
        return self

    @property
    def estimates(self) -> Estimates:
        return self.detector.estimates()

    def costs(self, **changes: Any) -> Costs | None:
        arguments: dict[str, Any] = {
            "layout": LAYOUT,
            "micro_batches": MICRO_BATCHES,
            "can_split": True,
            "caps": (4.0,) * STAGES,
            "released_at_backward_input": (0.0,) * STAGES,
        }
        return estimate_costs(self.estimates, self.in_use, **(arguments | changes))


def estimate(measurements: list[StageMeasurement], **changes: Any) -> Costs | None:
    return Observed().see(measurements).costs(**changes)


def assert_close(estimated: Costs | None, expected: Costs) -> None:
    assert estimated is not None
    for name in ("forward_s", "backward_input_s", "backward_weight_s"):
        for row, expected_row in zip(getattr(estimated, name), getattr(expected, name), strict=True):
            assert row == pytest.approx(expected_row, rel=1e-4)
    for stage in range(STAGES):
        for link in ((stage, (stage + 1) % STAGES), ((stage + 1) % STAGES, stage)):
            assert estimated.link(*link).latency_s == pytest.approx(expected.link(*link).latency_s, abs=1e-4)


@pytest.mark.parametrize("chunks", [1, 2])
def test_compute_and_link_costs_come_out_as_they_went_in(chunks: int) -> None:
    costs = costs_of(chunks, l0_1=0.25, l1_0=0.5, l2_3=4.0, l3_0=0.125 if chunks > 1 else 0.0)
    estimated = estimate(measured(costs), layout=dataclasses.replace(LAYOUT, chunks=chunks))
    assert_close(estimated, costs)
    assert estimated is not None
    assert estimated.max_in_flight == (4.0,) * STAGES
    assert estimated.micro_batches == MICRO_BATCHES


def test_a_receive_posted_after_the_send_says_nothing_of_the_device_path() -> None:
    costs = costs_of(l0_1=0.25)
    late = measured(costs, posted_ahead_s=-0.001)
    assert estimate(late) is not None
    assert link_figures(Observed().see(late).estimates, Observed().see(late).in_use) == {}
    known = Observed().see(measured(costs_of(l0_1=0.75), iteration=4), late).costs()
    assert known is not None
    assert known.link(0, 1).latency_s == pytest.approx(0.75, abs=1e-4), "what was known of the link stays"


@pytest.mark.parametrize(("nbytes", "reported"), [(BUFFERED_NBYTES, None), (BUFFERED_NBYTES + 1, 0.15)])
def test_where_a_message_waits_for_its_receive_it_leaves_with_it_unless_buffers_take_all(
    nbytes: int, reported: float | None
) -> None:
    late = measured(costs_of(l0_1=0.25, l1_0=0.25), posted_ahead_s=-0.1)
    for measurement in late:
        measurement.sent["nbytes"], measurement.received["nbytes"] = nbytes, nbytes
    detector = Detector(DetectorSettings(ignored_iterations=0))
    detector.observe(iteration_sample(late, rendezvous=True))
    estimate = detector.estimates().links.get(LinkId(0, 0, 1, "device"))
    assert (None if estimate is None else estimate.transfer_s) == (None if reported is None else _about(reported))


def test_an_arrival_by_the_host_path_is_seen_by_any_waiter() -> None:
    costs = costs_of(l0_1=0.25)
    assert_close(estimate(measured(costs, posted_ahead_s=-0.001, path=Path.HOST)), costs)


def test_costs_are_those_of_the_path_in_use() -> None:
    seen = Observed().see(measured(costs_of(l0_1=0.25), iteration=1))
    slow_by_host = costs_of(l0_1=2.0, l1_2=0.5)
    assert_close(seen.see(measured(slow_by_host, iteration=2, path=Path.HOST)).costs(), slow_by_host)
    device_again = costs_of(l0_1=0.25)
    assert_close(seen.see(measured(device_again, iteration=3)).costs(), device_again)


def test_only_messages_that_were_measured_at_both_ends_count() -> None:
    measurements = measured(costs_of(l0_1=0.25))
    links = iteration_sample(measurements[1:]).links
    assert set(links) == {LinkId(0, 1, 2, "device"), LinkId(0, 2, 1, "device"), *_ends(2, 3)}
    assert all(link.messages.arrived.all() for link in links.values())


def _ends(source: int, target: int) -> set[LinkId]:
    return {LinkId(0, source, target, "device"), LinkId(0, target, source, "device")}


def test_what_did_not_arrive_by_the_path_it_was_sent_on_was_lost_there() -> None:
    measurements = measured(costs_of(l0_1=0.25))
    receives = measurements[1].receives
    peers, micro_batches = np.frombuffer(receives.peers, "<i2"), np.frombuffer(receives.micro_batches, "<u4")
    moved = receives._replace(by_host=((peers == 0) & (micro_batches >= 5)).tobytes())
    measurements[1] = dataclasses.replace(measurements[1], receives=moved)
    links = iteration_sample(measurements).links
    assert sorted(links[LinkId(0, 0, 1, "device")].messages.arrived) == [False] * 3 + [True] * 5
    assert LinkId(0, 0, 1, "host") not in links, "nothing was sent there"


def test_a_sample_has_sizes_moments_and_durations_on_the_common_clock() -> None:
    costs = costs_of(l0_1=0.25)
    sample = iteration_sample(measured(costs, pipeline=3, posted_ahead_s=1.0))
    assert sample.iteration == 5
    messages = sample.links[LinkId(3, 0, 1, "device")].messages
    first = np.argmin(messages.sent_s)
    assert [float(column[first]) for column in messages] == [NBYTES, *map(_about, (1.0, 1.25, 0.0))]
    assert sample.stages[StageId(3, 2)].durations_s["F", 0] == pytest.approx([1.2] * MICRO_BATCHES, rel=1e-5)


def _about(moment_s: float) -> Any:
    return pytest.approx(moment_s, abs=1e-4)


def test_a_message_leaves_when_it_has_been_computed() -> None:
    key = MessageKey(0, Direction.ACTIVATION, 0, 3)
    records = [ActionRecord(0, 1, "F", 0, 3, 10.0, 10.0, 14.0)]
    posted = MessageTimes(key, 2, 10.5, 10.5, NBYTES, Path.HOST)
    for ready_s, leaves_s in ((14.0, 14.0), (10.2, 10.5)):
        measurement = stage_measurement(0, 1, 4, records, ([posted], []), 100.0, {key: ready_s})
        assert measurement.span_s[0] + measurement.sent["done_s"][0] == pytest.approx(100.0 + leaves_s)


def test_several_pipelines_give_the_slowest_place_by_place() -> None:
    slow_link = measured(costs_of(l0_1=0.25, l1_2=2.0), pipeline=0)
    slow_compute = measured(
        dataclasses.replace(costs_of(l0_1=1.0), forward_s=((1.0,), (7.0,), (1.2,), (1.3,))), pipeline=100
    )
    expected = dataclasses.replace(costs_of(l0_1=1.0, l1_2=2.0), forward_s=((1.0,), (7.0,), (1.2,), (1.3,)))
    assert_close(estimate(slow_link + slow_compute), expected)
    assert_close(estimate(slow_compute + slow_link), expected)


def test_nothing_is_estimated_until_every_action_was_measured() -> None:
    whole = measured(costs_of(), split=False)
    assert estimate(whole) is None, "weight gradients were not measured on their own"
    assert estimate(measured(costs_of())[:-1]) is None, "a stage is missing"
    assert Observed().costs() is None


def test_whole_backwards_keep_the_split_costs_known_before() -> None:
    before = costs_of()
    faster = dataclasses.replace(before, forward_s=((0.5,),) * STAGES)
    seen = Observed().see(*(measured(before, iteration=number) for number in range(4)))
    seen.see(*(measured(faster, split=False, iteration=number) for number in range(4, 8)))
    assert_close(seen.costs(), faster)


def test_whole_backwards_count_with_split_ones_once_both_were_measured() -> None:
    seen = Observed().see(*(measured(costs_of(), split=number < 4, iteration=number) for number in range(8)))
    costs = seen.costs()
    assert costs is not None
    assert costs.backward_s is not None
    assert np.allclose(costs.backward_s, costs_of().whole_backward_s)


def test_links_over_nccl_are_rendezvous_links_and_may_share_the_queue() -> None:
    layout = dataclasses.replace(LAYOUT, rendezvous=True, shared_queue=True, serial_queue=True)
    costs = estimate(measured(costs_of()), layout=layout)
    assert costs is not None
    assert costs.shared_queue
    assert costs.serial_queue
    assert costs.links
    assert all(link.rendezvous for link in costs.links.values())


def test_where_backwards_cannot_be_split_the_whole_counts_as_input_gradient() -> None:
    costs = costs_of()
    expected = dataclasses.replace(costs, backward_input_s=costs.whole_backward_s, backward_weight_s=((0.0,),) * STAGES)
    assert_close(estimate(measured(costs, split=False), can_split=False), expected)


def test_where_all_ran_whole_first_the_parts_are_guessed() -> None:
    costs, layout = costs_of(), dataclasses.replace(LAYOUT, whole_first=True)
    found = estimate(measured(costs, split=False), layout=layout)
    assert found is not None
    assert found.backward_s is not None
    assert np.allclose(found.backward_s, costs.whole_backward_s)
    assert np.allclose(found.whole_backward_s, costs.whole_backward_s)
    assert np.all(np.array(found.backward_input_s) > np.array(found.backward_weight_s)), "it recomputes the forward"
    assert_close(estimate(measured(costs), layout=layout), estimate(measured(costs)))


def test_the_share_of_idle_time_is_the_mean_over_ranks() -> None:
    records = [
        [ActionRecord(0, 0, "F", 0, 0, 0.0, 10.0, 14.0), ActionRecord(0, 0, "B", 0, 0, 14.0, 16.0, 20.0)],
        [ActionRecord(0, 1, "F", 0, 0, 0.0, 14.0, 16.0)],
    ]
    measurements = [stage_measurement(0, stage, 1, rows, ([], []), 5.0) for stage, rows in enumerate(records)]
    assert mean_idle_share(measurements) == pytest.approx(1.0 - (0.8 + 0.2) / 2)
    # Another pipeline, with a clock of its own, does not make them idle for longer.
    elsewhere = [stage_measurement(7, stage, 1, rows, ([], []), -1e6) for stage, rows in enumerate(records)]
    assert mean_idle_share([*measurements, *elsewhere]) == pytest.approx(1.0 - (0.8 + 0.2) / 2)
    assert iteration_s([*measurements, *elsewhere]) == pytest.approx(10.0)


def test_combined_actions_are_timed_apart_from_those_that_ran_alone() -> None:
    ran = [("F", 0, 0, 4.0), ("F", 1, 0, 5.0), ("F", 0, 1, 7.0), ("B", 1, 0, 0.0), ("F", 1, 1, 9.0), ("I", 0, 0, 0.0)]
    ran += [("B", 1, 1, 2.0), ("W", 0, 0, 3.0)]
    records, now_s = [], 100.0
    for place, (kind, chunk, micro_batch, seconds) in enumerate(ran):
        half = 2 <= place < 6
        records.append(ActionRecord(3, 0, kind, chunk, micro_batch, now_s, now_s, now_s + seconds, half))
        now_s += seconds
    measurement = measurement_of(encoded(stage_measurement(0, 0, 2, records, ([], []), 0.0)))
    alone = {key: values.tolist() for key, values in measurement.durations_s.items()}
    assert alone == {("F", 0): [4.0], ("F", 1): [5.0], ("B", 1): [2.0], ("W", 0): [3.0]}
    assert {key: values.tolist() for key, values in measurement.combined_s.items()} == {
        (0, "B", 1): [7.0],
        (1, "I", 0): [9.0],
    }
    assert measurement.computed_s == 30.0
    assert mean_idle_share([measurement]) == pytest.approx(0.0)


def test_an_iteration_of_256_micro_batches_is_some_kilobytes() -> None:
    costs = uniform_costs(STAGES, 256, forward_s=0.01, backward_input_s=0.01, backward_weight_s=0.01)
    nbytes = [len(encoded(measurement)) for measurement in measured(costs)]
    assert max(nbytes) < 48_000, nbytes


def test_a_measurement_arrives_as_it_was_sent() -> None:
    probes, broken = (ProbeTimes(1, Path.HOST, 9, 1.0, math.inf),), (BrokenPath(1, Path.DEVICE, "gone"),)
    costs = uniform_costs(STAGES, 4, forward_s=0.01, backward_input_s=0.01, backward_weight_s=0.01)
    for measurement in measured(costs):
        sent = dataclasses.replace(measurement, memory=StageMemory(1.5, 2.0, 3.0, None), probes=probes, broken=broken)
        come = measurement_of(encoded(sent))
        for field in dataclasses.fields(StageMeasurement):
            assert getattr(come, field.name) == getattr(sent, field.name), field.name
        for name in ("span_s", "durations_s", "sizes", "sent", "received"):
            np.testing.assert_equal(getattr(come, name), getattr(sent, name), name)
        assert len(come.sent) == len(sent.sends.by_host) > 0
        assert come.durations_s["F", 0].dtype == np.float32


def test_synthetic_records_are_those_of_the_simulator() -> None:
    """The helper itself: a known pipeline of equal actions."""
    costs = uniform_costs(STAGES, MICRO_BATCHES, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
    for measurement, order in zip(measured(costs), one_f_one_b(STAGES, MICRO_BATCHES).orders, strict=True):
        forwards = sum(action.kind is Kind.FORWARD for action in order)
        ends = 1 if measurement.stage in (0, STAGES - 1) else 2
        assert len(measurement.sent) == len(measurement.received) == ends * forwards
        assert measurement.durations_s["I", 0].tolist() == pytest.approx([1.0] * MICRO_BATCHES)


def test_sizes_are_those_of_each_actions_messages() -> None:
    """Routed micro-batches have messages outside of their pipeline: addresses tell them all."""
    addresses = Addresses(range(4), 3, micro_batches=2, pipeline=(0, 2))
    sent = [
        MessageTimes(MessageKey(3, Direction.ACTIVATION, 0, micro_batch), peer, 0.0, 1.0, nbytes, Path.HOST)
        for micro_batch, peer, nbytes in ((0, 2, 300), (1, 2, 100), (3, 1, 200))
    ]
    nbytes = addresses.nbytes(sent)
    assert nbytes == {0: 300, 1: 100, 3: 200}
    of_replica = Addresses((1, 3), 3, replica=1, micro_batches=2)
    assert of_replica.nbytes(sent[2:]) == {1: 200}

    def sizes(micro_batches: tuple[int, ...], nbytes: dict[int, int]) -> dict[tuple[str, int], list[float]]:
        records = [ActionRecord(3, 0, kind, 0, m, 0.0, 0.0, 1.0) for m in micro_batches for kind in "FB"]
        measurement = stage_measurement(0, 0, 2, records, ([], []), 0.0, nbytes=nbytes)
        travelled = measurement_of(encoded(measurement))
        stage = iteration_sample([travelled]).stages[StageId(0, 0)]
        return {key: list(values) for key, values in stage.sizes.items()}

    assert sizes((3, 0, 1), nbytes) == {("F", 0): [200, 300, 100], ("B", 0): [200, 300, 100]}
    assert sizes((0, 1), {0: 100, 1: 100}) == {("F", 0): [100], ("B", 0): [100]}, "all alike: one value"
    assert sizes((0, 1, 2), nbytes) == {}, "one is not known"
