# SPDX-License-Identifier: Apache-2.0
"""Train on when ranks fail: each iteration is attempted by the live ranks until one attempt commits."""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from adaptra_megatron.common.membership import MembershipRecords
from adaptra_megatron.common.typed_messages import encoded
from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.control.decisions import Decision, Moved, decision_of
from adaptra_megatron.control.exchange import PlanExchange
from adaptra_megatron.elastic.failure_errors import LateRankError
from adaptra_megatron.elastic.generation import FIRST, Generation
from adaptra_megatron.elastic.process_group_manager import FaultTolerantGroups, interruptible, live_groups
from adaptra_megatron.elastic.protocol_store import Word, said_by_one
from adaptra_megatron.elastic.recovery import RankFailure, RecoveryManager
from adaptra_megatron.elastic.rejoin import JoinResult, RejoiningRank, Return
from adaptra_megatron.engine.captured_iterations import CapturedIterations
from adaptra_megatron.engine.iteration_hooks import Attempt, Attempted, EngineFeature, IterationHooks
from adaptra_megatron.engine.rejoining import Joining, RejoiningEntry, Training, hand_over, rejoin_job
from adaptra_megatron.engine.rerouting import Rerouting
from adaptra_megatron.engine.training_job import Job, JobEntry
from adaptra_megatron.megatron.compat import data_parallel_group, mark_averaged
from adaptra_megatron.megatron.computation import StageComputation, SurroundedComputation
from adaptra_megatron.megatron.feature_refusals import refuse_for_recovery
from adaptra_megatron.megatron.megatron_call import PipelineCall
from adaptra_megatron.megatron.megatron_iteration import repeats_iteration
from adaptra_megatron.megatron.refusals import UnsupportedFeatureError
from adaptra_megatron.megatron.state.attempt_state import AttemptState, forget_attempt, running_timers, stop_timers
from adaptra_megatron.megatron.state.background_saves import BackgroundSaves
from adaptra_megatron.megatron.state.conservation import Conservation, Conserved, digest_of
from adaptra_megatron.telemetry.events import RanksLost, RanksReturned
from adaptra_megatron.telemetry.scalars import FailureMetrics, RankFigures

if TYPE_CHECKING:
    from adaptra_megatron.engine.pipeline import Pipeline

PATIENCE_S = 20.0
"""Longest wait for the launcher to report which rank has failed, after a message or a collective has failed."""
CONNECT_S = 60.0
_FLAG = "--adaptra-reroute failures"
_SAVE_IS_DUE = "save_is_due"


