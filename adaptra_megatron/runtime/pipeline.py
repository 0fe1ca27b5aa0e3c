# SPDX-License-Identifier: Apache-2.0
"""What one rank keeps for one pipeline over the whole job, and what it does around the actions of each iteration."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence

from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.runtime.activations import ActivationAccount
from adaptra_megatron.runtime.computation import StageComputation
from adaptra_megatron.runtime.decision_writer import DELAY
from adaptra_megatron.runtime.device import current_device
from adaptra_megatron.runtime.dispatch import make_dispatcher
from adaptra_megatron.runtime.disturbances import DisturbanceWatch
from adaptra_megatron.runtime.exchange import PlanExchange
from adaptra_megatron.runtime.executor import IterationReport, PipelineExecutor, Steps, planned_steps
from adaptra_megatron.runtime.leader import PlanLeader
from adaptra_megatron.runtime.measurements import stage_measurement
from adaptra_megatron.runtime.megatron_call import PipelineCall
from adaptra_megatron.runtime.membership import ClockSettings, join
from adaptra_megatron.runtime.memory import MemoryMeter, MemorySource, largest_activation_nbytes, make_meter, memory_of
from adaptra_megatron.runtime.plans import Layout, PlanBook
from adaptra_megatron.runtime.program import Program, compile_program
from adaptra_megatron.runtime.reporting import arrival_records, make_telemetry, path_states, rank_figures
from adaptra_megatron.runtime.steering import LinkSteering
from adaptra_megatron.runtime.timers import make_timer
from adaptra_megatron.runtime.transports import make_transport, path_policy
from adaptra_megatron.schedule.actions import Schedule
from adaptra_megatron.schedule.csv_format import schedule_from_csv
from adaptra_megatron.telemetry.records import ArrivalRecord
from adaptra_megatron.transport.device_clock import CudaEvents, DeviceClock
from adaptra_megatron.transport.host_path import HostTransport
from adaptra_megatron.transport.messages import MessageTimes, TransportError
from adaptra_megatron.transport.paths import Path

logger = logging.getLogger("adaptra_megatron.runtime.pipeline")

SentAndReceived = tuple[Sequence[MessageTimes], Sequence[MessageTimes]]

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
        told = self.book.measures or config.trace_dir is not None
        clocks = ClockSettings(interface=config.interface)
        self.membership = join(call.pipeline_group, config.timeout_s, clocks) if told else None
        """None, as the exchange, where nobody wants to know what was measured."""
        self.telemetry = make_telemetry(call, config, self.membership)
        self.leader = PlanLeader(self.book, self.telemetry, path_policy(config))
        """Has something to say on the leading rank alone."""
        self.exchange: PlanExchange | None = None
        if self.membership is not None and self.book.measures:
            self.exchange = PlanExchange(self.membership, self.leader.decide, config.timeout_s)
        self.dispatcher = make_dispatcher(call, config, self.transport)
        self.iterations = 0
        """How many have run, evaluations among them."""
        self.training_iterations = 0
        self._executor = PipelineExecutor(
            self.transport, make_timer(clock), lookahead=config.receive_lookahead, timeout_s=config.timeout_s
        )
        self._meter: MemoryMeter | None = None
        if memory is not None and self.exchange is not None:
            self._meter = make_meter(memory, config.memory_fraction, fp16=bool(call.config.fp16))
        self._steering: LinkSteering | None = None
        """None where links have one path, or nobody decides on theirs."""
        if isinstance(self.transport, HostTransport) and self.membership is not None and self.book.adapts:
            self._steering = LinkSteering(self.transport, self.membership.pipeline, Path(config.path))
        self._disturbances = DisturbanceWatch()
        self._disturbance: str | None = None
        self._programs: dict[int, Program] = {}
        self._begun_s = 0.0

    def begin(self, call: PipelineCall) -> Schedule:
        """What the iteration runs. Raises ExchangeError where that cannot be learnt, or a plan's error."""
        self._begun_s = time.monotonic()
        if not call.forward_only:
            self._disturbance = self._disturbances.began(self._begun_s)
        self.telemetry.begin(self.iterations)
        if call.forward_only:
            return self.book.evaluation_schedule(call.micro_batches)
        if self.exchange is not None and self.training_iterations >= DELAY:
            self._follow_decision(self.exchange, call.chunks)
        self.telemetry.switch(self.book.number)
        return self.book.schedule_for(call.micro_batches)

    def run(self, call: PipelineCall, schedule: Schedule, computation: StageComputation) -> IterationReport:
        """All actions of this rank. Raises TransportError when a peer fails."""
        program = self._compiled(schedule, call.stage)
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
        """Hand in what was measured, and tell what ran."""
        times = self.transport.take_times()
        arrivals = arrival_records(call.stage, times[1])
        if call.forward_only:
            self._disturbances.evaluated()
        else:
            self._hand_in(call, report, times)
            self.dispatcher.ran(report.steps, report.records, arrivals)
            self._disturbances.ended(time.monotonic())
            self.training_iterations += 1
        self._tell(call, report, arrivals)
        self.iterations += 1
        self._sent_all = True

    def close(self) -> None:
        """Release transport, threads and trace files, once the peers have what the last iteration sent."""
        if self._sent_all:
            try:
                self.transport.flush(time.monotonic() + LAST_MESSAGES_S)
            except TransportError as cause:
                logger.warning("closing although not everything sent has been received: %s", cause)
        self.transport.close()
        if self.exchange is not None:
            self.exchange.close()
        if self.membership is not None:
            self.membership.clock.close()
        self.telemetry.close()

    def _follow_decision(self, exchange: PlanExchange, chunks: int) -> None:
        decision = exchange.decision(self.training_iterations)
        self.telemetry.begin(self.iterations, decision.requests, decision.job)
        if decision.csv is not None:
            planned = schedule_from_csv(decision.csv, chunks=chunks)
            self.book.install(planned, decision.number, decision.caps, decision.released_at_backward_input)
            self._programs.clear()
        self.book.number = decision.number
        self.telemetry.switch(
            decision.number, predicted_s=decision.predicted_s, before_predicted_s=decision.before_predicted_s
        )
        if self._steering is not None:
            self._steering.steer(decision)
            self._steering.measure(decision)

    def _compiled(self, schedule: Schedule, stage: int) -> Program:
        program = self._programs.get(id(schedule))
        if program is None or program.schedule is not schedule:
            program = self._programs[id(schedule)] = compile_program(schedule, stage)
        return program

    def _steps(self, call: PipelineCall, program: Program) -> Steps:
        if call.forward_only:
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

    def _hand_in(self, call: PipelineCall, report: IterationReport, times: SentAndReceived) -> None:
        """Send off what this iteration measured, for the plans of later ones."""
        if self.exchange is None or self.membership is None:
            return
        steering = self._steering
        if steering is not None:
            # Before the next iteration: once its receives are posted, the first messages still go by the old path.
            early = self.exchange.early_decision(self.training_iterations + 1)
            if early is not None:
                steering.steer(early)
        measurement = stage_measurement(
            self.membership.pipeline,
            call.stage,
            call.micro_batches,
            report.records,
            times,
            self.membership.clock.offset_at(time.monotonic()),
            report.computed_s() if current_device().type == "cuda" else None,
            None if self._meter is None else self._meter.finish(largest_activation_nbytes(times[1])),
            probes=() if steering is None else steering.take_probes(),
            broken=() if steering is None else steering.broken(),
            disturbance=self._disturbance,
        )
        self.exchange.post(self.training_iterations, measurement)

    def _tell(self, call: PipelineCall, report: IterationReport, arrivals: list[ArrivalRecord]) -> None:
        now_s = time.monotonic()
        offset_s = None if self.membership is None else self.membership.clock.drifted(now_s)
        self.telemetry.traced(self.iterations, report.records, arrivals, offset_s)
        if not call.forward_only:
            figures = rank_figures(self.transport, report, self.book.number, now_s - self._begun_s)
            self.telemetry.trained(figures, *path_states(self.transport))
