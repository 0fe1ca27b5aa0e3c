# SPDX-License-Identifier: Apache-2.0
"""What stands in for Megatron's two pipeline schedules: plan lookup, execution, measuring, re-planning."""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules

from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.runtime.activations import ActivationAccount
from adaptra_megatron.runtime.computation import MegatronComputation, StageComputation
from adaptra_megatron.runtime.decision_writer import DELAY
from adaptra_megatron.runtime.device import current_device, pci_bus_id
from adaptra_megatron.runtime.dispatch import Dispatcher, make_dispatcher
from adaptra_megatron.runtime.disturbances import DisturbanceWatch
from adaptra_megatron.runtime.exchange import PlanExchange
from adaptra_megatron.runtime.executor import IterationReport, PipelineExecutor, Steps, planned_steps
from adaptra_megatron.runtime.leader import PlanLeader
from adaptra_megatron.runtime.measurements import stage_measurement
from adaptra_megatron.runtime.megatron_call import PipelineCall, pipeline_call
from adaptra_megatron.runtime.membership import ClockSettings, Membership, join
from adaptra_megatron.runtime.memory import (
    MemoryMeter,
    MemorySource,
    largest_activation_nbytes,
    make_meter,
    memory_of,
)
from adaptra_megatron.runtime.path_leader import PathPolicy
from adaptra_megatron.runtime.plans import Layout, PlanBook
from adaptra_megatron.runtime.program import Program, compile_program
from adaptra_megatron.runtime.reporting import arrival_records, make_telemetry, path_states, rank_figures
from adaptra_megatron.runtime.split_backward import WeightGradientQueue
from adaptra_megatron.runtime.steering import LinkSteering
from adaptra_megatron.runtime.timers import make_timer
from adaptra_megatron.schedule.actions import Schedule
from adaptra_megatron.schedule.costs import costs_to_json
from adaptra_megatron.schedule.csv_format import schedule_from_csv, schedule_to_csv
from adaptra_megatron.telemetry.records import ArrivalRecord
from adaptra_megatron.telemetry.run_telemetry import RunTelemetry
from adaptra_megatron.transport.affinity import rank_rnics
from adaptra_megatron.transport.device_clock import CudaEvents, DeviceClock
from adaptra_megatron.transport.host_path import HostTransport
from adaptra_megatron.transport.host_settings import HostSettings
from adaptra_megatron.transport.messages import Transport
from adaptra_megatron.transport.paths import Path, PathSettings
from adaptra_megatron.transport.stream_path import StreamTransport
from adaptra_megatron.transport.torch_path import WaitingThreadTransport

logger = logging.getLogger("adaptra_megatron.runtime")

Decorate = Callable[[StageComputation, int], StageComputation]


@dataclass
class _Pipeline:
    """What one rank keeps for one pipeline over the whole job."""

    transport: Transport
    executor: PipelineExecutor
    dispatcher: Dispatcher
    book: PlanBook
    membership: Membership | None
    """None, as the exchange, where nobody wants to know what was measured."""
    exchange: PlanExchange | None
    leader: PlanLeader
    """Has something to say on the leading rank alone."""
    telemetry: RunTelemetry
    meter: MemoryMeter | None
    """None where memory is not measured."""
    steering: LinkSteering | None
    """None where links have one path, or nobody decides on theirs."""
    disturbances: DisturbanceWatch = field(default_factory=DisturbanceWatch)
    iteration: int = 0
    training_iterations: int = 0