class FaultTolerance(EngineFeature):
    """Fault tolerance of one process."""

    def __init__(self, config: AdaptraConfig, groups: FaultTolerantGroups | None = None) -> None:
        """`groups`: Megatron's process groups; None: create them. Raises the errors of `live_groups`."""
        super().__init__()
        made = live_groups(config) if groups is None else groups
        assert made is not None
        self.groups, self._config = made, config
        self.groups.gather = self._gather
        self.sharded_optimizers: list[Any] = []
        """Megatron's distributed optimizers."""
        self.conservation = Conservation()
        """Counts micro-batches in gradients."""
        self.training: Training | None = None
        """Model, optimizer and iterators of the training script, once it has registered them: for rejoining ranks."""
        self.joining: Joining | None = None
        """State of a rejoining process until its first iteration."""
        self.saves = BackgroundSaves(made)
        """Checkpoints that are written in the background."""
        self._recoveries: list[Recovery] = []

    @property
    def settings(self) -> Mapping[str, str]:
        """Return the flags that must be the same on all ranks, with their values."""
        return {**self._config.common, **({} if self.training is None else self.training.settings)}

    def wrap_entry(self, entry: JobEntry) -> JobEntry:
        return entry if self.joining is None else RejoiningEntry(self.joining)

    def hooks(self, pipeline: Pipeline) -> IterationHooks:
        self._recoveries.append(Recovery(pipeline, self))
        return self._recoveries[-1]

    @property
    def rejoins(self) -> bool:
        """Return whether this process replaces a failed rank, and has not rejoined yet."""
        begun = self.joining is not None or bool(self._recoveries)
        return self.groups.place is not None and self.training is not None and not begun

    def rejoin(self) -> Mapping[str, Any] | None:
        """Rejoin the job if this process replaces a failed rank. Called before data are read for the first iteration.

        Returns the other ranks' progress, once this process has their parameters and optimizer state; None if it
        replaces no rank, or has rejoined already. `training` must be set. Raises the errors of `rejoining.rejoin_job`.
        """
        place = self.groups.place
        if not self.rejoins or place is None or self.training is None:
            return None
        records = MembershipRecords.of_rank(CONNECT_S)
        rejoining = RejoiningRank(place, records, self._config.timeout_s, self.settings)
        self.joining, progress = rejoin_job(rejoining, self.training)
        self.saves.is_due = progress[_SAVE_IS_DUE]
        return {name: value for name, value in progress.items() if name != _SAVE_IS_DUE}

    def aligned_groups(self, number: int, keys: Sequence[Sequence[Any]]) -> list[Sequence[Any]]:
        """Return the keys of each rank's parameter groups as the job's first processes had them. `keys`: as gathered,
        for the optimizer with this `number`.

        Megatron adds empty groups for keys that only other ranks have (core/optimizer/__init__.py, _get_param_groups).
        A process that replaces a failed rank gathers its own alone, so it gets rank 0's. Raises RuntimeError if the
        store cannot be reached.
        """
        if self.groups.place is None and self.groups.rank:
            return list(keys)
        records = MembershipRecords.of_rank(CONNECT_S)
        if self.groups.place is None:
            records.publish_groups(number, repr(list(dict.fromkeys(itertools.chain.from_iterable(keys)))))
            return list(keys)
        found = records.groups(number)
        return [*keys, ast.literal_eval(found)] if found else list(keys)

    def _progress(self) -> Mapping[str, Any]:
        """Return the script's progress, and whether a checkpoint will be due once ranks have been admitted."""
        assert self.training is not None
        return {**self.training.progress(), _SAVE_IS_DUE: self.saves.will_be_due}

    def save(self, write: Callable[[], Any], context: dict[str, Any]) -> Any:
        """See EngineFeature and `BackgroundSaves.save`."""
        if not self._recoveries:
            return write()
        return self.saves.save(self._recoveries[0].manager, write, context)

    def schedule_save(self, stock: Callable[..., int], queue: Any, request: Any) -> int:
        """See `BackgroundSaves.schedule`."""
        return self.saves.schedule(stock, queue, request) if self._recoveries else stock(queue, request)

    def finalize_saves(
        self, stock: Callable[..., list[int]], queue: Any, *, blocking: bool = False, no_dist: bool = False
    ) -> list[int]:
        """See `BackgroundSaves.finalize`."""
        if not self._recoveries:
            return stock(queue, blocking, no_dist)
        manager = self._recoveries[0].manager
        return self.saves.finalize(manager, stock, queue, blocking=blocking, no_dist=no_dist)

    def close(self) -> None:
        self._recoveries.clear()

    def _gather(self) -> None:
        """Gather parameters from the optimizer's shards."""
        for optimizer in self.sharded_optimizers:
            for chunk in optimizer.model_chunks:
                for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                    group.param_gather_handle = None
                chunk.start_param_sync(force_sync=True)


