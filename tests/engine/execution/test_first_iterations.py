# SPDX-License-Identifier: Apache-2.0
"""Iterations that find their devices cold run stock's order with whole backwards, and have stock's numbers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.four_stages import FOUR, WHOLE_FIRST
from support.processes import RankResult

from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.control.deciders.plan_state import PlanState
from adaptra_megatron.engine.pipeline import FirstIterations
from adaptra_megatron.schedule.classic import split_backward, stock_order
from adaptra_megatron.schedule.csv_format import schedule_to_csv
from adaptra_megatron.schedule.simulator import peak_in_flight
from testing.jobs.variants import Variant, VariantReport, check_equal

PROGRAM = str(Path(__file__).with_name("cold_devices.py"))
ITERATIONS, MICRO_BATCHES = 6, 8
SHAPE = (4, 2, 8)


def call(forward_only: bool = False, message_shape: tuple[int, ...] | None = SHAPE, micro_batches: int = 8) -> Any:
    return SimpleNamespace(forward_only=forward_only, message_shape=message_shape, micro_batches=micro_batches)


def test_each_kind_of_iteration_is_cold_once_and_ends_with_a_wait_for_the_device() -> None:
    waits: list[int] = []
    first = FirstIterations(lambda: waits.append(len(cold)))
    cold: list[bool] = []
    kinds = [
        call(),
        call(),
        call(True),
        call(True),
        call(message_shape=None),
        call(micro_batches=4),
        call(),
        call(True),
    ]
    for each in kinds:
        first.begin(each)
        cold.append(first.cold)
        first.end()
    assert cold == [True, False, True, False, True, True, False, False]
    assert waits == [1, 3, 5, 6]


def test_where_computation_blocks_the_host_no_iteration_is_cold() -> None:
    first = FirstIterations(None)
    first.begin(call())
    first.end()
    assert not first.cold


class TestWhatRuns:
    def test_is_stocks_order_with_whole_backwards_whatever_is_planned(self) -> None:
        stock = stock_order(4, 12)
        for layout in (FOUR, WHOLE_FIRST):
            book = PlanState(AdaptraConfig(), layout)
            assert book.whole_schedule(12) == stock
            book.install(split_backward(stock, 2), 1, (None,) * 4)
            assert book.whole_schedule(12) == stock

    def test_is_another_where_stocks_would_hold_too_much(self) -> None:
        book = PlanState(AdaptraConfig(max_in_flight=2), FOUR)
        schedule = book.whole_schedule(12)
        assert not schedule.splits_backward
        assert max(peak_in_flight(schedule, 0.0)) == 2


@pytest.mark.timeout(120)
@pytest.mark.parametrize("flags", ["", "--variable-seq-lengths"], ids=["one shape", "varying shapes"])
def test_training_on_cold_devices_is_bitwise_stocks(
    flags: str, tmp_path: Path, start_ranks: Callable[..., list[RankResult]]
) -> None:
    arguments = (
        f"--pipeline-model-parallel-size 2 --num-layers 2 --mock-data --train-iters {ITERATIONS} {flags} "
        f"--no-gradient-accumulation-fusion --global-batch-size {MICRO_BATCHES} --eval-iters 1 --eval-interval 3"
    ).split()
    late = split_backward(stock_order(2, MICRO_BATCHES), None)
    plan = tmp_path / "late.csv"
    plan.write_text(schedule_to_csv(late))
    wanted = [
        Variant("stock", tuple(arguments)),
        Variant("measured", (*arguments, "--adaptra"), like="stock"),
        Variant("from a file", (*arguments, "--adaptra", "--adaptra-plan-csv", str(plan)), like="stock"),
    ]
    request, report, waits = tmp_path / "variants.json", tmp_path / "report.json", tmp_path / "waits"
    request.write_text(json.dumps([asdict(variant) for variant in wanted]))
    waits.mkdir()
    start_ranks(2, [PROGRAM, str(request), str(report), str(waits)], timeout_s=100)
    reports = [VariantReport(**entry) for entry in json.loads(report.read_text())]
    check_equal(reports)
    whole, planned = (
        hashlib.sha256(schedule_to_csv(schedule).encode()).hexdigest()[:16]
        for schedule in (stock_order(2, MICRO_BATCHES), late)
    )
    for each, later in zip(reports[1:], (None, planned), strict=True):
        for rank in each.plans:
            ran = [fingerprint for _number, fingerprint in rank]
            assert ran[0] == whole
            assert whole != ran[1], "backwards are split, to be measured"
            assert later is None or set(ran[1:]) == {later}
        assert all(rank["split_weight_gradients"] > 0 for rank in each.adaptra)
    for rank in range(2):
        reported = [int(line) for line in (waits / f"rank_{rank}").read_text().split()]
        assert reported == [0, 3] * 2, "in the first training iteration and the first evaluation of each variant"
