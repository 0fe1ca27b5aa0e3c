# SPDX-License-Identifier: Apache-2.0
"""Parts of the fault campaign: its plan, its view of processes, and that its report sees what is wrong."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptra_megatron.common.handshake import CHALLENGE_NBYTES
from adaptra_megatron.transport._ring import Ring
from campaigns.soak_driver import Done
from campaigns.soak_processes import Process, delegate_of, leftovers, pending, sockets, state
from campaigns.soak_report import TrainingRecord, longest_pause_s, percentile
from testing.faults.network import corrupted_rings
from testing.faults.network.corrupted_rings import corrupt_one_of, in_use, rings_of
from testing.faults.network.unauthenticated_peers import flood
from testing.soak.soak_plan import (
    HASTY_PATHS,
    Campaign,
    Kind,
    iterations,
    make_plan,
    read_plan,
    write_plan,
)
from testing.soak.soak_progress import Progress
from testing.waiting import until

AT_ONCE = {Kind.KILL_DELEGATE, Kind.KILL_STORE, Kind.CORRUPT_RING, Kind.SIGNAL_DELEGATE}
COUNTS = st.dictionaries(st.sampled_from(Kind), st.integers(0, 5))


@given(st.text(max_size=5), st.integers(2, 6), COUNTS, st.integers(1, 9))
def test_a_plan_has_what_was_asked_for(seed: str, stages: int, counts: dict[Kind, int], spacing: int) -> None:
    plan = make_plan(seed, stages, counts, spacing)
    assert plan == make_plan(seed, stages, counts, spacing)
    for kind in Kind:
        assert sum(fault.kind is kind for fault in plan) == counts.get(kind, 0)
    for before, after in zip(plan, plan[1:], strict=False):
        assert spacing / 2 - 1 < after.iteration - before.iteration <= 1.5 * spacing + 1
    for fault in plan:
        assert 0 <= fault.stage < stages
        assert 0 <= fault.peer < stages
        assert abs(fault.stage - fault.peer) == 1
        assert fault.stage == fault.link[fault.kind is Kind.FAILING_RECEIVES]
        assert fault.iteration < iterations(plan)
        assert (fault.duration_s == 0) == (fault.kind in AT_ONCE)
    if counts.get(Kind.KILL_STORE):
        assert plan[0].kind is Kind.KILL_STORE, "it does not happen without a store"


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    plan = make_plan("seed", 4, dict.fromkeys(Kind, 2), 3)
    write_plan(tmp_path / "plan.json", plan)
    assert read_plan(tmp_path / "plan.json") == plan


@pytest.mark.parametrize("transports", [("tcp",), ("tcp", "shm"), ("tcp", "shm", "auto")])
def test_the_trainings_of_a_round_share_its_faults(transports: tuple[str, ...]) -> None:
    campaign = Campaign(transports=transports, kills=100, stops=51, path_faults=61)
    for number in range(3):
        assert list(campaign.trainings(number))[:-1] == list(transports)
    counts = [campaign.counts(index) for index, _name in enumerate(campaign.trainings(0))]
    assert not any(count and kind.needs_store for kind, count in counts[-1].items()), "there is none"
    total = {kind: sum(count[kind] for count in counts) for kind in Kind}
    assert total[Kind.KILL_DELEGATE] == 100
    assert total[Kind.STOP_DELEGATE] + total[Kind.STOP_RANK] == 51
    assert sum(total[kind] for kind in Kind if kind.inside) == 61
    assert (total[Kind.KILL_STORE], counts[-1][Kind.KILL_STORE]) == (1, 1)
    assert sum(total.values()) >= 235


def test_progress_is_seen_by_others(tmp_path: Path) -> None:
    writer, reader = Progress(tmp_path, 3), Progress(tmp_path, 3)
    assert [reader.process_id(stage) for stage in range(3)] == [0, 0, 0]
    writer.set(1, 7)
    assert [reader.process_id(stage) for stage in range(3)] == [0, os.getpid(), 0]
    assert [reader.iteration(stage) for stage in range(3)] == [0, 7, 0]
    writer.close()
    reader.close()


def test_pauses() -> None:
    assert longest_pause_s([1.0, 2.0, 5.0, 5.5], from_s=1.5, until_s=9.0) == 3.0
    assert longest_pause_s([1.0, 2.0, 5.0, 5.5], from_s=1.5, until_s=1.9) == 0.5, "what begins later is the next one's"
    assert longest_pause_s([1.0], from_s=1.5, until_s=9.0) == 0.0
    assert longest_pause_s([1.0, 2.0, 5.0, 5.5], 1.5, 9.0, stops=[(1.0, 1.75), (2.5, 4.75)]) == 0.75, (
        "of which 2.25 stopped"
    )
    assert [percentile([3.0, 1.0, 2.0], fraction) for fraction in (0.0, 0.5, 0.99, 1.0)] == [1.0, 2.0, 3.0, 3.0]
    assert percentile([], 0.5) == 0.0


def record() -> TrainingRecord:
    """A small pipeline of two stages in which a killed delegate and a silent path did no harm."""
    kill, silent = make_plan("", 2, {Kind.KILL_DELEGATE: 1}, 3)[0], make_plan("", 2, {Kind.SILENT_PATH: 1}, 3)[0]
    silent = replace(silent, stage=0, peer=1)
    held = {"descriptors": 10, "rings": 0}
    rank: dict[str, Any] = {"messages": 3, "begun": [], "held_before": held, "held_after": {**held}}
    begun = [{"link": [0, 1], "mode": "silent", "at_s": 2.0}]
    ranks = [
        {**rank, "begun": begun, "arrivals": {"1": [1.0, 1.6, 2.1]}, "paths": {"1": {**HASTY_PATHS}}},
        {**rank, "arrivals": {"0": [1.0, 1.7, 3.2]}, "paths": {"0": {**HASTY_PATHS}}},
    ]
    return TrainingRecord("tcp", (kill, silent), (Done(kill, 1.1, 1.1),), ranks)


def test_a_record_without_fault_has_no_problems() -> None:
    good = record()
    good.check(messages=6)
    assert good.problems == []
    assert [(each.kind, round(each.pause_s, 3)) for each in good.recoveries()] == [
        (Kind.KILL_DELEGATE, 1.5),
        (Kind.SILENT_PATH, 1.2),
    ]


def _lose(bad: TrainingRecord) -> None:
    bad.ranks[1]["arrivals"]["0"].pop()


def _double(bad: TrainingRecord) -> None:
    bad.ranks[1]["arrivals"]["0"].append(3.3)


def _stand(bad: TrainingRecord) -> None:
    bad.ranks[1]["arrivals"]["0"][-1] += 1.0


def _leak(bad: TrainingRecord) -> None:
    bad.ranks[0]["held_after"]["rings"] = 1


def _not_happen(bad: TrainingRecord) -> None:
    bad.ranks[0]["begun"].clear()


def _rest_long(bad: TrainingRecord) -> None:
    bad.ranks[1]["paths"]["0"]["longest_rest_s"] = 60.0


def _not_say(bad: TrainingRecord) -> None:
    bad.ranks[0]["paths"].clear()


@pytest.mark.parametrize(
    ("break_it", "problem"),
    [
        (_lose, "6 messages were received in 5 waits instead of 6"),
        (_double, "6 messages were received in 7 waits instead of 6"),
        (_stand, "a link stood for 2.20 s"),
        (_leak, "stage 0 holds more after the training than before: {'rings': '0 -> 1'}"),
        (_not_happen, "0 of 1 faults happened: silent device path"),
        (_rest_long, "link 1>0 ran with {'longest_rest_s': 60.0} instead of"),
        (_not_say, "link 0>1 ran with {'first_rest_s': None, "),
    ],
)
def test_a_record_shows_what_is_wrong(break_it: Callable[[TrainingRecord], None], problem: str) -> None:
    bad = record()
    break_it(bad)
    bad.check(messages=6)
    assert any(problem in each for each in bad.problems), bad.problems


def test_processes_and_what_they_leave_behind() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    try:
        (ports,) = ({inode: each} for inode, each in sockets(os.getpid())[0].items() if each == port)
        assert leftovers([sleeper.pid], ports, ["@adaptra-none"]) == [
            f"process {sleeper.pid} of session {sleeper.pid} still runs",
            f"a process still listens on port {port}",
        ]
        assert delegate_of(os.getpid()) is None
        with Process(sleeper.pid) as process:
            process.send(signal.SIGSTOP)
            assert process.stopped(5.0)
            process.send(signal.SIGCONT)
            assert not process.ended(0.0)
            process.send(signal.SIGKILL)
            assert process.ended(5.0)
    finally:
        sleeper.kill()
        sleeper.communicate()
        listener.close()
    assert state(sleeper.pid) == ""
    with socket.create_server(("127.0.0.1", port)):
        assert leftovers([sleeper.pid], ports, []) == [], "another has the port"


def test_a_signal_that_is_blocked_is_pending() -> None:
    script = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP}); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert not pending(process.pid, signal.SIGHUP)
        process.send_signal(signal.SIGHUP)
        assert pending(process.pid, signal.SIGHUP)
        assert not pending(process.pid, signal.SIGTERM)
        process.communicate(b"\n")
    assert process.returncode == 0
    assert not pending(process.pid, signal.SIGHUP)


def test_a_ring_in_use_is_corrupted_from_outside() -> None:
    used, closed = Ring.create(4, 4096), Ring.create(4, 4096)
    closed.close()
    script = [sys.executable, "-c", "input()"]
    with subprocess.Popen(script, stdin=subprocess.PIPE, pass_fds=[used.fd, closed.fd]) as holder:
        inode, other = (os.fstat(ring.fd).st_ino for ring in (used, closed))
        assert set(rings_of(holder.pid)) == {inode, other}
        before = os.pread(used.fd, 4096, 0)
        assert {corrupt_one_of(holder.pid, number, "released", 2) for number in (0, 1)} == {inode}
        after = os.pread(used.fd, 4096, 0)
        assert [offset for offset in range(4096) if before[offset] != after[offset]] == [128]
        used.close()
        assert corrupt_one_of(holder.pid, 0, "magic", 0) is None
        holder.communicate(b"\n")
    assert rings_of(holder.pid) == {}


@pytest.mark.parametrize("successor", ["socket", "pipe", "file", "nothing"])
def test_what_has_the_number_of_a_closed_ring_is_left_alone(
    successor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process closes a ring between the look at its descriptors and the opening: the number may be used again."""
    ring = Ring.create(4, 4096)
    number = os.dup(ring.fd)
    inode, path = os.fstat(number).st_ino, Path(f"/proc/self/fd/{number}")
    monkeypatch.setattr(corrupted_rings, "rings_of", lambda pid: {inode: path})
    assert in_use(os.getpid(), inode)
    other = tmp_path / "other"
    other.write_bytes(bytes(8192))
    sockets, pipes, file = socket.socketpair(), os.pipe(), os.open(other, os.O_RDWR)
    opened = [sockets[0].fileno(), *pipes, file]
    try:
        os.close(number)
        if successor != "nothing":
            os.dup2({"socket": opened[0], "pipe": pipes[0], "file": file}[successor], number)
            opened.append(number)
        assert not in_use(os.getpid(), inode)
        assert corrupt_one_of(os.getpid(), 0, "magic", 0) is None
        assert not any(other.read_bytes())
    finally:
        for descriptor in opened[1:]:
            os.close(descriptor)
        for end in sockets:
            end.close()


def test_unauthenticated_peers_are_answered_by_a_challenge_alone() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1000) as listener:
        port = listener.getsockname()[1]
        assert flood([port], [], 0.1) == 0, "who is not answered"
        threading.Thread(target=_challenge, args=(listener,), daemon=True).start()
        until(lambda: flood([port], [], 0.3) > 10, "its connections are not answered")
        listener.shutdown(socket.SHUT_RDWR)
    assert flood([port], ["@adaptra-none"], 0.1) == 0, "no one listens there"


def _challenge(listener: socket.socket) -> None:
    kept = []
    with contextlib.suppress(OSError):
        while True:
            kept.append(listener.accept()[0])
            kept[-1].send(bytes(CHALLENGE_NBYTES))
