# SPDX-License-Identifier: Apache-2.0
"""Whatever has a row in the table is complete, costs what its row says, has a flag, and is chosen where it is best."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from gradsync.all_reduce.replay import replay
from hypothesis import given
from hypothesis import strategies as st

from adaptra_megatron.config import GRADIENT_SYNCS, AdaptraConfig
from adaptra_megatron.gradsync import ALGORITHM_HELP
from adaptra_megatron.gradsync.all_reduce_algorithms import ALGORITHMS, STOCK, AllReduceWire, choose, overlapped_nbytes

each_row = pytest.mark.parametrize("name", ALGORITHMS)
wires = st.builds(AllReduceWire, st.floats(1e-9, 1e-3), st.floats(1e-13, 1e-6))
MEASURED = AllReduceWire(latency_s=3e-6, byte_s=1 / (450 * 2**30))


@each_row
@given(st.integers(2, 24), st.integers(1, 2**34), st.none() | wires)
def test_a_row_makes_plans_that_are_complete_and_cost_what_it_says(
    name: str, ranks: int, nbytes: int, wire: AllReduceWire | None
) -> None:
    row = ALGORITHMS[name]
    assert row.supports(ranks)
    chunks = row.chunks(ranks, nbytes, wire)
    plan = row.plan(ranks, chunks)
    replay(plan)
    assert (plan.ranks, plan.together.chunks) == (ranks, chunks)
    if wire is not None:
        waiting_s, exposed_s = (
            wire.rounds_s(len(phase.rounds), phase.chunks, nbytes) for phase in (plan.waiting, plan.together)
        )
        assert row.waiting_s(ranks, nbytes, wire) == pytest.approx(waiting_s)
        assert row.exposed_s(ranks, nbytes, wire, math.inf) == pytest.approx(exposed_s)


@each_row
@given(st.integers(3, 64), wires, st.floats(1e-6, 100))
def test_what_a_delay_hides_is_done_when_it_is_over(name: str, ranks: int, wire: AllReduceWire, delay_s: float) -> None:
    row = ALGORITHMS[name]
    nbytes = overlapped_nbytes(row, ranks, wire, delay_s)
    if nbytes:
        assert row.waiting_s(ranks, nbytes, wire) == pytest.approx(delay_s)
    else:
        assert row.waiting_s(ranks, 0, wire) >= delay_s


@each_row
def test_a_row_has_a_flag_and_a_place_in_its_help(name: str) -> None:
    argument = AdaptraConfig.__dataclass_fields__["gradient_sync"].metadata["argument"]
    assert name in GRADIENT_SYNCS
    assert AdaptraConfig(gradient_sync=name).gradient_sync == name
    assert f" {name}: {ALGORITHM_HELP[name]}; " in argument["help"]


@each_row
def test_a_row_without_plans_for_some_ranks_says_for_which_there_are(name: str) -> None:
    row = ALGORITHMS[name]
    assert bool(row.needs) == (not all(map(row.supports, range(2, 300))))


def test_a_further_row_is_chosen_where_it_exposes_the_least_and_there_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    stragglar = ALGORITHMS["stragglar"]
    half_as_long = replace(
        stragglar,
        exposed_s=lambda ranks, nbytes, wire, delay_s: stragglar.exposed_s(ranks, nbytes, wire, delay_s) / 2,
        supports=lambda ranks: ranks != 8,
    )
    before = {ranks: choose(ranks, 2**30, MEASURED, 1.0) for ranks in (4, 8)}
    monkeypatch.setitem(ALGORITHMS, "third", half_as_long)  # type: ignore[arg-type]
    chosen = choose(4, 2**30, MEASURED, 1.0)
    assert (chosen.algorithm, chosen.nbytes) == ("third", 2**30)
    assert chosen.exposed_s == pytest.approx(stragglar.exposed_s(4, 2**30, MEASURED, 1.0) / 2)
    assert choose(8, 2**30, MEASURED, 1.0) == before[8] != before[4]
    assert choose(4, 2**30, MEASURED, 0.0).algorithm == STOCK
