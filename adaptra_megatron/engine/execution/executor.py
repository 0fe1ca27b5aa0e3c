# SPDX-License-Identifier: Apache-2.0
"""Run one iteration of a pipeline in any valid order of forwards, input gradients and weight gradients.

The order is planned beforehand, or chosen online. Numbers are stock's: the same functions compute, F, B and W of a
chunk each run in micro-batch order, and gradients are accumulated in that order. Only the interleaving of the three,
and the waiting, differ.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from adaptra_megatron.control.stage_memory import MemoryMeter
from adaptra_megatron.engine.execution.inbox import Addresses, Inbox
from adaptra_megatron.engine.execution.stage_program import Program, ProgramStep
from adaptra_megatron.megatron.computation import BackwardPart, ForwardPart, StageComputation
from adaptra_megatron.megatron.gradients.gradient_sync import GradientSync, ParameterSync
from adaptra_megatron.megatron.megatron_call import PipelineCall
from adaptra_megatron.megatron.megatron_iteration import free_content
from adaptra_megatron.schedule.ir import Action, Kind
from adaptra_megatron.telemetry.action_records import ActionRecord
from adaptra_megatron.transport.gpu.device_clock import DeviceClock, Mark
from adaptra_megatron.transport.gpu.training_device import current_device
from adaptra_megatron.transport.message_keys import MessageKey, TensorSpecification, Transport

# Marks in time around actions: the clock where compute blocks the CPU, CUDA events where it does not.


class ActionTimer(Protocol):
    """Marks times without waiting; `resolve` converts the marks of one iteration to seconds of time.monotonic()."""

    def mark(self) -> Any:
        """Return a mark of the present moment, on the device that computes."""

    def over(self, marks: list[Any]) -> bool:
        """Return whether all marks have been reached. Never waits."""

    def resolve(self, marks: list[Any]) -> list[float]:
        """Return the times of the marks, which must not be used again. On a GPU, waits for the last of them."""


class ClockTimer:
    """Timer for computation on the calling thread, by its clock."""

    def mark(self) -> float:
        return time.monotonic()

    def over(self, marks: list[float]) -> bool:
        return True

    def resolve(self, marks: list[float]) -> list[float]:
        return marks


class CudaEventTimer:
    """Timer for computation on the current CUDA stream, by events before and after each action."""

    def __init__(self, clock: DeviceClock) -> None:
        """`clock`: may be shared with a transport, which times messages by it."""
        self._clock = clock
        self.mark = clock.mark

    def over(self, marks: list[Mark]) -> bool:
        return not marks or self._clock.reached(marks[-1])

    def resolve(self, marks: list[Mark]) -> list[float]:
        if not marks:
            return []
        marks[-1].synchronize()
        seconds = self._clock.seconds(marks)
        self._clock.use_again(marks)
        return seconds


def make_timer(clock: DeviceClock | None) -> ActionTimer:
    """Return the timer for the device of `clock`; None: the CPU."""
    return ClockTimer() if clock is None else CudaEventTimer(clock)


# Counts the activations a stage holds, by the rule that the planner and the simulator use.


class ActivationCapError(RuntimeError):
    """An order would hold more activations than the cap; names stage, action, count, cap and bytes where known."""


class ActivationAccount:
    """Counts the activations (of one chunk and micro-batch) held by one stage: F takes 1, its gradients release it.

    If an input gradient releases a negative amount, it takes that amount at its start.
    """

    def __init__(
        self,
        stage: int,
        cap: float | None,
        released_at_backward_input: float,
        meter: MemoryMeter | None = None,
    ) -> None:
        """`meter`: called with every action, to measure the memory of activations."""
        self.stage = stage
        self.held = 0.0
        self.peak = 0.0
        self._cap = cap
        self._meter = meter
        self._released = {
            Kind.FORWARD: 0.0,
            Kind.BACKWARD: 1.0,
            Kind.BACKWARD_INPUT: released_at_backward_input,
            Kind.BACKWARD_WEIGHT: 1.0 - released_at_backward_input,
        }
        self._taken = {kind: -released for kind, released in self._released.items() if released < 0.0}
        self._taken[Kind.FORWARD] = 1.0

    def before(self, action: Action) -> None:
        """Take the activations that the action needs. Raises ActivationCapError rather than exceed the cap.

        Of a combined action, call this for both actions, and then `after`.
        """
        _, kind, chunk, micro_batch, _ = action
        if (taken := self._taken.get(kind, 0.0)) > 0.0:
            if self._cap is not None and self.held + taken > self._cap + _ROUNDING:
                what = "forward" if kind is Kind.FORWARD else "input gradient"
                raise self._refusal(self._cap, taken, f"{what} of micro-batch {micro_batch}, chunk {chunk}")
            self.held += taken
            self.peak = max(self.peak, self.held)
        if self._meter is not None:
            self._meter.before()

    def after(self, action: Action, *, alone: bool = True) -> None:
        """Release the activations that a gradient frees. `alone`: False for both halves of a combined action."""
        self.held -= max(0.0, self._released[action.kind])
        if self._meter is not None:
            self._meter.after(action.kind, action.chunk, alone=alone)

    def _refusal(self, cap: float, taken: float, action: str) -> ActivationCapError:
        nbytes = self._meter.activation_nbytes if self._meter is not None else None
        size = (
            "" if nbytes is None else f" ({(self.held + taken) * nbytes / 1e6:,.0f} MB at {nbytes / 1e6:,.1f} MB each)"
        )
        return ActivationCapError(
            f"stage {self.stage} holds {self.held:g} activations; the {action} would pass the cap of {cap:g}{size}. "
            "Raise --adaptra-max-in-flight, or --adaptra-memory-fraction where the cap was measured, or use another "
            "plan"
        )


_ROUNDING = 1e-9


@dataclass(frozen=True)
class IterationReport:
    """Record of one rank's iteration. On a GPU the kernels are launched but may still run: see `over`, `records`."""

    peak_in_flight: float
    steps: list[ProgramStep]
    """Steps in the order in which they ran; `records` has the same order."""
    addresses: Addresses
    received_nbytes: int
    """Size of the largest activation received from another stage; 0 if none was."""
    over: Callable[[], bool]
    """Returns whether the whole iteration has run on the device. Never waits."""
    resolve: Callable[[], list[ActionRecord]]
    """Returns `records`; may be called once."""

    @functools.cached_property
    def records(self) -> list[ActionRecord]:
        """Return the times of all steps. The first call waits for the last step to end."""
        return self.resolve()

    def computed_s(self) -> dict[MessageKey, float]:
        """Return the time at which each sent message had been computed, by its key in the pipeline."""
        return {
            self.addresses.key_in_pipeline(self.addresses.key(step.send)): record.end_s
            for step, record in zip(self.steps, self.records, strict=True)
            if step.send is not None
        }


