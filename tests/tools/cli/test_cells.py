# SPDX-License-Identifier: Apache-2.0
"""Slow and dead cells on the command line: figures, moves, orders and the picture."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from adaptra_megatron.common.layout import Cell
from adaptra_megatron.schedule.classic import zb_h1
from adaptra_megatron.schedule.costs import uniform_costs
from adaptra_megatron.schedule.jobs.job_costs import JobCosts, Override
from adaptra_megatron.schedule.jobs.job_simulation import simulate_job
from adaptra_megatron.schedule.routing.routed_costs import RoutedCosts
from adaptra_megatron.schedule.routing.routed_planner import plan_routed
from adaptra_megatron.tools.cli.main import main

COSTS = {"stages": 4, "micro_batches": 6, "forward_s": 1, "backward_input_s": 1, "backward_weight_s": 1}
BASE = uniform_costs(4, 6, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)


@pytest.fixture
def costs(tmp_path: Path) -> str:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(COSTS))
    return str(file)


def test_a_dead_cell_in_figures(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", costs, "--replicas", "3", "--dead", "1.2", "--json"])
    said = json.loads(capsys.readouterr().out)
    expected = plan_routed(RoutedCosts(job=JobCosts(BASE, replicas=3), dead=frozenset([Cell(1, 2)])))
    assert said["makespan_s"] == expected.simulation.period_s
    assert said["lower_bound_s"] == expected.lower_bound.seconds
    assert said["unrouted"] == {"schedule": "stock", "makespan_s": None, "planned_s": None}
    assert said["dead"] == ["1.2"]
    assert sorted(number for move in said["moves"] for number in move["micro_batches"]) == list(range(6))
    assert {move["from"] for move in said["moves"]} == {"1.2"}
    assert said["orders"]["1.2"] == []
    assert sum(len(order) for order in said["orders"].values()) == 3 * 3 * 4 * 6
    # The cell that runs the first micro-batch instead says so by the replica's number.
    host = next(move["to"] for move in said["moves"] if 0 in move["micro_batches"])
    assert "F1.0" in said["orders"][host]
    assert len(said["peak_in_flight"]) == 4


def test_a_slow_cell_with_a_fixed_schedule(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["simulate", costs, "--replicas", "3", "--slow-cell", "1.2:2.4", "--schedule", "zb-h1", "--json"])
    said = json.loads(capsys.readouterr().out)
    job = JobCosts(BASE, replicas=3, overrides=[Override(replicas=(1,), slow_stages={2: 2.4})])
    assert said["unrouted"]["schedule"] == "zb-h1"
    assert said["unrouted"]["makespan_s"] == simulate_job(zb_h1(4, 6), job).makespan_s
    assert said["makespan_s"] < said["unrouted"]["planned_s"] <= said["unrouted"]["makespan_s"]


def test_the_picture_has_a_row_per_cell(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", costs, "--replicas", "3", "--dead", "1.2"])
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split()[1] for line in lines if line.startswith(tuple(f"  {d}." for d in range(3)))}
    assert len(rows) == 12
    assert rows["1.2"] == "dead"
    assert set("fiw") <= set(rows["0.2"]) | set(rows["2.2"])
    assert not any(letter in rows["0.1"] for letter in "fiwb"), "nothing is moved to stage 1"
    assert {len(row) for cell, row in rows.items() if cell != "1.2"} == {100}
    assert rows["0.0"].startswith("FFF")


def test_a_large_job_shows_the_cells_that_matter(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", costs, "--replicas", "20", "--slow-cell", "7.1:6"])
    out = capsys.readouterr().out
    assert re.search(r"^ +7\.1 [.FIW]+$", out, re.MULTILINE)
    assert " more cells" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dead", "3"], "does not begin with a cell such as 1.2"),
        (["--slow-cell", "1.2"], "is not like 0.0:2.4"),
        (["--slow-cell", "1.2:0"], "is not like 0.0:2.4"),
        (["--dead", "7.0"], "cell 7.0 is none of the 2 replicas x 4 stages"),
        (["--slow-cell", "7.0:2"], "names replica 7, but there are 2"),
        (["--dead", "0.1", "--dead", "1.1"], "all 2 cells of stage 1 take no work"),
        (["--dead", "0.1", "--slow-stage", "2:1..2"], "make one routed plan"),
    ],
)
def test_bad_input_is_one_line(
    costs: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["plan", costs, "--replicas", "2", *options])
    except SystemExit as error:  # of argparse
        status = error.code
    assert status == 2
    assert message in capsys.readouterr().err
