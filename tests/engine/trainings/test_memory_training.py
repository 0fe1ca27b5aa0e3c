# SPDX-License-Identifier: Apache-2.0
"""A training whose stages have different, changing memory: plans use what there is, and never more."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROGRAM = str(Path(__file__).with_name("memory_ranks.py"))
STAGES, MICRO_BATCHES, ITERATIONS, COMPUTE_MS, LATENCY_MS = 4, 12, 22, 5, 40
ROOM, SHRINKS, TAKEN = (9.5, 9.5, 5.5, 3.5), 12, 4
"""Activations that stages have memory for; stage 1 for so many less from an iteration on."""
MESSAGES_HELD = 0.15
"""Messages on their way, in activations."""
JUDGED = 4
"""Iterations at the end: a planner process on a busy machine may take a few until its plan is there."""


@pytest.mark.timeout(90)
def test_plans_use_the_memory_of_each_stage_and_never_more(start_ranks: Callable[..., Any], tmp_path: Path) -> None:
    arguments = (
        f"--pipeline-model-parallel-size {STAGES} --num-layers {STAGES} --global-batch-size {MICRO_BATCHES} "
        f"--mock-data --no-gradient-accumulation-fusion --hidden-size 32 --seq-length 16 --train-iters {ITERATIONS} "
        f"--emulate-prompt-planner --emulate-exact-times --emulate-compute-ms {COMPUTE_MS},{COMPUTE_MS},{COMPUTE_MS} "
        f"--emulate-slow-link 1-2:latency_ms={LATENCY_MS},path=both --adaptra "
        f"--adaptra-trace-dir {tmp_path / 'run'}"
    )
    story = json.dumps({"room": ROOM, "shrinks": SHRINKS, "taken": TAKEN, "directory": str(tmp_path)})
    start_ranks(STAGES, [PROGRAM, story, *arguments.split()], timeout_s=80.0)
    ranks = [json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(STAGES)]
    for stage, rank in enumerate(ranks):
        held = rank["held"]
        assert held[:2] == pytest.approx([STAGES - stage] * 2, abs=MESSAGES_HELD), "stock's order, before it is known"
        assert max(held) <= ROOM[stage] + MESSAGES_HELD
        assert rank["plans"] == ranks[0]["plans"]
    assert max(ranks[0]["held"]) > STAGES + 1, "the slow link is covered with memory that stock leaves unused"
    before, after = ranks[1]["held"][SHRINKS - 1], ranks[1]["held"][-JUDGED:]
    assert before > ROOM[1] - TAKEN + MESSAGES_HELD, "else there is nothing to give back"
    assert max(after) <= ROOM[1] - TAKEN + MESSAGES_HELD
    # Not the training's log, which leaves lines out where noise makes many plans.
    assert any("has memory for 5" in log.read_text() for log in (tmp_path / "run").glob("events-*.jsonl"))
