# SPDX-License-Identifier: Apache-2.0
"""Online dispatch finishes, keeps cap and order, whatever arrives when and whichever stages are online."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from online_stages import SimulatedStages
from support.schedules import named_schedules, random_schedules

from adaptra_megatron.engine.execution.stage_program import compile_program
from adaptra_megatron.engine.online_order import OnlineOrder
from adaptra_megatron.schedule.classic import gpipe, split_backward, stock_order
from adaptra_megatron.schedule.costs import LinkCost, uniform_costs
from adaptra_megatron.schedule.ir import Schedule
from adaptra_megatron.schedule.planner import plan
from adaptra_megatron.schedule.schedule_checks import check_schedule
from adaptra_megatron.schedule.simulator import peak_in_flight
from adaptra_megatron.schedule.transfers.launch_order import OrderedMessage, sent_to


@st.composite
def planned_schedules(draw: st.DrawFn) -> Schedule:
    """What the planner makes of a slow link under a tight cap."""
    stages, chunks = draw(st.integers(2, 4)), draw(st.integers(1, 2))
    micro_batches = stages * draw(st.integers(1, 3))
    slow = LinkCost(draw(st.floats(0.0, 5.0)), draw(st.floats(0.0, 1.0)))
    costs = uniform_costs(
        stages,
        micro_batches,
        chunks=chunks,
        forward_s=1.0,
        backward_input_s=1.0,
        backward_weight_s=1.0,
        links={(0, 1): slow, (1, 0): slow},
        max_in_flight=draw(st.integers(stages * chunks, 2 * stages * chunks)),
    )
    return plan(costs, deadline_s=0.01).schedule


separate = named_schedules(least_stages=2).filter(lambda schedule: not schedule.combines)
"""Plans with combined actions run in their order (`IterationWork.planned`)."""
schedules = st.one_of(separate, random_schedules(), planned_schedules())


@st.composite
def runs(draw: st.DrawFn) -> tuple[SimulatedStages, Schedule, tuple[float | None, ...], float, list[int]]:
    """A plan, caps that it keeps, some stages online, some of these without sight, and random times."""
    schedule = draw(schedules)
    released = draw(st.sampled_from([0.0, 0.3, 0.5, 1.0, -0.4, -2.0]))
    room = [draw(st.sampled_from([0.0, 0.0, 0.5, 1.0, 3.0, None])) for _ in range(schedule.stages)]
    peaks = peak_in_flight(schedule, released)
    caps = tuple(None if more is None else peak + more for peak, more in zip(peaks, room, strict=True))
    online = sorted(draw(st.sets(st.integers(0, schedule.stages - 1))))
    blind = [stage for stage in online if draw(st.integers(0, 3)) == 0]
    chosen = random.Random(draw(st.integers(0, 2**32)))
    mean_s = draw(st.sampled_from([0.0, 0.3, 3.0]))
    stages = SimulatedStages(
        schedule,
        caps,
        released,
        online=online,
        blind=blind,
        delay_s=lambda _message: chosen.expovariate(1 / mean_s) if mean_s else 0.0,
        duration_s=lambda _action: chosen.uniform(0.1, 2.0),
    )
    return stages, schedule, caps, released, online


@settings(max_examples=400, deadline=None)
@given(runs())
def test_any_mix_of_stages_finishes_in_a_valid_order(
    run: tuple[SimulatedStages, Schedule, tuple[float | None, ...], float, list[int]],
) -> None:
    stages, schedule, caps, released, online = run
    assert stages.run(), "stages wait for each other for ever"
    ran = tuple(tuple(step.action for step in steps) for steps in stages.ran)
    # Complete, F, B and W of each chunk in micro-batch order, caps kept, and again free of deadlock.
    executed = Schedule(
        stages=schedule.stages, chunks=schedule.chunks, micro_batches=schedule.micro_batches, orders=ran
    )
    check_schedule(executed, max_in_flight=caps, released_at_backward_input=released)
    for stage, order in enumerate(schedule.orders):
        if stage not in online:
            assert ran[stage] == order
    # Each neighbour gets what it expects, in the order in which it posts its receives.
    for (source, target), messages in stages.sent.items():
        planned = sent_to(schedule.orders[source], target, schedule.placement)
        assert messages == planned


@settings(max_examples=100, deadline=None)
@given(schedules, st.sampled_from([0.0, 0.5]))
def test_while_nothing_is_late_it_is_the_plan(schedule: Schedule, released: float) -> None:
    for stage, order in enumerate(schedule.orders):
        cap = peak_in_flight(schedule, released)[stage]
        online = OnlineOrder(compile_program(schedule, stage), cap, released)
        for action in order:
            step = online.next(lambda message: True)
            assert step is not None
            assert step.action == action
            online.take(step)
        assert online.finished
        assert online.next(lambda message: True) is None


class Stage:
    """One stage's order, message by message."""

    def __init__(self, schedule: Schedule, stage: int, cap: float, released: float = 0.0) -> None:
        self.order = OnlineOrder(compile_program(schedule, stage), cap, released)
        self.arrived: set[OrderedMessage] = set()

    def get(self, *messages: OrderedMessage) -> None:
        self.arrived.update(messages)

    def run(self) -> str | None:
        step = self.order.next(self.arrived.__contains__)
        if step is None:
            return None
        self.order.take(step)
        return f"{step.action.kind}{step.action.micro_batch}"

    def awaited(self) -> list[str]:
        return [f"{step.action.kind}{step.action.micro_batch}" for step in self.order.candidates()]


def activation(micro_batch: int) -> OrderedMessage:
    return OrderedMessage(0, 1, False, 0, micro_batch)


def gradient(micro_batch: int) -> OrderedMessage:
    return OrderedMessage(2, 1, True, 0, micro_batch)


def test_what_is_late_is_not_waited_for_and_weight_gradients_fill_what_is_left() -> None:
    stage = Stage(split_backward(gpipe(3, 3), None), 1, cap=3)
    assert (stage.run(), stage.awaited()) == (None, ["F0"])
    stage.get(activation(0), gradient(0))
    assert [stage.run(), stage.run()] == ["F0", "I0"], "F1 is late"
    stage.get(activation(1))
    assert [stage.run(), stage.run()] == ["F1", "W0"], "back to the plan, and then F2 is late and I1 too"
    assert (stage.run(), stage.awaited()) == (None, ["I1", "F2"])
    stage.get(gradient(1), activation(2))
    assert [stage.run() for _ in range(4)] == ["F2", "I1", "W1", None]


def test_at_the_cap_no_forward_starts_though_its_message_is_here() -> None:
    stage = Stage(split_backward(stock_order(3, 4), 0), 1, cap=2, released=0.5)
    stage.get(*map(activation, range(4)))
    assert [stage.run(), stage.run()] == ["F0", "F1"]
    assert (stage.run(), stage.awaited()) == (None, ["I0"])
    stage.get(gradient(0))
    assert [stage.run() for _ in range(4)] == ["I0", "W0", "F2", None]
