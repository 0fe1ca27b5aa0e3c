# SPDX-License-Identifier: Apache-2.0
"""Replace Megatron's two pipeline schedules, with all that they do before and after their actions."""

from __future__ import annotations

import atexit
import functools
import gc
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch.distributed as dist

import adaptra_megatron
from adaptra_megatron.common.child_process import OwningProcess
from adaptra_megatron.common.environment import FLAGS_VARIABLE, OFF_VARIABLE, ON_VARIABLE
from adaptra_megatron.common.gathering import gather
from adaptra_megatron.common.log import is_first_rank, logger_of
from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.control.stage_memory import MemorySource
from adaptra_megatron.engine.features import Decorate, MakeHooks, make_features
from adaptra_megatron.engine.iteration_hooks import (
    Attempt,
    Attempted,
    EngineFeature,
    Inputs,
    IterationHooks,
    overriding,
)
from adaptra_megatron.engine.measuring import make_telemetry
from adaptra_megatron.engine.pipeline import Pipeline
from adaptra_megatron.engine.rank_transports import keeps_stock
from adaptra_megatron.engine.training_job import join_job
from adaptra_megatron.megatron.compat import default_groups, groups_keyword
from adaptra_megatron.megatron.computation import MegatronComputation, StageComputation, stock_inputs
from adaptra_megatron.megatron.gradients.linear_wgrad import WeightGradientQueue
from adaptra_megatron.megatron.megatron_call import PipelineCall, config_of, pipeline_call, shared_groups
from adaptra_megatron.megatron.megatron_iteration import (
    finish_gradients,
    iteration,
)
from adaptra_megatron.megatron.refusals import combines, kept_in_order
from adaptra_megatron.megatron.state.random_draws import flags_drawn_in_other_order, shares_amax_history
from adaptra_megatron.schedule.csv_format import schedule_to_csv
from adaptra_megatron.schedule.ir import Schedule
from adaptra_megatron.telemetry.scalars import RankFigures
from adaptra_megatron.transport.device_session.link_watch import end_process
from adaptra_megatron.transport.gpu.hardware_queues import NO_PLAN_FASTER
from adaptra_megatron.transport.gpu.training_device import current_device
from adaptra_megatron.transport.message_keys import TwoPathTransport

if TYPE_CHECKING:
    from adaptra_megatron.elastic.process_group_manager import FaultTolerantGroups

logger = logger_of(__name__)


_NOT_TIMED = "and its actions and messages are not timed; iterations and their ranks are"


Found = TypeVar("Found", bound=EngineFeature)


ONE_STAGE = "pipelines have 1 stage (PP 1): there is nothing to adapt, stock's schedule runs"


