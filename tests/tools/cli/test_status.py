# SPDX-License-Identifier: Apache-2.0
"""`adaptra status` on made-up logs."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.made_up.runs import write_events, write_replicas

from adaptra_megatron.common.reasons import reason_text
from adaptra_megatron.telemetry.event_log import read_events
from adaptra_megatron.telemetry.events import (
    Event,
    Fault,
    IterationsTimed,
    LinkDetection,
    MemoryWanted,
    PathChanged,
    PlanSwitched,
    RanksLost,
    RoutesChosen,
    StageDetection,
    StragglerDetection,
)
from adaptra_megatron.tools.cli import run_commands
from adaptra_megatron.tools.cli.main import main

HEALTHY = IterationsTimed(first=0, seconds=[9.0, *[2.0] * 9])
SLOW_LINK = LinkDetection(source=0, target=1, before="healthy", after="slow", reason="80 ms", since_iteration=4)
LOST = RanksLost(
    epoch=1,
    ranks={"rank 4 (stage 1 on node7)": "exit status -9"},
    dead_cells=["1.1"],
    live=8,
    seconds=0.75,
    moved=((1, 1, 0, 3), (1, 1, 2, 3)),
)


def exit_status(directory: Path, *words: str, age_s: float = 0.0) -> int:
    """As it is some time after the last record. Files are as if copied just now."""
    last_s = max(found.stamp.wall_s for found in read_events(directory, lambda damage: None))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(time, "time", lambda: last_s + age_s)
        return main(["status", str(directory), *words])


def status(
    directory: Path, capsys: pytest.CaptureFixture[str], *, age_s: float = 0.0, healthy: bool | None = None
) -> dict[str, list[str]]:
    """The lines by their names. `healthy`: as the exit status is to say it."""
    given = exit_status(directory, age_s=age_s)
    assert given in ((0, 3) if healthy is None else (0,) if healthy else (3,))
    found: dict[str, list[str]] = {}
    for line in capsys.readouterr().out.splitlines():
        name, text = line.split(": ", 1)
        found.setdefault(name, []).append(text.strip())
    return found


def test_a_healthy_run_has_nothing_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_events(tmp_path, [(HEALTHY, 9), (PlanSwitched(number=1, before=0), 10)], ended=False)
    said = status(tmp_path, capsys, healthy=True)
    assert re.fullmatch(r"1 replica of 3 stages; runs, wrote \S+ .?s ago", said.pop("run")[0])
    assert said == {
        "speed": ["iteration 10, 2.00 s each (median of the last 1), plan 1 since iteration 10"],
        "to do": ["nothing"],
    }


def test_a_stage_is_slow_since_its_first_actions_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Later events are of its other actions, one of which heals; the reason names all iterations but the first."""
    slow = StageDetection(stage=1, before="healthy", after="slow", reason="B takes 2 ms", pipeline=3, since_iteration=4)
    more = replace(slow, before="slow", since_iteration=8, reason="B takes 2 ms; F takes 64 ms since iteration 9")
    less = replace(more, since_iteration=20)
    healed, again = replace(slow, before="slow", after="healthy"), replace(more, before="healthy")
    for events, since in (((slow, more, less), 4), ((slow, healed, again, less), 8)):
        write_events(tmp_path, [(HEALTHY, 9), *((event, 10) for event in events)], ended=False)
        said = status(tmp_path, capsys, healthy=False)
        text = f"stage 1 of the pipeline of rank 3 is slow since iteration {since}: {more.reason}"
        assert said["slow"] == [text]


def test_a_link_is_slow_since_its_first_level_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    worse = replace(SLOW_LINK, before="slow", reason="90 ms since iteration 7", since_iteration=7)
    other = replace(worse, path="host")
    for events, since in (((SLOW_LINK, worse), 4), ((SLOW_LINK, other), 4), ((other,), 7)):
        write_events(tmp_path, [(HEALTHY, 9), *((event, 10) for event in events)], ended=False)
        (said,) = status(tmp_path, capsys, healthy=False)["slow"]
        assert f" is slow since iteration {since}: " in said


