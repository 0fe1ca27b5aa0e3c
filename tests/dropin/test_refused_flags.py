# SPDX-License-Identifier: Apache-2.0
"""What --adaptra does not run with is an error of Megatron-LM's own command line, by the names that this has for it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.pretrain import CHECKOUT, LAUNCHER, needs_megatron_lm
from support.processes import run_ranks
from support.start_up import check_start_up_line

pytestmark = needs_megatron_lm

REFUSED = {
    ("--cuda-graph-impl", "local"): "CUDA graphs of layers that Megatron makes itself (--cuda-graph-impl local)",
    ("--enable-cuda-graph",): "CUDA graphs of layers that Megatron makes itself (--cuda-graph-impl local)",
    ("--hybrid-context-parallel",): "hybrid context parallelism (--hybrid-context-parallel)",
    ("--use-megatron-fsdp",): "FSDP (--use-megatron-fsdp, --use-torch-fsdp2)",
    ("--use-torch-fsdp2",): "FSDP (--use-megatron-fsdp, --use-torch-fsdp2)",
    ("--inprocess-restart",): "in-process restarts (--inprocess-restart)",
    (
        "--pipeline-model-parallel-comm-backend",
        "ucc",
    ): "UCC between stages (--pipeline-model-parallel-comm-backend ucc)",
}
MOST_ABSENT = 4
"""Flags that a release may lack, because they came later or went; 0.16.1 has all of them."""
ACCEPTED = [
    (),
    ("--context-parallel-size", "2"),
    ("--sequence-parallel",),
    ("--log-straggler",),
    ("--timing-log-level", "2"),
    ("--recompute-granularity", "selective"),
    ("--mtp-num-layers", "1"),
    ("--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute"),
    ("--fine-grained-activation-offloading",),
]


def line(*flags: str) -> tuple[str, ...]:
    return ("--adaptra", "--pipeline-model-parallel-size", "2", *flags)


def test_refused_and_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_start_up_line()
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT), prepend=os.pathsep)
    lines = [line(*flags) for flags in (*REFUSED, *ACCEPTED)]
    lines.append(("--adaptra", "--pipeline-model-parallel-size", "1"))
    asked, answered = tmp_path / "lines.json", tmp_path / "reported.json"
    asked.write_text(json.dumps(lines))
    script = Path(__file__).with_name("refused_flags.py")
    run_ranks(
        1,
        [*LAUNCHER, str(script), str(asked), str(answered), "--adaptra"],
        timeout_s=100,
        log_directory=tmp_path / "logs",
    )
    reported = dict(zip(lines, json.loads(answered.read_text()), strict=True))
    absent = 0
    for flags, feature in REFUSED.items():
        answer = reported[line(*flags)]
        assert answer["status"] == 2, flags
        if "unrecognized arguments" in answer["said"]:
            absent += 1
            continue
        assert f"error: --adaptra does not run with {feature}" in answer["said"], flags
        assert "Drop one of the two" in answer["said"], flags
    for flags in ACCEPTED:
        assert reported[line(*flags)]["status"] == 0, flags
    assert absent <= MOST_ABSENT
    assert reported[lines[-1]]["status"] == 0, "a single stage"
