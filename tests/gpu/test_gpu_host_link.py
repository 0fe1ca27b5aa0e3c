# SPDX-License-Identifier: Apache-2.0
"""Two ends of a host link in one process, both with their tensors on one real GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch

from adaptra_megatron.transport._ring import Ring
from adaptra_megatron.transport.dual_path.dual_link import DualLink
from adaptra_megatron.transport.gpu.cuda_device import CudaDevice
from adaptra_megatron.transport.host_settings import HostSettings
from adaptra_megatron.transport.link_ends import LinkEnds
from adaptra_megatron.transport.message_keys import Direction, MessageKey, TransportError

pytestmark = pytest.mark.gpu

MEBIBYTE = 1 << 20
SETTINGS = HostSettings(timeout_s=30.0, grace_s=30.0)
Links = tuple[DualLink, DualLink]


def key(number: int, iteration: int = 0) -> MessageKey:
    return MessageKey(iteration, Direction.ACTIVATION, 0, number)


def soon() -> float:
    return time.monotonic() + 30.0


def connect(links: Links) -> None:
    """A new session."""
    there, back = (Ring.create(SETTINGS.slots, SETTINGS.slot_nbytes) for _ in range(2))
    # As in two processes, each end has a mapping of its own: pages are locked once per address.
    theirs = Ring.attach(back.fd), Ring.attach(there.fd)
    for link, (outbound, inbound) in zip(links, ((there, back), theirs), strict=True):
        old = link._state.session
        if old is not None:
            old.outbound.close()
        link.connected(outbound, inbound, lambda cause: None)


@pytest.fixture
def links(device: torch.device) -> Iterator[Links]:
    made = (
        DualLink(LinkEnds(0, 1), SETTINGS, CudaDevice(device)),
        DualLink(LinkEnds(1, 0), SETTINGS, CudaDevice(device)),
    )
    connect(made)
    yield made
    torch.cuda.synchronize()
    for link in made:
        link.close()


def test_computation_before_and_after_the_link_is_ordered_by_it(
    links: Links, device: torch.device, stall: Callable[[float], None]
) -> None:
    sizes = [1, 1000, MEBIBYTE, 5 * MEBIBYTE + 1, 40 * MEBIBYTE]
    for iteration in range(3):
        sums = []
        for number, size in enumerate(sizes):
            stall(0.02)
            sent = torch.full((size,), 1.0, device=device).mul_(number + 1).add_(iteration)
            links[0].post_send(key(number, iteration), sent)
            del sent
            torch.full((size,), -1.0, device=device)
            links[1].post_receive(key(number, iteration))
        for number in range(len(sizes)):
            received, _times = links[1].wait(key(number, iteration), soon())
            assert received.device == device
            stall(0.01)
            sums.append((received - (number + 1 + iteration)).abs().max())
            del received
        assert [value.item() for value in sums] == [0.0] * len(sizes)
        links[0].flush(soon())


def test_messages_survive_sessions_that_break(links: Links, device: torch.device) -> None:
    values = [torch.randn(MEBIBYTE + number, device=device) for number in range(8)]
    for number, value in enumerate(values):
        links[0].post_send(key(number), value)
        if number % 3 == 1:
            connect(links)
    for number, value in enumerate(values):
        links[1].post_receive(key(number))
        received, _times = links[1].wait(key(number), soon())
        assert torch.equal(received, value)
        if number % 3 == 2:
            connect(links)
    links[0].flush(soon())


def test_a_tensor_of_another_device_is_refused(links: Links) -> None:
    with pytest.raises(TransportError, match="on cpu, but this link carries tensors of cuda:0"):
        links[0].post_send(key(0), torch.zeros(3))
