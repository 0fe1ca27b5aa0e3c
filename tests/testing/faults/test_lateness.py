# SPDX-License-Identifier: Apache-2.0
"""Collectives, requests to a store, threads and messages that are late, and sums that do not depend on their order."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from testing import waiting
from testing.faults.emulated_compute import EmulationError
from testing.faults.late_operations import (
    IDLE,
    MARK,
    SUCCESSOR,
    LateArrival,
    LateGroup,
    Lateness,
    LateOperation,
    LateRank,
    LateStore,
    late_messages,
    parse_lateness,
)
from testing.faults.operation_board import (
    LATE,
    UNDER_WAY,
    OperationBoard,
    read_deaths,
    read_lateness,
)
from testing.training.exact_sums import LARGEST, STEP, make_sums_exact

LATE_S, ENDS_S = 3.0, 20.0
until = partial(waiting.until, limit_s=ENDS_S)
GROUP = "DATA_PARALLEL_GROUP#0"
FORCED = f"1:2:in:DATA_PARALLEL:{LATE_S}"


def test_what_is_asked_for_is_parsed_and_all_else_refused() -> None:
    assert parse_lateness("collectives:0.05:250") == Lateness("collectives", 0.05, 0.25)
    assert parse_lateness("store:1:3:7") == Lateness("store", 1.0, 0.003, 7)
    assert parse_lateness("5:2:in:DATA_PARALLEL:0.45") == LateOperation(5, 2, True, "DATA_PARALLEL", 0.45)
    assert parse_lateness("5:2:out:1:2") == LateOperation(5, 2, False, 1, 2.0)
    assert parse_lateness("0:1:ready:10") == LateArrival(0, 1, 10.0)
    for wrong in ("sums:0.1:3", "collectives:0.1", "5:2:within:1:2", "1:ready:2"):
        with pytest.raises(EmulationError, match=r"as collectives:0\.05:250"):
            parse_lateness(wrong)


def test_late_messages_are_those_of_all_links_by_both_paths() -> None:
    found = late_messages([parse_lateness("messages:0.2:30:4"), parse_lateness("store:1:1")], 3)
    assert {(each.source, each.target) for each in found} == set(itertools.permutations(range(3), 2))
    assert all((each.share, each.jitter_s, each.seed, len(each.paths)) == (0.2, 0.03, 4, 2) for each in found)


class Pair:
    """Two ranks' groups of gloo in this process, of which the second is late as `late` says."""

    def __init__(self, directory: Path, *late: str) -> None:
        self._store, self._made = dist.HashStore(), itertools.count()
        self.late = LateRank([parse_lateness(text) for text in late], directory, 1, 2)
        self.late.set_iteration(2)

    def groups(self) -> tuple[Any, LateGroup]:
        """Those of one epoch."""
        number, found = next(self._made), list[Any](2 * [None])

        def make(rank: int) -> None:
            store = dist.PrefixStore(str(number), self._store)
            found[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=ENDS_S))

        threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found[0], LateGroup(found[1], GROUP, number, self.late, [])


def test_an_operation_that_is_late_on_purpose_writes_late_and_those_after_it_keep_their_order(tmp_path: Path) -> None:
    pair = Pair(tmp_path, FORCED)
    board = pair.late.board
    theirs, ours = pair.groups()
    assert isinstance(ours, dist.ProcessGroupGloo)
    values = [torch.tensor([1.0]), torch.tensor([10.0]), torch.tensor([2.0]), torch.tensor([20.0])]
    with pair.late.call():
        begun_s = time.monotonic()
        works = [ours.allreduce([value], dist.AllreduceOptions()) for value in (values[1], values[3])]
    expected = [theirs.allreduce([value], dist.AllreduceOptions()) for value in (values[0], values[2])]
    until(lambda: (tmp_path / MARK).exists() and (tmp_path / MARK).read_text())
    assert (tmp_path / MARK).read_text() == f"{GROUP} in iteration 2, inside, is late\n"
    assert board.count(LATE) == 2, "the one behind it is late, too"
    assert not works[0].is_completed()
    with pytest.raises(RuntimeError, match="timed out"):
        works[0].wait(timedelta(milliseconds=1))
    board.note_death()
    assert read_deaths(tmp_path) == [{"rank": 1, UNDER_WAY: 0, LATE: 2}]
    for work in (*works, *expected):
        assert work.wait(timedelta(seconds=ENDS_S))
    assert time.monotonic() - begun_s >= LATE_S
    assert [float(value) for value in values] == [11.0, 11.0, 22.0, 22.0]
    assert all(work.is_completed() and work.is_success() for work in works)
    assert read_lateness(tmp_path)["collectives"] == 1
    until(lambda: (tmp_path / MARK).read_text().endswith(f"{IDLE}\nit has ended well\n"))


