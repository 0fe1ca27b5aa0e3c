# SPDX-License-Identifier: Apache-2.0
"""T4: the plain device path between two stages over real NCCL: iterations in a plan's order, arrival times, errors."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import torch

from adaptra_megatron.engine.execution.inbox import Addresses, Inbox
from adaptra_megatron.engine.execution.stage_program import compile_program
from adaptra_megatron.schedule.ir import Action, Kind, Schedule
from adaptra_megatron.transport.message_keys import Direction, MessageKey, TensorSpecification
from adaptra_megatron.transport.single_path.nccl_transport import StreamTransport
from gpu_check.findings import Report
from gpu_check.stages import Stage

MICRO_BATCHES = 8
PLANS = {"one in flight more per stage, as stock": (2, 1), "7 and 2 in flight": (7, 2)}
ITERATIONS = 5
SMALL_NBYTES, LARGE_NBYTES = 4096, 16 << 20
"""Less and more than NCCL's buffers."""
LAST_MADE = 1000
"""What the last stage adds to what it sends back."""
PAUSES_S = (0.0, 0.005, 0.02)
ROUNDS = 15
NEAR_S = 5e-3
"""Processes that share a GPU have it in turns, of some milliseconds."""
WAIT_S = 30.0
PATIENCE_S = 3.0
"""How long the stage waits whose neighbour has failed."""


def run(stage: Stage, report: Report, part: str) -> None:
    """`part`: a name in PARTS."""
    PARTS[part](stage, report)


def in_flight_schedule(first: int, last: int, micro_batches: int = MICRO_BATCHES) -> Schedule:
    """Two stages that hold so many activations."""
    counts = (first, last)
    orders = tuple(tuple(_order(stage, counts[stage], micro_batches)) for stage in range(2))
    return Schedule(stages=2, chunks=1, micro_batches=micro_batches, orders=orders)


def _order(stage: int, in_flight: int, micro_batches: int) -> Iterator[Action]:
    yield from (Action(stage, Kind.FORWARD, 0, number) for number in range(in_flight))
    for number in range(micro_batches):
        yield Action(stage, Kind.BACKWARD, 0, number)
        if number + in_flight < micro_batches:
            yield Action(stage, Kind.FORWARD, 0, number + in_flight)


def iterations(stage: Stage, report: Report) -> None:
    """Run iterations of each plan, with messages small and large."""
    promise = "all links connect"
    report.begin(promise)
    begun_s = time.monotonic()
    transport = stage.transport(WAIT_S)
    if stage.stage == 0:
        report.show(promise, f"after {time.monotonic() - begun_s:.1f} s", True)
    number = 0
    for name, counts in PLANS.items():
        for nbytes in (SMALL_NBYTES, min(LARGE_NBYTES, stage.largest_nbytes)):
            promise = f"iterations with {name} end, messages of {nbytes} bytes, and bring what was sent"
            report.begin(promise)
            wrong, seconds = 0, []
            for _ in range(ITERATIONS):
                begun_s = time.monotonic()
                wrong += _iterate(stage, transport, in_flight_schedule(*counts), number, nbytes)
                seconds.append(time.monotonic() - begun_s)
                number += 1
            if stage.stage == 0:
                seen = f"{wrong} of {ITERATIONS * MICRO_BATCHES} wrong; the first took {seconds[0]:.2f} s"
                report.show(promise, f"{seen}, the last {seconds[-1]:.2f} s", wrong == 0)
    transport.close(drained=True)