class AdaptraRuntime:
    """Runs every forward_backward call of one process. Built by `patches.enable`, closed by undoing the patches."""

    def __init__(
        self,
        config: AdaptraConfig,
        queue: WeightGradientQueue,
        decorate: Decorate | None = None,
        memory: MemorySource | None = None,
    ) -> None:
        """`decorate(computation, stage)` may wrap what a stage computes (emulation, instrumentation).

        `memory`: who tells what is allocated, where that is not the device Megatron computes on.
        """
        self.peak_in_flight = 0.0
        """Most activations held at once in any training iteration so far."""
        self.last_schedule: Schedule | None = None
        """What the last training iteration ran."""
        self._config = config
        self.weight_gradients = queue
        self._decorate = decorate
        self._memory = memory
        self._pipelines: dict[tuple[int, ...], _Pipeline] = {}
        self._programs: dict[int, Program] = {}
        # Threads that wait in native code must not outlive the interpreter, and Megatron's scripts undo nothing.
        atexit.register(self.close)

    def forward_backward(self, arguments: Mapping[str, Any], *, interleaved: bool) -> list[Any]:
        """One call of Megatron's forward_backward function, training or evaluation.

        Returns what stock returns: the loss functions' results in micro-batch order on the last stage, else an empty
        list. Raises UnsupportedFeatureError or a plan's error before anything is computed, TransportError or
        ExchangeError when a peer fails.
        """
        call = pipeline_call(arguments, interleaved=interleaved)
        pipeline = self._pipeline(call)
        begun_s = time.monotonic()
        disturbance = None if call.forward_only else pipeline.disturbances.began(begun_s)
        pipeline.telemetry.begin(pipeline.iteration)
        schedule = self._schedule(pipeline, call)
        computation = MegatronComputation(call, self.weight_gradients)
        decorated = self._decorate(computation, call.stage) if self._decorate is not None else computation
        embedding = self._start_stock_bookkeeping(call)
        if pipeline.meter is not None and not call.forward_only:
            pipeline.meter.begin(pipeline.book.number)
        program = self._program(schedule, call.stage)
        report = pipeline.executor.run(
            call,
            program,
            decorated,
            iteration=pipeline.iteration,
            account=self._account(pipeline, call),
            steps=self._steps(pipeline, call, program),
        )
        if not call.forward_only:
            self._finalize_gradients(call, computation, embedding)
            arrivals = self._hand_in(pipeline, call, report, disturbance)
            pipeline.dispatcher.ran(report.steps, report.records, arrivals)
            pipeline.disturbances.ended(time.monotonic())
            pipeline.training_iterations += 1
            self.peak_in_flight = max(self.peak_in_flight, report.peak_in_flight)
            self.last_schedule = schedule
        else:
            pipeline.disturbances.evaluated()
            arrivals = arrival_records(call.stage, pipeline.transport.take_times()[1])
        if call.config.timers is not None:
            call.config.timers("forward-backward").stop()
        offset_s = None if pipeline.membership is None else pipeline.membership.clock.drifted(time.monotonic())
        pipeline.telemetry.traced(pipeline.iteration, report.records, arrivals, offset_s)
        if not call.forward_only:
            figures = rank_figures(pipeline.transport, report, pipeline.book.number, time.monotonic() - begun_s)
            pipeline.telemetry.trained(figures, *path_states(pipeline.transport))
        pipeline.iteration += 1
        return computation.losses

    def last_plan(self) -> tuple[int, str]:
        """Number and fingerprint (of the schedule, not the number) of what the last training iteration ran."""
        if self.last_schedule is None:
            raise RuntimeError("no training iteration has run yet")
        csv = schedule_to_csv(self.last_schedule)
        number = max((pipeline.book.number for pipeline in self._pipelines.values()), default=0)
        return number, hashlib.sha256(csv.encode()).hexdigest()[:16]

    def summary(self) -> dict[str, Any]:
        """What ran, for reports and tests: plain numbers and text; on the leading rank also the costs it measured."""
        return {
            "training_iterations": sum(pipeline.training_iterations for pipeline in self._pipelines.values()),
            "plans_installed": max((pipeline.book.number for pipeline in self._pipelines.values()), default=0),
            "split_weight_gradients": self.weight_gradients.computed,
            "peak_in_flight": self.peak_in_flight,
            "transports": sorted({type(pipeline.transport).__name__ for pipeline in self._pipelines.values()}),
            "links": self._links(),
            "measured_costs": self._measured_costs(),
            "online_iterations": sum(pipeline.dispatcher.online_iterations for pipeline in self._pipelines.values()),
            "moved_actions": sum(pipeline.dispatcher.moved_actions for pipeline in self._pipelines.values()),
            "schedule_csv": None if self.last_schedule is None else schedule_to_csv(self.last_schedule),
        }

    def _links(self) -> dict[str, Any]:
        """What links with a host path have seen, by "<stage>-<peer>"."""
        transports = [pipeline.transport for pipeline in self._pipelines.values()]
        return {
            f"{transport.stage}-{peer}": asdict(counters)
            for transport in transports
            if isinstance(transport, HostTransport)
            for peer, counters in transport.link_counters().items()
        }

    def _measured_costs(self) -> dict[str, Any] | None:
        for pipeline in self._pipelines.values():
            if pipeline.leader.costs is not None:
                return costs_to_json(pipeline.leader.costs)
        return None

    def close(self) -> None:
        """Release transports, threads and trace files; happens by itself when the process ends."""
        atexit.unregister(self.close)
        for pipeline in self._pipelines.values():
            pipeline.transport.close()
            if pipeline.exchange is not None:
                pipeline.exchange.close()
            if pipeline.membership is not None:
                pipeline.membership.clock.close()
            pipeline.telemetry.close()
        self._pipelines.clear()

    def _pipeline(self, call: PipelineCall) -> _Pipeline:
        identity = (*dist.get_process_group_ranks(call.pipeline_group), call.chunks)
        if identity not in self._pipelines:
            self._pipelines[identity] = self._make_pipeline(call)
        return self._pipelines[identity]

    def _make_pipeline(self, call: PipelineCall) -> _Pipeline:
        config = self._config
        layout = Layout(
            stages=call.stages,
            chunks=call.chunks,
            group_size=call.group_size,
            can_split=call.config.recompute_granularity != "full",
        )
        memory = self._memory or memory_of(current_device())
        # First: it refuses an impossible plan before anything is set up.
        book = PlanBook(config, layout, measures_memory=memory is not None)
        clock = DeviceClock(CudaEvents()) if current_device().type == "cuda" else None
        transport = _make_transport(call, config, clock)
        told = book.measures or config.trace_dir is not None
        membership = None
        if told:
            membership = join(call.pipeline_group, config.timeout_s, ClockSettings(interface=config.interface))
        telemetry = make_telemetry(call, config, membership)
        leader = PlanLeader(book, telemetry, _path_policy(config))
        exchange = None
        if membership is not None and book.measures:
            exchange = PlanExchange(membership, leader.decide, config.timeout_s)
        _warn_of_dropout(call)
        return _Pipeline(
            transport=transport,
            executor=PipelineExecutor(
                transport, make_timer(clock), lookahead=config.receive_lookahead, timeout_s=config.timeout_s
            ),
            dispatcher=make_dispatcher(call, config, transport),
            book=book,
            membership=membership,
            exchange=exchange,
            leader=leader,
            telemetry=telemetry,
            meter=None
            if memory is None or exchange is None
            else make_meter(memory, config.memory_fraction, fp16=bool(call.config.fp16)),
            steering=LinkSteering(transport, membership.pipeline, Path(config.path))
            if isinstance(transport, HostTransport) and membership is not None and book.adapts
            else None,
        )

    def _schedule(self, pipeline: _Pipeline, call: PipelineCall) -> Schedule:
        if call.forward_only:
            return pipeline.book.evaluation_schedule(call.micro_batches)
        exchange, iteration = pipeline.exchange, pipeline.training_iterations
        if exchange is not None and iteration >= DELAY:
            decision = exchange.decision(iteration)
            pipeline.telemetry.begin(pipeline.iteration, decision.requests, decision.job)
            if decision.csv is not None:
                planned = schedule_from_csv(decision.csv, chunks=call.chunks)
                pipeline.book.install(planned, decision.number, decision.caps, decision.released_at_backward_input)
                self._programs.clear()
            pipeline.book.number = decision.number
            pipeline.telemetry.switch(
                decision.number, predicted_s=decision.predicted_s, before_predicted_s=decision.before_predicted_s
            )
            if pipeline.steering is not None:
                pipeline.steering.steer(decision)
                pipeline.steering.measure(decision)
        pipeline.telemetry.switch(pipeline.book.number)
        return pipeline.book.schedule_for(call.micro_batches)

    def _program(self, schedule: Schedule, stage: int) -> Program:
        program = self._programs.get(id(schedule))
        if program is None or program.schedule is not schedule:
            program = self._programs[id(schedule)] = compile_program(schedule, stage)
        return program

    def _steps(self, pipeline: _Pipeline, call: PipelineCall, program: Program) -> Steps:
        if call.forward_only:
            return planned_steps(program)
        book = pipeline.book
        cap = book.enforced_cap(call.micro_batches, call.stage)
        return pipeline.dispatcher.steps(program, cap, book.released_at_backward_input(call.micro_batches))

    def _account(self, pipeline: _Pipeline, call: PipelineCall) -> ActivationAccount:
        # Evaluation keeps no activations, and Megatron's order for it would pass any cap by count.
        released = pipeline.book.released_at_backward_input(call.micro_batches)
        if call.forward_only:
            return ActivationAccount(call.stage, None, released)
        cap = pipeline.book.enforced_cap(call.micro_batches, call.stage)
        return ActivationAccount(call.stage, cap, released, pipeline.meter)

    def _start_stock_bookkeeping(self, call: PipelineCall) -> Any:
        """What stock does before its first action; returns the embedding module that finalizing needs."""
        config, embedding = call.config, None
        if config.finalize_model_grads_func is not None and not call.forward_only:
            model = call.model_chunks if call.interleaved else call.model_chunks[0]
            embedding = schedules.clear_embedding_activation_buffer(config, model, call.holds_last_stage)
        if config.timers is not None:
            config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
        return embedding

    def _finalize_gradients(self, call: PipelineCall, computation: MegatronComputation, embedding: Any) -> None:
        config = call.config
        if config.finalize_model_grads_func is None:
            return
        schedules.finish_embedding_wgrad_compute(config, embedding, call.holds_last_stage, call.groups.tp)
        config.finalize_model_grads_func(
            call.model_chunks,
            computation.tokens if config.calculate_per_token_loss else None,
            pg_collection=call.groups,
            force_all_reduce=call.force_all_reduce,
        )

    def _hand_in(
        self, pipeline: _Pipeline, call: PipelineCall, report: IterationReport, disturbance: str | None
    ) -> list[ArrivalRecord]:
        """Send off what this iteration measured, for the plans of later ones; returns when messages arrived."""
        times = pipeline.transport.take_times()
        arrivals = arrival_records(call.stage, times[1])
        if pipeline.exchange is None or pipeline.membership is None:
            return arrivals
        steering = pipeline.steering
        if steering is not None:
            # Before the next iteration: once its receives are posted, the first messages still go by the old path.
            early = pipeline.exchange.early_decision(pipeline.training_iterations + 1)
            if early is not None:
                steering.steer(early)
        measurement = stage_measurement(
            pipeline.membership.pipeline,
            call.stage,
            call.micro_batches,
            report.records,
            times,
            pipeline.membership.clock.offset_at(time.monotonic()),
            report.computed_s() if current_device().type == "cuda" else None,
            None if pipeline.meter is None else pipeline.meter.finish(largest_activation_nbytes(times[1])),
            probes=() if steering is None else steering.take_probes(),
            broken=() if steering is None else steering.broken(),
            disturbance=disturbance,
        )
        pipeline.exchange.post(pipeline.training_iterations, measurement)
        return arrivals


