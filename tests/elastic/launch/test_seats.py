# SPDX-License-Identifier: Apache-2.0
"""Seats of hosts in a job: who takes which, also that of a host that is gone, by the coordinator's word."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import PrefixStore

from adaptra_megatron.common.membership import MembershipRecords, launch_store
from adaptra_megatron.common.sealed_store import TamperedError
from adaptra_megatron.elastic.launch.endpoint import Endpoint, EndpointError, Seat, take_seat
from adaptra_megatron.elastic.launch.launch_messages import JOB_KEY, HostReport, JobState, host_key, read, write
from adaptra_megatron.elastic.launch.launcher import Coordinator
from adaptra_megatron.elastic.launch.roster import Policy
from adaptra_megatron.tools.local_ranks.launch_ranks import free_port

POLICY = Policy(no_kill=True, min_ranks=1, heartbeat_timeout_s=5.0, join_timeout_s=10.0)
RUN_ID = "seats"


class Job:
    """One of two hosts of one rank each, of which the first has the coordinator; each report is another second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        clock = SimpleNamespace(monotonic=lambda: self.now_s, time=lambda: self.now_s)
        monkeypatch.setattr("adaptra_megatron.elastic.launch.launcher.time", clock)
        self.endpoint = Endpoint("127.0.0.1", free_port())
        self.first = take(self.endpoint, 0)
        self.store = launch_store(self.first.store, RUN_ID)
        self._coordinator = Coordinator(launch_store(self.first.store.clone(), RUN_ID), 2, POLICY)
        self._reports = {host_key(0): HostReport("a", 1)}

    def host(self, name: str, node_rank: int, turn: int = 0) -> None:
        """This one reports from now on, and no other of this node rank."""
        stale = [key for key in self._reports if key.startswith(f"host/{node_rank}/")]
        for key in stale:
            del self._reports[key]
        self._reports[host_key(node_rank, turn)] = HostReport(name, 1)

    def seconds(self, number: int) -> JobState:
        """What the coordinator says then."""
        for _ in range(number):
            self.now_s += 0.5
            for key, report in self._reports.items():
                self._reports[key] = replace(report, beat=report.beat + 1)
                write(self.store, key, self._reports[key])
            self._coordinator.tick()
        state = read(self.store, JOB_KEY, JobState)
        assert state is not None
        return state

    def silence(self, node_rank: int) -> JobState:
        for key in [key for key in self._reports if key.startswith(f"host/{node_rank}/")]:
            del self._reports[key]
        return self.seconds(12)


def take(endpoint: Endpoint, node_rank: int | None, nproc: int = 1, heartbeat_timeout_s: float = 0.2) -> Seat:
    return take_seat(
        endpoint,
        RUN_ID,
        2,
        node_rank,
        nproc,
        join_timeout_s=10.0,
        heartbeat_timeout_s=heartbeat_timeout_s,
        given_up=lambda: False,
    )


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    made = Job(monkeypatch)
    assert take(made.endpoint, 1)[1:] == (1, 0)
    made.host("b", 1)
    made.seconds(2)
    return made


def test_unauthenticated_requests_change_no_seat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reaches the store may count and write as launchers do, but does not know the job's secret."""
    monkeypatch.setattr("adaptra_megatron.elastic.launch.endpoint._is_here", lambda _host: False)
    endpoint = Endpoint("127.0.0.1", free_port())
    with monkeypatch.context() as here:
        here.setattr("adaptra_megatron.elastic.launch.endpoint._is_here", lambda _host: True)
        strange = PrefixStore(f"adaptra/launch/{RUN_ID}", take(endpoint, 0).store)
    strange.add("seats/taken", 7)
    assert take(endpoint, None)[1:] == (1, 0)
    strange.set("seats/1/0", b"host of an intruder")
    with pytest.raises(TamperedError, match="seats/1/0"):
        take(endpoint, 1)


def fault_tolerant(job: Job) -> None:
    """Ranks have published that the job admits restarted ranks."""
    MembershipRecords(job.store).publish_layout(b"layout")


@pytest.mark.parametrize("node_rank", [1, None], ids=["named", "any"])
def test_a_host_takes_the_place_of_one_that_counts_as_dead(
    job: Job, node_rank: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adaptra_megatron.elastic.launch.endpoint._is_here", lambda _host: False)
    fault_tolerant(job)
    state = job.silence(1)
    assert (state.lost, state.vacant, state.turns) == ((1,), (1,), {})
    assert take(job.endpoint, node_rank)[1:] == (1, 1)
    job.host("spare", 1, turn=1)
    state = job.seconds(2)
    assert (state.lost, state.vacant, state.turns) == ((), (), {1: 1})
    state = job.silence(1)
    assert (state.lost, state.turns) == ((1,), {1: 1})
    assert take(job.endpoint, node_rank)[1:] == (1, 2)


def test_a_host_that_comes_before_the_other_counts_as_dead_waits_for_that(job: Job) -> None:
    fault_tolerant(job)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(take(job.endpoint, 1, heartbeat_timeout_s=20.0)))
    thread.start()
    job.seconds(2)
    assert not found
    job.silence(1)
    thread.join(20.0)
    assert found[0][1:] == (1, 1)


@pytest.mark.parametrize(
    ("lives", "lets_in", "nproc", "said"),
    [
        (True, True, 1, r"node rank 1 of the job at 127\.0\.0\.1:\d+ .* is taken by a launcher on host"),
        (False, False, 1, r"host b \(node rank 1 .* is gone, and no other can take its place: .*--adaptra-reroute"),
        (False, True, 3, r"--nproc-per-node is 3 here, but host b, .* had 1 ranks"),
    ],
    ids=["lives", "not-admitted", "other-number-of-ranks"],
)
def test_a_host_that_cannot_take_a_place_is_refused(
    job: Job, lives: bool, lets_in: bool, nproc: int, said: str
) -> None:
    if lets_in:
        fault_tolerant(job)
    if not lives:
        job.silence(1)
    with pytest.raises(EndpointError, match=said):
        take(job.endpoint, 1, nproc)
