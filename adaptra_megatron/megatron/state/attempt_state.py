# SPDX-License-Identifier: Apache-2.0
"""Save the state that an attempt at a training iteration changes besides gradients, and restore it before the next
attempt.

In megatron-core 0.14 to 0.20, forwards and finalize_model_grads change this state:

1. buffers of the model: routers count their tokens (`local_tokens_per_expert`), finalize_model_grads moves their biases
   by these counts (`expert_bias`) and zeroes the counts, and the global auxiliary loss has sums of its own
   (transformer/moe/router.py, distributed/finalize_model_grads.py);
2. sums for the log: auxiliary losses of experts and losses of multi-token prediction, to which all micro-batches add;
3. Megatron's findings about suspicious results (rerun_state_machine.py), which all ranks act on after the call;
4. weight gradients that --delay-wgrad-compute has delayed: layers compute them first in, first out, so that what an
   attempt has left would be added by the next one.

The sums are averaged over data-parallel ranks when they are logged. While cells are dead, live ranks add up those of
other micro-batches, too, so they are averaged at once (`AttemptState.average_sums`).

Random numbers are no such state, as they depend only on the micro-batch (`MicroBatchRandom`). FP8 recipes other than
delayed scaling keep no state between two products. Buffers are few and small, so that copying them takes one or two
launches per iteration.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import rerun_state_machine
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.common.layout import JobLayout
from adaptra_megatron.common.sealed_store import MOST_NBYTES
from adaptra_megatron.common.typed_messages import packed, unpacked
from adaptra_megatron.megatron.compat import logged_sums
from adaptra_megatron.transport.gpu.training_device import current_device

if TYPE_CHECKING:
    from adaptra_megatron.elastic.process_group import FaultTolerantGroup
    from adaptra_megatron.megatron.megatron_call import PipelineCall


class AttemptState:
    """State at the beginning of the first attempt at an iteration, on one rank, for the life of the job."""

    def __init__(self, model_chunks: Sequence[Any]) -> None:
        """`model_chunks`: as Megatron's schedules get them."""
        # By place: a module may give a buffer another type in its first forward, in new memory.
        self._places = [
            (module, name)
            for chunk in model_chunks
            for module in torch.nn.Module.modules(chunk)
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        for module, name in self._places:
            if name == "expert_bias":
                # As a router does in its first forward. A cell that routes leave without one would add to 16 bits, and
                # round otherwise than others.
                bias = module.get_buffer(name)
                bias.data = bias.float()
        self._model_chunks = model_chunks
        self._buffers: list[torch.Tensor] = []
        self._sums: dict[tuple[str, ...], torch.Tensor] = {}
        self._findings: dict[str, Any] = {}

    def keep(self) -> None:
        """Save the present state, on the current stream, before the work that changes it."""
        buffers = self._all_buffers()
        if any(kept.dtype != buffer.dtype for kept, buffer in zip(self._buffers, buffers, strict=False)):
            self._buffers = []
        if self._buffers:
            torch._foreach_copy_(self._buffers, buffers)
        else:
            self._buffers = [buffer.clone() for buffer in buffers]
        self._sums = {name: each.clone() for name, each in logged_sums().items()}
        self._findings = _copied(_findings())

    def restore(self) -> None:
        """Restore the saved state, on the current stream, after the last operation of the previous attempt."""
        for buffer, kept in zip(self._all_buffers(), self._buffers, strict=True):
            buffer.copy_(kept)
        for name, value in logged_sums().items():
            if name in self._sums:
                value.copy_(self._sums[name])
            else:
                value.zero_()  # the attempt made it
        _findings().update(_copied(self._findings))
        for module in (module for chunk in self._model_chunks for module in torch.nn.Module.modules(chunk)):
            delayed = getattr(getattr(module, "wgrad_store", None), "context", None)
            while delayed is not None and not delayed.empty():
                delayed.get()

    def average_sums(self, group: FaultTolerantGroup, synchronize: Callable[[], None]) -> None:
        """Replace what this attempt has added to the sums by its mean over all members of `group`, which is of one
        stage, and what was there before by its mean over the live ones. Collective; raises as an operation in a call.
        `synchronize`: waits for the device with checks.
        """
        sums = logged_sums()
        means = [torch.zeros(0, device=current_device())]
        for name in sorted(sums):
            kept = self._sums.get(name, torch.zeros_like(sums[name]))
            mean = (sums[name] - kept) / group.size() + kept / len(group.members)
            means.append(mean.reshape(-1))
        flat = torch.cat(means)
        # A rank that has been started again has no sums before its first forward, and routes may leave it without one.
        most = torch.tensor([flat.numel()], device=flat.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        synchronize()
        if not most:
            return
        flat = flat if sums else flat.new_zeros(int(most))
        dist.all_reduce(flat, group=group)
        end = 0
        for name in sorted(sums):
            start, end = end, end + sums[name].numel()
            sums[name].copy_(flat[start:end].view_as(sums[name]))

    def _all_buffers(self) -> list[torch.Tensor]:
        return [module._buffers[name] for module, name in self._places]  # type: ignore[misc]


def _findings() -> dict[str, Any]:
    """Return the attributes of Megatron's RerunStateMachine, among them what it has found in results."""
    machine = rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE
    return {} if machine is None else vars(machine)


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: copy(value) if isinstance(value, dict) else value for name, value in values.items()}


def forget_attempt(call: PipelineCall) -> None:
    """Reset gradients and reductions after an attempt that did not finish, before the next attempt.

    Afterwards gradients are zero, and no reduction is pending (distributed/param_and_grad_buffer.py:
    _ParamAndGradBucketGroup).
    """
    chunk: Any
    for chunk in call.model_chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            group.grad_reduce_handle = None
            if hasattr(group, "per_param_grad_ready_counts"):
                group.per_param_grad_ready_counts = {}
        chunk.zero_grad_buffer()
        for parameter in chunk.parameters():
            parameter.grad = None


def running_timers(timers: Any) -> frozenset[str]:
    """Return the names of Megatron's `timers` that run. None has none."""
    return frozenset(() if timers is None else (name for name, each in timers._timers.items() if each._started))


def stop_timers(timers: Any, running: frozenset[str]) -> None:
    """Stop the timers that an attempt has left running: Megatron's and the script's, apart from those that were
    `running` before it. What they have measured is dropped.
    """
    for name in running_timers(timers) - running:
        timers._timers[name]._started = False


_CPU, _GPU = "default/cpu", "default/gpu"
"""Torch's default generators, among the names of streams."""


class MicroBatchRandom:
    """Seeds the streams that a model draws from before each forward, by the micro-batch rather than the cell.

    These are torch's default generators and the states of Megatron's CudaRNGStatesTracker. Recomputation restores the
    states of the forward itself (megatron/core/tensor_parallel/random.py: CheckpointFunction).
    """

    def __init__(self, bases: Mapping[str, str]) -> None:
        """`bases`: key of each stream, by its name; see `agreed`."""
        self._bases = bases

    @classmethod
    def agreed(cls, control: ControlStore, layout: JobLayout, timeout_s: float, *, says: bool) -> MicroBatchRandom:
        """Agree on the bases of this rank's stage and lane: they follow from the random states of the one rank with
        `says`.

        Each stream has its own. So streams that are equal on several lanes stay so: tensor-parallel ranks must draw the
        same dropout for activations that they hold all of (tensor_parallel/random.py, model_parallel_cuda_manual_seed).

        All of its ranks call this at their first iteration. Raises RuntimeError if the bases do not come in time.
        """
        worker = layout.workers[layout.rank]
        store = control.client("random")
        store.set_timeout(timedelta(seconds=timeout_s))
        key = f"{worker.cell.stage}/{worker.lane}"
        if says:
            store.set(key, packed({name: _digest(state) for name, state in _states().items()}))
        return cls(unpacked(store.get(key), Mapping[str, str], MOST_NBYTES))

    def begin(self, iteration: int, replica: int, micro_batch: int, chunk: int) -> None:
        """Seed the streams for the forward of a replica's micro-batch."""

        def seed(name: str) -> int:
            text = f"{iteration}/{replica}/{micro_batch}/{chunk}/{name}".encode()
            digest = hashlib.blake2b(text, key=bytes.fromhex(self._bases[name]), digest_size=8).digest()
            return int.from_bytes(digest, "little") >> 1

        torch.default_generator.manual_seed(seed(_CPU))
        torch.cuda.manual_seed(seed(_GPU))
        for name in get_cuda_rng_tracker().get_states():
            with get_cuda_rng_tracker().fork(name):
                torch.cuda.manual_seed(seed(name))


def _states() -> dict[str, Any]:
    """Return the state of each stream, by its name."""
    return {_CPU: torch.get_rng_state(), _GPU: torch.cuda.get_rng_state(), **get_cuda_rng_tracker().get_states()}


def _digest(state: Any) -> str:
    state = state.get_state() if isinstance(state, torch.Generator) else state  # of a tracker for CUDA graphs
    return hashlib.blake2b(state.cpu().numpy().tobytes(), digest_size=32).hexdigest()
