# SPDX-License-Identifier: Apache-2.0
"""`adaptra simulate-sync` prints what the cost model says."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adaptra_megatron.gradsync.all_reduce_algorithms import (
    ALGORITHMS,
    AllReduceWire,
    choose,
    critical_delay_s,
    hidden_s,
    ring_s,
    stock_s,
    stragglar_s,
)
from adaptra_megatron.gradsync.sync_modes import Mode, pace
from adaptra_megatron.tools.cli.main import main

WORDS = ["--size", "1GiB,64MiB", "--bandwidth", "450GiB/s", "--latency", "3us", "--compute", "1s"]


def points(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert main(["simulate-sync", *WORDS, *words, "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["points"]
    return found


def test_every_point_is_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    wire, found = AllReduceWire(3e-6, 1 / (450 * 2**30)), points(capsys, "--ranks", "4,8", "--delay", "0..4ms/4")
    assert [(each["ranks"], each["nbytes"]) for each in found[::5]] == [
        (n, s << 20) for n in (4, 8) for s in (1024, 64)
    ]
    assert [each["delay_s"] for each in found[:5]] == pytest.approx([0.0, 1e-3, 2e-3, 3e-3, 4e-3])
    for each in found:
        ranks, nbytes, delay_s = each["ranks"], each["nbytes"], each["delay_s"]
        chosen = choose(ranks, nbytes, wire, delay_s)
        assert each["exposed_s"] == pytest.approx(
            {
                "ring": ring_s(ranks, nbytes, wire),
                "stock": stock_s(ranks, nbytes, wire),
                "stragglar": stragglar_s(ranks, nbytes, wire, delay_s),
                "hidden": hidden_s(ranks, nbytes, wire, delay_s),
                "auto": chosen.exposed_s,
            }
        )
        assert each["critical_delay_s"] == pytest.approx(critical_delay_s(ranks, nbytes, wire))
        assert (each["chosen"], each["chosen_nbytes"]) == (chosen.algorithm, chosen.nbytes)
        for name, seconds in each["iteration_s"].items():
            assert seconds == pytest.approx(1.0 + delay_s + each["exposed_s"][name])
    assert {each["chosen"] for each in found} == {"stock", "stragglar", "hidden"}


def test_modes_are_those_of_the_model_of_updates(capsys: pytest.CaptureFixture[str]) -> None:
    found = points(capsys, "--ranks", "8,65", "--delay", "0..2s/2", "--noise", "3")
    alike, late, far = found[0], found[1], found[-1]
    assert alike["chosen_mode"] == "ssgd"
    assert late["chosen_mode"] in late["modes"].keys() - {"ssgd"}
    assert late["modes"]["ssgd"]["update_s"] == pytest.approx(3.0 if late["delay_s"] == 2 else 2.0)
    expected = pace([1.0] * 7 + [1.0 + late["delay_s"]], Mode.x_order(8, 7), 4)
    assert late["modes"]["x-order, 7 of 8"]["update_s"] == pytest.approx(expected.update_s)
    assert (far["modes"], far["chosen_mode"]) == ({}, None)


def test_without_a_schedule_there_is_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    (point, _) = points(capsys, "--ranks", "65", "--delay", "1s")
    assert point["exposed_s"]["stragglar"] is point["critical_delay_s"] is None
    assert point["chosen"] == "hidden"


def test_a_further_row_of_the_table_is_a_further_column(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = replace(ALGORITHMS["hidden"], exposed_s=lambda *given: 0.0, supports=lambda ranks: ranks == 8)
    monkeypatch.setitem(ALGORITHMS, "third", at_once)  # type: ignore[arg-type]
    supported, _, unsupported, _ = points(capsys, "--ranks", "8,4", "--delay", "1s")
    assert (supported["exposed_s"]["third"], supported["chosen"]) == (0.0, "third")
    assert unsupported["exposed_s"]["third"] is None
    assert unsupported["chosen"] in ("stragglar", "hidden")


@pytest.mark.parametrize("columns", ["80", "200"])
def test_the_table_has_a_row_for_each_case(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is cut off where it does not fit."""
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["simulate-sync", *WORDS, "--ranks", "8,65", "--delay", "1ms"]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("stragglar", "hidden", "auto runs"))
    assert [shown.count(f"{nbytes}") for nbytes in (1 << 30, 64 << 20)] == [2, 2]


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "sync.png"
    assert main(["simulate-sync", *WORDS, "--ranks", "8", "--delay", "0..4ms/4", "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (["--ranks", "1", "--delay", "1s"], "numbers of replicas"),
        (["--ranks", "8", "--delay", "1s", "--size", "0..1GiB"], "no size"),
        (["--ranks", "8", "--delay", "1s", "--latency", "0..1s"], "--latency is a range"),
        (["--ranks", "8", "--delay", "1s", "--bandwidth", "0GB/s"], "above 0"),
        (["--ranks", "8", "--delay", "1s", "--plot", "/nowhere/sync.png"], "/nowhere/sync.png"),
    ],
)
def test_bad_input_is_one_line(words: list[str], reported: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["simulate-sync", *WORDS, *words])
    except SystemExit as exit:
        status = int(exit.code or 0)
    error = capsys.readouterr().err
    assert (status, reported in error, error.count("\n")) == (2, True, 1), error


def test_a_model_without_a_delay_is_finite() -> None:
    assert math.isfinite(hidden_s(8, 1, AllReduceWire(0.0, 1e-9), 0.0))
