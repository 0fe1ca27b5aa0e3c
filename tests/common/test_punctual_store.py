# SPDX-License-Identifier: Apache-2.0
"""A request that the job's store does not answer ends in time, and is the last that is made."""

from __future__ import annotations

import threading

import pytest
from torch.distributed import HashStore

from adaptra_megatron.common.control_store import DeadlineStore, SilentStoreError


class StoppedStore:
    """Answers no request before it is let go on."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.asked = 0

    def get(self, key: str) -> bytes:
        self.asked += 1
        assert self.goes_on.wait(30.0)
        return key.encode()


def test_requests_are_answered_as_the_store_answers_them() -> None:
    store = DeadlineStore(HashStore(), 10.0)
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert store.add("count", 2) == 2
    with pytest.raises(TypeError):
        store.get(None)
    store.close()


def test_a_store_that_stands_still_is_an_error_in_time_and_from_then_on() -> None:
    stopped = StoppedStore()
    store = DeadlineStore(stopped, 0.2)
    for _ in range(2):
        with pytest.raises(SilentStoreError, match="the job's store has not answered for 0.2 s"):
            store.get("key")
    assert stopped.asked == 1
    stopped.goes_on.set()
    with pytest.raises(SilentStoreError):
        store.get("key")
    store.close()
