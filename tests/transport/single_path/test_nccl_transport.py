# SPDX-License-Identifier: Apache-2.0
"""The plain device path on simulated GPUs and NCCL, where what reads without having waited shows as poison."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.gpu.simulated_device import POISON, SimulatedEvent
from support.gpu.simulated_nccl import SimulatedCommunicator
from support.gpu.simulated_pipeline import ProcessEndedError, SimulatedStage, play

from adaptra_megatron.transport.gpu.device_clock import DeviceClock
from adaptra_megatron.transport.message_keys import Direction, MessageKey, TensorSpecification, TransportError
from adaptra_megatron.transport.setup.rendezvous import Rendezvous
from adaptra_megatron.transport.single_path import nccl_transport
from adaptra_megatron.transport.single_path.nccl_transport import StreamTransport

NBYTES = 50_000
CPU = torch.device("cpu")
FIXED = TensorSpecification((NBYTES,), torch.uint8, CPU)
VARYING = TensorSpecification(None, torch.uint8, CPU)


def key(micro_batch: int, direction: Direction = Direction.ACTIVATION) -> MessageKey:
    return MessageKey(0, direction, 0, micro_batch)


def numbers(seed: int, nbytes: int = NBYTES) -> torch.Tensor:
    return torch.randint(0, 255, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def soon() -> float:
    return time.monotonic() + 10.0


def finish(stage: SimulatedStage) -> None:
    """As the end of an iteration: wait for all computation."""
    stage.device.record(stage.device.compute).synchronize()


def forward_end(stage: SimulatedStage) -> SimulatedCommunicator:
    """Its end of the link from stage 0 to stage 1."""
    (end,) = [each for each in stage.nccl.fabric.of(stage.device) if each.name.endswith(" 0>1")]
    return end


def has_left(stage: SimulatedStage) -> None:
    """Wait until all that was sent over that link has been received."""
    stage.device.run_until(lambda: all(each.over for each in forward_end(stage).launched))


def relay(specification: TensorSpecification, seed: int) -> Callable[[SimulatedStage, Rendezvous], Any]:
    """Each stage computes on what comes from the one before and sends the result on; gradients go back."""
    count = 5

    def size(number: int) -> int:
        return NBYTES if specification is FIXED else 1000 * (number + 1)

    def program(stage: SimulatedStage, rendezvous: Rendezvous) -> list[torch.Tensor]:
        transport = stage.transport(rendezvous)
        device, here, last = stage.device, stage.stage, rendezvous.stages - 1
        transport.describe(specification)
        seen = []
        for number in range(count):
            if here > 0:
                transport.post_receive(key(number), here - 1)
                seen.append(device.read(transport.wait(key(number), soon())))
            if here < last:
                transport.post_send(key(number), here + 1, device.tensor(numbers(10 * seed + number, size(number))))
        for number in range(count):
            gradient = key(number, Direction.GRADIENT)
            if here < last:
                transport.post_receive(gradient, here + 1)
                seen.append(device.read(transport.wait(gradient, soon())))
            if here > 0:
                transport.post_send(gradient, here - 1, device.tensor(numbers(10 * seed + number, size(number))))
        finish(stage)
        transport.flush(soon())
        assert transport.close(drained=True)
        assert not [each for each in stage.nccl.fabric.of(device) if not each.finalized]
        return seen

    return program


@pytest.mark.parametrize("specification", [FIXED, VARYING], ids=["fixed", "varying"])
def test_messages_are_read_when_they_are_there_and_sent_when_they_are_computed(
    specification: TensorSpecification,
) -> None:
    for seed, stages in ((1, 2), (2, 3)):
        for seen in play(stages, relay(specification, seed)):
            assert not isinstance(seen, Exception), seen
            for number, tensor in enumerate(seen):
                nbytes = NBYTES if specification is FIXED else 1000 * (number % 5 + 1)
                assert torch.equal(tensor, numbers(10 * seed + number % 5, nbytes))


def together(program: Callable[[SimulatedStage, StreamTransport], Any], stages: int = 2, **settings: Any) -> list[Any]:
    """Run a program on each stage; raises what one of them raised."""

    def run(stage: SimulatedStage, rendezvous: Rendezvous) -> Any:
        transport = stage.transport(rendezvous, **settings)
        transport.describe(FIXED)
        try:
            return program(stage, transport)
        finally:
            transport.close(drained=False)

    results = play(stages, run)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def test_receives_are_on_the_device_when_they_are_posted_and_no_thread_waits_for_them() -> None:
    posted = threading.Barrier(2)

    def program(stage: SimulatedStage, transport: StreamTransport) -> None:
        device, end = stage.device, forward_end(stage)
        before = len(end.launched)
        if stage.stage == 1:
            buffers = []
            for number in range(4):
                transport.post_receive(key(number), 0)
                assert len(end.launched) == before + number + 1
                assert not transport.ready(key(number))
            for number in (2, 0, 1, 3):  # in any order
                buffers.append((number, device.read(transport.wait(key(number), soon()))))
            posted.wait(10.0)
            finish(stage)
            for number, read in buffers:
                assert torch.equal(read, numbers(number))
        else:
            posted.wait(10.0)
            for number in range(4):
                transport.post_send(key(number), 1, device.tensor(numbers(number)))
                assert len(end.launched) == before + number + 1
            has_left(stage)
        assert end.threads.keys() <= {threading.current_thread().name}

    together(program)


def test_a_receive_comes_behind_what_computation_does_with_its_memory() -> None:
    """Memory of computation's own may be in use until computation has come to the post."""

    def program(stage: SimulatedStage, transport: StreamTransport) -> None:
        device = stage.device
        if stage.stage == 0:
            transport.post_send(key(0), 1, device.tensor(numbers(0)))
            has_left(stage)
            return
        device.compute.held = True
        transport.post_receive(key(0), 0)
        buffer = transport.wait(key(0), soon())
        time.sleep(0.02)
        assert set(buffer.tolist()) == {POISON}
        device.let_go(device.compute)
        read = device.read(buffer)
        finish(stage)
        assert torch.equal(read, numbers(0))

    together(program)


