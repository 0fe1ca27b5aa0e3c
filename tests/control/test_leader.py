# SPDX-License-Identifier: Apache-2.0
"""What the leading rank does with the measurements of all ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.made_up.measured_job import MeasuredJob

from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.control.deciders.decision_engine import DecisionEngine
from adaptra_megatron.control.deciders.plan_state import Layout, PlanState
from adaptra_megatron.control.decisions import Forecast, Paths
from adaptra_megatron.control.sidecar.planner_client import PathPolicy
from adaptra_megatron.schedule.schedule_checks import check_schedule
from adaptra_megatron.schedule.simulator import simulate
from adaptra_megatron.telemetry.event_log import read_events
from adaptra_megatron.telemetry.events import LinkDetection, PlanMade, PolicyChanged, RunStarted, StageDetection
from adaptra_megatron.telemetry.run_telemetry import RankPlace, RunTelemetry, TelemetrySettings
from adaptra_megatron.telemetry.trace_requests import Iterations, request_directory
from adaptra_megatron.transport.link_paths import Path as TransportPath

FOUR = Layout(stages=4, chunks=1, group_size=None)


@pytest.fixture
def telemetry(tmp_path: Path) -> Iterator[RunTelemetry]:
    place = RankPlace(run="run", rank=0, local_rank=0, stage=0, leads=True)
    start = RunStarted(layout={"stages": 4}, versions={}, config={})
    telemetry = RunTelemetry(TelemetrySettings(trace_dir=tmp_path, every_iteration=False), place, start)
    yield telemetry
    telemetry.close()


def test_observing_says_what_is_found_and_keeps_what_runs(
    caplog: pytest.LogCaptureFixture, telemetry: RunTelemetry, tmp_path: Path
) -> None:
    leader, job = DecisionEngine(PlanState(AdaptraConfig(policy="observe"), FOUR), telemetry), MeasuredJob()
    with caplog.at_level(logging.DEBUG, logger="adaptra_megatron"):
        for latency_s in (9.0, 0.1, 0.1, 0.1, 0.1, 2.0, 2.0):  # the first iteration is not representative
            decision = leader.decide([job.measure(latency_s)])
            assert (decision.number, decision.order) == (0, None)
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "adaptra: observed slowest stage 0, 24000.0 ms of work; slowest link 0->1, 100.0 ms"
    (finding,) = said[1:]
    assert finding.startswith(
        "adaptra: link 0->1 of pipeline 0, device path: slow since iteration 5, "
        "a message of 1000 bytes takes 2e+03 ms, before 100 ms"
    )
    telemetry.close()
    (event,) = _events(tmp_path, LinkDetection)
    assert (event.source, event.target, event.path, event.pipeline) == (0, 1, "device", 0)
    assert (event.before, event.after) == ("healthy", "slow")
    assert event.latency_s == pytest.approx(2.0, abs=1e-3)


def test_plans_follow_findings_and_are_explained_by_them(telemetry: RunTelemetry, tmp_path: Path) -> None:
    leader, job = DecisionEngine(PlanState(AdaptraConfig(max_in_flight=8), FOUR), telemetry), MeasuredJob()
    latencies_s = [0.0] * 6 + [4.0] * 6 + [0.0] * 4
    decisions = [leader.decide([job.measure(latency_s)]) for latency_s in latencies_s]
    numbers = [decision.number for decision in decisions]
    assert numbers[:6] == [0, 1, 1, 1, 1, 1]
    assert numbers[6:12] == [2] * 6, "the first slow iteration is enough"
    assert [decision.order is not None for decision in decisions[:12]] == [n in (1, 6) for n in range(12)]
    for index in (1, 6):
        order: Any = decisions[index].order
        schedule = order.schedule()
        check_schedule(schedule, max_in_flight=(8,) * 4)
        planned_for = order.costs
        assert decisions[index].forecast is not None
        assert simulate(schedule, planned_for).makespan_s == decisions[index].forecast.predicted_s
    telemetry.close()
    first, onset, healed = _events(tmp_path, PlanMade)
    assert decisions[6].forecast == Forecast(onset.predicted_s, onset.current_predicted_s)
    assert (first.number, first.adopted, first.reason) == (1, True, "first costs")
    assert (onset.number, onset.adopted) == (2, True)
    assert "link 0->1 of pipeline 0, device path: slow since iteration 6, a message" in onset.reason
    assert "takes 4e+03 ms, before 0 ms" in onset.reason
    assert onset.predicted_s < (onset.current_predicted_s or 0.0)
    assert "link 0->1 of pipeline 0, device path: healthy since iteration 12" in healed.reason
    assert [event.after for event in _events(tmp_path, LinkDetection)] == ["slow", "healthy"]


def test_a_slow_stage_is_reported_after_two_iterations(telemetry: RunTelemetry, tmp_path: Path) -> None:
    leader, job = DecisionEngine(PlanState(AdaptraConfig(), FOUR), telemetry), MeasuredJob()
    for slow_stage in [1.0] * 6 + [1.5] * 3:
        leader.decide([job.measure(0.0, slow_stage=slow_stage)])
    telemetry.close()
    (event,) = _events(tmp_path, StageDetection)
    assert (event.stage, event.pipeline, event.before, event.after) == (3, 0, "healthy", "slow")
    assert event.slow_down == pytest.approx(1.5, rel=1e-3)
    assert "seen in 2 iterations in a row" in event.reason


def test_one_odd_iteration_changes_nothing(telemetry: RunTelemetry, tmp_path: Path) -> None:
    leader, job = DecisionEngine(PlanState(AdaptraConfig(), FOUR), telemetry), MeasuredJob()
    for slow_stage in [1.0] * 6 + [3.0] + [1.0] * 3:
        decision = leader.decide([job.measure(0.0, slow_stage=slow_stage)])
    assert decision.number <= 1
    telemetry.close()
    assert _events(tmp_path, StageDetection) == []
    assert [made.reason for made in _events(tmp_path, PlanMade)] == ["first costs"]


def test_another_policy_is_decided_on_once_and_adapting_begins_anew(telemetry: RunTelemetry, tmp_path: Path) -> None:
    paths = PathPolicy(preferred=TransportPath.DEVICE)
    leader, job = DecisionEngine(PlanState(AdaptraConfig(max_in_flight=8), FOUR), telemetry, paths), MeasuredJob()
    asked = {8: "observe", 9: "observe", 14: "adapt", 18: "off"}
    decisions = [leader.decide([job.measure(4.0 if at > 5 else 0.0)], asked.get(at, "")) for at in range(20)]
    policies = {
        at: decision.telemetry.policy
        for at, decision in enumerate(decisions)
        if decision.telemetry and decision.telemetry.policy
    }
    assert policies == {8: "observe", 14: "adapt", 18: "off"}, "once each"
    orders = [at for at, decision in enumerate(decisions) if decision.order is not None]
    assert [at for at in orders if 8 <= at < 14 or at >= 18] == []
    assert 14 in orders, "costs are known, so it plans at once"
    assert decisions[8].paths == decisions[18].paths == Paths(), "links take the paths that they prefer"
    numbers = [decision.number for decision in decisions]
    assert numbers == sorted(numbers)
    assert numbers[8] == numbers[7] + 1
    telemetry.close()
    changes = _events(tmp_path, PolicyChanged)
    assert [(change.before, change.after) for change in changes] == [
        ("adapt", "observe"),
        ("observe", "adapt"),
        ("adapt", "off"),
    ]
    assert [change.number for change in changes][0] == numbers[8]


def test_decisions_carry_what_the_leader_found(telemetry: RunTelemetry, tmp_path: Path) -> None:
    leader, job = DecisionEngine(PlanState(AdaptraConfig(policy="observe"), FOUR), telemetry), MeasuredJob()
    first: Any = leader.decide([job.measure(0.5)]).telemetry
    assert first.job.unpacked().links == {}, "the first iteration is not representative"
    telemetry.begin(5)
    (request_directory(tmp_path) / "next-2").touch()
    second: Any = leader.decide([job.measure(0.5)]).telemetry
    assert second.requests == (Iterations(3, 4),), "by numbers of Megatron, of which none is known here"
    found = second.job.unpacked()
    assert found.bubble_fraction == pytest.approx(1.0 - 48.0 / 59.0)
    assert found.links[0, 1].latency_s == pytest.approx(0.5, abs=1e-4)
    assert found.links[0, 1].state == "healthy"


def _events(directory: Path, kind: type[Any]) -> list[Any]:
    return [entry.event for entry in read_events(directory) if isinstance(entry.event, kind)]
