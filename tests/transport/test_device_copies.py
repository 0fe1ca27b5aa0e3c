# SPDX-License-Identifier: Apache-2.0
"""Copies between a device and host memory, on a simulated device that takes every liberty a real one may."""

from __future__ import annotations

import ctypes
import gc
import mmap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.simulated_device import POISON, SimulatedDevice

from adaptra_megatron.transport._ring import DATA_TYPES, Description, Inbox, Ring
from adaptra_megatron.transport.cuda_device import device_of
from adaptra_megatron.transport.device_copies import UNLIMITED_NBYTES, DeviceCopies, NoCopies, Payload, copies_for
from adaptra_megatron.transport.incoming_copies import IncomingCopies
from adaptra_megatron.transport.messages import TransportError
from adaptra_megatron.transport.outgoing_copies import MOST_PARTS, OutgoingCopies
from adaptra_megatron.transport.page_locks import PAGE_NBYTES
from adaptra_megatron.transport.pinned_pool import SMALLEST_NBYTES, PinnedPool

MEBIBYTE = 1 << 20
UNIT = MEBIBYTE // 4
ORDERS = ["compute", "copies", None]


def stage(copies: Any, tensor: torch.Tensor) -> Any:
    """Send a tensor that is computed on the current stream."""
    return copies.stage(copies.computed(tensor))


def soon() -> float:
    return time.monotonic() + 5.0


def until(condition: Callable[[], bool]) -> None:
    deadline_s = soon()
    while not condition():
        assert time.monotonic() < deadline_s, "this never happens"
        time.sleep(0.001)


