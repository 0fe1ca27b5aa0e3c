# SPDX-License-Identifier: Apache-2.0
"""Copies between a device and rings, on a simulated device that takes every liberty a real one may."""

from __future__ import annotations

import gc
import mmap
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from support.gpu.copied_link import MEBIBYTE, PART, SLOT, SLOTS, CopiedLink, describe, numbers, soon
from support.gpu.simulated_device import POISON, SimulatedDevice

from adaptra_megatron.transport._ring import Event, RingClosedError
from adaptra_megatron.transport.gpu.cuda_device import Computed, device_of
from adaptra_megatron.transport.gpu.host_copies import NoCopies, copies_for
from adaptra_megatron.transport.message_keys import TransportError
from testing.waiting import until

ORDERS = ["compute", "copies", None]


@pytest.fixture
def make_link() -> Iterator[Callable[..., CopiedLink]]:
    made: list[CopiedLink] = []

    def make(device: SimulatedDevice) -> CopiedLink:
        made.append(CopiedLink(device))
        return made[-1]

    yield make
    for link in made:
        link.close()
        assert not link.copies._outgoing._thread.is_alive()
        assert not link.copies._incoming._thread.is_alive()


MakeLink = Callable[[SimulatedDevice], CopiedLink]


class TestSending:
    @pytest.mark.parametrize("first", ORDERS)
    def test_what_is_sent_is_what_was_computed_whatever_the_device_does_first(
        self, make_link: MakeLink, first: str | None
    ) -> None:
        for seed in range(3):
            device = SimulatedDevice(seed, first=first)
            link = make_link(device)
            sizes = [1, 4096, SLOT - 1, PART + 1, 3 * MEBIBYTE]
            payloads = [link.stage(device.tensor(numbers(size, size))) for size in sizes]
            gc.collect()
            for number, (size, payload) in enumerate(zip(sizes, payloads, strict=True)):
                assert torch.equal(link.carry(payload, number), numbers(size, size))
            assert device.pageable_copies == 0

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
    @pytest.mark.parametrize("shape", [(), (3, 5), (2, 0), (2, 3, 4)])
    def test_any_type_and_shape(self, make_link: MakeLink, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        device = SimulatedDevice()
        link = make_link(device)
        values = torch.arange(torch.Size(shape).numel()).view(shape).float().to(dtype)
        payload = link.stage(device.tensor(values))
        assert (tuple(payload.shape), payload.dtype, payload.nbytes) == (shape, dtype, values.nbytes)
        arrived = link.carry(payload)
        assert (tuple(arrived.shape), arrived.dtype) == (shape, dtype)
        assert torch.equal(arrived.float(), values.float())

    def test_a_contiguous_tensor_of_one_element_may_have_any_stride(self, make_link: MakeLink) -> None:
        device = SimulatedDevice()
        made = device.tensor(torch.arange(10.0))
        device.run()
        link = make_link(device)
        assert link.carry(link.stage(made[::7][1:])).tolist() == [7.0]

    def test_what_is_yet_to_be_computed_takes_neither_the_training_thread_nor_the_ring(
        self, make_link: MakeLink
    ) -> None:
        device = SimulatedDevice()
        link = make_link(device)
        device.compute.held = True
        payload = link.stage(device.tensor(numbers(MEBIBYTE)))
        assert not payload.inline
        written = link.write(payload)
        time.sleep(0.02)
        assert not payload.ready
        assert not link.sending.operations
        link.outbound.write_ack(5, soon())
        acknowledgement = link.far_inbox.next(link.outbound, soon())
        assert acknowledgement is not None
        assert acknowledgement.kind == Event.Kind.ACK
        device.let_go(device.compute)
        assert torch.equal(link.arrive(), numbers(MEBIBYTE))
        written.result(5.0)
        assert link.reported == 1, "reported once per message"

    def test_parts_are_published_when_they_are_copied_while_others_are(self, make_link: MakeLink) -> None:
        device = SimulatedDevice()
        link = make_link(device)
        link.sending.held = True
        written = link.write(link.stage(device.tensor(numbers(5 * PART))))
        until(lambda: len(link.sending.operations) == 4)  # two copies, each with an event
        time.sleep(0.02)
        assert (link.outbound.backlog, device.copies) == (0, 2), "of a message of five parts"
        device.run_one(link.sending, 2)
        until(lambda: link.outbound.backlog == 4)
        until(lambda: device.copies == 3)
        device.run_one(link.sending, 2)
        until(lambda: link.outbound.backlog == 8)
        device.let_go(link.sending)
        assert torch.equal(link.arrive(), numbers(5 * PART))
        written.result(5.0)
        assert len(link.copies._outgoing._unused_events) <= 2, "events are used again"

    def test_a_message_of_which_nothing_was_computed_by_now_needs_no_event(self, make_link: MakeLink) -> None:
        device = SimulatedDevice()
        link = make_link(device)
        device.compute.held = True
        device.tensor(numbers(10))  # something is queued
        payload = link.copies.stage(Computed(device.tensor(numbers(PART)), None))
        assert payload.ready
        arrived = link.carry(payload)
        assert (arrived == POISON).all(), "its bytes mean nothing, and nothing was waited for"
        device.let_go(device.compute)

    def test_a_tensor_is_held_until_its_message_is_let_go_of(self, make_link: MakeLink) -> None:
        device = SimulatedDevice()
        link = make_link(device)
        made = device.tensor(numbers(PART))
        address = made.data_ptr()
        payload = link.stage(made)
        del made
        for number in range(2):  # sent again in another session
            assert torch.equal(link.carry(payload, number), numbers(PART))
            link.connect()
            assert address not in device.freed
        del payload
        until(lambda: address in device.freed)
        assert device.kept == [], "record_stream would keep the memory longer than that"

    def test_a_message_that_did_not_all_get_in_is_finished_by_the_next_ring(self, make_link: MakeLink) -> None:
        device = SimulatedDevice()
        link = make_link(device)
        payload = link.stage(device.tensor(numbers(2 * MEBIBYTE)))
        with pytest.raises(TimeoutError):
            link.write(payload, deadline_s=time.monotonic() + 0.2).result(5.0)
        assert link.outbound.backlog == SLOTS, "what was claimed is published"
        assert link.far_inbox.next(link.outbound, 0.0) is None
        written = link.write(payload)
        time.sleep(0.02)
        link.outbound.close()
        with pytest.raises(RingClosedError):
            written.result(5.0)
        link.connect()
        assert torch.equal(link.carry(payload), numbers(2 * MEBIBYTE))

    @pytest.mark.parametrize("copying", [False, True])
    def test_an_error_of_the_device_reaches_all_callers_and_nothing_is_stuck(
        self, make_link: MakeLink, copying: bool
    ) -> None:
        device = SimulatedDevice()
        link = make_link(device)
        (link.sending if copying else device.compute).held = True
        waiting = [link.stage(device.tensor(numbers(MEBIBYTE, seed))) for seed in range(3)]
        written = link.write(waiting[0])
        if copying:
            until(lambda: len(link.sending.operations) == 4)
        else:
            time.sleep(0.02)
        device.fail(RuntimeError("CUDA error: an illegal memory access was encountered"))
        with pytest.raises(TransportError, match=r"link 0->1: .*illegal memory access") as failed:
            written.result(5.0)
        assert isinstance(failed.value.__cause__, RuntimeError)
        until(lambda: all(payload.ready for payload in waiting))  # so that the writing thread meets it
        for payload in waiting:
            with pytest.raises(TransportError, match="illegal memory access"):
                payload.write(link.outbound, describe(1, payload), soon())
        with pytest.raises(TransportError, match="illegal memory access"):
            link.stage(torch.zeros(3))
        link.outbound.write_bye(soon())
        farewell = link.far_inbox.next(link.outbound, soon())
        assert farewell is not None
        assert farewell.kind == Event.Kind.BYE, "what comes behind in the ring gets out"

    def test_closing_does_not_wait_for_a_device_that_hangs(self) -> None:
        device = SimulatedDevice()
        link = CopiedLink(device)
        device.compute.held = True
        link.stage(device.tensor(numbers(10)))
        start_s = time.monotonic()
        for _ in range(2):
            link.copies.close(0.05)
        assert time.monotonic() - start_s < 10.0
        assert link.copies._outgoing._thread.is_alive()
        device.let_go(device.compute)
        link.copies._outgoing._thread.join(5.0)
        assert not link.copies._outgoing._thread.is_alive()
        link.close()

    def test_a_ring_stays_locked_for_a_device_that_hangs(self, caplog: pytest.LogCaptureFixture) -> None:
        device = SimulatedDevice()
        link = CopiedLink(device)
        link.sending.held = True
        written = link.write(link.stage(device.tensor(numbers(10))))
        until(lambda: bool(link.sending.operations))
        link.copies.close(0.02)
        assert link.outbound.slots_address in device.locked
        assert "pinned buffers stay allocated" in caplog.text
        device.let_go(link.sending)
        written.result(5.0)
        link.close()
        assert device.locked == {}


class TestReceiving:
    @pytest.mark.parametrize("first", ORDERS)
    def test_what_is_computed_with_is_what_was_received(self, make_link: MakeLink, first: str | None) -> None:
        for seed in range(3):
            device = SimulatedDevice(seed, first=first)
            link = make_link(device)
            values = [torch.randn(SLOT, 3, generator=torch.Generator().manual_seed(number)) for number in range(6)]
            receipts = [link.receive(value, asked=bool(number % 2)) for number, value in enumerate(values)]
            for receipt in receipts[:3]:
                receipt.begin()
                receipt.begin()
            seen = []
            for receipt in receipts:
                tensor = receipt.take()
                seen.append(device.read(tensor))
                assert device.kept[-1] == (tensor.data_ptr(), "compute")
                del tensor
            del receipts, receipt
            gc.collect()
            device.run()
            assert all(torch.equal(one, other) for one, other in zip(seen, values, strict=True))
            assert device.pageable_copies == 0

    def test_the_simulated_device_shows_a_wait_that_is_missing(self, make_link: MakeLink) -> None:
        device = SimulatedDevice(first="compute", ignores_waits=True)
        link = make_link(device)
        link.receiving.held = True
        seen = device.read(link.receive(numbers(100)).take())
        device.run()
        assert (seen == POISON).all()
        device.let_go(link.receiving)

    def test_taking_never_waits_and_slots_are_kept_until_they_were_read(self, make_link: MakeLink) -> None:
        device = SimulatedDevice()
        link = make_link(device)
        link.receiving.held = True
        seen = device.read(link.receive(numbers(2 * PART)).take())
        device.run()
        time.sleep(0.02)
        assert (seen == 0).all()
        assert link.inbound.claim_slots(SLOTS, 0.0)[1] == SLOTS // 2, "the others are still read"
        device.let_go(link.receiving)
        freed = list[int]()  # part by part, and each claim takes what it finds
        until(lambda: freed.append(link.inbound.claim_slots(SLOTS, 0.0)[1]) or sum(freed) == SLOTS // 2)
        device.run()
        assert torch.equal(seen, numbers(2 * PART))

    def test_more_than_a_ring_holds_comes_through_it(self, make_link: MakeLink) -> None:
        device = SimulatedDevice()
        link = make_link(device)
        for number in range(3):
            values = numbers(5 * SLOTS * SLOT + 11, number)
            seen = device.read(link.receive(values).take())
            device.run()
            assert torch.equal(seen, values)
        assert len(link.copies._incoming._unused_events) < 3 * 20, "events are used again"

    def test_parts_may_be_handled_by_several_threads_in_any_order(self, make_link: MakeLink) -> None:
        device = SimulatedDevice()
        link = make_link(device)
        for number in range(4):
            value = numbers(3 * PART, number)
            link.send(value, asked=True)
            until(lambda: link.inbound.backlog == 3 * PART // SLOT)
            events = []
            while (event := link.inbox.next(link.inbound, 0.0)) is not None:
                events.append(event)
            assert len(events) >= 3
            *early, receipt = [link.copies.receive_part(each, torch.uint8, link.inbound) for each in reversed(events)]
            assert not any(early)
            assert receipt is not None
            seen = device.read(receipt.take())
            device.run()
            assert torch.equal(seen, value)

    def test_a_message_is_finished_over_the_next_ring(self, make_link: MakeLink) -> None:
        device = SimulatedDevice()
        link = make_link(device)
        values = numbers(3 * SLOTS * SLOT)
        link.receiving.held = True
        link.inbox.ask(iteration=0, direction=0, chunk=0, micro_batch=0)
        with pytest.raises(TimeoutError):
            link.inbound.write(describe(0, values), values.data_ptr(), values.nbytes, time.monotonic() + 0.02)
        for _ in range(3):
            assert link.read() is None
        old = link.inbound
        waiting = threading.Thread(target=link.connect)
        waiting.start()
        time.sleep(0.02)
        assert old.slots_address in device.locked, "the device still reads it"
        device.let_go(link.receiving)
        waiting.join(5.0)
        assert old.slots_address not in device.locked
        late = link.inbox.next(old, soon())
        assert late is not None
        assert link.copies.receive_part(late, torch.uint8, old) is None
        assert device.pageable_copies == 1, "by a thread that is late, out of the old ring"
        link.threads.submit(link.inbound.write, describe(0, values), values.data_ptr(), values.nbytes, soon())
        while (receipt := link.read()) is None:
            pass
        seen = device.read(receipt.take())
        device.run()
        assert torch.equal(seen, values)

    def test_a_message_that_is_not_asked_for_takes_no_device_memory(self, make_link: MakeLink) -> None:
        device = SimulatedDevice()
        link = make_link(device)
        before = len(device._memories)
        receipt = link.receive(numbers(100), asked=False)
        assert (len(device._memories), device.copies) == (before, 0)
        receipt.begin()
        assert (len(device._memories), device.copies) == (before + 1, 1)

    def test_messages_without_bytes_are_received(self, make_link: MakeLink) -> None:
        device = SimulatedDevice()
        link = make_link(device)
        locks = device.page_locks_made
        for asked in (False, True):
            assert link.receive(torch.empty(2, 0), asked=asked).take().shape == (2, 0)
        assert device.page_locks_made == locks

    def test_a_double_is_dropped_while_it_is_copied(self, make_link: MakeLink) -> None:
        device = SimulatedDevice()
        link = make_link(device)
        link.receiving.held = True
        link.receive(numbers(PART))
        gc.collect()
        device.let_go(link.receiving)
        device.run()
        again = device.read(link.receive(numbers(PART, 1)).take())
        device.run()
        assert torch.equal(again, numbers(PART, 1))

    def test_memory_of_early_messages_is_page_locked_once_and_whole(self, make_link: MakeLink) -> None:
        device = SimulatedDevice()
        link = make_link(device)
        rings = dict(device.locked)
        sizes = [40 * 1024, 41 * 1024, 3 * MEBIBYTE, 100, 42 * 1024]
        for number in range(40):
            values = numbers(sizes[number % len(sizes)], number)
            seen = device.read(link.receive(values, asked=False).take())
            device.run()
            assert torch.equal(seen, values)
        assert device.pageable_copies == 0
        locked = {address: nbytes for address, nbytes in device.locked.items() if address not in rings}
        assert device.page_locks_made == len(rings) + len(locked), "never again for a larger message"
        assert len(locked) <= 8
        for address, nbytes in locked.items():
            assert address % mmap.PAGESIZE == nbytes % mmap.PAGESIZE == 0
        assert max(locked.values()) == 4 * MEBIBYTE, "in steps of two MiB"
        link.close()
        assert device.locked == {}

    def test_an_error_of_the_device_is_raised_where_a_message_is_taken(self, make_link: MakeLink) -> None:
        device = SimulatedDevice()
        link = make_link(device)
        begun, fresh, parts = (link.receive(numbers(10), asked=asked) for asked in (False, False, True))
        begun.begin()
        device.fail(RuntimeError("CUDA error: device lost"))
        late = link.receive(numbers(3 * SLOTS * SLOT))
        for receipt in (begun, fresh, parts, late, link.receive(numbers(10), asked=False)):
            with pytest.raises(TransportError, match=r"link 0->1: .*device lost"):
                receipt.take()

    def test_no_room_for_a_message_is_reported_as_that(
        self, make_link: MakeLink, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB")

        device = SimulatedDevice()
        link = make_link(device)
        monkeypatch.setattr(device, "empty", full)
        for asked in (False, True):
            receipt = link.receive(numbers(10), asked=asked)
            with pytest.raises(
                TransportError, match=r"link 0->1: the device has no memory left .* 64.00 MiB"
            ) as failed:
                receipt.take()
            assert "CUDA_LAUNCH_BLOCKING" not in str(failed.value)

    def test_memory_stays_locked_for_a_device_that_hangs(self, caplog: pytest.LogCaptureFixture) -> None:
        device = SimulatedDevice()
        link = CopiedLink(device)
        link.receiving.held = True
        link.receive(numbers(10), asked=False).begin()
        link.receive(numbers(10))
        link.copies.close(0.02)
        assert link.inbound.slots_address in device.locked
        assert len(device.locked) >= 2
        assert "their pinned buffers stay allocated" in caplog.text
        device.let_go(link.receiving)
        link.close()
        assert device.locked == {}


@pytest.mark.parametrize("refused", [False, True])
def test_where_nothing_can_be_page_locked_the_links_threads_copy(
    make_link: MakeLink, caplog: pytest.LogCaptureFixture, refused: bool
) -> None:
    device = SimulatedDevice()
    device.refuses_page_locks = refused
    link = make_link(device)
    payload = link.stage(device.tensor(numbers(2 * PART)))
    assert torch.equal(link.carry(payload), numbers(2 * PART))
    receipts = [link.receive(numbers(100, seed), asked=seed == 1) for seed in range(2)]
    assert (device.copies, device.pageable_copies) == ((4, 4) if refused else (3, 0)), "before one is taken"
    seen = [device.read(receipt.take()) for receipt in receipts]
    device.run()
    assert all(torch.equal(each, numbers(100, seed)) for seed, each in enumerate(seen))
    assert [record.levelname for record in caplog.records] == ["WARNING"] * refused
    assert ("operation not permitted" in caplog.text) == refused


def test_rings_are_page_locked_for_their_session(make_link: MakeLink) -> None:
    device = SimulatedDevice()
    link = make_link(device)
    for _ in range(3):
        assert device.locked == {ring.slots_address: ring.slots_nbytes for ring in (link.outbound, link.inbound)}
        link.connect()
    link.copies.close(1.0)
    assert device.locked == {}


def test_a_ring_of_a_device_that_hangs_stays_locked_and_mapped(make_link: MakeLink) -> None:
    device = SimulatedDevice()
    link = make_link(device)
    link.sending.held = True
    link.write(link.stage(device.tensor(numbers(10))))
    until(lambda: bool(link.sending.operations))
    address = link.outbound.slots_address
    link.connect()
    gc.collect()
    assert address in device.locked
    with open("/proc/self/maps") as maps:
        assert any(int(line.split("-")[0], 16) <= address < int(line.split("-")[1].split()[0], 16) for line in maps)
    device.let_go(link.sending)
    device.run()


def test_both_directions_of_a_link_have_streams_of_their_own(make_link: MakeLink) -> None:
    device = SimulatedDevice()
    link = make_link(device)
    assert len({id(link.sending), id(link.receiving), id(device.compute), id(device.memory_stream)}) == 4
    link.sending.held = True
    written = link.write(link.stage(device.tensor(numbers(100))))
    seen = device.read(link.receive(numbers(50)).take())
    device.run()
    assert torch.equal(seen, numbers(50)), "a transfer that stands still stops nothing else"
    assert not written.done()
    device.let_go(link.sending)
    assert torch.equal(link.arrive(), numbers(100))


def test_on_the_cpu_nothing_is_copied() -> None:
    copies = copies_for(device_of(torch.device("cpu")), link="0->1", pooled_nbytes=77, on_ready=lambda: None)
    assert isinstance(copies, NoCopies)
    assert (copies.pooled_nbytes, copies.by_parts) == (77, False)
    tensor = torch.arange(4.0)
    payload = copies.stage(copies.computed(tensor))
    assert payload.ready
    assert payload.inline
    receipt = copies.receive(tensor, 4096)
    receipt.begin()
    assert receipt.take() is tensor
    copies.close(0.0)


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="meta"):
        device_of(torch.device("meta"))
