# SPDX-License-Identifier: Apache-2.0
"""Split backwards of Transformer Engine's layers (a stand-in's) against whole ones, bit for bit, in one process."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import layers
from support import stand_in_te

from adaptra_megatron.megatron.gradients.linear_wgrad import DelayedGradient, WeightGradientQueue
from adaptra_megatron.megatron.gradients.te_wgrad import CollectingStore, EngineLayers, why_whole
from adaptra_megatron.megatron.state.attempt_state import AttemptState

WIDTH, ROWS, MICRO_BATCHES = 8, 6, 4
WHOLE = "B0 B1 B2 B3"
ORDERS = ("I0 W0 I1 W1 I2 W2 I3 W3", "I0 I1 W0 I2 W1 I3 W2 W3", "I0 I1 I2 I3 W0 W1 W2 W3", "B0 I1 I2 W1 W2 B3")
CONFIG = SimpleNamespace(fp8=None, fp4=None, tp_comm_overlap=False, cpu_offloading=False)
QUANTIZED = SimpleNamespace(**{**vars(CONFIG), "fp8": "hybrid"})


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in stand_in_te.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sys.modules["transformer_engine"], "__version__", "2.8.0+stand-in")


@pytest.fixture
def queue() -> WeightGradientQueue:
    return WeightGradientQueue(layers)


def make(kind: str, *, fused: bool = False, bias: bool = True, **options: Any) -> Any:
    torch.manual_seed(1)
    grouped = {"num_gemms": 2} if kind == "GroupedLinear" else {}
    layer_class = getattr(sys.modules["transformer_engine.pytorch"], kind)
    return layer_class(
        in_features=WIDTH, out_features=WIDTH, bias=bias, fuse_wgrad_accumulation=fused, **grouped, **options
    )


class Model(torch.nn.Module):
    """Two layers, and hooks as those of Megatron's DistributedDataParallel with overlapped reduction."""

    def __init__(
        self, kind: str, *, hooked: bool = True, fp8: bool = False, uses: tuple[int, ...] = (0, 1), **options: Any
    ) -> None:
        """`uses`: indices of layers, in the order in which they compute."""
        super().__init__()
        self.uses = uses
        self.stack = torch.nn.ModuleList(make(kind, **options) for _ in range(2))
        for layer in self.stack:
            layer.fp8 = fp8
        self.hook_runs: list[str] = []
        for name, parameter in self.named_parameters() if hooked else ():
            self._hook(name, parameter)

    def _hook(self, name: str, parameter: Any) -> None:
        parameter.main_grad = torch.zeros_like(parameter)
        parameter.grad_added_to_main_grad = False

        def hook(*_: Any) -> None:  # DistributedDataParallel._make_backward_post_hook
            self.hook_runs.append(name)
            assert parameter.grad is not None, "param.grad being None is not safe when overlap_grad_reduce is True"
            if not parameter.grad_added_to_main_grad or getattr(parameter, "zero_out_wgrad", False):
                parameter.main_grad.add_(parameter.grad.data)
            parameter.grad = None

        accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        accumulator.register_hook(hook)
        parameter.kept_accumulator = accumulator

    def run(self, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Input and loss."""
        generator = torch.Generator().manual_seed(10 + micro_batch)
        given = hidden = torch.randn(ROWS, WIDTH, generator=generator, requires_grad=True)
        for layer in (self.stack[index] for index in self.uses):
            splits = ([2, ROWS - 2],) if isinstance(layer, stand_in_te.GroupedLinear) else ()
            hidden = layer(hidden.tanh(), *splits, is_first_microbatch=micro_batch == 0)
        return given, hidden.square().sum()

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: getattr(p, "main_grad", p.grad) for name, p in self.named_parameters()}


def train(model: Model, order: str, queue: WeightGradientQueue) -> list[torch.Tensor]:
    """Run all forwards, then `order`; gradients of the inputs, then of the parameters."""
    runs = [model.run(micro_batch) for micro_batch in range(MICRO_BATCHES)]
    left: dict[int, list[DelayedGradient]] = {}
    for kind, number in ((action[0], int(action[1:])) for action in order.split()):
        if kind == "B":
            runs[number][1].backward()
        elif kind == "I":
            with queue.collect() as left[number]:
                runs[number][1].backward()
            assert len(left[number]) == len(model.uses)
        else:
            queue.compute(left[number])
    return [given.grad for given, _loss in runs if given.grad is not None] + list(model.gradients().values())


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Linear": ("Linear", {}),
    "Linear, no bias": ("Linear", {"bias": False}),
    "Linear, bare": ("Linear", {"hooked": False}),
    "Linear, fused": ("Linear", {"fused": True}),
    "Linear, fused, no bias": ("Linear", {"fused": True, "bias": False}),
    "Linear, used three times": ("Linear", {"uses": (0, 1, 0, 0)}),
    "Linear, fused, used three times": ("Linear", {"uses": (0, 1, 0, 0), "fused": True}),
    "Linear, quantized": ("Linear", {"bias": False, "fp8": True}),
    "Linear, quantized, bare": ("Linear", {"bias": False, "fp8": True, "hooked": False}),
    "Linear, quantized, fused": ("Linear", {"bias": False, "fp8": True, "fused": True}),
    "LayerNormLinear": ("LayerNormLinear", {}),
    "LayerNormLinear, fused": ("LayerNormLinear", {"fused": True}),
    "LayerNormLinear, quantized, fused": ("LayerNormLinear", {"bias": False, "fp8": True, "fused": True}),
    "GroupedLinear, fused": ("GroupedLinear", {"fused": True, "bias": False}),
    "GroupedLinear, quantized, fused": ("GroupedLinear", {"fused": True, "bias": False, "fp8": True}),
}


def config_of(model: Model) -> SimpleNamespace:
    return QUANTIZED if model.stack[0].fp8 else CONFIG


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_bitwise_those_of_the_whole_backward(
    queue: WeightGradientQueue, monkeypatch: pytest.MonkeyPatch, case: str, keeps: bool, order: str
) -> None:
    kind, options = CASES[case]
    monkeypatch.setattr(stand_in_te.TransformerEngineBaseModule, "keeps_gradients", keeps)
    stock = Model(kind, **options)
    expected = train(stock, WHOLE, queue)
    ours = Model(kind, **options)
    EngineLayers(queue).split([ours], config_of(ours))
    actual = train(ours, order, queue)
    assert len(actual) == len(expected) > MICRO_BATCHES
    assert all(torch.equal(one, other) for one, other in zip(expected, actual, strict=True))
    assert all(one.isfinite().all() and one.abs().sum() > 0 for one in actual)
    assert sorted(ours.hook_runs) == sorted(stock.hook_runs), "hooks have to run once per parameter and micro-batch"
    splits = order.count("W")
    assert queue.computed == len(ours.uses) * splits
    calls = [layer.backward_dw_calls for layer in ours.stack]
    assert calls == [splits * ours.uses.count(layer) for layer in range(2)], "one backward_dw per use and micro-batch"
    assert not options.get("hooked", True) or all(parameter.grad is None for parameter in ours.parameters())


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "GroupedLinear"])
def test_gradients_are_those_of_the_layers_own_delaying(queue: WeightGradientQueue, kind: str, fp8: bool) -> None:
    """As Megatron's delay_wgrad_compute has it: layers built so, and a `backward_dw` of each for each backward."""
    options = {"fused": True, "bias": False, "fp8": fp8}
    theirs = Model(kind, delay_wgrad_compute=True, **options)
    for loss in [theirs.run(micro_batch)[1] for micro_batch in range(MICRO_BATCHES)]:
        loss.backward()  # type: ignore[no-untyped-call]
    for layer in [layer for _ in range(MICRO_BATCHES) for layer in theirs.stack]:
        layer.backward_dw()
    ours = Model(kind, **options)
    EngineLayers(queue).split([ours], config_of(ours))
    train(ours, ORDERS[2], queue)
    for name, gradient in theirs.gradients().items():
        assert gradient.abs().sum() > 0
        assert torch.equal(gradient, ours.gradients()[name]), name


def test_what_layers_have_delayed_themselves_ends_with_the_attempt() -> None:
    model = Model("Linear", delay_wgrad_compute=True, fused=True, bias=False)
    state = AttemptState([model])
    state.keep()
    model.run(0)[1].backward()  # type: ignore[no-untyped-call]
    assert not any(layer.wgrad_store.context.empty() for layer in model.stack)
    state.restore()
    assert all(layer.wgrad_store.context.empty() for layer in model.stack)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Linear", {}),
        ("LayerNormLinear", {"fused": True}),
        ("GroupedLinear", {"fused": True, "bias": False}),
        ("Linear", {"bias": False, "fp8": True}),
    ],
)
def test_weights_and_biases_wait_for_w_and_norms_do_not(
    queue: WeightGradientQueue, kind: str, options: dict[str, bool]
) -> None:
    model = Model(kind, **options)
    EngineLayers(queue).split([model], config_of(model))
    with queue.collect() as left:
        model.run(0)[1].backward()
    there = {name for name, gradient in model.gradients().items() if gradient.abs().sum() > 0}
    assert there == {name for name in model.gradients() if "layer_norm" in name}
    queue.compute(left)
    assert left == []
    assert all(gradient.abs().sum() > 0 for gradient in model.gradients().values())


