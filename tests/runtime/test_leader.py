# SPDX-License-Identifier: Apache-2.0
"""What the leading rank does with everybody's measurements."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.runtime.leader import PlanLeader
from adaptra_megatron.runtime.measurements import StageMeasurement
from adaptra_megatron.runtime.plans import Layout, PlanBook
from adaptra_megatron.schedule.checks import check_schedule
from adaptra_megatron.schedule.csv_format import schedule_from_csv
from adaptra_megatron.telemetry.event_log import read_events
from adaptra_megatron.telemetry.events import PlanMade, RunStarted
from adaptra_megatron.telemetry.run_telemetry import Place, RunTelemetry, TelemetrySettings
from adaptra_megatron.telemetry.trace_requests import Iterations, request_directory
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
        found.append(StageMeasurement(0, stage, 6, seconds, sent, received, (0.0, 24.0), 18.0))
    return found


@pytest.fixture
def telemetry(tmp_path: Path) -> Iterator[RunTelemetry]:
    place = Place(run="run", rank=0, local_rank=0, stage=0, leads=True)
    start = RunStarted(layout={"stages": 4}, versions={}, config={})
    telemetry = RunTelemetry(TelemetrySettings(trace_dir=tmp_path, every_iteration=False), place, start)
    yield telemetry
    telemetry.close()


def test_observing_says_what_changes_and_keeps_what_runs(
    caplog: pytest.LogCaptureFixture, telemetry: RunTelemetry
) -> None:
    leader = PlanLeader(PlanBook(AdaptraConfig(policy="observe"), FOUR), telemetry)
    with caplog.at_level(logging.INFO, logger="adaptra_megatron.runtime"):
        for latency_s in (9.0, 0.1, 0.1, 2.0, 2.0):  # the first iteration is not representative
            assert leader.decide(measurements(latency_s))[:2] == (0, None)
    assert [record.getMessage() for record in caplog.records] == [
        "adaptra: observed slowest stage 0, 12000.0 ms of work; slowest link 0->1, 100.0 ms",
        "adaptra: observed slowest stage 0, 12000.0 ms of work; slowest link 0->1, 2000.0 ms",
    ]


def test_adapting_numbers_its_plans_and_keeps_one_that_is_good(telemetry: RunTelemetry, tmp_path: Path) -> None:
    leader = PlanLeader(PlanBook(AdaptraConfig(max_in_flight=8), FOUR), telemetry)
    decisions = [leader.decide(measurements(latency_s)) for latency_s in (0.0, 0.0, 0.0, 4.0, 4.0)]
    assert [decision.number for decision in decisions] == [0, 1, 1, 2, 2]
    assert [decision.csv is None for decision in decisions] == [True, False, True, False, True]
    for decision in (decisions[1], decisions[3]):
        check_schedule(schedule_from_csv(decision.csv or "", chunks=1), max_in_flight=(8,) * 4)
    telemetry.close()
    plans = [entry.event for entry in read_events(tmp_path) if isinstance(entry.event, PlanMade)]
    assert [(made.number, made.adopted) for made in plans] == [(1, True), (2, True)]
    assert plans[0].reason == "first costs"
    assert "slowest link 0->1, 4000.0 ms" in plans[1].reason
    assert all(made.predicted_s < (made.current_predicted_s or 0.0) for made in plans)


def test_decisions_carry_what_the_leader_found(telemetry: RunTelemetry, tmp_path: Path) -> None:
    leader = PlanLeader(PlanBook(AdaptraConfig(policy="observe"), FOUR), telemetry)
    assert leader.decide(measurements(0.5)).job is None, "the first iteration is not representative"
    telemetry.begin(5)
    (request_directory(tmp_path) / "next-2").touch()
    decision = leader.decide(measurements(0.5))
    assert decision.requests == (Iterations(7, 8),)
    job = decision.job
    assert job is not None
    assert job.bubble_fraction == pytest.approx(0.25)
    assert job.links[0, 1].latency_s == pytest.approx(0.5)
