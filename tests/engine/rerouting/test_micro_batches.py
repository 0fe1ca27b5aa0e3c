# SPDX-License-Identifier: Apache-2.0
"""The data of routed micro-batches: what each cell reads is what the replicas' own iterators would have yielded."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import rerun_state_machine
from megatron.core.rerun_state_machine import RerunDataIterator
from torch.utils.data import DataLoader, Dataset

from adaptra_megatron.engine.routed_inputs import Home, MicroBatchFeed, source_of
from adaptra_megatron.megatron.megatron_iteration import repeats_iteration
from adaptra_megatron.routable_data import RoutableMicroBatches

REPLICAS, MICRO_BATCH_SIZE, SAMPLES = 3, 2, 200


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class SequentialShare:
    """As Megatron-LM's MegatronPretrainingSampler, by its public face."""

    def __init__(self, data_parallel_rank: int, consumed_samples: int = 6) -> None:
        self.data_parallel_rank, self.consumed_samples = data_parallel_rank, consumed_samples
        self.micro_batch_times_data_parallel_size = MICRO_BATCH_SIZE * REPLICAS

    def __len__(self) -> int:
        return SAMPLES

    def get_start_end_idx(self) -> tuple[int, int]:
        start = self.data_parallel_rank * MICRO_BATCH_SIZE
        return start, start + MICRO_BATCH_SIZE

    def __iter__(self) -> Iterator[list[int]]:
        step = MICRO_BATCH_SIZE * REPLICAS
        for first in range(self.consumed_samples, SAMPLES - step + 1, step):
            start, end = self.get_start_end_idx()
            yield list(range(first + start, first + end))


def loader(replica: int, workers: int = 0) -> Iterator[Any]:
    return iter(DataLoader(Numbers(), batch_sampler=SequentialShare(replica), num_workers=workers))  # type: ignore[arg-type]


def yielded(replica: int, count: int) -> list[list[int]]:
    iterator = loader(replica)
    return [next(iterator).tolist() for _ in range(count)]


@pytest.mark.parametrize("wrap", [lambda iterator: iterator, RerunDataIterator], ids=["plain", "rerun"])
def test_a_sequential_loader_says_what_other_replicas_read(wrap: Any) -> None:
    source = source_of(wrap(loader(1)))
    assert source is not None
    assert source.length is None
    for replica in range(REPLICAS):
        expected = yielded(replica, 10)
        assert [source.micro_batch(replica, number).tolist() for number in (3, 0, 9, 4)] == [
            expected[n] for n in (3, 0, 9, 4)
        ]


def test_workers_that_read_ahead_change_nothing() -> None:
    iterator = loader(1, workers=1)
    next(iterator)
    source = source_of(iterator)
    assert source is not None
    assert source.micro_batch(2, 1).tolist() == yielded(2, 2)[1]


class Shuffled:
    """As Megatron-LM's MegatronPretrainingRandomSampler: it moves on by itself, and cannot say where it began."""

    data_parallel_rank = 0

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0]])


def test_what_other_replicas_read_is_not_guessed() -> None:
    assert source_of(iter(DataLoader(Numbers(), batch_sampler=Shuffled()))) is None  # type: ignore[arg-type]
    assert source_of(iter([1, 2])) is None
    assert source_of(None) is None


