# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest
from support.made_up.runs import Iteration, write_events, write_run

from adaptra_megatron.telemetry.events.event_log import EventLog, read_events
from adaptra_megatron.telemetry.events.events import LinkDetection, PlanSwitched, RunStarted, StampedEvent
from adaptra_megatron.telemetry.report.findings import find, saved_seconds
from adaptra_megatron.telemetry.run_record import RunRecord, of_replica, read_run
from adaptra_megatron.telemetry.tracing.trace import TraceError, trace_path

FAST, SLOW = Iteration(), Iteration(delay_s=2.0)


def spans(run: RunRecord) -> list[tuple[int, int]]:
    return [(part.first, part.last) for part in run.parts]


def test_a_run_that_nothing_happens_to_is_one_part(tmp_path: Path) -> None:
    write_run(tmp_path, [FAST] * 5)
    run = read_run(tmp_path)
    assert spans(run) == [(0, 4)]
    assert (run.stages, run.pipelines, run.ranks) == (3, 1, (0, 1, 2))
    assert run.parts[0].seconds == pytest.approx(run.iterations[0].seconds)


@pytest.mark.parametrize(
    ("iterations", "expected"),
    [
        ([FAST] * 4 + [SLOW] * 4 + [FAST] * 4, [(0, 3), (4, 7), (8, 11)]),
        ([FAST] * 4 + [SLOW] + [FAST] * 4, [(0, 8)]),
        ([FAST] * 4 + [Iteration(split=True)] * 3, [(0, 3), (4, 6)]),
        ([FAST] * 4 + [SLOW] + [Iteration(split=True, delay_s=2.0)] * 3, [(0, 3), (4, 4), (5, 7)]),
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
    assert [iteration.number for iteration in read_run(tmp_path).iterations] == [0, 2]


def test_a_missing_stage_and_a_missing_trace_are_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="--adaptra-trace-dir"):
        read_run(tmp_path)
    write_run(tmp_path, [FAST])
    trace_path(tmp_path, 1).unlink()
    with pytest.raises(TraceError, match=r"no trace of stages \[1\]"):
        read_run(tmp_path)


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
