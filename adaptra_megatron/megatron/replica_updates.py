# SPDX-License-Identifier: Apache-2.0
"""Train with parameter updates that need not include all replicas (--adaptra-sync-mode; STAR, arXiv 2512.09685).

An iteration of the training script is an update. A replica whose gradient is late misses updates. It runs through those
iterations without computing, so that its counters and learning rate equal the others'. Then there are two ways to
continue. Either it makes a later update with its gradient, from the parameters of an up-to-date replica; or it has
given its gradient to another replica, in exchange for parameters and optimizer state.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.common.gathering import gather
from adaptra_megatron.common.log import logger_of
from adaptra_megatron.gradsync.mode_decider import Gradient
from adaptra_megatron.gradsync.peer_messages import PeerMessage, Peers
from adaptra_megatron.gradsync.straggler_all_reduce import sum_over
from adaptra_megatron.gradsync.sync_modes import ModeKind
from adaptra_megatron.gradsync.update_log import UpdateLog
from adaptra_megatron.gradsync.update_order import CatchUp, Handover, Met, Update
from adaptra_megatron.megatron.compat import data_parallel_group, default_groups, groups_keyword
from adaptra_megatron.megatron.feature_refusals import refuse_for_sync_mode, refuse_to_split
from adaptra_megatron.megatron.gradients.gradient_reduction import check_gradients
from adaptra_megatron.megatron.megatron_call import config_of
from adaptra_megatron.megatron.state.training_state import (
    StateReceiver,
    StateSender,
    model_tensors,
    receive_optimizer,
    receive_tensors,
    send_optimizer,
    send_tensors,
)

logger = logger_of(__name__)

KINDS = {
    "x-order": (ModeKind.X_ORDER,),
    "dynamic": (ModeKind.DYNAMIC,),
    "auto": (ModeKind.X_ORDER, ModeKind.DYNAMIC),
}
"""Kinds of updates that each --adaptra-sync-mode allows, besides those of all replicas together."""

Stepped = tuple[bool, Any, Any]
"""Result of MegatronOptimizer.step: success, norm of the gradients, number of zeros in them."""


class _Token(NamedTuple):
    """One rank's random token. All ranks use the part of the job's store that the first rank's token names."""

    token: str


class _Carried(NamedTuple):
    """A gradient that waits for its update."""

    finalize: Callable[[], None]
    """Call of Megatron's finalize_model_grads_func for this gradient."""
    losses: Any


def computing_s(begun_s: float) -> float:
    """Return the seconds since `begun_s` (time.monotonic)."""
    return time.monotonic() - begun_s


