# SPDX-License-Identifier: Apache-2.0
"""The questions of docs/questions.md, and what their answers must agree with."""

from __future__ import annotations

import gzip
import io
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from support.processes import REPOSITORY

from adaptra_megatron.schedule.costs import costs_from_json
from adaptra_megatron.schedule.jobs.job_costs import LinkChange, Override
from adaptra_megatron.schedule.planner import plan
from adaptra_megatron.telemetry.event_log import read_events
from adaptra_megatron.telemetry.events import PlanMade
from adaptra_megatron.tools.cli.main import main
from adaptra_megatron.tools.cli.planning.inputs import PER_SECOND, SECONDS, ValueRange, parsed_value

EXAMPLES = REPOSITORY / "examples"
COSTS, RUN = str(EXAMPLES / "costs.json"), str(EXAMPLES / "run")
DOCUMENT: dict[str, Any] = {
    "stages": 3,
    "micro_batches": 6,
    "forward_s": 0.02,
    "backward_input_s": 0.02,
    "backward_weight_s": 0.02,
    "max_in_flight": 3,
}
SLOW = ("--slow-link", "0-1:latency=60ms")


def documented() -> list[list[str]]:
    lines = (REPOSITORY / "docs" / "questions.md").read_text().splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("    adaptra ")]


@pytest.fixture
def costs(tmp_path: Path) -> str:
    (file := tmp_path / "costs.json").write_text(json.dumps(DOCUMENT))
    return str(file)