def test_flags_of_unfused_parameters_are_as_before(queue: WeightGradientQueue) -> None:
    """Or the hook of every later whole backward would drop its gradient."""
    model = Model("Linear")
    EngineLayers(queue).split([model], CONFIG)
    with queue.collect():
        model.run(0)[1].backward()
    assert not any(parameter.grad_added_to_main_grad for parameter in model.parameters())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("switch", ["ub_bulk_dgrad", "ub_overlap_ag_dgrad"])
def test_what_is_gathered_into_a_buffer_of_all_layers_is_copied(
    queue: WeightGradientQueue, switch: str, order: str
) -> None:
    """--tp-comm-overlap: the next layer's backward overwrites it."""
    stock, ours = Model("Linear", bias=False), Model("Linear", bias=False)
    for layer in (*stock.stack, *ours.stack):
        setattr(layer, switch, True)
    expected = train(stock, WHOLE, queue)
    EngineLayers(queue).split([ours], CONFIG)
    assert all(torch.equal(*pair) for pair in zip(expected, train(ours, order, queue), strict=True))
    assert queue.computed == 2 * order.count("W")


@pytest.mark.parametrize("switch", ["ub_bulk_dgrad", "ub_overlap_ag_dgrad"])
def test_what_is_quantized_and_in_a_buffer_of_all_layers_runs_whole(switch: str) -> None:
    layer = make("Linear", bias=False)
    assert why_whole(layer, stand_in_te.Linear, QUANTIZED) is None
    setattr(layer, switch, True)
    assert "--tp-comm-overlap, quantized" in str(why_whole(layer, stand_in_te.Linear, QUANTIZED))
    assert why_whole(layer, stand_in_te.Linear, CONFIG) is None


