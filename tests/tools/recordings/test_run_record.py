# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest
from support.made_up.runs import Iteration, write_events, write_run

from adaptra_megatron.telemetry.event_log import EventLog, read_events
from adaptra_megatron.telemetry.events import (
    IterationsTimed,
    LinkDetection,
    PlanSwitched,
    RanksLost,
    RunStarted,
    StampedEvent,
)
from adaptra_megatron.telemetry.trace import TraceError, trace_path
from adaptra_megatron.tools.recordings import run_files
from adaptra_megatron.tools.recordings.run_record import RunRecord, of_replica, read_run
from adaptra_megatron.tools.report.report_findings import find, saved_seconds
from adaptra_megatron.tools.report.report_wording import summary

FAST, SLOW = Iteration(), Iteration(delay_s=2.0)


def spans(run: RunRecord) -> list[tuple[int, int]]:
    return [(part.first, part.last) for part in run.parts]


def test_a_run_that_nothing_happens_to_is_one_part(tmp_path: Path) -> None:
    write_run(tmp_path, [FAST] * 5)
    run = read_run(tmp_path)
    assert spans(run) == [(1, 5)]
    assert (run.stages, run.pipelines, run.ranks) == (3, 1, (0, 1, 2))
    assert run.parts[0].seconds == pytest.approx(run.iterations[0].seconds)


@pytest.mark.parametrize(
    ("iterations", "expected"),
    [
        ([FAST] * 4 + [SLOW] * 4 + [FAST] * 4, [(1, 4), (5, 8), (9, 12)]),
        ([FAST] * 4 + [SLOW] + [FAST] * 4, [(1, 9)]),
        ([FAST] * 4 + [Iteration(split=True)] * 3, [(1, 4), (5, 7)]),
        ([FAST] * 4 + [SLOW] + [Iteration(split=True, delay_s=2.0)] * 3, [(1, 4), (5, 5), (6, 8)]),
    ],
    ids=["a step and back", "an outlier", "another order", "an order that answers one slow iteration"],
)
def test_parts_without_events(tmp_path: Path, iterations: list[Iteration], expected: list[tuple[int, int]]) -> None:
    write_run(tmp_path, iterations)
    assert spans(read_run(tmp_path)) == expected


def test_events_begin_parts(tmp_path: Path) -> None:
    write_run(tmp_path, [FAST] * 9)
    detection = LinkDetection(source=0, target=1, before="healthy", after="slow", reason="")
    write_events(tmp_path, [(detection, 4), (PlanSwitched(number=1, before=0), 6)])
    run = read_run(tmp_path)
    assert spans(run) == [(0, 3), (4, 5), (6, 8)]
    (began,) = run.parts[1].beginning
    assert isinstance(began, StampedEvent)
    assert began.event == detection


def test_the_slowest_of_several_pipelines_is_taken(tmp_path: Path) -> None:
    write_run(tmp_path, [FAST] * 3, first_rank=0, ranks_apart=2)
    write_run(tmp_path, [SLOW] * 3, first_rank=1, ranks_apart=2)
    run = read_run(tmp_path)
    assert (run.pipelines, run.ranks) == (2, (1, 3, 5))


def test_evaluations_and_unfinished_iterations_are_left_out(tmp_path: Path) -> None:
    write_run(tmp_path, [FAST, Iteration(forward_only=True), FAST, FAST])
    path = trace_path(tmp_path, 2)
    path.write_text(path.read_text().rsplit("\n", 2)[0] + "\n")  # the last stage was killed
    assert [iteration.number for iteration in read_run(tmp_path).iterations] == [1, 2], "as Megatron counts"


def test_of_an_iteration_that_was_redone_after_a_death_the_later_attempt_counts(tmp_path: Path) -> None:
    write_run(tmp_path, [FAST, FAST, SLOW, FAST, FAST])
    loss = RanksLost(epoch=1, ranks={"rank 5": "was killed"}, dead_cells=["1.2"], live=5, seconds=0.5)
    times = [IterationsTimed(first=first, step=step, seconds=[2.0] * 2) for first, step in ((0, 1), (3, 3))]
    write_events(tmp_path, [(times[0], 1), (loss, 3), (times[1], 4)])
    run = read_run(tmp_path)
    assert [iteration.number for iteration in run.iterations] == [1, 2, 3, 4]
    assert len({iteration.seconds for iteration in run.iterations}) == 1
    assert summary(run, find(run))


def test_of_a_directory_with_nothing_in_it_nothing_is_made(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="--adaptra-trace-dir"):
        read_run(tmp_path)
    (tmp_path / "rank-00000.jsonl").touch()
    with pytest.raises(TraceError, match="failed before it wrote the header"):
        read_run(tmp_path)


