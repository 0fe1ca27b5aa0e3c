# SPDX-License-Identifier: Apache-2.0
"""Stalled ranks, found by those that run."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from adaptra_megatron.common.layout import Cell, JobLayout, Worker
from adaptra_megatron.common.membership import Stalled
from adaptra_megatron.common.sealed_store import SealedStore, TamperedError
from adaptra_megatron.elastic.failure_detection import answer_liveness_check, is_requested

RANKS = 4
LIVE = frozenset(range(RANKS))
ADMITTED = {3: 7}


class MetStore(SealedStore):
    """Store of a rank whose response is counted once the others have given theirs, however late their threads are."""

    met: threading.Barrier

    def add(self, key: str, amount: int) -> int:
        self.met.wait(60.0)
        return int(self._store.add(key, amount))


class Job:
    """Ranks in threads, with one store."""

    def __init__(self) -> None:
        self._met = threading.Barrier(1)
        self.store = dist.HashStore()
        """As an unauthenticated peer sees it."""

    def client(self) -> SealedStore:
        client = MetStore(self.store, b"0" * 32, "liveness check")
        client.met = self._met
        return client

    def answer(self, rank: int, timeout_s: float, *, saved: bool = False) -> Stalled | None:
        layout = JobLayout(rank, {each: Worker(Cell(each, 0), 0, "host", "boot/net") for each in LIVE})
        return answer_liveness_check(self.client(), layout, LIVE, ADMITTED, timeout_s, lambda: saved)

    def answers(self, ranks: range, timeout_s: float) -> list[Stalled | None]:
        self._met = threading.Barrier(len(ranks))
        with ThreadPoolExecutor(len(ranks)) as threads:
            return list(threads.map(lambda rank: self.answer(rank, timeout_s), ranks))


def test_those_that_do_not_answer_stand_still() -> None:
    job = Job()
    assert not is_requested(job.client())
    found = job.answers(range(3), 1.0)
    assert is_requested(job.client())
    assert found == [found[0]] * 3
    assert found[0] is not None
    assert (found[0].ranks, found[0].arrivals) == ((3,), ADMITTED)
    assert "3 other ranks waited for 2.0 s" in found[0].why


@pytest.mark.parametrize("count", [1, 2])
def test_an_unauthenticated_peer_cannot_answer_by_the_counter_that_is_not_sealed(count: int) -> None:
    job = Job()
    job.store.add("answers", count)
    found = job.answers(range(3), 0.5)
    assert [each and each.ranks for each in found] == [(3,)] * 3


@pytest.mark.parametrize("key", ["here/3", "missing"])
def test_an_answer_that_no_rank_has_given_is_refused(key: str) -> None:
    job = Job()
    job.store.set(key, "here")
    with pytest.raises(TamperedError, match=key):
        job.answers(range(3), 0.5)


def test_a_stalled_rank_that_wakes_up_late_learns_that_it_is_ended() -> None:
    """The first result counts for all: those that have it wait for that rank's end."""
    job = Job()
    found = job.answers(range(3), 0.5)
    assert found[0] is not None
    assert job.answers(range(3, 4), 0.5) == found[:1]


def test_where_all_answer_none_does() -> None:
    assert Job().answers(range(4), 60.0) == [None] * 4


@pytest.mark.parametrize(("rank", "saved"), [(0, True), (2, False)], ids=["a-death-is-known", "alone"])
def test_none_is_given_up_without_need_or_by_a_minority(rank: int, saved: bool) -> None:
    assert Job().answer(rank, 60.0 if saved else 0.5, saved=saved) is None
