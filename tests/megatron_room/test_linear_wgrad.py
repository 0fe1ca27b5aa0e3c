# SPDX-License-Identifier: Apache-2.0
"""A split backward of Megatron's linear layers against the whole one, bit for bit, in one process."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import layers
from torch.utils.checkpoint import checkpoint

from adaptra_megatron.megatron.gradients.linear_wgrad import (
    DelayedGradient,
    LinearWeightGradient,
    WeightGradientQueue,
)

LINEAR = layers.LinearWithGradAccumulationAndAsyncCommunication
STOCK_BACKWARD = LINEAR.backward
SEQUENCE, BATCH, WIDTH, MICRO_BATCHES = 5, 3, 8, 4
INTERLEAVINGS = {
    "weights at once": "I0 W0 I1 W1 I2 W2 I3 W3",
    "weights one later": "I0 I1 W0 I2 W1 I3 W2 W3",
    "weights at the end": "I0 I1 I2 I3 W0 W1 W2 W3",
    "whole between split": "I0 W0 B1 I2 W2 B3",
    "whole first": "B0 I1 I2 W1 W2 I3 W3",
}
interleavings = pytest.mark.parametrize("order", INTERLEAVINGS.values(), ids=INTERLEAVINGS)
WHOLE = "B0 B1 B2 B3"


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> WeightGradientQueue:
    """A queue whose split backward is in Megatron's place."""
    queue = WeightGradientQueue(layers)
    monkeypatch.setattr(LINEAR, "backward", staticmethod(queue.wrap(LINEAR.backward, LINEAR.forward)))
    return queue


