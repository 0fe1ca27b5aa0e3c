# SPDX-License-Identifier: Apache-2.0
"""The leading rank decides on orders and paths together: a job of two replicas of two stages, given what would be
measured of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.control.deciders.decision_engine import DecisionEngine
from adaptra_megatron.control.deciders.plan_state import Layout, PlanState
from adaptra_megatron.control.decisions import DELAY, Decision, LinkName, Paths
from adaptra_megatron.control.measurements import BrokenPath, StageMeasurement, stage_measurement
from adaptra_megatron.control.sidecar.planner_client import PathPolicy
from adaptra_megatron.schedule.classic import one_f_one_b
from adaptra_megatron.schedule.csv_format import schedule_to_csv
from adaptra_megatron.telemetry.action_records import ActionRecord
from adaptra_megatron.telemetry.event_log import read_events
from adaptra_megatron.telemetry.events import PathChosen, PlanMade, RunStarted
from adaptra_megatron.telemetry.run_telemetry import RankPlace, RunTelemetry, TelemetrySettings
from adaptra_megatron.transport.link_paths import Path as LinkPath
from adaptra_megatron.transport.link_paths import ProbeTimes
from adaptra_megatron.transport.message_keys import Direction, MessageKey, MessageTimes

MICRO_BATCHES, PERIOD_S, NBYTES = 12, 0.05, 1 << 20
REPLICAS = (0, 2)
LINK = LinkName(0, 0, 1)
TWO = Layout(stages=2, chunks=1, group_size=None)
BY_DEVICE = PathPolicy(preferred=LinkPath.DEVICE)
Latency = Callable[[LinkName, LinkPath], float]
CLOCKS_S = {(0, 0): 0.0, (0, 1): 100.0, (2, 0): 0.0, (2, 1): -7.0}
"""What leads from the clock of a stage, by pipeline, to the common one."""


class Job:
    """Messages go where the decisions send them, and what they ask to be measured is measured."""

    def __init__(self, leader: DecisionEngine, kinds: str = "FBIW") -> None:
        """`kinds`: of the actions that run."""
        self.leader, self.kinds = leader, kinds
        self.decisions: list[Any] = [Decision(0, paths=Paths())] * DELAY
        """By the iteration in which they are in force."""
        self.probes = 0

    @property
    def iteration(self) -> int:
        """The next to run."""
        return len(self.decisions) - DELAY

    def run(
        self,
        latency_s: Latency,
        iterations: int = 1,
        *,
        broken: BrokenPath | None = None,
        disturbance: str | None = None,
        slow: float = 1.0,
    ) -> None:
        """`broken` is reported by the sender of LINK. `slow`: factor on all computation and all messages."""
        for _ in range(iterations):
            measured = []
            for pipeline in REPLICAS:
                for stage in range(2):
                    measured.append(
                        self._measure(pipeline, stage, latency_s, broken if pipeline == 0 else None, disturbance, slow)
                    )
            self.decisions.append(self.leader.decide([measured]))

    @property
    def paths(self) -> Paths:
        """In force in the next iteration."""
        return self.decisions[self.iteration].paths or Paths()

    def path(self, link: LinkName) -> LinkPath:
        return LinkPath.HOST if link in self.paths.diverted else LinkPath.DEVICE

    def _measure(
        self,
        pipeline: int,
        stage: int,
        latency_s: Latency,
        broken: BrokenPath | None,
        disturbance: str | None,
        slow: float,
    ) -> StageMeasurement:
        number, offset_s = self.iteration, CLOCKS_S[pipeline, stage]
        records = [
            ActionRecord(number, stage, kind, 0, micro_batch, 0.0, at_s, at_s + 0.01 * slow)
            for micro_batch in range(MICRO_BATCHES)
            for place, kind in enumerate(self.kinds)
            for at_s in [number * 2.0 + PERIOD_S * micro_batch + 0.01 * place - offset_s]
        ]
        out, back = LinkName(pipeline, stage, 1 - stage), LinkName(pipeline, 1 - stage, stage)
        sent = [MessageTimes(key, 1 - stage, at_s, at_s, NBYTES, self.path(out)) for key, at_s in self._messages(out)]
        sent = [entry._replace(posted_s=entry.posted_s - offset_s, done_s=entry.done_s - offset_s) for entry in sent]
        path = self.path(back)
        received = [
            MessageTimes(
                key, 1 - stage, at_s - 0.5 - offset_s, at_s + latency_s(back, path) * slow - offset_s, NBYTES, path
            )
            for key, at_s in self._messages(back)
        ]
        return stage_measurement(
            pipeline,
            stage,
            MICRO_BATCHES,
            records,
            (sent, received),
            offset_s,
            probes=self._probe(out, latency_s),
            broken=[broken] if broken is not None and (pipeline, stage) == LINK[:2] else [],
            disturbance=disturbance if stage == 0 else None,
        )

    def _messages(self, link: LinkName) -> list[tuple[MessageKey, float]]:
        """Keys, and the common moments of sending."""
        direction = Direction.ACTIVATION if link.source == 0 else Direction.GRADIENT
        keys = [MessageKey(self.iteration, direction, 0, micro_batch) for micro_batch in range(MICRO_BATCHES)]
        return [(key, self.iteration * 2.0 + PERIOD_S * key.micro_batch + 0.01) for key in keys]

    def _probe(self, link: LinkName, latency_s: Latency) -> list[ProbeTimes]:
        if link not in self.paths.probed:
            return []
        self.probes += 3
        path = self.path(link).other
        here_s, there_s = CLOCKS_S[link.pipeline, link.source], CLOCKS_S[link.pipeline, link.target]
        moments = [self.iteration * 2.0 + 0.1 * number for number in range(3)]
        return [
            ProbeTimes(link.target, path, NBYTES, at_s - here_s, at_s + latency_s(link, path) - there_s)
            for at_s in moments
        ]


def healthy(link: LinkName, path: LinkPath) -> float:
    return 0.001 if path is LinkPath.DEVICE else 0.002


def slow_device(link: LinkName, path: LinkPath) -> float:
    return 0.06 if (link, path) == (LINK, LinkPath.DEVICE) else healthy(link, path)


def slow_cable(link: LinkName, path: LinkPath) -> float:
    return 0.06 if link == LINK else healthy(link, path)


@pytest.fixture
def telemetry(tmp_path: Path) -> Iterator[RunTelemetry]:
    place = RankPlace(run="run", rank=0, local_rank=0, stage=0, leads=True)
    start = RunStarted(layout={"stages": 2}, versions={}, config={})
    telemetry = RunTelemetry(TelemetrySettings(trace_dir=tmp_path, every_iteration=False), place, start)
    yield telemetry
    telemetry.close()


@pytest.fixture
def job(telemetry: RunTelemetry) -> Job:
    book = PlanState(AdaptraConfig(max_in_flight=6), TWO)
    job = Job(DecisionEngine(book, telemetry, BY_DEVICE))
    job.run(healthy, 8)
    assert all(decision.paths.diverted == () for decision in job.decisions)
    return job


def test_a_link_of_one_replica_takes_the_other_path_two_iterations_later_and_comes_back(
    job: Job, telemetry: RunTelemetry, tmp_path: Path
) -> None:
    onset = job.iteration
    job.run(slow_device, 6)
    assert [decision.paths.diverted for decision in job.decisions[onset : onset + 4]] == [(), (), (LINK,), (LINK,)]
    healed = job.iteration
    job.run(healthy, 5)
    returned = [decision.paths.diverted for decision in job.decisions[healed : healed + 5]]
    assert returned[:2] == [(LINK,)] * 2
    assert returned[3:] == [()] * 2, "once two iterations have shown it"
    for before, after in zip(job.decisions, job.decisions[1:], strict=False):
        assert (before.paths.diverted != after.paths.diverted or after.order is not None) == (
            before.number != after.number
        )
    telemetry.close()
    there, back = [entry.event for entry in read_events(tmp_path) if isinstance(entry.event, PathChosen)]
    assert (there.pipeline, there.source, there.target, there.before, there.after) == (*LINK, "device", "host")
    assert there.gain_s == pytest.approx(0.058, rel=0.05)
    assert "device path is slow (a message of 1 MiB takes 60 ms, before 1 ms" in there.reason
    assert (back.before, back.after) == ("host", "device")
    forecast = job.decisions[onset + DELAY].forecast
    assert forecast.predicted_s < 0.8 * forecast.before_predicted_s


def test_a_slow_cable_slows_both_paths_and_is_planned_around(job: Job, telemetry: RunTelemetry, tmp_path: Path) -> None:
    onset = job.iteration
    job.run(slow_device, 1)
    job.run(slow_cable, 8)
    assert job.decisions[onset + DELAY].order is not None, "not even at first is it believed that the other is better"
    telemetry.close()
    plans = [entry.event for entry in read_events(tmp_path) if isinstance(entry.event, PlanMade)]
    assert any(made.adopted and made.costs["links"][0]["latency_s"] >= 0.059 for made in plans)
    assert len({decision.number for decision in job.decisions[onset + DELAY :]}) == 1, "and no to and fro"


def test_what_was_slow_on_both_paths_from_the_first_moment_stays(job: Job) -> None:
    job.run(slow_cable, 12)
    diverted = [decision.paths.diverted for decision in job.decisions]
    changes = sum(before != after for before, after in zip(diverted, diverted[1:], strict=False))
    assert changes <= 1, diverted


def test_a_path_that_the_transport_gave_up_is_left_until_it_has_been_measured_again(job: Job) -> None:
    onset = job.iteration
    job.run(healthy, 3, broken=BrokenPath(1, LinkPath.DEVICE, "its probes did not get through"))
    assert job.decisions[onset + DELAY].paths.diverted == (LINK,)
    healed = job.iteration
    job.run(healthy, 6)
    assert job.decisions[healed + 1].paths.diverted == (LINK,)
    assert job.decisions[-1].paths.diverted == ()


@pytest.mark.parametrize("disturbance", [None, "a pause of 12.0 s just before, as for a checkpoint"])
def test_one_odd_iteration_changes_nothing(
    job: Job, telemetry: RunTelemetry, tmp_path: Path, disturbance: str | None
) -> None:
    """Everything takes three times as long once: a pause of garbage collection, a checkpoint being written."""
    number = job.decisions[-1].number
    job.run(healthy, 1, disturbance=disturbance, slow=3.0)
    job.run(healthy, 6)
    assert {decision.number for decision in job.decisions[-7:]} == {number}
    assert job.decisions[-1].paths.diverted == ()


def test_one_message_that_is_late_changes_nothing(job: Job) -> None:
    late = iter([0.5])

    def outlier(link: LinkName, path: LinkPath) -> float:
        return next(late, 0.001) if link == LINK else healthy(link, path)

    number = job.decisions[-1].number
    job.run(outlier, 1)
    job.run(healthy, 4)
    assert {decision.number for decision in job.decisions[-5:]} == {number}


def test_probes_are_few_while_all_is_well(job: Job) -> None:
    before = job.probes
    job.run(healthy, 100)
    messages = 100 * 2 * len(REPLICAS) * MICRO_BATCHES
    assert 0 < job.probes - before <= 0.006 * messages


def test_planning_uses_a_high_quantile_of_delays(job: Job) -> None:
    """Over-estimating a delay costs memory, under-estimating costs time."""
    random = np.random.default_rng(1)
    job.run(lambda link, path: healthy(link, path) if link != LINK else float(random.exponential(0.03)), 12)
    costs = job.leader.costs
    assert costs is not None
    assert costs.link(0, 1).latency_s > 0.03 * np.log(2), "more than the median"


def test_no_path_is_chosen_where_stocks_order_is_observed(telemetry: RunTelemetry) -> None:
    book = PlanState(AdaptraConfig(policy="observe"), TWO)
    job = Job(DecisionEngine(book, telemetry, BY_DEVICE))
    job.run(healthy, 6)
    job.run(slow_device, 6)
    assert all((decision.number, decision.order) == (0, None) for decision in job.decisions)
    assert all(decision.paths is None for decision in job.decisions[DELAY:])


@pytest.mark.parametrize("kinds", ["FB", "FIW", "FBIW"])
def test_under_a_given_plan_paths_are_chosen_and_the_order_stays(
    telemetry: RunTelemetry, tmp_path: Path, kinds: str
) -> None:
    plan = tmp_path / "plan.csv"
    plan.write_text(schedule_to_csv(one_f_one_b(2, MICRO_BATCHES)))
    job = Job(DecisionEngine(PlanState(AdaptraConfig(plan_csv=plan), TWO), telemetry, BY_DEVICE), kinds)
    job.run(healthy, 8)
    onset = job.iteration
    job.run(slow_device, 6)
    assert [decision.paths.diverted for decision in job.decisions[onset + DELAY :]] == [(LINK,)] * 6
    assert not any(decision.order or decision.forecast for decision in job.decisions)
    assert [decision.number for decision in job.decisions[onset + 1 : onset + 4]] == [1, 2, 2], "the given one is 1"
    healed = job.iteration
    job.run(healthy, 5)
    assert job.decisions[-1].paths.diverted == ()
    assert job.decisions[healed].number < job.decisions[-1].number
    telemetry.close()
    assert not [entry for entry in read_events(tmp_path) if isinstance(entry.event, PlanMade)]
