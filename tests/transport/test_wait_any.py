# SPDX-License-Identifier: Apache-2.0
"""Waiting for whichever message comes first, from whichever neighbour. What ranks check is in wait_any_ranks.py."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes import RankResult

from adaptra_megatron.transport.arrival_signal import ArrivalSignal
from adaptra_megatron.transport.message_keys import Direction, MessageKey

RANKS = str(Path(__file__).with_name("ranks") / "wait_any_ranks.py")
KEYS = [MessageKey(0, Direction.ACTIVATION, 0, number) for number in range(3)]


@pytest.mark.parametrize(
    ("path", "scenario"), [("torch", "from_either"), ("shm", "from_either"), ("dual", "paths_change")]
)
def test_any_of_several_messages(start_ranks: Callable[..., object], path: str, scenario: str) -> None:
    start_ranks(3, [RANKS, path, scenario], timeout_s=60)


@pytest.mark.parametrize("path", ["torch", "shm"])
def test_a_neighbour_that_is_lost(start_ranks: Callable[..., list[RankResult]], path: str) -> None:
    results = start_ranks(3, [RANKS, path, "lost"], timeout_s=60, check=False, stop_on_failure=False)
    assert results[2].returncode == -signal.SIGKILL
    for survivor in results[:2]:
        assert survivor.returncode == 0, survivor.output
        assert "survived" in survivor.output


def wait(
    arrival_signal: ArrivalSignal,
    here: set[MessageKey],
    until_s: float,
    attend: Callable[[], float] = lambda: float("inf"),
) -> bool:
    return arrival_signal.wait_for(KEYS[:2], until_s, here.__contains__, attend)


def test_a_bell_is_heard_at_once_and_only_for_what_is_waited_for() -> None:
    arrival_signal, here = ArrivalSignal(), set[MessageKey]()

    def deliver() -> None:
        for key in (KEYS[2], KEYS[1]):
            time.sleep(0.05)
            here.add(key)
            arrival_signal.arrived(key)

    began_s = time.monotonic()
    thread = threading.Thread(target=deliver)
    thread.start()
    assert wait(arrival_signal, here, began_s + 10.0)
    assert 0.1 <= time.monotonic() - began_s < 5.0
    thread.join()
    assert wait(arrival_signal, here, began_s), "what is here already needs no arrival_signal, nor time"


def test_nothing_arrives_until_the_end_and_then_waiting_is_over() -> None:
    arrival_signal = ArrivalSignal()
    began_s = time.monotonic()
    assert not wait(arrival_signal, set(), began_s + 0.1)
    assert 0.1 <= time.monotonic() - began_s < 5.0


def test_a_long_wait_is_attended_to_and_a_failure_there_ends_it() -> None:
    arrival_signal, called = ArrivalSignal(), []

    def attend() -> float:
        called.append(time.monotonic())
        if len(called) == 3:
            raise ValueError("lost")
        return called[-1] + 0.02

    with pytest.raises(ValueError, match="lost"):
        wait(arrival_signal, set(), time.monotonic() + 10.0, attend)
    assert called[-1] - called[0] >= 0.04