Steps = Callable[[Inbox], Iterator[ProgramStep]]
"""Iterates over the steps of an iteration. It may inspect arrivals, and wait for them."""


def planned_steps(program: Program) -> Steps:
    """Return the steps in the plan's order."""
    return lambda inbox: iter(program.steps)


@dataclass
class _Run:
    """State of one iteration."""

    call: PipelineCall
    inbox: Inbox
    computation: StageComputation
    gradients: GradientSync | None
    """None in evaluation."""
    parameters: ParameterSync | None
    account: ActivationAccount
    addresses: Addresses
    received_nbytes: int = 0
    inputs: dict[tuple[int, int], torch.Tensor | None] = field(default_factory=dict)
    outputs: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)


class PipelineExecutor:
    """Runs programs on one stage, with one transport and one timer for the life of the job."""

    def __init__(
        self,
        transport: Transport,
        timer: ActionTimer,
        *,
        timeout_s: float,
        receives_ahead: int = 0,
        plans_differ: bool = False,
    ) -> None:
        """`timeout_s`: longest wait for one message. `receives_ahead`: number of receives posted ahead of time, see
        `Inbox`. `plans_differ`: whether other replicas, with which gradients are reduced, may run other plans.
        """
        self._plans_differ = plans_differ
        self._transport = transport
        self._timer = timer
        self._timeout_s, self._receives_ahead = timeout_s, receives_ahead

    def run(
        self,
        call: PipelineCall,
        computation: StageComputation,
        program: Program,
        addresses: Addresses,
        account: ActivationAccount,
        steps: Steps | None = None,
    ) -> IterationReport:
        """Run every step of `program`. On return gradients are complete, but not yet finalized.

        On a GPU, work launched later sees complete gradients. The last sends may still be in flight; the next run, or
        closing the transport, waits for them. `addresses`: of this attempt. `steps`: the program's steps in another
        order; None: in the program's own. Raises TransportError if a peer fails or is silent for longer than the
        timeout, and the errors of `steps`.
        """
        # Of the iteration before, by whose end the last message would not have been acknowledged: over a slow link that
        # takes as long again as the message itself.
        self._transport.flush(time.monotonic() + self._timeout_s)
        like = (call.message_shape, call.config.pipeline_dtype, current_device())
        self._transport.describe(TensorSpecification(*like, micro_batches=addresses.micro_batches))
        training = not call.forward_only
        run = _Run(
            call=call,
            inbox=Inbox(self._transport, program, addresses, timeout_s=self._timeout_s, ahead=self._receives_ahead),
            computation=computation,
            gradients=_gradient_sync(call, program, self._plans_differ) if training else None,
            parameters=ParameterSync(call.config, call.model_chunks) if training else None,
            account=account,
            addresses=addresses,
        )
        pairs: list[Sequence[ProgramStep]] = []
        marks = [self._timer.mark()]
        order = (steps or planned_steps(program))(run.inbox)
        try:
            # Each step begins to wait where the previous one ended. A combined action, of a forward and the backward
            # behind it, is a pair of steps.
            for step in order:
                pair = (step, next(order)) if step.action.combined else (step,)
                run.inbox.post_before(pair[-1])
                if run.gradients is not None:
                    run.gradients.before_step(step.position)
                received = [run.inbox.take(each.receive) if each.receive is not None else None for each in pair]
                marks.append(self._timer.mark())
                _begin(run, pair)
                if len(pair) > 1:
                    self._forward_backward(run, pair, received)
                else:
                    result = _computed(run, step, received[0])
                    if step.send is not None:
                        self._transport.post_send(*_message(run, step, result))
                    _keep(run, step, received[0], result)
                    del result  # or its memory would be in use during the next action
                _end(run, pair)
                pairs.append(pair)
                marks.append(self._timer.mark())
        finally:
            if run.gradients is not None:
                run.gradients.enable()
        ran = list(itertools.chain.from_iterable(pairs))
        assert len(ran) == len(program.steps), f"stage {call.stage} ran {len(ran)} of {len(program.steps)} steps"
        if run.gradients is not None:
            run.gradients.finish()
        over = functools.partial(self._timer.over, marks)
        return IterationReport(
            account.peak,
            ran,
            addresses,
            run.received_nbytes,
            over,
            functools.partial(self._records, addresses.iteration, pairs, marks),
        )

    def _forward_backward(
        self, run: _Run, pair: Sequence[ProgramStep], received: Sequence[torch.Tensor | None]
    ) -> None:
        (forward, backward), (activation, gradient) = pair, received

        def send(step: ProgramStep, result: torch.Tensor | None) -> None:
            if step.send is not None:
                self._transport.post_send(*_message(run, step, result))

        output = run.computation.forward_backward(
            _forward_part(run, forward, activation),
            _backward_part(run, backward, gradient),
            functools.partial(send, forward),
            functools.partial(send, backward),
        )
        _keep(run, forward, activation, output)

    def _records(self, iteration: int, pairs: list[Sequence[ProgramStep]], marks: list[Any]) -> list[ActionRecord]:
        times, records = self._timer.resolve(marks), []
        for index, pair in enumerate(pairs):
            wait_start_s, start_s, end_s = times[2 * index : 2 * index + 3]
            for step in pair:
                stage, kind, chunk, micro_batch, _ = step.action
                moments = (wait_start_s, start_s, end_s)
                records.append(ActionRecord(iteration, stage, kind.value, chunk, micro_batch, *moments, len(pair) > 1))
                # A combined action counts as its forward: its backward takes no time.
                wait_start_s = start_s = end_s
        return records


