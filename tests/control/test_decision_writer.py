# SPDX-License-Identifier: Apache-2.0
"""Whatever planner and training do when: one decision per iteration, and no plan is lost."""

from __future__ import annotations

import threading
import time

from hypothesis import given
from hypothesis import strategies as st

from adaptra_megatron.common.typed_messages import encoded
from adaptra_megatron.control.decisions import (
    DELAY,
    Decision,
    DecisionWriter,
    Forecast,
    LinkName,
    Order,
    PackedFigures,
    Paths,
    TelemetrySection,
)
from adaptra_megatron.schedule.costs import uniform_costs
from adaptra_megatron.telemetry.scalars import JobFigures
from adaptra_megatron.telemetry.trace_requests import Iterations

LINKS = (LinkName(0, 0, 1), LinkName(0, 1, 2))


COSTS = uniform_costs(1, 100, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)


def plan(number: int) -> Order:
    return Order(((number,),), COSTS)


def play(steps: list[tuple[bool, bool, bool]]) -> tuple[list[tuple[int, Decision]], list[Decision]]:
    """A step is one iteration of the training: whether the planner has caught up with what was measured by then, and
    whether it found another order or other paths. Returns what was written, and what the planner decided."""
    written: list[tuple[int, Decision]] = []

    def write(iteration: int, decision: Decision, packet: bytes | None) -> None:
        assert packet in (None, encoded(decision)), "its bytes are those of another decision"
        written.append((iteration, decision))

    writer = DecisionWriter(write)
    number, diverted, decided = 0, (), []
    for iteration, (plans, order, paths) in enumerate(steps):
        if iteration >= DELAY:
            assert writer.needed(iteration) == written[-1][1] or writer.published(iteration) is not None
        if plans and iteration > 0:
            number += order or paths
            diverted = LINKS[: (len(diverted) + 1) % 3] if paths else diverted
            decision = Decision(number, plan(number) if order else None, paths=Paths(diverted))
            decided.append(decision)
            writer.decided(iteration - 1, decision, encoded(decision))
    writer.needed(len(steps) + DELAY)
    return written, decided


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=40))
def test_each_iteration_has_one_decision_and_the_latest_one_comes_into_force(
    steps: list[tuple[bool, bool, bool]],
) -> None:
    written, decided = play(steps)
    assert [iteration for iteration, _ in written] == list(range(DELAY, len(written) + DELAY))
    numbers = [decision.number for _, decision in written]
    assert numbers == sorted(numbers)
    orders = [decision.order for _, decision in written if decision.order is not None]
    made = [decision.order for decision in decided if decision.order is not None]
    assert [order for order in made if order in orders] == orders, "each at most once, in their order"
    if decided:
        assert written[-1][1].number == decided[-1].number
        assert written[-1][1].paths == decided[-1].paths
        assert not made or orders[-1] == made[-1], "the latest order is never lost"
    for (_, before), (_, after) in zip(written, written[1:], strict=False):
        changes = after.order is not None or (before.paths or Paths()) != (after.paths or Paths())
        assert not changes or before.number != after.number, "what changes has a number of its own"


def test_a_late_decision_carries_what_came_before_it() -> None:
    written: list[tuple[int, Decision]] = []
    writer = DecisionWriter(lambda iteration, decision, _: written.append((iteration, decision)))
    assert writer.needed(4) == Decision(0), "nothing has been decided"
    asked, later = (Iterations(3, 4),), (Iterations(7, 8),)
    figures = PackedFigures.of(JobFigures(bubble_fraction=0.5))
    writer.decided(0, Decision(1, plan(1), Forecast(1.0, 2.0), Paths(), TelemetrySection(asked)))
    writer.decided(1, Decision(2, None, Forecast(0.5, 1.0), Paths(LINKS, LINKS), TelemetrySection(later, figures)))
    assert writer.in_force == Decision(2, paths=Paths(LINKS))
    both = TelemetrySection(asked + later, figures)
    assert writer.needed(5) == Decision(2, plan(1), Forecast(0.5, 2.0), Paths(LINKS, LINKS), both)
    assert writer.needed(6) == Decision(2, paths=Paths(LINKS))
    assert [iteration for iteration, _ in written] == [2, 3, 4, 5, 6]


def test_bytes_of_the_planner_process_go_on_as_they_are_unless_the_decision_is_merged_or_kept() -> None:
    written: list[bytes | None] = []
    writer = DecisionWriter(lambda iteration, decision, packet: written.append(packet))
    writer.decided(0, Decision(1), b"first")
    writer.needed(4)
    writer.decided(1, Decision(2), b"second")
    writer.decided(2, Decision(3), b"third")
    assert writer.needed(5).number == 3
    assert written == [b"first", None, None, None]


def test_iterations_are_decided_on_from_the_second_after_the_first_that_is_measured() -> None:
    written: list[int] = []
    writer = DecisionWriter(lambda iteration, decision, _: written.append(iteration), first=7)
    writer.decided(7, Decision(1))
    assert writer.needed(10) == Decision(1)
    assert written == [9, 10]


def test_a_later_decision_without_a_section_leaves_it() -> None:
    first = Decision(1, plan(1), Forecast(1.0, None), Paths(LINKS), TelemetrySection())
    assert first.then(Decision(1)) == first
    assert first.then(Decision(2, plan(2), Forecast(0.5, 1.0))) == Decision(
        2, plan(2), Forecast(0.5, 1.0), Paths(LINKS), TelemetrySection()
    )
    assert Decision(1).then(first) == first


def test_planner_and_training_may_come_at_the_same_moment() -> None:
    written: list[int] = []

    def write(iteration: int, decision: Decision, packet: bytes | None) -> None:
        time.sleep(0.0005)
        written.append(iteration)

    writer, ran = DecisionWriter(write), threading.Semaphore(DELAY)

    def plan() -> None:
        for iteration in range(100):
            ran.acquire()
            writer.decided(iteration, Decision(iteration + 1))

    planner = threading.Thread(target=plan)
    planner.start()
    read = []
    for iteration in range(DELAY, 100 + DELAY):
        read.append(writer.needed(iteration).number)
        ran.release()
    planner.join()
    assert written == list(range(DELAY, 100 + DELAY))
    assert read == sorted(read)
