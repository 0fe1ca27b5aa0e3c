# SPDX-License-Identifier: Apache-2.0
"""`adaptra plan` and `adaptra simulate`: their JSON, their text, and what bad input gets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from adaptra_megatron.schedule import classic, v_shaped
from adaptra_megatron.schedule.bounds import lower_bound
from adaptra_megatron.schedule.costs import costs_from_json
from adaptra_megatron.schedule.csv_format import schedule_from_csv, schedule_to_csv
from adaptra_megatron.schedule.ir import v_shape
from adaptra_megatron.schedule.schedule_checks import check_schedule
from adaptra_megatron.schedule.simulator import simulate, simulate_online
from adaptra_megatron.tools.cli.main import main

DOCUMENT: dict[str, Any] = {
    "stages": 4,
    "micro_batches": 12,
    "forward_s": 0.02,
    "backward_input_s": [[0.02], [0.03], [0.02], [0.02]],
    "backward_weight_s": [0.02, 0.02, 0.02, 0.01],
    "links": [
        {"from": 1, "to": 2, "latency_s": 0.06, "occupancy_s": 0.001},
        {"from": 2, "to": 1, "latency_s": 0.06},
    ],
    "max_in_flight": 6,
    "released_at_backward_input": 0.5,
}
TWO_CHUNKS = {**DOCUMENT, "chunks": 2, "backward_input_s": 0.02, "links": [], "max_in_flight": [20, 20, 20, None]}


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(content: object, name: str = "costs.json") -> str:
        file = tmp_path / name
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(file)

    return write


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr of a command that exits with 2."""
    try:
        status: object = main(arguments)
    except SystemExit as stopped:
        status = stopped.code
    assert status == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.endswith("\n")
    return captured.err


def figures_of(result: dict[str, Any]) -> dict[str, Any]:
    """Those of the schedule itself."""
    return {key: value for key, value in result.items() if key not in ("planning_s", "comparison")}


