# SPDX-License-Identifier: Apache-2.0
"""Callers that pass a communicator and process groups of their own get stock's numbers too, and can use them for
messages of their own between iterations. With two chunks each call comes after one that is refused, as stock does it,
for its number of micro-batches: its links stay as they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from support.processes import RankResult

from testing.jobs.variants import Variant, VariantReport, check_equal

SCRIPT = str(Path(__file__).with_name("explicit_groups.py"))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("chunks", [1, 2])
def test_process_groups_of_the_caller(
    chunks: int, tmp_path: Path, start_ranks: Callable[..., list[RankResult]]
) -> None:
    virtual = f"--num-virtual-stages-per-pipeline-rank {chunks}" if chunks > 1 else ""
    arguments = (
        f"--pipeline-model-parallel-size 2 --num-layers {2 * chunks} {virtual} --mock-data --train-iters 6 "
        "--no-gradient-accumulation-fusion --global-batch-size 8 --eval-iters 1 --eval-interval 3"
    ).split()
    wanted = [
        Variant("stock", tuple(arguments)),
        Variant("measured", (*arguments, "--adaptra"), like="stock"),
        Variant("observe", (*arguments, "--adaptra", "--adaptra-policy", "observe"), like="stock"),
        Variant("two paths", (*arguments, "--adaptra", "--adaptra-host-transport", "auto"), like="stock"),
    ]
    request, report = tmp_path / "variants.json", tmp_path / "report.json"
    request.write_text(json.dumps([asdict(variant) for variant in wanted]))
    start_ranks(2, [SCRIPT, str(request), str(report)], timeout_s=100)
    reports = [VariantReport(**entry) for entry in json.loads(report.read_text())]
    check_equal(reports)
    assert [rank["training_iterations"] for entry in reports for rank in entry.adaptra] == [6] * 6