def test_what_is_slow_is_named_until_it_heals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stage = StageDetection(stage=2, before="healthy", after="slow", reason="1.4 times as long", pipeline=3)
    moved = PathChanged(source=0, target=1, before="device", after="host", cause="no answer", failover=True)
    routes = RoutesChosen(number=1, reason="stage 2 gives 3 micro-batches", moved=((2, 0, 1, 3),))
    fault = Fault(what="delegate restarted", detail="it died")
    events: list[tuple[Event, int]] = [(HEALTHY, 9), (SLOW_LINK, 6), (stage, 7), (moved, 7), (routes, 8), (fault, 9)]
    write_events(tmp_path, events, ended=False)
    said = status(tmp_path, capsys, healthy=False)
    assert said["slow"] == [
        "link 0→1 is slow since iteration 4: 80 ms",
        "stage 2 of the pipeline of rank 3 is slow since iteration 7: 1.4 times as long",
    ]
    assert said["paths"] == ["link 0→1 of rank 0 takes the host path since iteration 7: no answer"]
    assert said["routes"] == ["stage 2 gives 3 micro-batches"]
    assert said["faults"] == ["delegate restarted: it died"]
    assert [line.split()[3] for line in said["to do"]] == ["network", "GPUs", "RNICs,"]
    well = replace(SLOW_LINK, before="slow", after="healthy")
    back = replace(moved, before="host", after="device", failover=False)
    write_events(tmp_path, [*events, (well, 10), (back, 10)], ended=False)
    assert {"slow", "paths"} & status(tmp_path, capsys).keys() == {"slow"}


def test_a_replica_that_comes_last_is_named_until_it_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late = StragglerDetection(
        replica=5,
        before="healthy",
        after="late",
        reason="by 180 ms",
        remedy="give the job CPUs of its own",
        stage=2,
        first_rank=21,
        host="node7",
        since_iteration=4,
    )
    write_events(tmp_path / "late", [(HEALTHY, 9), (late, 9)], ended=False)
    said = status(tmp_path / "late", capsys)
    assert said["slow"] == ["replica 5 is late since iteration 4: by 180 ms"]
    assert said["to do"] == ["replica 5, stage 2 on node7: give the job CPUs of its own"]
    over = StragglerDetection(replica=5, before="late", after="healthy", reason="it comes with the others")
    write_events(tmp_path / "over", [(HEALTHY, 9), (late, 9), (over, 9)], ended=False)
    assert status(tmp_path / "over", capsys)["to do"] == ["nothing"]


def test_dead_ranks_are_named_with_what_they_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    after = IterationsTimed(first=10, seconds=[5.0, 2.5, 2.5])
    write_replicas(tmp_path, 3, [(SLOW_LINK, 6), (HEALTHY, 9), (LOST, 10), (after, 12)])
    said = status(tmp_path, capsys)
    assert said["run"][0].startswith("3 replicas of 3 stages, 9 ranks; runs")
    assert said["speed"] == ["iteration 12, 2.50 s each (median of the last 2)"]
    (dead,) = said["dead"]
    assert re.fullmatch(
        r"rank 4 \(stage 1 on node7\) \(exit status -9\) since iteration 10, [-0-9]{10} [:0-9]{8}: 750 ms until "
        r"redone, then 2\.50 s an iteration instead of 2\.00 s",
        dead,
    )
    assert said["routes"] == ["stage 1 of replica 1: 3 at replica 0 and 3 at replica 2, in each iteration"]
    assert said["to do"][0].startswith("nothing at once: restart from the latest checkpoint")
    assert said["slow"][-1].startswith("(findings from before ranks last failed")
    later = RoutesChosen(number=2, reason="stage 1 of pipeline 0: slow", moved=((1, 1, 2, 6),))
    write_replicas(tmp_path / "later", 3, [(HEALTHY, 9), (LOST, 10), (SLOW_LINK, 11), (later, 12), (after, 12)])
    said = status(tmp_path / "later", capsys)
    assert said["routes"] == ["stage 1 of replica 1: 6 at replica 2, in each iteration"]
    assert len(said["slow"]) == 1, "it was found since"