def clock_of(stage: SimulatedStage) -> DeviceClock:
    apart = stage.device.new_stream()

    class Events:
        def new_event(self) -> SimulatedEvent:
            return SimulatedEvent(stage.device)

        def record_apart(self) -> SimulatedEvent:
            return stage.device.record(apart)

    return DeviceClock(Events(), stage.device.clock_s)


def test_messages_are_timed_by_computation_that_waits_for_them() -> None:
    """And no event on a link's stream tells the time: behind a kernel of NCCL it holds up a shared hardware queue."""

    moments: dict[tuple[int, str], float] = {}

    def program(stage: SimulatedStage, rendezvous: Rendezvous) -> Any:
        clock, device = clock_of(stage), stage.device
        transport = stage.transport(rendezvous, clock=clock)
        transport.describe(FIXED)
        for number in range(2):
            if stage.stage == 0:
                time.sleep(0.05)
                moments[number, "sends"] = time.monotonic()
                transport.post_send(key(number), 1, device.tensor(numbers(number)))
                moments[number, "has sent"] = time.monotonic()
                has_left(stage)
            else:
                transport.post_receive(key(number), 0)
                transport.wait(key(number), soon())
                finish(stage)
                moments[number, "came"] = time.monotonic()
                time.sleep(0.05)
        times = transport.take_times()
        assert transport.take_times() == ([], [])
        error_s = clock._anchors[-1].width_s if stage.stage else 0.0
        transport.close(drained=False)
        assert device.timed_on <= {device.compute.name}
        return times, error_s

    (sent, _), (received, error_s) = play(2, program)
    assert sent[1] == [] == received[0]
    assert [(each.key, each.peer, each.nbytes) for each in sent[0]] == [(key(n), 1, NBYTES) for n in range(2)]
    assert [(each.key, each.peer, each.nbytes) for each in received[1]] == [(key(n), 0, NBYTES) for n in range(2)]
    for number, (leaves, comes) in enumerate(zip(sent[0], received[1], strict=True)):
        assert moments[number, "sends"] <= leaves.posted_s <= moments[number, "has sent"]
        assert comes.posted_s <= comes.done_s
        assert moments[number, "sends"] - error_s <= comes.done_s <= moments[number, "came"] + error_s, "not when used"