def numbers(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 255, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def bytes_of(payload: Payload, begin: int = 0, end: int | None = None) -> torch.Tensor:
    """What is in host memory now, as the link's writing thread would read it."""
    end = payload.nbytes if end is None else end
    address = payload.address(end, soon())
    return torch.frombuffer(bytearray(ctypes.string_at(address + begin, end - begin)), dtype=torch.uint8)


def block_of(values: torch.Tensor) -> torch.Tensor:
    """A received message: it begins at a page, as the inbox's blocks do."""
    memory = mmap.mmap(-1, max(1, values.nbytes))
    host = torch.frombuffer(memory, dtype=torch.uint8)[: values.nbytes]
    return host.view(values.dtype).view(values.shape).copy_(values)


class Sending:
    """The outgoing copies of a link, and how often they told it of something to write."""

    def __init__(self, device: SimulatedDevice, limit_nbytes: int = 64 * MEBIBYTE) -> None:
        self.told = 0
        self.copies = OutgoingCopies(
            device,  # type: ignore[arg-type]
            link="0->1",
            limit_nbytes=limit_nbytes,
            unit_nbytes=UNIT,
            on_ready=self._tell,
        )

    def _tell(self) -> None:
        self.told += 1


@pytest.fixture
def sending() -> Iterator[Callable[..., Sending]]:
    made: list[Sending] = []

    def make(device: SimulatedDevice, **settings: int) -> Sending:
        made.append(Sending(device, **settings))
        return made[-1]

    yield make
    for each in made:
        each.copies.close(5.0)
        assert not each.copies._thread.is_alive()


@pytest.mark.parametrize("first", ORDERS)
def test_what_is_sent_is_what_was_computed_whatever_the_device_does_first(
    sending: Callable[..., Sending], first: str | None
) -> None:
    for seed in range(5):
        device = SimulatedDevice(seed, first=first)
        copies = sending(device).copies
        sizes = [1, 4096, MEBIBYTE - 1, MEBIBYTE + 1, 3 * MEBIBYTE]
        payloads = [stage(copies, device.tensor(numbers(size, size))) for size in sizes]
        gc.collect()
        for size, payload in zip(sizes, payloads, strict=True):
            assert torch.equal(bytes_of(payload), numbers(size, size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (3, 5), (2, 0), (2, 3, 4)])
def test_any_type_and_shape(sending: Callable[..., Sending], dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    device = SimulatedDevice()
    values = torch.arange(torch.Size(shape).numel()).view(shape).float().to(dtype)
    payload = stage(sending(device).copies, device.tensor(values))
    assert (tuple(payload.shape), payload.dtype, payload.nbytes) == (shape, dtype, values.nbytes)
    assert payload.parts()[-1][1] == values.nbytes
    if values.nbytes:
        assert torch.equal(bytes_of(payload).view(dtype).view(shape).float(), values.float())


def test_a_contiguous_tensor_of_one_element_may_have_any_stride(sending: Callable[..., Sending]) -> None:
    device = SimulatedDevice()
    made = device.tensor(torch.arange(10.0))
    device.run()
    payload = stage(sending(device).copies, made[::7][1:])
    assert bytes_of(payload).view(torch.float32).tolist() == [7.0]


def test_staging_returns_at_once_and_parts_come_in_order(sending: Callable[..., Sending]) -> None:
    device = SimulatedDevice()
    sent = sending(device)
    stage(sent.copies, device.tensor(numbers(8 * MEBIBYTE)))
    until(lambda: sent.told == 1)  # there is a buffer now
    device.compute.held = True
    payload = stage(sent.copies, device.tensor(numbers(5 * MEBIBYTE, seed=1)))
    parts = payload.parts()
    assert [end - begin for begin, end in parts] == [MEBIBYTE] * 5
    assert not payload.ready
    with pytest.raises(TimeoutError, match=r"link 0->1"):
        payload.address(parts[0][1], time.monotonic() + 0.01)
    copying = device.streams[-1]
    device.let_go(device.compute)
    device.run_until(lambda: len(copying.operations) == 8)  # of wait, 5 copies and 5 events
    copying.held = True
    first = bytes_of(payload, *parts[0])
    assert torch.equal(first, numbers(5 * MEBIBYTE, seed=1)[:MEBIBYTE])
    assert payload.ready
    with pytest.raises(TimeoutError):
        payload.address(parts[-1][1], time.monotonic() + 0.01)
    device.let_go(copying)
    assert torch.equal(bytes_of(payload), numbers(5 * MEBIBYTE, seed=1))
    assert sent.told == 2, "told once per message"


def test_parts_are_few_and_whole_units(sending: Callable[..., Sending]) -> None:
    copies = sending(SimulatedDevice()).copies
    for nbytes in [1, UNIT, MEBIBYTE, MEBIBYTE + 1, 17 * MEBIBYTE + 3, 1 << 30]:
        parts = copies._parts(nbytes)
        assert 1 <= len(parts) <= MOST_PARTS
        assert [begin for begin, _end in parts] == [0, *(end for _begin, end in parts[:-1])]
        assert parts[-1][1] == nbytes
        assert all(begin % UNIT == 0 for begin, _end in parts)


def test_device_memory_is_held_until_it_has_been_read_and_no_longer(sending: Callable[..., Sending]) -> None:
    device = SimulatedDevice()
    device.compute.held = True
    made = device.tensor(numbers(4096))
    address = made.data_ptr()
    payload = stage(sending(device).copies, made)
    del made
    time.sleep(0.02)
    assert address not in device.freed
    device.let_go(device.compute)
    assert torch.equal(bytes_of(payload), numbers(4096))
    until(lambda: address in device.freed)
    assert device.kept == [], "record_stream would keep the memory longer than that"
    assert torch.equal(bytes_of(payload), numbers(4096)), "the page-locked copy stays until it is let go of"


def test_page_locked_memory_is_bounded_and_waited_for_in_order(sending: Callable[..., Sending]) -> None:
    device = SimulatedDevice()
    copies = sending(device, limit_nbytes=2 * MEBIBYTE).copies
    payloads = [stage(copies, device.tensor(numbers(MEBIBYTE, seed))) for seed in range(4)]
    small = stage(copies, device.tensor(numbers(100, 4)))
    bytes_of(payloads[1])
    time.sleep(0.02)
    assert [payload.ready for payload in [*payloads, small]] == [True, True, False, False, False]
    assert copies.pinned_nbytes == 2 * MEBIBYTE
    for number in range(4):
        assert torch.equal(bytes_of(payloads[number]), numbers(MEBIBYTE, number))
        payloads[number] = small  # acknowledged: the link lets go of it
    assert torch.equal(bytes_of(small), numbers(100, 4))
    assert sum(device.allocated_pinned) == 2 * MEBIBYTE + SMALLEST_NBYTES
    payloads.clear()
    del small
    until(lambda: copies.pinned_nbytes == 0)


def test_one_message_may_be_larger_than_the_limit(sending: Callable[..., Sending]) -> None:
    device = SimulatedDevice()
    copies = sending(device, limit_nbytes=MEBIBYTE).copies
    small, large = (stage(copies, device.tensor(numbers(size))) for size in (10, 5 * MEBIBYTE))
    assert torch.equal(bytes_of(small), numbers(10))
    assert not large.ready
    del small
    assert torch.equal(bytes_of(large), numbers(5 * MEBIBYTE))


def test_an_error_of_the_device_reaches_everybody(sending: Callable[..., Sending]) -> None:
    device = SimulatedDevice()
    sent = sending(device)
    device.compute.held = True
    waiting = [stage(sent.copies, device.tensor(numbers(MEBIBYTE, seed))) for seed in range(3)]
    device.fail(RuntimeError("CUDA error: an illegal memory access was encountered"))
    for payload in waiting:
        with pytest.raises(TransportError, match=r"link 0->1: .*illegal memory access") as failed:
            payload.address(MEBIBYTE, soon())
        assert isinstance(failed.value.__cause__, RuntimeError)
        assert payload.ready, "so that the writing thread hears of it"
    until(lambda: sent.told > 0)
    with pytest.raises(TransportError, match="illegal memory access"):
        stage(sent.copies, torch.zeros(3))
    with pytest.raises(TransportError, match="illegal memory access"):
        waiting[0].computed()


def test_no_page_locked_memory_is_an_error_too(
    sending: Callable[..., Sending], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(nbytes: int) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    device = SimulatedDevice()
    monkeypatch.setattr(device, "page_locked", refuse)
    payload = stage(sending(device).copies, device.tensor(numbers(10)))
    with pytest.raises(TransportError, match="out of memory"):
        payload.address(10, soon())


def test_closing_does_not_wait_for_a_device_that_hangs() -> None:
    device = SimulatedDevice()
    copies = Sending(device).copies
    device.compute.held = True
    launched = stage(copies, device.tensor(numbers(10)))
    until(lambda: launched.launched)
    unlaunched = stage(copies, device.tensor(numbers(10)))
    start_s = time.monotonic()
    copies.close(0.05)
    copies.close(0.05)
    assert time.monotonic() - start_s < 2.0
    assert copies._thread.is_alive()
    device.let_go(device.compute)
    copies._thread.join(5.0)
    assert not copies._thread.is_alive()
    assert torch.equal(bytes_of(launched), numbers(10))
    with pytest.raises(TimeoutError):
        unlaunched.address(10, time.monotonic() + 0.01)


def test_a_message_can_be_had_back_on_the_device_for_another_path(sending: Callable[..., Sending]) -> None:
    device = SimulatedDevice(first="compute")
    device.compute.held = True
    payload = stage(sending(device).copies, device.tensor(numbers(MEBIBYTE).view(1024, 1024)))
    original = payload.computed().tensor
    device.let_go(device.compute)
    bytes_of(payload)
    assert torch.equal(original, numbers(MEBIBYTE).view(1024, 1024))
    del original
    until(lambda: payload._source is None)
    back, made = payload.computed()
    assert made is None, "it is there: any stream may use it at once"
    seen = device.read(back)
    device.run()
    assert torch.equal(seen, numbers(MEBIBYTE).view(1024, 1024))


@pytest.mark.parametrize("first", ORDERS)
def test_what_is_computed_with_is_what_was_received(first: str | None) -> None:
    for seed in range(5):
        device = SimulatedDevice(seed, first=first)
        copies = IncomingCopies(device, link="1->0")  # type: ignore[arg-type]
        values = [torch.randn(257, 3, generator=torch.Generator().manual_seed(number)) for number in range(6)]
        receipts = [copies.receive(block_of(value)) for value in values]
        for receipt in receipts[:3]:
            receipt.begin()
            receipt.begin()
        seen = []
        for receipt in receipts:
            tensor = receipt.take()
            seen.append(device.read(tensor))
            assert device.kept[-1] == (tensor.data_ptr(), "compute")
        del receipts, receipt
        gc.collect()
        device.run()
        assert all(torch.equal(one, other) for one, other in zip(seen, values, strict=True))
        copies.close(5.0)


def test_the_simulated_device_shows_a_wait_that_is_missing() -> None:
    device = SimulatedDevice(first="compute", ignores_waits=True)
    copies = IncomingCopies(device, link="1->0")  # type: ignore[arg-type]
    seen = device.read(copies.receive(block_of(numbers(100))).take())
    device.run()
    assert (seen == POISON).all()
    outgoing = Sending(SimulatedDevice(first="copies", ignores_waits=True))
    device = outgoing.copies._device  # type: ignore[assignment]
    payload = stage(outgoing.copies, device.tensor(numbers(100)))
    assert (bytes_of(payload) == POISON).all()
    outgoing.copies.close(5.0)


def test_taking_never_waits_and_host_memory_is_held_until_it_was_read() -> None:
    device = SimulatedDevice()
    copies = IncomingCopies(device, link="1->0")  # type: ignore[arg-type]
    copying = device.streams[-1]
    copying.held = True
    host = device.page_locked(4096).copy_(numbers(4096))
    device.locked[host.data_ptr()] = 4096
    copies._page_locks._locked[host.data_ptr()] = 4096
    address = host.data_ptr()
    receipt = copies.receive(host)
    del host
    seen = device.read(receipt.take())
    device.run()
    copies.receive(block_of(numbers(1)))
    assert address not in device.freed
    assert (seen == 0).all()
    device.let_go(copying)
    device.run()
    assert torch.equal(seen, numbers(4096))
    copies.receive(block_of(numbers(1)))
    assert address in device.freed, "the next message lets go of it"
    copies.close(5.0)


def test_a_message_nobody_asks_for_takes_no_device_memory() -> None:
    device = SimulatedDevice()
    copies = IncomingCopies(device, link="1->0")  # type: ignore[arg-type]
    before = len(device._memories)
    copies.receive(block_of(numbers(100)))
    assert len(device._memories) == before
    copies.close(5.0)


def test_messages_without_bytes_are_received() -> None:
    device = SimulatedDevice()
    copies = IncomingCopies(device, link="1->0")  # type: ignore[arg-type]
    assert copies.receive(torch.empty(2, 0)).take().shape == (2, 0)
    assert device.page_locks_made == 0
    copies.close(5.0)


def _written(inbox: Inbox, ring: Ring, sequence: int, values: torch.Tensor) -> torch.Tensor:
    """`values` through a ring, in the memory that the inbox received them in."""
    description = Description(
        sequence=sequence,
        iteration=0,
        direction=0,
        chunk=0,
        micro_batch=sequence,
        dtype=DATA_TYPES["float32"],
        shape=[values.numel()],
    )
    writer = threading.Thread(target=ring.write, args=(description, values.data_ptr(), values.nbytes, soon()))
    writer.start()
    event = inbox.next(ring, soon())
    writer.join()
    assert event is not None
    return torch.frombuffer(event.payload, dtype=torch.uint8)


def test_the_blocks_of_an_inbox_are_page_locked_once_and_stay_mapped() -> None:
    device = SimulatedDevice()
    copies = IncomingCopies(device, link="1->0")  # type: ignore[arg-type]
    inbox = Inbox(max_message_nbytes=1 << 30, pooled_nbytes=UNLIMITED_NBYTES)
    ring = Ring.create(16, UNIT)
    sizes = [40 * 1024, 41 * 1024, 3 * MEBIBYTE, 100, 42 * 1024]
    for sequence in range(40):
        values = numbers(sizes[sequence % len(sizes)] // 4 * 4, sequence)
        host = _written(inbox, ring, sequence, values.view(torch.float32))
        address = host.data_ptr()
        seen = device.read(copies.receive(host).take())
        assert device.locked[address] >= values.nbytes
        del host
        device.run()
        assert torch.equal(seen, values)
    assert device.pageable_copies == 0
    assert device.page_locks_made <= 12, "a few blocks, some of them first for a smaller message"
    ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    mapped = [(int(first, 16), int(last, 16)) for first, last in ranges]
    for address, nbytes in device.locked.items():
        assert address % PAGE_NBYTES == 0
        assert any(first <= address and address + nbytes <= last for first, last in mapped)
    assert copies._page_locks.nbytes == sum(device.locked.values())
    copies.close(5.0)
    assert device.locked == {}
    copies.close(5.0)


def test_where_nothing_can_be_page_locked_the_receiving_thread_copies(caplog: pytest.LogCaptureFixture) -> None:
    device = SimulatedDevice()
    device.refuses_page_locks = True
    copies = IncomingCopies(device, link="1->0")  # type: ignore[arg-type]
    receipts = [copies.receive(block_of(numbers(100, seed))) for seed in range(3)]
    assert device.pageable_copies == 3, "before anybody takes one"
    seen = [device.read(receipt.take()) for receipt in receipts]
    device.run()
    assert all(torch.equal(each, numbers(100, seed)) for seed, each in enumerate(seen))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "operation not permitted" in caplog.text
    copies.close(5.0)


def test_an_error_of_the_device_is_raised_where_a_message_is_taken() -> None:
    device = SimulatedDevice()
    copies = IncomingCopies(device, link="1->0")  # type: ignore[arg-type]
    begun, fresh = (copies.receive(block_of(numbers(10))) for _ in range(2))
    begun.begin()
    device.fail(RuntimeError("CUDA error: device lost"))
    for receipt in (begun, fresh, copies.receive(block_of(numbers(10)))):
        with pytest.raises(TransportError, match=r"link 1->0: .*device lost"):
            receipt.take()
    copies.close(5.0)


def test_memory_stays_locked_for_a_device_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    device = SimulatedDevice()
    copies = IncomingCopies(device, link="1->0")  # type: ignore[arg-type]
    device.streams[-1].held = True
    copies.receive(block_of(numbers(10))).begin()
    copies.close(0.02)
    assert device.locked
    assert "memory stays locked" in caplog.text
    device.let_go(device.streams[-1])
    copies.close(5.0)
    assert not device.locked


class TestPinnedPool:
    def test_buffers_are_used_again_and_other_sizes_give_way(self) -> None:
        made: list[int] = []

        def allocate(nbytes: int) -> torch.Tensor:
            made.append(nbytes)
            return torch.empty(nbytes, dtype=torch.uint8)

        pool = PinnedPool(allocate, limit_nbytes=4 * MEBIBYTE)
        assert pool.unused(10) is None
        assert made == []
        for _ in range(3):
            held = pool.get(MEBIBYTE - 5)
            assert held is not None
            assert held.memory.nbytes == MEBIBYTE
            del held
        again = pool.unused(MEBIBYTE)
        assert again is not None
        assert made == [MEBIBYTE]
        del again
        large = pool.get(3 * MEBIBYTE)
        assert large is not None
        assert made == [MEBIBYTE, 4 * MEBIBYTE]
        assert (pool.used_nbytes, pool.nbytes) == (4 * MEBIBYTE, 4 * MEBIBYTE), "the unused one was given up"

    def test_closing_ends_a_wait(self) -> None:
        pool = PinnedPool(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), limit_nbytes=MEBIBYTE)
        held = pool.get(MEBIBYTE)
        found: list[object] = []
        waiting = threading.Thread(target=lambda: found.append(pool.get(MEBIBYTE)))
        waiting.start()
        time.sleep(0.02)
        assert waiting.is_alive()
        pool.close()
        waiting.join(5.0)
        assert found == [None]
        del held
        assert pool.nbytes == 0 or pool.used_nbytes == 0
        assert pool.get(10) is None


def test_on_the_cpu_nothing_is_copied() -> None:
    copies = copies_for(
        device_of(torch.device("cpu")),
        link="0->1",
        window_nbytes=1,
        pooled_nbytes=77,
        unit_nbytes=UNIT,
        on_ready=lambda: None,
    )
    assert isinstance(copies, NoCopies)
    assert copies.pooled_nbytes == 77
    tensor = torch.arange(4.0)
    payload = stage(copies, tensor)
    assert payload.ready
    assert payload.parts() == ((0, 16),)
    assert payload.address(16, 0.0) == tensor.data_ptr()
    assert payload.computed().tensor is tensor
    receipt = copies.receive(tensor)
    receipt.begin()
    assert receipt.take() is tensor
    copies.close(0.0)


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="meta"):
        device_of(torch.device("meta"))


def test_both_directions_of_a_link_have_streams_of_their_own() -> None:
    device = SimulatedDevice()
    told: list[int] = []
    copies = DeviceCopies(
        device,  # type: ignore[arg-type]
        link="0->1",
        limit_nbytes=MEBIBYTE,
        unit_nbytes=UNIT,
        on_ready=lambda: told.append(1),
    )
    incoming, outgoing = copies._incoming._stream, copies._outgoing._stream
    assert len({id(incoming), id(outgoing), id(device.compute)}) == 3
    outgoing.held = True  # type: ignore[attr-defined]
    payload = stage(copies, device.tensor(numbers(100)))
    seen = device.read(copies.receive(block_of(numbers(50))).take())
    device.run()
    assert torch.equal(seen, numbers(50)), "a transfer that stands still stops nothing else"
    assert not payload.ready
    device.let_go(outgoing)  # type: ignore[arg-type]
    assert torch.equal(bytes_of(payload), numbers(100))
    until(lambda: told == [1])
    copies.close(5.0)
