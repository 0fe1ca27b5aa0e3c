# SPDX-License-Identifier: Apache-2.0
"""What stands in for Megatron's two pipeline schedules, with what they do before and after their actions."""

from __future__ import annotations

import atexit
import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules

from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.runtime.compat import finalize_gradients
from adaptra_megatron.runtime.computation import MegatronComputation, StageComputation
from adaptra_megatron.runtime.megatron_call import PipelineCall, pipeline_call
from adaptra_megatron.runtime.memory import MemorySource
from adaptra_megatron.runtime.pipeline import Pipeline
from adaptra_megatron.runtime.random_draws import flags_drawn_in_other_order
from adaptra_megatron.runtime.split_backward import WeightGradientQueue
from adaptra_megatron.runtime.transformer_engine_layers import EngineLayers
from adaptra_megatron.schedule.actions import Schedule
from adaptra_megatron.schedule.costs import costs_to_json
from adaptra_megatron.schedule.csv_format import schedule_to_csv
from adaptra_megatron.transport.messages import TwoPathTransport
from adaptra_megatron.transport.stream_path import end_process

logger = logging.getLogger("adaptra_megatron.runtime")

Decorate = Callable[[StageComputation, int], StageComputation]


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
        self.runs_actions = False
        """Whether actions of an iteration run at this moment."""
        self._config = config
        self.weight_gradients = queue
        self._engine_layers = EngineLayers(queue)
        self._decorate = decorate
        self._memory = memory
        self._pipelines: dict[tuple[int, ...], Pipeline] = {}
        # Threads that wait in native code must not outlive the interpreter, and Megatron's scripts undo nothing.
        atexit.register(self._close_at_exit)

    def forward_backward(self, arguments: Mapping[str, Any], *, interleaved: bool) -> list[Any]:
        """One call of Megatron's forward_backward function, training or evaluation.

        Returns what stock returns: the loss functions' results in micro-batch order on the last stage, else an empty
        list. Raises UnsupportedFeatureError or a plan's error before anything is computed, TransportError or
        ExchangeError when a peer fails.
        """
        call = pipeline_call(arguments, interleaved=interleaved)
        pipeline = self._pipeline(call)
        try:
            return self._iterate(pipeline, call)
        except BaseException as cause:
            # Receives that stand on the GPU would keep whatever waits for it, and this process from ending.
            pipeline.fail(cause)
            raise

    def _iterate(self, pipeline: Pipeline, call: PipelineCall) -> list[Any]:
        schedule = pipeline.begin(call)
        computation = MegatronComputation(call, self.weight_gradients)
        decorated = self._decorate(computation, call.stage) if self._decorate is not None else computation
        embedding = _start_stock_bookkeeping(call)
        self.runs_actions = True
        try:
            report = pipeline.run(call, schedule, decorated)
        finally:
            self.runs_actions = False
        if not call.forward_only:
            _finalize_gradients(call, computation, embedding)
            self.peak_in_flight = max(self.peak_in_flight, report.peak_in_flight)
            self.last_schedule = schedule
        pipeline.end(call, report)
        if call.config.timers is not None:
            call.config.timers("forward-backward").stop()
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
            if isinstance(transport, TwoPathTransport)
            for peer, counters in transport.link_counters().items()
        }

    def _measured_costs(self) -> dict[str, Any] | None:
        for pipeline in self._pipelines.values():
            if pipeline.leader.costs is not None:
                return costs_to_json(pipeline.leader.costs)
        return None

    def close(self) -> bool:
        """Release transports, threads and trace files; happens by itself when the process ends.

        Returns False where a GPU still works on what cannot be ended.
        """
        atexit.unregister(self._close_at_exit)
        self._engine_layers.restore()
        ended = [pipeline.close() for pipeline in self._pipelines.values()]
        self._pipelines.clear()
        return all(ended)

    def _close_at_exit(self) -> None:
        if not self.close():
            logger.error("adaptra: what is on the GPU cannot be ended, so this process ends without waiting for it")
            end_process()

    def _pipeline(self, call: PipelineCall) -> Pipeline:
        identity = (*dist.get_process_group_ranks(call.pipeline_group), call.chunks)
        if identity not in self._pipelines:
            self._pipelines[identity] = Pipeline(call, self._config, self._memory)
            self._engine_layers.split(call.model_chunks, call.config)
            if self._config.policy == "adapt":
                _warn_of_other_draws(call)
        return self._pipelines[identity]


def _start_stock_bookkeeping(call: PipelineCall) -> Any:
    """What stock does before its first action; returns the embedding module that finalizing needs."""
    config, embedding = call.config, None
    if config.finalize_model_grads_func is not None and not call.forward_only:
        model = call.model_chunks if call.interleaved else call.model_chunks[0]
        embedding = schedules.clear_embedding_activation_buffer(config, model, call.holds_last_stage)
    if config.timers is not None:
        config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    return embedding


def _finalize_gradients(call: PipelineCall, computation: MegatronComputation, embedding: Any) -> None:
    config = call.config
    if config.finalize_model_grads_func is None:
        return
    schedules.finish_embedding_wgrad_compute(config, embedding, call.holds_last_stage, call.groups.tp)
    tokens = computation.tokens if config.calculate_per_token_loss else None
    finalize_gradients(config, call.model_chunks, tokens, call.groups, force=call.force_all_reduce)


def _warn_of_other_draws(call: PipelineCall) -> None:
    """Once per job."""
    flags = flags_drawn_in_other_order(call.config, call.chunks)
    if flags and dist.get_rank() == 0:
        logger.warning(
            "adaptra: %s: what is computed with these random numbers equals stock's in distribution, not bit for bit: "
            "stock draws them for all actions of a rank from the same streams, so another order of actions draws "
            "others; --adaptra-policy observe keeps stock's order",
            ", ".join(flags),
        )
