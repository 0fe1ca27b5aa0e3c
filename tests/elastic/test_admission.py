# SPDX-License-Identifier: Apache-2.0
"""The end of attempts, and who is admitted."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from support.emulated_time import EmulatedTime
from torch.distributed import HashStore

from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.common.layout import Cell, JobLayout, Worker
from adaptra_megatron.common.membership import Stalled
from adaptra_megatron.common.sealed_store import SealedStore, TamperedError
from adaptra_megatron.elastic import protocol_store as commit
from adaptra_megatron.elastic.generation import Generation, GenerationId
from adaptra_megatron.elastic.protocol import Agreement, Await, Rank
from adaptra_megatron.elastic.protocol_store import CommitDesk, ReplicasDifferError, Word, together
from adaptra_megatron.elastic.recovery import RecoveryManager
from adaptra_megatron.elastic.rejoin import PATIENCE_S


@pytest.fixture
def store() -> SealedStore:
    return SealedStore(HashStore(), b"0" * 32, "here")


def arrivals(store: SealedStore, words: dict[int, Word], call: int = 0) -> dict[int, Word | None]:
    """What each rank comes to, in threads."""
    found: dict[int, Word | None] = {}

    def arrive(rank: int) -> None:
        desk = CommitDesk(SealedStore(store._store, b"0" * 32, "here"), rank, 20.0)
        found[rank] = desk.arrive(call, frozenset(words), words[rank], lambda: None)

    threads = [threading.Thread(target=arrive, args=(rank,)) for rank in words]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    return found


@pytest.mark.parametrize("group_size", [128, 2])
def test_the_last_to_come_knows_what_all_have_come_with(
    store: SealedStore, group_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "GROUP_SIZE", group_size)
    words = {rank: Word("3/1/0", tokens=rank, divisors=(10,), digests={f"stage {rank % 2}": "d"}) for rank in range(5)}
    found = [each for each in arrivals(store, words).values() if each is not None]
    assert found == [Word("3/1/0", 10, (10,), {"stage 0": "d", "stage 1": "d"})]
    assert found[0].sound()
    assert not replace(found[0], divisors=(9, 10)).sound()


def test_replicas_that_differ_are_found(store: SealedStore) -> None:
    words = [Word("3/1/0", digests={"stage 0, lane 0": digest}) for digest in ("a", "b")]
    with pytest.raises(ReplicasDifferError, match="replicas of stage 0, lane 0 do not hold the same state") as found:
        together(words)
    assert found.value.place == "stage 0, lane 0"


def test_who_rings_without_the_secret_ends_no_attempt(store: SealedStore) -> None:
    """An intruder that reaches the store rings for the second of two ranks."""
    desk, looks = CommitDesk(store, 0, 20.0), iter(range(3))
    store.set("came/1", b'{"attempt": "0/0/0", "tokens": 0, "divisors": [], "digests": {}}')
    store._store.add("bell/1/0/0/0", 1)

    def check() -> None:
        if next(looks, None) is None:
            raise RuntimeError("looked in vain")

    with pytest.raises(RuntimeError, match="looked in vain"):
        desk.arrive(1, frozenset({0, 1}), Word("1/0/0"), check)
    store._store.set("came/1", b"x" * 80)
    with pytest.raises(TamperedError):
        CommitDesk(store, 2, 20.0)._words(["came/1"], "1/0/0", lambda: None)


def test_a_word_is_written_once_and_no_unauthenticated_process_writes_it(store: SealedStore) -> None:
    assert store.put_once("fate/0/0/0", b"commit") == b"commit"
    assert store.put_once("fate/0/0/0", b"redo") == b"commit"
    store._store.set("fate/7/0/0", "commit 7")
    with pytest.raises(TamperedError):
        store.put_once("fate/7/0/0", b"redo")


def test_the_store_does_not_grow_with_calls(store: SealedStore) -> None:
    raw: Any = store._store
    desk, sizes = CommitDesk(store, 0, 20.0), []
    for call in range(9):
        store.put_once(f"fate/{call}/0/0", b"commit")
        assert desk.arrive(call, frozenset({0}), Word(f"{call}/0/0"), lambda: None) is not None
        sizes.append(raw.num_keys())
    assert sizes[3:] == [sizes[3]] * 6


def test_thousands_of_ranks_that_wait_poll_more_seldom(store: SealedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    monkeypatch.setattr(commit, "time", EmulatedTime())
    for ranks in (16, 16_384):
        looks.append(0)

        def look() -> None:
            looks[-1] += 1

        steps = commit.ProtocolStore(ControlStore(store._store, b"0" * 32, "job"), store, 1.0, ranks)
        with pytest.raises(TimeoutError, match="agreement has been waited for"):
            steps.carry_out(Await(None, "agreement"), look)
    assert looks[1] < 25 < looks[0]


@pytest.mark.parametrize("rank", [2, 4])
def test_whom_a_rank_that_has_failed_since_refused_is_reported_by_the_one_that_leads_now(rank: int) -> None:
    workers = {each: Worker(Cell(each % 3, each // 3), 0, "host", "boot/net") for each in range(6)}
    generation = Generation(
        GenerationId(3), frozenset({2, 3, 4, 5}), frozenset({Cell(0, 0), Cell(1, 0)}), refused={1: 2}
    )
    manager: Any = object.__new__(RecoveryManager)
    for name in ("_swallowed", "_steps", "_groups", "_control", "_detector"):
        setattr(manager, name, mock.MagicMock(newest=None))
    manager._layout, manager._cause, manager._known, manager._lost = JobLayout(rank, workers), None, set(), {}
    manager._rank = replace(Rank(manager._layout, generation), agreement=Agreement((), 1))
    manager.epochs, manager._struck_s, manager._begun_s = 0, None, 0.0
    manager._entered_after_failures()
    found = Stalled((1,), "was to rejoin, and has not been admitted", {1: 2})
    assert manager._detector.report.mock_calls == [mock.call(found, after_s=PATIENCE_S)] * (rank == 2)
