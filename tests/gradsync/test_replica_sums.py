# SPDX-License-Identifier: Apache-2.0
"""What is decided from measured waits, and that all replicas decide alike."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptra_megatron.gradsync import replica_sums
from adaptra_megatron.gradsync.all_reduce_algorithms import ALGORITHMS
from adaptra_megatron.gradsync.all_reduce_rounds import AllReduce, hidden
from adaptra_megatron.gradsync.peer_messages import Begun, PeerMessage
from adaptra_megatron.gradsync.replica_sums import PERSISTENT, Lateness, ReplicaSums
from adaptra_megatron.megatron.gradients.gradient_reduction import Background

RANKS, LATENCY_S = 4, 0.012


class Clock(threading.local):
    """Emulated time of each replica's thread: algorithms are chosen by times, and a busy machine's threads are late."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


CLOCK = Clock()


@pytest.fixture(autouse=True)
def emulated_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_sums, "time", CLOCK)


class Rendezvous:
    """Replicas in threads of one process, whose library takes the time that a wire would."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=30)
        self.slots: list[torch.Tensor] = [torch.empty(0)] * ranks
        self.came_s = [0.0] * ranks
        self.inboxes: dict[tuple[int, int], list[tuple[float, torch.Tensor]]] = {}
        self.arrived = threading.Condition()


class Member:
    """One of them; see `replica_sums.Group`."""

    def __init__(self, shared: Rendezvous, index: int, ranks: int, byte_s: float) -> None:
        self._shared, self.index, self.size, self._byte_s = shared, index, ranks, byte_s

    def begin(self, sends: PeerMessage | None, receives: PeerMessage | None) -> Begun:
        """Over lists. Waits at once for what is received."""
        with self._shared.arrived:
            if sends is not None:
                place = self._shared.inboxes.setdefault((self.index, sends.peer), [])
                place.append((CLOCK.now_s, sends.tensor.clone()))
                self._shared.arrived.notify_all()
            if receives is not None:
                inbox = self._shared.inboxes.setdefault((receives.peer, self.index), [])
                assert self._shared.arrived.wait_for(lambda: bool(inbox), timeout=30)
                sent_s, content = inbox.pop(0)
                receives.tensor.copy_(content)
                CLOCK.now_s = max(CLOCK.now_s, sent_s)
        return Begun(None, None)

    def all_reduce(self, values: torch.Tensor) -> None:
        """Through all slots."""
        everything = self.gather(values)
        CLOCK.sleep(values.nbytes * self._byte_s * 2 * (self.size - 1) / self.size)
        values.copy_(torch.stack(everything).sum(0))

    def settle(self) -> None:
        """Return at once: nothing stands on any stream."""

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """All slots."""
        self._shared.slots[self.index], self._shared.came_s[self.index] = values.clone(), CLOCK.now_s
        self._shared.barrier.wait()
        CLOCK.now_s = max(self._shared.came_s) + LATENCY_S
        found = [each.clone() for each in self._shared.slots]
        self._shared.barrier.wait()
        return found


def trained(mode: str, late_s: float, iterations: int, late_to: int = 0) -> list[ReplicaSums]:
    """Replicas in threads; the last of them comes so much later to one of each iteration's two sums."""
    shared = Rendezvous(RANKS)
    sums = [ReplicaSums(Member(shared, index, RANKS, 1e-6), mode) for index in range(RANKS)]
    wrong: list[BaseException] = []

    def replica(index: int) -> None:
        try:
            for place in (0, 1) * iterations:
                if (index, place) == (RANKS - 1, late_to):
                    CLOCK.sleep(late_s)
                values = [torch.full((20_000,), float(index + 1)), torch.full((3,), float(index))]
                sums[index].sum_up(values, place)
                assert torch.equal(values[0], torch.full((20_000,), 10.0))
                assert torch.equal(values[1], torch.full((3,), 6.0))
        except BaseException as error:
            wrong.append(error)
            shared.barrier.abort()

    threads = [threading.Thread(target=replica, args=(index,)) for index in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    return sums


@pytest.mark.parametrize("place", [0, 1])
def test_auto_uses_the_delay_of_a_replica_that_is_always_last_and_only_that(
    place: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "adaptra_megatron")
    sums = trained("auto", 0.5, 6, late_to=place)
    assert all(each.used == sums[0].used for each in sums), "replicas decide differently"
    assert sums[0].used["stock"] == 6 + PERSISTENT, "the other sums, and all until the delay is sure"
    assert sums[0].used["stragglar"] + sums[0].used["hidden"] == 6 - PERSISTENT
    (line,) = (each.getMessage() for each in caplog.records if each.name == replica_sums.__name__)
    assert f"gradients of bucket {place} " in line
    assert "replica 3 of 4 comes" in line


@pytest.mark.parametrize("mode", ALGORITHMS)
def test_what_is_asked_for_runs(mode: str) -> None:
    sums = trained(mode, 0.0, 2)
    assert [each.used for each in sums] == [{mode: 4}] * RANKS


def test_a_further_row_of_the_table_runs_by_its_own_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, int]] = []

    def plan(ranks: int, chunks: int) -> AllReduce:
        made.append((ranks, chunks))
        return hidden(ranks, chunks)

    third = replace(ALGORITHMS["hidden"], plan=plan, chunks=lambda ranks, nbytes, wire: 7)
    monkeypatch.setitem(ALGORITHMS, "third", third)  # type: ignore[arg-type]
    sums = trained("third", 0.0, 2)
    assert [each.used for each in sums] == [{"third": 4}] * RANKS
    assert set(made) == {(RANKS, 7)}


waits = st.lists(st.floats(0.001, 10), min_size=RANKS, max_size=RANKS)


@given(st.lists(waits, min_size=1, max_size=8))
def test_the_last_replica_is_the_one_that_waited_least(series: list[list[float]]) -> None:
    lateness = Lateness(RANKS)
    assert (lateness.last, lateness.sure_delay_s, lateness.wire) == (RANKS - 1, 0.0, None)
    for waits_s in series:
        lateness.saw(waits_s, 1e-5, 0)
        assert waits_s[lateness.last] == min(waits_s)
    recent = [sorted(waits_s) for waits_s in series[-PERSISTENT:]]
    lasts = {waits_s.index(min(waits_s)) for waits_s in series[-PERSISTENT:]}
    sure = len(series) >= PERSISTENT and len(lasts) == 1
    assert lateness.sure_delay_s == (min(each[1] - each[0] for each in recent) if sure else 0.0)
    assert lateness.wire is None, "no library's all-reduce has been timed"


def test_the_wire_is_measured_by_what_a_library_takes() -> None:
    lateness = Lateness(RANKS)
    for last_s in (0.312, 0.306, 0.318, 5.0):
        lateness.saw([9.0, last_s, 9.0, 9.0], 0.001, 200)
    wire = lateness.wire
    assert wire is not None
    assert wire.latency_s == 0.001
    assert wire.byte_s == pytest.approx((0.312 + 0.318) / 2 * 4 / 6 / 200, rel=0.05), "one outlier changes little"


def test_what_is_begun_is_done_in_order_and_errors_come_with_the_wait() -> None:
    background, done = Background(), list[int]()
    handles = [background.begin(lambda number=number: done.append(number), torch.device("cpu")) for number in range(9)]

    def fails() -> None:
        raise ValueError("a bucket is broken")

    broken = background.begin(fails, torch.device("cpu"))
    for handle in handles:
        handle.wait()
    assert done == list(range(9))
    with pytest.raises(ValueError, match="a bucket is broken"):
        broken.wait()
    background.close()
