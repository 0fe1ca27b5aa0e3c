# SPDX-License-Identifier: Apache-2.0
"""Stand in for Transformer Engine's FusedAdam on the CPU, as strict as the real one about what it stores.

    with emulated_fused_adam():
        optimizer = get_megatron_optimizer(OptimizerConfig(use_precision_aware_optimizer=True, ...), ...)

As in release 2.9 (lines of transformer_engine/pytorch/optimizers/fused_adam.py, unless another file is named):

- Moments are stored in float32, float16, bfloat16 or FP8, main parameters in float32 or float16 (138-143).
- What is not float32 has a scale of its own in `_scales`, also bfloat16, and a step needs it (395-399, 566-568). A
  float16 tensor is its values times that scale, whose largest is half of float16's (196-202, 251-292). An FP8 tensor
  has its own factor (tensor/float8_tensor.py: Float8Quantizer), and in arithmetic it is its values in float32.
- `set_scaled_state` takes float32, or int16 for the low halves of main parameters, and rounds anew (327-359).
- With `store_param_remainders`, main parameters of bfloat16 ones are their low 16 bits: the upper half is the parameter
  itself, one too large where the low half is negative (common/multi_tensor/adam.cu: 179-292).
- A state is created by the first step, even without a gradient (531-541). A group without parameters counts none (489).
- State dictionaries are in float32 (420-473).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_map

from testing.replacing import Replaced, Replacement

VERSION = "2.9.0"
_LARGEST = {torch.float16: torch.finfo(torch.float16).max / 2.0, torch.uint8: 448.0}
_NAMES = ("exp_avg", "exp_avg_sq", "master_param")


class Float8Quantizer:
    """Rounds a tensor to FP8 (E4M3) by one scale."""

    def __init__(self) -> None:
        self.scale = torch.ones(1)

    def make_empty(self, shape: torch.Size) -> Float8Tensor:
        """Return a tensor of this quantizer's."""
        return Float8Tensor(torch.empty(shape, dtype=torch.uint8), torch.empty(1), self)


