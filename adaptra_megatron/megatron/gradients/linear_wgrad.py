# SPDX-License-Identifier: Apache-2.0
"""Split the backward of Megatron's native linear layers into input gradient (now) and weight gradient (later).

Source: `LinearWithGradAccumulationAndAsyncCommunication.backward` of megatron/core/tensor_parallel/layers.py. Its
weight gradient is delayed, fused accumulation included. The gradients of embeddings, norms, biases and routers, which
autograd accumulates on the way, stay with the input gradient. The arithmetic and its order per parameter are stock's,
so the accumulated gradients are bitwise the same. Transformer Engine's layers: te_wgrad.py.

Communication of tensor parallelism, which stock hides behind the products of one layer:

- Inputs that sequence parallelism scatters are gathered in W, each while the product of the previous layer runs. As in
  stock, a collective is launched before the product that hides it: with CUDA_DEVICE_MAX_CONNECTIONS=1 it would
  otherwise begin when that product has ended.
- The sum of an input gradient over the ranks (all-reduce, reduce-scatter) has nothing to hide behind in I, since
  autograd's next node reads its result. If several layers read one input, autograd adds up their gradients before any
  hook could wait for the sum. A weight gradient that is due could hide it only by running at another time than planned:
  one planned before I fills the wait for I's message, one planned after I would delay the message that I sends. An I
  with its own weight gradient behind the sum is a whole backward, an action of its own (B).
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from adaptra_megatron.megatron.compat import gradient_to_use, has_sharded_weight
from adaptra_megatron.transport.gpu.training_device import current_stream

GATHER_BUFFERS = ("mpu", "adaptra-ahead")
"""Names in Megatron's global memory buffer: stock's own gather buffer, and one to gather ahead."""


Gradients = list[tuple[torch.nn.Parameter, torch.Tensor]]
"""Gradients, each with its parameter."""


class DelayedGradient(Protocol):
    """Gradients of one layer's parameters from one use of the layer in one micro-batch."""

    @property
    def owner(self) -> object:
        """Return an object that is equal for all uses of the same parameters."""

    @property
    def graph_task(self) -> int:
        """Number of the autograd pass that left the gradient: see `current_graph_task`."""

    def compute(self) -> Gradients:
        """Compute and return the gradients that are still to be accumulated; None if a kernel has accumulated them.
        Call once.
        """


_Use = tuple[int, object]
"""(graph task, owner) of a use of parameters."""


def current_graph_task() -> int:
    """Return the number of the autograd pass that runs in this thread; a checkpointed span has a pass of its own.

    Autograd adds up the gradients of a parameter within a pass before it accumulates them.
    """
    return int(torch._C._current_graph_task_id())


@dataclass(eq=False)
class LinearWeightGradient:
    """The delayed weight gradient of one native linear layer for one micro-batch."""

    layers: ModuleType
    """megatron.core.tensor_parallel.layers, with its kernels and buffers."""
    input: torch.Tensor
    """[sequence (/ tensor-parallel size with sequence parallelism), batch, input features]."""
    weight: torch.nn.Parameter
    """[output features, input features]."""
    grad_output: torch.Tensor
    """[sequence, batch, output features]."""
    fused_main_grad: torch.Tensor | None
    """Tensor that gradient accumulation fusion adds to; None without fusion."""
    gather_group: dist.ProcessGroup | None
    """Tensor-parallel group over which the input is scattered; None without sequence parallelism."""
    graph_task: int = field(default_factory=current_graph_task)
    _gathered: tuple[torch.Tensor, dist.Work] | None = field(default=None, init=False)

    @property
    def owner(self) -> object:
        return self.weight

    def gather(self, buffer: str) -> None:
        """Begin to gather the input into one of GATHER_BUFFERS. Collective over `gather_group`."""
        assert self.gather_group is not None
        size = [self.input.size(0) * self.gather_group.size(), *self.input.size()[1:]]
        total_input = self.layers.get_global_memory_buffer().get_tensor(size, self.input.dtype, buffer)
        work = self.layers.dist_all_gather_func(total_input, self.input, group=self.gather_group, async_op=True)
        self._gathered = total_input, work

    def compute(self) -> Gradients:
        """See DelayedGradient. With a `gather_group`, call `gather` before."""
        layers, total_input = self.layers, self.input
        if self.gather_group is not None:
            assert self._gathered is not None, "the input has not been asked for"
            total_input, work = self._gathered
            work.wait()
        grad_output, total_input = layers.prepare_input_tensors_for_wgrad_compute(self.grad_output, total_input)
        weight: Any = self.weight
        if self.fused_main_grad is not None:
            weight.main_grad = self.fused_main_grad
            kernel = getattr(layers.fused_weight_gradient_mlp_cuda, _fused_kernel(self.fused_main_grad.dtype))
            kernel(total_input, grad_output, self.fused_main_grad)
            return []
        return [(weight, grad_output.t().matmul(total_input))]