@given(
    st.lists(st.lists(st.integers(0, REPLICAS - 1), min_size=4, max_size=4), min_size=1, max_size=4),
    st.integers(0, REPLICAS - 1),
    st.randoms(use_true_random=False),
)
def test_a_feed_yields_what_is_computed_here_in_any_order(
    hosts: list[list[int]], replica: int, chance: random.Random
) -> None:
    """`hosts`: by iteration and number, which replica's cell computes this replica's micro-batch; the other replicas'
    are computed by the next one round the ring, or not here: an iteration may leave this cell without work."""
    expected = {other: [f"{other}/{number}" for number in range(4 * len(hosts))] for other in range(REPLICAS)}
    own = RoutableMicroBatches(iter(expected[replica]), lambda other, number: expected[other][number])
    feed = MicroBatchFeed(own, replica)
    assert feed.routable
    for iteration, row in enumerate(hosts):
        feed.begin_iteration(own, repeated=False)
        homes = [Home(replica, number) for number, host in enumerate(row) if host == replica]
        homes += [Home((replica + 1) % REPLICAS, number) for number in range(4) if chance.random() < 0.3]
        chance.shuffle(homes)
        for home in homes:
            feed.select(home)
            assert next(feed) == expected[home.share][4 * iteration + home.number]
        feed.end_iteration(4)


def test_an_iteration_that_megatron_repeats_reads_the_same_again() -> None:
    expected = {replica: [f"{replica}/{number}" for number in range(6)] for replica in range(2)}
    whole = RoutableMicroBatches(iter(expected[0]), lambda replica, number: expected[replica][number])
    feed = MicroBatchFeed(whole, 0)
    for first, repeated in ((0, False), (2, False), (2, True), (4, False)):
        feed.begin_iteration(iter(expected[0][first:]), repeated=repeated)
        for home in (Home(1, 0), Home(0, 1), Home(1, 1)):
            feed.select(home)
            assert next(feed) == expected[home.share][first + home.number]
        feed.end_iteration(2)


def test_repetitions_are_seen_by_megatrons_own_state(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not repeats_iteration(), "and no state machine is made by asking"
    machine = rerun_state_machine.RerunStateMachine(mode=rerun_state_machine.RerunMode.VALIDATE_RESULTS)
    monkeypatch.setattr(rerun_state_machine, "_GLOBAL_RERUN_STATE_MACHINE", machine)
    monkeypatch.setattr(machine, "_reduce_any", lambda condition: condition)
    for needs_cuda in ("_save_state", "_restore_state"):
        monkeypatch.setattr(machine, needs_cuda, lambda: None)
    assert machine.should_run_forward_backward(None)
    assert not repeats_iteration()
    machine.rerun_requested = True
    assert machine.should_run_forward_backward(None)
    assert repeats_iteration()


def test_a_repetition_that_a_failure_interrupts_reads_on(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = rerun_state_machine.RerunStateMachine(mode=rerun_state_machine.RerunMode.VALIDATE_RESULTS)
    monkeypatch.setattr(rerun_state_machine, "_GLOBAL_RERUN_STATE_MACHINE", machine)
    own = RerunDataIterator(iter(range(9)))
    feed = MicroBatchFeed(own, 0)

    def attempt(micro_batches: int, *, repeated: bool) -> list[Any]:
        feed.begin_iteration(own, repeated=repeated)
        found = []
        for number in range(micro_batches):
            feed.select(Home(0, number))
            found.append(next(feed))
        return found

    assert attempt(4, repeated=False) == [0, 1, 2, 3]
    feed.end_iteration(4)
    own.rewind()  # as Megatron does once
    assert attempt(2, repeated=True) == [0, 1]
    assert attempt(4, repeated=True) == [0, 1, 2, 3]
    feed.end_iteration(4)
    own.advance()
    assert attempt(4, repeated=False) == [4, 5, 6, 7]


def test_a_stage_that_asks_for_no_data_reads_none() -> None:
    own = iter([1, 2, 3])
    feed = MicroBatchFeed(own, 0)
    feed.select(Home(0, 0))
    feed.end_iteration(2)
    assert next(own) == 1


def test_a_sampler_that_deals_otherwise_is_not_guessed() -> None:
    class Striped(SequentialShare):
        def __iter__(self) -> Iterator[list[int]]:
            return iter([[self.data_parallel_rank, self.data_parallel_rank + REPLICAS]])

    assert source_of(iter(DataLoader(Numbers(), batch_sampler=Striped(1)))) is None  # type: ignore[arg-type]
