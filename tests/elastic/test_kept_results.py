# SPDX-License-Identifier: Apache-2.0
"""Results of operations outside of calls reach those that lack them, whatever their size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from adaptra_megatron.common.sealed_store import MOST_NBYTES, SealedStore
from adaptra_megatron.elastic.fence import MOST_KEPT_NBYTES, KeptResults
from adaptra_megatron.elastic.generation import Generation, GenerationId
from adaptra_megatron.elastic.protocol import HandedIn, holders_of

MET = Generation(GenerationId(2), frozenset({0, 1, 2}), frozenset())


class Watched(HashStore):
    """Knows the largest value."""

    largest = 0

    def set(self, key: str, value: bytes) -> None:
        self.largest = max(self.largest, len(value))
        super().set(key, value)


def exchange(nbytes: int, count: int) -> tuple[KeptResults, SealedStore, Watched]:
    """One that lacks `count` results of `nbytes` each."""
    raw = Watched()
    store = SealedStore(raw, b"0" * 32, "here")
    holder, other = KeptResults(), KeptResults()
    for number in range(count):
        holder.keep("group", [torch.full((nbytes,), number + 1, dtype=torch.uint8), torch.tensor(0.5 + number)])
    holder.publish(store, ["group"])
    other.found_with({"group": 0}, store, 1.0, lambda: None)
    return other, store, raw


@pytest.mark.parametrize("nbytes", [0, 1, MOST_NBYTES // 2, 3 * MOST_NBYTES // 2 + 7, MOST_KEPT_NBYTES - 4])
def test_results_come_as_they_were_in_values_that_the_store_carries(nbytes: int) -> None:
    other, _, raw = exchange(nbytes, 2)
    for number in range(2):
        outputs = [torch.zeros(nbytes, dtype=torch.uint8), torch.tensor(0.0)]
        assert other.known("group", outputs)
        assert (outputs[0] == number + 1).all()
        assert float(outputs[1]) == 0.5 + number
        other.keep("group", outputs)
    assert not other.known("group", [torch.zeros(1)]), "no rank has the next"
    assert raw.largest <= MOST_NBYTES == 1 << 20


def test_one_that_is_too_large_is_an_error() -> None:
    other, _, _ = exchange(MOST_KEPT_NBYTES, 1)
    with pytest.raises(RuntimeError, match="result of operation 0 of group is lost: it has more than 16 MiB"):
        other.known("group", [torch.zeros(MOST_KEPT_NBYTES, dtype=torch.uint8), torch.tensor(0.0)])


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3)), min_size=3, max_size=3))
def test_what_any_member_lacks_is_given_by_the_lowest_that_has_most(ranks: list[tuple[int, int]]) -> None:
    """Counts of a rank that has not seen the newest commit are of operations that all have."""
    states = tuple(HandedIn(None, 0, call, {"group": count}) for call, count in ranks)
    newest = max(call for call, _ in ranks)
    counts = [count if call == newest else 0 for call, count in ranks]
    expected = {} if len(set(counts)) == 1 else {"group": counts.index(max(counts))}
    assert holders_of(states, MET) == expected


def test_a_group_concerns_its_members_alone() -> None:
    states = (HandedIn(None, 0, 0, {"a": 2}), HandedIn(None, 0, 0, {"a": 2, "b": 1}), HandedIn(None, 0, 0, {"b": 0}))
    assert holders_of(states, MET) == {"b": 1}