def test_a_stage_that_has_one_cell_left_is_urgent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_replicas(tmp_path, 3, [(HEALTHY, 9), (LOST, 10), (replace(LOST, dead_cells=["0.1", "1.1"]), 11)])
    said = status(tmp_path, capsys)
    assert len(said["dead"]) == 2
    assert said["to do"][0].startswith("restart soon, with failed parts replaced: stage 1 has one cell left")


def test_a_run_that_is_silent_or_has_ended_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_events(tmp_path, [(HEALTHY, 9)], ended=False)
    assert "runs, wrote" in status(tmp_path, capsys, age_s=100.0)["run"][0]
    said = status(tmp_path, capsys, age_s=1000.0, healthy=False)
    assert "silent for 17 min" in said["run"][0]
    assert said["to do"][0].startswith("look at the first rank whose log stops")
    write_events(tmp_path / "ended", [(HEALTHY, 9)])
    assert "ended 17 min ago: training finished" in status(tmp_path / "ended", capsys, age_s=1000.0)["run"][0]


def test_of_many_lines_of_a_kind_the_latest_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_events(tmp_path, [(Fault(what=f"fault {number}", detail="x"), 1) for number in range(20)], ended=False)
    faults = status(tmp_path, capsys)["faults"]
    assert faults == ["12 more are in the log; the latest:", *(f"fault {number}: x" for number in range(12, 20))]


def test_a_directory_without_a_log_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path)]) == 2
    assert "name the --adaptra-trace-dir of a job" in capsys.readouterr().err
    (tmp_path / "events-00000.jsonl").write_text("{\n")
    assert main(["status", str(tmp_path)]) == 2
    assert "line 1: no JSON" in capsys.readouterr().err


def test_a_line_that_cannot_be_read_hides_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_events(tmp_path, [(HEALTHY, 9)], ended=False)
    (tmp_path / "events-00001.jsonl").write_text("damage\n")
    said = status(tmp_path, capsys)
    assert "2.00 s each" in said["speed"][0]
    assert said["faults"][0].startswith("1 line of the log cannot be read: ")


def test_iterations_have_the_numbers_that_megatron_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_events(tmp_path, [(replace(HEALTHY, step=501), 9), (SLOW_LINK, 6)], ended=False)
    said = status(tmp_path, capsys)
    assert said["speed"][0].startswith("iteration 510, ")
    assert said["slow"] == ["link 0→1 is slow since iteration 505: 80 ms"]


def test_programs_get_a_line_of_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_events(tmp_path, [(HEALTHY, 9), (SLOW_LINK, 6)], ended=False)
    assert exit_status(tmp_path, "--json") == 3
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert (found["state"], found["iteration"], found["iteration_s"]) == ("runs", 9, 2.0)
    assert found["wrote_s"] == 120.0, "by the record, not by the file"
    assert found["slow"] == ["link 0→1 is slow since iteration 4: 80 ms"]
    (finding,) = found["findings"]
    assert {name: value for name, value in finding.items() if value not in (None, [])} == {
        "text": found["slow"][0],
        "links": ["0→1"],
        "before_s": 2.0,
        "now_s": 2.0,
        "cost_s": 0.0,
        "share": 0.0,
        "kind": "link",
        "state": "slow",
        "source": 0,
        "target": 1,
        "since_iteration": 4,
        "reason": "80 ms",
        "remedy": "look at the network of link 0→1; meanwhile orders and paths go around it",
        "told_by_rank": 0,
        "stale": False,
    }


