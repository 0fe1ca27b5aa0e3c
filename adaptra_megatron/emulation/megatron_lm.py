# SPDX-License-Identifier: Apache-2.0
"""Runs a script of a Megatron-LM checkout, as it is, on the CPU and over gloo.

    torchrun --nproc-per-node 2 -m adaptra_megatron.emulation.megatron_lm build/megatron-lm/pretrain_gpt.py \
        --distributed-backend gloo --transformer-impl local ... [--adaptra]

It is the same program with and without --adaptra, and does nothing about it: that flag finds its own way in.
`--dump-state DIR`, in front of the script, writes losses, weights and optimizer state of every rank for comparisons.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.util
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

from adaptra_megatron.emulation.replacing import Replaced, Replacement

CPU_ARGUMENTS = (
    *("--distributed-backend", "gloo", "--transformer-impl", "local", "--attention-backend", "unfused"),
    *("--no-persist-layer-norm", "--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion"),
    *("--no-bias-gelu-fusion", "--no-bias-dropout-fusion", "--no-rope-fusion", "--num-workers", "0"),
)
"""What a CPU without Transformer Engine and apex needs on the command line."""

_KERNELS = "megatron.core.transformer.custom_layers.batch_invariant_kernels"
_KERNEL_FUNCTIONS = (
    *("enable_batch_invariant_mode", "disable_batch_invariant_mode"),
    *("set_batch_invariant_mode", "is_batch_invariant_mode_enabled"),
)


def main() -> None:
    """Take the place of the script that the command line names, and run it as the main program."""
    parser = argparse.ArgumentParser(prog="python -m adaptra_megatron.emulation.megatron_lm", allow_abbrev=False)
    parser.add_argument("--dump-state", default=None, metavar="DIR", help="where to write what the training came to")
    parser.add_argument("script", help="script of a Megatron-LM checkout")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own")
    ours = parser.parse_args()
    sys.argv = [ours.script, *ours.arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(ours.script))
    _prepare()
    with contextlib.ExitStack() as stack:
        if ours.dump_state is not None:
            from adaptra_megatron.emulation.megatron_lm_record import recorded

            stack.enter_context(recorded(ours.dump_state))
        _run(ours.script)


def _run(script: str) -> None:
    # In this module, whose file stays the main program's: processes that Megatron's writer of checkpoints spawns import
    # the main program again, and would not get through the script's imports without what was prepared here.
    exec(compile(Path(script).read_bytes(), script, "exec"), vars(sys.modules["__main__"]))


def _prepare() -> None:
    from adaptra_megatron.emulation.megatron_on_cpu import install

    warnings.filterwarnings("ignore", category=FutureWarning)  # Megatron calls what newer torch renamed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Transformer Engine and apex, which there are not for CPUs
        install()
        Replaced(training_names())


def training_names() -> list[Replacement]:
    """Names of megatron.training that assume CUDA, beyond those of megatron.core. Imports it."""
    if importlib.util.find_spec("triton") is None:
        # A gigabyte, for kernels of CUDA; imported wherever Megatron is initialized.
        sys.modules[_KERNELS] = _without_kernels()
    training: Any = importlib.import_module("megatron.training.training")
    initialize = functools.partial(training.initialize_megatron, allow_no_cuda=True)
    found = [Replacement(training, "initialize_megatron", initialize, "refuses to start without CUDA")]
    if importlib.util.find_spec("megatron.legacy") and importlib.util.find_spec("megatron.legacy.fused_kernels"):
        fused_kernels = importlib.import_module("megatron.legacy.fused_kernels")
        found.append(Replacement(fused_kernels, "load", lambda args: None, "asks nvcc for its version"))
    return found


def _without_kernels() -> ModuleType:
    module = ModuleType(_KERNELS)
    for name in _KERNEL_FUNCTIONS:
        setattr(module, name, lambda *_, **__: False)
    return module


# The writer of checkpoints starts processes that may import this file again.
if __name__ == "__main__":
    main()