def _gradient_sync(call: PipelineCall, program: Program, plans_differ: bool) -> GradientSync:
    if plans_differ:
        order = range(call.chunks)[::-1]
        return GradientSync(call.config, call.model_chunks, order, by_hooks=False, not_before=program.reductions)
    return GradientSync(call.config, call.model_chunks, program.completion, by_hooks=program.completes_by_backwards)


def _begin(run: _Run, pair: Sequence[ProgramStep]) -> None:
    for step in pair:
        run.account.before(step.action)
        if run.gradients is not None and step.completes_chunk and step.action.kind is Kind.BACKWARD:
            run.gradients.before_last_backward(step.action.chunk)


def _end(run: _Run, pair: Sequence[ProgramStep]) -> None:
    for step in pair:
        if run.gradients is not None and step.completes_chunk:
            run.gradients.after_last_gradient(step.action.chunk)
        run.account.after(step.action, alone=len(pair) == 1)


def _computed(run: _Run, step: ProgramStep, received: torch.Tensor | None) -> torch.Tensor | None:
    """Run an action that is not combined; return its output or input gradient."""
    if step.action.kind is Kind.FORWARD:
        return run.computation.forward(*_forward_part(run, step, received))
    if step.action.kind is Kind.BACKWARD_WEIGHT:
        run.computation.weight_gradient(step.action.chunk, step.action.micro_batch)
        return None
    part = _backward_part(run, step, received)
    tensors = part.input_tensor, part.output_tensor, part.output_gradient
    return run.computation.backward(part.chunk, part.micro_batch, *tensors, split=part.split)