class Recovery(IterationHooks):
    """Runs one pipeline's iterations until they commit."""

    manager: RecoveryManager
    """Set by `made`."""
    _kept: AttemptState
    """Set by `made`."""

    def __init__(self, pipeline: Pipeline, feature: FaultTolerance) -> None:
        super().__init__(pipeline)
        self._feature, self._groups = feature, feature.groups
        self._generation = FIRST
        """Generation that links and routes were made for."""
        self._digested = FIRST
        """Last generation whose state was compared between replicas."""
        self._digest: bytes | None = None
        """Digest of the state at the beginning of this attempt, if replicas are to be compared."""
        self._conserved: Conserved | None = None
        """Verified counts of the gradients of the last attempt."""
        self._failures_logged = 0
        self._timers: Any = None
        """Megatron's timers, which evaluations use as well, though their call does not have them."""
        self._running: frozenset[str] = frozenset()
        """Timers that ran as this call began."""

    def made(self, call: PipelineCall) -> None:
        """See IterationHooks. Raises UnsupportedFeatureError for features that cannot be repeated, or without a
        launcher that reports live ranks.
        """
        feature, pipeline = self._feature, self.pipeline
        _refuse(call, feature.sharded_optimizers)
        _hold_copies(pipeline.job, feature.sharded_optimizers)
        self._kept = AttemptState(call.model_chunks)
        self._groups.before_leaving.append(self._drop_graphs)
        joining, feature.joining = feature.joining, None
        if joining is not None:
            # Before the meeting: a rejoining rank must run the others' plan in its first iteration.
            pipeline.follow(joining.running)
            joining.meet()
        joined = None if joining is None else joining.joined
        self.manager = _manager(pipeline.job, self._groups, pipeline.interrupt, joined)
        self.manager.word = self._word
        self.manager.admitted = functools.partial(feature.saves.admitted, self.manager)
        if feature.training is not None:
            training = feature.training._replace(progress=feature._progress)
            self.manager.enable_rejoin(functools.partial(hand_over, training, pipeline), feature.settings)

    def carry_out(self, attempt: Attempt, call: PipelineCall, number: int) -> Attempted:
        """See IterationHooks. Raises the errors of `RecoveryManager.carry_out`."""
        run = functools.partial(self._attempt, attempt, call)
        # Not where Megatron repeats an iteration: a rank that is admitted knows nothing of the first time.
        attempted = self.manager.carry_out(run, trains=not call.forward_only and not repeats_iteration())
        if not call.forward_only:
            self._feature.saves.trained()
        # Not the manager's generation: the attempt may have been found committed only once a later one was entered.
        self._digested, self._digest, self._conserved = self._generation, None, None
        return attempted

    def _attempt(self, attempt: Attempt, call: PipelineCall, generation: Generation, number: int) -> Attempted:
        """Run one attempt at `call` in `generation`. `number`: of earlier attempts, which did not commit."""
        if number == 0:
            self._timers = call.config.timers or self._timers
            self._running = running_timers(self._timers)
        else:
            stop_timers(self._timers, self._running)
        if number == 0 and not call.forward_only:
            # Before whatever a failure can interrupt, so that each later attempt finds the state of this call.
            self._kept.keep()
        self._enter(call, generation)
        # finish_grad_sync marks parameters as not gathered. In a rank's first iteration forwards would gather none.
        self._groups.stale |= number > 0
        self._groups.gather_missed()
        if number > 0 and not call.forward_only:
            forget_attempt(call)
            self._kept.restore()
        self._digest = self._conserved = None
        if generation.id != self._digested:
            scheduler = None if self._feature.training is None else self._feature.training.scheduler
            steps = 0 if scheduler is None else int(scheduler.num_steps)
            self._groups.synchronize()  # with checks: it reads what has been gathered
            self._digest = digest_of(call.model_chunks, self.pipeline.iterations, steps)
        # Not the number of the try: a rank that was between two calls as others failed has not tried yet.
        return attempt(call, self.manager.turn)

    def _enter(self, call: PipelineCall, generation: Generation) -> None:
        """Continue from `call` with the live ranks of `generation`; do nothing if it was entered before.

        Links, measurements and planning start anew, from the active plan of the lowest live rank. Raises RuntimeError
        if that rank does not publish it, EpochEndedError if another rank fails meanwhile.
        """
        if generation.id == self._generation:
            return
        pipeline, check = self.pipeline, self.manager.check
        self._generation = generation.id
        control = pipeline.job.control.in_generation(generation.id)
        job = pipeline.job._replace(layout=pipeline.job.layout.alive(generation.live), control=control)
        leads = job.layout.rank == job.layout.leader
        # The old planner process may be on a failed host, and decides for ranks that no longer exist.
        pipeline.exchange.leave()
        pipeline.go_on_from(_agreed_plan(job, pipeline.running if leads else None, check))
        pipeline.plan_for(job, generation.dead_cells, leads=leads)
        for each in pipeline.hooks:
            if isinstance(each, Rerouting):
                each.enter(generation, control, pipeline.planner, check)
            elif isinstance(each, CapturedIterations):
                each.enter(call)
        first = pipeline.training_iterations
        pipeline.exchange = PlanExchange(job.control, job.layout, pipeline.planner, job.timeout_s, first=first)
        # With dead cells routes decide the order, and no cell dispatches online.
        if not generation.dead_cells:
            resume = functools.partial(pipeline.dispatcher.resume, job.control, job.layout)
            interruptible(resume, check, job.timeout_s, "the group of the cell's ranks")
        check()  # what interrupted the exchange may have come before this one
        pipeline.begin_anew(call, degraded=bool(generation.dead_cells))
        pipeline.telemetry.lead(leads=leads)

    def _drop_graphs(self) -> None:
        for each in self.pipeline.hooks:
            if isinstance(each, CapturedIterations):
                each.drop()

    def wrap_computation(self, call: PipelineCall, computation: StageComputation) -> StageComputation:
        """See IterationHooks. Counts micro-batches."""
        if call.forward_only:
            return computation
        self._feature.conservation.begin(call.model_chunks)
        return SurroundedComputation(computation, functools.partial(self._counted, call))

    @contextlib.contextmanager
    def _counted(self, call: PipelineCall, kind: str, chunk: int, micro_batch: int) -> Iterator[None]:
        if kind in "BW":  # which complete a micro-batch's gradients: before that, no reduction of these can start
            self._feature.conservation.count(call.model_chunks[chunk])
        yield

    def finish(self, finish: Callable[[], None], call: PipelineCall, tokens: torch.Tensor) -> None:
        """See IterationHooks. Raises the errors of `Conservation.verify`."""
        # Summing them over the replicas is done in place.
        contributed = tokens.clone() if call.config.calculate_per_token_loss else None
        finish()
        if self.manager.generation.dead_cells:
            self._kept.average_sums(data_parallel_group(call.groups), self._groups.synchronize)
            mark_averaged(call.groups)
        self._groups.synchronize()
        if contributed is None:
            self._conserved = self._feature.conservation.verify(call)
            return
        # Tensor-parallel ranks of a cell have the same tokens.
        own = contributed if call.groups.tp.rank() == 0 else torch.zeros_like(contributed)
        self._conserved = self._feature.conservation.verify(call, own, tokens)

    def _word(self, word: Word) -> Word:
        """Add this rank's tokens and, in the first attempt of a generation, the digest of its state to its word."""
        worker = self.pipeline.job.layout.workers[self.pipeline.job.layout.rank]
        if self._digest is not None:
            place = f"stage {worker.cell.stage}, lane {worker.lane}"
            word = replace(word, digests={place: self._digest.hex()})
        found = self._conserved
        if found is None or found.tokens is None or found.divisor is None:
            return word
        return replace(word, tokens=found.tokens, divisors=(found.divisor,))

    def wrap_figures(self, figures: RankFigures) -> RankFigures:
        manager = self.manager
        lost = FailureMetrics(
            dead_cells=sorted((cell.replica, cell.stage) for cell in manager.generation.dead_cells),
            ranks=manager.ranks_lost,
            seconds={each.epoch: each.seconds for each in manager.rank_failures},
        )
        return replace(figures, lost=lost)

    def end(self, call: PipelineCall) -> None:
        """See IterationHooks. The lowest live rank logs ranks that failed or rejoined, once routes are planned."""
        moved = [each.moved_from_dead for each in self.pipeline.hooks if isinstance(each, Rerouting)]
        if None not in moved or not self._leads:
            self._log_changes([move for each in moved for move in each or ()])

    @property
    def _leads(self) -> bool:
        return self.pipeline.job.layout.rank == min(self.manager.generation.live)

    def _log_changes(self, moved: Sequence[Moved]) -> None:
        failures = self.manager.rank_failures[self._failures_logged :] if self._leads else ()
        for change in _membership_events(failures, self.manager.take_returns(), moved):
            self.pipeline.telemetry.log(change)
        self._failures_logged = len(self.manager.rank_failures)

    def fail(self, cause: BaseException) -> None:
        self.manager.end_with(cause)

    def close(self) -> None:
        self._log_changes(())
        self.manager.close(well=not self.pipeline.has_failed)


