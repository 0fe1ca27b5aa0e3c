# SPDX-License-Identifier: Apache-2.0
"""Clocks that run apart while a job runs: asked for in the background, over real connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from adaptra_megatron.common.handshake import (
    JOB_NBYTES,
    MOST_UNPROVEN,
    SECRET_NBYTES,
    SESSION_NBYTES,
    Purpose,
    connect,
)
from adaptra_megatron.control.clocks import MAX_DRIFT, ClockFollower, ClockLine, ClockServer, RelatedClock
from testing.waiting import until

RANKS = str(Path(__file__).with_name("clock_ranks.py"))
SECRET = secrets.token_bytes(SECRET_NBYTES)
wait_for = partial(until, limit_s=60.0)
UNKNOWN = ClockLine(0.0, 0.0, 0.0, float("inf"), MAX_DRIFT)


def drifting(offset_s: float, drift: float) -> Callable[[], float]:
    """A decorated clock."""
    zero_s = time.monotonic()
    return lambda: offset_s + (1.0 + drift) * (time.monotonic() - zero_s)


def listening() -> tuple[socket.socket, tuple[str, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, listener.getsockname()


@contextmanager
def serving(clock: Callable[[], float]) -> Iterator[tuple[str, int]]:
    listener, address = listening()
    server = ClockServer(listener, SECRET, clock)
    try:
        yield address
    finally:
        server.close()


def test_a_clock_with_offset_and_drift_is_followed() -> None:
    remote, local = drifting(1000.0, 300e-6), drifting(-5.0, 0.0)
    with serving(remote) as address:
        follower = ClockFollower(address, SECRET, UNKNOWN, clock=local, interval_s=0.05)
        clock = RelatedClock(0.0, follower=follower)
        wait_for(lambda: follower.rounds >= 30)
        off_s = []
        for _ in range(20):
            before_s, there_s, after_s = local(), remote(), local()
            off_s.append(abs((before_s + after_s) / 2 + clock.offset_at(after_s) - there_s) - (after_s - before_s))
            time.sleep(0.005)
        clock.close()
    assert sorted(off_s)[10] < 1e-3
    wait_for(lambda: not any(thread.name == "adaptra-clock" for thread in threading.enumerate()))


def test_who_does_not_know_the_secret_is_told_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with serving(time.monotonic) as address, caplog.at_level(logging.WARNING):
        intruder = ClockFollower(address, bytes(SECRET_NBYTES), UNKNOWN, name="rank 7", interval_s=0.01)
        friend = ClockFollower(address, SECRET, UNKNOWN, interval_s=0.01)
        wait_for(lambda: friend.rounds > 3 and bool(caplog.records))
        intruder.close()
        friend.close()
    assert intruder.rounds == 0
    assert intruder.line == UNKNOWN
    (said,) = caplog.messages
    assert said.startswith(f"adaptra: rank 7: the clock of its pipeline's first stage does not answer at {address[0]}")


def test_junk_and_silence_hold_up_no_peer() -> None:
    with serving(time.monotonic) as address:
        silent = socket.create_connection(address)
        junk = socket.create_connection(address)
        junk.sendall(b"GET / HTTP/1.1\r\n\r\n" * 20)
        follower = ClockFollower(address, SECRET, UNKNOWN, interval_s=0.01)
        wait_for(lambda: follower.rounds > 3)
        follower.close()
        silent.close()
        junk.close()


KNOCK = """import socket, sys
address, kept = ("127.0.0.1", int(sys.argv[1])), []
for _ in range(400):
    kept.append(socket.create_connection(address))
print("all", flush=True)
sys.stdin.read()
"""


def test_any_number_of_silent_peers_takes_few_descriptors() -> None:
    with serving(time.monotonic) as address:
        before = len(os.listdir("/proc/self/fd"))
        command = [sys.executable, "-c", KNOCK, str(address[1])]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as intruders:
            assert intruders.stdout is not None
            assert intruders.stdout.readline() == b"all\n"
            follower = ClockFollower(address, SECRET, UNKNOWN, interval_s=0.01)
            wait_for(lambda: follower.rounds > 3)
            held = len(os.listdir("/proc/self/fd")) - before
            follower.close()
            intruders.communicate(timeout=10.0)
        assert held < MOST_UNPROVEN + 16


def test_a_clock_survives_a_time_without_descriptors(caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with serving(time.monotonic) as address, socket.socket() as knocks:
        try:
            with caplog.at_level(logging.WARNING):
                resource.setrlimit(resource.RLIMIT_NOFILE, (knocks.fileno(), hard))
                knocks.connect(address)
                wait_for(lambda: "cannot accept connections" in caplog.text)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        follower = ClockFollower(address, SECRET, UNKNOWN, interval_s=0.01)
        wait_for(lambda: follower.rounds > 3)
        follower.close()


def test_a_clock_answers_no_peer_with_another_purpose() -> None:
    with serving(time.monotonic) as address, socket.create_connection(address) as link:
        link.setblocking(False)
        asyncio.run(connect(link, SECRET, Purpose(b"p" * JOB_NBYTES, 0, 1, b"s" * SESSION_NBYTES, 0, 1), 5.0))
        link.settimeout(5.0)
        link.sendall(b"clock?\0\0")
        with contextlib.suppress(ConnectionError):  # hung up on with the question unread
            assert link.recv(16) == b""


def test_a_lost_server_leaves_the_latest_relation_and_is_found_again() -> None:
    remote = drifting(50.0, 0.0)
    with serving(remote) as address:
        follower = ClockFollower(address, SECRET, UNKNOWN, interval_s=0.01)
        wait_for(lambda: follower.rounds > 3)
    rounds, line = follower.rounds, follower.line
    time.sleep(0.1)
    assert follower.rounds <= rounds + 1
    assert follower.line.offset_at(time.monotonic()) == pytest.approx(line.offset_at(time.monotonic()), abs=1e-2)
    server = ClockServer(socket.create_server(address), SECRET, remote)
    wait_for(lambda: follower.rounds > rounds + 3)
    follower.close()
    server.close()


def test_closing_is_prompt_whatever_the_state(caplog: pytest.LogCaptureFixture) -> None:
    """Within less than an answer is waited for; the fastest of several, on a machine that does other things."""
    took_s = []
    for _ in range(5):
        listener, address = listening()  # accepts no connection
        follower = ClockFollower(address, SECRET, UNKNOWN, interval_s=60.0)
        wait_for(lambda follower=follower: follower.connected)
        server = ClockServer(socket.create_server(("127.0.0.1", 0)), SECRET)
        begun_s = time.monotonic()
        for clock in (RelatedClock(0.0, follower=follower), RelatedClock(0.0, server=server), RelatedClock(3.0)):
            clock.close()
            clock.close()
        took_s.append(time.monotonic() - begun_s)
        listener.close()
    assert min(took_s) < 1.5
    assert not caplog.messages, "an end that closes reports no loss"
    assert RelatedClock(3.0).offset_at(1e9) == 3.0


@pytest.mark.timeout(60)
def test_one_way_times_stay_right_between_processes_whose_clocks_drift(start_ranks: Callable[..., Any]) -> None:
    start_ranks(3, [RANKS], timeout_s=40.0)