class SingleStage:
    """Runs stock's iterations on one rank, and reports them to telemetry."""

    def __init__(
        self, arguments: Mapping[str, Any], config: AdaptraConfig, why: str, features: Sequence[EngineFeature]
    ) -> None:
        """Set up telemetry. Collective over the job's ranks, with the first call of each (`arguments`).

        `why`: reason for stock's schedule, for the log. Raises ExchangeError if ranks do not meet.
        """
        model, groups = arguments["model"], arguments.get(groups_keyword()) or default_groups()
        megatron = config_of(model)
        self._job = join_job(groups.pp, shared_groups(megatron, groups), config)
        self._telemetry = make_telemetry(self._job, 1, config, goes_on=False)
        self._hooks = [feature.stock_hooks(self._job, self._telemetry) for feature in features]
        self.training_iterations = 0
        self._iterations = 0
        if self._job.layout.rank == min(self._job.layout.workers):
            logger.warning("%s", why)

    def run(self, stock: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Run one call of `stock`, Megatron's own schedule; return its result."""
        begun_s = time.monotonic()
        self._telemetry.begin(self._iterations)
        self._telemetry.switch(0)
        results = stock(**arguments)
        self._iterations += 1
        if not arguments.get("forward_only"):
            self.training_iterations += 1
            seconds = time.monotonic() - begun_s
            for each in self._hooks:
                each.end(self._iterations - 1, seconds)
            self._telemetry.trained(RankFigures(iteration_s=seconds, peak_in_flight=1.0, plan_number=0))
        return results

    def close(self) -> None:
        """End threads and files."""
        self._job.clock.close()
        for each in self._hooks:
            each.close()
        self._telemetry.close()


class _HostPath(NamedTuple):
    """Whether one rank's host path came up."""

    came_up: bool


class AdaptraRuntime:
    """Runs every forward_backward call of one process. Created by `patches.enable`, closed by undoing the patches."""

    def __init__(
        self,
        config: AdaptraConfig,
        queue: WeightGradientQueue,
        decorate: Decorate | None = None,
        memory: MemorySource | None = None,
        groups: FaultTolerantGroups | None = None,
        hooks: Sequence[MakeHooks] = (),
    ) -> None:
        """`decorate(computation, stage)` may wrap a stage's computation (emulation, instrumentation). `hooks`: the
        user's, called outside of all others.

        `memory`: source of the allocated bytes, if not the device on which Megatron computes. `groups`: Megatron's
        groups, if training survives rank failures.
        """
        self.peak_in_flight = 0.0
        """Maximum activations held at once in any training iteration so far."""
        self.last_schedule: Schedule | None = None
        """Schedule of the last training iteration."""
        self.runs_actions = False
        """True while actions of an iteration run."""
        self._config = config
        self.weight_gradients = queue
        self._features = make_features(config, queue, decorate, groups, hooks)
        self._memory = memory
        self._pipelines: dict[tuple[int, ...], Pipeline] = {}
        self._single: SingleStage | None = None
        """Runs stock's own schedule, where that is used."""
        self._is_on = False
        """Whether this process has run a schedule."""
        self._owner = OwningProcess()
        # Threads that wait in native code must end before the interpreter, and Megatron's scripts undo nothing.
        atexit.register(self._close_at_exit)

    def forward_backward(
        self, arguments: Mapping[str, Any], *, interleaved: bool, stock: Callable[..., Any] | None = None
    ) -> Any:
        """Run one call of Megatron's forward_backward function, training or evaluation; return the same as stock.

        On the last stage these are the loss functions' results in micro-batch order, else an empty list. `stock`:
        Megatron's function. It runs instead if orders are only observed and a feature needs its own order, or if no
        plan would be faster. Raises UnsupportedFeatureError or a plan's error before anything is computed,
        TransportError or ExchangeError if a peer fails.
        """
        self._say_it_is_on(arguments)
        if stock is not None and (why := self._why_stock(arguments, interleaved=interleaved)):
            return self.run_stock(stock, arguments, f"{why}: stock's own schedule runs, {_NOT_TIMED}")
        return self._wrapped(functools.partial(self._run_pipeline, arguments, interleaved=interleaved), arguments)()

    def feature(self, kind: type[Found]) -> Found:
        """Return the feature of class `kind`, which the configuration must have asked for."""
        return next(each for each in self._features if isinstance(each, kind))

    def _wrapped(self, run: Callable[[], Any], arguments: Mapping[str, Any]) -> Callable[[], Any]:
        for each in overriding(self._features, EngineFeature.iterate):
            run = functools.partial(each.iterate, run, arguments)
        return run

    def _why_stock(self, arguments: Mapping[str, Any], *, interleaved: bool) -> str:
        """Return why Megatron's own schedule must run; empty if it need not. Equal on all ranks."""
        if self._config.policy == "observe" and (kept := kept_in_order(config_of(arguments["model"]))):
            return ", ".join(kept)
        if keeps_stock(self._config, current_device):
            return NO_PLAN_FASTER
        if keeps_stock(self._config, current_device, host_path=False):
            if not self._pipelines and self._single is None:
                self._try_host_path(pipeline_call(arguments, interleaved=interleaved))
            if not self._pipelines:
                return f"the host path did not come up on all ranks, and {NO_PLAN_FASTER}"
        return ""

    def _run_pipeline(self, arguments: Mapping[str, Any], *, interleaved: bool) -> list[Any]:
        call = pipeline_call(arguments, interleaved=interleaved)
        pipeline = self._pipeline(call)
        # Before anything is sent: a call that is refused, as stock does it, leaves the links to the next one.
        pipeline.book.check_count(call.micro_batches, forward_only=call.forward_only)
        try:
            if call.forward_only:
                self.settle()
            pipeline.begin(call)
            run: Attempt = functools.partial(self._attempt, pipeline)
            for each in overriding(pipeline.hooks, IterationHooks.carry_out):
                run = functools.partial(each.carry_out, run)
            ran = run(call, 0)
            if not call.forward_only:
                self.peak_in_flight = max(self.peak_in_flight, ran.report.peak_in_flight)
                self.last_schedule = ran.schedule
            pipeline.end(call, ran.report)
            return ran.losses
        except BaseException as cause:
            # Receives that stand on the GPU would keep whatever waits for it, and this process from ending.
            pipeline.fail(cause)
            # As the process ends, the interpreter would look through all objects for cycles, for most of a second.
            atexit.register(gc.freeze)
            raise

    def run_stock(self, stock: Callable[..., Any], arguments: Mapping[str, Any], why: str = ONE_STAGE) -> Any:
        """Run one call of Megatron's own schedule unchanged; return its result. `why`: for the log.

        Raises ExchangeError if ranks of the job do not meet at the first call.
        """
        self._say_it_is_on(arguments)
        if self._single is None:
            self._single = SingleStage(arguments, self._config, why, self._features)
        return self._wrapped(functools.partial(self._single.run, stock, arguments), arguments)()

    def save(self, write: Callable[[], Any], context: dict[str, Any] | None = None) -> Any:
        """Write a checkpoint by `write`, which is collective over the job; return its result.

        If training survives rank failures, see `FaultTolerance.save`. `context`: Megatron's checkpointing context.
        Raises the errors of `write`.
        """
        self.settle()
        for each in self._features:
            write = functools.partial(each.save, write, {} if context is None else context)
        return write()

    def settle(self) -> None:
        """Apply deferred optimizer updates, so that parameters and optimizer state equal stock's here. Collective over
        the job.

        For scripts that read either between iterations, other than by Megatron's save_checkpoint and evaluations.
        """
        for each in self._features:
            each.settle()

    def _attempt(self, pipeline: Pipeline, call: PipelineCall, number: int) -> Attempted:
        schedule = pipeline.schedule(call)
        inputs = stock_inputs(call)
        for each in pipeline.hooks:
            inputs = each.wrap_inputs(call, inputs)
        computation = self._computation_of(call, inputs)
        decorated: StageComputation = computation
        for each in pipeline.hooks:
            decorated = each.wrap_computation(call, decorated)
        with iteration(call) as embedding:
            self.runs_actions = True
            try:
                report = pipeline.executor.run(call, decorated, *pipeline.work(call, schedule, number))
            finally:
                self.runs_actions = False
            if not call.forward_only:
                finish: Callable[[], None] = functools.partial(
                    finish_gradients, call, computation.tokens, embedding, degraded=pipeline.degraded
                )
                for each in pipeline.hooks:
                    finish = functools.partial(each.finish, finish, call, computation.tokens)
                finish()
            losses = computation.losses
            for each in pipeline.hooks:
                losses = each.wrap_losses(call, losses)
        return Attempted(report, schedule, losses)

    def _computation_of(self, call: PipelineCall, inputs: Inputs) -> MegatronComputation:
        if call.forward_only or not call.combines:  # stock combines nothing in evaluations
            return MegatronComputation(call, self.weight_gradients, inputs)
        from adaptra_megatron.megatron.combined_computation import CombinedComputation

        return CombinedComputation(call, self.weight_gradients, inputs)

    def last_plan(self) -> tuple[int, str] | None:
        """Return number and fingerprint of the last training iteration's plan; None if no pipeline ran it.

        The fingerprint is that of the schedule, without the number.
        """
        if self.last_schedule is None:
            return None
        csv = schedule_to_csv(self.last_schedule)
        number = max((pipeline.book.number for pipeline in self._pipelines.values()), default=0)
        return number, hashlib.sha256(csv.encode()).hexdigest()[:16]

    def summary(self) -> dict[str, Any]:
        """Return counters and settings of the run, for reports and tests; on the leader also its measured costs."""
        return {
            "training_iterations": sum(pipeline.training_iterations for pipeline in self._pipelines.values())
            + (0 if self._single is None else self._single.training_iterations),
            "plans_installed": max((pipeline.book.number for pipeline in self._pipelines.values()), default=0),
            "split_weight_gradients": self.weight_gradients.computed,
            "peak_in_flight": self.peak_in_flight,
            "transports": sorted({type(pipeline.transport).__name__ for pipeline in self._pipelines.values()}),
            "links": self._links(),
            "measured_costs": self._measured_costs(),
            "online_iterations": sum(pipeline.dispatcher.online_iterations for pipeline in self._pipelines.values()),
            "moved_actions": sum(pipeline.dispatcher.moved_actions for pipeline in self._pipelines.values()),
            "schedule_csv": None if self.last_schedule is None else schedule_to_csv(self.last_schedule),
            **{name: value for each in self._features for name, value in each.summary().items()},
        }

    def _links(self) -> dict[str, Any]:
        """Return the counters of links with a host path, by "<rank>-<peer>"."""
        transports = [pipeline.transport for pipeline in self._pipelines.values()]
        return {
            f"{transport.rank}-{peer}": asdict(counters)
            for transport in transports
            if isinstance(transport, TwoPathTransport)
            for peer, counters in transport.link_counters().items()
        }

    def _measured_costs(self) -> dict[str, Any] | None:
        for pipeline in self._pipelines.values():
            if pipeline.planner is not None and pipeline.planner.costs is not None:
                return pipeline.planner.costs
        return None

    def close(self) -> bool:
        """Release transports, threads and trace files. Also called automatically at the process's end.

        Returns False if work on a GPU cannot be ended. Does nothing in a forked child, whose connections belong to the
        parent.
        """
        atexit.unregister(self._close_at_exit)
        if not self._owner.is_this:
            return True
        if self._single is not None:
            self._single.close()
        for each in self._features:
            each.close()
        ended = [pipeline.close() for pipeline in self._pipelines.values()]
        self._pipelines.clear()
        return all(ended)

    def _say_it_is_on(self, arguments: Mapping[str, Any]) -> None:
        """Log that the package is on. Called with the first schedule, as a process that only parses flags runs none."""
        if not self._is_on and not (dist.is_initialized() and dist.get_rank()):
            schedule = ", combined 1F1B" if combines(config_of(arguments["model"])) else ""
            text = "%s is on, policy %s%s; to train without it, set %s=1"
            logger.info(text, adaptra_megatron.__version__, self._config.policy, schedule, OFF_VARIABLE)
        self._is_on = True

    def _close_at_exit(self) -> None:
        if not self._is_on and self._owner.is_this and is_first_rank():
            logger.warning(
                "this process has read that adaptra is asked for, and ran no iteration. Processes that train in its "
                'place (actors of Ray) ran stock Megatron, unless their logs say "is on": give them %s=1 in their '
                "environment, and flags in %s",
                ON_VARIABLE,
                FLAGS_VARIABLE,
            )
        if not self.close():
            logger.error("work on the GPU cannot be ended, so this process ends without waiting for it")
            end_process()

    def _try_host_path(self, call: PipelineCall) -> None:
        """Create the pipeline of `call`; drop it again on all ranks of the job if any rank has no host path."""
        pipeline = self._new_pipeline(call)
        if all(each.came_up for each in gather(_HostPath(isinstance(pipeline.transport, TwoPathTransport)))):
            self._keep(pipeline, call)
        else:
            pipeline.close()

    def _pipeline(self, call: PipelineCall) -> Pipeline:
        if (found := self._pipelines.get(_identity(call))) is not None:
            return found
        pipeline = self._new_pipeline(call)
        self._keep(pipeline, call)
        return pipeline

    def _new_pipeline(self, call: PipelineCall) -> Pipeline:
        return Pipeline(call, self._config, self._features, self._memory)

    def _keep(self, pipeline: Pipeline, call: PipelineCall) -> None:
        self._pipelines[_identity(call)] = pipeline
        self.weight_gradients.leave_whole(call.model_chunks)
        if self._config.policy == "adapt":
            _warn_of_other_draws(call)


def _identity(call: PipelineCall) -> tuple[int, ...]:
    return (*dist.get_process_group_ranks(call.pipeline_group), call.chunks)


def _warn_of_other_draws(call: PipelineCall) -> None:
    """Warn, once per job, of random numbers or scales that differ from stock's."""
    flags = flags_drawn_in_other_order(call.config, call.chunks)
    if flags and dist.get_rank() == 0:
        logger.warning(
            "%s: results with these random numbers equal stock's in distribution, not bit for bit: "
            "stock draws them for all actions of a rank from the same streams, so another order of actions draws "
            "others; --adaptra-policy observe keeps stock's order",
            ", ".join(flags),
        )
    if shares_amax_history(call.config, call.chunks) and dist.get_rank() == 0:
        logger.warning(
            "--fp8-amax-compute-algo max, --fp8-amax-history-len %d: scales are not stock's, bit for bit: the window "
            "moves on with the actions of all chunks of a rank, and another order of these leaves others in it; "
            "--adaptra-policy observe keeps stock's order, and --fp8-amax-compute-algo most_recent depends on none",
            call.config.fp8_amax_history_len,
        )