class Float8Tensor(torch.Tensor):
    """Values in FP8: they are `_data` times `_scale_inv`."""

    _data: torch.Tensor
    _scale_inv: torch.Tensor
    _quantizer: Float8Quantizer

    def __new__(cls, data: torch.Tensor, scale_inv: torch.Tensor, quantizer: Float8Quantizer) -> Float8Tensor:
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)
        made._data, made._scale_inv, made._quantizer = data, scale_inv, quantizer
        return made

    def dequantize(self) -> torch.Tensor:
        """Return the values in float32."""
        return self._data.view(torch.float8_e4m3fn).float() * self._scale_inv

    def float(self) -> torch.Tensor:
        """Return the values in float32, by the name that all tensors have."""
        return self.dequantize()

    def quantize_(self, source: torch.Tensor) -> None:
        """Round `source` by the quantizer's scale."""
        scale = self._quantizer.scale
        rounded = (source.float() * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        self._data.copy_(rounded.view(torch.uint8))
        self._scale_inv.copy_(scale.reciprocal())

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Compute with the values; only a copy may be written to."""
        if func is torch.ops.aten.detach.default:
            return cls(args[0]._data, args[0]._scale_inv, args[0]._quantizer)
        args, source = list(args), args[0]
        if func is torch.ops.aten.copy_.default and isinstance(source, Float8Tensor):
            source.quantize_(args[1])
            return source
        if func._schema.is_mutable and isinstance(source, Float8Tensor):
            raise NotImplementedError(f"{func} in FP8")
        args, kwargs = tree_map(
            lambda each: each.dequantize() if isinstance(each, Float8Tensor) else each, (args, kwargs or {})
        )
        return func(*args, **kwargs)


class FusedAdam(torch.optim.Optimizer):
    """`transformer_engine.pytorch.optimizers.FusedAdam`, without what CUDA graphs need."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        if master_weights and master_weight_dtype not in (torch.float32, torch.float16):
            raise RuntimeError("FusedAdam only supports fp32/fp16 master weights.")
        for name, dtype in (("exp_avg", exp_avg_dtype), ("exp_avg_sq", exp_avg_sq_dtype)):
            if dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.uint8):
                raise RuntimeError(f"FusedAdam only supports fp32/fp16/bf16/fp8 {name}.")
        group = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, group)
        self.adam_w_mode, self.master_weights, self.use_decoupled_grad = adam_w_mode, master_weights, use_decoupled_grad
        self.name_to_dtype_map = dict(zip(_NAMES, (exp_avg_dtype, exp_avg_sq_dtype, master_weight_dtype), strict=True))
        self.store_param_remainders = store_param_remainders and master_weights and master_weight_dtype == torch.float32
        self._scales: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero the gradients, which are `decoupled_grad` with `use_decoupled_grad`."""
        if not self.use_decoupled_grad:
            super().zero_grad(set_to_none)
            return
        for parameter in _parameters(self):
            if set_to_none:
                parameter.decoupled_grad = None  # type: ignore[attr-defined]
            else:
                parameter.decoupled_grad.zero_()  # type: ignore[attr-defined]

    def get_unscaled_state(self, param: torch.Tensor, state_name: str) -> torch.Tensor:
        """Return a state in float32, or in int16 where it is a low half; the stored one if that is no conversion."""
        stored, dtype = self.state[param][state_name], self.name_to_dtype_map[state_name]
        if dtype == torch.uint8:
            return stored.float()  # type: ignore[no-any-return]
        assert stored.dtype == (torch.int16 if self._has_halves(param, state_name) else dtype)
        unscaled: torch.Tensor = stored if dtype == torch.float32 else stored.float()
        return unscaled.mul_(self._scales[param][state_name]) if dtype == torch.float16 else unscaled

    def set_scaled_state(self, param: torch.Tensor, state_name: str, unscaled_state: torch.Tensor) -> None:
        """Store a state that is given in float32, or in int16 where it is a low half."""
        assert unscaled_state.dtype == (torch.int16 if self._has_halves(param, state_name) else torch.float32)
        if state_name not in self.state[param]:
            self._initialize_state(param, state_name, self._has_halves(param, state_name))
        if self.name_to_dtype_map[state_name] == torch.float32:
            self.state[param][state_name].copy_(unscaled_state)
        else:
            stored, scale = self.state[param][state_name], self._scales[param][state_name]
            self._apply_scale(state_name, unscaled_state, stored, scale)

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool) -> None:
        """Create the states of a parameter."""
        self._initialize_state(param, "exp_avg", False)
        self._initialize_state(param, "exp_avg_sq", False)
        if self.master_weights:
            self._initialize_state(param, "master_param", store_param_remainders)
            if not store_param_remainders:
                self.set_scaled_state(param, "master_param", param.clone().detach().float())

    def state_dict(self) -> Any:
        """Return torch's dictionary, with states in float32."""
        found = super().state_dict()
        for number, parameter in enumerate(_parameters(self)):
            if number in found["state"]:
                names = found["state"][number]
                found["state"][number] = {name: self.get_unscaled_state(parameter, name) for name in names}
        return found

    def load_state_dict(self, state_dict: Any) -> None:
        """Load what `state_dict` returns."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, parameter in zip(numbers, _parameters(self), strict=True):
            if number not in state_dict["state"]:
                continue
            self.state[parameter] = {}
            for name, value in state_dict["state"][number].items():
                if value is not None:
                    halves = self._has_halves(parameter, name)
                    self.set_scaled_state(parameter, name, value if halves else value.float())

    @torch.no_grad()
    def step(self, closure: None = None, grad_scaler: None = None) -> None:  # type: ignore[override]
        """Make one step. Raises RuntimeError for parameters of both float16 and bfloat16."""
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            if {torch.float16, torch.bfloat16} <= {each.dtype for each in group["params"]}:
                raise RuntimeError("FusedAdam does not support a mix of float16 and bfloat16 model weights.")
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.initialize_state(parameter, self._has_halves(parameter, "master_param"))
                gradient = getattr(parameter, "decoupled_grad", None) if self.use_decoupled_grad else parameter.grad
                if gradient is not None:
                    self._step(group, parameter, gradient.float())

    def _step(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        state = self.state[parameter]
        unscaled = {name: self.get_unscaled_state(parameter, name) for name in _NAMES if name in state}
        scales = {name: self._scales[parameter][name] for name in unscaled if self._is_scaled(name)}
        moments = unscaled["exp_avg"], unscaled["exp_avg_sq"]
        if parameter.dtype == torch.float32 or "master_param" not in unscaled:
            main = parameter.float()
            self._update(group, main, gradient, *moments)
            parameter.copy_(main)
        elif self._has_halves(parameter, "master_param"):
            low, high = unscaled["master_param"], parameter.view(torch.int16)
            both = torch.stack([low, high - (low < 0).to(torch.int16)], dim=-1)
            main = both.view(torch.float32).squeeze(-1)
            self._update(group, main, gradient, *moments)
            both = main.view(torch.int16).view(*main.shape, 2)
            low.copy_(both[..., 0])
            high.copy_(both[..., 1] + (low < 0).to(torch.int16))
        else:
            self._update(group, unscaled["master_param"], gradient, *moments)
            parameter.copy_(unscaled["master_param"])
        for name, scale in scales.items():
            self._apply_scale(name, unscaled[name], state[name], scale)

    def _update(
        self,
        group: dict[str, Any],
        main: torch.Tensor,
        gradient: torch.Tensor,
        average: torch.Tensor,
        square: torch.Tensor,
    ) -> None:
        """Do as the kernel (common/multi_tensor/adam.cu: AdamFunctor), in place, in float32."""
        assert main.dtype == average.dtype == square.dtype == torch.float32
        (beta1, beta2), corrected = group["betas"], group["bias_correction"]
        if not self.adam_w_mode:
            gradient = gradient + group["weight_decay"] * main
        average.mul_(beta1).add_((1 - beta1) * gradient)
        square.mul_(beta2).add_((1 - beta2) * gradient * gradient)
        divisors = (1 - beta1 ** group["step"], 1 - beta2 ** group["step"]) if corrected else (1.0, 1.0)
        update = (average / divisors[0]) / ((square / divisors[1]).sqrt() + group["eps"])
        if self.adam_w_mode:
            update += group["weight_decay"] * main
        main.sub_(group["lr"] * update)

    def _has_halves(self, parameter: torch.Tensor, name: str) -> bool:
        return self.store_param_remainders and name == "master_param" and parameter.dtype == torch.bfloat16

    def _is_scaled(self, name: str) -> bool:
        return self.name_to_dtype_map[name] != torch.float32

    def _initialize_state(self, parameter: torch.Tensor, name: str, halves: bool) -> None:
        dtype = torch.int16 if halves else self.name_to_dtype_map[name]
        if dtype == torch.uint8:
            made: torch.Tensor = Float8Quantizer().make_empty(parameter.shape)
            made.copy_(torch.zeros(parameter.shape))
        else:
            made = torch.zeros_like(parameter, dtype=dtype)
        self.state[parameter][name] = made
        if self._is_scaled(name):
            self._scales.setdefault(parameter, {})[name] = torch.ones(1)

    def _apply_scale(self, name: str, unscaled: torch.Tensor, stored: torch.Tensor, scale: torch.Tensor) -> None:
        """Store `unscaled`, which is spoilt, in place, with a new scale."""
        assert unscaled.dtype == torch.float32
        dtype = self.name_to_dtype_map[name]
        if stored.dtype == torch.bfloat16:
            stored.copy_(unscaled.bfloat16())
            return
        smallest, largest = torch.aminmax(unscaled)
        torch.div(torch.maximum(-smallest, largest), torch.full([1], _LARGEST[dtype]), out=scale)
        if dtype == torch.uint8:
            assert isinstance(stored, Float8Tensor)
            stored._quantizer.scale.copy_(1 / scale)
        else:
            assert stored.dtype == dtype
            unscaled.mul_(torch.where(scale > 0, scale.reciprocal(), 0.0))
        stored.copy_(unscaled)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _is_tensor(item: tuple[str, Any]) -> bool:
    return isinstance(item[1], torch.Tensor)


@contextmanager
def emulated_fused_adam() -> Iterator[None]:
    """Have Megatron use `FusedAdam` within this context, as if Transformer Engine were installed. Imports Megatron."""
    package: Any = importlib.import_module("megatron.core.optimizer")
    distributed: Any = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    config: Any = importlib.import_module("megatron.core.optimizer.optimizer_config")
    reason = "what Megatron finds when Transformer Engine is installed"
    found = [
        Replacement(owner, name, value, reason, may_be_absent=True)
        for owner in (package, distributed)
        for name, value in (
            ("Adam", FusedAdam),
            ("USING_PYTORCH_OPTIMIZER", False),
            ("USING_TE_OPTIMIZER", True),
            ("HAVE_APEX_OR_TE", True),
        )
    ]
    for owner in (package, config):
        found.append(Replacement(owner, "is_te_min_version", lambda version, **_: True, "that of a late release"))
    reason = "skips what is no tensor of a checkpoint, from 0.17 on: without that no checkpoint can be loaded"
    loads = distributed.DistributedOptimizer._set_main_param_and_optimizer_states
    found.append(
        Replacement(
            distributed.DistributedOptimizer,
            loads.__name__,
            lambda self, parameter, values: loads(self, parameter, dict(filter(_is_tensor, values.items()))),
            reason,
        )
    )
    name = "transformer_engine.pytorch.optimizers"  # which is looked for before the optimizer is made
    module = ModuleType(name)
    module.FusedAdam = FusedAdam  # type: ignore[attr-defined]
    present = sys.modules.get(name)
    sys.modules[name] = module
    try:
        with Replaced(found):
            yield
    finally:
        sys.modules.pop(name) if present is None else sys.modules.update({name: present})