def test_a_message_that_computation_finds_there_says_nothing_of_its_link() -> None:
    """It came some time before: measured as awaited, a link that plans hide would look as slow as they allow."""

    now_s = [0.0]  # by hand: a thread may lose its core between two events

    def program(stage: SimulatedStage, rendezvous: Rendezvous) -> Any:
        stage.device.clock_s = lambda: now_s[0]
        transport = stage.transport(rendezvous, clock=clock_of(stage))
        transport.describe(FIXED)
        if stage.stage == 0:
            transport.post_send(key(0), 1, stage.device.tensor(numbers(0)))
            has_left(stage)
        else:
            transport.post_receive(key(0), 0)
            has_left(stage)
            now_s[0] += 0.05
            transport.wait(key(0), soon())
            finish(stage)
        times = transport.take_times()[1]
        transport.close(drained=False)
        return times

    _nothing, (times,) = play(2, program)
    assert times.posted_s == times.done_s


def test_nothing_of_ours_stands_behind_a_transfer_on_a_links_stream() -> None:
    """But the event that computation waits for: headers are copied elsewhere."""

    def program(stage: SimulatedStage, transport: StreamTransport) -> None:
        if stage.stage == 1:
            for number in range(2):
                transport.post_receive(key(number), 0)
                transport.wait(key(number), soon())
            finish(stage)
            return
        transport.describe(VARYING)
        forward = transport._links[0, 1]
        device, stream = stage.device, forward._stream
        stream.held = True
        for number in range(2):
            transport.post_send(key(number), 1, device.tensor(numbers(number)))
        works = [each for each in stream.operations if callable(each)]
        device.let_go(stream)
        has_left(stage)
        assert works == []

    def run(stage: SimulatedStage, transport: StreamTransport) -> None:
        transport.describe(VARYING)
        program(stage, transport)

    together(run)


def test_what_has_left_makes_room_for_what_is_received_next() -> None:
    """Not only when more is sent over the same link, or the watch looks: that may be an activation too much."""

    left = threading.Event()

    def program(stage: SimulatedStage, transport: StreamTransport) -> None:
        stage.watch.close()
        if stage.stage == 1:
            transport.post_receive(key(0), 0)
            transport.post_receive(key(1), 0)
            transport.post_send(key(0, Direction.GRADIENT), 0, numbers(0))
            stage.device.run_until(left.is_set)  # or it closes first, and the other's message comes to no end
            return
        tensors = [stage.device.tensor(numbers(0))]
        address = tensors[0].data_ptr()
        transport.post_send(key(0), 1, tensors.pop())
        has_left(stage)
        left.set()
        stage.device.run()
        assert address not in stage.device.freed
        transport.post_receive(key(0, Direction.GRADIENT), 1)
        assert address in stage.device.freed
        transport.post_send(key(1), 1, numbers(1))

    together(program)


def test_without_a_clock_nothing_is_timed() -> None:
    def program(stage: SimulatedStage, transport: StreamTransport) -> None:
        if stage.stage == 0:
            transport.post_send(key(0), 1, stage.device.tensor(numbers(0)))
        else:
            transport.post_receive(key(0), 0)
            transport.wait(key(0), soon())
        assert transport.take_times() == ((), ())

    together(program)


def test_an_error_names_stage_link_key_cause_and_remedy() -> None:
    def program(stage: SimulatedStage, transport: StreamTransport) -> None:
        for group in transport._links.values():
            group.abort("NCCL has fallen over")
        calls = (lambda: transport.post_send(key(7), 1, numbers(0)), lambda: transport.post_receive(key(7), 0))
        with pytest.raises(TransportError) as failed:
            calls[stage.stage]()
        rank_name = f"rank {stage.stage}"
        for part in (rank_name, "link 0->1", str(key(7)), "fallen over", "Look at the rank at the other end"):
            assert part in str(failed.value)
        assert isinstance(failed.value.__cause__, RuntimeError)

    together(program)