def _iterate(stage: Stage, transport: StreamTransport, schedule: Schedule, iteration: int, nbytes: int) -> int:
    """What PipelineExecutor does, without Megatron; returns how many messages came back wrong, on the first stage."""
    program = compile_program(schedule, stage.stage)
    transport.describe(TensorSpecification((nbytes // 4,), torch.int32, stage.tensors))
    addresses = Addresses(stage.rendezvous.ranks, iteration)
    inbox = Inbox(transport, program, addresses, timeout_s=WAIT_S)
    inputs: dict[int, torch.Tensor] = {}
    back: dict[int, torch.Tensor] = {}
    for step in program.steps:
        inbox.post_before(step)
        here = step.action.micro_batch
        received = inbox.take(step.receive) if step.receive is not None else None
        if step.action.kind is Kind.FORWARD:
            made = stage.tensor(_value(iteration, here), nbytes)
            if received is not None:
                inputs[here] = received
        elif received is not None:
            back[here] = received
        else:
            made = stage.plus(inputs.pop(here), LAST_MADE)
        inbox.post_before_send(step)
        if step.send is not None:
            transport.post_send(addresses.key(step.send), addresses.ranks[step.send.target], made)
    seen = {number: stage.read(tensor) for number, tensor in back.items()}
    stage.synchronize()
    transport.flush(time.monotonic() + WAIT_S)
    transport.take_times()
    return sum(bool((tensor != _value(iteration, number) + LAST_MADE).any()) for number, tensor in seen.items())


def _value(iteration: int, micro_batch: int) -> int:
    return MICRO_BATCHES * iteration + micro_batch


def arrivals(stage: Stage, report: Report) -> None:
    """What the receiver measures of a sender that is late."""
    promise = f"arrivals are timed, within {1e3 * NEAR_S:g} ms, as late as the sender was, and never early"
    report.begin(promise)
    transport = stage.transport(WAIT_S)
    transport.describe(TensorSpecification((SMALL_NBYTES // 4,), torch.int32, stage.tensors))
    moments: list[list[float]] = []
    for pause_s in PAUSES_S:
        moments.append([_exchange(stage, transport, f"{pause_s} {number}", pause_s) for number in range(ROUNDS)])
    sent, arrived = stage.rendezvous.gather("moments", moments)
    if stage.stage == 0:
        after_ms = [
            sorted(1e3 * (there - here) for here, there in zip(*of_pause, strict=True))
            for of_pause in zip(sent, arrived, strict=True)
        ]
        bias_ms = [statistics.median(each) for each in after_ms]
        spread_ms = [each[3 * ROUNDS // 4] - each[ROUNDS // 4] for each in after_ms]
        seen = "; ".join(
            f"sender {1e3 * pause_s:g} ms late: seen {bias:.2f} ms after it was sent (quartiles {spread:.2f} ms apart)"
            for pause_s, bias, spread in zip(PAUSES_S, bias_ms, spread_ms, strict=True)
        )
        early_ms = min(map(min, after_ms))
        report.show(promise, seen, max(bias_ms) - min(bias_ms) <= 1e3 * NEAR_S and early_ms > -1.0)
    transport.close(drained=True)


def _exchange(stage: Stage, transport: StreamTransport, name: str, pause_s: float) -> float:
    """When the message was sent, and when its receiver saw it."""
    key = MessageKey(0, Direction.ACTIVATION, 0, 0)
    if stage.stage == 0:
        tensor = stage.tensor(1, SMALL_NBYTES)
        stage.synchronize()
        stage.rendezvous.gather(name, None)
        time.sleep(pause_s)
        moment_s = time.monotonic()
        transport.post_send(key, 1, tensor)
        transport.take_times()
        return moment_s
    transport.post_receive(key, 0)
    stage.rendezvous.gather(name, None)
    transport.wait(key, time.monotonic() + WAIT_S)
    stage.synchronize()
    (times,) = transport.take_times()[1]
    return times.done_s


def error(stage: Stage, report: Report) -> None:
    """One stage raises in the middle of an iteration; the other waits for its message. Both are to end as failed."""
    transport = stage.transport(PATIENCE_S)
    try:
        _iterate(stage, transport, in_flight_schedule(*PLANS["7 and 2 in flight"]), 0, SMALL_NBYTES)
        stage.rendezvous.gather("one iteration", None)
        key = MessageKey(1, Direction.GRADIENT, 0, 0)
        if stage.stage == 1:
            transport.post_receive(MessageKey(1, Direction.ACTIVATION, 0, 0), 0)
            report.begin("an error of a stage ends all processes")
            raise RuntimeError("made to fail")
        transport.post_receive(key, 1)
        transport.wait(key, time.monotonic() + PATIENCE_S)
        stage.synchronize()
        report.show("a message that was not sent does not come", "it came", False)
    finally:
        transport.close(drained=False)


PARTS = {each.__name__: each for each in (iterations, arrivals, error)}
