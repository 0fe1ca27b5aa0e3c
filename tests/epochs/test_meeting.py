# SPDX-License-Identifier: Apache-2.0
"""What follows from where all ranks have come to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from adaptra_megatron.authentication.tagged_json import packed, unpacked
from adaptra_megatron.epochs.meeting import (
    COMMIT,
    MOST_NBYTES,
    REDO,
    Agreement,
    RankState,
    agreed,
    attempt_name,
    packed_results,
    unpacked_results,
)

results = st.dictionaries(st.text(max_size=8), st.none() | st.lists(st.binary(max_size=9), max_size=3), max_size=4)


@given(results)
def test_results_travel_as_they_are(kept: dict[str, list[bytes] | None]) -> None:
    agreement = Agreement((), packed_results(dict(kept)))
    assert unpacked_results(unpacked(packed(agreement), Agreement, MOST_NBYTES).kept) == kept


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), results), min_size=1, max_size=6), st.booleans())
def test_all_begin_with_the_same(ranks: list[tuple[int, bool, dict[str, list[bytes] | None]]], decided: bool) -> None:
    """Fates are asked for where any rank does not know them, once each; what one rank has kept, all get."""
    asked: list[str] = []

    def decide(attempt: str) -> str:
        asked.append(attempt)
        return COMMIT if decided else REDO

    states = [
        RankState(attempt_name(call, 0) if attempted else None, packed_results(dict(kept)))
        for call, attempted, kept in ranks
    ]
    agreement = agreed(states, decide)
    open_fates = sorted({attempt_name(call, 0) for call, attempted, _ in ranks if attempted})
    assert asked == open_fates
    assert list(agreement.committed) == (open_fates if decided else [])
    assert {each.place for each in agreement.kept} == {place for _, _, kept in ranks for place in kept}
