# SPDX-License-Identifier: Apache-2.0
"""Keep one rank's state of one pipeline over the whole job, and run its iterations."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, replace
from statistics import median

from adaptra_megatron.common.child_process import OwningProcess
from adaptra_megatron.common.layout import Cell, JobLayout
from adaptra_megatron.common.log import logger_of
from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.control.deciders.plan_state import Layout, PlanState
from adaptra_megatron.control.decisions import Decision, TelemetrySection
from adaptra_megatron.control.exchange import PlanExchange, exchange_place
from adaptra_megatron.control.finding_sharing import NamedFindings, SharedFindings, SharedRequests
from adaptra_megatron.control.sidecar.planner_client import Begin, PathPolicy, PlannerClient, RoutePolicy
from adaptra_megatron.control.stage_memory import MemoryMeter, MemorySource, StageMemory, make_meter
from adaptra_megatron.engine.device_memory import memory_of
from adaptra_megatron.engine.dispatch import make_dispatcher
from adaptra_megatron.engine.execution.executor import IterationReport, PipelineExecutor, make_timer
from adaptra_megatron.engine.iteration_hooks import EngineFeature
from adaptra_megatron.engine.iteration_work import IterationWork, Work
from adaptra_megatron.engine.link_steering import FixedPaths, LinkSteering
from adaptra_megatron.engine.measuring import (
    EndedIteration,
    Measuring,
    make_telemetry,
    path_states,
    rank_figures,
)
from adaptra_megatron.engine.rank_transports import has_serial_queue, make_transport, path_policy
from adaptra_megatron.engine.training_job import Counters, Job, JobEntry, listen_for
from adaptra_megatron.megatron.megatron_call import PipelineCall, recomputed_spans, work_of
from adaptra_megatron.schedule.ir import Schedule
from adaptra_megatron.telemetry.run_telemetry import RunTelemetry
from adaptra_megatron.transport.gpu.device_clock import CudaEvents, DeviceClock
from adaptra_megatron.transport.gpu.training_device import current_device, has_one_queue, synchronizer_of
from adaptra_megatron.transport.link_paths import Path
from adaptra_megatron.transport.message_keys import Transport, TransportError, TwoPathTransport
from adaptra_megatron.transport.setup.rendezvous import Rendezvous

logger = logger_of(__name__)


def make_planner(
    job: Job,
    book: PlanState,
    config: AdaptraConfig,
    paths: PathPolicy | None,
    telemetry: RunTelemetry,
    dead: Collection[Cell] = (),
    number: int = 0,
) -> PlannerClient:
    """Return the client of a new planner process, whose first decision starts from the plan in `book`.

    `paths`: None if links have one path only. `dead`: cells that get no work. `number`: of this rank's latest plan.
    """
    layout, control = job.layout, job.control
    replica = layout.cell.replica
    seal = control.seal(exchange_place(layout))
    begin = Begin(
        secret=control.secret.hex(),
        place=seal.place,
        reporters=tuple(layout.reporters),
        layout=book.layout,
        measures_memory=book.measures_memory,
        policy=book.policy,
        max_in_flight=config.max_in_flight,
        plan_csv=_text(config.plan_csv),
        costs_json=_text(config.costs_json),
        paths=paths,
        routes=_routes(layout, config, dead),
        log_level=0,
        running=replace(book.in_force, number=max(number, book.number)),
    )

    def take() -> TelemetrySection:
        return TelemetrySection(telemetry.requests(), policy=accepted(telemetry.policy_asked(), config))

    requests = take
    if layout.decides_apart:
        shared = SharedRequests(control.client("requests"), None if replica else take)
        findings = SharedFindings(control.client("findings"), layout, None if replica else telemetry.take_of)
        telemetry.share = findings.post if replica else None

        def requests() -> TelemetrySection:
            findings.exchange()
            return shared.new()

    word = f"replica {replica}: " if layout.decides_apart else ""
    return PlannerClient(
        begin,
        listen_for(layout, layout.reporters, config, "so plans stay"),
        NamedFindings(layout, telemetry),
        lambda: book.number,
        requests,
        word=word,
    )


def accepted(policy: str, config: AdaptraConfig) -> str:
    """Return the policy that a user requests for the running job; "", with a log line, if it cannot be applied."""
    why = ""
    if policy == "adapt" and config.policy != "adapt":
        why = f"the job was started with --adaptra-policy {config.policy}, so that nothing is ready for other orders"
    elif policy and config.staggered_optimizer:
        why = "--adaptra-staggered-optimizer steps by the plan that runs"
    elif policy and (config.avoids_stragglers or (policy == "off" and config.reroute != "off")):
        why = f"--adaptra-reroute {config.reroute} needs what ranks measure to route micro-batches"
    if why:
        logger.warning(
            "policy %s was asked for and cannot be had while the job runs: %s; restart it for that", policy, why
        )
    return "" if why else policy


def _routes(layout: JobLayout, config: AdaptraConfig, dead: Collection[Cell]) -> RoutePolicy | None:
    if not (config.avoids_stragglers or dead):
        return None
    return RoutePolicy(pipelines=layout.first_ranks, dead=tuple(sorted(dead)), avoids_slow=config.avoids_stragglers)


def _text(path: object | None) -> str | None:
    return None if path is None else str(path)


_REMEMBERED = 8
_ENOUGH = 3
LONG_PAUSE_S = 1.0
LONG_PAUSE_FACTOR = 5.0
"""Multiple of the usual pause between two iterations."""


class DisturbanceWatch:
    """Detects disturbances of one rank's iterations. Pure: times are arguments (seconds of the monotonic clock).

    An event that precedes every second iteration or more is part of normal training, not a disturbance; otherwise no
    iteration would be left to measure.
    """

    def __init__(self) -> None:
        self._evaluated = False
        self._ended_s: float | None = None
        self._pauses_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._disturbed: deque[bool] = deque(maxlen=_REMEMBERED)

    def evaluated(self) -> None:
        """Record that an evaluation has run."""
        self._evaluated = True

    def began(self, now_s: float) -> str | None:
        """Record the start of a training iteration; return its disturbance in words, or None."""
        what = "an evaluation just before" if self._evaluated else self._long_pause(now_s)
        self._evaluated = False
        self._disturbed.append(what is not None)
        return what if 2 * sum(self._disturbed) <= max(_ENOUGH, len(self._disturbed)) else None

    def ended(self, now_s: float) -> None:
        """Record the end of the training iteration."""
        self._ended_s = now_s

    def _long_pause(self, now_s: float) -> str | None:
        if self._ended_s is None:
            return None
        pause_s = now_s - self._ended_s
        usual_s = median(self._pauses_s) if len(self._pauses_s) >= _ENOUGH else None
        self._pauses_s.append(pause_s)
        if usual_s is None or pause_s < max(LONG_PAUSE_S, LONG_PAUSE_FACTOR * usual_s):
            return None
        return f"a pause of {pause_s:.1f} s just before, as for a checkpoint"


COLD = "kernels loaded and tuned for the first time"
"""Name of the disturbance in the timings of a cold iteration."""


class FirstIterations:
    """Recognises one rank's cold iterations: training and evaluation, each message shape, each number of micro-batches.

    Cold iterations are the first of their kind on a GPU, in which kernels are loaded and tuned and buffers made. Any
    call in one may make the host wait for its whole device. Receives end nevertheless, as they are posted in launch
    order. So cold iterations differ from others in only two ways. They run stock's order with whole backwards, so that
    they hold no more memory than stock while allocators grow. They end with a wait for the device, so that none of
    their work is pending when a plan begins. All ranks agree without communication.
    """

    def __init__(self, synchronize: Callable[[], None] | None) -> None:
        """`synchronize`: waits for the GPU; None on a CPU, where no iteration is cold."""
        self.cold = False
        """True while the present iteration is cold."""
        self._synchronize = synchronize
        self._seen: set[tuple[bool, tuple[int, ...] | None, int]] = set()

    def begin(self, call: PipelineCall) -> None:
        """Record the start of the iteration of `call`."""
        kind = call.forward_only, call.message_shape, call.micro_batches
        self.cold = self._synchronize is not None and kind not in self._seen
        self._seen.add(kind)

    def end(self) -> None:
        """Wait for the device if the iteration, now launched, was cold."""
        if self.cold and self._synchronize is not None:
            self._synchronize()


RECEIVES_AHEAD = 16
"""Number of receives posted ahead on CPUs. Each holds a buffer for one message."""
SETUP_LEAST_S = 10.0
"""Minimum time for the stages to meet before there are links, however short the timeout of a message. Otherwise a late
stage would set up links with one that has given up.
"""
LAST_MESSAGES_S = 5.0
"""How long closing waits for peers to receive the last messages."""


class Pipeline:
    """One rank's pipeline. Iterations run between `begin` and `end`, evaluations included."""

    def __init__(
        self,
        call: PipelineCall,
        config: AdaptraConfig,
        features: Sequence[EngineFeature],
        memory: MemorySource | None = None,
    ) -> None:
        """Set up the pipeline. Collective over the job's ranks, with the first call of each.

        `memory`: source of the allocated bytes; None: the device. Raises a plan's error before anything is set up,
        TransportError and ExchangeError if ranks do not meet.
        """
        device = current_device()
        layout = Layout(
            stages=call.stages,
            chunks=call.chunks,
            group_size=call.group_size,
            rendezvous=device.type == "cuda",
            shared_queue=has_one_queue(device),
            serial_queue=has_serial_queue(config, device),
            staggered=config.staggered_optimizer,
            combined=call.combines,
        )
        memory = memory or memory_of(device)
        spans = recomputed_spans(call.config, call.model_chunks)
        if spans and memory is not None:
            layout = replace(layout, whole_first=True)
        self.book = PlanState(config, layout, measures_memory=memory is not None)
        entry = functools.reduce(lambda found, feature: feature.wrap_entry(found), features, JobEntry())
        self.job, self.rejoins = entry.job(call, config), entry.rejoins
        job, _, self._clock, limit_s = self.job
        control = entry.control(self.job)
        clock = DeviceClock(CudaEvents()) if device.type == "cuda" else None
        meeting = Rendezvous(control, job, max(limit_s, SETUP_LEAST_S), alone=self.rejoins)
        self.transport = make_transport(meeting, call, config, clock, limit_s)
        self._owner = OwningProcess()
        self._sent_all = False
        """True if the last iteration completed."""
        self._failure: BaseException | None = None
        """Error that ended an iteration: no further one can run."""
        self.telemetry = make_telemetry(self.job, call.chunks, config, goes_on=self.rejoins)
        self._config, self._policy = config, path_policy(config, self.transport)
        self.planner: PlannerClient | None = None
        """None except on the leader of each replica."""
        self.plan_for(self.job, leads=job.rank == job.leader and not self.rejoins)
        self.exchange = PlanExchange(control, job, self.planner, limit_s, fixed_order=not self.book.adapts)
        team = functools.partial(make_dispatcher, control, job, config, self.transport, limit_s)
        self.dispatcher = entry.wait(team, "the group of the cell's ranks")
        self._prefers_host = self._policy is not None and self._policy.preferred is Path.HOST
        self.dispatcher.all_by_host_path = self._prefers_host
        self.iterations, self.training_iterations = entry.counters
        """Number of iterations that have run: with evaluations, and without."""
        self.degraded = False
        """True if cells are dead."""
        ahead = 0 if layout.rendezvous else RECEIVES_AHEAD
        self.model_chunks, self.model_config = call.model_chunks, call.config
        self.hooks = [feature.hooks(self) for feature in features]
        carrier: Transport = self.transport
        for each in self.hooks:
            carrier = each.wrap_transport(carrier)
        self.executor = PipelineExecutor(
            carrier,
            make_timer(clock),
            timeout_s=limit_s,
            receives_ahead=ahead,
            plans_differ=job.replicas > 1 and self.book.adapts,
        )
        self._meter: MemoryMeter | None = None
        if memory is not None:
            self._meter = make_meter(memory, config.memory_fraction, fp16=bool(call.config.fp16), spans=spans)
        self._steering = self._make_steering()
        self._disturbances = DisturbanceWatch()
        self._disturbance: str | None = None
        self._first = FirstIterations(synchronizer_of(device))
        """Recognises the first iterations of this set of live ranks."""
        self.works = IterationWork(job, self.book, self.dispatcher, self._meter)
        self._begun_s = 0.0
        self._measuring = Measuring(
            self.job, self.transport, self.dispatcher, self.telemetry, self.hooks, work_of(call.model_chunks)
        )
        for each in self.hooks:
            each.made(call)

    @property
    def counters(self) -> Counters:
        """Return the iteration counters: all iterations, and training iterations."""
        return Counters(self.iterations, self.training_iterations)

    @property
    def running(self) -> Decision:
        """The active plan, as a decision."""
        return self.book.in_force

    @property
    def cold(self) -> bool:
        """Return whether the present iteration is cold (see `FirstIterations`) and runs stock's order."""
        return self._first.cold

    @property
    def has_failed(self) -> bool:
        """Return whether an iteration has ended with an error."""
        return self._failure is not None

    def begin(self, call: PipelineCall) -> None:
        """Begin an iteration. Raises TransportError after one that failed."""
        if self._failure is not None:
            raise TransportError(
                f"stage {call.stage}: the links to other stages were ended when an earlier iteration failed: "
                f"{self._failure}. Restart from the last checkpoint"
            ) from self._failure
        self._measuring.settle(self.exchange, self._steering)
        self._begun_s = time.monotonic()
        self._first.begin(call)
        if not call.forward_only:
            disturbance = self._disturbances.began(self._begun_s)
            self._disturbance = COLD if self._first.cold else disturbance
        self.telemetry.begin(self.iterations)

    def schedule(self, call: PipelineCall) -> Schedule:
        """Return the schedule of the iteration. Raises ExchangeError if the decision does not arrive, or a plan's
        error.
        """
        if call.forward_only:
            return self.book.evaluation_schedule(call.micro_batches)
        if self.training_iterations >= self.exchange.decides_from:
            self.follow(self.exchange.decision(self.training_iterations))
        self.telemetry.switch(self.book.number)
        planned = self.book.schedule_for(call.micro_batches)
        return self.book.whole_schedule(call.micro_batches) if self._first.cold else planned

    def plan_for(self, job: Job, dead: Collection[Cell] = (), *, leads: bool) -> None:
        """Plan for `job` from now on, by a planner process of this rank if it `leads`; end any earlier one.

        `dead`: cells that get no work.
        """
        number = 0 if self.planner is None else self.planner.number
        self.planner = None
        if leads:
            self.planner = make_planner(job, self.book, self._config, self._policy, self.telemetry, dead, number)

    def begin_anew(self, call: PipelineCall, *, degraded: bool) -> None:
        """Continue from `call` over new links, without measurements of their paths. `degraded`: whether cells
        are dead.
        """
        self.degraded = degraded
        self._steering, self._first = self._make_steering(), FirstIterations(synchronizer_of(current_device()))
        self._first.begin(call)

    def switched(self, seconds: float) -> None:
        """Tell the planner how long a switch to another order takes."""
        self._measuring.switch_s = seconds

    def disturbed(self, by: str) -> None:
        """Mark this iteration's timings as disturbed."""
        self._disturbance = by

    def work(self, call: PipelineCall, schedule: Schedule, attempt: int = 0) -> Work:
        """Return what `executor` is to run on this rank. `attempt`: number of the attempt."""
        make: Callable[[], Work] = functools.partial(
            self.works.planned, call, schedule, self.iterations, cold=self._first.cold
        )
        for each in self.hooks:
            make = functools.partial(each.choose_work, make, call, schedule)
        work = make()
        self._sent_all = False
        if self._meter is not None and not call.forward_only:
            self._meter.begin(self.book.number)
        return work._replace(addresses=replace(work.addresses, attempt=attempt))

    def end(self, call: PipelineCall, report: IterationReport) -> None:
        """End an iteration that has been launched.

        Its measurements are passed on once it has run: at once on the CPU, on a GPU at the beginning of the next one,
        when no stage waits for this rank's launches.
        """
        self._first.end()
        for each in self.hooks:
            each.commit(call)
        ended = EndedIteration(
            call, report, self.iterations, self.training_iterations, self._begun_s, self._disturbance, None
        )
        if call.forward_only:
            self._disturbances.evaluated()
        else:
            ended = ended._replace(memory=self._prepare_next(report))
            now_s = time.monotonic()
            self._disturbances.ended(now_s)
            seconds = now_s - self._begun_s
            ended = ended._replace(seconds=seconds)
            figures = rank_figures(self.transport, report, self.book.number, seconds)
            for each in self.hooks:
                figures = each.wrap_figures(figures)
            self.telemetry.trained(figures, *path_states(self.transport, self.job.layout.pipeline))
            self.training_iterations += 1
        for each in self.hooks:
            each.end(call)
        self.iterations += 1
        self._sent_all = True
        self._measuring.unsettled = ended
        if report.over():
            self._measuring.settle(self.exchange, self._steering)

    def fail(self, cause: BaseException) -> None:
        """Log the error that ended an iteration, abort pending operations, and send the cause to the peers.

        Returns once the processes that must end before this one have ended, or their time limit has passed.
        """
        if not self._owner.is_this:
            return  # in a child that was forked in this iteration, whose links are its parent's
        self._sent_all, self._failure, self._measuring.unsettled = False, cause, None
        for each in self.hooks:
            each.fail(cause)
        if isinstance(self.transport, TwoPathTransport):
            self.transport.report_failure(f"{type(cause).__name__}: {cause}")
        self.transport.close(drained=False)
        for each in self.hooks:
            each.failed()

    def close(self) -> bool:
        """Release transport, threads and trace files, once the peers have received the last iteration's messages.

        Returns False if work on the device cannot be ended: see `Transport.close`.
        """
        unsettled = self._measuring.unsettled
        if unsettled is not None and unsettled.report.over():
            self._measuring.settle(self.exchange, self._steering)
        if self._sent_all:
            try:
                self.transport.flush(time.monotonic() + LAST_MESSAGES_S)
            except TransportError as cause:
                logger.warning("closing although not everything sent has been received: %s", cause)
        ended = self.transport.close(drained=self._sent_all)
        self.exchange.close()
        for each in self.hooks:
            each.close()
        self._clock.close()
        self.telemetry.close()
        return ended

    def interrupt(self, cause: str) -> None:
        """Wake all waits of this rank, since live ranks have changed. For any thread."""
        if isinstance(self.transport, TwoPathTransport):
            self.transport.abort(cause)
        self.dispatcher.abort()
        self.exchange.interrupt(cause)

    def _make_steering(self) -> FixedPaths:
        policy = self._policy
        if not isinstance(self.transport, TwoPathTransport) or policy is None or self.book.observes:
            return FixedPaths()
        return LinkSteering(self.transport, self.job.layout.pipeline, policy.preferred)

    def go_on_from(self, decision: Decision) -> None:
        """Drop all plans except `decision`: they are for ranks that may have failed."""
        self.book.forget()
        self.works.forget()
        self.follow(decision)

    def follow(self, decision: Decision) -> None:
        """Apply a decision."""
        asked, order = decision.telemetry or TelemetrySection(), decision.order
        forecast, paths = decision.forecast, decision.paths
        self.telemetry.begin(self.iterations, asked.requests, asked.job)
        if asked.policy and asked.policy != self.book.policy:
            self.book.follow(asked.policy)
            self.dispatcher.keeps_plan = self.book.observes
            self.works.forget()
            if asked.policy == "off":
                self.exchange.leave()
        if order is not None:
            costs = order.costs
            released = costs.released_at_backward_input
            self.book.install(order.schedule(), decision.number, costs.max_in_flight, released, costs)
            self.works.forget()
        self.book.number = max(self.book.number, decision.number)  # a given plan has a number, too
        self.telemetry.switch(self.book.number, **({} if forecast is None else asdict(forecast)))
        for each in self.hooks:
            each.follow(decision)
        if paths is not None:
            self.dispatcher.all_by_host_path = self._prefers_host and not paths.diverted
            self._steering.steer(paths)
            self._steering.measure(paths)

    def _prepare_next(self, report: IterationReport) -> StageMemory | None:
        """Return the memory measurements of the iteration, and set the links' paths for the next one."""
        self._steering.steer_early(functools.partial(self.exchange.early_decision, self.training_iterations + 1))
        return None if self._meter is None else self._meter.finish(report.received_nbytes)