def answer(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict[str, Any]:
    try:
        ended: object = main([*arguments, "--json"])
    except SystemExit as stopped:
        ended = stopped.code
    assert ended == status
    captured = capsys.readouterr()
    assert captured.err == ""
    found = json.loads(captured.out)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("command", documented(), ids=" ".join)
def test_every_command_of_the_page_answers(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "examples").symlink_to(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--deadline-s", "0.001"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert len(captured.out.splitlines()) > 4


def test_the_page_has_the_nine_questions_and_a_picture() -> None:
    assert len(documented()) == 10


def compared(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in found["comparison"]}


def test_a_plan_is_shown_with_healthy_stock_now_and_bound(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "plan", costs, *SLOW)
    rows = compared(found)
    assert list(rows) == ["healthy", "stock", "now", "planned", "bound"]
    base = costs_from_json(DOCUMENT)
    healthy = plan(base)
    slow = Override(links=dict.fromkeys([(0, 1), (1, 0)], LinkChange(0.06))).applied_to(base)
    assert rows["healthy"]["makespan_s"] == healthy.makespan_s
    assert rows["planned"]["makespan_s"] == found["makespan_s"] == plan(slow).makespan_s
    assert rows["bound"]["makespan_s"] <= rows["planned"]["makespan_s"] < rows["now"]["makespan_s"]
    assert rows["now"]["makespan_s"] < rows["stock"]["makespan_s"]
    assert rows["stock"]["binds"].startswith("link 0-1: ")
    assert rows["planned"]["of_healthy"] == found["makespan_s"] / healthy.makespan_s
    assert rows["planned"]["peak_in_flight"] == max(found["peak_in_flight"])


def test_a_run_answers_with_the_costs_of_its_plans(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (found.event for found in read_events(RUN) if isinstance(found.event, PlanMade))
    latest = answer(capsys, "plan", RUN)
    rows = compared(latest)
    assert rows["now"]["makespan_s"] == second.current_predicted_s
    assert rows["healthy"]["makespan_s"] == pytest.approx(first.predicted_s)
    assert latest["makespan_s"] == plan(costs_from_json(dict(second.costs))).makespan_s
    log = answer(capsys, "plan", f"{RUN}/events-00000.jsonl")
    assert compared(log) == rows
    assert answer(capsys, "plan", RUN, "--plan", "1")["makespan_s"] == pytest.approx(first.predicted_s)
    assert answer(capsys, "plan", RUN, "--plan", "7", status=2) == {"error": f"{RUN} has no plan 7: there are 1, 2"}
    assert "holds one set of costs" in answer(capsys, "plan", COSTS, "--plan", "1", status=2)["error"]


def test_a_trace_answers_with_what_was_recorded(costs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("numpy")
    trace, from_costs = tmp_path / "out" / "trace.json.gz", ("--schedule", "zb-h1", *SLOW)
    recorded_s = answer(capsys, "simulate", costs, *from_costs, "--trace", str(trace))["makespan_s"]
    names = {event["name"] for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert {"F 0", "I 5", "W 5"} <= names
    only = tmp_path / "zb-h1.json"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    only.write_text(json.dumps([event for event in events if 10_000 < event["pid"] < 20_000]))
    rows = compared(answer(capsys, "plan", str(only)))
    assert rows["now"]["makespan_s"] == pytest.approx(recorded_s, rel=1e-3)
    assert rows["planned"]["makespan_s"] <= rows["now"]["makespan_s"]


def test_stdin_is_a_file_like_others(
    costs: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(DOCUMENT)))
    assert answer(capsys, "plan", "-")["makespan_s"] == answer(capsys, "plan", costs)["makespan_s"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("{"))
    assert "stdin is not valid JSON" in answer(capsys, "plan", "-", status=2)["error"]


def test_caps_and_micro_batches_are_what_ifs(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "plan", costs, *SLOW, "--max-in-flight", "3..6/3")["sweep"]
    assert (found["name"], [point["value"] for point in found["points"]]) == ("max-in-flight", [3, 4, 5, 6])
    planned = [point["makespan_s"]["planned"] for point in found["points"]]
    assert planned[-1] < planned[0]
    more = answer(capsys, "plan", costs, "--micro-batches", "12")
    assert more["makespan_s"] == plan(costs_from_json({**DOCUMENT, "micro_batches": 12})).makespan_s


def test_two_ranges_make_rows_and_columns(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    ranges = ("--slow-link", "0-1:latency=10..40msx2", "--max-in-flight", "3..5/2")
    found = answer(capsys, "simulate", costs, *ranges)["sweep"]
    assert found["columns"] == {"name": "max-in-flight", "unit": ""}
    cells = [(point["value"], point["column"]) for point in found["points"]]
    assert cells == [(pytest.approx(row), column) for row in (0.01, 0.02, 0.04) for column in (3, 4, 5)]
    alone = answer(capsys, "simulate", costs, "--slow-link", "0-1:latency=20ms", "--schedule", "planned")
    assert found["points"][3]["makespan_s"] == {"planned": alone["makespan_s"]}
    assert main(["simulate", costs, *ranges]) == 0
    out = capsys.readouterr().out
    assert "latency of link 0-1 (ms)" in out
    assert all(f" {value} " in out for value in (10, 20, 40))


def test_each_link_is_tried_in_turn(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    points = answer(capsys, "plan", costs, "--each-link", "latency=60ms")["sweep"]["points"]
    assert [point["link"] for point in points] == ["0-1", "1-2"]
    alone = answer(capsys, "plan", costs, *SLOW)
    assert points[0]["makespan_s"]["planned"] == alone["makespan_s"]


def test_a_loss_is_found_where_it_begins(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "plan", costs, "--slow-link", "0-1:latency=0..200ms", "--lose", "5%")["lose"]
    assert (found["share"], found["name"], found["unit"]) == (0.05, "latency of link 0-1", "s")
    assert found["from"]["stock"] <= found["from"]["now"] <= found["from"]["planned"]
    begins_s, healthy_s = found["from"]["planned"], answer(capsys, "plan", costs)["makespan_s"]

    def planned_s(latency_s: float) -> float:
        return float(answer(capsys, "plan", costs, "--slow-link", f"0-1:latency={latency_s:.6f}s")["makespan_s"])

    assert planned_s(begins_s) > 1.05 * healthy_s
    assert planned_s(begins_s - 0.2 / 8 / 2**6) <= 1.05 * healthy_s * (1 + 1e-9)
    never = answer(capsys, "plan", costs, "--slow-link", "0-1:latency=0..1ms", "--lose", "50%")["lose"]
    assert set(never["from"].values()) == {None}
    rising = ("--slow-link", "0-1:bandwidth=1..1000MB/s/9:log", "--lose", "0.05")
    assert "message_bytes" in answer(capsys, "plan", costs, *rising, status=2)["error"]
    wide = answer(capsys, "plan", COSTS, *rising)["lose"]
    assert wide["unit"] == "B/s"
    assert wide["from"]["stock"] >= wide["from"]["planned"], "less bandwidth is worse"
    assert "--lose needs one range" in answer(capsys, "plan", costs, "--lose", "5%", status=2)["error"]


def test_memory_wins_back_what_it_can(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "plan", costs, *SLOW, "--win-back", "--activation-gib", "2")
    assert found["win_back"]
    rows = compared(found)
    for step in found["win_back"]:
        again = answer(capsys, "plan", costs, *SLOW, "--max-in-flight", str(step["max_in_flight"]))
        assert step["makespan_s"] == again["makespan_s"]
        lost_s = rows["planned"]["makespan_s"] - rows["healthy"]["makespan_s"]
        assert step["won_back"] == pytest.approx((rows["planned"]["makespan_s"] - step["makespan_s"]) / lost_s)
        assert step["gib"] == 2.0 * (step["max_in_flight"] - 3)


def test_an_exchange_pays_once_it_has_made_up_for_its_standstill(
    costs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(capsys, "plan", costs, "--slow-stage", "1:1.5", "--exchange", "10min")
    rows, exchange = compared(found), found["exchange"]
    healthy_s, slow_s = rows["healthy"]["makespan_s"], rows["planned"]["makespan_s"]
    assert 600.0 + exchange["iterations"] * healthy_s == pytest.approx(exchange["iterations"] * slow_s)
    assert exchange["pays_after_s"] == pytest.approx(exchange["iterations"] * slow_s)
    assert answer(capsys, "plan", costs, "--exchange", "1h")["exchange"]["pays_after_s"] is None


def test_pictures_show_every_stage(costs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "new" / "plan.html"
    assert main(["plan", costs, *SLOW, "--timeline", "--stages", "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert out.count("a column is") == 3
    rows = re.findall(r"^  2 ([FIWB.]{100})$", out, re.MULTILINE)
    assert len(rows) == 3
    assert "B" in rows[0]
    assert all("F" in row and "I" in row and "W" in row for row in rows[1:])
    assert "in flight" in out
    text = page.read_text()
    assert text.count('role="tab"') == 3
    assert text.count("stage 2</text>") == 3
    assert "planned" in text
    assert "http" not in text.replace("http://www.w3.org", "")
    refused = answer(capsys, "plan", costs, *SLOW, "--html", str(tmp_path), status=2)
    assert "cannot write" in refused["error"]


def test_without_a_command_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "COMMAND" in capsys.readouterr().out


def test_bad_arguments_are_json_too(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "unrecognized arguments: --fast" in answer(capsys, "plan", costs, "--fast", status=2)["error"]
    assert "without a unit" in answer(capsys, "plan", costs, "--slow-link", "0-1:latency=60", status=2)["error"]


def test_units_of_bandwidth() -> None:
    for text in ("1.25GB/s", "10Gbit/s", "10Gbps", "1.25GBps", "10000Mbps", "1.25e9B/s"):
        assert parsed_value(text, PER_SECOND) == pytest.approx(1.25e9)
    for text, first in (("1..100ms/2:log", 1e-3), ("1ms..0.1sx2", 1e-3)):
        wide = parsed_value(text, SECONDS)
        assert isinstance(wide, ValueRange)
        assert wide.values == pytest.approx([first, 0.01, 0.1])
