# SPDX-License-Identifier: Apache-2.0
"""Prepare one rank's iteration for the executor: program, addresses, memory limits and steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from adaptra_megatron.common.layout import JobLayout
from adaptra_megatron.control.deciders.plan_state import PlanState
from adaptra_megatron.control.stage_memory import MemoryMeter
from adaptra_megatron.engine.dispatch import Dispatcher
from adaptra_megatron.engine.execution.executor import ActivationAccount, Steps, planned_steps
from adaptra_megatron.engine.execution.inbox import Addresses
from adaptra_megatron.engine.execution.stage_program import Program, compile_program
from adaptra_megatron.megatron.megatron_call import PipelineCall
from adaptra_megatron.schedule.ir import Schedule

if TYPE_CHECKING:
    from adaptra_megatron.control.deciders.route_decider import CellOrder


class Work(NamedTuple):
    """An iteration's work for the executor."""

    program: Program
    addresses: Addresses
    account: ActivationAccount
    steps: Steps


class IterationWork:
    """Makes the work of each iteration, and caches compiled programs."""

    def __init__(
        self,
        layout: JobLayout,
        book: PlanState,
        dispatcher: Dispatcher,
        meter: MemoryMeter | None,
    ) -> None:
        """`meter`: None if memory is not measured."""
        self._layout, self._book, self._dispatcher, self._meter = layout, book, dispatcher, meter
        self._programs: dict[int, Program] = {}

    def forget(self) -> None:
        """Drop the cached programs, since the plan has changed."""
        self._programs.clear()

    def routed(self, call: PipelineCall, program: Program, order: CellOrder, iteration: int) -> Work:
        """Return the work of `iteration` if micro-batches are routed between replicas. `program`: this rank's part of
        `order`.
        """
        everywhere = Addresses(
            range(len(self._layout.workers)),
            iteration,
            micro_batches=call.micro_batches,
            pipeline=self._layout.pipeline,
        )
        meter = None if call.forward_only else self._meter
        account = ActivationAccount(call.stage, order.cap, order.released_at_backward_input, meter)
        return Work(program, everywhere, account, planned_steps(program))

    def planned(self, call: PipelineCall, schedule: Schedule, iteration: int, *, cold: bool) -> Work:
        """Return this rank's work of `iteration` by `schedule`. `cold`: see `FirstIterations`; backwards are whole
        then.
        """
        planned = not (call.forward_only or cold)
        program = self._compiled(call, schedule, planned=planned)
        addresses = Addresses(
            self._layout.pipeline,
            iteration,
            replica=self._layout.cell.replica,
            micro_batches=call.micro_batches if self._layout.replicas > 1 else None,
        )
        in_order = not planned or schedule.combines
        steps = planned_steps(program) if in_order else self._steps(call, program)
        return Work(program, addresses, self._account(call), steps)

    def _compiled(self, call: PipelineCall, schedule: Schedule, *, planned: bool) -> Program:
        program = self._programs.get(id(schedule))
        if program is None or program.schedule is not schedule:
            program = self._programs[id(schedule)] = compile_program(
                schedule,
                call.stage,
                self._book.planned_for(call.micro_batches) if planned else None,
                sizes_known=call.message_shape is not None,
            )
        return program

    def _steps(self, call: PipelineCall, program: Program) -> Steps:
        cap = self._book.enforced_cap(call.micro_batches, call.stage)
        released = self._book.released_at_backward_input(call.micro_batches, call.stage)
        return self._dispatcher.steps(program, cap, released)

    def _account(self, call: PipelineCall) -> ActivationAccount:
        # Evaluation keeps no activations, and Megatron's order for it would pass any cap by count.
        released = self._book.released_at_backward_input(call.micro_batches, call.stage)
        if call.forward_only:
            return ActivationAccount(call.stage, None, released)
        cap = self._book.enforced_cap(call.micro_batches, call.stage)
        return ActivationAccount(call.stage, cap, released, self._meter)