def test_an_error_inside_a_split_backward_leaves_no_trace(queue: WeightGradientQueue) -> None:
    expected = train(Model("Linear"), WHOLE, queue)
    model = Model("Linear")
    EngineLayers(queue).split([model], CONFIG)

    def interrupt() -> None:
        with queue.collect() as left:
            model.run(0)[1].backward()
            assert len(left) == 2
            raise ConnectionError("a peer died")

    with pytest.raises(ConnectionError, match="a peer died"):
        interrupt()
    for gradient in model.gradients().values():
        gradient.zero_()
    actual = train(model, ORDERS[0], queue)
    assert all(torch.equal(one, other) for one, other in zip(expected, actual, strict=True))


def test_a_backward_within_a_backward_is_split_too(queue: WeightGradientQueue) -> None:
    """Recomputed activations: the forward runs again, recording, in the midst of the backward."""

    def recomputed(model: Model) -> torch.Tensor:
        given = torch.ones(ROWS, WIDTH, requires_grad=True)
        return torch.utils.checkpoint.checkpoint(model.stack[0], given, use_reentrant=True).square().sum()

    stock, ours = Model("Linear"), Model("Linear")
    recomputed(stock).backward()
    EngineLayers(queue).split([ours], CONFIG)
    loss = recomputed(ours)
    with queue.collect() as left:
        loss.backward()
    assert len(left) == 1
    queue.compute(left)
    for name, gradient in stock.gradients().items():
        assert torch.equal(gradient, ours.gradients()[name]), name


