# SPDX-License-Identifier: Apache-2.0
"""What ranks do in test_gpu_dual_link.py: `gpu_dual_ranks.py SCENARIO`. It raises when something is wrong."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from adaptra_megatron.transport.host_path import HostTransport
from adaptra_megatron.transport.host_settings import HostSettings
from adaptra_megatron.transport.messages import Direction, MessageKey, TensorSpecification
from adaptra_megatron.transport.paths import Path, PathSettings

SHAPE = (512, 1024)


def on_device_path(transport: HostTransport) -> bool:
    """Whether this rank sends by it."""
    paths = transport.link_counters()[1 - dist.get_rank()].paths
    assert paths is not None
    return paths.path is Path.DEVICE


def until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + 40.0
    while not condition():
        if time.monotonic() >= deadline_s:
            raise AssertionError(what)
        time.sleep(0.01)


def exchange(transport: HostTransport, device: torch.device, iteration: int, messages: int = 10) -> None:
    """Messages in both directions, whose computation is queued behind that of the ones before."""
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    differences = []
    for number in range(messages):
        transport.post_receive(MessageKey(iteration, Direction.ACTIVATION, peer, number), peer)
        tensor = torch.full(SHAPE, 1.0, device=device)
        for _ in range(20):
            tensor = tensor.mul(1.0)
        tensor.add_(100.0 * iteration + number + rank)
        transport.post_send(MessageKey(iteration, Direction.ACTIVATION, rank, number), peer, tensor)
        del tensor
    for number in range(messages):
        key = MessageKey(iteration, Direction.ACTIVATION, peer, number)
        received = transport.wait(key, time.monotonic() + 40.0)
        differences.append((received - (1.0 + 100.0 * iteration + number + peer)).abs().max())
        del received
    transport.flush(time.monotonic() + 40.0)
    assert [each.item() for each in differences] == [0.0] * messages


def one_gpu(transport: HostTransport, device: torch.device) -> None:
    """NCCL does not connect two ranks of one GPU: everything goes by the host path, and nothing fails."""
    link: Any = transport._links[1 - dist.get_rank()]
    until(lambda: link._outlet._sessions >= 3, "the device path was not tried")
    for iteration in range(3):
        exchange(transport, device, iteration)
    assert not on_device_path(transport)
    assert "one GPU" in link._outlet.cause


def device_first(transport: HostTransport, device: torch.device) -> None:
    """The device path carries messages once it is proven, with and without known shapes."""
    until(lambda: on_device_path(transport), "the device path did not come up")
    dist.barrier()
    for iteration in range(3):
        exchange(transport, device, iteration)
    transport.describe(TensorSpecification(None, torch.float32, device))
    dist.barrier()
    exchange(transport, device, 3)
    counters = transport.link_counters()[1 - dist.get_rank()].paths
    assert counters is not None
    assert counters.sent_by_device == 40, counters


def sessions_end(transport: HostTransport, device: torch.device) -> None:
    """Communicators are aborted under the traffic: no message is lost, and the device path comes back."""
    link: Any = transport._links[1 - dist.get_rank()]
    for iteration in range(4):
        until(lambda: on_device_path(transport), "the device path did not come up")
        dist.barrier()
        if dist.get_rank() == iteration % 2:
            link._device.abort_all()
        exchange(transport, device, iteration)
    until(lambda: on_device_path(transport), "the device path did not come back")


SCENARIOS = {scenario.__name__: scenario for scenario in (one_gpu, device_first, sessions_end)}


def main(name: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    device = torch.device("cuda", 0 if name == "one_gpu" else dist.get_rank())
    torch.cuda.set_device(device)
    paths = PathSettings(probe_limit_s=15.0, first_rest_s=0.1, longest_rest_s=0.2)
    transport = HostTransport(dist.group.WORLD, 1, HostSettings(timeout_s=60.0), paths, device)
    transport.describe(TensorSpecification(SHAPE, torch.float32, device))
    SCENARIOS[name](transport, device)
    dist.barrier()
    transport.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
