# SPDX-License-Identifier: Apache-2.0
"""The sidecar process that decides for a leading rank: what it says, and what becomes of it when it dies or hangs."""

from __future__ import annotations

import functools
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from support.made_up.job import SECRET
from support.made_up.measured_job import MeasuredJob

from adaptra_megatron.common.child_process import ChildProcess
from adaptra_megatron.common.handshake import send_descriptor
from adaptra_megatron.common.typed_messages import encoded
from adaptra_megatron.control.deciders.plan_state import Layout
from adaptra_megatron.control.decisions import Decision, MadeDecision, TelemetrySection, decision_of
from adaptra_megatron.control.measurements import StageMeasurement
from adaptra_megatron.control.sidecar import planner_client as keeper
from adaptra_megatron.control.sidecar import planner_connections
from adaptra_megatron.control.sidecar.planner_client import Begin, NoDecisionError, PlannerClient, Sealed, receive
from adaptra_megatron.control.sidecar.planner_connections import (
    MOST_AWAITED,
    ChannelEndedError,
    Outbox,
    ReportLink,
    purpose_of,
    send,
)
from adaptra_megatron.telemetry.events import Event, LinkDetection, PlanMade
from adaptra_megatron.telemetry.trace_requests import Iterations
from adaptra_megatron.transport.setup.host_placement import listen_tcp
from testing.waiting import stop

PLACE = "exchange/0"
FOUR = Layout(stages=4, chunks=1, group_size=None)


