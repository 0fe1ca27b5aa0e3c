# SPDX-License-Identifier: Apache-2.0
"""Stand in for CUDA graphs on the CPU, as strict as the real ones about the order in which they are replayed.

    with emulated_graphs():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle()):
            output = layer(static_input)
        graph.replay()

As on a GPU (c10/cuda/CUDACachingAllocator.cpp, ATen/cuda/CUDAGraph.cpp, torch/cuda/graphs.py of PyTorch 2.9):

- A capture computes nothing: what it writes outside of its pool is undone, and its results are garbage until a replay.
- A replay runs the same operations on the same addresses. It asks for no memory, so nothing keeps it from overwriting
  what another graph of its pool has left there.
- A block of the pool is free once the last tensor in it dies, and goes to the next capture. So graphs that share a pool
  may be replayed only in the order in which they were captured: in another one they overwrite their neighbours.
- A graph does not keep the tensors outside of its pool that it reads. Here a replay raises if one of them is gone.
- A value cannot be copied to the host during a capture, and a pool whose graphs are all gone cannot be captured into.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import itertools
import mmap
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_map

from testing.replacing import Replaced, Replacement

POOL_NBYTES = 1 << 28
"""Address space of a pool; memory is taken as it is used."""
_ALIGNMENT = 512
_TO_HOST = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


class GraphPool:
    """Memory of graphs. First fit: the lowest free address, so that blocks are used again as soon as they can be."""

    def __init__(self) -> None:
        self._arena = mmap.mmap(-1, POOL_NBYTES)
        self._free = [(0, POOL_NBYTES)]
        self.first_address = ctypes.addressof(ctypes.c_char.from_buffer(self._arena))
        self.graphs = 0
        """Number of graphs that were captured into the pool and not reset."""
        self.is_over = False
        """Whether all graphs of the pool have gone."""

    def storage(self, nbytes: int) -> torch.UntypedStorage:
        """Return memory that is free again when the last tensor in it dies. Raises MemoryError."""
        size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        for index, (start, length) in enumerate(self._free):
            if length >= size:
                self._free[index : index + 1] = [(start + size, length - size)] if length > size else []
                block = (ctypes.c_char * nbytes).from_buffer(self._arena, start)
                weakref.finalize(block, self._give_back, start, size)
                return torch.frombuffer(block, dtype=torch.uint8).untyped_storage()
        raise MemoryError(f"the graphs' pool has no {nbytes} bytes in one piece")

    def holds(self, address: int) -> bool:
        """Return whether an address is in the pool."""
        return self.first_address <= address < self.first_address + POOL_NBYTES

    def _give_back(self, start: int, size: int) -> None:
        joined: list[tuple[int, int]] = []
        for begin, length in sorted([*self._free, (start, size)]):
            if joined and sum(joined[-1]) == begin:
                joined[-1] = joined[-1][0], joined[-1][1] + length
            else:
                joined.append((begin, length))
        self._free = joined


_Handle = tuple[int, int]
_Operation = Callable[[], None]


class EmulatedGraph:
    """`torch.cuda.CUDAGraph`."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._operations: list[_Operation] | None = None
        self._read: list[StorageWeakRef] = []
        self._pool: GraphPool | None = None

    def register_generator_state(self, generator: Any) -> None:
        """Do nothing: a replay draws from the CPU's generator."""

    def captured(self, pool: GraphPool, operations: list[_Operation], read: list[StorageWeakRef]) -> None:
        """Keep what a capture has recorded. `read`: memory outside of the pool."""
        self._operations, self._read, self._pool = operations, read, pool
        pool.graphs += 1

    def replay(self) -> None:
        """Run the captured operations. Raises RuntimeError if nothing was captured, or memory is gone."""
        if self._operations is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        if any(each.expired() for each in self._read):  # type: ignore[no-untyped-call]
            raise RuntimeError("a replay reads memory that has been freed since the capture")
        for operation in self._operations:
            operation()

    def reset(self) -> None:
        """Drop what was captured."""
        if self._pool is not None:
            self._pool.graphs -= 1
            self._pool.is_over = not self._pool.graphs
        self._operations, self._read, self._pool = None, [], None

    def __del__(self) -> None:
        self.reset()


