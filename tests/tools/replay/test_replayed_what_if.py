# SPDX-License-Identifier: Apache-2.0
"""What stragglers cost in made-up jobs whose stragglers are known."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.made_up.recordings import Seconds, recorded_step

from adaptra_megatron.common.layout import Cell
from adaptra_megatron.tools.replay.operations import OpType
from adaptra_megatron.tools.replay.replay_engine import batches_of
from adaptra_megatron.tools.replay.replayed_what_if import ReplayedStragglers, stragglers_of


def even(optype: OpType, cell: Cell, micro_batch: int) -> float:
    return {OpType.FORWARD: 1.0, OpType.BACKWARD: 2.0}.get(optype, 0.01)


def analysed(seconds: Seconds, replicas: int, stages: int, micro_batches: int, steps: int = 2) -> ReplayedStragglers:
    recorded = [recorded_step(number, replicas, stages, micro_batches, seconds) for number in range(steps)]
    return stragglers_of(recorded, batches_of(recorded))


@settings(deadline=None, max_examples=10)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4))
def test_equal_workers_do_not_slow_a_job(replicas: int, stages: int, micro_batches: int) -> None:
    found = analysed(even, replicas, stages, micro_batches)
    assert found.slowdown == pytest.approx(1.0)
    assert found.launch_slowdown == pytest.approx(1.0)
    for by_each in (found.by_optype, found.by_stage, found.by_replica, found.by_worker):
        assert list(by_each.values()) == pytest.approx([1.0] * len(by_each))
    assert found.replay_errors == pytest.approx((0.0, 0.0), abs=1e-9)


@settings(deadline=None, max_examples=6)
@given(st.integers(2, 3), st.integers(0, 1), st.floats(1.5, 4.0))
def test_one_slow_worker_is_named_and_explains_the_slowdown(replica_count: int, stage: int, factor: float) -> None:
    slow = Cell(replica_count - 1, stage)
    found = analysed(
        lambda optype, cell, number: even(optype, cell, number) * (factor if cell == slow and optype.computes else 1.0),
        replica_count,
        3,
        8,
        1,
    )
    assert found.slowest_workers == (slow,)
    assert next(iter(found.by_worker)) == slow
    assert (next(iter(found.by_replica)), next(iter(found.by_stage))) == slow
    # The ideal is the mean, of which the slow worker is a part, so a little more than everything may go away.
    assert 0.9 < found.workers_share < 1.5
    assert found.last_stage_share < 0.5


def test_a_long_last_stage_is_named() -> None:
    found = analysed(
        lambda optype, cell, number: even(optype, cell, number) * (2.0 if cell.stage == 3 and optype.computes else 1.0),
        2,
        4,
        8,
    )
    assert next(iter(found.by_stage)) == 3
    assert found.last_stage_share > 1.0
    assert found.workers_share < 0.1


def test_late_hosts_are_told_from_slow_workers() -> None:
    step = recorded_step(0, 2, 2, 4, even, delay_s=0.5)
    found = stragglers_of([step], batches_of([step]))
    assert found.slowdown == pytest.approx(1.0)
    assert found.launch_slowdown == pytest.approx(step.seconds / recorded_step(0, 2, 2, 4, even).seconds)
