# SPDX-License-Identifier: Apache-2.0
"""Runs of Megatron-LM's unmodified pretrain_gpt.py on the CPU. Its sources come by `make megatron`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.processes import REPOSITORY, RankResult, compare_dumps, run_ranks
from support.start_up import check_start_up_line

from testing.megatron.megatron_lm import CPU_ARGUMENTS

CHECKOUT = Path(os.environ.get("MEGATRON_LM", REPOSITORY / "build" / "megatron-lm"))
LAUNCHER = ("-m", "testing.megatron.megatron_lm")

needs_megatron_lm = [
    pytest.mark.megatron_lm,
    pytest.mark.skipif(
        not (CHECKOUT / "pretrain_gpt.py").is_file(), reason=f"no Megatron-LM in {CHECKOUT}: make megatron fetches it"
    ),
]

MODEL = (
    *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "64"),
    *("--max-position-embeddings", "64", "--tokenizer-type", "NullTokenizer", "--vocab-size", "4095"),
)
TRAINING = (
    *("--micro-batch-size", "1", "--global-batch-size", "8", "--train-iters", "4", "--lr", "1e-3", "--seed", "1234"),
    *("--lr-decay-style", "constant", "--log-interval", "1", "--eval-iters", "1", "--eval-interval", "2"),
)
MOCK_DATA = ("--mock-data", "--split", "90,10,0")
# Interleaved chunks draw dropout masks in another order than stock's: see README, Limits.
NO_DROPOUT = ("--attention-dropout", "0", "--hidden-dropout", "0")


def command(
    dump: Path, *arguments: str, training: tuple[str, ...] = TRAINING, emulated: tuple[str, ...] = ()
) -> list[str]:
    """What comes after `python`; of arguments given twice Megatron takes the later. `emulated`: of the launcher."""
    script = str(CHECKOUT / "pretrain_gpt.py")
    return [*LAUNCHER, "--dump-state", str(dump), *emulated, script, *CPU_ARGUMENTS, *MODEL, *training, *arguments]


def pretrain(
    ranks: int,
    dump: Path,
    *arguments: str,
    training: tuple[str, ...] = TRAINING,
    emulated: tuple[str, ...] = (),
    timeout_s: float = 150.0,
    run: Callable[..., list[RankResult]] = run_ranks,
    **environment: str,
) -> list[RankResult]:
    """Train with `arguments` on plain Python processes; `dump` gets what each rank came to. `run`: starts them."""
    check_start_up_line()
    logs = dump.with_name(f"{dump.name}-logs")
    # At its start Megatron calls make, and that the python3 which it finds.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PATH": path, **environment}
    argv = command(dump, *arguments, training=training, emulated=emulated)
    return run(ranks, argv, timeout_s=timeout_s, log_directory=logs, env=env)


def compare_with_stock(ranks: int, directory: Path, *arguments: str, adaptra: tuple[str, ...] = ("--adaptra",)) -> None:
    """Train without and with the flag; fail unless all is bitwise equal, and all of it was run by us."""
    pretrain(ranks, directory / "stock", *arguments)
    pretrain(ranks, directory / "ours", *arguments, *adaptra)
    assert compare_dumps(directory / "stock", directory / "ours") > 10_000
    for rank in range(ranks):
        assert what_ran(directory / "stock", rank)["adaptra"] is None
        assert what_ran(directory / "ours", rank)["adaptra"]["training_iterations"] == 4


def what_ran(dump: Path, rank: int = 0) -> dict[str, Any]:
    """Modules of this package that a rank had imported, and what the runtime summed up."""
    found: dict[str, Any] = json.loads((dump / f"rank{rank}.json").read_text())
    return found
