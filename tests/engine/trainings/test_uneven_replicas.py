# SPDX-License-Identifier: Apache-2.0
"""Replicas with different numbers of micro-batches train as in stock, also around a slow link."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from support.processes import RankResult

from testing.jobs.variants import Variant, VariantReport, check_equal

SCRIPT = str(Path(__file__).with_name("uneven_ranks.py"))
ITERATIONS = 8


@pytest.mark.timeout(120)
def test_replicas_with_4_and_3_micro_batches(tmp_path: Path, start_ranks: Callable[..., list[RankResult]]) -> None:
    stock = (
        "--pipeline-model-parallel-size 2 --num-layers 2 --mock-data --no-gradient-accumulation-fusion "
        f"--global-batch-size 8 --train-iters {ITERATIONS}"
    ).split()
    slow = "--adaptra --adaptra-host-transport shm --emulate-slow-link 0-1:latency_ms=20,from=3,path=both"
    wanted = [
        Variant("stock", tuple(stock)),
        Variant("stock, overlapped", (*stock, "--overlap-grad-reduce")),
        Variant("healthy", (*stock, "--adaptra"), like="stock"),
        Variant("slow", (*stock, *slow.split()), like="stock"),
        Variant("slow, overlapped", (*stock, "--overlap-grad-reduce", *slow.split()), like="stock, overlapped"),
    ]
    request, report = tmp_path / "variants.json", tmp_path / "report.json"
    request.write_text(json.dumps([asdict(variant) for variant in wanted]))
    start_ranks(4, [SCRIPT, str(request), str(report)], timeout_s=100)
    reports = [VariantReport(**entry) for entry in json.loads(report.read_text())]
    check_equal(reports)
    by_rank = [[rank["training_iterations"] for rank in entry.adaptra] for entry in reports if entry.adaptra]
    assert by_rank == [[ITERATIONS] * 4] * 3
