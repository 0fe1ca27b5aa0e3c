# SPDX-License-Identifier: Apache-2.0
"""Two ranks: messages over a link that is slow from rank 0 to rank 1. Every check that fails fails the rank."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from rounds import ROUNDS, together

from testing.faults.network.link_faults import LinkFault
from testing.faults.network.links import DelayedWork, SlowLinks, SlowLinkTimeoutError

LATENCY_S = 0.15
OCCUPANCY_S = 0.05


def messages_arrive_late_in_order_and_intact(rank: int, links: SlowLinks) -> None:
    """Three messages at once: each occupies the link, then travels; the caller frees its tensors meanwhile."""
    if rank == 0:
        posted_s = [three_messages_sent() for _ in range(ROUNDS)]
        assert min(posted_s) < LATENCY_S, "isend must not block"
    else:
        rounds = [three_messages_received() for _ in range(ROUNDS)]
        for number, found_s in enumerate(zip(*rounds, strict=True)):
            late_s = min(found_s) - LATENCY_S - (number + 1) * OCCUPANCY_S
            assert 0.0 <= late_s < 0.1, rounds
    assert links.struck == ({(0, 1): 3 * ROUNDS} if rank == 0 else {})


def three_messages_sent() -> float:
    """How long it takes to post them, in seconds."""
    started = together(0)
    works = []
    for number in range(3):
        tensor = torch.full((1000,), float(number))
        works.append(dist.isend(tensor, 1, tag=number))
        tensor.data = torch.empty(1)
    completed = works[0].is_completed()
    posted_s = time.monotonic() - started
    assert not completed or posted_s > LATENCY_S
    for number, work in enumerate(works):
        work.wait()
        assert time.monotonic() - started >= LATENCY_S + (number + 1) * OCCUPANCY_S
        assert work.is_success()
    return posted_s


def three_messages_received() -> list[float]:
    """When each arrives, in seconds from the beginning."""
    started = together(0)
    received = [torch.empty(1000) for _ in range(3)]
    works = [dist.irecv(received[number], 0, tag=number) for number in (2, 1, 0)]
    arrived_s = []
    for number in (0, 1, 2):
        works[2 - number].wait()
        arrived_s.append(time.monotonic() - started)
        assert torch.equal(received[number], torch.full((1000,), float(number)))
    return arrived_s


def freed_output_arrives_whole(rank: int) -> None:
    """Megatron frees outputs whose send is pending; the stand-ins of Megatron on the CPU guard every isend."""
    dist.barrier()
    if rank == 1:
        tensor = torch.ones(1 << 20)
        work = dist.isend(tensor, 0)
        tensor.data = torch.empty(1)
        overwriting = [torch.zeros(1 << 20) for _ in range(4)]
        work.wait()
        assert len(overwriting) == 4
    else:
        time.sleep(0.2)
        received = torch.empty(1 << 20)
        dist.irecv(received, 1).wait()
        assert bool((received == 1).all())


def other_direction_is_not_struck(rank: int, links: SlowLinks) -> None:
    dist.barrier()
    if rank == 1:
        work = dist.isend(torch.ones(5), 0)
        assert not isinstance(work, DelayedWork)
        work.wait()
        assert not links.struck
    else:
        dist.irecv(torch.empty(5), 1).wait()


def batched_operations_in_a_group_are_struck(rank: int, links: SlowLinks) -> None:
    """As Megatron's p2p communication without overlap, which torch turns into isend with a rank of the group."""
    group = dist.new_group([0, 1])
    struck = dict(links.struck)
    started = together(0)
    tensor = torch.full((4,), float(rank))
    received = torch.empty(4)
    operations = [
        dist.P2POp(dist.isend, tensor, 1 - rank, group),
        dist.P2POp(dist.irecv, received, 1 - rank, group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert torch.equal(received, torch.full((4,), float(1 - rank)))
    if rank == 1:
        assert time.monotonic() - started >= LATENCY_S
    assert links.struck.get((0, 1), 0) == struck.get((0, 1), 0) + (rank == 0)


def fault_ends_with_its_iterations(rank: int, links: SlowLinks) -> None:
    """The first message after the fault does not overtake the last one under it."""
    dist.barrier()
    if rank == 0:
        before = links.struck[0, 1]
        works = [dist.isend(torch.tensor([1.0]), 1)]
        links.set_iteration(2)
        works.append(dist.isend(torch.tensor([2.0]), 1))
        for work in works:
            work.wait()
        healthy = dist.isend(torch.tensor([3.0]), 1)
        assert not isinstance(healthy, DelayedWork)
        healthy.wait()
        assert links.struck[0, 1] == before + 1
    else:
        received = [torch.empty(1) for _ in range(3)]
        for tensor in received:
            dist.irecv(tensor, 0).wait()
        assert [tensor.item() for tensor in received] == [1.0, 2.0, 3.0]
    links.set_iteration(0)


def waiting_has_a_deadline(rank: int, links: SlowLinks) -> None:
    dist.barrier()
    if rank == 0:
        work = dist.isend(torch.ones(1), 1)
        with pytest.raises(SlowLinkTimeoutError, match="rank 0: a message of 4 bytes to rank 1 over slow link 0>1"):
            work.wait(timedelta(seconds=0.02))
        work.wait()
    else:
        dist.irecv(torch.empty(1), 0).wait()


def errors_of_the_real_send_are_raised_by_wait(rank: int, links: SlowLinks) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("the cable is cut")

    if rank == 0:
        work = links.decorate(broken)(torch.ones(1), 1)
        with pytest.raises(RuntimeError, match="the cable is cut"):
            work.wait()
        assert isinstance(work.exception(), RuntimeError)
        assert not work.is_success()


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    freed_output_arrives_whole(rank)
    real = dist.isend
    fault = LinkFault(source=0, target=1, latency_s=LATENCY_S, occupancy_s=OCCUPANCY_S, until_iteration=2)
    with SlowLinks([fault]) as links:
        messages_arrive_late_in_order_and_intact(rank, links)
        other_direction_is_not_struck(rank, links)
        batched_operations_in_a_group_are_struck(rank, links)
        fault_ends_with_its_iterations(rank, links)
        waiting_has_a_deadline(rank, links)
        errors_of_the_real_send_are_raised_by_wait(rank, links)
    assert dist.isend is real
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.write("all checks passed\n")


if __name__ == "__main__":
    main()