def test_a_cable_is_one_finding_with_what_it_touches_costs_and_what_would_help(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device = ("a message of 16 KiB takes 60.5 ms, before 1.61 ms", (" (baseline 1.61 ms)", "; seen in 9"))
    events: list[tuple[Event, int]] = [(IterationsTimed(first=0, seconds=[1.0] * 11 + [1.85] * 14), 25)]
    for replica in range(2):
        for source, path in ((0, "device"), (1, "device"), (0, "host"), (1, "host")):
            ranks, hosts = (8 * replica, 8 * replica + 4), ("node7", "node8")
            found = LinkDetection(
                source=source,
                target=1 - source,
                before="healthy",
                after="slow",
                reason=reason_text(device) if path == "device" else "a message of 16 KiB takes 60.3 ms, before 30.5 ms",
                reason_parts=device if path == "device" else (),
                path=path,
                pipeline=ranks[0],
                since_iteration=11 if path == "device" else 15,
                replica=replica,
                lane=0,
                source_rank=ranks[source],
                target_rank=ranks[1 - source],
                source_host=hosts[source],
                target_host=hosts[1 - source],
                source_rnics=[f"mlx5_{source}"],
            )
            events.append((found, 13 if path == "device" else 16))
    events.append((PlanSwitched(number=3, before=2), 17))
    events.append((MemoryWanted(held=2.0, predicted_s=1.85, caps={"3": 1.333, "4": 1.13}, source=0, target=1), 18))
    write_events(tmp_path, events, ended=False)
    said = status(tmp_path, capsys, healthy=False)
    assert said["slow"] == [
        "link 0↔1 is slow since iteration 11: a message of 16 KiB takes 60.5 ms, before 1.61 ms; ranks 0, 8 on node7 "
        "(mlx5_0) to ranks 4, 12 on node8 (mlx5_1), replicas 0-1; it costs 850 ms of each iteration (46%); plan 3 runs "
        "since iteration 17"
    ]
    assert said["to do"] == [
        "look at the network between node7 and node8; meanwhile orders and paths go around it; "
        "--adaptra-max-in-flight above 2 would make iterations shorter (3: 1.33 s, 4: 1.13 s)"
    ]
    exit_status(tmp_path, "--json")
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    expected = {
        "kind": "link",
        "links": ["0→1", "1→0"],
        "hosts": ["node7", "node8"],
        "ranks": [0, 4, 8, 12],
        "rnics": ["node7 mlx5_0", "node8 mlx5_1"],
        "replicas": [0, 1],
        "lanes": [0],
        "before_s": 1.0,
        "now_s": 1.85,
        "plan": 3,
        "plan_since_iteration": 17,
        "helps": {"3": 1.333, "4": 1.13},
    }
    assert {name: finding[name] for name in expected} == expected
    assert finding["cost_s"] == pytest.approx(0.85)
    other = replace(events[1][0], source_host="node3", target_host="node4", since_iteration=20)
    write_events(tmp_path / "two", [*events, (other, 22)], ended=False)
    assert len(status(tmp_path / "two", capsys)["slow"]) == 2, "another cable"


def test_following_ends_with_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_events(tmp_path, [(HEALTHY, 9)], ended=False)
    slept_s: list[float] = []

    def ends_in_the_second_sleep(interval_s: float) -> None:
        slept_s.append(interval_s)
        if len(slept_s) == 2:
            write_events(tmp_path, [(HEALTHY, 9)])

    clock = SimpleNamespace(time=lambda: 130.0, sleep=ends_in_the_second_sleep)  # the records' time
    monkeypatch.setattr(run_commands, "time", clock)
    assert main(["status", str(tmp_path), "--follow", "--interval-s", "0.1", "--json"]) == 3
    states = [json.loads(line)["state"] for line in capsys.readouterr().out.splitlines()]
    assert states == ["runs", "runs", "failed"]
    assert slept_s == [0.1, 0.1]
