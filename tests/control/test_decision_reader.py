# SPDX-License-Identifier: Apache-2.0
"""How often a rank asks the job's store for what is not there yet, and what it hands in meanwhile."""

from __future__ import annotations

import threading
import time

from support.made_up.job import SECRET
from support.made_up.measured_job import MeasuredJob
from torch.distributed import HashStore

from adaptra_megatron.authentication.sealed_store import SealedStore, peek
from adaptra_megatron.control.decision_reader import DecisionReader, Watch
from adaptra_megatron.control.rounds import count_key


def test_what_comes_at_about_the_same_time_again_and_again_is_looked_for_then() -> None:
    watch, looks = Watch(threading.Event()), []
    for _ in range(12):
        begun_s, count = time.monotonic(), 0

        def look(begun_s: float = begun_s) -> bool | None:
            nonlocal count
            count += 1
            return time.monotonic() - begun_s > 0.1 or None

        assert watch.wait(look)
        looks.append(count)
    assert looks[0] > 3, "nothing was known of it"
    assert sum(looks[2:]) <= 4 * len(looks[2:])


def test_what_is_late_is_looked_for_at_once() -> None:
    watch, begun_s = Watch(threading.Event()), time.monotonic()
    assert watch.wait(lambda: time.monotonic() - begun_s > 1.8 or None)
    late_s = time.monotonic()
    assert watch.wait(lambda: True, late=True)
    assert time.monotonic() - late_s < 1.5, "the usual time was waited for"


def test_a_limit_ends_the_wait() -> None:
    assert Watch(threading.Event()).wait(lambda: None, limit_s=0.05) is None


def test_what_is_measured_is_handed_in_while_a_decision_is_waited_for() -> None:
    store = SealedStore(HashStore(), SECRET, "here")
    reader, measured = DecisionReader(store, 10.0, "0.0"), MeasuredJob().measure(1.0)[0]
    until_s = time.monotonic() + 30.0
    for iteration in range(3):
        reader.post(iteration, measured)
        while peek(store, count_key(iteration)) != b"+":
            assert time.monotonic() < until_s, f"iteration {iteration} is not handed in: no decision has come"
            time.sleep(0.01)
    reader.close()
