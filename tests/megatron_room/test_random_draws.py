# SPDX-License-Identifier: Apache-2.0
"""Where random numbers are others than stock's, one line of a job's log says so and names the flags; elsewhere none."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.transformer import TransformerConfig

from adaptra_megatron.megatron.state.random_draws import (
    DRAWS,
    NO_STOCHASTIC_ROUNDING,
    flags_drawn_in_other_order,
    shares_amax_history,
)
from adaptra_megatron.schedule.classic import stock_order
from adaptra_megatron.schedule.csv_format import schedule_to_csv
from testing.jobs.fork_server import ForkServer
from testing.jobs.variants import Variant, check_equal, run_variants

ON: dict[str, Any] = {
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "moe_input_jitter_eps": 0.01,
    "moe_router_force_load_balancing": True,
    "moe_router_force_biased": 1.0,
    "fp4": "e2m1",
}
OF_LATER_RELEASES = {"moe_router_force_biased"}
DEFAULTS = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
NONE = {**DEFAULTS, "hidden_dropout": 0.0, "attention_dropout": 0.0}


def flags(chunks: int, **settings: Any) -> tuple[str, ...]:
    return flags_drawn_in_other_order(SimpleNamespace(**NONE | settings), chunks)


@pytest.mark.parametrize(("name", "draw"), list(zip(ON, DRAWS, strict=True)), ids=list(ON))
def test_each_flag_is_named_where_chunks_share_its_stream(name: str, draw: Any) -> None:
    assert name in DEFAULTS or name in OF_LATER_RELEASES
    assert flags(2) == ()
    assert flags(2, **{name: ON[name]}) == (draw.flag,)
    assert flags(1, **{name: ON[name]}) == (), "F and B of one chunk each keep stock's order"


def test_forwards_and_backwards_that_draw_share_a_stream_in_one_chunk_too(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"fp4": "e2m1", "hidden_dropout": 0.1}
    assert flags(1, **settings) == ("--hidden-dropout", "--fp4-format")
    monkeypatch.setenv(NO_STOCHASTIC_ROUNDING, "1")
    assert flags(1, **settings) == ()
    assert flags(2, **settings) == ("--hidden-dropout",)


def scales(order: str, length: int, by_maximum: bool) -> list[float]:
    """Of a stand-in of delayed scaling with a layer in each of two chunks: what each forward is scaled by.

    As Transformer Engine's `delayed_scaling_update`: whenever a forward ends the windows of all layers move on by one,
    those of layers that did not run by a zero; where what counts of a window is zero the scale stays.
    """
    windows, scale, runs, seen = [[0.0] * length] * 2, [1.0] * 2, [0, 0], []
    for chunk in map(int, order):
        seen.append((chunk, runs[chunk], scale[chunk]))
        amax = [0.0, 0.0]
        amax[chunk] = float((7 * runs[chunk] + 3 * chunk) % 11 + 1)
        runs[chunk] += 1
        windows = [[new, *window][:length] for new, window in zip(amax, windows, strict=True)]
        found = [max(window) if by_maximum else window[0] for window in windows]
        scale = [new or old for new, old in zip(found, scale, strict=True)]
    return [each for _chunk, _run, each in sorted(seen)]


@pytest.mark.parametrize(("algorithm", "length"), [("max", 4), ("max", 1), ("most_recent", 4)])
def test_windows_of_scales_are_stocks_unless_chunks_share_them(algorithm: str, length: int) -> None:
    config = SimpleNamespace(
        fp8="e4m3", fp8_recipe="delayed", fp8_amax_compute_algo=algorithm, fp8_amax_history_len=length
    )
    stock, planned = (scales(order, length, algorithm == "max") for order in ("0011" * 4, "0001110100111001"))
    assert (stock != planned) is shares_amax_history(config, 2)
    assert not shares_amax_history(config, 1)
    config.fp8_recipe = "mxfp8"
    assert not shares_amax_history(config, 2)


def test_biases_that_are_drawn_once_are_stocks() -> None:
    assert flags(2, moe_router_force_biased=-1.0) == ()


TRAINING = (
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4 --mock-data "
    "--no-gradient-accumulation-fusion --global-batch-size 4 --train-iters 2 --hidden-dropout 0.1 "
    "--attention-dropout 0.1"
)


def test_one_line_per_job_and_stocks_order_has_stocks_masks(tmp_path: Path, fork_server: ForkServer) -> None:
    training = tuple(TRAINING.split())
    other_order = tmp_path / "plan.csv"
    other_order.write_text(schedule_to_csv(stock_order(2, 4, chunks=2, group_size=4)))
    variants = [
        Variant("stock", training),
        Variant("observe", (*training, "--adaptra", "--adaptra-policy", "observe"), like="stock"),
        Variant("adapt", (*training, "--adaptra", "--adaptra-plan-csv", str(other_order))),
    ]
    reports = run_variants(2, variants, timeout_s=120, server=fork_server, directory=tmp_path)
    check_equal(reports)
    assert reports[0].losses != reports[2].losses, "another order draws other masks: else there is nothing to warn of"
    logs = [(tmp_path / f"rank{rank}.log").read_text() for rank in range(2)]
    warning = "adaptra: --hidden-dropout, --attention-dropout: results with these random numbers equal"
    assert [log.count(warning) for log in logs] == [1, 0]
    assert warning not in logs[0].partition("variant adapt")[0]
