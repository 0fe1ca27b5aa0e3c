# SPDX-License-Identifier: Apache-2.0
"""What the leading rank does with everybody's measurements."""

from __future__ import annotations

import logging

import pytest

from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.runtime.exchange import Decision
from adaptra_megatron.runtime.leader import PlanLeader
from adaptra_megatron.runtime.measurements import StageMeasurement
from adaptra_megatron.runtime.plans import Layout, PlanBook
from adaptra_megatron.schedule.checks import check_schedule
from adaptra_megatron.schedule.csv_format import schedule_from_csv
from adaptra_megatron.transport.messages import Direction, MessageKey

FOUR = Layout(stages=4, chunks=1, group_size=None, can_split=True)


def measurements(latency_s: float) -> list[StageMeasurement]:
    """Of one iteration: whole and split backwards, six messages 0->1 that took `latency_s`."""
    seconds = dict.fromkeys(("F", "B", "I", "W"), (1.0,))
    keys = [MessageKey(1, Direction.ACTIVATION, 0, micro_batch) for micro_batch in range(6)]
    found = []
    for stage in range(4):
        sent = tuple((1, key, 10.0) for key in keys) if stage == 0 else ()
        received = tuple((0, key, 5.0, 10.0 + latency_s) for key in keys) if stage == 1 else ()
        found.append(StageMeasurement(0, stage, 6, seconds, sent, received))
    return found


def test_observing_says_what_changes_and_keeps_what_runs(caplog: pytest.LogCaptureFixture) -> None:
    leader = PlanLeader(PlanBook(AdaptraConfig(policy="observe"), FOUR))
    with caplog.at_level(logging.INFO, logger="adaptra_megatron.runtime"):
        for latency_s in (9.0, 0.1, 0.1, 2.0, 2.0):  # the first iteration is not representative
            assert leader.decide(measurements(latency_s)) == Decision(0, None)
    assert [record.getMessage() for record in caplog.records] == [
        "adaptra: observed slowest stage 0, 12000.0 ms of work; slowest link 0->1, 100.0 ms",
        "adaptra: observed slowest stage 0, 12000.0 ms of work; slowest link 0->1, 2000.0 ms",
    ]


def test_adapting_numbers_its_plans_and_keeps_one_that_is_good() -> None:
    leader = PlanLeader(PlanBook(AdaptraConfig(max_in_flight=8), FOUR))
    decisions = [leader.decide(measurements(latency_s)) for latency_s in (0.0, 0.0, 0.0, 4.0, 4.0)]
    assert [decision.number for decision in decisions] == [0, 1, 1, 2, 2]
    assert [decision.csv is None for decision in decisions] == [True, False, True, False, True]
    for decision in (decisions[1], decisions[3]):
        check_schedule(schedule_from_csv(decision.csv or "", chunks=1), max_in_flight=(8,) * 4)
