# SPDX-License-Identifier: Apache-2.0
"""Jobs end cleanly though nothing is undone: threads that wait in native code must not meet a dying interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.processes import TRAIN_GPT, run_ranks

SCRIPT = str(Path(__file__).with_name("never_undone.py"))


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
