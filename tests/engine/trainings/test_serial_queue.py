# SPDX-License-Identifier: Apache-2.0
"""Jobs with one serial hardware queue in which the host path does not come up on every rank train as stock does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from support.processes import RankResult

from testing.jobs.variants import Variant, VariantReport, check_equal

ITERATIONS = 4
SCRIPT = str(Path(__file__).with_name("serial_queue_ranks.py"))


@pytest.mark.timeout(150)
def test_without_the_host_path_on_one_rank_all_run_stocks_schedule(
    tmp_path: Path, start_ranks: Callable[..., list[RankResult]]
) -> None:
    """Also the pipelines that have it: what the ranks of a job do together, all of them do."""
    arguments = (
        f"--pipeline-model-parallel-size 2 --num-layers 2 --mock-data --train-iters {ITERATIONS} "
        "--no-gradient-accumulation-fusion --global-batch-size 8 --eval-iters 1 --eval-interval 2"
    ).split()
    wanted = [
        Variant("stock", tuple(arguments)),
        Variant("adapt", (*arguments, "--adaptra"), like="stock"),
    ]
    request, report = tmp_path / "variants.json", tmp_path / "report.json"
    request.write_text(json.dumps([asdict(variant) for variant in wanted]))
    results = start_ranks(4, [SCRIPT, str(request), str(report)], timeout_s=140)
    reports = [VariantReport(**entry) for entry in json.loads(report.read_text())]
    check_equal(reports)
    for rank in reports[1].adaptra:
        assert rank["training_iterations"] == ITERATIONS
        assert rank["split_weight_gradients"] == 0
    said = "".join(result.output for result in results)
    assert "links between stages have one path, torch.distributed's: the host path cannot be set up" in said
    assert said.count("the host path did not come up on all ranks, and by NCCL alone") == 1
