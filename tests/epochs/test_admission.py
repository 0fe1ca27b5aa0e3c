# SPDX-License-Identifier: Apache-2.0
"""When processes that take the places of ranks are let in, and by whose word."""

from __future__ import annotations

import threading
import time
from typing import Any, cast

import pytest
from torch.distributed import HashStore

from adaptra_megatron.authentication.sealed_store import SealedStore
from adaptra_megatron.epochs.admission import (
    admitted_so_far,
    all_meet,
    call_off,
    hand_tickets,
    newcomers,
    note_admitted,
)
from adaptra_megatron.epochs.epoch import Epoch
from adaptra_megatron.epochs.errors import EpochEndedError
from adaptra_megatron.job.layout import JobLayout, Worker
from adaptra_megatron.job.membership import Arrival, Departure, Membership, Readiness
from adaptra_megatron.schedule.routing.costs import Cell

LAYOUT = JobLayout(0, {rank: Worker(Cell(rank // 2 % 2, rank // 4), rank % 2, "host", "boot/net") for rank in range(8)})
"""Two replicas of two stages, each cell with two lanes."""
DEAD = Epoch(1, frozenset({0, 1, 4, 5, 6, 7}), frozenset({Cell(1, 0)}), cast(Any, None))
BEFORE, LIVE = frozenset({0, 1}), frozenset({0, 1, 2})


def membership(*arrived: tuple[int, int], left: tuple[tuple[int, int], ...] = ((2, 1), (3, 2))) -> Membership:
    departures = tuple(Departure(rank, epoch, "host", "why", 0.0) for rank, epoch in left)
    arrivals = tuple(Arrival(rank, epoch, Readiness(1, 1, "host", "boot/net")) for rank, epoch in arrived)
    return Membership(9, 8, 0.0, departures, arrivals)


@pytest.mark.parametrize(
    ("found", "ranks"),
    [
        (membership(), set()),
        (membership((2, 3)), set()),
        (membership((2, 3), (3, 4)), {2, 3}),
        (membership((2, 3), (3, 4), left=((2, 1), (3, 2), (3, 5))), set()),
        (membership((2, 3), left=((2, 1),)), set()),
        (membership((2, 3), (3, 4), (6, 8), left=((2, 1), (3, 2), (6, 7))), {2, 3}),
    ],
    ids=["none", "one-lane", "both", "one-left-again", "the-other-is-about-to-end", "half-of-another-cell"],
)
def test_newcomers_are_those_of_whole_cells(found: Membership, ranks: set[int]) -> None:
    assert newcomers(LAYOUT, found, DEAD).keys() == ranks


def test_who_was_admitted_is_no_newcomer() -> None:
    admitted = Epoch(4, frozenset(range(8)), frozenset(), cast(Any, None), {2: 3, 3: 4}, 4)
    assert not newcomers(LAYOUT, membership((2, 3), (3, 4)), admitted)


@pytest.fixture
def store() -> SealedStore:
    return SealedStore(HashStore(), b"0" * 32, "here")


def test_who_takes_part_again_is_known_once_that_is_decided(store: SealedStore) -> None:
    epoch = Epoch(4, frozenset(range(8)), frozenset(), cast(Any, None), {2: 3, 3: 4}, 4)
    ticket = hand_tickets(store, epoch, 5, DEAD.live)
    assert admitted_so_far(store) == {}
    note_admitted(store, ticket)
    assert admitted_so_far(store) == {2: 3, 3: 4}


def meet_all(store: SealedStore, checks: dict[int, Any], timeout_s: float = 20.0) -> dict[int, bool]:
    """What each rank of `checks` comes to, in threads."""
    found: dict[int, bool] = {}
    epoch = Epoch(2, LIVE, frozenset(), cast(Any, None))

    def meet(rank: int) -> None:
        found[rank] = all_meet(store.clone(), rank, epoch, BEFORE, timeout_s, checks[rank])

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in checks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    return found


def nothing() -> None:
    return


def test_all_are_admitted_once_all_have_come(store: SealedStore) -> None:
    assert meet_all(store, dict.fromkeys(LIVE, nothing)) == dict.fromkeys(LIVE, True)
    assert call_off(store), "what is decided stays"


@pytest.mark.parametrize("seer", sorted(BEFORE))
def test_none_is_where_one_has_died_whichever_rank_sees_it(store: SealedStore, seer: int) -> None:
    def dead() -> None:
        raise EpochEndedError("rank 2 has died")

    checks = {rank: dead if rank == seer else nothing for rank in BEFORE}
    assert meet_all(store, checks) == dict.fromkeys(BEFORE, False)


def test_none_is_where_one_does_not_come(store: SealedStore) -> None:
    begun_s = time.monotonic()
    assert meet_all(store, dict.fromkeys(BEFORE, nothing), timeout_s=0.3) == dict.fromkeys(BEFORE, False)
    assert time.monotonic() - begun_s > 0.25
