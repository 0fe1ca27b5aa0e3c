# SPDX-License-Identifier: Apache-2.0
"""When a silent delegate is given up, and when its silence is not held against it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack

from hypothesis import given
from hypothesis import strategies as st

from adaptra_megatron.transport.delegate.supervisor import (
    INTERVAL_S,
    LATE_S,
    PATIENCE_S,
    STARTING_S,
    DelegateProcess,
    Heartbeat,
)
from testing.waiting import until


def answering(heartbeat: Heartbeat) -> float:
    """One ping and its answer; returns the time."""
    number = heartbeat.tick(heartbeat.next_s)
    assert number is not None
    heartbeat.answered(number)
    return heartbeat.next_s


def silence_s(heartbeat: Heartbeat, patience_s: float) -> float:
    """How long on-time ticks without an answer go on until it is given up."""
    start_s = heartbeat.next_s
    assert heartbeat.tick(start_s) is not None
    for _ in range(1000):
        now_s = heartbeat.next_s
        heartbeat.tick(now_s)
        if heartbeat.exhausts(patience_s):
            return now_s - start_s
    raise AssertionError("it is never given up")


def test_silence_is_given_up_after_the_patience() -> None:
    heartbeat = Heartbeat(5.0)
    answering(heartbeat)
    assert PATIENCE_S <= silence_s(heartbeat, PATIENCE_S) < PATIENCE_S + INTERVAL_S


def test_a_new_process_has_time_to_start() -> None:
    assert STARTING_S <= silence_s(Heartbeat(5.0), PATIENCE_S) < STARTING_S + INTERVAL_S


def test_more_patience_than_for_a_start_holds_for_the_start_too() -> None:
    assert silence_s(Heartbeat(5.0), 2 * STARTING_S) >= 2 * STARTING_S


def test_one_ping_at_a_time_and_none_early() -> None:
    heartbeat = Heartbeat(5.0)
    assert heartbeat.tick(4.9) is None
    assert heartbeat.tick(5.0) == 1
    assert heartbeat.tick(5.0 + INTERVAL_S) is None, "the first is not answered yet"
    heartbeat.answered(1)
    assert heartbeat.tick(5.0 + INTERVAL_S) is None, "that is before it is due"
    assert heartbeat.tick(5.0 + 2 * INTERVAL_S) == 2


def test_late_ticks_are_not_held_against_it() -> None:
    """As many as there may be: this process was stopped, or did not get to run."""
    heartbeat = Heartbeat(5.0)
    answering(heartbeat)
    heartbeat.tick(heartbeat.next_s)
    for _ in range(100):
        heartbeat.tick(heartbeat.next_s + 10 * LATE_S)
        assert heartbeat.silent_s == 0.0


def test_silence_of_a_delegate_that_waits_for_a_core_does_not_count() -> None:
    heartbeat = Heartbeat(5.0)
    answering(heartbeat)
    heartbeat.tick(heartbeat.next_s)
    for _ in range(100):
        heartbeat.tick(heartbeat.next_s, lambda elapsed_s: elapsed_s == INTERVAL_S)
    assert heartbeat.silent_s == 0.0
    heartbeat.tick(heartbeat.next_s, lambda _: False)
    assert heartbeat.silent_s == INTERVAL_S


def test_a_delegate_that_waits_for_a_core_has_as_long_as_for_its_start() -> None:
    heartbeat = Heartbeat(5.0)
    begun_s = answering(heartbeat)
    heartbeat.tick(heartbeat.next_s)
    while not heartbeat.exhausts(PATIENCE_S):
        heartbeat.tick(heartbeat.next_s, lambda _: True)
    assert STARTING_S <= heartbeat.next_s - begun_s < STARTING_S + 3 * INTERVAL_S


SPINS = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.nice(int(sys.argv[1]))
while True:
    pass
"""


def test_a_process_that_waits_for_a_core_is_told_from_others() -> None:
    asked_s = 0.1
    with ExitStack() as ends:

        def process(program: str, *arguments: str) -> DelegateProcess:
            started = subprocess.Popen([sys.executable, "-c", program, *arguments])
            ends.enter_context(started)
            ends.callback(started.kill)
            found = object.__new__(DelegateProcess)
            found.process, found._ran_s = started, 0.0
            return found

        sleeps, hardly_runs, _runs = process("import time; time.sleep(60)"), process(SPINS, "19"), process(SPINS, "0")

        def waits(each: DelegateProcess) -> bool:
            each.waits_for_a_core(asked_s)
            time.sleep(asked_s)
            return each.waits_for_a_core(asked_s)

        until(lambda: all(waits(hardly_runs) for _ in range(3)))
        until(lambda: not any(waits(sleeps) for _ in range(3)))
        os.kill(hardly_runs.process.pid, signal.SIGSTOP)
        until(lambda: not any(waits(hardly_runs) for _ in range(3)))


@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.booleans()), max_size=60))
def test_who_answers_every_ping_within_the_patience_is_never_given_up(steps: list[tuple[float, bool]]) -> None:
    """However late this process's own ticks are: in each step a tick, then an answer at once or one tick later."""
    heartbeat = Heartbeat(0.0)
    answering(heartbeat)
    unanswered: int | None = None
    for late_s, answers_at_once in steps:
        number = heartbeat.tick(heartbeat.next_s + late_s)
        assert not heartbeat.exhausts(PATIENCE_S)
        if unanswered is not None:
            heartbeat.answered(unanswered)
            unanswered = None
        elif number is not None and answers_at_once:
            heartbeat.answered(number)
        else:
            unanswered = number
