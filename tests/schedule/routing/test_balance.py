# SPDX-License-Identifier: Apache-2.0
"""Whole micro-batches swapped between replicas: counts stay, the longest work shrinks, what need not move stays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptra_megatron.schedule.costs import CostError
from adaptra_megatron.schedule.routing.balance import balanced_replicas


@given(st.data())
def test_counts_stay_and_the_longest_work_never_grows(data: st.DataObject) -> None:
    replicas, count = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    row = st.lists(st.floats(0.0, 10.0), min_size=count, max_size=count)
    seconds = data.draw(st.lists(row, min_size=replicas, max_size=replicas))
    slowness = data.draw(st.lists(st.floats(0.5, 3.0), min_size=replicas, max_size=replicas))
    found = balanced_replicas(seconds, slowness)
    assert sorted(number for numbers in found for number in numbers) == list(range(replicas * count))
    assert {len(numbers) for numbers in found} == {count}
    every = [each for one in seconds for each in one]
    held = [sum(every[number] for number in numbers) for numbers in found]
    longest = max(slow * work for slow, work in zip(slowness, held, strict=True))
    assert longest <= max(slow * sum(one) for slow, one in zip(slowness, seconds, strict=True)) * (1 + 1e-9)


def test_long_sequences_are_spread() -> None:
    found = balanced_replicas([[4.0, 4.0, 4.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    seconds = [4.0] * 3 + [1.0] * 6
    assert [sum(seconds[number] for number in numbers) for numbers in found] == [6.0, 6.0, 6.0]
    assert len(set(found[0]) & {0, 1, 2}) == 1


def test_a_slow_replica_gets_the_short_ones() -> None:
    found = balanced_replicas([[1.0, 3.0], [1.0, 3.0]], slowness=[3.0, 1.0])
    assert found == ((0, 2), (1, 3))


def test_what_is_even_stays() -> None:
    assert balanced_replicas([[2.0, 1.0], [1.0, 2.0]]) == ((0, 1), (2, 3))


def test_unequal_counts_are_refused() -> None:
    with pytest.raises(CostError, match=r"got \[1, 2\] micro-batches"):
        balanced_replicas([[1.0], [1.0, 2.0]])