def test_no_memory_for_a_message_is_not_taken_for_a_peer_that_died(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB")

    def program(stage: SimulatedStage, transport: StreamTransport) -> None:
        if stage.stage == 1:
            monkeypatch.setattr(stage.device, "empty", full)
            with pytest.raises(TransportError, match=r"link 0->1: the device has no memory .* 64.00 MiB") as failed:
                transport.post_receive(key(0), 0)
            assert "other end" not in str(failed.value)

    together(program)


class ModelError(Exception):
    """What a stage fails with."""


def fails_at(failing: int | None, place: int, failed: Callable[[], None]) -> Callable[..., str]:
    """An iteration of F and B steps; stage `failing` fails at one of them."""
    count = 6

    def program(stage: SimulatedStage, rendezvous: Rendezvous) -> str:
        transport = stage.transport(rendezvous)
        transport.describe(FIXED)
        device, here, last = stage.device, stage.stage, rendezvous.stages - 1
        steps = 0
        try:
            for direction in (Direction.ACTIVATION, Direction.GRADIENT):
                before, after = (here - 1, here + 1) if direction is Direction.ACTIVATION else (here + 1, here - 1)
                if 0 <= before <= last:
                    for number in range(count):
                        transport.post_receive(key(number, direction), before)
                for number in range(count):
                    if here == failing and steps == place:
                        failed()
                        raise ModelError
                    steps += 1
                    made = device.tensor(numbers(number))
                    if 0 <= before <= last:
                        made = transport.wait(key(number, direction), soon())
                    if 0 <= after <= last:
                        transport.post_send(key(number, direction), after, made)
            finish(stage)
        except BaseException:
            transport.close(drained=False)
            raise
        transport.close(drained=True)
        return "trained"

    return program


@pytest.mark.parametrize("seed", range(4))
def test_an_error_in_one_stage_ends_all_though_receives_are_pending(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an error of their own, or, where they wait for their device, as a last resort."""
    monkeypatch.setattr(nccl_transport, "GRACE_S", 0.3)
    lot, failed_s = random.Random(seed), list[float]()
    train = fails_at(lot.randrange(4), lot.randrange(12), lambda: failed_s.append(time.monotonic()))

    def program(stage: SimulatedStage, rendezvous: Rendezvous) -> Any:
        stage.device.patience_s = 60.0
        _hear_of_aborts(stage)
        return train(stage, rendezvous)

    results = play(4, program)
    assert time.monotonic() - failed_s[0] < 10.0
    assert sum(isinstance(result, ModelError) for result in results) == 1
    for result in results:
        assert result == "trained" or isinstance(result, (ModelError, TransportError, ProcessEndedError)), result


def _hear_of_aborts(stage: SimulatedStage) -> None:
    """As NCCL's network transports do: an end whose peer was aborted reports an error."""
    abort = stage.nccl.abort

    def abort_and_report(handle: int) -> None:
        communicator = stage.nccl.fabric.communicators[handle - 1]
        abort(handle)
        for end in communicator.pair.ends.values():
            end.error = "remote process exited or there was a network error"

    stage.nccl.abort = abort_and_report


def test_nothing_fails_where_nothing_is_wrong() -> None:
    """The program of the test above, without its error."""
    assert play(4, fails_at(None, 0, lambda: None)) == ["trained"] * 4


def test_a_link_that_fails_ends_the_process_and_its_receives_never(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Were they to end, computation would take what is in their memory for messages."""
    monkeypatch.setattr(nccl_transport, "GRACE_S", 0.2)
    caplog.set_level(logging.ERROR, "adaptra_megatron")

    def program(stage: SimulatedStage, rendezvous: Rendezvous) -> None:
        transport = stage.transport(rendezvous)
        transport.describe(FIXED)
        if stage.stage == 0:
            stage.ended.wait(2.0)
            return
        stage.device.patience_s = 60.0
        transport.post_receive(key(0), 0)
        read = stage.device.read(transport.wait(key(0), soon()))
        end = forward_end(stage)
        end.error = "remote process exited"
        with pytest.raises(ProcessEndedError):
            finish(stage)
        assert not end.aborted
        assert not read.any(), "computation has not come to it"
        with pytest.raises(TransportError, match="remote process exited"):
            transport.post_receive(key(1), 0)
        assert transport.close(drained=True)
        assert end.aborted

    results = play(2, program)
    assert results == [None, None]
    # A thread that finds the simulated process ended would have ended with it.
    (said,) = (each for each in caplog.messages if "ProcessEndedError" not in each)
    assert "rank 1, link 0->1: the device path failed" in said
    assert "remote process exited" in said


def test_a_message_that_does_not_come_is_an_error_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_transport, "GRACE_S", 0.2)

    def program(stage: SimulatedStage, rendezvous: Rendezvous) -> None:
        transport = stage.transport(rendezvous)
        transport.describe(FIXED)
        if stage.stage == 0:
            stage.ended.wait(2.0)
            return
        stage.device.patience_s = 60.0
        transport.post_receive(key(0), 0)
        transport.wait(key(0), time.monotonic() + 0.1)
        with pytest.raises(ProcessEndedError):
            finish(stage)
        with pytest.raises(TransportError, match="did not come in time"):
            transport.flush(soon())
        transport.close(drained=False)

    assert play(2, program) == [None, None]