EARLY_BIASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "quantized": ("Linear", {"fp8": True}, {}),
    "quantized, fused": ("LayerNormLinear", {"fp8": True, "fused": True}, {}),
    "experts computed as one": ("GroupedLinear", {"fused": True}, {"use_grouped_tensor": True}),
}


@pytest.mark.parametrize("case", EARLY_BIASES)
def test_biases_whose_gradients_come_at_b_are_not_waited_for(queue: WeightGradientQueue, case: str) -> None:
    kind, options, changes = EARLY_BIASES[case]
    stock, ours = Model(kind, **options), Model(kind, **options)
    for layer in (*stock.stack, *ours.stack):
        vars(layer).update(changes)
    EngineLayers(queue).split([ours], config_of(ours))
    for micro_batch in range(MICRO_BATCHES):
        stock.run(micro_batch)[1].backward()  # type: ignore[no-untyped-call]
        with queue.collect() as left:
            ours.run(micro_batch)[1].backward()  # type: ignore[no-untyped-call]
        queue.compute(left)
    for name, gradient in stock.gradients().items():
        assert gradient.abs().sum() > 0
        assert torch.equal(gradient, ours.gradients()[name]), name


def test_experts_of_old_releases_leave_hooks_their_gradients(
    queue: WeightGradientQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 2.8 autograd gets nothing from a delayed GroupedLinear, and hooks with overlapped reduction insist."""
    monkeypatch.setattr(sys.modules["transformer_engine"], "__version__", "2.7.0+stand-in")
    monkeypatch.setattr(stand_in_te.GroupedLinear, "before_2_8", True)
    model = Model("GroupedLinear", fused=True, bias=False)
    EngineLayers(queue).split([model], CONFIG)
    with queue.collect() as left:
        model.run(0)[1].backward()  # type: ignore[no-untyped-call]
    assert left == []
    assert all(gradient.abs().sum() > 0 for gradient in model.gradients().values())


WHOLE_LAYERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "quantized or grouped, and with a bias": ("Linear", {}, {"fp8": "hybrid"}),
    "with a bias, whose gradient then comes at B": ("GroupedLinear", {"fused": True}, {}),
    "--tp-comm-overlap reduces its input gradient": ("LayerNormLinear", {"ub_bulk_wgrad": True}, {}),
    "offloaded to the CPU": ("Linear", {}, {"cpu_offloading": True}),
    "without gradient accumulation fusion": ("GroupedLinear", {"fused": False}, {}),
    "its bias is added elsewhere": ("Linear", {"return_bias": True}, {}),
    "built with delay_wgrad_compute": ("Linear", {"delay_wgrad_compute": True}, {}),
}


@pytest.mark.parametrize("reason", WHOLE_LAYERS)
def test_what_cannot_be_split_runs_whole_and_is_named(
    queue: WeightGradientQueue, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    kind, options, settings = WHOLE_LAYERS[reason]
    layer, other = make(kind, **options), make("Linear")
    before = layer.wgrad_store
    config = SimpleNamespace(**{**vars(CONFIG), **settings})
    with caplog.at_level(logging.INFO, logger="adaptra_megatron"):
        EngineLayers(queue).split([layer, *([] if settings else [other])], config)
    assert layer.wgrad_store is before
    assert len(caplog.records) == 1
    split, whole = caplog.text.split("; whole ")
    assert f"1 {kind} (" in whole
    assert reason in whole
    assert ("split none" if settings else "split 1 Linear") in split


@pytest.mark.parametrize("settings", [{"fp8": "e4m3"}, {"fp4": "e2m1"}, {"te_quant_params": object()}])
def test_what_is_quantized_is_split_where_it_has_no_bias(settings: dict[str, Any]) -> None:
    config = SimpleNamespace(**{**vars(CONFIG), **settings})
    for bias in (False, True):
        layer = make("Linear", bias=bias)
        layer.te_quant_params = settings.get("te_quant_params")
        assert (why_whole(layer, stand_in_te.Linear, config) is not None) == bias


def test_sharded_weights_run_whole() -> None:
    """Generalized tensor parallelism: a gradient is reduced and scattered by the backward that computes it."""
    layer = make("Linear")
    layer.weight.is_distributed_weight = True
    assert why_whole(layer, stand_in_te.Linear, CONFIG) == "its weight is sharded and gathered for each use"


def test_frozen_weights_run_whole(queue: WeightGradientQueue) -> None:
    """As under adapters (LoRA), which are split themselves: there is no gradient to delay."""
    frozen, adapter = make("Linear"), make("Linear")
    frozen.requires_grad_(False)
    assert "frozen" in str(why_whole(frozen, stand_in_te.Linear, CONFIG))
    EngineLayers(queue).split([frozen, adapter], CONFIG)
    with queue.collect() as left:
        (frozen(given := torch.ones(ROWS, WIDTH, requires_grad=True)) + adapter(given)).sum().backward()
    assert len(left) == 1
    queue.compute(left)
    assert given.grad is not None
    assert [layer.weight.grad is None for layer in (frozen, adapter)] == [True, False]


def test_layers_of_two_linears_run_whole(queue: WeightGradientQueue) -> None:
    layer = stand_in_te.LayerNormMLP(WIDTH, WIDTH)
    EngineLayers(queue).split([layer], CONFIG)
    with queue.collect() as left:
        layer(torch.ones(ROWS, WIDTH)).sum().backward()
    assert left == []
    assert layer.fc1_weight.grad is not None
    assert why_whole(layer, stand_in_te.LayerNormMLP, CONFIG) == "not a single linear layer"


def test_releases_without_delayed_weight_gradients_run_whole() -> None:
    layer = make("Linear")
    layer.wgrad_store = None
    assert "came with 2.3" in str(why_whole(layer, stand_in_te.Linear, CONFIG))


def test_stores_are_given_back(queue: WeightGradientQueue) -> None:
    model = Model("Linear")
    before = [layer.wgrad_store for layer in model.stack]
    exchanged = EngineLayers(queue)
    exchanged.split([model], CONFIG)
    ours = [layer.wgrad_store for layer in model.stack]
    assert all(isinstance(store, CollectingStore) for store in ours)
    exchanged.split([model], CONFIG)
    assert all(layer.wgrad_store is store for layer, store in zip(model.stack, ours, strict=True)), "exchanged twice"
    exchanged.restore()
    assert all(layer.wgrad_store is store for layer, store in zip(model.stack, before, strict=True))


def test_without_transformer_engine_nothing_is_looked_for(
    queue: WeightGradientQueue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in stand_in_te.modules():
        monkeypatch.delitem(sys.modules, name)
    with caplog.at_level(logging.INFO, logger="adaptra_megatron"):
        EngineLayers(queue).split([torch.nn.Linear(WIDTH, WIDTH)], CONFIG)
    assert caplog.records == []
    assert "transformer_engine" not in sys.modules