class ReplicaUpdates:
    """Partial updates of one rank. All ranks of a replica make the same calls, and so get the same results."""

    def __init__(self, mode: str, max_staleness: int, timeout_s: float | None) -> None:
        """`mode`: a key of `KINDS`. `timeout_s`: longest wait for other replicas; None: the timeout of the
        job's store.
        """
        self._mode, self._max_staleness, self._timeout_s = mode, max_staleness, timeout_s
        self.used: Counter[str] = Counter()
        """Iterations by kind: "together" and "partial" updates with this rank, of which "late" used a gradient of older
        parameters; "missed" ones, of which "given" gave their gradient to another replica.
        """
        self._log: UpdateLog | None = None
        self._sums: Peers | None = None
        self._states: Peers | None = None
        self._alone: Any = None
        self._model: list[Any] = []
        self._optimizer: Any = None
        self._replicas = self._index = 0
        self._iteration = 0
        self._met_at = 0
        self._carried: _Carried | None = None
        self._given: list[torch.Tensor] = []
        """Sums of gradients that late replicas have given to this one, for each of Megatron's buffers."""
        self._event: Update | CatchUp | None = None
        self._update: Update | None = None
        """Update that the present iteration makes; None if this replica misses it."""
        self._apart = False
        """True from an iteration without some replicas until the next call."""
        self._update_square: float | None = None
        self._opens = False
        """True while the log waits for this replica to report that it has begun to compute."""
        self._stepped: Stepped = (True, 0.0, None)

    @property
    def keeps_gradients(self) -> bool:
        """Return whether a gradient waits for its update, so that it must not be zeroed."""
        return self._carried is not None and not isinstance(self._event, CatchUp)

    @property
    def group_alone(self) -> Any:
        """Group of this rank alone, for sums of losses in an iteration without the other replicas; else None."""
        return self._alone if self._apart else None

    def iterate(self, run: Callable[[], Any], arguments: Mapping[str, Any]) -> Any:
        """Run one call of Megatron's forward_backward function by `run`; return its result. `arguments`: of the call.

        In a training iteration that this replica misses, returns the losses of the previous one. Raises
        UnsupportedFeatureError before the first iteration, PeerError if other replicas fail.
        """
        self._update, self._apart = None, False
        if arguments.get("forward_only"):
            self.settle()
            return run()
        if self._log is None:
            self._set_up(arguments)
        assert self._log is not None
        if isinstance(self._event, CatchUp) and self._event.version == self._iteration:
            self._event = self._carried = None
        if self._carried is None:
            self._carried = self._compute(run, arguments)
        if self._event is None:
            event = self._log.next()
            assert not isinstance(event, Met), "replicas have met, and this one was not there"
            self._event = event
            self.used["given"] += isinstance(event, CatchUp)
        losses = self._carried.losses
        if isinstance(self._event, Update) and self._event.version == self._iteration:
            self._update, self._event = self._event, None
            finalize, self._carried = self._carried.finalize, None
            self._make(self._update, finalize)
        else:
            self.used["missed"] += 1
        self._apart = self._update is None or not self._update.whole
        return losses

    def start(self, stock: Callable[..., Any], bucket_group: Any, *given: Any, **keywords: Any) -> None:
        """Reduce a bucket group in place of Megatron's `_ParamAndGradBucketGroup.start_grad_sync` (`stock`).

        Called by `finalize`. It replaces gradients by their mean over the update's members; if all replicas take part,
        stock does. Raises PeerError if a member fails. (Source: param_and_grad_buffer.py.)
        """
        update = self._update
        assert update is not None, "a reduction outside an update"
        if update.together:
            stock(bucket_group, *given, **keywords)
            self._update_square = (self._update_square or 0.0) + _square(bucket_group.buckets)
            return
        assert self._sums is not None
        check_gradients(bucket_group)
        for bucket in bucket_group.buckets:
            # Stock's factor is that of a mean over all replicas, or left to the collective.
            bucket.grad_data /= update.gradients
            sum_over(self._sums, update.members, bucket.grad_data)
        self._sums.settle()

    def step(self, optimizer: Any, stock: Callable[[], Stepped]) -> Stepped:
        """Take one step of `optimizer` by `stock`, with the learning rate scaled by the update's share of all
        gradients.

        Takes no step in an iteration that this replica misses; returns the result of the step before.
        """
        self._optimizer = optimizer
        update, self._iteration = self._update, self._iteration + 1
        if update is None:
            return self._stepped
        self._opens = not update.whole and update.begins == self._index
        with _scaled_rate(optimizer, update.gradients / self._replicas):
            self._stepped = stock()
        device = _device(self._model)
        if device.type == "cuda":
            # From `reached` on the log's thread may send these parameters to a replica that missed the update.
            torch.cuda.current_stream(device).synchronize()
        assert self._log is not None
        self._log.reached(self._iteration)
        return self._stepped

    def settle(self) -> None:
        """Wait until all replicas reach this point with the same parameters. Collective over the job.

        Raises PeerError if one does not come.
        """
        if self._log is None or self._met_at == self._iteration:
            return
        self._log.meet()
        met = self._log.next()
        assert isinstance(met, Met), f"{met} where replicas meet"
        assert met.version == self._iteration, f"replicas meet at {met.version}, and this is {self._iteration}"
        self._met_at, self._apart = self._iteration, False

    def close(self) -> None:
        """End the thread, and inform the other replicas."""
        if self._log is not None:
            self._log.close()

    def _compute(self, run: Callable[[], Any], arguments: Mapping[str, Any]) -> _Carried:
        assert self._log is not None
        if self._opens:
            self._log.begin()
            self._opens = False
        begun_s = time.monotonic()
        with _finalized_later(config_of(arguments["model"])) as finalize:
            losses = run()
        device = _device(self._model)
        if device.type == "cuda":
            # Times of replicas are compared, so this one has to include its kernels.
            torch.cuda.current_stream(device).synchronize()
        gradient = Gradient(computing_s(begun_s), _square(buffers(self._model)), self._update_square)
        self._update_square = None
        self._log.hand_in(gradient)
        return _Carried(finalize[0], losses)

    def _make(self, update: Update, finalize: Callable[[], None]) -> None:
        """Sum the update's gradients. Raises PeerError if a member fails."""
        self.used["together" if update.together else "partial"] += 1
        self.used["late"] += self._index in update.stale
        for buffer, given in zip(buffers(self._model), self._given, strict=bool(self._given)):
            buffer.grad_data += given.to(buffer.grad_data.device)
        self._given = []
        try:
            finalize()
        except RuntimeError as cause:  # of Megatron's sums names no rank
            assert self._log is not None
            failure = self._log.failure()
            if failure is None:
                raise
            raise failure from cause

    def _set_up(self, arguments: Mapping[str, Any]) -> None:
        """Connect the replicas. Collective over the job."""
        self._model = _chunks(arguments)
        groups = arguments.get(groups_keyword()) or default_groups()
        replicas = data_parallel_group(groups)
        refuse_for_sync_mode(self._mode, config_of(self._model[0]), self._model[0].ddp_config)
        if replicas.size() < 2:
            refuse_to_split(self._mode, replicas.size())
        ranks, rank = dist.get_process_group_ranks(replicas), dist.get_rank()
        control = ControlStore.of_job(gather(_Token(secrets.token_hex(16)))[0].token)
        timeout_s = control.timeout_s if self._timeout_s is None else self._timeout_s
        self._replicas, self._index = len(ranks), ranks.index(rank)
        self._sums = Peers.meet(control, "updates", ranks, rank, timeout_s, _device(self._model))
        self._states = Peers.meet(control, "states", ranks, rank, timeout_s, torch.device("cpu"))
        # Without local synchronization new_group would wait for all ranks of the job, which make groups of their own
        # here.
        self._alone = dist.new_group([rank], use_local_synchronization=True)
        self._log = UpdateLog(
            control,
            ranks,
            self._index,
            rank,
            # In any order of actions the first stage's last backward is the replica's last.
            leads=groups.pp.rank() == 0 and groups.tp.rank() == 0,
            kinds=KINDS[self._mode],
            max_staleness=self._max_staleness,
            timeout_s=timeout_s,
            carry=self._carry,
        )

    def _carry(self, handover: Handover, version: int, gives: bool) -> None:
        """Send or receive the state of a handover, in the log's thread. The training thread leaves both states
        unchanged then.
        """
        assert self._states is not None
        begun_s = time.monotonic()
        optimizers = [each.optimizer for each in self._optimizer.chained_optimizers if each.optimizer is not None]
        own = [buffer.grad_data for buffer in buffers(self._model)] if gives else []
        if self._index == handover.source:
            for place, gradient in enumerate(own):
                came = torch.empty_like(gradient, device="cpu")
                self._states.exchange(None, PeerMessage(came, handover.target))
                if place < len(self._given):
                    self._given[place] += came
                else:
                    self._given.append(came)
            _send_state(self._states, handover.target, self._model, optimizers)
        else:
            for place, gradient in enumerate(own):
                gone = gradient.cpu() + self._given[place] if self._given else gradient.cpu()
                self._states.exchange(PeerMessage(gone, handover.source), None)
            self._given = self._given if not gives else []
            _receive_state(self._states, handover.source, self._model, optimizers)
            logger.debug("has update %d of another replica after %.3f s", version, time.monotonic() - begun_s)