def _agreed_plan(job: Job, mine: Decision | None, check: Callable[[], None]) -> Decision:
    """Return the leader's active plan, with which all live ranks of `job` continue. `mine`: that plan on the leader;
    None elsewhere.

    `check` raises once another rank has failed. Raises LateRankError if the leader does not publish it within the
    timeout.
    """
    said, timeout_s = None if mine is None else encoded(mine), job.timeout_s
    with job.control.lent("plan", timeout_s) as store:
        try:
            return decision_of(said_by_one(store, "in force", said, timeout_s, check))
        except TimeoutError as cause:
            raise LateRankError(
                f"{job.layout.name(job.layout.leader)} has not published the active plan within {timeout_s:g} s "
                "(--adaptra-timeout-s); look at its log"
            ) from cause


def _membership_events(
    rank_failures: Sequence[RankFailure], returns: Sequence[Return], moved: Sequence[Moved]
) -> Iterator[RanksLost | RanksReturned]:
    """Return the events of failed and of rejoined ranks. `moved`: moves of the routes since then."""
    for failure in rank_failures:
        yield RanksLost(
            epoch=failure.epoch,
            ranks=failure.ranks,
            dead_cells=tuple(map(str, failure.dead_cells)),
            live=failure.live,
            seconds=failure.seconds,
            moved=moved,
        )
    for each in returns:
        yield RanksReturned(
            epoch=each.generation.id.membership,
            ranks=each.ranks,
            dead_cells=tuple(map(str, sorted(each.generation.dead_cells))),
            live=len(each.generation.live),
            seconds=each.seconds,
            moved=moved,
        )


