# SPDX-License-Identifier: Apache-2.0
"""One end of links over NCCL's own host code, on made-up CUDA: nccl_host_ranks.py CASE RANK DIRECTORY.

Each rank has one of the host's two devices. Links go from rank 0 to rank 1. What a case asserts of the real library is
what support.gpu.simulated_nccl does as well.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.nccl_host.made_up_device import MadeUpCuda, MadeUpDevice

from adaptra_megatron.transport._device import DeviceCallError
from adaptra_megatron.transport.device_session.communicator_config import CommunicatorConfig
from adaptra_megatron.transport.device_session.link_watch import LinkWatch
from adaptra_megatron.transport.device_session.nccl_link import NcclLink, NcclSide
from adaptra_megatron.transport.device_session.pair_group import PairEnds
from adaptra_megatron.transport.device_session.sessions import ReceivingSession, SendingSession
from adaptra_megatron.transport.gpu.cuda_device import Computed
from adaptra_megatron.transport.message_keys import TensorSpecification
from testing.waiting import until

ANY = TensorSpecification(None, torch.uint8, torch.device("cpu"))
PATIENCE_S = 60.0
STANDS_S = 0.5
"""What has not happened by then is taken to stand."""
SMALL, LARGE = 1000, 20_000_000
"""Bytes: NCCL's buffers take the one without a receive, not the other."""