class EventSink:
    """Keeps events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def log(self, event: Event) -> None:
        self.events.append(event)


def begin(**changed: Any) -> Begin:
    settings: dict[str, Any] = {"policy": "adapt", "max_in_flight": 8.0, "plan_csv": None, "costs_json": None}
    settings |= {"secret": SECRET.hex(), "place": PLACE, "layout": FOUR, "measures_memory": False, "paths": None}
    settings |= {"reporters": (0, 1, 2, 3), "waits_s": 0.2}
    return Begin(**(settings | {"log_level": logging.INFO} | changed))


class Replica:
    """Four ranks: the leading one, and links of those that follow, which are kept before each report."""

    def __init__(self, **settings: Any) -> None:
        self.diary, self.job = EventSink(), MeasuredJob()
        listener, _address = listen_tcp("127.0.0.1")
        requests = TelemetrySection((Iterations(7, 8),))
        self.planner = PlannerClient(begin(), listener, self.diary, lambda: 0, lambda: requests, **settings)
        self.woken = threading.Event()
        self.links = [ReportLink(SECRET, purpose_of(PLACE, rank, 0), 3, self.woken.set) for rank in (1, 2, 3)]

    def report(self, measured: list[StageMeasurement]) -> list[tuple[int, bytes]]:
        """All ranks report one iteration but the leading one, whose report this returns."""
        own, *others = map(encoded, measured)
        iteration = measured[0].iteration
        for link, report in zip(self.links, others, strict=True):
            link.report(iteration, report)
        return [(iteration, own)]

    def decide(self, delay_s: float, rounds: int = 1) -> Decision:
        """All ranks report iterations, whose messages of one link take so long, and a decision follows."""
        own = [report for _ in range(rounds) for report in self.report(self.job.measure(delay_s))]
        return self.take(own).decision

    def take(self, own: list[tuple[int, bytes]]) -> MadeDecision:
        """The same of iterations that are reported already."""
        keeping = threading.Thread(target=self.keep)
        keeping.start()
        try:
            return self.planner.decide(own)
        finally:
            keeping.join()

    def keep(self) -> None:
        """Until all links are connected."""
        until_s = time.monotonic() + 30.0
        for link in self.links:
            if link.connection is not None and select.select([link.connection], [], [], 0.0)[0]:
                link.receive()  # it has ended
            while link.connection is None:
                assert time.monotonic() < until_s, "no connection is made"
                link.keep(self.planner.address)
                time.sleep(0.01)

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.planner.close()


@pytest.fixture
def replica() -> Iterator[Callable[..., Replica]]:
    made: list[Replica] = []

    def make(**settings: Any) -> Replica:
        made.append(Replica(**settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_it_decides_and_says_why(replica: Callable[..., Replica], caplog: pytest.LogCaptureFixture) -> None:
    four = replica(word="replica 3: ")
    planner = four.planner
    with caplog.at_level(logging.DEBUG, logger="adaptra_megatron"):
        decisions = [four.decide(0.0) for _ in range(6)]
        decisions.append(four.decide(4.0, rounds=2))
    assert [decision.number for decision in decisions] == [0, 1, 1, 1, 1, 1, 2]
    assert {decision.telemetry.requests for decision in decisions if decision.telemetry} == {(Iterations(7, 8),)}
    assert [type(event) for event in four.diary.events] == [PlanMade, LinkDetection, PlanMade]
    said = [record.getMessage() for record in caplog.records]
    assert all(line.startswith("adaptra: replica 3: ") for line in said)
    assert any("link 0->1 of pipeline 0, device path: slow since iteration 6" in line for line in said)
    with open(f"/proc/{planner.process_id}/maps") as maps:
        assert "libtorch" not in maps.read(), "it would start slowly"
    assert planner.costs is not None
    assert planner.costs["stages"] == 4


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_another_takes_over_what_runs_from_one_that_is_lost(
    replica: Callable[..., Replica], how: signal.Signals
) -> None:
    four = replica()
    planner = four.planner
    for _ in range(4):
        four.decide(4.0)
    first = planner.process_id
    assert first is not None
    assert planner._process is not None
    planner._process.channel.settimeout(0.3)
    stop(first, how)
    with pytest.raises(NoDecisionError, match="SIGKILL.*another one is started in 0.05 s") as lost:
        planner.decide(four.report(four.job.measure(4.0)))
    assert lost.value.until is None
    made = len(four.diary.events)
    later = [four.decide(4.0) for _ in range(4)]
    assert planner.process_id not in (None, first)
    assert {decision.number for decision in later} == {1}, "what runs is as good as before"
    assert not any(event.adopted for event in four.diary.events[made:] if isinstance(event, PlanMade))


def test_what_is_no_measurement_is_refused_and_the_next_round_is_taken(replica: Callable[..., Replica]) -> None:
    four = replica()
    four.report(four.job.measure(0.0))
    with pytest.raises(
        NoDecisionError, match="measurements of iteration 0 cannot be decoded: .*invalid field"
    ) as refused:
        four.take([(0, b"no measurement")])
    assert refused.value.until == 0
    assert four.decide(0.0).number == 0


def test_a_lost_report_is_not_waited_for_once_its_rank_has_reported_a_later_iteration(
    replica: Callable[..., Replica],
) -> None:
    four = replica()
    link = four.links[-1]
    four.decide(0.0)
    link._recent.clear()
    assert link.connection is not None
    link.connection.shutdown(socket.SHUT_RDWR)
    own = four.report(four.job.measure(0.0))
    link._recent.clear()
    later = four.report(four.job.measure(0.0))
    with pytest.raises(NoDecisionError, match="reports of ranks 3 for iteration 1 have not come"):
        four.take(own)
    assert four.take(later).until == 2


def test_reports_that_are_missing_before_all_ranks_have_connected_are_no_failure(
    replica: Callable[..., Replica],
) -> None:
    four = replica()
    reported = [(iteration, encoded(four.job.measure(0.0)[0])) for iteration in range(MOST_AWAITED + 1)]
    with pytest.raises(NoDecisionError, match="^$") as kept:
        four.planner.decide(reported)
    assert kept.value.until == 0


def test_who_is_waited_for_is_named_and_the_process_is_not_taken_for_dead(
    replica: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    four = replica()
    four.decide(0.0)  # within the usual time: it starts a process
    patience_s = keeper.LATE_S
    monkeypatch.setattr(keeper, "LATE_S", 0.5)
    process_id = four.planner.process_id
    own, *others = map(encoded, four.job.measure(0.0))
    for link, report in list(zip(four.links, others, strict=True))[:-1]:
        link.report(1, report)
    handed_in = [(1, own)]
    for _ in range(60):  # until the others' reports have come, on a machine that does other things
        with pytest.raises(NoDecisionError, match="measurements of ranks .*3 for iteration 1 within 0.5 s") as late:
            four.planner.decide(handed_in)
        assert late.value.until is None
        handed_in = []
        if "of ranks 3 for" in str(late.value):
            break
    assert "of ranks 3 for" in str(late.value)
    assert "cannot connect to {}:{}".format(*four.planner.address) in str(late.value)
    monkeypatch.setattr(keeper, "LATE_S", patience_s)
    four.links[-1].report(1, others[-1])
    assert four.planner.decide([]).until == 1
    assert four.planner.process_id == process_id
    assert keeper._listed(range(keeper._MOST_NAMED + 2)).endswith(", 7 and 2 more")


def arrived(link: ReportLink) -> list[tuple[int, bytes]]:
    """Received messages, of which the first may take longer to arrive than `receive` waits."""
    assert link.connection is not None
    assert select.select([link.connection], [], [], 30.0)[0], "a decision is missing"
    return list(link.receive())


def test_a_decision_gets_to_all_that_follow_and_an_unauthenticated_peer_gets_nothing(
    replica: Callable[..., Replica],
) -> None:
    four = replica()
    four.decide(0.0)
    intruder = ReportLink(b"t" * 32, purpose_of(PLACE, 1, 0), 3, four.woken.set)
    misdirected = ReportLink(SECRET, purpose_of("elsewhere", 1, 0), 3, four.woken.set)
    for link in (intruder, misdirected):
        four.woken.clear()
        link.keep(four.planner.address)
        assert four.woken.wait(30.0)
        link.keep(four.planner.address)
    assert intruder.connection is None
    assert misdirected.connection is not None
    assert misdirected.receive() == []
    assert misdirected.connection is None, "it was let in"
    four.planner.spread(2, b"a decision")
    for link in four.links:
        assert arrived(link) == [(2, b"a decision")]


def test_a_decision_goes_to_all_as_the_process_has_made_it_and_is_not_sent_back_to_it(
    replica: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    four = replica()
    sent: list[tuple[Any, int]] = []
    put = Outbox.put

    def counted(outbox: Outbox, message: Any, along: Sequence[bytes] = ()) -> None:
        sent.append((message, sum(map(len, along))))
        put(outbox, message, along)

    made = [four.take(four.report(four.job.measure(delay_s))) for delay_s in (0.0, 0.0)]
    assert made[1].decision.order is not None
    assert decision_of(made[1].packet) == made[1].decision
    monkeypatch.setattr(Outbox, "put", counted)
    for iteration, each in enumerate(made, start=2):
        four.planner.spread(iteration, each.packet)
    four.planner.spread(4, b"made by the leader")
    assert sent == [
        (Sealed(iteration=2, made=1), 0),
        (Sealed(iteration=3, made=2), 0),
        (Sealed(iteration=4), len(b"made by the leader")),
    ]
    expected = [(2, made[0].packet), (3, made[1].packet), (4, b"made by the leader")]
    for link in four.links:
        received: list[tuple[int, bytes]] = []
        while len(received) < len(expected):
            received += arrived(link)
        assert received == expected
    process_id = four.planner.process_id
    assert process_id is not None
    os.kill(process_id, signal.SIGKILL)
    with pytest.raises(NoDecisionError):
        four.planner.decide(four.report(four.job.measure(0.0)))
    four.decide(0.0)
    four.planner.spread(5, made[1].packet)
    assert sent[-1] == (Sealed(iteration=5), len(made[1].packet)), "another process has not made it"


def test_a_process_that_does_not_read_holds_up_no_thread_that_publishes(
    replica: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread waits for its plan meanwhile, and does other things. Later the process reads whole messages, the first
    ones and the latest."""
    monkeypatch.setattr(planner_connections, "_MOST_UNSENT_NBYTES", 1 << 17)
    four = replica()
    four.decide(0.0)
    process_id = four.planner.process_id
    assert process_id is not None
    stop(process_id)
    decided: list[MadeDecision] = []
    own = four.report(four.job.measure(0.0))
    planning = threading.Thread(target=lambda: decided.append(four.planner.decide(own)))
    planning.start()
    interjected, until_s = threading.Event(), time.monotonic() + 20.0
    while not four.planner.interject(interjected.set):
        assert time.monotonic() < until_s, "nothing waits for its plan"
    assert interjected.wait(20.0)
    packets = [bytes([number]) * 10_000 for number in range(100)]  # more than the channel and the outbox take
    published = threading.Thread(
        target=lambda: [four.planner.spread(*each) for each in enumerate(packets)], daemon=True
    )
    published.start()
    published.join(20.0)
    outbox = four.planner._outbox
    assert outbox is not None
    full = not outbox.has_room()
    os.kill(process_id, signal.SIGCONT)
    planning.join(30.0)
    assert not published.is_alive(), "it waits for the process"
    assert full, "the fault did not fire"
    assert [made.until for made in decided] == [1], "its patience is not over"
    assert four.planner.decide(four.report(four.job.measure(0.0))).until == 2, "it has read all that was sent before"
    four.planner.spread(100, b"the latest")
    for link in four.links:
        received: list[tuple[int, bytes]] = []
        while (100, b"the latest") not in received:
            received += arrived(link)
        kept = [(number, packets[number]) for number, _ in received[:-1]]
        assert received[:-1] == kept
        assert [number for number, _ in kept] == list(range(len(kept))), "those that found no room are the last"
        assert 0 < len(kept) < len(packets)
    assert four.planner.process_id == process_id


