# SPDX-License-Identifier: Apache-2.0
"""Megatron-core 0.16.1 on a CPU-only torch, over gloo.

    from testing.megatron.megatron_on_cpu import cpu_megatron

    with cpu_megatron():
        from megatron.core.models.gpt import GPTModel
        ...

Everything that is replaced stands in one table (`cuda_names.torch_names()` and `megatron_names()`), each with its
reason, and is put back by `undo()`.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from testing.megatron.checkpoint_writers import writer_names
from testing.megatron.cuda_names import torch_names
from testing.replacing import Replaced, Replacement

_MARK = "adaptra_stand_in"
FUSED_WEIGHT_GRADIENT_MODULE = "fused_weight_gradient_mlp_cuda"


class MegatronOnCpuError(RuntimeError):
    """Megatron cannot be run on the CPU in this process; the message names the cause and the remedy."""


class MegatronOnCpu:
    """Megatron-core running on the CPU, until `undo()`. Also a context manager.

    Tensors and modules created meanwhile stay usable after `undo()`; Megatron's functions need the replacements.
    """

    def __init__(self, *, threads: int | None, with_fused_weight_gradient: bool) -> None:
        self._environment = {"TORCHDYNAMO_DISABLE": os.environ.get("TORCHDYNAMO_DISABLE")}
        # jit_fuser is torch.compile: on a CPU it would compile C++ for minutes.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        self._threads = torch.get_num_threads()
        if threads is not None:
            torch.set_num_threads(threads)
        self._fused = with_fused_weight_gradient
        if with_fused_weight_gradient:
            sys.modules[FUSED_WEIGHT_GRADIENT_MODULE] = fused_weight_gradient_module()
        self._torch = Replaced(torch_names())
        torch.cuda._lazy_init.__dict__[_MARK] = self
        self._rng_filter = _WithoutRngWarning()
        logging.getLogger("megatron.core.tensor_parallel.random").addFilter(self._rng_filter)
        self._megatron = Replaced(megatron_names())

    @property
    def replacements(self) -> tuple[Replacement, ...]:
        """All replacements, with reasons."""
        return self._torch.replacements + self._megatron.replacements

    def undo(self) -> None:
        """Undo all replacements, and restore thread count and environment. May be called twice."""
        if not is_installed():
            return
        self._megatron.undo()
        self._torch.undo()
        logging.getLogger("megatron.core.tensor_parallel.random").removeFilter(self._rng_filter)
        if self._fused:
            sys.modules.pop(FUSED_WEIGHT_GRADIENT_MODULE, None)
        torch.set_num_threads(self._threads)
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def __enter__(self) -> MegatronOnCpu:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def cpu_megatron(*, threads: int | None = 1, with_fused_weight_gradient: bool = False) -> MegatronOnCpu:
    """Make Megatron-core importable and runnable on the CPU, until the result's `undo()` or the end of its `with`.

    `threads`: torch's threads in this process (several ranks share the machine's cores); None leaves them.
    `with_fused_weight_gradient`: also provide a replacement of apex's fused weight-gradient kernels, to test
    gradient_accumulation_fusion. Raises MegatronOnCpuError if CUDA is available, if Megatron was imported earlier
    without the replacements, or if they are active.
    """
    if torch.cuda.is_available():
        raise MegatronOnCpuError("this machine has CUDA: run Megatron on it as it is, without --emulate-cpu")
    if is_installed():
        raise MegatronOnCpuError("Megatron already runs on the CPU in this process: undo the first installation before")
    random = sys.modules.get("megatron.core.tensor_parallel.random")
    # Names that Megatron imported by name are bound for good: what it bound tells whether the stand-ins came in time.
    if random is not None and not hasattr(random._lazy_init, _MARK):
        raise MegatronOnCpuError(
            "megatron.core was imported before cpu_megatron() was called and is bound to torch.cuda: call it first"
        )
    return MegatronOnCpu(threads=threads, with_fused_weight_gradient=with_fused_weight_gradient)


def install(*, threads: int | None = 1, with_fused_weight_gradient: bool = False) -> MegatronOnCpu:
    """Do as `cpu_megatron()`, but return the active installation if there is one, as in a process forked from a
    preloaded parent. Raises as it does.
    """
    if is_installed():
        found: MegatronOnCpu = getattr(torch.cuda._lazy_init, _MARK)
        if with_fused_weight_gradient and not found._fused:
            raise MegatronOnCpuError("Megatron runs on the CPU without the fused weight gradient in this process")
        return found
    return cpu_megatron(threads=threads, with_fused_weight_gradient=with_fused_weight_gradient)


def is_installed() -> bool:
    """Return whether the replacements are active in this process."""
    return hasattr(torch.cuda._lazy_init, _MARK)


def megatron_names() -> list[Replacement]:
    """Return replacements of Megatron's own names. Imports Megatron."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Transformer Engine and apex not being installed
        moe_utils: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
        attention: Any = importlib.import_module("megatron.core.transformer.dot_product_attention").DotProductAttention
        latent: Any = importlib.import_module("megatron.core.transformer.multi_latent_attention")
        prediction: Any = importlib.import_module("megatron.core.transformer.multi_token_prediction")
    reason = "takes none of the arguments that Megatron's latent attention has for Transformer Engine's"
    found = [Replacement(attention, "__init__", _with_channels(attention.__init__), reason)]
    if not isinstance(getattr(latent, "TELinear", None), type):
        found.append(Replacement(latent, "HAVE_TE", False, "True without Transformer Engine", may_be_absent=True))
    if hasattr(prediction, "is_inference_column_parallel_linear"):  # from 0.20 on
        reason = "compares with a class of Transformer Engine's, which may be missing"
        asks = Replacement(prediction, "is_inference_column_parallel_linear", lambda module: False, reason)
        found.append(asks)
    if not hasattr(moe_utils, "te_general_gemm"):
        reason = "read, but not defined, without Transformer Engine"
        found.append(Replacement(moe_utils, "te_general_gemm", None, reason, may_be_absent=True))
    return found + offloading_names() + writer_names()


