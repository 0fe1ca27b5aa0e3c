# SPDX-License-Identifier: Apache-2.0
"""A stand-in of Transformer Engine: its linear layers' documented signatures, and their results by plain torch.

Written after the documentation of Linear, LayerNormLinear and GroupedLinear of transformer_engine.pytorch (2.3 to
2.19), and after what their backwards do with delayed weight gradients, quantized ones among them.
"""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

MODULE = "transformer_engine.pytorch.module"


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
    """What is in it is anything: let it be something that shows if it gets into a sum."""
    return torch.zeros(shape, dtype=dtype) if zero else torch.full(shape, float("nan"), dtype=dtype)


USERBUFFER: list[torch.Tensor] = []
"""Into which layers with overlapped communication of tensor parallelism gather, one after the other."""


class WeightGradStore:
    __module__ = f"{MODULE}._common"

    def __init__(self, delay_wgrad_compute: bool = False, ub_bulk_wgrad: bool = False) -> None:
        self.context: Any = queue.Queue() if delay_wgrad_compute else None
        self.enabled = delay_wgrad_compute

    def delay_wgrad_compute(self) -> bool:
        return self.enabled

    def put(self, tensor_list: list[Any], func: Callable[..., Any]) -> None:
        assert self.enabled
        self.context.put([tensor_list, func])

    def pop(self) -> Any:
        assert self.enabled
        if self.context.empty():
            raise RuntimeError("Pop empty queue.")
        tensor_list, func = self.context.get()
        return func(*tensor_list), tensor_list


class Quantizer:
    """As with delayed scaling: tensors are rounded by what was largest before, and carry the scale of that."""

    def __init__(self) -> None:
        self.scale, self._largest = 10.0, 0.0

    def __call__(self, tensor: torch.Tensor) -> Quantized:
        self._largest = max(self._largest, float(tensor.abs().max()))
        return Quantized((tensor * self.scale).round().clamp(-127, 127), 1 / self.scale)

    def update(self) -> None:
        """FP8GlobalStateManager.reduce_and_update_fp8_tensors, at the end of a forward or backward."""
        self.scale, self._largest = 127 / self._largest, 0.0


class Quantized:
    """QuantizedTensorStorage: has nothing of a torch.Tensor's."""

    def __init__(self, data: torch.Tensor, scale_inv: float) -> None:
        self.data, self.scale_inv = data, scale_inv

    def dequantize(self) -> torch.Tensor:
        return self.data * self.scale_inv


class _Linears(torch.autograd.Function):
    """One product per weight, each with its share of the rows."""

    @staticmethod
    def forward(
        ctx: Any, inp: torch.Tensor, layer: Any, first: bool | None, splits: list[int], *parameters: Any
    ) -> Any:
        ctx.layer, ctx.splits, ctx.biases = layer, splits, len(parameters) > layer.num_gemms
        ctx.accumulate = first is None or not first
        # As since 2.17: a store that does not delay when the forward runs never reaches the backward.
        ctx.store = layer.store_of_forward
        ctx.save_for_backward(inp)
        weights, biases = parameters[: layer.num_gemms], parameters[layer.num_gemms :]
        ctx.inputs = parts = layer.quantized("input", inp.reshape(-1, inp.shape[-1]).split(splits))
        products = [_plain(part) @ weight.t() for part, weight in zip(parts, weights, strict=True)]
        if biases:
            products = [product + bias for product, bias in zip(products, biases, strict=True)]
        return torch.cat(products).reshape(*inp.shape[:-1], weights[0].shape[0])

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        layer, (inp,), inputs = ctx.layer, ctx.saved_tensors, ctx.inputs
        weights = layer.weights()
        split_output = grad_output.reshape(-1, grad_output.shape[-1]).split(ctx.splits)
        outputs = layer.in_userbuffer("ub_overlap_ag_dgrad", layer.quantized("grad_output", split_output))
        inputs = layer.in_userbuffer("ub_bulk_dgrad", inputs)
        dgrad = torch.cat([_plain(dy) @ weight for dy, weight in zip(outputs, weights, strict=True)]).reshape(inp.shape)
        fused = layer.fuse_wgrad_accumulation
        # Quantizing adds up the bias gradient on the way, and so do, in any precision, experts computed as one.
        early = ctx.biases and (layer.fp8 or layer.use_grouped_tensor)
        bgrads: list[Any] = [part.sum(dim=0) if early else None for part in split_output]
        if fused:
            wgrads: list[Any] = [weight.main_grad for weight in weights]
        else:
            wgrads = [torch.full_like(weight, float("nan")) for weight in weights]

        @torch.no_grad()  # kernels know of no autograd
        def gemm(xs: Any, dys: Any, out: list[torch.Tensor]) -> tuple[Any, Any]:
            grouped = isinstance(layer, GroupedLinear)
            xs, dys = ([_plain(each) for each in (given if grouped else [given])] for given in (xs, dys))
            for x, dy, into in zip(xs, dys, out, strict=True):
                product = (dy.t().to(into.dtype) @ x.to(into.dtype)) if fused else dy.t() @ x
                if fused and ctx.accumulate:
                    into.add_(product)
                else:
                    into.copy_(product)
            return out, [dy.sum(dim=0) if ctx.biases and not early else None for dy in dys]

        given = (inputs, outputs) if isinstance(layer, GroupedLinear) else (inputs[0], outputs[0])
        delayed = ctx.store is not None and ctx.store.delay_wgrad_compute()
        if delayed:
            if layer.ub_bulk_wgrad:
                raise NotImplementedError("Delayed weight grad computation is not supported with Userbuffers")
            ctx.store.put([*given, wgrads], gemm)
        else:
            _, late = gemm(*given, wgrads)
            bgrads = bgrads if early else late
        if fused:
            wgrads = [_dummy(weight) for weight in weights]
        # GroupedLinear: since 2.8 what it has not computed, with fusion a dummy, as the others; before, nothing.
        if delayed and (layer.before_2_8 if isinstance(layer, GroupedLinear) else not fused):
            wgrads = [None] * len(weights)
        return dgrad, None, None, None, *wgrads, *(bgrads if ctx.biases else ())


