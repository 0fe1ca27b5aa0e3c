# SPDX-License-Identifier: Apache-2.0
"""What remedies would bring made-up jobs, where it is known what they can bring."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.made_up.recordings import Seconds, recorded_step

from adaptra_megatron.common.layout import Cell
from adaptra_megatron.tools.replay.operations import OpType
from adaptra_megatron.tools.replay.remedies import Remedies, remedies_for
from adaptra_megatron.tools.replay.replay_engine import batches_of


def even(optype: OpType, cell: Cell, micro_batch: int) -> float:
    return {OpType.FORWARD: 1.0, OpType.BACKWARD: 2.0}.get(optype, 0.01)


def with_slow_cell(slow: Cell, factor: float) -> Seconds:
    return lambda optype, cell, number: (
        even(optype, cell, number) * (factor if cell == slow and optype.computes else 1.0)
    )


def with_lengths(step: int) -> Seconds:
    """Micro-batches of one to three times the shortest one's length, on all stages alike, and others in each step."""

    def seconds(optype: OpType, cell: Cell, micro_batch: int) -> float:
        length = 1.0 + 2.0 * Random(f"{step} {cell.replica} {micro_batch}").random()
        return even(optype, cell, micro_batch) * (length if optype.computes else 1.0)

    return seconds


def remedied(*seconds: Seconds, job: tuple[int, int, int]) -> tuple[Remedies, dict[str, float]]:
    """For the first of the steps. `job`: replicas, stages, micro-batches."""
    steps = [recorded_step(number, *job, each) for number, each in enumerate(seconds)]
    found = remedies_for(steps[0], batches_of(steps))
    assert found.why_not == ""
    return found, {remedy.key: remedy.seconds for remedy in found.rows}


@settings(deadline=None, max_examples=8)
@given(st.integers(1, 2), st.integers(1, 3), st.integers(1, 5))
def test_where_all_is_even_there_is_nothing_to_exchange(replicas: int, stages: int, micro_batches: int) -> None:
    found, seconds = remedied(even, job=(replicas, stages, micro_batches))
    assert not {"exchange", "routing", "balance", "balance-split"} & set(seconds)
    assert seconds["host-path"] <= found.now_s * (1.0 + 1e-9)
    assert seconds["split-backward"] <= seconds["order"] * (1.0 + 1e-9)
    assert seconds["order"] <= seconds["host-path"] * (1.0 + 1e-9)
    assert seconds.get("memory", 0.0) <= seconds["split-backward"]
    if stages > 1:
        assert seconds["even-stages"] == pytest.approx(found.now_s)


@settings(deadline=None, max_examples=4)
@given(st.integers(2, 4), st.floats(1.8, 3.0), st.data())
def test_a_slow_cell_is_exchanged_or_routed_around(replicas: int, factor: float, data: st.DataObject) -> None:
    slow = Cell(data.draw(st.integers(0, replicas - 1)), data.draw(st.integers(0, 1)))
    if replicas == 2:
        factor = 1.8  # of two cells, the median is their mean: slowness is found from fewer than all peers
    found, seconds = remedied(with_slow_cell(slow, factor), job=(replicas, 2, 6))
    assert seconds["routing"] < 0.9 * found.now_s
    if replicas > 2:
        healthy = recorded_step(0, replicas, 2, 6, even)
        assert seconds["exchange"] == pytest.approx(healthy.seconds)


def test_long_micro_batches_are_shared_out() -> None:
    found, seconds = remedied(*map(with_lengths, range(9)), job=(4, 2, 8))
    assert seconds["balance"] < 0.97 * found.now_s
    assert seconds["balance-split"] <= seconds["balance"]


def test_a_long_last_stage_gains_by_split_backwards_and_memory_and_other_layers() -> None:
    found, seconds = remedied(
        lambda optype, cell, number: even(optype, cell, number) * (1.5 if cell.stage == 3 and optype.computes else 1.0),
        job=(1, 4, 4),
    )
    assert seconds["memory"] < seconds["split-backward"] < found.now_s
    assert seconds["even-stages"] < found.now_s
    (memory,) = (remedy for remedy in found.rows if remedy.key == "memory")
    assert memory.extra_activations >= 1
    assert found.gain(memory) == pytest.approx(1.0 - memory.seconds / found.now_s)


def test_replicas_that_ran_different_actions_have_no_remedies_but_a_reason() -> None:
    step = recorded_step(0, 2, 2, 3, even)
    last = Cell(1, 1)
    renamed = tuple(
        each._replace(micro_batch=9) if each.cell == last and each.micro_batch == 2 else each
        for each in step.operations
    )
    odd = dataclasses.replace(step, operations=renamed)
    found = remedies_for(odd, batches_of([odd]))
    assert found.rows == ()
    assert "replica 1 and replica 0 did not run the same actions" in found.why_not
