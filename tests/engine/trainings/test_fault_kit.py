# SPDX-License-Identifier: Apache-2.0
"""A referee that is not ours: what lm-resiliency's fault kit delays, `adaptra status` names."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes import RankResult

from adaptra_megatron.tools.cli.main import main

SCRIPT = str(Path(__file__).with_name("kit_ranks.py"))
KIT = "lm-resiliency==0.2.0"
DELAYED = 20


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    """The folder that the kit is installed in, next to the torch and Megatron that are there."""
    folder = tmp_path / "kit"
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), KIT)
    done = subprocess.run(pip, capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        pytest.skip(f"{KIT} cannot be installed here: {done.stderr.strip()[-200:]}")
    return folder


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_rank_that_is_delayed_is_named(
    kit: Path,
    tmp_path: Path,
    start_ranks: Callable[..., list[RankResult]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On a busy machine others may have been slow in truth, and its other actions before: they are not judged."""
    run = tmp_path / "run"
    training = (
        "--pipeline-model-parallel-size 2 --num-layers 2 --mock-data --no-gradient-accumulation-fusion "
        f"--global-batch-size 4 --train-iters 50 --emulate-prompt-planner --adaptra --adaptra-trace-dir {run}"
    )
    start_ranks(2, [SCRIPT, str(kit), *training.split()], timeout_s=200)
    assert main(["status", str(run), "--json"]) == 3
    stages = {
        each["stage"]: each for each in json.loads(capsys.readouterr().out)["findings"] if each["kind"] == "stage"
    }
    # An iteration is named where it is not that of the whole stage.
    forward = re.search(r"F of chunk 0 takes [\d.]+ ms(?: since iteration (\d+))?,", stages[1]["reason"])
    assert forward is not None, stages[1]["reason"]
    assert DELAYED <= int(forward[1] or stages[1]["since_iteration"]) <= DELAYED + 2
