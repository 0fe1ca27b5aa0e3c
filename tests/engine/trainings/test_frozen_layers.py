# SPDX-License-Identifier: Apache-2.0
"""Layers that are not trained have no weight gradients: models with adapters (LoRA), and with a frozen first chunk, get
stock's numbers in split and planned orders; weight gradients of adapters are split."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from support.processes import RankResult

from adaptra_megatron.schedule.classic import split_backward, stock_order
from adaptra_megatron.schedule.csv_format import schedule_to_csv
from testing.jobs.variants import Variant, VariantReport, check_equal

SCRIPT = str(Path(__file__).with_name("frozen_ranks.py"))
STAGES, MICRO_BATCHES, ITERATIONS = 2, 8, 6
ADAPTERS = 4
"""Adapters of a transformer layer, of two linear layers each."""


@pytest.mark.timeout(150)
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("what", ["adapters", "stage"])
def test_trained_in_part(what: str, chunks: int, tmp_path: Path, start_ranks: Callable[..., list[RankResult]]) -> None:
    virtual = f"--num-virtual-stages-per-pipeline-rank {chunks}" if chunks > 1 else ""
    arguments = (
        f"--pipeline-model-parallel-size {STAGES} --num-layers {STAGES * chunks} {virtual} --mock-data "
        f"--no-gradient-accumulation-fusion --global-batch-size {MICRO_BATCHES} --train-iters {ITERATIONS} "
        "--untie-embeddings-and-output-weights --eval-iters 1 --eval-interval 3 --hidden-dropout 0"
    ).split()
    order = tmp_path / "order.csv"
    order.write_text(schedule_to_csv(split_backward(stock_order(STAGES, MICRO_BATCHES, chunks), None)))
    wanted = [
        Variant("stock", tuple(arguments)),
        Variant("measured", (*arguments, "--adaptra"), like="stock"),
        Variant("w-at-the-end", (*arguments, "--adaptra", "--adaptra-plan-csv", str(order)), like="stock"),
        Variant("online", (*arguments, "--adaptra", "--adaptra-dispatch", "online"), like="stock"),
    ]
    request, report = tmp_path / "variants.json", tmp_path / "report.json"
    request.write_text(json.dumps([asdict(variant) for variant in wanted]))
    start_ranks(STAGES, [SCRIPT, what, str(request), str(report)], timeout_s=140)
    reports = [VariantReport(**entry) for entry in json.loads(report.read_text())]
    check_equal(reports)
    split = [rank["split_weight_gradients"] for rank in reports[2].adaptra]
    if what == "adapters":
        assert split == [2 * ADAPTERS * chunks * MICRO_BATCHES * ITERATIONS] * STAGES
    else:
        assert (split[0] == 0) == (chunks == 1)
        assert split[1] > 0
