# SPDX-License-Identifier: Apache-2.0
"""A request that the job's store does not answer ends in time, and is the last that is made."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore
from torch.distributed import HashStore

from adaptra_megatron.common.control_store import ControlStore, DeadlineStore, SilentStoreError
from adaptra_megatron.common.membership import MembershipRecords
from adaptra_megatron.common.sealed_store import SealedStore
from testing.waiting import stop, until

SERVES = """
import sys
from adaptra_megatron.elastic.launch.endpoint import serve_store

store = serve_store("127.0.0.1", 0, 30.0)
print(store.port, flush=True)
sys.stdin.read()
"""


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
    store = DeadlineStore(HashStore, 10.0)
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert store.add("count", 2) == 2
    with pytest.raises(TypeError):
        store.get(None)
    store.close()


def test_a_store_that_stands_still_is_an_error_in_time_and_from_then_on() -> None:
    stopped = StoppedStore()
    store = DeadlineStore(lambda: stopped, 10.0)
    store._timeout_s = 0.2  # once it is connected
    for _ in range(2):
        with pytest.raises(SilentStoreError, match="the job's store has not answered for 0.2 s"):
            store.get("key")
        until(lambda: stopped.asked)
    assert stopped.asked == 1
    stopped.goes_on.set()
    with pytest.raises(SilentStoreError):
        store.get("key")
    store.close()


@pytest.fixture
def stopped_server() -> Iterator[TCPStore]:
    """The client of a server that is stopped since."""
    process = subprocess.Popen([sys.executable, "-c", SERVES], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        store = TCPStore("127.0.0.1", int(process.stdout.readline()), timeout=timedelta(seconds=30.0))
        stop(process.pid)
        yield store
    finally:
        process.kill()
        process.communicate()


@pytest.mark.timeout(60)
def test_connecting_to_a_server_that_is_stopped_is_an_error_in_time(stopped_server: TCPStore) -> None:
    """Its host accepts the connection, and torch waits for an answer without end."""
    with pytest.raises(SilentStoreError, match="has not answered for 0.3 s"):
        ControlStore(stopped_server, b"secret", "job").client("place", 0.3)
    records = MembershipRecords(SealedStore(stopped_server, b"secret", "place"))
    with pytest.raises(SilentStoreError, match="has not answered for 0.2 s"), records.lent(0.2):
        pass


def test_an_error_of_connecting_is_raised_and_ends_the_thread() -> None:
    def connect() -> HashStore:
        raise RuntimeError("the server has ended")

    with pytest.raises(RuntimeError, match="the server has ended"):
        DeadlineStore(connect, 10.0)
    with closing(DeadlineStore(HashStore, 10.0)) as store:
        assert isinstance(store.client, HashStore)