NCCL_LIMIT_S = 15.0
"""Making an NCCL communicator may take seconds; the host path carries messages meanwhile."""
GLOO_LIMIT_S = PathSettings.probe_limit_s


def _make_transport(call: PipelineCall, config: AdaptraConfig, clock: DeviceClock | None) -> Transport:
    group, device = call.pipeline_group, current_device()
    on_gpu = device.type == "cuda"
    if config.host_transport != "off":
        return HostTransport(
            group,
            call.chunks,
            HostSettings(
                transport=config.host_transport,
                interface=config.interface,
                timeout_s=config.timeout_s,
                rnics=rank_rnics(config.rnics, pci_bus_id(device)),
            ),
            PathSettings(preferred=Path(config.path), probe_limit_s=NCCL_LIMIT_S if on_gpu else GLOO_LIMIT_S),
            device,
        )
    if on_gpu:
        return StreamTransport(group, config.timeout_s, clock)
    return WaitingThreadTransport(group, call.chunks, config.timeout_s)


def _path_policy(config: AdaptraConfig) -> PathPolicy | None:
    if config.host_transport == "off":
        return None
    one_queue = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    return PathPolicy(preferred=Path(config.path), device_blocks=one_queue and current_device().type == "cuda")


def _warn_of_dropout(call: PipelineCall) -> None:
    config = call.config
    if call.chunks > 1 and (config.hidden_dropout > 0 or config.attention_dropout > 0):
        logger.warning(
            "dropout with interleaved chunks: stock draws the masks of all chunks of a rank from one random stream in "
            "its own order of chunks, so another order draws other masks; losses then equal stock's in distribution, "
            "not bit for bit"
        )