def _plain(tensor: Any) -> torch.Tensor:
    return tensor.dequantize() if isinstance(tensor, Quantized) else tensor


def _dummy(weight: Any) -> torch.Tensor | None:
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return get_dummy_wgrad(list(weight.main_grad.shape), weight.dtype, zero=getattr(weight, "zero_out_wgrad", False))


class TransformerEngineBaseModule(torch.nn.Module):
    __module__ = f"{MODULE}.base"
    num_gemms = 1
    gemm_bias_unfused_add = False
    use_grouped_tensor = False
    ub_bulk_wgrad = ub_bulk_dgrad = ub_overlap_ag_dgrad = False
    before_2_8 = False
    keeps_gradients = False
    """As 2.3 does: a gradient that is in .grad already is not overwritten."""

    def _set_up(
        self, in_features: int, out_features: int, bias: bool, return_bias: bool, fused: bool, store: WeightGradStore
    ) -> None:
        self.fuse_wgrad_accumulation = fused
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias
        self.wgrad_store: Any = store
        self.backward_dw_calls = 0
        self.fp8 = False
        self.quantizers = {"input": Quantizer(), "grad_output": Quantizer()}
        for name in self._names("weight"):
            self.register_parameter(name, torch.nn.Parameter(torch.randn(out_features, in_features)))
        for name in self._names("bias") if bias else []:
            self.register_parameter(name, torch.nn.Parameter(torch.randn(out_features)))

    def _names(self, kind: str) -> list[str]:
        return [kind]

    def weights(self) -> list[Any]:
        return [getattr(self, name) for name in self._names("weight")]

    def _apply_linears(self, inp: torch.Tensor, splits: list[int], first: bool | None) -> Any:
        self.store_of_forward = self.wgrad_store if self.wgrad_store.delay_wgrad_compute() else None
        biases = [getattr(self, name) for name in self._names("bias")] if self.use_bias else []
        out = _Linears.apply(inp, self, first, splits, *self.weights(), *(biases if self.apply_bias else []))
        return (out, biases[0] if len(biases) == 1 else biases) if self.return_bias else out

    def quantized(self, what: str, tensors: Sequence[torch.Tensor]) -> Sequence[Any]:
        if not self.fp8:
            return tensors
        found = [self.quantizers[what](tensor) for tensor in tensors]
        self.quantizers[what].update()
        return found

    def in_userbuffer(self, switch: str, tensors: Sequence[Any]) -> Sequence[Any]:
        """`tensors`, as they are gathered into the buffer where the switch is on."""
        if not getattr(self, switch):
            return tensors
        (tensor,) = tensors
        if not USERBUFFER or USERBUFFER[0].shape != tensor.shape:
            USERBUFFER[:] = [torch.empty_like(tensor)]
        USERBUFFER[0].copy_(tensor)
        return [USERBUFFER[0]]

    def need_backward_dw(self) -> bool:
        return self.wgrad_store is not None and self.wgrad_store.delay_wgrad_compute()

    def backward_dw(self) -> None:
        if not self.need_backward_dw():
            return
        assert not self.wgrad_store.context.empty()
        self.backward_dw_calls += 1
        (wgrads, bgrads), _tensors = self.wgrad_store.pop()
        for weight, wgrad in zip(self.weights(), wgrads, strict=True):
            if not self.fuse_wgrad_accumulation and not (self.keeps_gradients and weight.grad is not None):
                weight.grad = wgrad.to(weight.dtype)
        for name, bgrad in zip(self._names("bias"), bgrads, strict=True):
            nothing_yet = self.use_bias and getattr(self, name).grad is None
            if nothing_yet and not (bgrad is None and self.use_grouped_tensor):
                getattr(self, name).grad = bgrad.to(getattr(self, name).dtype)


