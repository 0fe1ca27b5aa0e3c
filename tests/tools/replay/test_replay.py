# SPDX-License-Identifier: Apache-2.0
"""Replays of recordings, as they were and with other durations, against a slow simulation of the same job."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.made_up.recordings import Seconds, recorded_step

from adaptra_megatron.common.layout import Cell
from adaptra_megatron.schedule.classic import one_f_one_b
from adaptra_megatron.schedule.costs import LinkCost, uniform_costs
from adaptra_megatron.schedule.simulator import simulate
from adaptra_megatron.tools.replay.operations import Operation, OpType, RecordedStep, ReplayError, with_sequence_numbers
from adaptra_megatron.tools.replay.pipelines import KINDS
from adaptra_megatron.tools.replay.replay_engine import ReplayBatch, batches_of, replay
from adaptra_megatron.tools.replay.replayed_messages import with_messages

jobs = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 6))
"""Replicas, stages, micro-batches."""


def made_up_seconds(seed: int) -> Seconds:
    """Seconds that look random; messages and collectives are the same at both ends."""

    def seconds(optype: OpType, cell: Cell, micro_batch: int) -> float:
        name = optype.value.replace("recv", "send")
        share = Random(f"{seed} {name} {cell} {micro_batch}").random()
        return (0.05 + share) * (1.0 if optype.computes else 0.2)

    return seconds


def slower(seconds: Seconds, cell: Cell, factor: float) -> Seconds:
    return lambda optype, owner, number: (
        seconds(optype, owner, number) * (factor if owner == cell and optype.computes else 1.0)
    )


def replayed_s(batch: ReplayBatch, factor: Callable[[OpType, Cell], float]) -> float:
    ends_s = replay(
        batch, lambda index, event: factor(event.optype, event.takers[0].cell) * batch.work_s[index][None, :]
    )
    return float(ends_s.max())


@settings(deadline=None, max_examples=30)
@given(jobs, st.integers(0, 10_000), st.sampled_from([0.0, 0.01]))
def test_a_step_is_replayed_as_it_was_recorded(job: tuple[int, int, int], seed: int, delay_s: float) -> None:
    step = recorded_step(3, *job, made_up_seconds(seed), delay_s=delay_s)
    (batch,) = batches_of([step])
    assert float(replay(batch).max()) == pytest.approx(step.seconds, rel=1e-9)


@settings(deadline=None, max_examples=30)
@given(jobs, st.integers(0, 10_000), st.sampled_from([0.2, 0.7, 3.0]), st.data())
def test_a_cell_of_another_speed_makes_of_a_replay_what_it_makes_of_the_job(
    job: tuple[int, int, int], seed: int, factor: float, data: st.DataObject
) -> None:
    cell = Cell(data.draw(st.integers(0, job[0] - 1)), data.draw(st.integers(0, job[1] - 1)))
    seconds = made_up_seconds(seed)
    (batch,) = batches_of([recorded_step(0, *job, seconds)])
    expected = recorded_step(0, *job, slower(seconds, cell, factor))
    found_s = replayed_s(batch, lambda optype, own: factor if own == cell and optype.computes else 1.0)
    assert found_s == pytest.approx(expected.seconds, rel=1e-9)


@settings(deadline=None, max_examples=15)
@given(jobs, st.integers(0, 10_000))
def test_without_launch_delays_hosts_take_no_time(job: tuple[int, int, int], seed: int) -> None:
    seconds = made_up_seconds(seed)
    (late,) = batches_of([recorded_step(0, *job, seconds, delay_s=0.03)])
    prompt = recorded_step(0, *job, seconds)
    assert float(replay(late, launch_delays=False).max()) == pytest.approx(prompt.seconds, rel=1e-9)


def test_steps_of_one_job_are_replayed_side_by_side() -> None:
    steps = [recorded_step(number, 2, 3, 4, made_up_seconds(number)) for number in range(5)]
    (batch,) = batches_of(steps)
    assert batch.numbers == tuple(range(5))
    assert replay(batch).max(axis=0)[0].tolist() == pytest.approx([step.seconds for step in steps])


def simulated_step(stages: int, micro_batches: int, latency_s: float) -> RecordedStep:
    """Computation alone, as our own runs record it: sends that do not block."""
    pairs = [(a, b) for a, b in itertools.permutations(range(stages), 2) if abs(a - b) == 1]
    costs = uniform_costs(
        stages,
        micro_batches,
        forward_s=1.0,
        backward_input_s=1.0,
        backward_weight_s=1.0,
        links=dict.fromkeys(pairs, LinkCost(latency_s)),
    )
    simulated = simulate(one_f_one_b(stages, micro_batches), costs)
    optype_of = {kind: optype for optype, kind in KINDS.items()}
    rows = zip(simulated.schedule.orders, simulated.start_s, simulated.end_s, strict=True)
    return RecordedStep(
        number=0,
        operations=with_sequence_numbers(
            Operation(Cell(0, action.stage), optype_of[action.kind], start_s, end_s - start_s, 0, 0, action.micro_batch)
            for order, starts, ends in rows
            for action, start_s, end_s in zip(order, starts, ends, strict=True)
        ),
    )


@settings(deadline=None, max_examples=20)
@given(st.integers(2, 5), st.integers(1, 8), st.sampled_from([0.0, 0.3, 2.5]))
def test_messages_that_were_not_recorded_are_found(stages: int, micro_batches: int, latency_s: float) -> None:
    """The first and the last gradient on their ways find idle stages, so the latency of every link is seen."""
    (step,) = with_messages([simulated_step(stages, micro_batches, latency_s)])
    (batch,) = batches_of([step])
    assert float(replay(batch).max()) == pytest.approx(step.seconds)
    assert float(replay(batch, launch_delays=False).max()) == pytest.approx(step.seconds)
    quick = simulated_step(stages, micro_batches, 0.0)
    ends_s = replay(
        batch,
        lambda index, event: batch.work_s[index][None, :] * event.optype.computes,
        launch_delays=False,
    )
    assert float(ends_s.max()) == pytest.approx(quick.seconds)


def test_a_send_without_a_receive_is_named() -> None:
    step = recorded_step(7, 1, 2, 2, made_up_seconds(0))
    kept = tuple(each for each in step.operations if each.optype is not OpType.FORWARD_RECV)
    with pytest.raises(ReplayError, match=r"step 7: forward-send 0 of cell 0\.0 has 0 other ends"):
        batches_of([RecordedStep(number=7, operations=kept)])


def test_operations_that_wait_for_each_other_are_named() -> None:
    def at(stage: int, optype: OpType, start_s: float) -> Operation:
        return Operation(Cell(0, stage), optype, start_s, 1.0, 0)

    crossed = (
        at(0, OpType.FORWARD_SEND, 0.0),
        at(0, OpType.BACKWARD_RECV, 2.0),
        at(1, OpType.BACKWARD_SEND, 0.0),
        at(1, OpType.FORWARD_RECV, 2.0),
    )
    with pytest.raises(ReplayError, match="step 4 wait for each other"):
        batches_of([RecordedStep(number=4, operations=crossed)])


def test_no_step_is_no_recording() -> None:
    with pytest.raises(ReplayError, match="no step"):
        batches_of([])
    with pytest.raises(ReplayError, match="step 3 has no operation"):
        RecordedStep(number=3, operations=())