def numbers(seed: int, nbytes: int) -> torch.Tensor:
    return torch.randint(0, 255, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


class Rank:
    """A process with links."""

    def __init__(self, rank: int, directory: Path) -> None:
        cuda = MadeUpCuda(Path(os.environ["NCCL_HOST"]))
        self.rank, self.cuda, self.library = rank, cuda, cuda.library()
        self.device: Any = MadeUpDevice(cuda, rank)
        self.store = dist.FileStore(str(directory / "store"), 2)
        self.watch = LinkWatch(interval_s=0.02)
        self.by_network = "NCCL_HOSTID" in os.environ
        self.headers = self.device.new_stream()

    def link(self, name: str = "0", timeout_s: float = PATIENCE_S) -> NcclLink:
        """From rank 0 to rank 1."""
        library, config = self.library, CommunicatorConfig(max_ctas=2)
        side = NcclSide(lambda: library, self.device, f"gpu {self.rank}", config, self.watch, PATIENCE_S, self.headers)
        own: Any = dist.PrefixStore(name, self.store)
        return NcclLink(own, PairEnds(0, 1), side, self.device.new_stream(), sends=self.rank == 0, timeout_s=timeout_s)

    def begin(self, link: NcclLink, tensor: torch.Tensor) -> Any:
        """A send of rank 0's, a receive of rank 1's."""
        return link.send(tensor, 0) if self.rank == 0 else link.receive(tensor, 0)

    def connected(self, name: str = "0") -> NcclLink:
        """A link that has carried a message."""
        link = self.link(name)
        link.wait(self.begin(link, numbers(0, SMALL)), PATIENCE_S)
        return link

    def mark(self, what: str) -> None:
        """For the other rank."""
        self.store.set(what, b"set")

    def await_mark(self, what: str) -> None:
        """Wait for it."""
        self.store.get(what)

    def end(self) -> None:
        """Of all threads."""
        self.watch.close()


def freed(link: NcclLink) -> bool:
    return link.wait_until_freed(time.monotonic() + PATIENCE_S)


def ended_by(link: NcclLink) -> str:
    """What ended a session that this rank has not ended."""
    until(link._ended.is_set, limit_s=PATIENCE_S)
    return link._cause


def bytes_arrive(here: Rank) -> None:
    """Of every size and kind of transfer: few go by lines with flags, many in chunks, on one channel or both."""
    assert here.library.version() >= 22900
    assert len({here.library.new_unique_id() for _ in range(3)}) == 3
    link = here.link()
    for seed, nbytes in enumerate([1, 100, 4096, 100_000, 1_000_003, LARGE]):
        expected = numbers(seed, nbytes)
        tensor = expected if here.rank == 0 else torch.zeros(nbytes, dtype=torch.uint8)
        link.wait(here.begin(link, tensor), PATIENCE_S)
        assert torch.equal(tensor, expected)
    works = [here.begin(link, numbers(seed, SMALL)) for seed in range(200)]
    link.wait(works[-1], PATIENCE_S)
    assert all(work.query() for work in works)
    link.close(time.monotonic() + PATIENCE_S)
    assert freed(link)


def sent_before_it_is_asked_for(here: Rank) -> None:
    """A small message has left when its kernel ends, which waits for no receive, and arrives after the sender's end: in
    memory even an abort."""
    link = here.connected()
    if here.rank == 0:
        link.wait(link.send(numbers(1, SMALL), 0), PATIENCE_S)
        if here.by_network:
            link.close(time.monotonic() + PATIENCE_S)
        else:
            link.abort()
        assert freed(link)
        here.mark("closed")
    else:
        here.await_mark("closed")
        buffer = torch.zeros(SMALL, dtype=torch.uint8)
        link.wait(link.receive(buffer, 0), PATIENCE_S)
        assert torch.equal(buffer, numbers(1, SMALL))
        link.close(time.monotonic() + PATIENCE_S)
        assert freed(link)


def large_sends_wait(here: Rank) -> None:
    """What NCCL's buffers do not take waits for its receive."""
    link = here.connected()
    if here.rank == 0:
        work = link.send(numbers(1, LARGE), 0)
        time.sleep(STANDS_S)
        assert not work.query()
        here.mark("stands")
        link.wait(work, PATIENCE_S)
    else:
        here.await_mark("stands")
        link.wait(link.receive(torch.zeros(LARGE, dtype=torch.uint8), 0), PATIENCE_S)
    link.close(time.monotonic() + PATIENCE_S)
    assert freed(link)


def sessions_carry_messages(here: Rank) -> None:
    """Headers, probes and bodies of the device path, and an abort of the sender's while the receiver waits."""
    link = here.link()
    shapes, places = [(7,), (300, 400), (1, 2, 3)], [0, 2, 3]
    if here.rank == 0:
        sending = SendingSession(link)
        for place, shape in zip(places, shapes, strict=True):
            sending.send(place, Computed(numbers(place, math.prod(shape)).view(shape), None), header=True)
        sending.probe(1)
        here.await_mark("arrived")
        sending.end()
        assert freed(link)
        here.mark("ended")
    else:
        arrived: list[torch.Tensor] = []
        failed: list[str] = []
        receiving = ReceivingSession(link, PATIENCE_S, lambda tensor, _: arrived.append(tensor), failed.append)
        for place in range(5):
            receiving.receive(place, None if place == 1 else ANY)
        until(lambda: len(arrived) == 4 or bool(failed), limit_s=PATIENCE_S)
        assert not failed
        here.mark("arrived")
        here.await_mark("ended")
        if not here.by_network:
            time.sleep(STANDS_S)
            assert not failed
            receiving.abort()
        until(lambda: bool(failed), limit_s=PATIENCE_S)
        assert ("remote process exited" in failed[0]) == here.by_network, failed
        del arrived[1]
        for place, shape, tensor in zip(places, shapes, arrived, strict=True):
            assert torch.equal(tensor, numbers(place, math.prod(shape)).view(shape))
        receiving.end()
        assert freed(link)


def works_of_a_transfer(here: Rank) -> None:
    """What the model of the device plays: NCCL's kernel begins after what NCCL's own stream has, and that waits behind
    it. No event tells the time."""
    link = here.connected()
    here.cuda.works()
    link.wait(here.begin(link, numbers(1, SMALL)), PATIENCE_S)
    works = here.cuda.works()
    own = [("w", link._stream), ("k", link._stream), ("r", link._stream)]
    (_, of_nccl), *rest = works
    assert works[0] == ("r", of_nccl)
    assert of_nccl != link._stream
    assert rest == [*own, ("w", of_nccl), ("r", link._stream)]
    link.close(time.monotonic() + PATIENCE_S)
    assert freed(link)


def abort_while_a_receive_stands(here: Rank) -> None:
    """The aborting end is freed, its receive is over. The other learns of it from the network alone, and only once it
    sends again: what the buffers take counts as sent even then."""
    link = here.connected()
    if here.rank == 1:
        work = link.receive(torch.zeros(SMALL, dtype=torch.uint8), 0)
        time.sleep(STANDS_S)
        assert not work.query()
        link.abort("for a reason")
        assert freed(link)
        assert work.query()
        with pytest.raises(RuntimeError, match="for a reason"):
            link.wait(work, 1.0)
        here.mark("aborted")
    else:
        here.await_mark("aborted")
        time.sleep(STANDS_S)
        assert link.failure(time.monotonic()) is None
        try:
            link.wait(link.send(numbers(1, SMALL), 0), PATIENCE_S)
        except DeviceCallError:  # NCCL's thread met the closed socket before it gave the message back
            assert here.by_network
        if here.by_network:
            assert "remote process exited or there was a network error" in ended_by(link)
        else:
            work = link.send(numbers(2, LARGE), 0)
            time.sleep(STANDS_S)
            assert not work.query()
            assert link.failure(time.monotonic()) is None
            link.abort()
        assert freed(link)


def abort_while_it_connects(here: Rank) -> None:
    """The first transfer stands until the other end has one, too, and an abort ends that."""
    link = here.link()
    if here.rank == 1:
        link._connects_until_s = time.monotonic() + STANDS_S
        with pytest.raises(RuntimeError, match="did not launch a transfer"):
            link.receive(torch.zeros(SMALL, dtype=torch.uint8), 0)
        link.abort()
        assert freed(link)
        here.mark("aborted")
    else:
        here.await_mark("aborted")
        assert link.failure(time.monotonic()) is None
        link.abort()
        assert freed(link)


def killed_before_it_comes(here: Rank, victim: int) -> None:
    """Between the meeting and the communicator: NCCL waits, says nothing, and an abort ends that."""
    made: list[NcclLink] = []
    await_nccl = NcclLink._await_nccl

    def note(link: NcclLink, otherwise: str) -> None:
        made.append(link)
        await_nccl(link, otherwise)

    def kill_itself(*_: object) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    NcclLink._await_nccl = note  # type: ignore[method-assign]
    if here.rank == victim:
        here.library.init_rank = kill_itself  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the other end did not join the communicator within 5 s"):
        here.link(timeout_s=5.0)
    assert freed(made[0])
    assert len(here.library.new_unique_id()) == 128


def killed_while_a_receive_stands(here: Rank) -> None:
    """The network says so; through memory nothing does, and the deadline ends it."""
    link = here.connected()
    if here.rank == 0:
        here.await_mark("stands")
        os.kill(os.getpid(), signal.SIGKILL)
    work = link.receive(torch.zeros(SMALL, dtype=torch.uint8), 0)
    here.mark("stands")
    expected = "remote process exited or there was a network error"
    if not here.by_network:
        time.sleep(STANDS_S)
        assert link.failure(time.monotonic()) is None
        expected = "a message of 1000 bytes did not come in time"
    with pytest.raises(RuntimeError, match=expected):
        link.wait(work, PATIENCE_S if here.by_network else STANDS_S)
    assert freed(link)


def receive_without_end(link: NcclLink) -> None:
    while True:
        link.receive(torch.zeros(SMALL, dtype=torch.uint8), 0)


def full_launch_queue(here: Rank) -> None:
    """A launch that finds no room stands with NCCL's thread; the limit holds for ours, and an abort ends both."""
    link = here.connected()
    if here.rank == 1:
        link.timeout_s = STANDS_S
        with pytest.raises(RuntimeError, match="did not launch a transfer"):
            receive_without_end(link)
        link.abort()
        assert freed(link)
        here.mark("aborted")
    else:
        here.await_mark("aborted")
        link.abort()
        assert freed(link)


def end_next_to_a_stalled_link(here: Rank) -> None:
    """To destroy a communicator frees memory, which waits for all that the device does, other links' receives too."""
    first, second = here.connected("first"), here.connected("second")
    if here.rank == 1:
        work = second.receive(torch.zeros(SMALL, dtype=torch.uint8), 0)
        first.close(time.monotonic() + PATIENCE_S)
        assert not first.wait_until_freed(time.monotonic() + 2 * STANDS_S)
        here.mark("stands")
        second.wait(work, PATIENCE_S)
    else:
        here.await_mark("stands")
        second.wait(second.send(numbers(1, SMALL), 0), PATIENCE_S)
        first.close(time.monotonic() + PATIENCE_S)
    assert freed(first)
    second.close(time.monotonic() + PATIENCE_S)
    assert freed(second)


CASES: dict[str, Callable[[Rank], None]] = {
    case.__name__: case
    for case in (
        bytes_arrive,
        sent_before_it_is_asked_for,
        large_sends_wait,
        sessions_carry_messages,
        works_of_a_transfer,
        abort_while_a_receive_stands,
        abort_while_it_connects,
        killed_while_a_receive_stands,
        full_launch_queue,
        end_next_to_a_stalled_link,
    )
} | {f"killed_before_it_comes_{victim}": partial(killed_before_it_comes, victim=victim) for victim in range(2)}


if __name__ == "__main__":
    this_rank = Rank(int(sys.argv[2]), Path(sys.argv[3]))
    CASES[sys.argv[1]](this_rank)
    this_rank.end()
