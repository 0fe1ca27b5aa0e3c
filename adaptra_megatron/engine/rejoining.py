# SPDX-License-Identifier: Apache-2.0
"""Transfer the job's state from live ranks to a rejoining one, so that it can train with them.

Parameters, optimizer state and counters come from the lowest live rank of the same stage and lane. With the distributed
optimizer, the rank's own shard comes from the holder of its copy (`shard_copies`). The copy of another shard that the
rank must hold comes from that shard's owner.
"""

from __future__ import annotations

import atexit
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.common.layout import JobLayout
from adaptra_megatron.common.log import logger_of
from adaptra_megatron.common.typed_messages import encoded
from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.control.clocks import RelatedClock
from adaptra_megatron.control.decisions import Decision, decision_of
from adaptra_megatron.elastic.failure_errors import LateRankError, of_backend
from adaptra_megatron.elastic.fence import connected_group
from adaptra_megatron.elastic.generation import Generation
from adaptra_megatron.elastic.rejoin import PATIENCE_S, JoinResult, RejoiningLateError, RejoiningRank
from adaptra_megatron.engine.training_job import Counters, Job, JobEntry, Result
from adaptra_megatron.megatron.megatron_call import PipelineCall
from adaptra_megatron.megatron.state.training_state import (
    StateError,
    StateReceiver,
    StateSender,
    model_tensors,
    receive_optimizer,
    receive_tensors,
    send_optimizer,
    send_tensors,
)

if TYPE_CHECKING:
    from adaptra_megatron.engine.pipeline import Pipeline

logger = logger_of(__name__)

