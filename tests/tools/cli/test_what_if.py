# SPDX-License-Identifier: Apache-2.0
"""What-if options and jobs of many replicas: `adaptra plan` and `adaptra simulate`."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from adaptra_megatron.schedule.classic import one_f_one_b, zb_h1
from adaptra_megatron.schedule.costs import LinkCost, costs_from_json
from adaptra_megatron.schedule.csv_format import schedule_from_csv
from adaptra_megatron.schedule.jobs.job_costs import JobCosts, LinkChange, Override
from adaptra_megatron.schedule.jobs.job_simulation import simulate_job
from adaptra_megatron.schedule.planner import plan
from adaptra_megatron.schedule.simulator import simulate, simulate_online
from adaptra_megatron.tools.cli.main import main
from adaptra_megatron.tools.cli.terminal import shown_progress

DOCUMENT: dict[str, Any] = {
    "stages": 4,
    "micro_batches": 12,
    "forward_s": 0.02,
    "backward_input_s": 0.02,
    "backward_weight_s": 0.02,
    "links": [{"from": 1, "to": 2, "occupancy_s": 0.001}],
    "max_in_flight": 6,
}
BASE = costs_from_json(DOCUMENT)
REPLICAS = {
    "count": 6,
    "overrides": [
        {"replicas": [1, "3-4"], "links": [{"from": 1, "to": 2, "latency_s": 0.06}]},
        {"replicas": [5], "slow_stages": [{"stage": 3, "factor": 1.25}]},
    ],
}
JOB = JobCosts(
    BASE,
    replicas=6,
    overrides=[
        Override(replicas=(1, 3, 4), links={(1, 2): LinkChange(0.06)}),
        Override(replicas=(5,), slow_stages={3: 1.25}),
    ],
)


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(document: object) -> str:
        file = tmp_path / "costs.json"
        file.write_text(json.dumps(document))
        return str(file)

    return write


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    found = json.loads(captured.out)
    assert isinstance(found, dict)
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    try:
        status: object = main(arguments)
    except SystemExit as stopped:
        status = stopped.code
    captured = capsys.readouterr()
    assert (status, captured.out, captured.err.count("\n")) == (2, "", 1)
    return captured.err


def test_simulate_tells_of_all_replicas(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    costs = write({**DOCUMENT, "replicas": REPLICAS, "ranks_per_stage": 16, "gradient_sync_s": [0.1, 0.0, 0.0, 0.2]})
    found = answer(capsys, "simulate", costs, "--schedule", "zb-h1")
    order = zb_h1(4, 12)
    groups_s = simulate_job(order, JOB).pipelines_s
    assert found["makespan_s"] == max(
        max(simulate(order, group.costs).end_s[stage][-1] for group in JOB.groups) + sync_s
        for stage, sync_s in ((0, 0.1), (1, 0.0), (2, 0.0), (3, 0.2))
    )
    assert found["ranks"] == 4 * 6 * 16
    assert found["peak_in_flight"] == [4.0] * 4
    assert schedule_from_csv(found["schedule_csv"]) == order
    replicas = found["replicas"]
    assert replicas["count"] == 6
    assert replicas["groups"] == [
        {"replicas": numbers, "makespan_s": seconds}
        for numbers, seconds in zip(("0, 2", "1, 3-4", "5"), groups_s, strict=True)
    ]
    everyone = sorted([groups_s[0]] * 2 + [groups_s[1]] * 3 + [groups_s[2]])
    median_s = (everyone[2] + everyone[3]) / 2
    assert replicas["makespan_s"] == {"min": everyone[0], "median": median_s, "max": everyone[-1]}
    assert replicas["slowest"]["replicas"] == [1, 3, 4]
    assert replicas["slowest"]["cause"] == "link 1-2"
    assert 0.0 < replicas["slowest"]["cause_s"] < found["makespan_s"]


def test_simulate_dispatches_in_each_replica(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "simulate", write({**DOCUMENT, "replicas": REPLICAS}), "--schedule", "online")
    assert found["makespan_s"] == simulate_job(None, JOB).makespan_s
    assert "schedule_csv" not in found


def test_plan_is_one_for_all_replicas(write: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs, csv = write({**DOCUMENT, "replicas": REPLICAS}), tmp_path / "plan.csv"
    found = answer(capsys, "plan", costs, "--csv", str(csv))
    assert csv.read_text() == found["schedule_csv"]
    again = answer(capsys, "simulate", costs, "--schedule", str(csv))
    for key in ("makespan_s", "lower_bound_s", "gap", "peak_in_flight", "replicas", "ranks"):
        assert again[key] == found[key]
    assert found["online_makespan_s"] == simulate_job(None, JOB).makespan_s
    assert found["lower_bound_s"] <= found["makespan_s"]
    assert answer(capsys, "simulate", costs, "--schedule", "planned")["makespan_s"] == found["makespan_s"]


@pytest.mark.parametrize("command", [("plan",), ("simulate", "--schedule", "1f1b", "--blocking")])
def test_replicas_in_words(command: tuple[str, ...], write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    name, *options = command
    costs = write({**DOCUMENT, "replicas": REPLICAS})
    assert main([name, costs, *options]) == 0
    out = capsys.readouterr().out
    assert "4 stages x 1 chunks, 12 micro-batches, 6 replicas, 24 ranks" in out
    assert "slowest      replica" in out
    assert ("online" in out) == (name == "plan")


def test_options_change_the_costs(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    costs = write({**DOCUMENT, "message_bytes": 5_000_000})

    def makespan_s(*options: str) -> float:
        return float(answer(capsys, "simulate", costs, "--schedule", "1f1b", *options)["makespan_s"])

    def expected_s(links: dict[tuple[int, int], LinkCost], slow: dict[int, float] | None = None) -> float:
        changes = {ends: LinkChange(cost.latency_s, cost.occupancy_s) for ends, cost in links.items()}
        changed = Override(links=changes, slow_stages=slow or {}).applied_to(BASE)
        return simulate(one_f_one_b(4, 12), changed).makespan_s

    both = {(1, 2): LinkCost(0.06, 0.001), (2, 1): LinkCost(0.06)}
    assert makespan_s("--slow-link", "1-2:latency=60ms") == expected_s(both)
    assert makespan_s("--slow-link", "2-1:latency=0.06s") == expected_s(both)
    assert makespan_s("--slow-link", "2to1:latency=60000us,occupancy=5ms") == expected_s(
        {(2, 1): LinkCost(0.06, 0.005)}
    )
    assert makespan_s("--slow-link", "0-1:bandwidth=1GB/s") == expected_s(
        dict.fromkeys([(0, 1), (1, 0)], LinkCost(0, 0.005))
    )
    assert makespan_s("--slow-link", "0-1:bandwidth=8Gbit/s") == makespan_s("--slow-link", "0-1:bandwidth=1e3MB/s")
    twice = makespan_s("--slow-stage", "3:1.25", "--slow-link", "1-2:latency=60ms")
    assert twice == expected_s(both, {3: 1.25})


def test_options_can_be_for_some_replicas(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--replicas", "6", "--slow-link", "1to2:latency=60ms@1,3-4", "--slow-stage", "3:1.25@5")
    found = answer(capsys, "simulate", write(DOCUMENT), "--schedule", "zb-h1", *options)
    assert found == answer(capsys, "simulate", write({**DOCUMENT, "replicas": REPLICAS}), "--schedule", "zb-h1")


def test_a_range_makes_a_table_of_schedules(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    costs = write(DOCUMENT)
    found = answer(capsys, "simulate", costs, "--slow-link", "1-2:latency=0..60ms/2")["sweep"]
    assert (found["name"], found["unit"], found["over_cap"]) == ("latency of link 1-2", "s", [])
    assert [point["value"] for point in found["points"]] == pytest.approx([0.0, 0.03, 0.06])
    for point in found["points"]:
        slow = dict.fromkeys([(1, 2), (2, 1)], LinkChange(point["value"]))
        at = Override(links=slow).applied_to(BASE)
        planned = plan(at)
        assert point["makespan_s"] == {
            "stock": simulate(one_f_one_b(4, 12), at, blocking=True).makespan_s,
            "zb-h1": simulate(zb_h1(4, 12), at).makespan_s,
            "planned": planned.makespan_s,
            "online": simulate_online(at).makespan_s,
        }
        assert point["lower_bound_s"] == pytest.approx(planned.lower_bound.seconds, abs=0.0, rel=1e-12)
    assert answer(capsys, "plan", costs, "--slow-link", "1-2:latency=0..60ms/2")["sweep"] == found
    alone = answer(capsys, "simulate", costs, "--schedule", "online", "--slow-stage", "2:1..1.5/1@0")["sweep"]
    assert alone["name"] == "factor of stage 2"
    assert [set(point["makespan_s"]) for point in alone["points"]] == [{"online"}] * 2


def test_a_table_of_a_pipeline_that_stock_refuses(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Interleaved schedules want micro-batches for every stage; zero-bubble orders pass the cap."""
    document = {**DOCUMENT, "chunks": 2, "micro_batches": 3, "links": [], "max_in_flight": None}
    found = answer(capsys, "simulate", write(document), "--slow-stage", "1:1..2/1")["sweep"]
    for point in found["points"]:
        assert point["makespan_s"]["stock"] is point["makespan_s"]["interleaved-split"] is None
        assert point["makespan_s"]["planned"] >= point["lower_bound_s"] * (1 - 1e-12)
    over = write({**DOCUMENT, "max_in_flight": 3})
    assert main(["simulate", over, "--slow-stage", "1:1..2/1"]) == 0
    out = capsys.readouterr().out
    assert "factor of stage 1" in out
    assert "warning: zb-h1 holds more activations than a cap allows" in out
    assert "warning: planned" not in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--slow-link", "3:latency=60ms"], "'3:latency=60ms' is not like 3-4:latency=60ms"),
        (["--slow-link", "1-2:delay=60ms"], "has 'delay=60ms' where one each of latency="),
        (["--slow-link", "1-2:latency=60m"], "has the unit 'm', known are s, ms, us"),
        (["--slow-link", "1-2:latency=60"], "has '60' without a unit, known are s, ms, us"),
        (["--slow-link", "1-2:latency=0..9ms/3:log"], "a range in even ratios, which cannot begin or end at 0"),
        (["--max-in-flight", "1.5"], "has 1.5, which is no whole number of at least 1"),
        (
            ["--each-link", "latency=0..1ms", "--slow-stage", "1:1..2", "--micro-batches", "4..8"],
            "4 ranges (link, factor of stage 1, latency of each link, micro-batches): a table is over two",
        ),
        (["--slow-link", "1-2:latency=-1"], "has '-1', which is no number and no range"),
        (["--slow-link", "1-2:bandwidth=10"], "has '10' without a unit, known are B/s"),
        (["--slow-link", "1-2:bandwidth=1GB/s"], "a bandwidth needs the size of the messages: add message_bytes"),
        (["--slow-link", "1-2:bandwidth=1GB/s,occupancy=1ms"], "give one of them"),
        (["--slow-link", "1-3:latency=1ms"], "what-if options: link 1->3 joins stages that are not neighbours"),
        (["--slow-link", "1-2:latency=1ms@3"], "names replica 3, but there are 1 (0..0)"),
        (["--slow-link", "1-2:latency=1ms@x"], "'x' is no replica and no range"),
        (["--slow-link", "1-2:latency=0..1ms/0"], "has 0 steps in a range, 1 to 1000 are possible"),
        (["--slow-stage", "4:2"], "slow stage 4 is none of the stages 0..3"),
        (["--slow-stage", "1"], "'1' is not like 5:1.3"),
        (["--slow-stage", "1:0"], "factor of slow stage 1 must be a number above 0, got 0.0"),
        (["--replicas", "0"], "replicas must be a whole number of at least 1, got 0"),
        (["--replicas", "many"], "invalid int value: 'many'"),
    ],
)
@pytest.mark.parametrize("command", [("plan",), ("simulate", "--schedule", "gpipe")], ids=["plan", "simulate"])
def test_bad_options_are_refused(
    command: tuple[str, ...], options: list[str], message: str, write: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *rest = command
    assert message in refused(capsys, name, write(DOCUMENT), *rest, *options)


def test_what_a_table_cannot_do_is_refused(write: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs, swept = write(DOCUMENT), ("--slow-stage", "1:1..2")
    assert "--csv is for one plan" in refused(capsys, "plan", costs, *swept, "--csv", str(tmp_path / "plan.csv"))
    assert "--blocking is for one schedule" in refused(capsys, "simulate", costs, *swept, "--blocking")
    assert "unknown schedule 'best'" in refused(capsys, "simulate", costs, *swept, "--schedule", "best")
    assert "needs a fixed order" in refused(capsys, "simulate", costs, "--schedule", "online", "--blocking")


def test_progress_is_shown_if_asked_for(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = iter([0.0, 1.0, 2.5, 3.0, 5.0])
    monkeypatch.setattr("adaptra_megatron.tools.cli.terminal.time.monotonic", lambda: next(now_s))
    with shown_progress(True) as progress:
        assert progress is not None
        for done in range(4):
            progress("simulating replicas", done, 4)
    assert capsys.readouterr().err == "simulating replicas: 1 of 4 (2 s)\nsimulating replicas: 3 of 4 (5 s)\n"
    for wanted in (None, False):
        with shown_progress(wanted) as progress:
            assert progress is None


@pytest.mark.parametrize(("options", "shown"), [([], True), (["--no-progress"], False)])
def test_a_terminal_sees_a_bar(options: list[str], shown: bool, write: Any) -> None:
    pytest.importorskip("rich")
    costs = write({**DOCUMENT, "replicas": REPLICAS})
    command = [sys.executable, "-m", "adaptra_megatron.tools.cli", "plan", costs, "--json", *options]
    ours, theirs = pty.openpty()
    try:
        ran = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=theirs,
            timeout=60,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
        )
        os.set_blocking(ours, False)
        try:
            seen = os.read(ours, 1 << 16).decode()
        except BlockingIOError:
            seen = ""
    finally:
        os.close(ours)
        os.close(theirs)
    assert ran.returncode == 0
    assert ("planning" in seen) == shown
    assert json.loads(ran.stdout)["replicas"]["count"] == 6
