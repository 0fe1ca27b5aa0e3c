# SPDX-License-Identifier: Apache-2.0
"""What a leading rank says in the training's log, and the numbers it counts iterations by."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from adaptra_megatron.common.reasons import reason_text
from adaptra_megatron.telemetry.events import (
    Event,
    IterationsTimed,
    LinkDetection,
    MemoryWanted,
    PathChosen,
    PlanMade,
    PlanSwitched,
    RoutesChosen,
    StageDetection,
    Stamp,
    StampedEvent,
    StragglerDetection,
    SwitchMeasured,
)
from adaptra_megatron.telemetry.log_lines import MOST_IN_A_ROW, PATIENCE, RunLog
from adaptra_megatron.tools.recordings.run_files import Numbering, renumbered

REASON = (
    "a message of 64 KiB takes 61 ms, before 0.8 ms",
    (" (baseline 0.8 ms, of 9 iterations up to ", 8, ")"),
    ("; seen in nearly all",),
    ("; the link carries 3 MiB per second",),
)
SLOW = LinkDetection(
    source=1,
    target=2,
    before="healthy",
    after="slow",
    reason=reason_text(REASON),
    reason_parts=REASON,
    path="device",
    pipeline=0,
    since_iteration=9,
)
BACK = replace(SLOW, source=2, target=1)
PLAN = PlanMade(
    number=2,
    adopted=True,
    reason="link 1->2 of pipeline 0: slow since iteration 9; it holds 3 activations instead of 4",
    memory="it holds 3 activations instead of 4",
    findings=1,
    predicted_s=1.621,
    current_predicted_s=2.046,
    lower_bound_s=1.5,
)
SWITCH = PlanSwitched(number=2, before=1, predicted_s=1.621, before_predicted_s=2.046)


@pytest.fixture(autouse=True)
def _everything_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="adaptra_megatron")


def say(log: RunLog, iteration: int, *events: Event) -> None:
    for event in events:
        log.take(event)
    log.say(iteration, lambda number: number + 101)


def test_the_story_of_a_link_that_turns_slow_and_heals(caplog: pytest.LogCaptureFixture) -> None:
    log = RunLog()
    say(log, 10, SLOW, BACK, PLAN)
    assert caplog.messages == [], "it may have gone by in the next iteration"
    say(log, 11, SWITCH)
    say(log, 14, SwitchMeasured(number=2, before_measured_s=2.056, after_measured_s=1.634, iterations=3))
    log.end(14, 5.1, "", "adaptra report RUN")
    say(log, 16, replace(SLOW, before="slow", since_iteration=15))
    well = {"before": "slow", "after": "healthy", "since_iteration": 20}
    say(log, 20, replace(SLOW, **well), replace(BACK, **well))
    say(log, 20 + PATIENCE)
    log.end(22, 0.0, "ValueError: no", "")
    assert caplog.messages == [
        "adaptra: iteration 112: link 1<->2 is slow since iteration 110: a message of 64 KiB takes 61 ms, before "
        "0.8 ms",
        "adaptra: iteration 112: plan 2 in force (it holds 3 activations instead of 4): 1621 ms an iteration expected "
        "instead of 2046 ms; no order takes less than 1500 ms",
        "adaptra: iteration 115: plan 2 takes 1634 ms an iteration, 1621 ms predicted, 2056 ms before",
        "adaptra: done after 14 iterations: 1 plan, about 5100 ms saved by them, link 1<->2 slow since iteration 110; "
        "adaptra report RUN",
        "adaptra: iteration 124: link 1<->2 is healthy since iteration 121: a message of 64 KiB takes 61 ms, before "
        "0.8 ms",
        "adaptra: ended by ValueError: no after 22 iterations: 1 plan",
    ]
    assert [record.levelname for record in caplog.records].count("WARNING") == 1


def test_a_replica_that_comes_last_is_said_at_once_in_the_jobs_name(caplog: pytest.LogCaptureFixture) -> None:
    log = RunLog(word="replica 0: ")
    late = StragglerDetection(
        replica=5,
        before="healthy",
        after="late",
        reason="by 180 ms; its host's CPUs are busy",
        remedy="move it",
        stage=2,
        first_rank=21,
        host="node7",
        since_iteration=9,
    )
    say(log, 31, late)
    log.end(32, 0.0, "", "")
    say(log, 60, StragglerDetection(replica=5, before="late", after="healthy", reason="it comes with the others"))
    log.end(61, 0.0, "", "")
    assert caplog.messages == [
        "adaptra: iteration 132: replica 5 (stage 2, rank 21 on node7) comes last to gradient synchronisation since "
        "iteration 110, by 180 ms; its host's CPUs are busy; move it",
        "adaptra: replica 0: done after 32 iterations: 0 plans, replica 5 late since iteration 110",
        "adaptra: iteration 161: replica 5 does not come last to gradient synchronisation any more: it comes with the "
        "others",
        "adaptra: replica 0: done after 61 iterations: 0 plans",
    ]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "INFO", "INFO"]


def between(low: int, high: int, *, hosts: tuple[str, str], replica: int, lane: int = 0) -> list[LinkDetection]:
    """Both directions and both paths of the link between stages 1 and 2 of a pipeline."""
    event = replace(
        SLOW,
        pipeline=low - 1,
        replica=replica,
        lane=lane,
        source_rank=low,
        target_rank=high,
        source_host=hosts[0],
        target_host=hosts[1],
        source_rnics=[f"mlx5_{lane}"],
    )
    back = replace(
        event,
        source=2,
        target=1,
        source_rank=high,
        target_rank=low,
        source_host=hosts[1],
        target_host=hosts[0],
        source_rnics=[],
        target_rnics=[f"mlx5_{lane}"],
        since_iteration=10,
    )
    late = "a message of 64 KiB takes 90 ms, 60 ms when it was first measured, while the link was slow already"
    return [
        replace(each, path=path, reason=late if path == "host" else REASON, since_iteration=at)
        for each in (event, back)
        for path, at in (("host", 12), ("device", each.since_iteration))
    ]


def test_a_cable_is_one_line_however_many_lanes_and_replicas_it_carries(caplog: pytest.LogCaptureFixture) -> None:
    log = RunLog()
    seconds = {**dict.fromkeys(range(9), 1.0), **dict.fromkeys(range(9, 13), 1.85)}
    hosts = ("node7", "node8")
    for event in (*between(8, 16, hosts=hosts, replica=0), *between(9, 17, hosts=hosts, replica=0, lane=1)):
        log.take(event)
    for event in between(40, 48, hosts=hosts, replica=1):
        log.take(event, 1)  # that replica's leader has reported it
    for iteration in (12, 12 + PATIENCE):
        log.say(iteration, lambda number: number + 101, seconds)
    assert caplog.messages == [
        "adaptra: iteration 116: link 1<->2 is slow since iteration 110: a message of 64 KiB takes 61 ms, before 0.8 "
        "ms; ranks 8-9, 40 on node7 (mlx5_0, mlx5_1) to ranks 16-17, 48 on node8, replicas 0-1, lanes 0-1; it costs "
        "850 ms of each iteration (46%)"
    ]
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_many_cables_between_the_same_stages_are_one_line_if_they_come_together(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = RunLog()
    for replica in range(5):
        hosts = (f"node{2 * replica}", f"node{2 * replica + 1}")
        for event in between(4 * replica + 1, 4 * replica + 2, hosts=hosts, replica=replica):
            log.take(event, replica)
    say(log, 12)
    say(log, 12 + PATIENCE)
    (line,) = caplog.messages
    assert line.endswith(
        "rank 1 on node0 (mlx5_0) to rank 2 on node1, rank 5 on node2 (mlx5_0) to rank 6 on node3, "
        "rank 9 on node4 (mlx5_0) to rank 10 on node5 and 2 more pairs of hosts, replicas 0-4"
    )
    healed = [
        replace(each, before="slow", after="healthy", since_iteration=30)
        for each in between(5, 6, hosts=("node2", "node3"), replica=1)
    ]
    caplog.clear()
    say(log, 30, *healed)
    say(log, 30 + PATIENCE)
    assert len(caplog.messages) == 1
    assert " is healthy since iteration 131" in caplog.messages[0]
    log.end(40, 0.0, "", "")
    assert caplog.messages[-1].endswith(": 0 plans, link 1<->2 slow since iteration 110")


def test_findings_whose_place_is_not_known_are_distinguished_by_stage(caplog: pytest.LogCaptureFixture) -> None:
    log = RunLog()
    stage = StageDetection(stage=3, before="healthy", after="slow", reason="F takes 2 ms", pipeline=4)
    say(log, 7, SLOW, replace(SLOW, pipeline=1), replace(SLOW, source=4, target=5, path="host"), stage)
    say(log, 7, replace(stage, stage=5, stage_rank=9, host="node3"))
    say(log, 7 + PATIENCE)
    assert [message.partition(" is ")[0] for message in caplog.messages] == [
        "adaptra: iteration 111: link 1<->2 of 2 pipelines",
        "adaptra: iteration 111: link 4<->5, host path,",
        "adaptra: iteration 111: stage 3 of the pipeline of rank 4",
        "adaptra: iteration 111: stage 5 of the pipeline of rank 4",
    ]
    assert caplog.messages[-1].endswith("F takes 2 ms; rank 9 on node3")


def test_a_switch_says_what_the_plans_before_it_were_for(caplog: pytest.LogCaptureFixture) -> None:
    log = RunLog()
    path = PathChosen(number=1, source=0, target=1, before="device", after="host", reason="it is slow")
    routes = RoutesChosen(number=2, reason="stage 1 gives 2 micro-batches", lower_bound_s=12.0)
    say(log, 5, path, routes, replace(PLAN, number=1, adopted=False), PlanSwitched(number=2, before=0))
    say(log, 9, replace(SWITCH, number=3, before_predicted_s=None))
    assert caplog.messages == [
        "adaptra: iteration 106: plan 2 in force (link 0->1 takes the host path; stage 1 gives 2 micro-batches)",
        "adaptra: iteration 110: plan 3 in force: 1621 ms an iteration expected",
    ]


def test_a_plan_that_is_no_faster_is_not_called_so(caplog: pytest.LogCaptureFixture) -> None:
    log = RunLog()
    saves = replace(PLAN, reason="it holds 3 activations instead of 4")
    say(log, 5, saves, replace(SWITCH, predicted_s=1.8381, before_predicted_s=1.8384))
    say(log, 9, SwitchMeasured(number=2, before_measured_s=1.852, after_measured_s=1.855, iterations=3))
    assert caplog.messages == [
        "adaptra: iteration 106: plan 2 in force (it holds 3 activations instead of 4): 1838 ms an iteration expected, "
        "as before; no order takes less than 1500 ms"
    ]


def test_what_memory_would_buy_is_a_line(caplog: pytest.LogCaptureFixture) -> None:
    wanted = MemoryWanted(held=2.0, predicted_s=2.594, caps={"3": 1.991, "4": 1.75}, source=0, target=1)
    say(RunLog(), 9, wanted, replace(wanted, source=None, target=None))
    assert [message.partition("110: ")[2] for message in caplog.messages] == [
        f"{what} cannot be hidden within 2 activations per stage: 2594 ms; 3 would give 1991 ms, 4 would give 1750 ms "
        "(--adaptra-max-in-flight)"
        for what in ("link 0<->1", "the way through the pipeline")
    ]


def test_one_replica_says_what_all_have_found_and_planned(caplog: pytest.LogCaptureFixture) -> None:
    other = RunLog(word="replica 3: ", first=False)
    say(other, 10, SLOW)
    say(other, 11, PLAN, SWITCH)
    other.end(20, 1.0, "", "")
    assert caplog.messages == [], "who leads the first replica says it"
    log = RunLog(word="replica 0: ")
    log.take(replace(SWITCH, number=1), 2)
    say(log, 3)
    say(log, 3 + PATIENCE)
    assert caplog.messages == [], "nothing is wrong"
    for replica in (1, 2, 3, 7):
        log.take(replace(SLOW, pipeline=4 * replica), replica)
        log.take(SWITCH, replica)
    say(log, 11)
    say(log, 11 + PATIENCE)
    assert [message.partition(": ")[2] for message in caplog.messages] == [
        "iteration 115: link 1<->2 of 4 pipelines is slow since iteration 110: a message of 64 KiB takes 61 ms, before "
        "0.8 ms",
        "iteration 115: replicas 1-3, 7: other plans in force: 1621 ms an iteration expected instead of 2046 ms",
    ]


def test_a_link_that_flaps_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    log, healthy = RunLog(), replace(SLOW, before="slow", after="healthy")
    for iteration in range(0, 50, 2):
        say(log, iteration, SLOW)
        say(log, iteration + 1, healthy)
    assert caplog.messages == [], "nothing has stood for long"
    for iteration in range(100, 100 + 20 * MOST_IN_A_ROW, 20):
        say(log, iteration, SLOW)
        say(log, iteration + 9)
        say(log, iteration + 10, healthy)
        say(log, iteration + 19)
    assert len(caplog.messages) == MOST_IN_A_ROW


def stamped(event: Event, iteration: int) -> StampedEvent:
    stamp = Stamp(run="run", rank=0, sequence=0, iteration=iteration, wall_s=0.0, monotonic_s=0.0)
    return StampedEvent(stamp=stamp, event=event)


def test_events_get_the_numbers_that_megatron_prints() -> None:
    """A run that goes on after iteration 500, with an evaluation of 10 iterations after its first four."""
    batches = [
        IterationsTimed(first=0, seconds=[1.0] * 4, step=501),
        IterationsTimed(first=14, seconds=[1.0], step=505),
    ]
    times = [stamped(batch, 15) for batch in batches]
    assert [Numbering(times).of(number) for number in (-1, 0, 3, 4, 13, 14, 20)] == [-1, 501, 504, 505, 505, 505, 511]
    (first, second, found) = renumbered(
        [*times, stamped(replace(SLOW, reason_parts=("reported up to iteration ", 3)), 14)]
    )
    assert (found.stamp.iteration, first.event, second.event) == (
        505,
        replace(batches[0], first=501),
        replace(batches[1], first=505),
    )
    assert isinstance(found.event, LinkDetection)
    assert (found.event.since_iteration, found.event.reason) == (505, "reported up to iteration 504")


def test_old_logs_keep_their_numbers() -> None:
    events = [stamped(IterationsTimed(first=0, seconds=[1.0]), 0), stamped(SLOW, 9)]
    assert renumbered(events) == events
