# SPDX-License-Identifier: Apache-2.0
"""Two ends of a host link whose tensors are on a (simulated) device, in one process, over rings that break."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.gpu.simulated_device import SimulatedDevice

from adaptra_megatron.transport._ring import Ring
from adaptra_megatron.transport.dual_path.dual_link import DualLink
from adaptra_megatron.transport.host_settings import HostSettings
from adaptra_megatron.transport.link_ends import LinkEnds
from adaptra_megatron.transport.message_keys import Direction, MessageKey, TransportError
from testing.waiting import until

MEBIBYTE = 1 << 20
SETTINGS = HostSettings(slots=8, window_nbytes=8 * MEBIBYTE, timeout_s=20.0, grace_s=20.0)


def key(number: int) -> MessageKey:
    return MessageKey(0, Direction.ACTIVATION, 0, number)


def soon() -> float:
    return time.monotonic() + 20.0


def numbers(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


class Pair:
    """Stage 0 and stage 1, each with a device of its own."""

    def __init__(self, first: str | None) -> None:
        self.devices: list[Any] = [SimulatedDevice(seed, first=first) for seed in range(2)]
        self.links = [DualLink(LinkEnds(stage, 1 - stage), SETTINGS, self.devices[stage]) for stage in range(2)]
        self.rings: list[Ring] = []
        self.sent: list[tuple[int, int]] = []
        self.connect()

    def connect(self) -> None:
        """A new session, as after a break of the last one."""
        for ring in self.rings:
            ring.close()
        self.rings = [Ring.create(SETTINGS.slots, SETTINGS.slot_nbytes) for _ in range(2)]
        there, back = self.rings
        self.links[0].connected(there, back, lambda cause: None)
        self.links[1].connected(back, there, lambda cause: None)

    def send(self, values: torch.Tensor, number: int, source: int = 0) -> None:
        made = self.devices[source].tensor(values)
        self.sent.append((source, made.data_ptr()))
        self.links[source].post_send(key(number), made)

    def receive(self, number: int, target: int = 1) -> torch.Tensor:
        """What computation that is queued behind the message reads."""
        received, _times = self.links[target].wait(key(number), soon())
        return self.devices[target].read(received)

    def held(self) -> int:
        """Tensors that were sent and are kept to be sent again."""
        return sum(address not in self.devices[source].freed for source, address in self.sent)


@pytest.fixture
def make_pair() -> Iterator[Callable[[str | None], Pair]]:
    made: list[Pair] = []

    def make(first: str | None = None) -> Pair:
        made.append(Pair(first))
        return made[-1]

    yield make
    for pair in made:
        for link in pair.links:
            link.close()


@pytest.mark.parametrize("first", ["compute", "copies", None])
def test_messages_of_all_sizes_arrive_and_leave_nothing_behind(
    make_pair: Callable[[str | None], Pair], first: str | None
) -> None:
    pair = make_pair(first)
    sent = [numbers(size, size) for size in [1, 100, MEBIBYTE // 4, MEBIBYTE + 5, 9 * MEBIBYTE, 3 * MEBIBYTE, 7]]
    for number, values in enumerate(sent):
        pair.send(values, number)
        pair.links[1].post_receive(key(number))
    seen = [pair.receive(number) for number in range(len(sent))]
    pair.links[0].flush(soon())
    pair.devices[1].run()
    for values, read in zip(sent, seen, strict=True):
        assert torch.equal(values, read)
    until(lambda: not pair.held(), "memory of acknowledged messages is kept")
    assert [device.pageable_copies for device in pair.devices] == [0, 0]


def test_a_message_is_written_only_when_the_device_has_made_it_and_acknowledgements_go_on(
    make_pair: Callable[[str | None], Pair],
) -> None:
    pair = make_pair(None)
    pair.devices[0].compute.held = True
    pair.send(numbers(2 * MEBIBYTE, 0), 0)
    back = pair.devices[1].tensor(numbers(100, 1))
    pair.links[0].post_receive(key(1))
    pair.links[1].post_send(key(1), back)
    start_s = time.monotonic()
    pair.links[1].flush(soon())
    assert time.monotonic() - start_s < 5.0, "an acknowledgement waits for no computation"
    assert pair.links[0].unacknowledged == 1
    pair.links[1].post_receive(key(0))
    assert not pair.links[1].ready(key(0))
    pair.devices[0].let_go(pair.devices[0].compute)
    seen = pair.receive(0)
    pair.devices[1].run()
    assert torch.equal(seen, numbers(2 * MEBIBYTE, 0))


@pytest.mark.parametrize("asked", [True, False])
def test_no_message_is_copied_by_the_cpu_if_it_was_asked_for(
    make_pair: Callable[[str | None], Pair], monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    pair = make_pair(None)
    into_rings: list[int] = []
    out_of_rings: list[int] = []

    write = Ring.write

    def counting_write(ring: Ring, description: Any, address: int, nbytes: int, deadline_s: float) -> None:
        into_rings.append(nbytes)
        write(ring, description, address, nbytes, deadline_s)

    monkeypatch.setattr(Ring, "write", counting_write)
    receive = pair.links[1]._copies.receive

    def counting_receive(host: torch.Tensor, block_nbytes: int) -> Any:
        out_of_rings.append(host.nbytes)
        return receive(host, block_nbytes)

    monkeypatch.setattr(pair.links[1]._copies, "receive", counting_receive)
    for number in range(4):
        if asked:
            pair.links[1].post_receive(key(number))
        pair.send(numbers(3 * MEBIBYTE, number), number)
        if not asked:
            until(lambda number=number: pair.links[1].ready(key(number)))
            pair.links[1].post_receive(key(number))
        seen = pair.receive(number)
        pair.devices[1].run()
        assert torch.equal(seen, numbers(3 * MEBIBYTE, number))
    assert into_rings == []
    assert out_of_rings == ([] if asked else [3 * MEBIBYTE] * 4)
    assert [device.pageable_copies for device in pair.devices] == [0, 0]


@pytest.mark.parametrize("seed", range(3))
def test_everything_at_once_arrives_once_and_whole(make_pair: Callable[[str | None], Pair], seed: int) -> None:
    """Both ways, asked for before or after, in sessions that break, in memory that is used again."""
    pair, choose = make_pair([None, "copies", "compute"][seed]), random.Random(seed)
    sizes = [choose.choice([0, 1, 70_000, MEBIBYTE, 5 * MEBIBYTE + 3]) for _ in range(24)]
    waiting = set(range(len(sizes)))
    for number, size in enumerate(sizes):
        target = number % 2
        early = choose.random() < 0.5
        if early:
            pair.links[target].post_receive(key(number))
        pair.send(numbers(size, number), number, 1 - target)
        if not early:
            pair.links[target].post_receive(key(number))
        if choose.random() < 0.2:
            pair.connect()
        for some in sorted(waiting & set(range(number + 1))) if number % 6 == 5 else []:
            waiting.remove(some)
            seen = pair.receive(some, some % 2)
            pair.devices[some % 2].run()
            assert torch.equal(seen, numbers(sizes[some], some)), f"message {some} of {sizes[some]} bytes"
    for link in pair.links:
        link.flush(soon())
        assert link.unacknowledged == 0
    until(lambda: pair.held() == sizes.count(0))


def test_what_was_not_acknowledged_is_sent_again(make_pair: Callable[[str | None], Pair]) -> None:
    pair = make_pair(None)
    sent = [numbers(MEBIBYTE + number, number) for number in range(6)]
    for number, values in enumerate(sent):
        pair.send(values, number)
        if number % 2:
            pair.connect()
    for number in range(6):
        pair.links[1].post_receive(key(number))
        if number % 2:
            pair.connect()
    seen = [pair.receive(number) for number in range(6)]
    pair.links[0].flush(soon())
    pair.devices[1].run()
    assert all(torch.equal(values, read) for values, read in zip(sent, seen, strict=True))
    assert pair.links[1].sessions == 7


def test_an_error_of_the_sending_device_is_raised_where_the_training_waits(
    make_pair: Callable[[str | None], Pair],
) -> None:
    pair = make_pair(None)
    pair.devices[0].compute.held = True
    pair.send(numbers(MEBIBYTE, 0), 0)
    pair.devices[0].fail(RuntimeError("CUDA error: unspecified launch failure"))
    with pytest.raises(TransportError, match=r"rank 0, link 0->1: .*micro-batch 0.*unspecified launch failure"):
        pair.links[0].flush(soon())
    with pytest.raises(TransportError, match="unspecified launch failure"):
        pair.links[0].post_send(key(1), torch.zeros(3))


def test_an_error_of_the_receiving_device_is_raised_where_the_message_is_taken(
    make_pair: Callable[[str | None], Pair],
) -> None:
    pair = make_pair(None)
    pair.links[1].post_receive(key(0))
    pair.devices[1].fail(RuntimeError("CUDA error: out of memory"))
    pair.send(numbers(MEBIBYTE, 0), 0)
    with pytest.raises(TransportError, match=r"link 1<->0: .*out of memory"):
        pair.links[1].wait(key(0), soon())