def offloading_names() -> list[Replacement]:
    """Return the replacements for --fine-grained-activation-offloading; none before 0.16. Imports Megatron."""
    engine: Any = importlib.import_module("megatron.core.extensions.transformer_engine")
    if getattr(engine, "cpu_offload", engine) is not None:
        return []
    switch = SimpleNamespace(CPUOffloadEnabled=False)
    return [
        Replacement(engine, "cpu_offload", switch, "offloading switches Transformer Engine's own, and needs no more")
    ]


def _with_channels(stock: Callable[..., None]) -> Callable[..., None]:
    """Wrap the constructor of Megatron's own attention, for values of another width than keys."""

    @functools.wraps(stock)
    def construct(
        self: Any, *given: Any, k_channels: int | None = None, v_channels: int | None = None, **keywords: Any
    ) -> None:
        stock(self, *given, **keywords)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    return construct


def fused_weight_gradient_module() -> ModuleType:
    """Return a replacement of apex's CUDA extension in plain torch: `main_grad += grad_output.T @ input`."""

    def accumulate(total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
        main_grad.add_(grad_output.t().matmul(total_input))

    module = ModuleType(FUSED_WEIGHT_GRADIENT_MODULE)
    module.wgrad_gemm_accum_fp32 = accumulate  # type: ignore[attr-defined]
    module.wgrad_gemm_accum_fp16 = accumulate  # type: ignore[attr-defined]
    return module


class _WithoutRngWarning(logging.Filter):
    """Drops Megatron's warning that the CPU's RNG state changed within a fork of CUDA's: here they are one
    generator.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return "CPU RNG state changed" not in record.getMessage()
