# SPDX-License-Identifier: Apache-2.0
"""Have layers captured as CUDA graphs in our order (--cuda-graph-impl transformer_engine), anew when the order changes.

Source: `TECudaGraphHelper` of megatron/core/transformer/cuda_graphs.py (0.16 to 0.20), and Transformer Engine's
`make_graphed_callables`. All graphs of a rank share one memory pool. A graph's memory is given to the graphs captured
after it as soon as the order says that nothing reads it any more: results after their backward, gradients of inputs
after the next backward. So graphs may be replayed only in the order in which they were captured; in another one they
overwrite what others still need, and nothing says so. What has no graph, weight gradients among it, may run anywhere
between.

- Training scripts have the graphs captured once, after some iterations. The order comes from
  `convert_schedule_table_to_order`: it gets the one that the rank runs. With combined 1F1B,
  `get_overlap_moe_expert_parallel_comm_order` makes one of layers of it, as they alternate in a combined action.
- Before an iteration in another order all graphs are dropped and captured again. That takes as long as the first time.
- Where the order is not known beforehand, layers run without graphs: `suspended`.
- Where ranks may fail, graphs end with the generation whose process groups are in them (a layer's sums over tensor-,
  context- and expert-parallel ranks): NCCL aborts no communicator before the last graph with it is gone (init.cc:
  commDestroySync), and a replay would use the aborted one. They are captured inside an iteration, so that a rank that
  fails meanwhile ends the capture as any other attempt.
- What we keep for longer than stock does is copied out of the pool: gradients that another stage gets, as our sends do
  not end before the next backward, and what a weight gradient is computed from later.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer import cuda_graphs
from torch.utils._pytree import tree_leaves

from adaptra_megatron.megatron.compat import logged_sums
from adaptra_megatron.megatron.computation import BackwardPart, ForwardPart, Send, StageComputation
from adaptra_megatron.megatron.gradients.linear_wgrad import WeightGradientQueue

Order = tuple[tuple[int, ...], ...]
"""Forwards and backwards of one rank: 1 + chunk for a forward, negative for a backward; the two of a combined action
together. Those of a chunk come in the order of its micro-batches."""
_DUE: Order = ()


class CapturedLayers:
    """The graphs of one process's layers, and the order in which they were captured."""

    def __init__(self, queue: WeightGradientQueue, *, deferred: bool = False) -> None:
        """`queue`: gets the addresses of results and gradients in the graphs' memory. `deferred`: capture in `follow`
        alone, once the script has asked for it.
        """
        self._deferred = deferred
        self.captures = 0
        """Number of captures so far, the script's own among them."""
        self.seconds = 0.0
        """Duration of the latest capture."""
        self._queue = queue
        self._replays: list[_Replay] = []
        self._order: Order | None = None
        """Of the latest training iteration; None before the first one."""
        self._captured: dict[Any, Order] = {}
        """By Megatron's helper object, of which there may be one per model; _DUE where graphs have to be captured."""
        self._given: Order = ()
        self._follows = False
        """True while `follow` captures."""
        self._own = False
        """True if `_given` is the order that this rank runs, False if it is stock's."""
        self._counts: dict[Any, dict[str, Any]] = {}
        """By helper: what it counts before a capture. With combined 1F1B each layer is a chunk of its own after it."""
        self._suspended: list[tuple[Any, list[Any]]] = []

    def order_for(self, stock: Sequence[int]) -> list[int]:
        """Return the order to capture in. `stock`: what `convert_schedule_table_to_order` returns.

        A helper with fewer chunks, of an image encoder before the first one, gets these chunks' part of the order.
        """
        own = _of_chunks(self._order or (), max(stock))
        chunks = [each for unit in own for each in unit]
        self._own = sorted(chunks) == sorted(stock)
        self._given = own if self._own else tuple((each,) for each in stock)
        return chunks if self._own else list(stock)

    def layers_for(self, stock: Callable[[], LayerOrder], layers_per_chunk: Sequence[int], weights: bool) -> LayerOrder:
        """Return the order of layers to capture with combined 1F1B, and each forward's chunk and place in that order.

        `stock`: returns Megatron's, for its own order of chunks. `weights`: whether the graphs hold weight gradients,
        each of which runs right after its backward, as in stock's order.
        """
        return layers_in_order(self._given, layers_per_chunk, weights) if self._own else stock()

    def capture(self, helper: Any, stock: Callable[[Any], None]) -> None:
        """Capture the layers of `helper` by `stock`, its own `create_cudagraphs`; only note it if that is deferred."""
        if self._deferred and not self._follows:
            self._captured[helper] = _DUE
            return
        begun_s = time.monotonic()
        self._given = ()
        vars(helper).update(self._counts.setdefault(helper, {name: getattr(helper, name) for name in _COUNTED}))
        stock(helper)
        if self._given:  # else the helper has found no layer to capture
            self._captured[helper] = self._given
            self._watch(helper)
        self.captures += 1
        self.seconds = time.monotonic() - begun_s

    def follow(self, order: Order, *, warm: bool = True) -> bool:
        """Prepare for an iteration in `order`: capture anew if the graphs are for another one, or have been dropped.
        Return whether that was so.

        `warm`: False if graphs that have been dropped are not due yet.

        Call it before the first action. Gradients that earlier calls have accumulated stay.

        Collective over the ranks that share collectives inside the captured layers; they run one order.
        """
        self._order = order
        stale = [
            helper
            for helper, captured in self._captured.items()
            if (
                warm
                if captured == _DUE
                else helper.graphs_created() and captured != _of_chunks(order, max(map(max, captured)))
            )
        ]
        for helper in stale:
            self._capture_anew(helper)
        return bool(stale)

    def drop(self) -> None:
        """Drop all graphs; `follow` captures them again."""
        self.resume()
        for helper, captured in self._captured.items():
            if captured != _DUE and helper.graphs_created():
                self._captured[helper] = _DUE
                _delete(helper)
                _forget_results(helper)
        self._replays.clear()
        self._queue.lent.clear()

    def suspend(self) -> None:
        """Run layers without their graphs until `resume`."""
        if self._suspended:
            return
        for helper in self._captured:
            for layer in _layers(helper):
                self._suspended.append((layer, layer.cuda_graphs))
                layer.cuda_graphs = []

    def resume(self) -> None:
        """Undo `suspend`."""
        while self._suspended:
            layer, graphs = self._suspended.pop()
            layer.cuda_graphs = graphs

    def decorate(self, computation: StageComputation) -> StageComputation:
        """Wrap `computation` once there are graphs: input gradients are in memory of their own."""
        return _OwnedGradients(computation, self._queue) if self._captured else computation

    def _watch(self, helper: Any) -> None:
        self._queue.lent.clear()
        self._replays = [each for each in self._replays if each.helper is not helper]
        for layer in _layers(helper):
            layer.cuda_graphs = [_Replay(graph, helper, self._queue.lent) for graph in layer.cuda_graphs]
            self._replays += layer.cuda_graphs
        for each in self._replays:
            each.is_known = False

    def _capture_anew(self, helper: Any) -> None:
        # The helper zeroes these.
        sums = {name: value.clone() for name, value in logged_sums().items()}
        gradients = [(each, each.to("cpu", copy=True)) for each in _gradients(helper) if each.any()]
        if helper.graphs_created():
            _delete(helper)
        self._captured[helper] = _DUE
        self._follows = True
        try:
            with _alone(), _without_hooks(helper), _undone(helper):
                helper.create_cudagraphs()
        finally:
            self._follows = False
        if self._captured[helper] == _DUE:  # it has found no layer to capture
            del self._captured[helper]
        for name, value in logged_sums().items():
            if name in sums:
                value.copy_(sums[name])
        for gradient, value in gradients:
            gradient.copy_(value)