class WeightGradientQueue:
    """Collects the weight gradients that a split backward leaves, and computes them later.

    One per process. It is not thread-local: on GPUs, autograd runs backward functions on a thread of its own, while the
    pipeline's thread waits.
    """

    def __init__(self, layers: ModuleType) -> None:
        """`layers`: megatron.core.tensor_parallel.layers."""
        self._layers = layers
        self._collected: list[DelayedGradient] | None = None
        self._uses: set[_Use] = set()
        """Uses of the collected gradients."""
        self._flags: list[tuple[torch.nn.Parameter, bool]] = []
        self._stand_ins: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        self._whole: set[torch.nn.Parameter] = set()
        """Weights whose gradients are left to stock."""
        self._streams: set[Any] = set()
        """Streams of split backwards: several with Megatron's moe_shared_expert_overlap."""
        self.lent: set[int] = set()
        """Addresses of memory that CUDA graphs will overwrite before weight gradients are computed."""
        self.computed = 0
        """Number of weight gradients computed so far, which proves that backwards were split."""

    @property
    def collects(self) -> bool:
        """Return whether a split backward is running."""
        return self._collected is not None

    def leave_whole(self, model_chunks: Sequence[torch.nn.Module]) -> None:
        """Compute weight gradients of embeddings as stock does, also where a linear layer uses the same weight.

        With multi-token prediction a chunk looks up tied embeddings and projects with them. Autograd adds up both
        gradients, and the embedding's is not delayed.
        """
        embeddings = (torch.nn.Embedding, self._layers.VocabParallelEmbedding)
        for module in (module for model in model_chunks for module in model.modules()):
            if isinstance(module, embeddings):
                self._whole.update(module.parameters(recurse=False))

    @contextmanager
    def collect(self) -> Iterator[list[DelayedGradient]]:
        """Yield a list to which split layers append their weight gradients within this context, instead of computing
        them.
        """
        assert self._collected is None, "input gradients do not nest"
        collected: list[DelayedGradient] = []
        self._collected = collected
        try:
            yield collected
        finally:
            self._collected = None
            self._uses.clear()
            # The flag had DistributedDataParallel's hook add nothing; the next whole backward must add again.
            # Last first: of a weight that was used twice, the first entry has what was there before.
            for weight, previous in reversed(self._flags):
                weight.grad_added_to_main_grad = previous  # type: ignore[attr-defined]
            self._flags.clear()
            for parameter, stand_in in self._stand_ins:
                if parameter.grad is stand_in:  # autograd did not come by
                    parameter.grad = None
            self._stand_ins.clear()

    def owned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` to keep: a copy if it is in memory that is only lent."""
        plain = bool(self.lent) and type(tensor) is torch.Tensor
        return tensor.clone() if plain and tensor.untyped_storage().data_ptr() in self.lent else tensor

    def add(self, gradient: DelayedGradient) -> None:
        """Delay `gradient`; only in a split backward."""
        assert self._collected is not None, "a gradient was left outside of a split backward"
        self._collected.append(gradient)
        self._uses.add((gradient.graph_task, gradient.owner))
        self._streams.add(current_stream())

    def expect_none(self, parameter: torch.nn.Parameter) -> None:
        """Prepare DistributedDataParallel's hook for a backward in which autograd has no gradient for `parameter`.

        The hook runs all the same, and with overlapped reduction asserts that there is a gradient. It gets zeros that
        take no memory, and drops them.
        """
        if not hasattr(parameter, "grad_added_to_main_grad"):
            return
        self._flags.append((parameter, parameter.grad_added_to_main_grad))
        parameter.grad_added_to_main_grad = True
        parameter.grad = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
        self._stand_ins.append((parameter, parameter.grad))

    def compute(self, gradients: list[DelayedGradient]) -> None:
        """Compute the gradients in the order in which autograd left them, and release their tensors.

        With sequence parallelism, collective over the tensor-parallel group: all of its ranks need the same order.
        """
        uses = Counter((gradient.graph_task, gradient.owner) for gradient in gradients)
        sums: dict[_Use, dict[torch.nn.Parameter, torch.Tensor]] = {}
        with torch.no_grad():
            for gradient in _gathering_ahead(gradients):
                # Of a layer that is used more than once (multi-token prediction) the sum is accumulated, as in stock.
                use = gradient.graph_task, gradient.owner
                total = sums.setdefault(use, {})
                for parameter, value in gradient.compute():
                    total[parameter] = total[parameter].add_(value) if parameter in total else value
                uses[use] -= 1
                if not uses[use]:
                    for parameter, value in sums.pop(use).items():
                        _accumulate(parameter, value)
        for stream in self._streams - {current_stream()}:
            stream.wait_stream(current_stream())  # or what it allocates next may be memory that is still read here
        self.computed += len(gradients)
        gradients.clear()

    def wrap(self, stock: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the `stock` backward of an autograd function: it stays stock's while nothing is collected."""
        # A backward returns one gradient for each input of the forward, after `ctx`; 0.19 has more inputs.
        results = len(inspect.signature(forward).parameters) - 1

        def split(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            gradients = self._input_gradient(ctx, grad_output)
            return (*gradients, *[None] * (results - len(gradients)))

        # As stock decorates its backward: with autocast as in the forward.
        input_gradient = self._layers.custom_bwd(split)

        def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
            if self._collected is None or not self._can_split(ctx):
                return stock(ctx, grad_output)
            return input_gradient(ctx, grad_output)

        return backward

    def _input_gradient(
        self, ctx: Any, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return the gradients of input, weight (a stand-in) and bias, and queue the real weight gradient."""
        layer_input, weight = ctx.saved_tensors[0], _weight_of(ctx)
        grad_output = gradient_to_use(ctx, grad_output)
        grad_input = grad_output.matmul(weight)
        handle = None
        if ctx.allreduce_dgrad:
            handle = dist.all_reduce(grad_input, group=ctx.tp_group, async_op=True)
        elif ctx.sequence_parallel:
            scattered = torch.empty(layer_input.shape, dtype=layer_input.dtype, device=layer_input.device)
            handle = self._layers.dist_reduce_scatter_func(scattered, grad_input, group=ctx.tp_group, async_op=True)
            grad_input = scattered
        grad_bias = grad_output.reshape(-1, grad_output.shape[-1]).sum(dim=0) if ctx.use_bias else None
        gradient = LinearWeightGradient(
            layers=self._layers,
            input=self.owned(layer_input),
            weight=weight,
            grad_output=self.owned(grad_output),
            fused_main_grad=ctx.main_grad if ctx.gradient_accumulation_fusion else None,
            gather_group=ctx.tp_group if ctx.sequence_parallel else None,
        )
        stand_in = None
        if (gradient.graph_task, gradient.owner) not in self._uses:  # of an earlier use autograd has one: enough
            stand_in = self._stand_in(weight, layer_input.dtype, fused=ctx.gradient_accumulation_fusion)
        self.add(gradient)
        if handle is not None:
            handle.wait()
        return grad_input, stand_in, grad_bias

    def _can_split(self, ctx: Any) -> bool:
        weight = _weight_of(ctx)
        return (
            ctx.grad_output_buffer is None  # defer_embedding_wgrad_compute has a queue of its own
            and weight is not None
            and weight not in self._whole
            and not hasattr(weight, "__fsdp_param__")
            and not has_sharded_weight(ctx)
            and (not ctx.gradient_accumulation_fusion or ctx.main_grad is not None)  # what is missing, stock says
        )

    def _stand_in(self, weight: torch.nn.Parameter, dtype: torch.dtype, *, fused: bool) -> torch.Tensor | None:
        """Return a weight gradient that DistributedDataParallel's hook sees and drops; None if there is no such hook.

        The hook must run, and with overlapped reduction it asserts that there is a gradient. Stock uses the same trick
        for fused accumulation.
        """
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        if not fused:
            self._flags.append((weight, weight.grad_added_to_main_grad))
        weight.grad_added_to_main_grad = True
        # `zero_out_wgrad` makes the hook add the stand-in after all (shared embeddings), so it must be zero there.
        zero = bool(getattr(weight, "zero_out_wgrad", False))
        shared = getattr(self._layers, "get_dummy_wgrad", None)  # Transformer Engine's: one buffer per shape
        if fused and shared is not None:
            buffer: torch.Tensor = shared(list(weight.shape), dtype, zero=zero)
            return buffer
        make = torch.zeros if zero else torch.empty
        return make(weight.shape, dtype=dtype, device=weight.device)


def _gathering_ahead(gradients: Sequence[DelayedGradient]) -> Iterator[DelayedGradient]:
    """Iterate over the `gradients` of one W, gathering the next scattered input while the current one is used.

    So at most two inputs are gathered or in use, one per buffer. A buffer's reuse needs no wait: a collective begins
    only after all work that was launched before it.
    """
    scattered = [g for g in gradients if isinstance(g, LinearWeightGradient) and g.gather_group is not None]
    used = begun = 0
    for gradient in gradients:
        used += gradient in scattered
        while begun <= used and begun < len(scattered):
            scattered[begun].gather(GATHER_BUFFERS[begun % 2])
            begun += 1
        yield gradient


def _weight_of(ctx: Any) -> Any:
    """Return a layer's weight, None if frozen; of one that hooks saved (offloading), autograd restores a bare copy."""
    return getattr(ctx.next_functions[1][0], "variable", None)


def _fused_kernel(main_dtype: torch.dtype) -> str:
    """Return the name of apex's kernel for gradients of `main_dtype`, as stock chooses it."""
    if main_dtype == torch.float32:
        return "wgrad_gemm_accum_fp32"
    if main_dtype in (torch.float16, torch.bfloat16):
        return "wgrad_gemm_accum_fp16"
    raise RuntimeError(
        f"gradient accumulation fusion has no kernel for main gradients of {main_dtype}, only of float32, float16 and "
        "bfloat16: give --no-gradient-accumulation-fusion"
    )


def _accumulate(parameter: Any, gradient: torch.Tensor) -> None:
    """Add `gradient` to the parameter's accumulated gradient."""
    if hasattr(parameter, "main_grad"):
        parameter.main_grad.add_(gradient)  # what DistributedDataParallel's backward hook does with param.grad
    elif parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