def test_a_late_operation_writes_just_before_its_successor_in_the_next_epoch_is_launched(tmp_path: Path) -> None:
    pair = Pair(tmp_path, f"1:2:in:0:{ENDS_S}")
    theirs, ours = pair.groups()
    with pair.late.call():
        buffer = torch.tensor([10.0])
        ours.allreduce([buffer], dist.AllreduceOptions())
        old = theirs.allreduce([torch.tensor([1.0])], dist.AllreduceOptions())
        their_next, our_next = pair.groups()
        buffer.fill_(100.0)
        work = our_next.allreduce([buffer], dist.AllreduceOptions())
        their_next.allreduce([torch.tensor([2.0])], dist.AllreduceOptions()).wait()
        work.wait(timedelta(seconds=ENDS_S))
    assert old.is_success()
    assert (tmp_path / MARK).read_text().endswith(f"{SUCCESSOR}\nit has ended well\n")
    assert float(buffer) == 103.0, "the sum of the epoch before has gone into that of this one"


def test_a_late_operation_whose_peer_is_gone_fails_and_keeps_no_group(tmp_path: Path) -> None:
    pair = Pair(tmp_path, FORCED)
    theirs, ours = pair.groups()
    with pair.late.call():
        work = ours.allreduce([torch.tensor([1.0])], dist.AllreduceOptions())
    del theirs
    native = weakref.ref(ours._native)
    del ours
    until(work.is_completed)
    assert not work.is_success()
    until(lambda: "it has failed" in (tmp_path / MARK).read_text())
    with pytest.raises(RuntimeError):
        work.wait(timedelta(seconds=ENDS_S))
    gc.collect()
    until(lambda: native() is None)
    until(lambda: not any(thread.name == "late-group" for thread in threading.enumerate()))
    assert (pair.late.board.count(LATE), pair.late.board.count(UNDER_WAY)) == (0, 0)


