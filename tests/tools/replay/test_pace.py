# SPDX-License-Identifier: Apache-2.0
"""Since when something is slow."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptra_megatron.common.layout import Cell
from adaptra_megatron.tools.replay.operations import Operation, OpType, RecordedStep, ReplayError
from adaptra_megatron.tools.replay.replay_engine import changed_at

noise = st.lists(st.floats(0.99, 1.01), min_size=2, max_size=12)


@given(noise, noise, st.sampled_from([0.5, 0.85, 1.15, 3.0]), st.integers(0, 100))
def test_a_change_of_level_is_found_where_it_happened(
    before: list[float], after: list[float], factor: float, first: int
) -> None:
    values = [*before, *(factor * each for each in after)]
    assert changed_at(dict(enumerate(values, first))) == first + len(before)


@given(noise, st.floats(0.01, 100.0))
def test_noise_is_no_change(values: list[float], scale: float) -> None:
    assert changed_at({number: scale * each for number, each in enumerate(values)}) is None


def test_one_long_step_is_no_change() -> None:
    assert changed_at({number: 5.0 if number == 4 else 1.0 for number in range(9)}) is None
    assert changed_at({}) is None


@pytest.mark.parametrize("times", [(0.0, -1.0), (math.nan, 1.0), (0.0, math.inf)])
def test_times_that_cannot_be_are_refused(times: tuple[float, float]) -> None:
    with pytest.raises(ReplayError, match=r"step 2: optimizer 0 of cell 0\.1 starts at"):
        RecordedStep(number=2, operations=(Operation(Cell(0, 1), OpType.OPTIMIZER, *times, 0),))