@pytest.fixture(autouse=True)
def fused_kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands in for apex's fused_weight_gradient_mlp_cuda; the names of the kernels that were called."""
    called: list[str] = []

    def kernel(name: str) -> Any:
        def accumulate(total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
            called.append(name)
            main_grad.add_(grad_output.t().to(main_grad.dtype).matmul(total_input.to(main_grad.dtype)))

        return accumulate

    names = ("wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16")
    stand_in = SimpleNamespace(**{name: kernel(name) for name in names})
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", stand_in, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    # What torch.empty returns is anything: let it be something that shows if it gets into a sum.
    monkeypatch.setattr(torch, "empty", lambda *size, **options: torch.full(*size, float("nan"), **options))
    return called


class Model:
    """Two of Megatron's linear layers with a non-linearity between; `hooked` as its DistributedDataParallel would."""

    def __init__(
        self, *, dtype: torch.dtype = torch.float32, hooked: bool = True, fused: bool = False, **options: Any
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        self.fused = fused
        self.hook_runs = 0
        self.weights = [self._parameter((WIDTH, WIDTH), dtype, generator) for _ in range(2)]
        self.bias = self._parameter((WIDTH,), dtype, generator) if options.get("bias", True) else None
        self.buffer: list[torch.Tensor] | None = options.get("buffer")
        self.uses: tuple[int, ...] = options.get("uses", (0, 1))
        self.wide: Any = options.get("wide")
        self.checkpointed: bool = options.get("checkpointed", False)
        if hooked:
            for parameter in self.parameters:
                self._hook(parameter, options.get("main_dtype", torch.float32))

    @staticmethod
    def _parameter(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [*self.weights, *([] if self.bias is None else [self.bias])]

    def _hook(self, parameter: Any, main_dtype: torch.dtype) -> None:
        parameter.main_grad = torch.zeros(parameter.shape, dtype=main_dtype)
        parameter.grad_added_to_main_grad = False

        def hook(parameter: Any) -> None:  # DistributedDataParallel._make_backward_post_hook
            self.hook_runs += 1
            if not parameter.grad_added_to_main_grad or getattr(parameter, "zero_out_wgrad", False):
                parameter.main_grad.add_(parameter.grad.data)
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(hook)

    def forward(self, micro_batch: int, weights: Iterable[torch.nn.Parameter] | None = None) -> tuple[Any, Any]:
        """Input and output of a micro-batch."""
        dtype = self.weights[0].dtype
        generator = torch.Generator().manual_seed(10 + micro_batch)
        hidden = torch.randn(SEQUENCE, BATCH, WIDTH, generator=generator).to(dtype).requires_grad_()
        given = hidden
        for weight in weights or [self.weights[index] for index in self.uses]:
            linear = functools.partial(self._linear, weight)
            hidden = checkpoint(linear, hidden, use_reentrant=True) if self.checkpointed else linear(hidden)
        return given, hidden

    def _linear(self, weight: torch.nn.Parameter, hidden: torch.Tensor) -> torch.Tensor:
        given = (hidden.tanh().to(weight.dtype), weight, self.bias, self.fused, False, False, self.buffer, 0, None)
        output: torch.Tensor = LINEAR.apply(*given) if self.wide is None else self.wide.apply(*given, torch.float32)
        return output

    def gradients(self) -> list[torch.Tensor]:
        return [p.main_grad if hasattr(p, "main_grad") else p.grad for p in self.parameters]


def native(gradient: DelayedGradient) -> LinearWeightGradient:
    assert isinstance(gradient, LinearWeightGradient)
    return gradient


def backward(output: torch.Tensor, micro_batch: int) -> None:
    generator = torch.Generator().manual_seed(100 + micro_batch)
    output.backward(torch.randn(output.shape, generator=generator).to(output.dtype))


def train(model: Model, order: str, queue: WeightGradientQueue) -> list[torch.Tensor]:
    """Run all forwards, then `order`; gradients of the inputs, then of the parameters."""
    runs = [model.forward(micro_batch) for micro_batch in range(MICRO_BATCHES)]
    left: dict[int, list[DelayedGradient]] = {}
    for kind, number in ((action[0], int(action[1:])) for action in order.split()):
        if kind == "B":
            backward(runs[number][1], number)
        elif kind == "I":
            with queue.collect() as left[number]:
                backward(runs[number][1], number)
            assert len(left[number]) == len(model.uses)
        else:
            queue.compute(left[number])
    return [given.grad for given, _output in runs] + model.gradients()


def compare(queue: WeightGradientQueue, order: str, **options: Any) -> Model:
    """Train whole and in `order`: bitwise equal, and the second one split. Returns the second model."""
    stock = Model(**options)
    expected = train(stock, WHOLE, queue)
    assert queue.computed == 0
    ours = Model(**options)
    actual = train(ours, order, queue)
    assert queue.computed == len(ours.uses) * order.count("W")
    assert len(actual) == len(expected) == MICRO_BATCHES + len(ours.parameters)
    for one, other in zip(expected, actual, strict=True):
        assert one.dtype == other.dtype
        assert one.abs().sum() > 0
        assert torch.equal(one, other)
    assert ours.hook_runs == stock.hook_runs, "the hook has to run once per parameter and micro-batch"
    return ours


@interleavings
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hooked", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_bitwise_those_of_the_whole_backward(
    queue: WeightGradientQueue, order: str, dtype: torch.dtype, hooked: bool, bias: bool
) -> None:
    model = compare(queue, order, dtype=dtype, hooked=hooked, bias=bias)
    if hooked:
        assert not any(weight.grad_added_to_main_grad for weight in model.weights)


@pytest.mark.parametrize("hooked", [True, False])
def test_weights_that_hooks_have_saved_get_their_gradients(queue: WeightGradientQueue, hooked: bool) -> None:
    """The hooks restore a copy of the weight, which has no main gradient, and can restore it only once."""
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: [saved.clone()], lambda copies: copies.pop()):
        compare(queue, INTERLEAVINGS["whole between split"], hooked=hooked)


class Wide(torch.autograd.Function):
    """As Megatron's from 0.20 on: its output is of a type of its own, as logits in fp32 are."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> torch.Tensor:
        ctx.input_dtype = given[0].dtype
        output: torch.Tensor = LINEAR.forward(ctx, *given[:-1])
        return output.to(given[-1])


@interleavings
def test_float32_outputs_of_bfloat16_inputs(
    queue: WeightGradientQueue, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stock(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (*STOCK_BACKWARD(ctx, grad_output.to(ctx.input_dtype)), None)

    def forward(*_: Any) -> None:
        raise NotImplementedError

    known = inspect.signature(LINEAR.forward)
    parameters = [*known.parameters.values(), inspect.Parameter("output_dtype", inspect.Parameter.KEYWORD_ONLY)]
    forward.__signature__ = known.replace(parameters=parameters)  # type: ignore[attr-defined]
    monkeypatch.setattr(Wide, "backward", staticmethod(queue.wrap(stock, forward)))
    compare(queue, order, dtype=torch.bfloat16, hooked=False, wide=Wide)


@interleavings
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("hooked", "fused"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("checkpointed", [True, False])
def test_a_weight_that_is_used_three_times_in_a_micro_batch(
    queue: WeightGradientQueue, order: str, dtype: torch.dtype, hooked: bool, fused: bool, checkpointed: bool
) -> None:
    """As the output layer is with multi-token prediction: autograd accumulates the sum, but of checkpointed spans each
    by itself, as kernels of gradient accumulation fusion do."""
    compare(queue, order, dtype=dtype, hooked=hooked, fused=fused, checkpointed=checkpointed, uses=(0, 1, 0, 0))


@interleavings
def test_a_weight_that_an_embedding_looks_up_too_is_left_to_stock(queue: WeightGradientQueue, order: str) -> None:
    """Tied embeddings with multi-token prediction."""

    def trained(*, split: bool) -> list[torch.Tensor]:
        model = Model(bias=False)
        embedding = torch.nn.Embedding(WIDTH, WIDTH)
        embedding.weight = model.weights[0]
        if split:
            queue.leave_whole([torch.nn.Sequential(embedding)])
        outputs = []
        for _ in range(MICRO_BATCHES):
            hidden = embedding(torch.arange(SEQUENCE * BATCH).reshape(SEQUENCE, BATCH) % WIDTH)
            for weight in (model.weights[1], model.weights[0]):
                hidden = model._linear(weight, hidden)
            outputs.append(hidden)
        left: dict[int, list[DelayedGradient]] = {}
        for kind, number in ((action[0], int(action[1:])) for action in (order if split else WHOLE).split()):
            if kind == "W":
                queue.compute(left[number])
            elif kind == "B":
                backward(outputs[number], number)
            else:
                with queue.collect() as left[number]:
                    backward(outputs[number], number)
                assert [native(each).weight for each in left[number]] == [model.weights[1]]
        return model.gradients()

    assert all(torch.equal(*pair) for pair in zip(trained(split=False), trained(split=True), strict=True))


@interleavings
@pytest.mark.parametrize(
    ("main_dtype", "kernel"), [(torch.float32, "wgrad_gemm_accum_fp32"), (torch.bfloat16, "wgrad_gemm_accum_fp16")]
)
def test_fused_accumulation_is_kept(
    queue: WeightGradientQueue, fused_kernels: list[str], order: str, main_dtype: torch.dtype, kernel: str
) -> None:
    model = compare(queue, order, dtype=torch.bfloat16, fused=True, main_dtype=main_dtype)
    assert fused_kernels == [kernel] * (2 * 2 * MICRO_BATCHES)
    assert all(weight.grad_added_to_main_grad for weight in model.weights), "stock leaves the flag set, too"


def test_fused_accumulation_refuses_what_apex_has_no_kernel_for(queue: WeightGradientQueue) -> None:
    model = Model(bias=False, fused=True, main_dtype=torch.float64)
    _given, output = model.forward(0)
    with queue.collect() as left:
        backward(output, 0)
    with pytest.raises(RuntimeError, match=r"no kernel for main gradients of torch.float64.*--no-gradient-accum"):
        queue.compute(left)


def test_fusion_without_main_gradients_fails_as_stock_does(queue: WeightGradientQueue) -> None:
    model = Model(bias=False, fused=True, hooked=False)
    _given, output = model.forward(0)
    with queue.collect(), pytest.raises(AttributeError, match="dtype"):
        backward(output, 0)


@pytest.mark.parametrize("zero", [True, False])
def test_stand_ins_of_fused_weights_are_transformer_engines_where_it_is(
    queue: WeightGradientQueue, monkeypatch: pytest.MonkeyPatch, zero: bool
) -> None:
    asked: list[tuple[Any, ...]] = []

    def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
        asked.append((shape, dtype, zero))
        return torch.zeros(shape, dtype=dtype)

    monkeypatch.setattr(layers, "get_dummy_wgrad", get_dummy_wgrad, raising=False)
    model = Model(bias=False, fused=True, dtype=torch.bfloat16)
    for weight in model.weights:
        weight.zero_out_wgrad = zero  # type: ignore[attr-defined]
    _given, output = model.forward(0)
    with queue.collect():
        backward(output, 0)
    assert asked == [([WIDTH, WIDTH], torch.bfloat16, zero)] * 2


@pytest.mark.parametrize("fused", [True, False])
def test_zero_out_wgrad_adds_zeros_and_the_rest_adds_nothing(
    queue: WeightGradientQueue, monkeypatch: pytest.MonkeyPatch, fused: bool
) -> None:
    """Shared embeddings: the hook adds the stand-in although the gradient was added already."""

    def shared(**options: Any) -> Model:
        model = Model(**options)
        model.weights[0].zero_out_wgrad = True  # type: ignore[attr-defined]
        return model

    expected = train(shared(fused=fused), WHOLE, queue)
    actual = train(shared(fused=fused), INTERLEAVINGS["weights one later"], queue)
    assert all(torch.equal(one, other) for one, other in zip(expected, actual, strict=True))


def test_a_frozen_weight_is_not_queued(queue: WeightGradientQueue) -> None:
    model = Model(bias=False, hooked=False)
    model.weights[0].requires_grad_(False)
    given, output = model.forward(0)
    with queue.collect() as left:
        backward(output, 0)
    assert [native(gradient).weight for gradient in left] == [model.weights[1]]
    queue.compute(left)
    assert given.grad is not None
    assert [weight.grad is None for weight in model.weights] == [True, False]


def test_what_megatron_defers_itself_is_left_to_it(queue: WeightGradientQueue) -> None:
    """defer_embedding_wgrad_compute: output gradients go to a buffer, and the flag stays as stock sets it."""
    buffer: list[torch.Tensor] = []
    model = Model(bias=False, fused=True, buffer=buffer)
    _given, output = model.forward(0)
    with queue.collect() as left:
        backward(output, 0)
    assert left == []
    assert [tuple(kept.shape) for kept in buffer] == [(SEQUENCE, BATCH, WIDTH)] * 2
    assert all(weight.grad_added_to_main_grad for weight in model.weights)


def test_a_fully_sharded_weight_runs_whole(queue: WeightGradientQueue) -> None:
    model = Model(bias=False, hooked=False)
    for weight in model.weights:
        weight.__fsdp_param__ = True  # type: ignore[attr-defined]
    with queue.collect() as left:
        backward(model.forward(0)[1], 0)
    assert left == []
    assert all(weight.grad is not None for weight in model.weights)


def test_a_weight_used_twice_gets_its_flag_back(queue: WeightGradientQueue) -> None:
    model = Model(bias=False)
    weight = model.weights[0]
    _given, output = model.forward(0, [weight, weight])
    with queue.collect() as left:
        backward(output, 0)
        assert weight.grad_added_to_main_grad
    assert len(left) == 2
    assert not weight.grad_added_to_main_grad, "the hook of every later backward would drop its gradient"


def test_an_error_inside_a_split_backward_leaves_no_trace(queue: WeightGradientQueue) -> None:
    expected = train(Model(), WHOLE, queue)
    model = Model()
    _given, output = model.forward(0, [model.weights[1]])

    def interrupt() -> None:
        with queue.collect() as left:
            backward(output, 0)
            assert len(left) == 1
            raise ConnectionError("a peer died")

    with pytest.raises(ConnectionError, match="a peer died"):
        interrupt()
    assert not model.weights[1].grad_added_to_main_grad
    for parameter in model.parameters:
        parameter.main_grad.zero_()  # type: ignore[attr-defined]
    assert all(torch.equal(*pair) for pair in zip(expected, train(model, WHOLE, queue), strict=True))
    assert queue.computed == 0


def test_split_backwards_do_not_nest(queue: WeightGradientQueue) -> None:
    with queue.collect(), pytest.raises(AssertionError, match="do not nest"), queue.collect():
        pass


def test_tensors_are_held_until_the_weight_gradient_and_no_longer(queue: WeightGradientQueue) -> None:
    model = Model(bias=False)
    given, output = model.forward(0)
    with queue.collect() as left:
        backward(output, 0)
    del given, output
    held = [weakref.ref(tensor) for gradient in map(native, left) for tensor in (gradient.input, gradient.grad_output)]
    assert all(reference() is not None for reference in held)
    queue.compute(left)
    assert left == []
    assert not any(reference() is not None for reference in held)


def test_without_a_split_backward_stock_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def stock(ctx: Any, grad_output: torch.Tensor) -> str:
        calls.append((ctx, grad_output))
        return "stock's"

    queue = WeightGradientQueue(layers)
    context, gradient = object(), torch.zeros(1)
    assert queue.wrap(stock, LINEAR.forward)(context, gradient) == "stock's"
    assert calls == [(context, gradient)]