def test_operations_count_as_under_way_until_they_end(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    theirs, ours = pair.groups()
    work = ours.allreduce([torch.tensor([1.0])], dist.AllreduceOptions())
    assert pair.late.board.count(UNDER_WAY) == 1
    theirs.allreduce([torch.tensor([1.0])], dist.AllreduceOptions()).wait()
    work.wait()
    until(lambda: pair.late.board.count(UNDER_WAY) == 0)
    assert read_lateness(tmp_path)["collectives"] == 0


def test_the_start_of_a_reduction_of_gradients_is_made_known(tmp_path: Path) -> None:
    pair, begun = Pair(tmp_path), list[str]()
    pair.late.reduction_begins = lambda: begun.append("begun")
    theirs, ours = pair.groups()
    ours.allreduce([torch.tensor([1.0])], dist.AllreduceOptions())
    assert not begun, "it was outside of calls"
    with pair.late.call():
        ours.broadcast([torch.tensor([1.0])], dist.BroadcastOptions())
        assert not begun
        ours.allreduce([torch.tensor([1.0])], dist.AllreduceOptions())
    assert begun == ["begun"]
    del theirs


def test_collectives_are_late_at_random_and_the_same_ones_again(tmp_path: Path) -> None:
    found = []
    for run in range(2):
        pair = Pair(tmp_path / str(run), "collectives:0.5:1:3")
        for _ in range(40):
            pair.late.hold("a group", 0, "allgather")
        found.append(read_lateness(tmp_path / str(run))["collectives"])
    assert found[0] == found[1]
    assert 5 < found[0] < 35


def test_requests_to_the_store_are_late(tmp_path: Path) -> None:
    late = LateRank([Lateness("store", 1.0, 0.2)], tmp_path, 0, 1)
    store = LateStore(dist.HashStore(), late._delay_s)
    begun_s = time.monotonic()
    for number in range(10):
        store.set(str(number), "here")
    assert store.get("9") == b"here"
    assert time.monotonic() - begun_s > 0.2
    assert read_lateness(tmp_path)["store"] == 11


def test_stores_groups_and_threads_of_the_package_are_late_while_it_lasts(tmp_path: Path) -> None:
    from adaptra_megatron.common.control_store import ControlStore
    from adaptra_megatron.elastic.process_group_manager import FaultTolerantGroups

    control = ControlStore(dist.HashStore(), bytes(32), "token")
    before = (FaultTolerantGroups._make_native, ControlStore.client, ControlStore.lent, threading.Thread.start)
    late, ran = [Lateness("store", 1.0, 0.001), Lateness("threads", 1.0, 2.0, seed=10989)], list[str]()
    with LateRank(late, tmp_path, 0, 1):
        client = control.client("a place")
        client.set("key", b"value")
        assert client.get("key") == b"value"
        with control.lent("a place", 5.0) as lent:
            assert lent.get("key") == b"value"
        with control.lent("another", 5.0, sealed=False) as unsealed:
            assert isinstance(unsealed, dist.PrefixStore), "torch's C++ takes no other"
        threads = [threading.Thread(target=ran.append, args=(name,), name=name) for name in ("adaptra-x", "other")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert ran == ["other", "adaptra-x"]
    assert read_lateness(tmp_path)["store"] == 3
    assert read_lateness(tmp_path)["threads"] == 4, "two clients connect, and the lent store has its own"
    assert (FaultTolerantGroups._make_native, ControlStore.client, ControlStore.lent, threading.Thread.start) == before


def test_interruptions_after_failures_are_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from adaptra_megatron.elastic.recovery import RecoveryManager

    interrupted: list[object] = []
    monkeypatch.setattr(RecoveryManager, "_interrupt", interrupted.append)
    manager: Any = object()
    with LateRank([Lateness("interruptions", 1.0, 0.1)], tmp_path, 0, 1):
        RecoveryManager._interrupt(manager)
    assert interrupted == [manager]
    assert read_lateness(tmp_path)["interruptions"] == 1


def test_what_others_have_launched_is_known(tmp_path: Path) -> None:
    first, second = (OperationBoard(tmp_path, rank, 2) for rank in range(2))
    first.note_launch("a sum")
    assert not second.have_launched("a sum", [0, 1])
    second.note_launch("a sum")
    assert first.have_launched("a sum", [0, 1])
    second.note_launch("another")
    assert not first.have_launched("a sum", [0, 1])


def test_counts_of_a_process_begin_anew_and_those_of_the_run_go_on(tmp_path: Path) -> None:
    first = OperationBoard(tmp_path, 1, 3)
    first.add(UNDER_WAY, 2)
    first.add("threads")
    OperationBoard(tmp_path, 0, 3).add(UNDER_WAY)
    again = OperationBoard(tmp_path, 1, 3)
    assert again.count(UNDER_WAY) == 1
    assert read_lateness(tmp_path)["threads"] == 1


@contextmanager
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        yield


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 5, 6, 8])
def test_sums_are_the_same_in_any_order(replicas: int) -> None:
    """Each replica divides what it has by their number before all add up, as DistributedDataParallel does."""
    with seeded():
        gradients = [torch.randn(4096) * 10 ** torch.randint(-3, 2, (4096,)).float() for _ in range(4 * replicas)]

    def total(shares: list[list[torch.Tensor]]) -> torch.Tensor:
        sums = []
        for share in shares:
            parameter = torch.nn.Parameter(torch.zeros(4096))
            parameter.main_grad = torch.zeros(4096)  # type: ignore[attr-defined]
            make_sums_exact([SimpleNamespace(parameters=lambda found=parameter: [found])], replicas)
            for each in share:
                parameter.main_grad.add_(each)  # type: ignore[attr-defined]
            whole = parameter.main_grad.detach().clone()  # type: ignore[attr-defined]
            whole *= 1.0 / replicas
            sums.append(whole)
        return sum(sums[1:], sums[0])

    in_order = total([gradients[4 * replica : 4 * replica + 4] for replica in range(replicas)])
    backwards = total([gradients[::-1][replica::replicas] for replica in range(replicas)])
    alone = total([gradients[::2] + gradients[1::2]])
    assert torch.equal(in_order, backwards)
    assert torch.equal(in_order, alone)
    expected = sum(each.clamp(-LARGEST * replicas, LARGEST * replicas) for each in gradients) / replicas
    assert torch.allclose(in_order, expected, atol=4 * replicas * STEP)


def test_numbers_of_replicas_whose_sums_are_not_exact_are_refused() -> None:
    with pytest.raises(ValueError, match="take at most 6"):
        make_sums_exact([], 7)
