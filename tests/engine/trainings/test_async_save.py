# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are written in the background while a link's device path fails, and while a writer is killed: the
training goes on with stock's numbers, and stock goes on from the checkpoint that is complete."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from support.processes import RankResult

from testing.jobs.variants import Variant, VariantReport, check_equal

SCRIPT = str(Path(__file__).with_name("async_save_ranks.py"))
ITERATIONS = 8


@pytest.mark.timeout(120)
def test_saved_in_the_background_while_a_path_fails(
    tmp_path: Path, start_ranks: Callable[..., list[RankResult]]
) -> None:
    arguments = (
        "--pipeline-model-parallel-size 2 --num-layers 2 --mock-data --no-gradient-accumulation-fusion "
        f"--global-batch-size 4 --train-iters {ITERATIONS}"
    ).split()
    saved = tmp_path / "checkpoints"
    ours = f"--adaptra --adaptra-policy observe --adaptra-host-transport shm --save {saved} --save-interval 3".split()
    wanted = [
        Variant("stock", tuple(arguments)),
        Variant("saves", (*arguments, *ours), like="stock"),
        Variant("stock goes on", (*arguments, "--load", str(saved))),
    ]
    request, report = tmp_path / "variants.json", tmp_path / "report.json"
    request.write_text(json.dumps([asdict(variant) for variant in wanted]))
    start_ranks(2, [SCRIPT, str(request), str(report), str(tmp_path)], timeout_s=100)
    reports = [VariantReport(**entry) for entry in json.loads(report.read_text())]
    check_equal(reports)
    for rank in range(2):
        noted = (tmp_path / f"noted{rank}").read_text().splitlines()
        assert noted == [
            "writer of 3 is a fork: True",
            "path failed: 1",
            "3 complete after 2 iterations",
            "writer of 6 is a fork: True",
            "6 failed: CheckpointException",
        ]
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == "3\n"
    stock, _, resumed = reports
    assert resumed.losses == stock.losses[3:]
    assert resumed.fingerprints == stock.fingerprints
