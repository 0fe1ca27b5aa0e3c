# SPDX-License-Identifier: Apache-2.0
"""Runs a script of a Megatron-LM checkout, as it is, on the CPU and over gloo.

    torchrun --nproc-per-node 2 -m testing.megatron.megatron_lm build/megatron-lm/pretrain_gpt.py \
        --distributed-backend gloo --transformer-impl local ... [--adaptra]

It is the same program with and without --adaptra, and does nothing about it: that flag finds its own way in.
In front of the script, `--dump-state DIR` writes losses, weights and optimizer state of every rank for comparisons, and
`--emulate-compute-ms F,B,W` has actions last so long, with `--emulate-exact-times` also as measured,
`--emulate-slow-cell` those of some cells longer, and `--emulate-death` kills ranks, so many milliseconds after an
iteration has begun; `--emulate-wait-for-arrivals` has an iteration wait until they have been started again, and
`--emulate-write-ms` has checkpoints of --async-save begin so much later, and `--emulate-data-ms` ranks that are started
again build their datasets so much longer.
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

from testing.faults.deaths import FORM as FORM_OF_DEATH
from testing.faults.slow_cells import FORM
from testing.replacing import Replaced, Replacement

CPU_ARGUMENTS = (
    *("--distributed-backend", "gloo", "--transformer-impl", "local", "--attention-backend", "unfused"),
    *("--no-persist-layer-norm", "--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion"),
    *("--no-bias-gelu-fusion", "--no-bias-dropout-fusion", "--no-rope-fusion", "--num-workers", "0"),
)
"""Command-line arguments that a CPU without Transformer Engine and apex needs."""

_KERNELS = "megatron.core.transformer.custom_layers.batch_invariant_kernels"
_KERNEL_FUNCTIONS = (
    *("enable_batch_invariant_mode", "disable_batch_invariant_mode"),
    *("set_batch_invariant_mode", "is_batch_invariant_mode_enabled"),
)


def main() -> None:
    """Run the script of the command line as the main program, with the stand-ins in place."""
    parser = argparse.ArgumentParser(prog="python -m testing.megatron.megatron_lm", allow_abbrev=False)
    parser.add_argument(
        "--dump-state",
        default=None,
        metavar="DIR",
        help="directory for the final state of every rank",
    )
    parser.add_argument("--emulate-compute-ms", default=None, metavar="F,B,W")
    parser.add_argument("--emulate-slow-cell", action="append", default=[], metavar=FORM)
    parser.add_argument("--emulate-exact-times", action="store_true", help="measured times are the emulated ones")
    parser.add_argument("--emulate-death", action="append", default=[], metavar=FORM_OF_DEATH)
    parser.add_argument("--emulate-wait-for-arrivals", action="append", type=int, default=[], metavar="ITERATION")
    parser.add_argument("--emulate-write-ms", type=float, default=0.0, help="by which writers of --async-save are late")
    parser.add_argument("--emulate-data-ms", type=float, default=0.0, help="by which restarted ranks build data longer")
    parser.add_argument("script", help="script of a Megatron-LM checkout")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    ours = parser.parse_args()
    sys.argv = [ours.script, *ours.arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(ours.script))
    _prepare()
    with contextlib.ExitStack() as stack:
        if ours.dump_state is not None:
            from testing.megatron.megatron_lm_record import recorded

            stack.enter_context(recorded(ours.dump_state))
        if ours.emulate_compute_ms is not None:
            from testing.megatron.megatron_lm_cells import timed_cells

            stack.enter_context(
                timed_cells(ours.emulate_compute_ms, ours.emulate_slow_cell, exact=ours.emulate_exact_times)
            )
        if ours.emulate_death:
            from testing.megatron.megatron_lm_cells import dying_ranks

            stack.enter_context(dying_ranks(ours.emulate_death, ours.emulate_wait_for_arrivals))
        if ours.emulate_write_ms:
            from testing.megatron.megatron_lm_cells import slow_writers

            stack.enter_context(slow_writers(ours.emulate_write_ms / 1e3))
        if ours.emulate_data_ms:
            from testing.megatron.megatron_lm_cells import slow_datasets

            stack.enter_context(slow_datasets(ours.emulate_data_ms / 1e3))
        _run(ours.script)


def _run(script: str) -> None:
    # In this module, whose file stays the main program's: processes that Megatron's writer of checkpoints spawns import
    # the main program again, and would not get through the script's imports without what was prepared here.
    exec(compile(Path(script).read_bytes(), script, "exec"), vars(sys.modules["__main__"]))


def _prepare() -> None:
    from testing.megatron.megatron_on_cpu import install

    warnings.filterwarnings("ignore", category=FutureWarning)  # Megatron calls what newer torch renamed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Transformer Engine and apex, which there are not for CPUs
        install()
        Replaced(training_names())


def training_names() -> list[Replacement]:
    """Return replacements of megatron.training names that assume CUDA. Imports it."""
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
