# SPDX-License-Identifier: Apache-2.0
"""Two ranks: `slow_host_paths.py {shm,tcp}`; the cable from rank 0 to rank 1 is slow, so both paths of that direction
are. Every check that fails fails the rank."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from rounds import ROUNDS, together

from adaptra_megatron.transport.dual_path.host_transport import HostTransport
from adaptra_megatron.transport.host_settings import HostSettings
from adaptra_megatron.transport.link_paths import Path, PathSettings
from adaptra_megatron.transport.message_keys import Direction, MessageKey, TensorSpecification
from adaptra_megatron.transport.setup.link_setup import LinkMaker
from adaptra_megatron.transport.setup.rendezvous import Rendezvous
from testing.faults.network.link_faults import LinkFault, parse_link_fault
from testing.faults.network.links import SlowLinks

GREETINGS = 1
"""Messages of a link when it has come up."""
LATENCY_S = 0.15
OCCUPANCY_S = 0.05
SLOW = "0>1:latency_ms=150,occupancy_ms=50,until=2,path="
TOLERANCE_S = 0.14
MESSAGES = 3
SHAPE = (300_000,)
"""More than a slot of the ring."""


def key(iteration: int, number: int) -> MessageKey:
    return MessageKey(iteration, Direction.ACTIVATION, 0, number)


def content(number: int) -> torch.Tensor:
    return torch.full(SHAPE, float(number))


def start(transport_name: str, *, both_paths: bool = False, preferred: Path = Path.HOST) -> HostTransport:
    settings = HostSettings(transport=transport_name, timeout_s=20.0)
    rendezvous = Rendezvous.of(dist.group.WORLD, settings.timeout_s)
    if both_paths:
        maker = LinkMaker(rendezvous, None)
        maker.connect(wrap=False)
        transport = HostTransport(rendezvous, 1, settings, PathSettings(preferred=preferred, stall_s=10.0), maker)
    else:
        transport = HostTransport(rendezvous, 1, settings)
    transport.describe(TensorSpecification(SHAPE, torch.float32, torch.device("cpu")))
    return transport


def arrivals_s(transport: HostTransport, source: int, iteration: int) -> list[float]:
    """Three messages at once: how long after they were posted each arrives at the other rank, at the earliest of some
    rounds; the sender gets []."""
    firsts = range(0, ROUNDS * MESSAGES, MESSAGES)
    if dist.get_rank() == source:
        posted_s = [posting_s(transport, iteration, first, together(source)) for first in firsts]
        assert min(posted_s) < LATENCY_S, "sending must not wait"
        return []
    rounds = [receiving_s(transport, iteration, first, together(source)) for first in firsts]
    return [min(found) for found in zip(*rounds, strict=True)]


def posting_s(transport: HostTransport, iteration: int, first: int, started_s: float) -> float:
    """How long it takes to post three messages from number `first` on."""
    peer = 1 - dist.get_rank()
    for number in range(first, first + MESSAGES):
        tensor = content(number)
        transport.post_send(key(iteration, number), peer, tensor)
        tensor.data = torch.empty(1)
    took_s = time.monotonic() - started_s
    transport.flush(started_s + 10.0)
    return took_s


def receiving_s(transport: HostTransport, iteration: int, first: int, started_s: float) -> list[float]:
    """How long it takes until each of three messages is there."""
    peer = 1 - dist.get_rank()
    for number in range(first, first + MESSAGES):
        transport.post_receive(key(iteration, number), peer)
    found = []
    for number in range(first, first + MESSAGES):
        while not transport.ready(key(iteration, number)):
            assert time.monotonic() < started_s + 10.0
            time.sleep(0.002)
        found.append(time.monotonic() - started_s)
        assert torch.equal(transport.wait(key(iteration, number), started_s + 10.0), content(number))
    return found


def check_late(found: list[float]) -> None:
    for number, late_s in enumerate(found):
        expected_s = LATENCY_S + (number + 1) * OCCUPANCY_S
        assert expected_s <= late_s < expected_s + TOLERANCE_S, found


def host_path_alone(transport_name: str) -> None:
    with SlowLinks(parse_link_fault(SLOW + "both")) as links:
        transport = start(transport_name)
        check_late(arrivals_s(transport, 0, 0))
        rank = dist.get_rank()
        assert links.struck_on_host == ({(0, 1): GREETINGS + ROUNDS * MESSAGES} if rank == 0 else {})
        assert not links.struck
        back = arrivals_s(transport, 1, 1)
        assert max(back, default=0.0) < TOLERANCE_S, "the other direction is not slow"
        links.set_iteration(2)
        healed = arrivals_s(transport, 0, 2)
        assert max(healed, default=0.0) < TOLERANCE_S, "the fault has ended"
        dist.barrier()
        transport.close()


def both_paths(transport_name: str) -> None:
    """Notes and the device path's probes are late too: that only makes the device path come up later."""
    with SlowLinks(parse_link_fault(SLOW + "both")) as links:
        transport = start(transport_name, both_paths=True, preferred=Path.DEVICE)
        deadline_s = time.monotonic() + 10.0
        while transport.link_counters()[1 - dist.get_rank()].paths.path is not Path.DEVICE:  # type: ignore[union-attr]
            assert time.monotonic() < deadline_s, "the device path did not come up"
            time.sleep(0.01)
        probes = links.struck.get((0, 1), 0)
        found = arrivals_s(transport, 0, 0)
        if dist.get_rank() == 0:
            assert probes >= PathSettings().probes
            assert links.struck[0, 1] == probes + ROUNDS * MESSAGES
            assert links.struck_on_host[0, 1] >= 2, "its notes went by the host path"
        else:
            check_late(found)
        dist.barrier()
        transport.close()


def device_path_alone(transport_name: str) -> None:
    """What is slow before the network does not slow the host path, which is why there is one."""
    fault = LinkFault(source=0, target=1, latency_s=LATENCY_S)
    with SlowLinks([fault]) as links:
        transport = start(transport_name, both_paths=True)
        found = arrivals_s(transport, 0, 0)
        assert max(found, default=0.0) < TOLERANCE_S
        assert not links.struck_on_host
        dist.barrier()
        transport.close()


def main(transport_name: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    make_link = HostTransport._make_link
    host_path_alone(transport_name)
    both_paths(transport_name)
    device_path_alone(transport_name)
    assert HostTransport._make_link is make_link
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.write("all checks passed\n")


if __name__ == "__main__":
    main(sys.argv[1])
