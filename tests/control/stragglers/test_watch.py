# SPDX-License-Identifier: Apache-2.0
"""Threads of all ranks around one store: reports go in, findings and figures come out, hosts follow."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import count

import psutil
import pytest
import torch.distributed as dist

from adaptra_megatron.common.child_process import ChildProcess
from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.common.layout import Cell, JobLayout, Worker
from adaptra_megatron.common.typed_messages import encoded
from adaptra_megatron.control.deciders.plan_state import Layout
from adaptra_megatron.control.decisions import MadeDecision
from adaptra_megatron.control.decisions import TelemetrySection as Requests
from adaptra_megatron.control.detector.straggler_arrivals import HostFigures, Row
from adaptra_megatron.control.measurements import stage_measurement
from adaptra_megatron.control.sidecar.planner_client import Begin, NoDecisionError, PlannerClient
from adaptra_megatron.control.sidecar.planner_connections import HostedChannels, Sidecar
from adaptra_megatron.control.stragglers import straggler_watch as watches
from adaptra_megatron.control.stragglers.straggler_host import HostSampler
from adaptra_megatron.control.stragglers.straggler_watch import JUDGED_FROM, StragglerWatch
from adaptra_megatron.telemetry.action_records import ActionRecord
from adaptra_megatron.telemetry.events import ArrivalsSeen, Event, StragglerDetection
from adaptra_megatron.telemetry.scalars import ArrivalFigures
from adaptra_megatron.transport.lines.connection_loop import ConnectionLoop
from adaptra_megatron.transport.setup.host_placement import listen_tcp
from testing.waiting import until

SECRET = b"s" * 32
WORKERS = {rank: Worker(Cell(rank // 2, 0), rank % 2, f"node{rank // 2}", f"boot{rank // 2}/net") for rank in range(6)}
"""Three replicas of one stage, each of two lanes."""


class TelemetrySection:
    """What a rank's telemetry gets."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.figures: list[ArrivalFigures] = []
        self.threads: set[str] = set()
        """Names of those that bring it."""

    def log(self, event: Event) -> None:
        self.events.append(event)
        self.threads.add(threading.current_thread().name)

    def arrivals(self, figures: ArrivalFigures) -> None:
        self.figures.append(figures)
        self.threads.add(threading.current_thread().name)


class Host(HostSampler):
    """A host that says what the test gives it."""

    def __init__(self, figures: HostFigures) -> None:
        self.figures, self.missing = figures, []

    def sample(self) -> HostFigures:
        return self.figures


class Ranks:
    """All of the job, in this process."""

    def __init__(
        self,
        store: dist.Store,
        policy: str,
        host: Callable[[], HostedChannels] | None = None,
        loop: ConnectionLoop | None = None,
    ) -> None:
        self.reported = [TelemetrySection() for _ in WORKERS]
        self.sampled: list[int] = []
        """Ranks whose hosts are read."""
        self.watches = [
            StragglerWatch(
                JobLayout(rank, WORKERS, "token"),
                ControlStore(store, SECRET, "token"),
                self.reported[rank],
                policy,
                lambda: listen_tcp("127.0.0.1")[0],
                sampler=lambda rank=rank: self.sampler(rank),  # type: ignore[misc]
                host=host,
                loop=loop,
            )
            for rank in WORKERS
        ]

    def sampler(self, rank: int) -> Host:
        self.sampled.append(rank)
        return Host(HostFigures(others_cpu=0.97 if rank == 2 else 0.0))

    def train(self, iterations: int, late_s: float, first: int = 0) -> None:
        for iteration in range(first, first + iterations):
            for rank, each in enumerate(self.watches):
                if each.measures:
                    late = rank // 2 == 1
                    each.add(Row(iteration, 0.01 + late_s, 0.001 + late_s * (not late), 0.005 + late_s * late))

    def close(self) -> None:
        for each in self.watches:
            each.close()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    monkeypatch.setattr(watches, "FIRST_S", 0.02)
    monkeypatch.setattr(watches, "LEAST_S", 0.2)
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def judges() -> list[psutil.Process]:
    """All judges' processes that this one has started."""
    return [each for each in psutil.Process().children() if "planner_process" in " ".join(each.cmdline())]