@pytest.mark.parametrize("document", [DOCUMENT, TWO_CHUNKS], ids=["one-chunk", "two-chunks"])
def test_plan_prints_a_schedule_that_takes_what_it_says(
    document: dict[str, Any], write: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    result = json.loads(printed(capsys, "plan", write(document), "--json"))
    figures = {"makespan_s", "lower_bound_s", "gap", "peak_in_flight", "planning_s", "schedule_csv", "comparison"}
    assert set(result) == figures
    costs = costs_from_json(document)
    schedule = schedule_from_csv(result["schedule_csv"], chunks=costs.chunks)
    check_schedule(schedule, max_in_flight=costs.max_in_flight, released_at_backward_input=0.5)
    simulation = simulate(schedule, costs)
    assert result["makespan_s"] == simulation.makespan_s
    assert result["peak_in_flight"] == list(simulation.peak_in_flight)
    assert result["lower_bound_s"] <= result["makespan_s"] * (1 + 1e-12)
    assert result["gap"] == pytest.approx(result["makespan_s"] / result["lower_bound_s"] - 1)
    assert 0.0 < result["planning_s"] < 60.0


def test_plan_takes_a_deadline_and_writes_the_csv(
    write: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.csv"
    out = printed(capsys, "plan", write(DOCUMENT), "--json", "--deadline-s", "0.01", "--csv", str(file))
    assert file.read_text() == json.loads(out)["schedule_csv"]
    again = printed(capsys, "simulate", write(DOCUMENT), "--schedule", str(file), "--json")
    assert json.loads(again)["makespan_s"] == json.loads(out)["makespan_s"]


@pytest.mark.parametrize(
    ("name", "document", "schedule"),
    [
        ("gpipe", DOCUMENT, classic.gpipe(4, 12)),
        ("gpipe", TWO_CHUNKS, classic.gpipe(4, 12, chunks=2)),
        ("1f1b", DOCUMENT, classic.one_f_one_b(4, 12)),
        ("interleaved", TWO_CHUNKS, classic.interleaved(4, 12, 2)),
        ("interleaved-split", TWO_CHUNKS, classic.interleaved_split(4, 12, 2)),
        ("zb-h1", DOCUMENT, classic.zb_h1(4, 12)),
        ("zb-h2", DOCUMENT, classic.zb_h2(4, 12)),
        ("zb-v", TWO_CHUNKS, v_shaped.zb_v(4, 12)),
        ("v-half", TWO_CHUNKS, v_shaped.v_half(4, 12)),
        ("v-min", TWO_CHUNKS, v_shaped.v_min(4, 12)),
        ("dualpipe-v", TWO_CHUNKS, v_shaped.dualpipe_v(4, 12)),
        ("dualpipe-v", {**TWO_CHUNKS, "placement": "v-shape"}, v_shaped.dualpipe_v(4, 12)),
    ],
)
def test_simulate_times_classic_schedules_even_over_the_cap(
    name: str, document: dict[str, Any], schedule: Any, write: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "order.csv"
    out = printed(capsys, "simulate", write(document), "--schedule", name, "--json", "--csv", str(file))
    assert file.read_text() == schedule_to_csv(schedule)
    result = json.loads(out)
    costs = costs_from_json(document).placed(schedule.placement)
    simulation = simulate(schedule, costs)
    compared = {row["name"]: row["makespan_s"] for row in result.pop("comparison")}
    assert compared[name] == simulation.makespan_s
    assert compared["bound"] <= compared["planned"] * (1 + 1e-12)
    assert result == {
        "makespan_s": simulation.makespan_s,
        "lower_bound_s": lower_bound(costs).seconds,
        "gap": simulation.makespan_s / lower_bound(costs).seconds - 1,
        "peak_in_flight": list(simulation.peak_in_flight),
        "schedule_csv": schedule_to_csv(schedule),
    }


def test_a_v_placement_is_planned_and_its_csv_is_simulated(
    write: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = write({**TWO_CHUNKS, "placement": "v-shape", "max_in_flight": 8})
    plan = json.loads(printed(capsys, "plan", costs, "--json"))
    schedule = schedule_from_csv(plan["schedule_csv"], chunks=2)
    assert schedule.placement == v_shape(4)
    file = tmp_path / "plan.csv"
    file.write_text(plan["schedule_csv"])
    for given in (costs, write({**TWO_CHUNKS, "max_in_flight": 8})):  # costs of no placement take that of the file
        simulated = json.loads(printed(capsys, "simulate", given, "--schedule", str(file), "--json"))
        assert figures_of(simulated) == figures_of(plan)
    swept = json.loads(printed(capsys, "simulate", costs, "--slow-link", "0-1:latency=0..50ms/1", "--json"))
    assert swept


def test_placements_that_do_not_fit_are_refused(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert 'zb-v runs 2 chunks per stage, not 1: take gpipe, 1f1b, zb-h1, zb-h2, or set "chunks" to 2' in refused(
        capsys, "simulate", write(DOCUMENT), "--schedule", "zb-v"
    )
    placed = write({**TWO_CHUNKS, "placement": "v-shape"})
    assert "the schedule places virtual stages on stages" in refused(
        capsys, "simulate", placed, "--schedule", "interleaved"
    )


def test_simulate_times_planned_and_online(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    costs = write(DOCUMENT)
    plan = json.loads(printed(capsys, "plan", costs, "--json"))
    planned = json.loads(printed(capsys, "simulate", costs, "--schedule", "planned", "--json"))
    assert figures_of(planned) == figures_of(plan)
    online = json.loads(printed(capsys, "simulate", costs, "--schedule", "online", "--json"))
    assert set(figures_of(online)) == {"makespan_s", "lower_bound_s", "gap", "peak_in_flight"}
    assert online["makespan_s"] == simulate_online(costs_from_json(DOCUMENT)).makespan_s


def test_blocking_times_stocks_own_sends(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    costs = write(DOCUMENT)
    free = json.loads(printed(capsys, "simulate", costs, "--schedule", "1f1b", "--json"))
    blocking = json.loads(printed(capsys, "simulate", costs, "--schedule", "1f1b", "--blocking", "--json"))
    assert blocking["makespan_s"] > free["makespan_s"]
    assert "this one is not 1F1B" in refused(capsys, "simulate", costs, "--schedule", "zb-h1", "--blocking")
    assert "--blocking needs a fixed order" in refused(capsys, "simulate", costs, "--schedule", "online", "--blocking")


@pytest.mark.parametrize("with_rich", [True, False], ids=["rich", "plain"])
def test_text_shows_the_figures_and_warns_of_a_passed_cap(
    with_rich: bool, write: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if with_rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich.table", None)
    out = printed(capsys, "simulate", write(DOCUMENT), "--schedule", "gpipe")
    assert "gpipe: 4 stages x 1 chunks, 12 micro-batches" in out
    assert f"makespan     {simulate(classic.gpipe(4, 12), costs_from_json(DOCUMENT)).makespan_s:.6g} s" in out
    assert ("┃" in out) == with_rich
    assert "warning: stages 0-3 hold up to 12 activations, their cap is 6" in out
    fits = printed(capsys, "plan", write(DOCUMENT))
    assert "planned in" in fits
    assert "warning" not in fits


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "costs.json is not valid JSON"),
        ("[" * 100_000, "costs.json is not valid JSON"),
        ("[]", "costs.json: costs must be a JSON object"),
        ({**DOCUMENT, "stages": 0}, "stages must be a whole number of at least 1, got 0"),
        ({**DOCUMENT, "forwards_s": 1}, "unknown field 'forwards_s'"),
        ({**DOCUMENT, "forward_s": float("nan")}, "forward_s"),
        ({**DOCUMENT, "links": [{"from": 0, "to": 2}]}, "link 0->2 joins stages that are not neighbours"),
        ({**DOCUMENT, "max_in_flight": 0.5}, "max_in_flight of stage 0 is 0.5"),
    ],
)
@pytest.mark.parametrize("command", [("plan",), ("simulate", "--schedule", "gpipe")], ids=["plan", "simulate"])
def test_bad_costs_are_refused(
    command: tuple[str, ...], content: object, message: str, write: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, *command, write(content))


def test_what_cannot_be_read_or_chosen_is_refused(
    write: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs, missing = write(DOCUMENT), str(tmp_path / "none.json")
    assert f"cannot read {missing}: No such file" in refused(capsys, "plan", missing)
    (empty := tmp_path / "empty").mkdir()
    assert f"{empty} has no plan whose costs could be taken" in refused(capsys, "plan", str(empty))
    (tmp_path / "binary.json").write_bytes(b'{"\xff\xfe"}')
    assert "not UTF-8 text" in refused(capsys, "plan", str(tmp_path / "binary.json"))
    assert "unknown schedule 'fastest': take one of gpipe, 1f1b" in refused(
        capsys, "simulate", costs, "--schedule", "fastest"
    )
    assert "cannot read none.csv" in refused(capsys, "simulate", costs, "--schedule", "none.csv")
    assert "cannot write" in refused(capsys, "plan", costs, "--csv", str(tmp_path))
    assert "--csv is for one order" in refused(
        capsys, "simulate", costs, "--schedule", "online", "--csv", str(tmp_path / "online.csv")
    )
    assert "'-1' is not a number of seconds above 0" in refused(capsys, "plan", costs, "--deadline-s=-1")
    assert "required: --schedule, one of gpipe, 1f1b" in refused(capsys, "simulate", costs)
    assert "interleaved runs 2 chunks or more per stage, not 1: take gpipe, 1f1b" in refused(
        capsys, "simulate", costs, "--schedule", "interleaved"
    )
    assert "zb-h1 runs 1 chunk per stage, not 2: take gpipe, interleaved" in refused(
        capsys, "simulate", write(TWO_CHUNKS), "--schedule", "zb-h1"
    )


def test_an_impossible_csv_is_refused_naming_stage_and_action(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    costs = write({**DOCUMENT, "micro_batches": 4, "max_in_flight": 3, "backward_input_s": 0.02})
    rows = schedule_to_csv(classic.zb_h1(4, 4)).splitlines()

    def complaint(row: int, old: str, new: str) -> str:
        assert old in rows[row]
        text = "\n".join([*rows[:row], rows[row].replace(old, new), *rows[row + 1 :]])
        return refused(capsys, "simulate", costs, "--schedule", write(text, "broken.csv"))

    assert "broken.csv: stage 2 F(micro-batch 3, chunk 0) is missing" in complaint(2, "2F3,", "")
    assert "stage 0 W(micro-batch 2, chunk 0), at position 8" in complaint(0, "0I2,0W2", "0W2,0I2")
    assert "row 2, column 1: '2F0' is in rank 1's row" in complaint(1, "1F0", "2F0")
    assert "stage 0 F(micro-batch 3, chunk 0), at position 3" in refused(
        capsys, "simulate", costs, "--schedule", write("\n".join(rows), "over.csv")
    )
    assert "3 rows, but the costs have 4 stages" in refused(
        capsys, "simulate", costs, "--schedule", write("\n".join(rows[:3]), "short.csv")
    )


def test_a_deadlocked_csv_is_refused_naming_who_waits(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    csv = "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n"
    costs = write(
        {**DOCUMENT, "stages": 2, "micro_batches": 2, "links": [], "backward_input_s": 1, "backward_weight_s": 1}
    )
    assert (
        "deadlock, each of these comes, in its stage's order, before what the next one waits for: "
        "stage 0 B(micro-batch 0, chunk 0) waits for stage 1 B(micro-batch 0, chunk 0)"
    ) in refused(capsys, "simulate", costs, "--schedule", write(csv, "deadlock.csv"))


@pytest.mark.parametrize("arguments", [("plan",), ("simulate", "--schedule", "gpipe", "--json")])
def test_a_reader_that_closes_the_pipe_gets_no_traceback(arguments: tuple[str, ...], write: Any) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "adaptra_megatron.tools.cli", *arguments, write(DOCUMENT)]
    with os.fdopen(writer, "wb") as closed:
        ran = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (1, "")


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["plan", "--help"], ["simulate", "--help"]])
def test_the_module_runs_as_a_command_without_torch(arguments: list[str]) -> None:
    code = (
        "import runpy, sys\n"
        "for name in ('torch', 'megatron', 'numpy'): sys.modules[name] = None\n"
        f"sys.argv = ['adaptra', *{arguments!r}]\n"
        "runpy.run_module('adaptra_megatron.tools.cli', run_name='__main__')\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert "adaptra" in ran.stdout
