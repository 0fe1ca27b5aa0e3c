# SPDX-License-Identifier: Apache-2.0
"""A worker that is started again gets from the others what it needs to train on with them.

Parameters, optimizer state and counters come from the lowest live rank that has the same. Its shard of the distributed
optimizer, which no other rank has, comes from the holder of the copy (`shard_copies`), and the copy that it is to hold
from the owner of that shard.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from adaptra_megatron.control.decisions import Decision, decision_of
from adaptra_megatron.control.wire_format import encoded
from adaptra_megatron.epochs.errors import of_backend
from adaptra_megatron.epochs.generation import Generation
from adaptra_megatron.epochs.joining import Joined, Newcomer
from adaptra_megatron.epochs.live_groups import interruptible
from adaptra_megatron.job.control_store import ControlStore
from adaptra_megatron.job.layout import JobLayout
from adaptra_megatron.job.process_groups import epoch_group
from adaptra_megatron.log import logger_of
from adaptra_megatron.runtime.job import Job, joined_job
from adaptra_megatron.runtime.megatron.state.training_state import (
    StateReceiver,
    StateSender,
    model_tensors,
    receive_optimizer,
    receive_tensors,
    send_optimizer,
    send_tensors,
)

logger = logger_of(__name__)

_TAG = 1
_SETTINGS = (
    *("seed", "lr", "min_lr", "lr_decay_style", "lr_decay_iters", "lr_decay_samples", "lr_warmup_iters"),
    *("lr_warmup_samples", "lr_warmup_fraction", "optimizer", "weight_decay", "start_weight_decay", "end_weight_decay"),
    *("adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum", "clip_grad", "use_distributed_optimizer"),
    "num_distributed_optimizer_instances",
    *("micro_batch_size", "global_batch_size", "rampup_batch_size", "seq_length", "train_iters", "train_samples"),
    *("num_layers", "hidden_size", "num_attention_heads", "hidden_dropout", "attention_dropout", "fp16", "bf16"),
    *("calculate_per_token_loss", "untie_embeddings_and_output_weights", "sequence_parallel", "data_path", "split"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
)
"""Arguments of Megatron's that decide over numbers and stay what they are while it trains."""


class Training(NamedTuple):
    """What a training script trains with, for `hand_over` and `take_place`."""

    model: Sequence[Any]
    """Chunks."""
    optimizer: Any
    """Megatron's."""
    scheduler: Any
    """Megatron's OptimizerParamScheduler; None: there is none."""
    progress: Callable[[], Mapping[str, Any]]
    """How far it has come when an iteration begins: names and plain values."""
    settings: Mapping[str, str] = MappingProxyType({})
    """Flags that all ranks have alike, and their values: processes that take the places of others have the same."""

    @property
    def optimizers(self) -> list[Any]:
        """Those that have parameters."""
        found = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        return [each for each in found if getattr(each, "optimizer", None) is not None]


def settings_of(arguments: Any) -> dict[str, str]:
    """Flags that decide over numbers, and their values, of Megatron's parsed arguments."""
    found = vars(arguments)
    return {f"--{name.replace('_', '-')}": str(found[name]) for name in _SETTINGS if name in found}


class Counters(NamedTuple):
    """How many iterations have run: all, and those of training."""

    iterations: int
    training_iterations: int


class Joining(NamedTuple):
    """What a process that takes the place of a rank that had left has of the job before its first iteration."""

    newcomer: Newcomer
    joined: Joined
    counters: Counters
    running: Decision
    """The plan that the others run."""

    @property
    def job(self) -> Job:
        """As its pipeline sees it."""
        return joined_job(self.joined, self.newcomer.timeout_s)

    def check(self) -> None:
        """See `Newcomer.check`."""
        self.newcomer.check(self.joined)

    def meet(self) -> None:
        """See `Newcomer.meet`."""
        self.newcomer.meet(self.joined)


class Handing(NamedTuple):
    """What one rank hands to another."""

    source: int
    target: int
    whole: bool
    """Parameters, optimizers that are not sharded, counters."""
    shards: tuple[tuple[int, bool], ...]
    """Places of distributed optimizers, and whether it is the target's own shard (True) or the copy that it is to hold.
    """


def handings(training: Training, layout: JobLayout, generation: Generation, before: frozenset[int]) -> list[Handing]:
    """Those that this rank has a part in, in the order in which all are done: no circle of waits."""
    found = []
    for target in sorted(generation.live - before):
        worker = layout.workers[target]
        peers = [
            rank
            for rank in sorted(before, key=lambda each: (layout.workers[each].cell.replica, each))
            if (layout.workers[rank].cell.stage, layout.workers[rank].lane) == (worker.cell.stage, worker.lane)
        ]
        for source in peers:
            shards = tuple(_shards(training, source, target, before))
            if source == peers[0] or shards:
                found.append(Handing(source, target, source == peers[0], shards))
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


class Trains(Protocol):
    """A rank's pipeline."""

    @property
    def job(self) -> Job:
        """The job that it is of."""

    @property
    def counters(self) -> Counters:
        """What numbers of iterations go by."""

    @property
    def running(self) -> Decision:
        """The plan that runs."""