def test_what_is_interjected_is_called_once_even_as_a_wait_ends() -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(20.0)
    called: list[int] = []
    with ours, theirs:
        outbox = Outbox(ours)
        assert not outbox.interject(lambda: called.append(-1)), "no thread waits"

        def wait() -> None:
            while True:
                outbox.wait_readable()
                if ours.recv(1) == b"e":
                    return

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        accepted = []
        for number in range(3000):
            if number % 3 == 0:
                theirs.send(b"m")
            if outbox.interject(functools.partial(called.append, number)):
                accepted.append(number)
        until_s = time.monotonic() + 20.0
        while called != accepted:  # the thread waits, so nothing else wakes it
            assert time.monotonic() < until_s, f"{len(called)} of {len(accepted)} are called"
            time.sleep(0.01)
        assert accepted
        theirs.send(b"e")
        waiting.join(20.0)
        assert not waiting.is_alive()
        assert not outbox.interject(lambda: called.append(-1))
        outbox.close()


def test_it_ends_with_its_channel() -> None:
    process = ChildProcess("adaptra_megatron.control.sidecar.planner_process", socket.SOCK_STREAM)
    process.channel.settimeout(30.0)
    with listen_tcp("127.0.0.1")[0] as listener:
        send_descriptor(process.channel, listener.fileno())
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