_SLICE = timedelta(milliseconds=20)
_LEAST_RATE = 100e6
"""Rate in bytes per second at which a message is not late."""
_LARGE_NBYTES = 1 << 20
_RELEASED_S = 5.0
"""Longest wait for the release of groups as the process ends."""
_PROMPT_S, _MEETING_S = 0.02, 0.5
"""Time within which no message is late, however small, and no rank that has to meet another."""
_SETTINGS = (
    *("seed", "lr", "min_lr", "lr_decay_style", "lr_decay_iters", "lr_decay_samples", "lr_warmup_iters"),
    *("lr_warmup_samples", "lr_warmup_fraction", "lr_warmup_init", "lr_wsd_decay_style", "lr_wsd_decay_iters"),
    *("lr_wsd_decay_samples", "decoupled_lr", "decoupled_min_lr", "loss_scale", "initial_loss_scale"),
    *("optimizer", "weight_decay", "start_weight_decay", "end_weight_decay", "weight_decay_incr_style"),
    *("adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum", "clip_grad", "use_distributed_optimizer"),
    *("num_distributed_optimizer_instances", "use_precision_aware_optimizer", "main_grads_dtype", "main_params_dtype"),
    *("exp_avg_dtype", "exp_avg_sq_dtype"),
    *("micro_batch_size", "global_batch_size", "rampup_batch_size", "seq_length", "train_iters", "train_samples"),
    *("num_layers", "hidden_size", "num_attention_heads", "hidden_dropout", "attention_dropout", "fp16", "bf16"),
    *("norm_epsilon", "rotary_base", "rotary_percent", "num_experts", "moe_aux_loss_coeff", "moe_z_loss_coeff"),
    *("moe_router_topk", "moe_router_load_balancing_type", "moe_router_score_function", "moe_router_bias_update_rate"),
    *("calculate_per_token_loss", "untie_embeddings_and_output_weights", "sequence_parallel", "data_path", "split"),
    *("train_data_path", "data_args_path", "eod_mask_loss", "reset_position_ids", "reset_attention_mask"),
    *("eval_interval", "eval_iters", "save_interval", "non_persistent_save_interval", "exit_interval", "log_interval"),
    *("exit_duration_in_mins", "exit_signal_handler", "rerun_mode", "timing_log_level"),
    *("log_params_norm", "log_num_zeros_in_grad"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
)
"""Names of Megatron's arguments that affect the numbers, or when all ranks meet, and stay constant during training."""


class HandOverLateError(RejoiningLateError):
    """A rejoining rank is stopped, too slow or has ended; training continues without it."""

    def __init__(self, rank: int, late_s: float, patience_s: float) -> None:
        super().__init__((rank,), late_s)
        self.patience_s = patience_s


class Training(NamedTuple):
    """Model, optimizer and iterators of a training script, for `hand_over` and `rejoin_job`."""

    model: Sequence[Any]
    """Model chunks."""
    optimizer: Any
    """Megatron's optimizer."""
    scheduler: Any
    """Megatron's OptimizerParamScheduler; None if there is none."""
    progress: Callable[[], Mapping[str, Any]]
    """Returns the progress of training when an iteration begins: names and plain values."""
    settings: Mapping[str, str] = MappingProxyType({})
    """Flags that must be the same on all ranks, with their values: a rejoining process must have the same."""

    @property
    def optimizers(self) -> list[Any]:
        """Return the optimizers that have parameters."""
        found = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        return [each for each in found if getattr(each, "optimizer", None) is not None]


def settings_of(arguments: Any) -> dict[str, str]:
    """Return the flags that affect numbers, with their values, from Megatron's parsed arguments."""
    found = vars(arguments)
    return {f"--{name.replace('_', '-')}": str(found[name]) for name in _SETTINGS if name in found}


def joined_job(joined: JoinResult, timeout_s: float) -> Job:
    """Return the job as a rejoining process sees it.

    Its clock is not related to those of other hosts, so times in its trace are off by the clocks' differences.
    """
    return Job(joined.layout, joined.control, RelatedClock(0.0), timeout_s)


class Joining(NamedTuple):
    """State of the job in a rejoining process, before its first iteration."""

    rejoining: RejoiningRank
    joined: JoinResult
    counters: Counters
    running: Decision
    """Active plan of the other ranks."""

    @property
    def job(self) -> Job:
        """Job as the process's pipeline sees it."""
        return joined_job(self.joined, self.rejoining.timeout_s)

    def meet(self) -> None:
        self.rejoining.meet(self.joined)


class RejoiningEntry(JobEntry):
    """Entry of a pipeline in a rejoining process."""

    rejoins = True

    def __init__(self, joining: Joining) -> None:
        self._joining, self.counters = joining, joining.counters

    def job(self, call: PipelineCall, config: AdaptraConfig) -> Job:
        return self._joining.job

    def control(self, job: Job) -> ControlStore:
        joined = self._joining.joined
        return joined.control.in_generation(joined.generation.id)

    def wait(self, wait: Callable[[], Result], what: str) -> Result:
        """See JobEntry. Raises the errors of `RejoiningRank.wait` if other ranks of the cell fail before they come."""
        return self._joining.rejoining.wait(self._joining.joined, wait, what)


class Handing(NamedTuple):
    """Transfer of state from one rank to another."""

    source: int
    target: int
    whole: bool
    """True if it includes parameters, unsharded optimizers and counters."""
    shards: tuple[tuple[int, bool], ...]
    """(index of the distributed optimizer, whether the shard is the target's own or the copy that it must hold)."""
    before: int
    """Number of earlier transfers to the same target."""


def handings(training: Training, layout: JobLayout, generation: Generation, before: frozenset[int]) -> list[Handing]:
    """Return the transfers that this rank takes part in, in the job-wide order, which rules out circular waits."""
    found: list[Handing] = []
    for target in sorted(generation.live - before):
        stage, lane = layout.workers[target].cell.stage, layout.workers[target].lane
        # Those of its lane first, whose parameters are its own. The copy of its shard may be at another lane.
        peers = sorted(
            (rank for rank in before if layout.workers[rank].cell.stage == stage),
            key=lambda rank: (layout.workers[rank].lane != lane, layout.workers[rank].cell.replica, rank),
        )
        for source in peers:
            shards = tuple(_shards(training, source, target, before))
            if source == peers[0] or shards:
                earlier = sum(each.target == target for each in found)
                found.append(Handing(source, target, source == peers[0], shards, earlier))
    return [each for each in found if layout.rank in (each.source, each.target)]


def _shards(training: Training, source: int, target: int, before: frozenset[int]) -> Iterator[tuple[int, bool]]:
    for place, optimizer in enumerate(training.optimizers):
        group = getattr(optimizer, "shard_group", None)
        if group is None:
            continue
        if group.has_shards:
            same = next((ranks for ranks in group.alike.values() if target in ranks), ())
            if source == next((rank for rank in same if rank in before), None):
                yield place, True
            continue
        ranks, holders = group.ranks, group.holders
        if target in ranks and source in ranks:
            if ranks[holders[ranks.index(target)]] == source:
                yield place, True
            if ranks[holders[ranks.index(source)]] == target:
                yield place, False


def hand_over(
    training: Training,
    pipeline: Pipeline,
    generation: Generation,
    before: frozenset[int],
    *,
    patience_s: float = PATIENCE_S,
    check: Callable[[], None] = lambda: None,
) -> float:
    """Send this rank's share of the state to the rejoining ranks of `generation`; return their total lateness in
    seconds.

    `patience_s`: limit of that lateness (see `_Lateness`). `check`: raises when the transfer has to stop. Raises
    HandOverLateError beyond the limit, RuntimeError if a rejoining rank failed, or ended because the received state was
    wrong.
    """
    layout, timeout_s = pipeline.job.layout, pipeline.job.timeout_s
    # The new generation's store: a transfer that an earlier admission has abandoned cannot meet this one.
    control = pipeline.job.control.in_generation(generation.id)
    ours, lateness = handings(training, layout, generation, before), _Lateness(patience_s)
    channels = [_Channel(handing, layout.rank, control, timeout_s, check, lateness) for handing in ours]
    nbytes = sum(each.nbytes for each in _tensors_of(training))
    for channel in channels:
        handing = channel.handing
        # The target receives from one rank after the other, so earlier transfers delay this one, and do not count as
        # lateness.
        channel.await_target(expected_s=handing.before * nbytes / _LEAST_RATE)
        sender = StateSender(channel.carry, *channel.proof)
        _send(sender, training, pipeline, handing)
        sender.finish()
        channel.await_target()
        channel.leave()
    return lateness.late_s


def take_over(
    training: Training,
    layout: JobLayout,
    control: ControlStore,
    generation: Generation,
    before: frozenset[int],
    timeout_s: float,
) -> tuple[Mapping[str, Any], Counters, Decision]:
    """Receive the job's state from the other ranks. `control`: the store of `generation`.

    Returns the training's progress, the pipeline's counters, and the active plan. Raises StateError if the state does
    not fit this process, RuntimeError if a rank does not send it within the timeout.
    """
    progress: Mapping[str, Any] = {}
    counters, running = Counters(0, 0), Decision(0)
    schedule: Mapping[str, Any] = _schedule(training)
    ours = handings(training, layout, generation, before)
    for channel in [_Channel(handing, layout.rank, control, timeout_s) for handing in ours]:
        channel.signal()
        receiver = StateReceiver(channel.carry, *channel.proof)
        if channel.handing.whole:
            progress, counters, running, schedule = _receive_whole(receiver, training)
        for place, own in channel.handing.shards:
            optimizer = training.optimizers[place]
            receive_optimizer(receiver, optimizer.optimizer, optimizer.shard_parameters(own=own))
        receiver.finish()
        channel.signal()
        channel.leave()
    for optimizer in training.optimizers:
        if getattr(optimizer, "shard_group", None) is not None:
            # Whose shard the others' parameters have as it was a step ago, where they gather them in the next forward.
            optimizer._copy_main_params_to_model_params()
    _follow(training, schedule)
    return progress, counters, running


def _send(sender: StateSender, training: Training, pipeline: Pipeline, handing: Handing) -> None:
    if handing.whole:
        sender.values(
            {
                "progress": dict(training.progress()),
                "counters": list(pipeline.counters),
                "plan": encoded(pipeline.running),
                "schedule": _schedule(training),
            }
        )
        send_tensors(sender, model_tensors(training.model))
        for optimizer in training.optimizers:
            if getattr(optimizer, "shard_group", None) is None:
                inner = optimizer.optimizer
                send_optimizer(sender, inner, [each for group in inner.param_groups for each in group["params"]])
    for place, own in handing.shards:
        optimizer = training.optimizers[place]
        # What is the target's own is this rank's copy, and the other way round.
        send_optimizer(sender, optimizer.optimizer, optimizer.shard_parameters(own=not own))


def _receive_whole(
    receiver: StateReceiver, training: Training
) -> tuple[Mapping[str, Any], Counters, Decision, Mapping[str, Any]]:
    """Receive what `_send` sends as a whole. Returns progress, counters, plan, and what `_schedule` returned there."""
    said = receiver.values()
    receive_tensors(receiver, model_tensors(training.model), "parameters")
    for optimizer in training.optimizers:
        if getattr(optimizer, "shard_group", None) is None:
            inner = optimizer.optimizer
            receive_optimizer(receiver, inner, [each for group in inner.param_groups for each in group["params"]])
    return said["progress"], Counters(*said["counters"]), decision_of(said["plan"]), said["schedule"]


def _follow(training: Training, schedule: Mapping[str, Any]) -> None:
    """Go on with the learning-rate schedule and loss scales of the sender, once all groups of parameters have come.

    Raises StateError if this process comes to other rates or scales by them.
    """
    if training.scheduler is not None:
        # All of it: with --use-checkpoint-opt-param-scheduler the others have theirs from a checkpoint.
        vars(training.scheduler).update(schedule["scheduler"])
        training.scheduler.step(0)
    for scaler, state in zip(_scalers(training), schedule["scalers"], strict=True):
        scaler.load_state_dict(state)
    # Rates follow from the scheduler, and from settings of this process.
    if _schedule(training) != schedule:
        raise StateError(f"this process has {_schedule(training)} after it has received {schedule}")


def _schedule(training: Training) -> dict[str, Any]:
    """Return the state of the learning-rate schedule, the rates that follow from it, and loss scales.

    Scales are on the CPU: they are loaded onto the device of the rank that sends them, and differ between devices.
    """
    scheduler = None if training.scheduler is None else training.scheduler.state_dict()
    groups = [group for optimizer in training.optimizers for group in optimizer.optimizer.param_groups]
    rates = [[float(group[name]) for name in ("lr", "weight_decay") if name in group] for group in groups]
    scales = [float(scaler.scale) for scaler in _scalers(training)]  # a constant one has no state
    states = [scaler.state_dict().items() for scaler in _scalers(training)]
    scalers = [{name: each.cpu() if torch.is_tensor(each) else each for name, each in state} for state in states]
    return {"scheduler": scheduler, "scalers": scalers, "rates": rates, "scales": scales}


def _scalers(training: Training) -> list[Any]:
    found = (getattr(optimizer, "grad_scaler", None) for optimizer in training.optimizers)
    return [each for each in found if each is not None]


def _tensors_of(training: Training) -> Iterator[torch.Tensor]:
    """Iterate over all tensors that a rank may have to send."""
    yield from model_tensors(training.model)
    for optimizer in training.optimizers:
        for parameter, state in optimizer.optimizer.state.items():
            yield from (each for each in (parameter, *state.values()) if isinstance(each, torch.Tensor))


class _Lateness:
    """Adds up how long rejoining ranks have kept this rank waiting beyond the expected time, over all messages.

    The expected time of a message is the longest of three: its bytes at _LEAST_RATE, three times the fastest large
    message's time for as many bytes, and _PROMPT_S.
    """

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self.late_s = self._fastest = 0.0
        """Seconds of lateness so far; and seconds per byte of the fastest large message."""

    def check(self, rank: int, waited_s: float, expected_s: float, nbytes: int) -> None:
        """Raise HandOverLateError if a pending message of `nbytes` to or from `rank` exceeds the limit.

        `waited_s`: time since the wait for it began. `expected_s`: duration that is always allowed.
        """
        if (late_s := self._with(waited_s, expected_s, nbytes)) > self.patience_s:
            raise HandOverLateError(rank, late_s, self.patience_s)

    def came(self, waited_s: float, expected_s: float, nbytes: int) -> None:
        """Record the arrival of a message."""
        self.late_s = self._with(waited_s, expected_s, nbytes)
        if nbytes >= _LARGE_NBYTES:
            self._fastest = min(self._fastest or waited_s / nbytes, waited_s / nbytes)

    def _with(self, waited_s: float, expected_s: float, nbytes: int) -> float:
        allowed_s = max(expected_s, nbytes / _LEAST_RATE, 3 * self._fastest * nbytes, _PROMPT_S)
        return self.late_s + max(0.0, waited_s - allowed_s)


class _Channel:
    """One end of a two-rank group, over which one rank sends its state to the other.

    Messages are broadcasts: unlike torch's sends and receives, a wait for one can end early without closing the
    connection.
    """

    def __init__(
        self,
        handing: Handing,
        rank: int,
        control: ControlStore,
        timeout_s: float,
        check: Callable[[], None] = lambda: None,
        lateness: _Lateness | None = None,
    ) -> None:
        """Connect to the other rank. `lateness`: of the rejoining rank; None: wait up to `timeout_s`.

        Raises HandOverLateError or RuntimeError if the other rank does not come.
        """
        self.handing = handing
        ends = handing.source, handing.target
        name = f"hand-over/{ends[0]}-{ends[1]}"
        self.proof = control.secret, control.seal(name).place
        """Key and identity of the hand-over's digest."""
        self._timeout_s, self._check, self._lateness = timeout_s, check, lateness
        # A live rank, which has `lateness`, holds up the whole job while it waits. A rejoining rank holds up nobody.
        limit_s = timeout_s if lateness is None else min(timeout_s, lateness.patience_s + _MEETING_S)
        begun_s = time.monotonic()
        try:
            with of_backend(), control.lent(name, limit_s, sealed=False) as store:
                group, self._sockets = connected_group(store, ends.index(rank), len(ends), limit_s)
                self._held: list[Any] = [group]
        except RuntimeError:
            if lateness is not None:
                lateness.check(handing.target, time.monotonic() - begun_s + _PROMPT_S, _MEETING_S, 0)
            raise
        if lateness is not None:
            lateness.came(time.monotonic() - begun_s, _MEETING_S, 0)

    def carry(self, tensor: torch.Tensor) -> None:
        """Transfer the next message from source to target."""
        self._broadcast(tensor, 0)

    def await_target(self, expected_s: float = 0.0) -> None:
        """At the source, wait until the target signals that it begins, or that it has everything.

        `expected_s`: how long that may take.
        """
        self._broadcast(torch.zeros(1, dtype=torch.uint8), 1, expected_s)

    def signal(self) -> None:
        """At the target, signal that it begins, or that it has everything."""
        self._broadcast(torch.zeros(1, dtype=torch.uint8), 1)

    def leave(self) -> None:
        """Release the group, in another thread, since its destructor waits for pending operations."""
        thread = threading.Thread(target=self._held.clear, name="adaptra-hand-over", daemon=True)
        thread.start()
        # A thread that returns from C++ once Python ends aborts the process, and its launcher would count a failure.
        atexit.register(thread.join, _RELEASED_S)

    def _broadcast(self, tensor: torch.Tensor, root: int, expected_s: float = 0.0) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        options.timeout = timedelta(seconds=self._timeout_s)
        # No name here may be the last to hold one of gloo's, for an error holds this frame.
        self._held.append(self._held[0].broadcast([tensor], options))
        begun_s = time.monotonic()
        try:
            while not self._over():
                self._check()
                waited_s = time.monotonic() - begun_s
                if self._lateness is not None:
                    self._lateness.check(self.handing.target, waited_s, expected_s, tensor.nbytes)
                elif waited_s > self._timeout_s:
                    raise LateRankError(f"timed out: {self.handing} has made no progress for {self._timeout_s:g} s")
        except BaseException:
            # Else the group would wait for a rank that is stopped, and end this process with an error at its exit.
            self._sockets.shut_down()
            self.leave()
            raise
        self._held.pop()
        if self._lateness is not None:
            self._lateness.came(time.monotonic() - begun_s, expected_s, tensor.nbytes)

    def _over(self) -> bool:
        """Wait a moment; return whether the pending message has arrived. Raises RuntimeError if the other rank has
        failed.
        """
        try:
            with of_backend():
                self._held[-1].wait(_SLICE)
        except RuntimeError:
            if not self._held[-1].is_completed():
                return False
            with of_backend():
                self._held[-1].wait()  # which raises, unless it was the slice that had ended
        return True


def rejoin_job(rejoining: RejoiningRank, training: Training) -> tuple[Joining, Mapping[str, Any]]:
    """Wait for admission to the job and receive its state; return the state and the training's progress.

    Raises the errors of `RejoiningRank.stand_ready` and `take_over`, and EpochEndedError if another rank fails
    meanwhile.
    """
    layout = rejoining.layout
    for optimizer in training.optimizers:
        if getattr(optimizer, "shard_group", None) is not None:
            # Without `fill`, which is collective: the other members are training. The copy's contents come with the
            # state.
            optimizer.hold_copy(layout, fill=False)
    joined = rejoining.stand_ready()
    begun_s = time.monotonic()
    progress, counters, running = rejoining.wait(
        joined,
        functools.partial(
            take_over,
            training,
            layout,
            joined.control.in_generation(joined.generation.id),
            joined.generation,
            joined.before,
            rejoining.timeout_s,
        ),
        "the state of the job",
    )
    logger.info("%s: has the state of the job after %.2f s", layout.name(layout.rank), time.monotonic() - begun_s)
    return Joining(rejoining, joined, counters, running), progress
