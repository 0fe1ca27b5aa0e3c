# SPDX-License-Identifier: Apache-2.0
"""What one epoch of a job puts into its store, and the groups that it makes there, are no other's."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.made_up.job import SECRET

from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.common.gathering import epoch_group
from adaptra_megatron.common.sealed_store import TamperedError


def test_epochs_and_jobs_have_keys_of_their_own() -> None:
    served = dist.HashStore()
    ours = ControlStore(served, SECRET, "job", 0)
    ours.client("clocks").set("a", b"content")
    assert ours.client("clocks").get("a") == b"content"
    others = [ControlStore(served, SECRET, "job", 1), ControlStore(served, SECRET, "another", 0)]
    places = [(other, "clocks") for other in others] + [(ours, "exchange")]
    for other, place in places:
        assert not other.client(place).check(["a"])
        other.unsealed(place).set("a", ours.unsealed("clocks").get("a"))
        with pytest.raises(TamperedError):
            other.client(place).get("a")


def test_a_group_is_made_by_its_members_alone_and_again_in_the_next_epoch() -> None:
    served, ranks = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), (7, 3)

    def meet(rank: int, epoch: int) -> Any:
        return epoch_group(ControlStore(served, SECRET, "job", epoch), "pair", ranks, rank, 20.0)

    with ThreadPoolExecutor(2) as members:
        for epoch in range(2):
            first, second = members.map(meet, ranks, [epoch] * 2)
            came = torch.zeros(1)
            received = second.recv([came], 0, 0)
            first.send([torch.tensor([epoch + 1.0])], 1, 0).wait()
            received.wait()
            assert came.item() == epoch + 1.0


def test_a_member_that_does_not_come_is_an_error_in_time() -> None:
    control = ControlStore(dist.HashStore(), SECRET, "job")
    with pytest.raises(RuntimeError):
        epoch_group(control, "pair", (0, 1), 0, 0.2)


@pytest.mark.parametrize("times", [1, 1000])
def test_a_name_that_is_not_found_is_looked_up_again_in_time(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connect, failures = socket.create_connection, iter(range(times))

    def fail(address: tuple[str, int], timeout_s: float) -> socket.socket:
        if next(failures, None) is not None:
            raise socket.gaierror("Temporary failure in name resolution")
        return connect(address, timeout_s)

    monkeypatch.setattr(socket, "create_connection", fail)
    control = ControlStore(served, SECRET, "job")
    if times == 1:
        control.reach(20.0)
        assert next(failures, None) is None
        return
    with pytest.raises(RuntimeError, match="cannot be reached: Temporary failure"):
        control.reach(0.3)


def test_a_client_is_lent_again_unless_it_failed() -> None:
    class Served:
        """Counts its clients."""

        clients = 0

        def clone(self) -> Any:
            self.clients += 1
            return dist.HashStore()

    served = Served()
    control = ControlStore(served, SECRET, "job")
    for epoch in range(3):
        with control.in_generation(epoch).lent("here", 20.0) as store:
            assert not store.check(["a"]), "each epoch has keys of its own"
            store.set("a", b"content")
            assert store.get("a") == b"content"
    assert served.clients == 1
    with control.lent("one", 20.0), control.lent("other", 20.0):
        assert served.clients == 2, "two at once"
    with pytest.raises(RuntimeError, match="late"), control.lent("here", 20.0):
        raise RuntimeError("its answer may come late")
    with control.lent("one", 20.0), control.lent("other", 20.0):
        assert served.clients == 3


def test_what_is_not_there_is_not_waited_for() -> None:
    control = ControlStore(dist.HashStore(), SECRET, "job")
    store = control.client("here")
    assert store.peek("a") is None
    assert not store.check(["a"])
    store.set("b", b"?")
    assert store.peek("b") == b"?"


def test_a_client_of_a_server_that_has_ended_is_an_error_at_once() -> None:
    """Torch tries for the store's own timeout, in which the rank that served it may have named its error long ago."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    timeout = timedelta(seconds=30)
    control = ControlStore(dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timeout), SECRET, "job")
    control.client("place").set("key", b"value")
    del server
    begun_s = time.monotonic()
    with pytest.raises(RuntimeError, match="the job's store at 127.0.0.1:.* cannot be reached"):
        control.client("place")
    assert time.monotonic() - begun_s < timeout.total_seconds() / 2