def hand_over(training: Training, pipeline: Trains, generation: Generation, before: frozenset[int]) -> None:
    """Give the newcomers of `generation` what they are to have of this rank.

    Raises RuntimeError where a newcomer does not take it within the timeout.
    """
    layout, timeout_s = pipeline.job.layout, pipeline.job.timeout_s
    control = pipeline.job.control.in_generation(generation.id)
    for handing in handings(training, layout, generation, before):
        with _channel(handing, layout.rank, control, timeout_s) as channel:
            sender = StateSender(channel)
            _send(sender, training, pipeline, handing)
            sender.finish()


def take_over(
    training: Training,
    layout: JobLayout,
    control: ControlStore,
    generation: Generation,
    before: frozenset[int],
    timeout_s: float,
) -> tuple[Mapping[str, Any], Counters, Decision]:
    """Fill this process with what the others hand over. `control`: part of the store of `generation`.

    Returns the training's progress, the pipeline's counters, and the plan that runs.

    Raises StateError where that does not fit, RuntimeError where a rank does not hand over within the timeout.
    """
    progress: Mapping[str, Any] = {}
    counters, running = Counters(0, 0), Decision(0)
    for handing in handings(training, layout, generation, before):
        with _channel(handing, layout.rank, control, timeout_s) as channel:
            receiver = StateReceiver(channel)
            if handing.whole:
                progress, counters, running = _receive_whole(receiver, training)
            for place, own in handing.shards:
                optimizer = training.optimizers[place]
                receive_optimizer(receiver, optimizer.optimizer, optimizer.shard_parameters(own=own))
            receiver.finish()
    for optimizer in training.optimizers:
        if getattr(optimizer, "shard_group", None) is not None:
            # Whose shard the others' parameters have as it was a step ago, where they gather them in the next forward.
            optimizer._copy_main_params_to_model_params()
    return progress, counters, running


def _send(sender: StateSender, training: Training, pipeline: Trains, handing: Handing) -> None:
    if handing.whole:
        scheduler = None if training.scheduler is None else training.scheduler.num_steps
        sender.values(
            {
                "progress": dict(training.progress()),
                "counters": list(pipeline.counters),
                "plan": encoded(pipeline.running),
                "scheduler": scheduler,
                "scalers": [scaler.state_dict() for scaler in _scalers(training)],
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


def _receive_whole(receiver: StateReceiver, training: Training) -> tuple[Mapping[str, Any], Counters, Decision]:
    said = receiver.values()
    receive_tensors(receiver, model_tensors(training.model), "parameters")
    for optimizer in training.optimizers:
        if getattr(optimizer, "shard_group", None) is None:
            inner = optimizer.optimizer
            receive_optimizer(receiver, inner, [each for group in inner.param_groups for each in group["params"]])
    if training.scheduler is not None:
        training.scheduler.num_steps = said["scheduler"]
        training.scheduler.step(0)
    for scaler, state in zip(_scalers(training), said["scalers"], strict=True):
        scaler.load_state_dict(state)
    return said["progress"], Counters(*said["counters"]), decision_of(said["plan"])


def _scalers(training: Training) -> list[Any]:
    found = (getattr(optimizer, "grad_scaler", None) for optimizer in training.optimizers)
    return [each for each in found if each is not None]


@contextmanager
def _channel(handing: Handing, rank: int, control: ControlStore, timeout_s: float) -> Iterator[Callable[[Any], None]]:
    ends = handing.source, handing.target
    with of_backend():
        group = epoch_group(control, f"hand-over/{ends[0]}-{ends[1]}", ends, rank, timeout_s)
    other = 1 - ends.index(rank)

    def carry(tensor: Any) -> None:
        with of_backend():
            work = group.send([tensor], other, _TAG) if rank == handing.source else group.recv([tensor], other, _TAG)
            work.wait(timedelta(seconds=timeout_s))

    yield carry


def take_place(newcomer: Newcomer, training: Training) -> tuple[Joining, Mapping[str, Any]]:
    """Wait until the others call this process in, and get from them what it needs; also the training's progress, from
    which it goes on.

    Raises as `Newcomer.stand_ready` and `take_over`, and EpochEndedError where another rank dies meanwhile.
    """
    layout = newcomer.layout
    for optimizer in training.optimizers:
        if getattr(optimizer, "shard_group", None) is not None:
            optimizer.hold_copy(layout, fill=False)
    joined = newcomer.stand_ready()
    begun_s = time.monotonic()
    progress, counters, running = interruptible(
        functools.partial(
            take_over,
            training,
            layout,
            joined.control.in_generation(joined.generation.id),
            joined.generation,
            joined.before,
            newcomer.timeout_s,
        ),
        functools.partial(newcomer.check, joined),
        newcomer.timeout_s,
        "the state of the job",
    )
    logger.info("%s: has the state of the job after %.2f s", layout.name(layout.rank), time.monotonic() - begun_s)
    return Joining(newcomer, joined, counters, running), progress