def _delete(helper: Any) -> None:
    by_hand = any(layer.cuda_graph_manual_hooks for layer in _layers(helper))
    helper.delete_cuda_graphs()
    if hasattr(helper, "_capture_finished"):  # from 0.18 on: a helper captures once
        helper._capture_finished = False
    if by_hand:
        helper.cuda_graph_set_manual_hooks()


def _forget_results(helper: Any) -> None:
    """Clear what a router's graph leaves to the rest of its layer (MoECudaGraphTensorStore): a forward that was
    interrupted has not, and the next one would take it for its own.
    """
    for layer in _layers(helper):
        if (store := getattr(getattr(layer, "mlp", None), "cudagraph_tensor_store", None)) is not None:
            store.clear()


@contextmanager
def _without_hooks(helper: Any) -> Iterator[None]:
    """Gather no parameters before forwards within this context, as Megatron's train() around its capture."""
    hooked = [chunk for chunk in helper.model if getattr(chunk, "remove_forward_pre_hook_handles", None)]
    for chunk in hooked:
        chunk.disable_forward_pre_hook(param_sync=False)
    try:
        yield
    finally:
        for chunk in hooked:
            chunk.enable_forward_pre_hook()


@contextmanager
def _undone(helper: Any) -> Iterator[None]:
    """Undo what a capture that raises leaves behind in Transformer Engine (graph.py: make_graphed_callables) and in
    Megatron.
    """
    calls = {kind: kind.__call__ for kind in map(type, _layers(helper))}
    try:
        yield
    except BaseException:
        for kind, call in calls.items():
            kind.__call__ = call  # type: ignore[method-assign]
        for name in ("_set_capture_end", "te_set_capture_end"):
            getattr(cuda_graphs, name, int)()
        gc.unfreeze()
        raise