@pytest.mark.parametrize("empty", [True, False], ids=["empty", "no file"])
def test_a_stage_without_a_trace_is_named_and_times_are_those_of_the_others(tmp_path: Path, empty: bool) -> None:
    write_run(tmp_path, [FAST] * 4 + [SLOW] * 3)
    path = trace_path(tmp_path, 1)
    path.unlink()
    if empty:
        path.touch()
    run = read_run(tmp_path)
    said = ["rank-00001.jsonl is left out: " in run.missing[0]] if empty else []
    assert all(said)
    assert run.missing[-1].startswith("stage 1 left no trace")
    assert (run.stages, run.ranks, run.traced) == (3, (0, 2), ())
    assert spans(run) == [(1, 4), (5, 7)]


def test_of_several_pipelines_a_whole_one_is_shown(tmp_path: Path) -> None:
    """Rank 2 is the first of stage 1: without it, files alone would pair ranks of different replicas."""
    write_run(tmp_path, [SLOW] * 3, first_rank=0, ranks_apart=2)
    write_run(tmp_path, [FAST] * 3, first_rank=1, ranks_apart=2)
    trace_path(tmp_path, 2).unlink()
    run = read_run(tmp_path)
    assert run.ranks == (1, 3, 5)
    assert len(run.traced) == 3


def test_a_rank_that_died_early_is_named_and_the_rest_has_times(tmp_path: Path) -> None:
    write_run(tmp_path, [FAST] * 4 + [SLOW] * 6)
    path = trace_path(tmp_path, 2)
    path.write_text("".join(f"{line}\n" for line in path.read_text().splitlines()[:4]) + '{"iter')
    run = read_run(tmp_path)
    assert run.missing == (
        "rank 2: its trace ends in iteration 3, those of other stages in iteration 10: of later iterations only times "
        "are known",
    )
    assert [iteration.number for iteration in run.traced] == [1, 2, 3]
    assert [iteration.number for iteration in run.iterations] == list(range(1, 10)), "the last one may be running"


def test_a_line_that_is_damaged_costs_one_iteration(tmp_path: Path) -> None:
    write_run(tmp_path, [FAST] * 6)
    path = trace_path(tmp_path, 1)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], lines[3][:50], *lines[4:]]) + "\n")
    run = read_run(tmp_path)
    (said,) = run.missing
    assert said.startswith("rank-00001.jsonl: 1 line left out, the first because line 4: expected one iteration's")
    assert [iteration.number for iteration in run.traced] == [1, 2, 4, 5, 6]


def test_the_log_alone_is_a_run(tmp_path: Path) -> None:
    times = IterationsTimed(first=0, seconds=[2.0] * 4 + [3.0] * 4, step=11)
    write_events(tmp_path, [(times, 8)])
    with (tmp_path / "events-00000.jsonl").open("a") as file:
        file.write("damage\n")
    run = read_run(tmp_path)
    assert spans(run) == [(11, 14), (15, 18)]
    assert (run.stages, run.ranks) == (3, ())
    assert run.missing[0].startswith("events-00000.jsonl: 1 line left out, the first because line 4: no JSON")


def test_large_files_are_read_by_several_processes_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, [FAST] * 5)
    alone = read_run(tmp_path)
    monkeypatch.setattr(run_files, "WORTH_PROCESSES_NBYTES", 0)
    reported: list[tuple[str, int, int]] = []
    assert read_run(tmp_path, lambda *progress: reported.append(progress)).iterations == alone.iterations
    assert reported == [("reading traces", number, 3) for number in (1, 2, 3)]


def test_what_a_link_costs_and_what_a_switch_saves(tmp_path: Path) -> None:
    write_run(tmp_path, [FAST] * 4 + [SLOW] * 2 + [Iteration(split=True, delay_s=1.0)] * 4)
    write_events(tmp_path, [(PlanSwitched(number=1, before=0), 6)])
    run = read_run(tmp_path)
    healthy, slow, planned = find(run)
    assert healthy.slow_links == []
    assert healthy.without == {}
    assert set(slow.slow_links) == {(0, 1), (1, 0)}
    assert slow.links[0, 1].median_s == pytest.approx(2.0)
    assert slow.without == {(0, 1): pytest.approx(healthy.seconds)}
    assert sum(slow.use_s.values()) == pytest.approx(slow.seconds)
    assert slow.idle_share == pytest.approx(1.0 - healthy.seconds * (1.0 - healthy.idle_share) / slow.seconds)
    assert saved_seconds([healthy, slow, planned]) == pytest.approx(4 * (slow.seconds - planned.seconds))


def test_what_another_replica_switched_begins_no_part(tmp_path: Path) -> None:
    """Replicas have plans of their own, and the pipeline that is shown is of one of them."""
    logs = [
        EventLog(tmp_path, RunStarted(layout={"replica": replica}, versions={}, config={}), run="a", rank=replica)
        for replica in (0, 1)
    ]
    for log, event in zip(logs, (PlanSwitched(number=1, before=0), PlanSwitched(number=1, before=0)), strict=True):
        log.log(event, 3)
        log.close()
    events = read_events(tmp_path)
    assert [found.stamp.rank for found in of_replica(1, events)] == [1, 1]
    assert len(events) == 4