def _send_state(peers: Peers, target: int, model: list[Any], optimizers: list[Any]) -> None:
    """Send model and optimizer state, as a size and one packet.

    It is one packet because each message may wait for a CPU core. This takes a copy of the whole state in this
    process's memory.
    """
    parts: list[torch.Tensor] = []
    sender = StateSender(lambda tensor: parts.append(tensor.clone().view(torch.uint8)))
    send_tensors(sender, model_tensors(model))
    for optimizer in optimizers:
        send_optimizer(sender, optimizer, _parameters(optimizer))
    sender.finish()
    packet = torch.cat(parts)
    peers.exchange(PeerMessage(torch.tensor([packet.numel()]), target), None)
    peers.exchange(PeerMessage(packet, target), None)


def _receive_state(peers: Peers, source: int, model: list[Any], optimizers: list[Any]) -> None:
    """Receive the state that `_send_state` sends. Raises StateError if it does not fit, or was corrupted."""
    size = torch.zeros(1, dtype=torch.int64)
    peers.exchange(None, PeerMessage(size, source))
    packet = torch.empty(int(size), dtype=torch.uint8)
    peers.exchange(None, PeerMessage(packet, source))
    taken = 0

    def take(tensor: torch.Tensor) -> None:
        nonlocal taken
        flat = tensor.view(torch.uint8)
        flat.copy_(packet[taken : taken + flat.numel()])
        taken += flat.numel()

    receiver = StateReceiver(take)
    receive_tensors(receiver, model_tensors(model), "parameters")
    for optimizer in optimizers:
        receive_optimizer(receiver, optimizer, _parameters(optimizer))
    receiver.finish()


def _chunks(arguments: Mapping[str, Any]) -> list[Any]:
    model = arguments["model"]
    return list(model) if isinstance(model, list) else [model]


def _device(model: list[Any]) -> torch.device:
    device: torch.device = next(iter(model[0].parameters())).device
    return device


def buffers(model: list[Any]) -> list[Any]:
    """Return all of Megatron's gradient buffers of a model."""
    return [buffer for chunk in model for buffer in chunk.buffers]


def _square(holders: list[Any]) -> float:
    """Return the squared norm of the gradients in buffers or buckets."""
    norms = [torch.linalg.vector_norm(each.grad_data, dtype=torch.float32) for each in holders]
    return float(torch.stack(norms).double().square().sum())


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


@contextmanager
def _finalized_later(config: Any) -> Iterator[list[Callable[[], None]]]:
    """Defer Megatron's call of finalize_model_grads_func within this context: yields a list that receives the call."""
    stock, found = config.finalize_model_grads_func, []

    def keep(*given: Any, **keywords: Any) -> None:
        found.append(lambda: stock(*given, **keywords))

    config.finalize_model_grads_func = keep
    try:
        yield found
    finally:
        config.finalize_model_grads_func = stock
    assert len(found) == 1, f"gradients were finalized {len(found)} times"


@contextmanager
def _scaled_rate(optimizer: Any, factor: float) -> Iterator[None]:
    """Scale learning rates by `factor` within this context; restore them to the bit afterwards."""
    if factor == 1.0:
        yield
        return
    groups = optimizer.param_groups
    rates = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = group["lr"] * factor
    yield
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
