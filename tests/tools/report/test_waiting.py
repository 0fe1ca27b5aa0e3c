# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.played_schedules import played
from support.schedules import named_schedules, random_schedules

from adaptra_megatron.schedule.classic import one_f_one_b
from adaptra_megatron.schedule.costs import LinkCost, uniform_costs, uniform_costs_for
from adaptra_megatron.schedule.ir import Schedule
from adaptra_megatron.telemetry.action_records import ActionRecord, ArrivalRecord
from adaptra_megatron.tools.report.waiting import Cause, CauseKind, IdlePeriod, IterationAnalysis, WaitingPhase

NO_WORK = Cause(CauseKind.NO_WORK)


def idle_seconds(periods: Iterable[IdlePeriod]) -> dict[tuple[WaitingPhase, Cause], float]:
    """Seconds by phase and cause, the largest first."""
    totals: dict[tuple[WaitingPhase, Cause], float] = defaultdict(float)
    for period in periods:
        totals[period.phase, period.cause] += period.seconds
    return dict(sorted(totals.items(), key=lambda entry: -entry[1]))


def stage(number: int) -> Cause:
    return Cause(CauseKind.STAGE, number)


def link(source: int, target: int) -> Cause:
    return Cause(CauseKind.LINK, source, target)


def test_a_pipeline_of_two_by_hand() -> None:
    """F takes 2 s, B 3 s, the way there 5 s and back 1 s: every idle second has the cause one would name."""
    records = [
        ActionRecord(0, 0, "F", 0, 0, 0.0, 0.0, 2.0),
        ActionRecord(0, 0, "B", 0, 0, 2.0, 13.0, 16.0),
        ActionRecord(0, 1, "F", 0, 0, 0.0, 7.0, 9.0),
        ActionRecord(0, 1, "B", 0, 0, 9.0, 9.0, 12.0),
    ]
    analysis = IterationAnalysis(records)
    assert analysis.seconds == 16.0
    assert idle_seconds(period for period in analysis.idle_periods() if period.stage == 0) == {
        # While its gradient is missing: the activation is on the way, then stage 1 computes, then it comes back.
        (WaitingPhase.MIDDLE, link(0, 1)): 5.0,
        (WaitingPhase.MIDDLE, stage(1)): 5.0,
        (WaitingPhase.MIDDLE, link(1, 0)): 1.0,
    }
    assert idle_seconds(period for period in analysis.idle_periods() if period.stage == 1) == {
        (WaitingPhase.START, link(0, 1)): 5.0,
        (WaitingPhase.END, NO_WORK): 4.0,
        (WaitingPhase.START, stage(0)): 2.0,
    }
    assert [(flight.source, flight.target, flight.kind, flight.seconds) for flight in analysis.flights()] == [
        (0, 1, "F", 5.0),
        (1, 0, "B", 1.0),
    ]


def test_an_arrival_that_is_known_parts_the_link_from_the_receivers_own_delay() -> None:
    records = [ActionRecord(0, 0, "F", 0, 0, 0.0, 0.0, 2.0), ActionRecord(0, 1, "F", 0, 0, 0.0, 7.0, 9.0)]
    analysis = IterationAnalysis(records, [ArrivalRecord(0, 0, 1, "F", 0, 0, 6.0)])
    assert idle_seconds(period for period in analysis.idle_periods() if period.stage == 1) == {
        (WaitingPhase.START, link(0, 1)): 4.0,
        (WaitingPhase.START, stage(0)): 2.0,
        (WaitingPhase.START, Cause(CauseKind.OVERHEAD, 1)): 1.0,
    }
    (flight,) = analysis.flights()
    assert (flight.sent_s, flight.arrived_s) == (2.0, 6.0)


