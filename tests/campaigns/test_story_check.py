# SPDX-License-Identifier: Apache-2.0
"""The judge of the closed loop: a log that tells the story passes, and any gap or invention in it is named."""

from __future__ import annotations

from dataclasses import replace

from adaptra_megatron.telemetry.events import (
    Event,
    LinkDetection,
    PathChosen,
    PlanMade,
    PlanSwitched,
    StageDetection,
    Stamp,
    StampedEvent,
)
from adaptra_megatron.transport.link_paths import Path
from campaigns.story_check import check_agreement, check_story
from testing.faults.network.link_faults import LinkFault
from testing.faults.network.link_story import LinkFaultScenario

STORY = LinkFaultScenario(
    iterations=60, spells=(LinkFault(source=1, target=2, latency_s=0.06, from_iteration=10, until_iteration=20),)
)


def at(iteration: int, event: Event) -> StampedEvent:
    stamp = Stamp(run="a", rank=0, sequence=0, iteration=iteration, wall_s=0.0, monotonic_s=float(iteration))
    return StampedEvent(stamp=stamp, event=event)


def link(since: int, after: str, source: int = 1, target: int = 2) -> LinkDetection:
    before = "healthy" if after == "slow" else "slow"
    reason = f"a message takes long, said of {since}"
    return LinkDetection(
        source=source, target=target, before=before, after=after, reason=reason, pipeline=0, since_iteration=since
    )


def plan(number: int, reason: str, adopted: bool = True) -> PlanMade:
    return PlanMade(number=number, adopted=adopted, reason=reason, predicted_s=1.0, current_predicted_s=2.0)


SLOW, HEALTHY = link(10, "slow"), link(20, "healthy")
LOG = [
    at(1, plan(1, "first costs")),
    at(3, PlanSwitched(number=1, before=0)),
    at(11, SLOW),
    at(11, plan(2, f"link 1->2 of pipeline 0: {SLOW.reason}")),
    at(12, PlanSwitched(number=2, before=1)),
    at(24, HEALTHY),
    at(24, plan(3, f"link 1->2 of pipeline 0: {HEALTHY.reason}")),
    at(25, PlanSwitched(number=3, before=2)),
]


def test_the_story_as_it_was() -> None:
    assert check_story(STORY, LOG) == []


def without(event: Event) -> list[StampedEvent]:
    return [entry for entry in LOG if entry.event is not event]


def test_an_onset_that_was_not_found() -> None:
    missed, unexplained = check_story(STORY, without(SLOW))
    assert missed.startswith("missed: iteration 10: link 1->2 turns slow")
    assert "said to be healthy" in missed
    assert unexplained.startswith("iteration 12: switch to plan 2 names no finding")


def test_an_onset_that_was_found_late() -> None:
    late = sorted([*without(SLOW), at(14, SLOW)], key=lambda entry: entry.stamp.iteration)
    (missed,) = check_story(STORY, late)
    assert missed.startswith("missed: iteration 10")
    assert "by iteration 13" in missed


def test_a_recovery_that_was_not_found() -> None:
    missed, _ = check_story(STORY, without(HEALTHY))
    assert missed.startswith("missed: iteration 20: link 1->2 heals")
    assert "by iteration 40" in missed


def test_alarms_without_cause() -> None:
    wrong_way, wrong_time, wrong_state = link(10, "slow", 2, 1), link(30, "slow"), link(10, "healthy")
    for wrong in (wrong_way, wrong_time, wrong_state):
        assert any(line.startswith("false alarm") for line in check_story(STORY, [*LOG, at(41, wrong)]))
    half_way = replace(link(20, "slow"), before="slow")
    assert check_story(STORY, sorted([*LOG, at(21, half_way)], key=lambda entry: entry.stamp.iteration)) == []
    nearly, before_its_time = at(11, link(9, "slow")), at(9, link(9, "slow"))
    assert check_story(STORY, [*LOG[:2], nearly, *LOG[2:]]) == []
    for off in (before_its_time, at(11, link(8, "slow")), at(12, link(12, "slow"))):
        assert len(check_story(STORY, [*LOG[:2], off, *LOG[2:]])) == 1
    stage = StageDetection(stage=1, before="healthy", after="slow", reason="F takes long")
    assert [line.split(":")[0] for line in check_story(STORY, [*LOG, at(30, stage)])] == ["false alarm"]


