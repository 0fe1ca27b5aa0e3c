# SPDX-License-Identifier: Apache-2.0
"""The names of the package itself, from Python and in notebooks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.processes import REPOSITORY

import adaptra_megatron as adaptra
from adaptra_megatron.schedule.costs import uniform_costs
from adaptra_megatron.schedule.csv_format import schedule_from_csv
from adaptra_megatron.tools.cli.main import main
from adaptra_megatron.tools.cli.planning.inputs import InputError

DOCUMENT: dict[str, Any] = {
    "stages": 3,
    "micro_batches": 6,
    "forward_s": 0.02,
    "backward_input_s": 0.02,
    "backward_weight_s": 0.02,
    "max_in_flight": 3,
    "message_bytes": 1000,
}
SLOW = "0-1:latency=60ms"


def test_every_name_is_there_and_costs_nothing_before_it_is_used() -> None:
    code = """
import sys
import adaptra_megatron
heavy = {"torch", "megatron", "numpy", "jinja2", "rich"}
assert len([name for name in sys.modules if name.startswith("adaptra_megatron.")]) == 0
assert set(adaptra_megatron.__all__) <= set(dir(adaptra_megatron))
for name in adaptra_megatron.__all__:
    if name not in ("enable", "analyze"):
        assert callable(getattr(adaptra_megatron, name)), name
assert not heavy & set(sys.modules), heavy & set(sys.modules)
try:
    adaptra_megatron.nothing
except AttributeError as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "has no attribute 'nothing'" in ran.stdout
    assert callable(adaptra.enable)


def test_answers_are_those_of_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file := tmp_path / "costs.json").write_text(json.dumps(DOCUMENT))
    assert main(["plan", str(file), "--slow-link", SLOW, "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    costs = adaptra.read_costs(file)
    planned = adaptra.plan(costs, slow_link=SLOW)
    assert (planned.makespan_s, planned.csv, planned.gap) == (
        reported["makespan_s"],
        reported["schedule_csv"],
        reported["gap"],
    )
    stock = adaptra.simulate("stock", costs, slow_link=[SLOW])
    compared = {row["name"]: row["makespan_s"] for row in reported["comparison"]}
    assert stock.makespan_s == compared["stock"]
    assert adaptra.simulate(adaptra.plan(costs), costs, slow_link=SLOW).makespan_s == compared["now"]
    assert adaptra.simulate(schedule_from_csv(planned.csv), costs, slow_link=SLOW).makespan_s == planned.makespan_s
    assert adaptra.read_costs(DOCUMENT) == costs


def test_replicas_and_bare_costs_are_taken() -> None:
    many = adaptra.plan(adaptra.read_costs({**DOCUMENT, "replicas": 4}), slow_stage="1:1.5@2")
    assert many.simulation.makespan_s == many.makespan_s
    assert "4 replicas" in repr(many)
    bare = uniform_costs(2, 4, forward_s=0.01, backward_input_s=0.01, backward_weight_s=0.01)
    assert adaptra.simulate("online", bare).makespan_s >= adaptra.plan(bare).lower_bound.seconds


def test_everything_is_shown_briefly_and_drawn_in_notebooks() -> None:
    costs = adaptra.read_costs(DOCUMENT)
    planned = adaptra.plan(costs, slow_link=SLOW)
    for shown in (costs, planned, planned.schedule, planned.simulation):
        assert len(repr(shown)) < 160
    frame = planned._repr_html_()
    assert frame is not None
    assert frame.startswith("<iframe srcdoc=")
    assert "stage 2&lt;/text&gt;" in frame
    assert (
        adaptra.plan(
            adaptra.read_costs({**DOCUMENT, "chunks": 2, "max_in_flight": 8, "placement": "v-shape"})
        )._repr_html_()
        is None
    )
    table = adaptra.sweep(costs, slow_link="0-1:latency=0..60ms/2", max_in_flight="3..4/1")
    assert len(repr(table)) < 160
    assert table._repr_html_().count("<tr>") == 1 + 3
    assert len(table.document()["points"]) == 6


def test_what_cannot_be_asked_is_refused() -> None:
    costs = adaptra.read_costs(DOCUMENT)
    with pytest.raises(InputError, match="is a range"):
        adaptra.plan(costs, max_in_flight="3..5/2")
    with pytest.raises(InputError, match="needs a range"):
        adaptra.sweep(costs, slow_link=SLOW)
    with pytest.raises(ValueError, match="without a unit"):
        adaptra.plan(costs, slow_link="0-1:latency=60")
    with pytest.raises(TypeError, match="slow_links"):
        adaptra.plan(costs, slow_links=SLOW)


def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY / "examples")
    cells = json.loads(Path("what_if.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert names["roomy"].makespan_s < names["planned"].makespan_s < names["stock"].makespan_s


def test_the_example_of_the_page_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    names: dict[str, Any] = {}
    lines = Path("docs/api.md").read_text().splitlines()
    exec("\n".join(line[4:] for line in lines if line.startswith("    ")), names)
    assert len(names["table"].points) == 7
