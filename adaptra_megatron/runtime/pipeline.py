# SPDX-License-Identifier: Apache-2.0
"""What one rank keeps for one pipeline over the whole job, and what it does around the actions of each iteration."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Sequence
from typing import NamedTuple

from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.runtime.activations import ActivationAccount
from adaptra_megatron.runtime.computation import StageComputation
from adaptra_megatron.runtime.decision_writer import DELAY
from adaptra_megatron.runtime.device import current_device, synchronizer_of
from adaptra_megatron.runtime.dispatch import make_dispatcher
from adaptra_megatron.runtime.disturbances import DisturbanceWatch
from adaptra_megatron.runtime.exchange import PlanExchange
from adaptra_megatron.runtime.executor import IterationReport, PipelineExecutor, Steps, planned_steps
from adaptra_megatron.runtime.first_iterations import COLD, FirstIterations
from adaptra_megatron.runtime.leader import PlanLeader
from adaptra_megatron.runtime.measurements import stage_measurement
from adaptra_megatron.runtime.megatron_call import PipelineCall
from adaptra_megatron.runtime.megatron_timers import add_times
from adaptra_megatron.runtime.membership import ClockSettings, join
from adaptra_megatron.runtime.memory import MemoryMeter, MemorySource, StageMemory, make_meter, memory_of
from adaptra_megatron.runtime.plans import Layout, PlanBook
from adaptra_megatron.runtime.program import Program, compile_program
from adaptra_megatron.runtime.reporting import arrival_records, make_telemetry, path_states, rank_figures
from adaptra_megatron.runtime.steering import LinkSteering
from adaptra_megatron.runtime.timers import make_timer
from adaptra_megatron.runtime.transports import make_transport, path_policy, timeout_s
from adaptra_megatron.schedule.actions import Schedule
from adaptra_megatron.schedule.costs import costs_from_json
from adaptra_megatron.schedule.csv_format import schedule_from_csv
from adaptra_megatron.transport.device_clock import CudaEvents, DeviceClock
from adaptra_megatron.transport.messages import MessageTimes, TransportError, TwoPathTransport
from adaptra_megatron.transport.paths import Path

logger = logging.getLogger("adaptra_megatron.runtime.pipeline")

SentAndReceived = tuple[Sequence[MessageTimes], Sequence[MessageTimes]]


class _Ended(NamedTuple):
    """An iteration of which everything has been launched, and on the CPU has happened."""

    call: PipelineCall
    report: IterationReport
    iteration: int
    training_iteration: int
    disturbance: str | None
    memory: StageMemory | None


RECEIVES_AHEAD = 16
"""On CPUs. Each holds a buffer for one message."""
LAST_MESSAGES_S = 5.0
"""How long closing waits until the peers have what was sent last."""


class Pipeline:
    """One rank's. Its iterations run between `begin` and `end`, evaluations among them."""

    def __init__(self, call: PipelineCall, config: AdaptraConfig, memory: MemorySource | None) -> None:
        """Collective over the pipeline's ranks, with the first call of each. `memory`: who tells what is allocated;
        None: the device.

        Raises a plan's error before anything is set up, TransportError and ExchangeError when ranks do not meet.
        """
        layout = Layout(
            stages=call.stages,
            chunks=call.chunks,
            group_size=call.group_size,
            can_split=call.config.recompute_granularity != "full",
            rendezvous=current_device().type == "cuda",
            shared_queue=os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1" and current_device().type == "cuda",
        )
        device = current_device()
        memory = memory or memory_of(device)
        self.book = PlanBook(config, layout, measures_memory=memory is not None)
        clock = DeviceClock(CudaEvents()) if device.type == "cuda" else None
        self.transport = make_transport(call, config, clock)
        self._sent_all = False
        """Whether the last iteration came to its end."""
        self._failure: BaseException | None = None
        """What an iteration ended with: there can be no other."""
        told = self.book.measures or config.trace_dir is not None
        clocks = ClockSettings(interface=config.interface)
        limit_s = timeout_s(config)
        self.membership = join(call.pipeline_group, limit_s, clocks) if told else None
        """None, as the exchange, where nobody wants to know what was measured."""
        self.telemetry = make_telemetry(call, config, self.membership)
        policy = path_policy(config, self.transport)
        self.leader = PlanLeader(self.book, self.telemetry, policy)
        """Has something to say on the leading rank alone."""
        self.exchange: PlanExchange | None = None
        if self.membership is not None and self.book.measures:
            self.exchange = PlanExchange(self.membership, self.leader.decide, limit_s)
        self.dispatcher = make_dispatcher(call, config, self.transport, limit_s)
        self._prefers_host = self.dispatcher.all_by_host_path = policy is not None and policy.preferred is Path.HOST
        self.iterations = 0
        """How many have run, evaluations among them."""
        self.training_iterations = 0
        ahead = 0 if layout.rendezvous else RECEIVES_AHEAD
        self._executor = PipelineExecutor(self.transport, make_timer(clock), timeout_s=limit_s, receives_ahead=ahead)
        self._meter: MemoryMeter | None = None
        if memory is not None and self.exchange is not None:
            self._meter = make_meter(memory, config.memory_fraction, fp16=bool(call.config.fp16))
        self._steering: LinkSteering | None = None
        """None where links have one path, or nobody decides on theirs."""
        transport, joined = self.transport, self.membership
        if isinstance(transport, TwoPathTransport) and policy and joined is not None and self.book.adapts:
            self._steering = LinkSteering(transport, joined.pipeline, policy.preferred)
        self._disturbances = DisturbanceWatch()
        self._disturbance: str | None = None
        self._first = FirstIterations(synchronizer_of(device))
        self._programs: dict[int, Program] = {}
        self._begun_s = 0.0
        self._unsettled: _Ended | None = None

    def begin(self, call: PipelineCall) -> Schedule:
        """What the iteration runs. Raises ExchangeError where that cannot be learnt, or a plan's error; TransportError
        after an iteration that failed."""
        if self._failure is not None:
            raise TransportError(
                f"stage {call.stage}: the links to other stages were ended when an earlier iteration failed: "
                f"{self._failure}. Restart from the last checkpoint"
            ) from self._failure
        self._settle()
        self._begun_s = time.monotonic()
        self._first.begin(call)
        if not call.forward_only:
            disturbance = self._disturbances.began(self._begun_s)
            self._disturbance = COLD if self._first.cold else disturbance
        self.telemetry.begin(self.iterations)
        if call.forward_only:
            return self.book.evaluation_schedule(call.micro_batches)
        if self.exchange is not None and self.training_iterations >= DELAY:
            self._follow_decision(self.exchange, call.chunks)
        self.telemetry.switch(self.book.number)
        planned = self.book.schedule_for(call.micro_batches)
        return self.book.whole_schedule(call.micro_batches) if self._first.cold else planned

    def run(self, call: PipelineCall, schedule: Schedule, computation: StageComputation) -> IterationReport:
        """All actions of this rank. Raises TransportError when a peer fails."""
        program = self._compiled(call, schedule)
        self._sent_all = False
        if self._meter is not None and not call.forward_only:
            self._meter.begin(self.book.number)
        return self._executor.run(
            call,
            program,
            computation,
            iteration=self.iterations,
            account=self._account(call),
            steps=self._steps(call, program),
        )

    def end(self, call: PipelineCall, report: IterationReport) -> None:
        """All of the iteration has been launched. What it measured is handed in and told once it has happened: at once
        on the CPU, and on a GPU at the beginning of the next one, when no stage waits for what this rank launches."""
        self._first.end()
        ended = _Ended(call, report, self.iterations, self.training_iterations, self._disturbance, None)
        if call.forward_only:
            self._disturbances.evaluated()
        else:
            ended = ended._replace(memory=self._prepare_next(report))
            now_s = time.monotonic()
            self._disturbances.ended(now_s)
            figures = rank_figures(self.transport, report, self.book.number, now_s - self._begun_s)
            self.telemetry.trained(figures, *path_states(self.transport))
            self.training_iterations += 1
        self.iterations += 1
        self._sent_all = True
        self._unsettled = ended
        if report.over():
            self._settle()

    def fail(self, cause: BaseException) -> None:
        """An iteration has ended with an error. What is under way is aborted, and the peers learn why."""
        self._sent_all, self._failure, self._unsettled = False, cause, None
        if isinstance(self.transport, TwoPathTransport):
            self.transport.say_failed(f"{type(cause).__name__}: {cause}")
        self.transport.close(drained=False)

    def close(self) -> bool:
        """Release transport, threads and trace files, once the peers have what the last iteration sent.

        Returns False where the device still works on what cannot be ended: see `Transport.close`.
        """
        if self._unsettled is not None and self._unsettled.report.over():
            self._settle()
        if self._sent_all:
            try:
                self.transport.flush(time.monotonic() + LAST_MESSAGES_S)
            except TransportError as cause:
                logger.warning("closing although not everything sent has been received: %s", cause)
        ended = self.transport.close(drained=self._sent_all)
        if self.exchange is not None:
            self.exchange.close()
        if self.membership is not None:
            self.membership.clock.close()
        self.telemetry.close()
        return ended

    def _follow_decision(self, exchange: PlanExchange, chunks: int) -> None:
        decision = exchange.decision(self.training_iterations)
        self.telemetry.begin(self.iterations, decision.requests, decision.job)
        if decision.csv is not None:
            planned = schedule_from_csv(decision.csv, chunks=chunks)
            costs = None if decision.costs is None else costs_from_json(json.loads(decision.costs))
            self.book.install(planned, decision.number, decision.caps, decision.released_at_backward_input, costs)
            self._programs.clear()
        self.book.number = decision.number
        self.dispatcher.all_by_host_path = self._prefers_host and not decision.diverted
        self.telemetry.switch(
            decision.number, predicted_s=decision.predicted_s, before_predicted_s=decision.before_predicted_s
        )
        if self._steering is not None:
            self._steering.steer(decision)
            self._steering.measure(decision)

    def _compiled(self, call: PipelineCall, schedule: Schedule) -> Program:
        program = self._programs.get(id(schedule))
        if program is None or program.schedule is not schedule:
            planned = not (call.forward_only or self._first.cold)
            program = self._programs[id(schedule)] = compile_program(
                schedule,
                call.stage,
                self.book.planned_for(call.micro_batches) if planned else None,
                sizes_known=call.message_shape is not None,
            )
        return program

    def _steps(self, call: PipelineCall, program: Program) -> Steps:
        if call.forward_only or self._first.cold:
            return planned_steps(program)
        cap = self.book.enforced_cap(call.micro_batches, call.stage)
        return self.dispatcher.steps(program, cap, self.book.released_at_backward_input(call.micro_batches, call.stage))

    def _account(self, call: PipelineCall) -> ActivationAccount:
        # Evaluation keeps no activations, and Megatron's order for it would pass any cap by count.
        released = self.book.released_at_backward_input(call.micro_batches, call.stage)
        if call.forward_only:
            return ActivationAccount(call.stage, None, released)
        return ActivationAccount(
            call.stage, self.book.enforced_cap(call.micro_batches, call.stage), released, self._meter
        )

    def _prepare_next(self, report: IterationReport) -> StageMemory | None:
        """What memory showed, before anything else uses it; and links take the next iteration's paths."""
        exchange = self.exchange
        if exchange is None:
            return None
        if self._steering is not None:
            # Before the next iteration: once its receives are posted, the first messages still go by the old path.
            early = exchange.early_decision(self.training_iterations + 1)
            if early is not None:
                self._steering.steer(early)
        return None if self._meter is None else self._meter.finish(report.received_nbytes)

    def _settle(self) -> None:
        """Hand in and tell what the latest iteration measured; waits for the device where that is still at it."""
        ended, self._unsettled = self._unsettled, None
        if ended is None:
            return
        call, records = ended.call, ended.report.records  # which relates the clocks that the transport tells by
        times = self.transport.take_times()
        arrivals = arrival_records(call.stage, times[1])
        if not call.forward_only:
            self._hand_in(ended, times)
            self.dispatcher.ran(ended.report.steps, records, arrivals)
        offset_s = None if self.membership is None else self.membership.clock.drifted(time.monotonic())
        self.telemetry.traced(ended.iteration, records, arrivals, offset_s)
        if call.config.timers is not None:
            add_times(call.config.timers, ended.report)

    def _hand_in(self, ended: _Ended, times: SentAndReceived) -> None:
        """Send off what an iteration measured, for the plans of later ones."""
        if self.exchange is None or self.membership is None:
            return
        steering, report = self._steering, ended.report
        measurement = stage_measurement(
            self.membership.pipeline,
            ended.call.stage,
            ended.call.micro_batches,
            report.records,
            times,
            self.membership.clock.offset_at(time.monotonic()),
            report.computed_s() if current_device().type == "cuda" else None,
            ended.memory,
            probes=() if steering is None else steering.take_probes(),
            broken=() if steering is None else steering.broken(),
            disturbance=ended.disturbance,
        )
        self.exchange.post(ended.training_iteration, measurement)