_COUNTED = ("num_layers_per_chunk", "num_model_chunks")

LayerOrder = tuple[list[float], list[list[int] | None]]
"""Layers, counted over all chunks as chunks are in an Order, less 0.5 for weight gradients; and of each forward its
chunk and place there, None of others."""


def layers_in_order(order: Order, layers_per_chunk: Sequence[int], weights: bool) -> LayerOrder:
    """Return the layers in the order in which Megatron's schedule plans run them: those of a combined action in turn,
    the forward's first, and the last weight gradient behind all others."""

    def layers(chunk: int) -> range:
        first = 1 + sum(layers_per_chunk[:chunk])
        return range(first, first + layers_per_chunk[chunk])

    entries: list[tuple[float, list[int] | None]] = []
    for unit in order:
        ahead = [
            (layer, [each - 1, place]) for each in unit if each > 0 for place, layer in enumerate(layers(each - 1))
        ]
        behind = [-layer for each in unit if each < 0 for layer in reversed(layers(-each - 1))]
        for forward, backward in zip_longest(ahead, behind):
            entries += [] if forward is None else [forward]
            entries += [] if backward is None else [(backward, None)]
            if weights and backward not in (None, *behind[-1:]):
                entries.append((backward - 0.5, None))
        entries += [(layer - 0.5, None) for layer in behind[-1:] if weights]
    return [layer for layer, _place in entries], [place for _layer, place in entries]


def _of_chunks(order: Order, chunks: int) -> Order:
    """Return the part of an order that is of the first `chunks`."""
    parts = (tuple(each for each in unit if abs(each) <= chunks) for unit in order)
    return tuple(part for part in parts if part)


@contextmanager
def _alone() -> Iterator[None]:
    """Have torch's barrier do nothing: before 0.19 a helper has all ranks of the job wait for each other, and another
    replica's order may stay.
    """
    barrier = dist.barrier
    dist.barrier = lambda *_, **__: None
    try:
        yield
    finally:
        dist.barrier = barrier


def _gradients(helper: Any) -> Iterator[torch.Tensor]:
    """Yield the gradient buffers of a helper's chunks. They are zero unless a script accumulates over calls."""
    for chunk in helper.model:
        if hasattr(chunk, "expert_parallel_buffers"):  # it is Megatron's DistributedDataParallel
            yield from (each.grad_data for each in (*chunk.buffers, *chunk.expert_parallel_buffers))


def _layers(helper: Any) -> Iterator[Any]:
    return (layer for layers in helper.callables_per_chunk for layer in layers)


class _Replay:
    """A layer's graphs of one micro-batch. The first replay tells where their results and gradients are."""

    def __init__(self, graph: Any, helper: Any, lent: set[int]) -> None:
        self._graph, self.helper, self._lent = graph, helper, lent
        self.is_known = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graph, name)

    def __call__(self, *given: Any, **keywords: Any) -> Any:
        found = self._graph(*given, **keywords)
        if not self.is_known:
            self.is_known = True
            results = [each for each in tree_leaves(found) if isinstance(each, torch.Tensor)]
            self._lend(results)
            for node in {each.grad_fn for each in results if each.grad_fn is not None}:
                node.register_hook(lambda gradients, _: self._lend(gradients))
        return found

    def _lend(self, tensors: Sequence[torch.Tensor | None]) -> None:
        self._lent.update(each.untyped_storage().data_ptr() for each in tensors if each is not None)


class _OwnedGradients:
    """StageComputation whose input gradients are in memory of their own, not in that of graphs."""

    def __init__(self, computation: StageComputation, queue: WeightGradientQueue) -> None:
        self._computation, self._queue = computation, queue
        self.forward, self.weight_gradient = computation.forward, computation.weight_gradient

    def backward(self, *given: Any, **keywords: Any) -> torch.Tensor | None:
        """See StageComputation."""
        gradient = self._computation.backward(*given, **keywords)
        return None if gradient is None else self._queue.owned(gradient)

    def forward_backward(
        self, forward: ForwardPart, backward: BackwardPart, send_output: Send, send_gradient: Send
    ) -> torch.Tensor:
        """See StageComputation."""
        return self._computation.forward_backward(
            forward, backward, send_output, lambda gradient: send_gradient(self._queue.owned(gradient))
        )
