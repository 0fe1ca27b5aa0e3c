# SPDX-License-Identifier: Apache-2.0
"""The process that decides beside a leading rank: what it says, and what becomes of it when it dies or hangs."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.made_up.job import SECRET
from support.made_up.measured_job import MeasuredJob

from adaptra_megatron.authentication.seal import Seal
from adaptra_megatron.child_process import ChildProcess
from adaptra_megatron.control.measurements import StageMeasurement
from adaptra_megatron.control.order.plans import Layout
from adaptra_megatron.control.planner_process.keeper import NoDecisionError, PlannerKeeper
from adaptra_megatron.control.planner_process.messages import Begin, ChannelEndedError, receive, send
from adaptra_megatron.control.rounds import SealedRound, round_key
from adaptra_megatron.control.wire_format import encoded
from adaptra_megatron.telemetry.events.events import Event, LinkDetection, PlanMade
from adaptra_megatron.telemetry.tracing.trace_requests import Iterations

SEAL = Seal(SECRET, "exchange/0")
FOUR = Layout(stages=4, chunks=1, group_size=None, can_split=True)


class Diary:
    """Keeps events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def log(self, event: Event) -> None:
        self.events.append(event)


def begin(**changed: Any) -> Begin:
    settings: dict[str, Any] = {"policy": "adapt", "max_in_flight": 8.0, "plan_csv": None, "costs_json": None}
    settings |= {"secret": SECRET.hex(), "place": SEAL.place, "layout": FOUR, "measures_memory": False, "paths": None}
    return Begin(**(settings | {"log_level": logging.INFO} | changed))


def sealed(measured: list[StageMeasurement], seal: Seal = SEAL) -> SealedRound:
    iteration = measured[0].iteration
    entries = [seal.entry(round_key(iteration), encoded(one)) for one in reversed(measured)]
    return SealedRound(iteration, b"".join(entries))


@pytest.fixture
def keep() -> Iterator[Callable[..., tuple[PlannerKeeper, Diary]]]:
    kept: list[PlannerKeeper] = []

    def make(**settings: Any) -> tuple[PlannerKeeper, Diary]:
        diary = Diary()
        kept.append(PlannerKeeper(begin(), diary, lambda: 0, lambda: (Iterations(7, 8),), **settings))
        return kept[-1], diary

    yield make
    for each in kept:
        each.close()


def test_it_decides_and_says_why(
    keep: Callable[..., tuple[PlannerKeeper, Diary]], caplog: pytest.LogCaptureFixture
) -> None:
    planner, diary = keep(word="replica 3: ")
    job = MeasuredJob()
    with caplog.at_level(logging.INFO, logger="adaptra_megatron"):
        decisions = [planner.decide([sealed(job.measure(0.0))]) for _ in range(6)]
        decisions.append(planner.decide([sealed(job.measure(4.0)), sealed(job.measure(4.0))]))
    assert [decision.number for decision in decisions] == [0, 1, 1, 1, 1, 1, 2]
    assert {decision.told.requests for decision in decisions if decision.told} == {(Iterations(7, 8),)}
    assert [type(event) for event in diary.events] == [PlanMade, LinkDetection, PlanMade]
    said = [record.getMessage() for record in caplog.records]
    assert all(line.startswith("adaptra: replica 3: ") for line in said)
    assert any("link 0->1 of pipeline 0, device path: slow since iteration 6" in line for line in said)
    with open(f"/proc/{planner.process_id}/maps") as maps:
        assert "libtorch" not in maps.read(), "it would start slowly"
    assert planner.costs is not None
    assert planner.costs["stages"] == 4


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_another_takes_over_what_runs_from_one_that_is_lost(
    keep: Callable[..., tuple[PlannerKeeper, Diary]], how: signal.Signals
) -> None:
    planner, diary = keep()
    job = MeasuredJob()
    for _ in range(4):
        planner.decide([sealed(job.measure(4.0))])
    first = planner.process_id
    assert first is not None
    assert planner._process is not None
    planner._process.channel.settimeout(0.3)
    os.kill(first, how)
    with pytest.raises(NoDecisionError, match="SIGKILL.*another one is started in 0.05 s"):
        planner.decide([sealed(job.measure(4.0))])
    made = len(diary.events)
    later = [planner.decide([sealed(job.measure(4.0))]) for _ in range(4)]
    assert planner.process_id not in (None, first)
    assert {decision.number for decision in later} == {1}, "what runs is as good as before"
    assert not any(event.adopted for event in diary.events[made:] if isinstance(event, PlanMade))


def test_what_a_stranger_measured_is_refused_and_the_next_round_is_taken(
    keep: Callable[..., tuple[PlannerKeeper, Diary]],
) -> None:
    planner, _ = keep()
    job = MeasuredJob()
    with pytest.raises(NoDecisionError, match="measured in iteration 0 cannot be taken in: .*ADAPTRA_SECRET_FILE"):
        planner.decide([sealed(job.measure(0.0), Seal(b"t" * 32, SEAL.place))])
    assert planner.decide([sealed(job.measure(0.0))]).number == 0


def test_it_ends_with_its_channel() -> None:
    process = ChildProcess("adaptra_megatron.control.planner_process.planner", socket.SOCK_STREAM)
    process.channel.settimeout(30.0)
    send(process.channel, begin())
    process.channel.shutdown(socket.SHUT_WR)
    assert process.end(30.0) == "exit status 0"


def test_a_message_that_is_too_long_ends_the_channel() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"\xff" * 8)
        with pytest.raises(ChannelEndedError, match="announces 4294967295"):
            receive(ours)
        theirs.sendall(b"\x02\0\0\0\0\0\0\0{}")
        with pytest.raises(ChannelEndedError, match="sent an invalid message"):
            receive(ours)