def _manager(
    job: Job, groups: FaultTolerantGroups, interrupt: Callable[[str], None], joined: JoinResult | None
) -> RecoveryManager:
    """Create this rank's RecoveryManager.

    `interrupt`: called with the cause when live ranks change, to wake this rank's waits. `joined`: of a rejoining
    process. Raises UnsupportedFeatureError if no launcher reports which ranks live.
    """
    try:
        records = MembershipRecords.of_rank(CONNECT_S)
        known = records.newest() is not None
    except KeyError:
        known = False
    if not known:
        raise UnsupportedFeatureError(
            f"{_FLAG} needs a launcher that reports failed ranks, and this one does not: start "
            "the job with `adaptra launch --no-kill`, or drop the flag"
        )
    manager = RecoveryManager(job.layout, job.control, groups, records, job.timeout_s, PATIENCE_S, joined)
    manager.when_ended(functools.partial(interrupt, "the set of live ranks has changed"))
    return manager


def _hold_copies(job: Job, optimizers: Sequence[Any]) -> None:
    """Copy each shard of the distributed `optimizers` to another cell. Collective.

    Raises UnsupportedFeatureError if there is no other cell.
    """
    for optimizer in optimizers:
        try:
            optimizer.hold_copy(job.layout)
        except ValueError as cause:
            raise UnsupportedFeatureError(
                f"{_FLAG} with --use-distributed-optimizer: {cause}. Drop one of the two"
            ) from cause


def _refuse(call: PipelineCall, optimizers: Sequence[Any]) -> None:
    """Raise UnsupportedFeatureError, before any computation, for features that cannot be repeated or that fail with a
    rank.

    `optimizers`: distributed optimizers that can hold copies of shards.
    """
    ddp: Any = call.model_chunks[0].ddp_config
    refuse_for_recovery("failures", call.config, ddp, *(optimizer.config for optimizer in optimizers))
    if ddp.use_distributed_optimizer and not optimizers:
        raise UnsupportedFeatureError(
            f"{_FLAG} does not run with a distributed optimizer that was made before --adaptra was enabled: a rank "
            "that fails would take its shard of the optimizer's state with it. Drop one of the two"
        )
