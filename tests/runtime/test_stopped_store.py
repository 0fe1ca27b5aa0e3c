# SPDX-License-Identifier: Apache-2.0
"""A job's store that stops answering holds up no training thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed import HashStore

from adaptra_megatron.runtime.decision_reader import DecisionReader, decision_key
from adaptra_megatron.runtime.decisions import Decision
from adaptra_megatron.runtime.exchange import DELAY, _Leader
from adaptra_megatron.runtime.membership import Membership
from adaptra_megatron.transport.tagged_json import packed


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


def test_a_decision_is_read_soon_once_the_training_waits_for_it() -> None:
    store = HashStore()
    reader = DecisionReader(store, 10.0)
    reader.expect(DELAY)
    time.sleep(1.5)  # by now it looks four times per second
    took_s = []
    for iteration in range(DELAY, DELAY + 3):
        threading.Timer(0.02, store.set, (decision_key(iteration), packed(Decision(iteration, None)))).start()
        begun_s = time.monotonic()
        assert reader.needed(iteration).number == iteration
        took_s.append(time.monotonic() - begun_s)
        reader.expect(iteration + 1)
        time.sleep(0.8)
    reader.close()
    assert min(took_s) < 0.1, took_s


def test_the_leaders_training_does_not_wait_for_a_stopped_store(stopped: StoppedStore) -> None:
    membership = Membership(0, 2, 0, 0.0, "token")
    leader = _Leader(membership, lambda rounds: Decision(1, None), stopped, stopped)
    decided: list[Decision] = []
    training = threading.Thread(target=lambda: decided.append(leader.decisions.needed(DELAY)), daemon=True)
    training.start()
    training.join(5.0)
    assert stopped.struck.wait(5.0), "the fault did not fire"
    assert decided == [Decision(0, None)]
    stopped.goes_on.set()
    begun_s = time.monotonic()
    leader.close()
    assert time.monotonic() - begun_s < 2.0, "its threads do not end"
