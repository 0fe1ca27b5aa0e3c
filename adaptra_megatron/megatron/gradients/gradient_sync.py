# SPDX-License-Identifier: Apache-2.0
"""Start data-parallel gradient reductions and parameter gathers, for any order of actions.

Megatron's rule (schedules.py: enable_grad_sync, disable_grad_sync, param_sync_func) is kept: the reduction of a chunk
may start with, or right after, the action that completes the chunk's last gradient; never earlier.

Reductions are collectives of the stage's replicas, which may run their actions in different orders. So reductions start
in one order of chunks on all replicas, and a chunk that is complete before its turn waits. If all replicas run one
plan, that order is the plan's. If each has its own plan, the last chunk comes first, as in stock's order. All buckets
of a chunk then start together, as hooks would start them in the order of the backward, which may differ between
replicas; and not before the plan allows it, or replicas could wait for each other in a circle (`Program.reductions`).
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


class GradientSync:
    """Gradient synchronisation of one iteration. Disabled from its construction on, except where methods say
    otherwise.
    """

    def __init__(
        self,
        config: Any,
        model_chunks: Sequence[torch.nn.Module],
        order: Sequence[int],
        *,
        by_hooks: bool = True,
        not_before: Mapping[int, int] | None = None,
    ) -> None:
        """`config`: Megatron's ModelParallelConfig; its no_sync_func and grad_sync_func may be one function or a list.

        `order`: chunks in the order in which their reductions start, on all replicas. `by_hooks`: whether a whole
        backward that completes a chunk starts the reduction itself, bucket by bucket. That requires that each chunk's
        turn has come when it is complete, and that its last backward is whole on all replicas or on none.
        `not_before`: by chunk, the position of the step before which its reduction may start, as in
        `Program.reductions`; None: all may start at any time.
        """
        self._model_chunks = model_chunks
        self._turns = deque(order)
        self._by_hooks = by_hooks
        self._complete: set[int] = set()
        self._not_before = dict.fromkeys(order, 0) if not_before is None else not_before
        self._position = 0
        self._no_sync = config.no_sync_func
        self._grad_sync = _per_chunk(config.grad_sync_func, len(model_chunks))
        self._closed: contextlib.ExitStack | None = None
        self._synchronized: set[int] = set()
        self.disable()

    def disable(self) -> None:
        """Keep hooks from starting reductions."""
        if self._closed is not None:
            return
        self._closed = contextlib.ExitStack()
        functions = self._no_sync if isinstance(self._no_sync, list) else [self._no_sync]
        for function in functions:
            if function is not None:
                self._closed.enter_context(function())

    def enable(self) -> None:
        """Let hooks start reductions again."""
        if self._closed is not None:
            self._closed.close()
            self._closed = None

    def before_step(self, position: int) -> None:
        """Start the reductions that may start before the step at this position of the plan. Call it before each step,
        once its receives are posted.
        """
        self._position = max(self._position, position)  # steps may run in another order than the plan's
        self._start_complete()

    def before_last_backward(self, chunk: int) -> None:
        """Call before the whole backward that completes the gradients of `chunk`: its hooks start the reduction."""
        # With a grad_sync_func stock calls that, and enables no hooks (schedules.py, backward_step_helper).
        if self._grad_sync is None and self._by_hooks:
            self.enable()
            self._synchronized.add(chunk)

    def after_last_gradient(self, chunk: int) -> None:
        """Call after the action that completes the gradients of `chunk`, whole backward or weight gradient."""
        self._complete.add(chunk)
        self._start_complete()
        self.disable()

    def finish(self) -> None:
        """Start all remaining reductions, in finalize_model_grads at the latest. Call it after the last action."""
        self.enable()
        # In the order of turns, which all replicas share: reductions are collectives over them.
        for chunk in (*self._turns, *range(len(self._model_chunks))):
            if chunk not in self._synchronized:
                self._synchronize(chunk)

    def _start_complete(self) -> None:
        allowed = {chunk for chunk in self._complete if self._not_before.get(chunk, math.inf) <= self._position}
        while self._turns and self._turns[0] in allowed:
            if (turn := self._turns.popleft()) not in self._synchronized:
                self._synchronize(turn)

    def _synchronize(self, chunk: int) -> None:
        self._synchronized.add(chunk)
        model = self._model_chunks[chunk]
        ddp = getattr(model, "ddp_config", None)
        if getattr(ddp, "num_distributed_optimizer_instances", 1) > 1 and getattr(ddp, "overlap_grad_reduce", False):
            _start_once(model)
        elif self._grad_sync is not None:
            self._grad_sync[chunk](model.parameters())
        elif getattr(ddp, "overlap_grad_reduce", False):
            # The hooks ran with synchronisation off, during the input gradient, so nothing else would start it.
            model.start_grad_sync()  # type: ignore[operator]


def _start_once(model: Any) -> None:
    """Start the reductions of a chunk of one of several optimizer instances; skip bucket groups that hooks never
    completed.

    Such reductions have no handle, so stock cannot see that a group has started. If a skipped group were started here,
    stock would start it again in the end (param_and_grad_buffer.py: finish_grad_sync), and reduce its gradients twice.
    """
    for group in (*model.bucket_groups, *model.expert_parallel_bucket_groups):
        if not group.is_first_batch:
            group.start_grad_sync()


class ParameterSync:
    """Starts the parameter gather of a chunk before its first forward (interleaved schedule only, as in stock)."""

    def __init__(self, config: Any, model_chunks: Sequence[torch.nn.Module]) -> None:
        self._model_chunks = model_chunks
        interleaved = len(model_chunks) > 1
        self._param_sync = _per_chunk(config.param_sync_func, len(model_chunks)) if interleaved else None
        self._started = 0
        # As stock, which gathers for the first two chunks before the first forward.
        self._start_through(1)

    def before_forward(self, chunk: int) -> None:
        """Gather the next chunk's parameters while this one computes. Call it before each forward."""
        self._start_through(chunk + 1)

    def _start_through(self, chunk: int) -> None:
        while self._param_sync is not None and self._started <= min(chunk, len(self._model_chunks) - 1):
            if not _is_gathered(model := self._model_chunks[self._started]):
                self._param_sync[self._started](model.parameters())
            self._started += 1


def _is_gathered(model: Any) -> bool:
    """Return whether a chunk's parameters have been gathered since the last step, which is so on all replicas or none.

    To gather them again is not: a rank that has rejoined never does in its first iteration (training.py: train).
    """
    groups = [*getattr(model, "bucket_groups", ()), *getattr(model, "expert_parallel_bucket_groups", ())]
    # What is gathered in the gradients' memory is written there anew in each iteration.
    in_gradients = any(group.ddp_config.reuse_grad_buf_for_mxfp8_param_ag for group in groups)
    return bool(groups) and not in_gradients and all(group.param_gather_dispatched for group in groups)


def _per_chunk(function: Any, chunks: int) -> list[Callable[..., Any]] | None:
    if function is None or isinstance(function, list):
        return function
    return [function] * chunks
