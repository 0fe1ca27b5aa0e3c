# SPDX-License-Identifier: Apache-2.0
"""A job's store that stops answering holds up no training thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from support.made_up.job import ControlOver, layout
from support.made_up.measured_job import MeasuredJob
from torch.distributed import HashStore

from adaptra_megatron.control.control_loop import DELAY
from adaptra_megatron.control.decision_reader import FIRST_PAUSE_S, LONGEST_PAUSE_S, DecisionReader, decision_key
from adaptra_megatron.control.decisions import Decision
from adaptra_megatron.control.leading import Leading
from adaptra_megatron.control.rounds import PLANNER_KEY, Address
from adaptra_megatron.control.wire_format import encoded


class Idle:
    """A planner that nothing gets to."""

    address = Address("127.0.0.1", 1)

    def decide(self, own: Sequence[tuple[int, bytes]]) -> tuple[int, Decision]:
        return own[-1][0], Decision(1)

    def pass_on(self, iteration: int, decision: bytes) -> None:
        pass

    def close(self) -> None:
        pass


class StoppedStore:
    """A store whose process is stopped: calls do not return before it goes on."""

    def __init__(self, store: HashStore) -> None:
        self._store = store
        self.goes_on = threading.Event()
        self.struck = threading.Event()

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        def stopped(*arguments: Any) -> Any:
            self.struck.set()
            assert self.goes_on.wait(30.0)
            return call(*arguments)

        return stopped


@pytest.fixture
def stopped() -> Iterator[StoppedStore]:
    store = StoppedStore(HashStore())
    yield store
    store.goes_on.set()


def test_a_store_is_looked_into_often_once_the_training_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    control = ControlOver(HashStore())
    store, reader = control.client("here"), DecisionReader(control, "here", layout([[0, 1]], 1), 10.0)
    (measurement, *_others) = MeasuredJob().measure(1.0)
    peek, looked, paused_s = reader._store.peek, threading.Semaphore(0), []

    def seen(key: str) -> bytes | None:
        if key == PLANNER_KEY and reader._looks._pause_s == LONGEST_PAUSE_S:
            looked.release()
        if key == decision_key(DELAY):
            paused_s.append(reader._looks._pause_s)
            if len(paused_s) == 3:
                store.set(key, encoded(Decision(DELAY)))
        return peek(key)

    monkeypatch.setattr(reader._store, "peek", seen)
    reader.post(0, measurement)
    assert looked.acquire(timeout=60.0), "it looks for the planner process's address, ever more seldom"
    assert reader.needed(DELAY).number == DELAY
    reader.close()
    assert paused_s == pytest.approx([FIRST_PAUSE_S, 1.5 * FIRST_PAUSE_S, 1.5**2 * FIRST_PAUSE_S])


def test_the_leaders_training_does_not_wait_for_a_stopped_store(stopped: StoppedStore) -> None:
    leader = Leading(layout([[0, 1]], 0), Idle(), ControlOver(stopped), "exchange")
    leader.post(0, MeasuredJob().measure(1.0)[0])
    decided: list[Decision] = []
    training = threading.Thread(target=lambda: decided.append(leader.decisions.needed(DELAY)), daemon=True)
    training.start()
    training.join(5.0)
    assert stopped.struck.wait(5.0), "the fault did not fire"
    assert decided == [Decision(0)]
    stopped.goes_on.set()
    leader.close()
    for thread in leader._threads:
        thread.join(15.0)
        assert not thread.is_alive(), "it does not end"