def test_an_alarm_while_the_machine_was_too_busy_is_excused() -> None:
    log = [*LOG, at(41, link(40, "slow", 2, 1)), at(45, link(44, "healthy", 2, 1))]
    assert len(check_story(STORY, log)) == 1
    assert check_story(STORY, log, busy=[41]) == []
    assert len(check_story(STORY, log, busy=[39, 42, 43])) == 1


def test_so_is_a_plan_for_what_was_measured_then() -> None:
    drifted = plan(4, "F of stage 2, chunk 0: 14.0 ms instead of 11.0 ms")
    log = [*LOG, at(40, drifted), at(42, switch(4))]
    assert len(check_story(STORY, log)) == 1
    assert check_story(STORY, log, busy=[39]) == []
    assert len(check_story(STORY, log, busy=[37, 43])) == 1
    assert len(check_story(STORY, [*LOG, at(42, switch(4))], busy=[42])) == 1, "no stage made it"


def test_a_switch_to_a_plan_that_was_turned_down() -> None:
    (problem,) = check_story(STORY, [*LOG, at(30, plan(4, SLOW.reason, adopted=False)), at(32, switch(4))])
    assert problem == "iteration 32: switch to plan 4, which was not made"


def test_plans_that_change_paths_are_explained_by_the_choice() -> None:
    chosen = PathChosen(
        number=4, source=1, target=2, before="device", after="host", reason="the device path is slow", message_s={}
    )
    costs = plan(5, "latency of link 1->2: 1.0 ms instead of 60.0 ms")
    log = [*LOG, at(30, chosen), at(31, switch(4)), at(33, costs), at(34, switch(5))]
    assert check_story(STORY, log) == []
    (problem,) = check_story(STORY, [*LOG, at(30, chosen), at(31, switch(4)), at(53, costs), at(54, switch(5))])
    assert problem.startswith("iteration 54: switch to plan 5 names no finding")


def test_a_plan_may_follow_a_link_that_is_known_more_precisely() -> None:
    def refined(iteration: int) -> list[StampedEvent]:
        return [
            *LOG,
            at(iteration, plan(4, "latency of link 1->2: 58.0 ms instead of 60.0 ms")),
            at(iteration, switch(4)),
        ]

    assert check_story(STORY, refined(27)) == []
    assert len(check_story(STORY, refined(33))) == 1


def test_the_host_path_may_be_found_to_be_slow_later_if_it_was() -> None:
    spell = replace(STORY.spells[0], paths=frozenset(Path))
    story, later = replace(STORY, spells=(spell,)), at(15, replace(link(14, "slow"), path="host"))
    assert check_story(story, LOG) == []
    assert check_story(story, [*LOG, later]) == []
    assert [line.split(":")[0] for line in check_story(STORY, [*LOG, later])] == ["false alarm"]


def test_a_message_that_takes_no_longer_than_the_machine_is_late_is_no_false_alarm() -> None:
    found = at(31, replace(link(30, "slow", 0, 1), latency_s=0.8e-3, bandwidth_bytes_s=10e6))  # 1 ms for a message
    now_and_then = [0.5e-3 if iteration % 3 else 5e-3 for iteration in range(60)]
    assert check_story(STORY, [*LOG, found], late_s=[1.1e-3] * 60) == []
    assert check_story(STORY, [*LOG, found], late_s=now_and_then) == [], "it was late just then"
    for late_s in ([0.9e-3] * 60, [*now_and_then[:30], 0.5e-3, 0.5e-3, *now_and_then[32:]], []):
        assert [line.split(":")[0] for line in check_story(STORY, [*LOG, found], late_s=late_s)] == ["false alarm"]


def switch(number: int) -> PlanSwitched:
    return PlanSwitched(number=number, before=number - 1)


def test_agreement() -> None:
    plans = [[0, "a"], [0, "a"], [1, "b"]]
    log = [at(2, switch(1))]
    assert check_agreement([plans, plans], log) == []
    assert check_agreement([], log)
    other = [[0, "a"], [1, "b"], [1, "b"]]
    assert check_agreement([plans, other], log)[0].startswith("iteration 1: ranks ran different plans")
    same_number = [[0, "a"], [0, "c"], [1, "b"]]
    assert len(check_agreement([plans, same_number], log)) == 1
    of_other = [StampedEvent(stamp=replace(log[0].stamp, rank=1, iteration=1), event=switch(1))]
    assert check_agreement([plans, other], [*log, *of_other], [[0], [1]]) == [], "each replica has plans of its own"
    assert len(check_agreement([plans, other], log, [[0], [1]])) == 1
    assert check_agreement([plans, plans], [at(1, switch(1))])[0].startswith("switches")
