# SPDX-License-Identifier: Apache-2.0
"""Jobs end cleanly though nothing is undone: threads that wait in native code must not meet a dying interpreter."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes import TRAIN_GPT, RankResult, run_ranks

SCRIPT = str(Path(__file__).with_name("never_undone.py"))
RAISING = str(Path(__file__).with_name("raising_action.py"))
SOON_S = 10.0


@pytest.mark.timeout(90)
def test_job_ends_cleanly_without_undo(tmp_path: Path) -> None:
    arguments = (
        "--emulate-cpu --mock-data --pipeline-model-parallel-size 2 --num-layers 2 --train-iters 5 "
        "--global-batch-size 4 --no-gradient-accumulation-fusion --adaptra"
    )
    # Not forked from the server: how a plain interpreter shuts down is what counts here.
    results = run_ranks(2, [SCRIPT, TRAIN_GPT, *arguments.split()], timeout_s=80, log_directory=tmp_path)
    for result in results:
        assert result.returncode == 0, result.output
        assert "terminate called" not in result.output
    assert "iteration        5/" in results[1].output


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("rank", "action", "sizes", "flags"),
    [
        (0, 0, "pp 4", ""),
        (2, 11, "pp 4", "--adaptra-host-transport off"),
        (1, 40, "pp 2 dp 2", ""),
    ],
)
def test_an_error_in_one_rank_ends_all_soon(
    rank: int, action: int, sizes: str, flags: str, tmp_path: Path, start_ranks: Callable[..., list[RankResult]]
) -> None:
    stages, micro_batches = int(sizes.split()[1]), 8
    arguments = (
        f"--mock-data --pipeline-model-parallel-size {stages} --num-layers {stages} --train-iters 9 "
        f"--global-batch-size {micro_batches * 4 // stages} --no-gradient-accumulation-fusion --adaptra {flags}"
    )
    program = [RAISING, str(rank), str(action), *arguments.split()]
    results = start_ranks(4, program, timeout_s=60, check=False, stop_on_failure=False)
    ended_s = time.monotonic()
    (raised,) = re.findall(r"^raised at (.*)$", results[rank].output, re.MULTILINE)
    assert ended_s - float(raised) < SOON_S
    for result in results:
        assert result.returncode > 0, f"rank {result.rank} ended with {result.returncode}: {result.output}"
        assert "[c10d]" not in result.output, result.output
    assert "ArithmeticError: as a model's own code would" in results[rank].output
