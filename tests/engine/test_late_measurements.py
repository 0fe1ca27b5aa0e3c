# SPDX-License-Identifier: Apache-2.0
"""A device that comes to the end of an iteration long after that was launched: nothing waits for it in between."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adaptra_megatron.telemetry.trace import read_trace, trace_path

PROGRAM = str(Path(__file__).with_name("late_device.py"))
STAGES, MICRO_BATCHES, ITERATIONS = 2, 6, 12


@pytest.mark.timeout(90)
def test_gradients_are_finalized_before_the_device_is_waited_for(
    start_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    output, run = tmp_path / "happened.json", tmp_path / "run"
    arguments = (
        f"--pipeline-model-parallel-size {STAGES} --num-layers {STAGES} --global-batch-size {MICRO_BATCHES} "
        f"--mock-data --no-gradient-accumulation-fusion --hidden-size 32 --seq-length 16 --train-iters {ITERATIONS} "
        f"--emulate-prompt-planner --emulate-compute-ms 5,5,5 --emulate-slow-link 0-1:latency_ms=40 "
        f"--adaptra --adaptra-max-in-flight 6 "
        f"--adaptra-trace-dir {run}"
    )
    start_ranks(STAGES, [PROGRAM, str(output), *arguments.split()], timeout_s=80.0)
    reported = json.loads(output.read_text())
    each = [["run", "finalize", "resolve", f"post {number}"] for number in range(ITERATIONS)]
    assert reported["happened"] == [what for iteration in each for what in iteration]
    plans = [number for number, _fingerprint in reported["plans"]]
    assert plans[0] < plans[-1], "what was measured is planned for"
    for rank in range(STAGES):
        records = read_trace(trace_path(run, rank)).records
        assert {record.iteration for record in records} == set(range(ITERATIONS)), "the last one, too"
