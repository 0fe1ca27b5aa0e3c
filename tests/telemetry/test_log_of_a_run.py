# SPDX-License-Identifier: Apache-2.0
"""The log that ranks of a training leave: few lines, from the lowest rank alone, which tell what happened."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes import REPOSITORY

from adaptra_megatron.tools.local_ranks.launch_ranks import RankResult

STAGES = 3
HEALTHY_ITERATIONS = int(os.environ.get("HEALTHY_ITERATIONS", "250"))
"""1000 take 4 minutes where nothing else runs: then the stages are healthy."""
OURS = re.compile(r"^adaptra: .*|^.*c10d.*", re.MULTILINE)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(580)]


def lines_of(start_ranks: Callable[..., list[RankResult]], iterations: int, compute_ms: float, *more: str) -> list[str]:
    """Our lines of all ranks, and torch's about its network."""
    arguments = (
        f"--emulate-cpu --pipeline-model-parallel-size {STAGES} --num-layers {STAGES} --global-batch-size 6 "
        "--mock-data --no-gradient-accumulation-fusion --hidden-size 16 --num-attention-heads 2 --seq-length 8 "
        f"--train-iters {iterations} --emulate-compute-ms {compute_ms:g},{compute_ms:g},{compute_ms:g} --adaptra "
        "--adaptra-host-transport off --adaptra-max-in-flight 5"
    )
    script = str(REPOSITORY / "scripts" / "train_gpt.py")
    results = start_ranks(STAGES, [script, *arguments.split(), *more], timeout_s=560)
    assert all("adaptra" not in result.output for result in results[1:])
    return OURS.findall(results[0].output)


def test_a_healthy_run_says_less_than_ten_lines(start_ranks: Callable[..., list[RankResult]]) -> None:
    lines = lines_of(start_ranks, HEALTHY_ITERATIONS, 8)
    assert len(lines) < 10, lines
    assert re.fullmatch(r"adaptra: \S+ is asked for, policy adapt", lines[0])
    assert re.fullmatch(r"adaptra: \S+ is on, policy adapt; to train without it, set ADAPTRA_DISABLE=1", lines[1])
    assert re.match(rf"adaptra: done after {HEALTHY_ITERATIONS} iterations: \d+ plans?", lines[-1])


def test_a_slow_link_is_reported_from_its_onset_to_what_the_plan_brought(
    start_ranks: Callable[..., list[RankResult]], tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    slow = f"1>2:latency_ms={60:g},from=40"
    lines = lines_of(start_ranks, 80, 8, "--emulate-slow-link", slow, "--adaptra-trace-dir", str(directory))
    reported = "\n".join(lines)
    onset = re.search(r"iteration (\d+): link 1<->2 is slow since iteration 41: a message of", reported)
    assert onset is not None, reported
    assert 41 <= int(onset[1]) <= 48
    after = reported[onset.start() :]
    assert re.search(r"iteration \d+: plan \d+ in force\b.* ms an iteration expected instead of", after), reported
    measured = r"iteration \d+: plan \d+ takes \d+ ms an iteration, \d+ ms predicted, \d+ ms before"
    assert re.search(measured, after), reported
    assert re.match(r"adaptra: done after 80 iterations: .*link 1<->2 slow since iteration 41", lines[-1])
    assert lines[-1].endswith(f"; adaptra report {directory}")