@pytest.mark.timeout(60)
def test_the_lowest_rank_finds_and_those_that_show_or_act_are_told(
    store: dist.Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    ranks = Ranks(store, "observe")
    try:
        assert [each.measures for each in ranks.watches] == [True, False] * 3
        ranks.train(40, late_s=0.003)
        until(lambda: [event for event in ranks.reported[0].events if isinstance(event, StragglerDetection)])
        # Lags and late cells are two entries of the store: a look between both finds the first alone.
        until(lambda: ranks.reported[5].figures and ranks.reported[5].figures[-1].late)
        until(lambda: caplog.text.count("host policy: rank") == 2)
    finally:
        ranks.close()
    (event,) = [event for event in ranks.reported[0].events if isinstance(event, StragglerDetection)]
    assert (event.replica, event.first_rank, event.host) == (1, 2, "node1")
    assert list(event.causes) == ["cpu", "compute"]
    assert any(isinstance(event, ArrivalsSeen) for event in ranks.reported[0].events)
    assert not [reported for reported in ranks.reported[1:] if reported.events]
    assert ranks.reported[5].figures[-1].lags_s[0][1] == pytest.approx(0.003)
    assert list(ranks.reported[5].figures[-1].late) == [1]
    said = [record.getMessage() for record in caplog.records if "host policy: rank" in record.getMessage()]
    assert sorted(line.split("rank ")[1][0] for line in said) == ["2", "3"], "both lanes of the late cell"


@pytest.mark.timeout(60)
def test_a_loop_starts_threads_that_look_and_end(store: dist.Store) -> None:
    planned, loop = Planned(), ConnectionLoop()
    ranks = Ranks(store, "off", planned.client.host, loop)
    try:
        planned.decide()
        ranks.train(40, late_s=0.003)
        until(lambda: [event for event in ranks.reported[0].events if isinstance(event, StragglerDetection)])
        until(lambda: ranks.reported[5].figures)
    finally:
        planned.client.close()
        ranks.close()
    assert ranks.reported[0].threads == ranks.reported[5].threads == {"adaptra-blocking"}
    assert not {"adaptra-blocking", "adaptra-connections"} & {thread.name for thread in threading.enumerate()}


@pytest.mark.timeout(60)
def test_without_a_policy_few_ranks_have_a_thread_and_all_threads_end(store: dist.Store) -> None:
    def running() -> int:
        return sum(thread.name == "adaptra-stragglers" for thread in threading.enumerate())

    ranks = Ranks(store, "off")
    assert running() == 4, "three cells report, and the last rank shows"
    ranks.close()
    assert running() == 0


@pytest.mark.timeout(60)
def test_a_failure_of_ours_is_logged_and_ends_the_looking_alone(
    store: dist.Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watches, "StragglerServiceClient", lambda *given: 1 // 0)
    ranks = Ranks(store, "off")
    try:
        ranks.train(JUDGED_FROM, late_s=0.0)
        until(lambda: "stragglers are not looked for any more" in caplog.text)
    finally:
        ranks.close()
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.timeout(60)
def test_the_end_of_the_judges_process_is_logged_and_ends_the_looking_alone(
    store: dist.Store, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = Ranks(store, "off")
    try:
        ranks.train(JUDGED_FROM - 1, late_s=0.0)
        time.sleep(0.2)
        assert not judges(), "so few iterations are not judged"
        ranks.train(1, late_s=0.0, first=JUDGED_FROM - 1)
        until(lambda: judges())
        for judge in judges():
            judge.kill()
        until(lambda: "replicas that come last are not found any more" in caplog.text)
        time.sleep(2.5)  # in which each rank would have tried to connect again, more than once
    finally:
        ranks.close()
    assert "the process that judges stragglers ended by signal SIGKILL" in caplog.text
    assert not ranks.reported[0].events
    assert "cannot send its measurements" not in caplog.text


class Planned:
    """The planner of the lowest rank, which decides for that rank alone."""

    def __init__(self) -> None:
        begin = Begin(
            secret=SECRET.hex(),
            place="exchange/0",
            reporters=(0,),
            layout=Layout(stages=1, chunks=1, group_size=None),
            measures_memory=False,
            policy="adapt",
            max_in_flight=None,
            plan_csv=None,
            costs_json=None,
            paths=None,
            log_level=0,
        )
        self.client = PlannerClient(begin, listen_tcp("127.0.0.1")[0], TelemetrySection(), lambda: 0, Requests)
        self._iteration = 0

    def decide(self) -> MadeDecision:
        records = [ActionRecord(self._iteration, 0, kind, 0, 0, 0.0, 0.0, 1.0) for kind in "FB"]
        self._iteration += 1
        report = encoded(stage_measurement(0, 0, 1, records, ([], []), 0.0))
        return self.client.decide([(self._iteration - 1, report)])


@pytest.mark.timeout(120)
def test_the_planner_process_finds_stragglers_and_so_does_the_next_one(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sidecar, "end", lambda process, _patience_s: ChildProcess.end(process, 20.0))
    planned = Planned()
    ranks = Ranks(store, "off", planned.client.host)

    numbers = count(step=10)

    def seen(kind: type[Event], times: int) -> bool:
        """Train until so many events have come: what is reported to a process that has just ended is lost."""
        ranks.train(10, late_s=0.003, first=next(numbers))
        time.sleep(0.1)
        return len([event for event in ranks.reported[0].events if isinstance(event, kind)]) >= times

    try:
        planned.decide()
        until(lambda: seen(StragglerDetection, 1))
        assert [each.pid for each in judges()] == [planned.client.process_id], "a second process"
        assert planned.decide().until == 1, "planning goes on in the same process"
        (first,) = judges()
        first.kill()
        with pytest.raises(NoDecisionError):
            planned.decide()
        planned.decide()
        until(lambda: seen(StragglerDetection, 2))
        assert [each.pid for each in judges()] == [planned.client.process_id]
        logged = len([event for event in ranks.reported[0].events if isinstance(event, ArrivalsSeen)])
        seen(ArrivalsSeen, 0)
        time.sleep(2.0)  # ten looks
        planned.client.close()
    finally:
        ranks.close()
    assert {event.after for event in ranks.reported[0].events if isinstance(event, StragglerDetection)} == {"late"}
    assert seen(ArrivalsSeen, logged + 1), "its last verdict"


@pytest.mark.timeout(60)
def test_hosts_are_read_only_while_a_cell_of_their_stage_is_late(store: dist.Store) -> None:
    ranks = Ranks(store, "off")
    try:
        ranks.train(40, late_s=0.0)
        until(lambda: ranks.reported[5].figures)
        assert not ranks.sampled
        ranks.train(40, late_s=0.003, first=40)
        until(lambda: len(ranks.sampled) == 3)
        until(lambda: ranks.reported[0].events)
        ranks.train(40, late_s=0.0, first=80)
        until(lambda: any(getattr(event, "after", "") == "healthy" for event in ranks.reported[0].events))
        until(lambda: all(each._sampler is None for each in ranks.watches))
    finally:
        ranks.close()
    assert sorted(set(ranks.sampled)) == [0, 2, 4], "the first ranks of all cells"