def test_what_another_replica_is_to_send_is_no_delay_of_this_pipeline() -> None:
    """Micro-batch 7 is routed: its first stage ran elsewhere."""
    records = [
        ActionRecord(0, 0, "F", 0, 0, 0.0, 0.0, 2.0),
        ActionRecord(0, 1, "F", 0, 0, 0.0, 3.0, 5.0),
        ActionRecord(0, 1, "F", 0, 7, 5.0, 9.0, 11.0),
        ActionRecord(0, 1, "B", 0, 0, 12.0, 12.0, 14.0),
    ]
    analysis = IterationAnalysis(records)
    assert idle_seconds(period for period in analysis.idle_periods() if period.stage == 1) == {
        (WaitingPhase.MIDDLE, Cause(CauseKind.REPLICA, 1)): 4.0,
        (WaitingPhase.START, stage(0)): 2.0,
        (WaitingPhase.START, link(0, 1)): 1.0,
        (WaitingPhase.MIDDLE, Cause(CauseKind.OVERHEAD, 1)): 1.0,
    }
    assert [flight.micro_batch for flight in analysis.flights()] == [0]


def test_a_message_that_was_not_waited_for_counts_only_if_its_arrival_is_known() -> None:
    records = [ActionRecord(0, 0, "F", 0, 0, 0.0, 0.0, 2.0), ActionRecord(0, 1, "F", 0, 0, 5.0, 5.0, 7.0)]
    assert IterationAnalysis(records).flights() == []
    (flight,) = IterationAnalysis(records, [ArrivalRecord(0, 0, 1, "F", 0, 0, 3.0)]).flights()
    assert flight.seconds == 1.0


def test_a_slow_link_shows_as_half_of_what_it_costs_one_f_one_b() -> None:
    def idle(latency_s: float) -> dict[Cause, float]:
        links = {(1, 2): LinkCost(latency_s=latency_s), (2, 1): LinkCost(latency_s=latency_s)}
        costs = uniform_costs(4, 12, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0, links=links)
        analysis = IterationAnalysis(played(one_f_one_b(4, 12), costs))
        totals: dict[Cause, float] = defaultdict(float)
        for (_phase, cause), seconds in idle_seconds(analysis.idle_periods()).items():
            totals[cause] += seconds
        return totals

    healthy, slow = idle(0.0), idle(2.0)
    assert not any(cause.kind is CauseKind.LINK for cause in healthy)
    slowed = {cause for cause in slow if cause.kind is CauseKind.LINK}
    assert slowed == {link(1, 2), link(2, 1)}
    # The other half is the two ends computing for each other in turn, with nothing to do in between.
    more_s = sum(slow.values()) - sum(healthy.values())
    assert sum(slow[cause] for cause in slowed) > 0.5 * more_s


def _played(schedule: Schedule, latencies_s: dict[tuple[int, int], float], backward_s: float) -> list[ActionRecord]:
    links = {
        (source, target): LinkCost(latency_s=seconds)
        for (source, target), seconds in latencies_s.items()
        if max(source, target) < schedule.stages and source != target
    }
    costs = uniform_costs_for(schedule, backward_input_s=backward_s, backward_weight_s=0.5, links=links)
    return played(schedule, costs, start_s=100.0)


@settings(max_examples=60)
@given(
    schedule=st.one_of(named_schedules(), random_schedules()),
    latencies_s=st.dictionaries(
        st.sampled_from([(0, 1), (1, 0), (1, 2), (2, 1), (2, 3)]), st.floats(0.0, 5.0, allow_nan=False), max_size=3
    ),
    backward_s=st.floats(0.25, 3.0),
)
def test_computing_and_idling_fill_the_iteration_exactly(
    schedule: Schedule, latencies_s: dict[tuple[int, int], float], backward_s: float
) -> None:
    records = _played(schedule, latencies_s, backward_s)
    analysis = IterationAnalysis(records)
    idle_s: dict[int, float] = defaultdict(float)
    previous_end_s: dict[int, float] = defaultdict(lambda: analysis.start_s)
    for period in analysis.idle_periods():
        assert period.seconds > 0.0
        assert period.start_s >= previous_end_s[period.stage] - 1e-9
        previous_end_s[period.stage] = period.end_s
        idle_s[period.stage] += period.seconds
        if period.cause.kind is CauseKind.LINK:
            assert latencies_s.get((period.cause.source, period.cause.target), 0.0) > 0.0 or period.seconds < 1e-9
    for number, computed_s in enumerate(analysis.compute_s()):
        assert sum(computed_s.values()) + idle_s[number] == pytest.approx(analysis.seconds)


def test_a_stage_without_records_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stages \[0\]"):
        IterationAnalysis([ActionRecord(0, 1, "F", 0, 0, 0.0, 0.0, 1.0)])