class GraphCapture(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations of a capture into `pool`, computes them to learn shapes, and undoes what they did."""

    def __init__(self, pool: GraphPool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pool = pool
        self.operations: list[_Operation] = []
        self.read: dict[int, StorageWeakRef] = {}
        self._before: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        self._garbage: list[tuple[torch.Tensor, StorageWeakRef]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute `func`, with results in the pool, and record it."""
        kwargs = kwargs or {}
        if func in _TO_HOST:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        given = list(_tensors((args, kwargs)))
        written = self._written(func, args, kwargs)
        for tensor in written:
            if not self._pool.holds(tensor.data_ptr()):
                key = (tensor.data_ptr(), tensor.shape, tensor.stride())
                if key not in self._before:
                    self._before[key] = tensor.detach(), tensor.detach().clone()
        results = func(*args, **kwargs)
        known = {each.untyped_storage().data_ptr() for each in given}
        targets: list[torch.Tensor | None] = []

        def settle(result: Any) -> Any:
            if not isinstance(result, torch.Tensor) or result.untyped_storage().data_ptr() in known:
                targets.extend([None] if isinstance(result, torch.Tensor) else [])
                return result
            made = self._made_in_pool(result)
            targets.append(_alias(made))
            return made

        settled = tree_map(settle, results)
        if written or any(target is not None for target in targets):
            self._record(func, args, kwargs, given, targets)
        return settled

    def undo(self) -> None:
        """Restore what was written outside of the pool, and spoil what was written within."""
        for tensor, before in reversed(self._before.values()):
            tensor.copy_(before)
        for alias, storage in self._garbage:
            if not storage.expired():  # type: ignore[no-untyped-call]
                alias.fill_(float("nan") if alias.is_floating_point() else 0)
        self._before.clear()

    def _record(
        self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor], targets: list[torch.Tensor | None]
    ) -> None:
        for tensor in given:
            storage = tensor.untyped_storage()
            if storage.nbytes() and not self._pool.holds(storage.data_ptr()):
                self.read[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        frozen_args, frozen_kwargs = tree_map(
            lambda each: _alias(each) if isinstance(each, torch.Tensor) else each, (args, kwargs)
        )

        def operation() -> None:
            with torch.no_grad():
                results = _tensors(func(*frozen_args, **frozen_kwargs))
                for target, result in zip(targets, results, strict=True):
                    if target is not None:
                        target.copy_(result)

        self.operations.append(operation)

    def _made_in_pool(self, result: torch.Tensor) -> torch.Tensor:
        nbytes = result.untyped_storage().nbytes()
        if not nbytes:
            return result
        storage = self._pool.storage(nbytes)
        made = torch.empty(0, dtype=result.dtype).set_(storage, result.storage_offset(), result.shape, result.stride())
        made.copy_(result)
        self._garbage.append((_alias(made), StorageWeakRef(storage)))  # type: ignore[no-untyped-call]
        return made

    @staticmethod
    def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                found.extend(_tensors(value))
        return found


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the same memory that does not keep it."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    block = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    memory = torch.frombuffer(block, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


class GraphPools:
    """`torch.cuda.graph_pool_handle` and `torch.cuda.graph`."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._pools: dict[_Handle, GraphPool] = {}

    def handle(self) -> _Handle:
        return (0, next(self._numbers))

    @contextmanager
    def graph(
        self, graph: EmulatedGraph, pool: _Handle | None = None, stream: Any = None, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        memory = self._pools.setdefault(self.handle() if pool is None else pool, GraphPool())
        if memory.is_over:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED: the pool's graphs are all gone")
        state = torch.get_rng_state()
        capture = GraphCapture(memory)
        with capture:
            yield
        capture.undo()
        torch.set_rng_state(state)
        graph.captured(memory, capture.operations, list(capture.read.values()))


class GraphedLayer:
    """A layer's forward of one micro-batch as two graphs: what `make_graphed_callables` returns."""

    def __init__(self, layer: torch.nn.Module, inputs: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        """`inputs`: its static inputs; the last ones are keyword arguments of these `names`."""
        self.layer, self.names = layer, tuple(names)
        self.inputs = tuple(inputs)
        self.parameters = tuple(layer.parameters())
        self.forward_graph, self.backward_graph = EmulatedGraph(), EmulatedGraph()
        self.outputs: tuple[torch.Tensor, ...] = ()
        self.output_gradients: tuple[torch.Tensor | None, ...] = ()
        self.input_gradients: tuple[torch.Tensor | None, ...] = ()

    def run(self) -> tuple[torch.Tensor, ...]:
        """Run the layer on its static inputs."""
        positional = len(self.inputs) - len(self.names)
        keywords = dict(zip(self.names, self.inputs[positional:], strict=True))
        found: tuple[torch.Tensor, ...] = tuple(self.layer(*self.inputs[:positional], **keywords))
        return found

    def gradients(self, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> Any:
        """Return the gradients of inputs and parameters; None for those that need none."""
        surface = (*self.inputs, *self.parameters)
        found = iter(
            torch.autograd.grad(
                [each for each in outputs if each.requires_grad],
                [each for each in surface if each.requires_grad],
                [each for each in gradients if each is not None],
                allow_unused=True,
            )
        )
        return tuple(next(found) if each.requires_grad else None for each in surface)

    def __call__(self, *given: torch.Tensor, **keywords: Any) -> tuple[torch.Tensor, ...]:
        """Replay the forward; autograd replays the backward."""
        named = [keywords[name] for name in self.names]
        results: tuple[torch.Tensor, ...] = _Replay.apply(  # type: ignore[no-untyped-call]
            self, *given, *named, *self.parameters
        )
        return results

    def reset(self) -> None:
        """Drop both graphs."""
        self.forward_graph.reset()
        self.backward_graph.reset()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: GraphedLayer, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.layer = layer
        for static, value in zip(layer.inputs, given, strict=False):
            if static.data_ptr() != value.data_ptr():
                static.copy_(value)
        layer.forward_graph.replay()
        return tuple(each.detach() for each in layer.outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        for static, value in zip(ctx.layer.output_gradients, gradients, strict=True):
            if static is not None and static.data_ptr() != value.data_ptr():
                static.copy_(value)
        ctx.layer.backward_graph.replay()
        return None, *(None if each is None else each.detach() for each in ctx.layer.input_gradients)


class GraphedCallables:
    """`transformer_engine.pytorch.make_graphed_callables` with `_order` and `_reuse_graph_input_output_buffers`.

    As in transformer_engine/pytorch/graph.py (2.7 to 2.9): each layer and micro-batch has a graph for its forward and
    one for its backward, captured in the order given, into one pool. Results are given back to the pool when the
    backward of the same micro-batch has been captured, gradients of inputs one backward later, and all backwards of a
    layer share the gradients of their results. So a gradient that is sent to another stage has to have left before the
    backward after next.
    """

    def __init__(self, pools: GraphPools) -> None:
        self._pools = pools
        self.orders: list[list[int]] = []
        """Orders of all captures so far."""

    def __call__(
        self,
        layers: Sequence[torch.nn.Module],
        sample_args: list[tuple[torch.Tensor, ...]],
        *,
        sample_kwargs: list[dict[str, torch.Tensor]],
        _order: list[int],
        _num_layers_per_chunk: list[int],
        num_warmup_iters: int,
        **_: Any,
    ) -> tuple[GraphedLayer, ...]:
        """Capture `layers`, grouped in chunks, which `_order` names from 1, negative for backwards; see the class."""
        self.orders.append(list(_order))
        micro_batches = len(_order) // len(_num_layers_per_chunk) // 2
        assert all(
            _order.count(sign * (1 + chunk)) == micro_batches for chunk in range(max(_order)) for sign in (1, -1)
        )
        starts = [sum(_num_layers_per_chunk[:chunk]) for chunk in range(len(_num_layers_per_chunk))]
        graphed: list[list[list[GraphedLayer]]] = []
        for start, number in zip(starts, _num_layers_per_chunk, strict=True):
            first = start * micro_batches
            graphed.append(
                [
                    [
                        GraphedLayer(
                            layers[start + layer],
                            (*sample_args[index], *sample_kwargs[index].values()),
                            tuple(sample_kwargs[index]),
                        )
                        for layer, index in enumerate(range(first + number * each, first + number * (each + 1)))
                    ]
                    for each in range(micro_batches)
                ]
            )
        everything = [layer for chunk in graphed for micro_batch in chunk for layer in micro_batch]
        for layer in everything * num_warmup_iters:
            outputs = layer.run()
            layer.gradients(outputs, [torch.zeros_like(each) if each.requires_grad else None for each in outputs])
        self._capture(graphed, _order)
        return tuple(everything)

    def _capture(self, graphed: list[list[list[GraphedLayer]]], order: list[int]) -> None:
        pool = self._pools.handle()
        forwards, backwards = [iter(each) for each in graphed], [iter(each) for each in graphed]
        shared: dict[tuple[Any, ...], torch.Tensor] = {}
        previous: GraphedLayer | None = None
        for entry in order:
            chunk = abs(entry) - 1
            if entry > 0:
                for layer in next(forwards[chunk]):
                    with self._pools.graph(layer.forward_graph, pool):
                        layer.outputs = layer.run()
                continue
            for layer in reversed(next(backwards[chunk])):
                layer.output_gradients = tuple(
                    shared.setdefault((place, each.shape, each.dtype), torch.empty_like(each))
                    if each.requires_grad
                    else None
                    for place, each in enumerate(layer.outputs)
                )
                with self._pools.graph(layer.backward_graph, pool):
                    layer.input_gradients = layer.gradients(layer.outputs, layer.output_gradients)
                layer.outputs = tuple(each for each in map(weak_reference, layer.outputs) if each is not None)
                if previous is not None:
                    previous.input_gradients = tuple(map(weak_reference, previous.input_gradients))
                previous = layer


def weak_reference(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return a tensor in the same memory that does not keep it: Transformer Engine's `make_weak_ref`."""
    if tensor is None:
        return None
    alias = _alias(tensor)
    return alias.requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else alias


def graph_names(micro_batches: int) -> list[Replacement]:
    """Return the replacements for `--cuda-graph-impl transformer_engine`. Imports Megatron.

    `micro_batches`: number in an iteration, which Megatron's own training keeps in a global.
    """
    graphs: Any = importlib.import_module("megatron.core.transformer.cuda_graphs")
    tracker = importlib.import_module("megatron.core.tensor_parallel.random").CudaRNGStatesTracker
    make = "graphs are captured by a stand-in"
    number = Replacement(graphs, "get_num_microbatches", lambda: micro_batches, "set by Megatron's own training alone")
    return [
        Replacement(graphs, "HAVE_TE_GRAPHS", True, make),
        Replacement(graphs, "make_graphed_callables", GraphedCallables(GraphPools()), make, may_be_absent=True),
        Replacement(graphs, "is_te_min_version", lambda version, **_: True, "the stand-in is that of a late release"),
        number,
        Replacement(tracker, "fork", _fork(tracker.fork), "its check of the host's state is no work of the device"),
    ]


def _fork(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def fork(*given: Any, **keywords: Any) -> Any:
        captures = isinstance(_get_current_dispatch_mode(), GraphCapture)
        return nullcontext() if captures else stock(*given, **keywords)

    return fork


@contextmanager
def emulated_graphs(micro_batches: int) -> Iterator[None]:
    """Have Megatron capture and replay graphs on the CPU within this context. See `graph_names`."""
    engine = {name: ModuleType(name) for name in ("transformer_engine", "transformer_engine.pytorch")}
    engine["transformer_engine"].__dict__.update(__version__="2.9.0", pytorch=engine["transformer_engine.pytorch"])
    present = {name: sys.modules.get(name) for name in engine}
    sys.modules.update(engine)  # Megatron asks for it at each replay
    try:
        with Replaced(graph_names(micro_batches)):
            yield
    finally:
        for name, module in present.items():
            sys.modules.pop(name) if module is None else sys.modules.update({name: module})