def _forward_part(run: _Run, step: ProgramStep, received: torch.Tensor | None) -> ForwardPart:
    if run.parameters is not None:
        run.parameters.before_forward(step.action.chunk)
    if received is not None:
        run.received_nbytes = max(run.received_nbytes, received.nbytes)
        received.requires_grad_()
    return ForwardPart(step.action.chunk, step.action.micro_batch, received)


def _backward_part(run: _Run, step: ProgramStep, received: torch.Tensor | None) -> BackwardPart:
    action = step.action
    position = (action.chunk, action.micro_batch)
    split = action.kind is Kind.BACKWARD_INPUT
    return BackwardPart(*position, run.inputs.pop(position), run.outputs.pop(position), received, split)


def _message(run: _Run, step: ProgramStep, tensor: torch.Tensor | None) -> tuple[MessageKey, int, torch.Tensor]:
    """Return the step's message, to be posted right behind its computation: see schedule.transfers.launch_order."""
    assert step.send is not None
    assert tensor is not None, f"{step.action} has nothing to send"
    run.inbox.post_before_send(step)
    return run.addresses.key(step.send), run.addresses.ranks[step.send.target], tensor


def _keep(run: _Run, step: ProgramStep, received: torch.Tensor | None, output: torch.Tensor | None) -> None:
    """Keep what the backward of a forward needs."""
    action, call = step.action, run.call
    if call.forward_only or action.kind is not Kind.FORWARD:
        return
    assert output is not None
    # Sent tensors are held by the transport; autograd needs the graph of this one, not its bytes.
    if step.send is not None or not call.interleaved:
        free_content(call, output)
    run.inputs[action.chunk, action.micro_batch] = received
    run.outputs[action.chunk, action.micro_batch] = output