class Linear(TransformerEngineBaseModule):
    __module__ = f"{MODULE}.linear"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: Any = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        store = WeightGradStore(delay_wgrad_compute, ub_bulk_wgrad)
        self._set_up(in_features, out_features, bias, return_bias, fuse_wgrad_accumulation, store)
        self.tp_size, self.parallel_mode = tp_size, parallel_mode
        self.ub_bulk_dgrad, self.ub_bulk_wgrad = ub_bulk_dgrad, ub_bulk_wgrad

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        return self._apply_linears(inp, [inp.shape[:-1].numel()], is_first_microbatch)


class LayerNormLinear(TransformerEngineBaseModule):
    __module__ = f"{MODULE}.layernorm_linear"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        init_method: Any = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Any = None,
        zero_centered_gamma: bool = False,
        device: Any = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        store = WeightGradStore(delay_wgrad_compute, ub_bulk_wgrad)
        self._set_up(in_features, out_features, bias, return_bias, fuse_wgrad_accumulation, store)
        self.tp_size, self.parallel_mode = tp_size, parallel_mode
        self.ub_bulk_dgrad, self.ub_bulk_wgrad = ub_bulk_dgrad, ub_bulk_wgrad
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(in_features))
        self.layer_norm_bias = torch.nn.Parameter(torch.zeros(in_features))

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        inp = F.layer_norm(inp, inp.shape[-1:], self.layer_norm_weight, self.layer_norm_bias)
        return self._apply_linears(inp, [inp.shape[:-1].numel()], is_first_microbatch)


class GroupedLinear(TransformerEngineBaseModule):
    __module__ = f"{MODULE}.grouped_linear"

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
    ) -> None:
        super().__init__()
        self.num_gemms = num_gemms
        store = WeightGradStore(delay_wgrad_compute)
        self._set_up(in_features, out_features, bias, return_bias, fuse_wgrad_accumulation, store)

    def _names(self, kind: str) -> list[str]:
        return [f"{kind}{index}" for index in range(self.num_gemms)]

    def forward(self, inp: torch.Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Any:
        return self._apply_linears(inp, m_splits, is_first_microbatch)


class LayerNormMLP(TransformerEngineBaseModule):
    __module__ = f"{MODULE}.layernorm_mlp"

    def __init__(self, hidden_size: int, ffn_hidden_size: int, delay_wgrad_compute: bool = False) -> None:
        super().__init__()
        self.wgrad_store = WeightGradStore(delay_wgrad_compute)
        self.fc1_weight = torch.nn.Parameter(torch.randn(ffn_hidden_size, hidden_size))
        self.fc2_weight = torch.nn.Parameter(torch.randn(hidden_size, ffn_hidden_size))

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        return F.linear(F.gelu(F.linear(F.layer_norm(inp, inp.shape[-1:]), self.fc1_weight)), self.fc2_weight)


class _Unused:
    """A base class that Megatron derives from when it is imported, and that no test makes."""


class _Operations:
    """The operations that Megatron's annotations name."""

    Sequential = FusibleOperation = _Unused


def modules() -> dict[str, ModuleType]:
    """What is to be in sys.modules, by name; what else Megatron tries to import of Transformer Engine is absent."""
    layers = {kind.__name__: kind for kind in (Linear, LayerNormLinear, GroupedLinear, LayerNormMLP)}
    contents: dict[str, dict[str, Any]] = {
        "transformer_engine": {"__version__": "2.3.0"},
        "transformer_engine.common": {},
        "transformer_engine.common.recipe": {"DelayedScaling": _Unused},
        "transformer_engine.pytorch": {**layers, "DotProductAttention": torch.nn.Module, "ops": _Operations},
        "transformer_engine.pytorch.distributed": {
            "CudaRNGStatesTracker": _Unused,
            "activation_recompute_forward": None,
            "checkpoint": None,
        },
        "transformer_engine.pytorch.fp8": {"FP8GlobalStateManager": _Unused, "fp8_autocast": _Unused},
        "transformer_engine.pytorch.tensor": {"QuantizedTensor": _Unused},
        "transformer_engine.pytorch.tensor.float8_tensor": {"Float8Tensor": _Unused},
        MODULE: {},
        f"{MODULE}.base": {"get_dummy_wgrad": get_dummy_wgrad},
    }
    made = {name: ModuleType(name) for name in contents}
    for name, module in made.items():
        vars(module).update(contents[name])
        package, _, last = name.rpartition(".")
        if package:
            setattr(made[package], last, module)
    return made


def install() -> None:
    """For a process of its own, before Megatron is imported."""
    sys.modules.update(modules())
