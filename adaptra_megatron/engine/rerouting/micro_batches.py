# SPDX-License-Identifier: Apache-2.0
"""Provide the data of a micro-batch at any cell of its stage.

A replica's own iterator yields its micro-batches in order; micro-batches that are computed elsewhere are skipped. Data
of another replica's micro-batch come from that replica's share of the samples, which Megatron-LM's samplers
(megatron/training/datasets/data_samplers.py: MegatronPretrainingSampler) can compute on any rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from adaptra_megatron.elastic.failure_errors import of_script, owned


class MicroBatchSource(NamedTuple):
    """Source of any replica's micro-batches, by replica and number since the training began."""

    micro_batch: Callable[[int, int], Any]
    """Returns the data that the replica's iterator yields."""
    length: Callable[[int, int], float] | None = None
    """Returns the cost of computing it, in a unit of its own; None if costs are unknown."""


class Home(NamedTuple):
    """Replica and number of a micro-batch."""

    replica: int
    number: int
    """Number within its iteration."""


class MicroBatchFeed(Iterator[Any]):
    """Data iterator of one model chunk that yields the micro-batch selected for computation."""

    def __init__(self, own: Iterator[Any], replica: int) -> None:
        """`own`: iterator of the training script. `replica`: of this cell."""
        self.own, self._replica = own, replica
        self._source = source_of(own)
        self._first = self._next = 0
        """Numbers, since the training began, of the first micro-batches of this iteration and of the next."""
        self._read: list[Any] = []
        """Items that `own` has yielded in this iteration."""
        self._reads = False
        """True once this stage has read data: stages in the middle do not."""
        self._taken = self._taken_before = 0
        """Number of items that `own` has yielded since the training began: now, and at the beginning of this iteration.
        If this stage has had no work so far, as after a restart, `own` is behind.
        """
        self._home = Home(replica, 0)

    @property
    def routable(self) -> bool:
        """Return whether other replicas' micro-batches are available here."""
        return self._source is not None

    def lengths(self, replicas: int, micro_batches: int) -> list[list[float]] | None:
        """Return the relative costs of this iteration's micro-batches, [replica][number]; None if unknown."""
        if self._source is None or (length := self._source.length) is None:
            return None
        numbers = range(self._first, self._first + micro_batches)
        return [[length(replica, number) for number in numbers] for replica in range(replicas)]

    def begin_iteration(self, own: Iterator[Any], *, repeated: bool) -> None:
        """Begin an iteration. `own`: the training script's iterator for it.

        `repeated`: whether it repeats the previous iteration, so that `own` yields the same data again.
        """
        self.own = own
        if repeated:
            self._taken = self._taken_before
        elif self._next > self._first:  # else it is attempted again
            self._first, self._taken_before = self._next, self._taken

    def select(self, home: Home) -> None:
        """Select the micro-batch that is read next."""
        self._home = home

    def __next__(self) -> Any:
        self._reads = True
        if self._home.replica == self._replica:
            self._read_through(self._home.number)
            return self._read[self._home.number]
        assert self._source is not None, f"{self._home} was routed to replica {self._replica}, which cannot read it"
        return self._source.micro_batch(self._home.replica, self._first + self._home.number)

    def end_iteration(self, micro_batches: int) -> None:
        """End the iteration: all of its micro-batches have been computed, here or elsewhere."""
        if self._reads:
            self._read_through(micro_batches - 1)
        self._next = self._first + micro_batches
        self._read.clear()

    def _read_through(self, number: int) -> None:
        while self._taken <= self._first + number:
            with of_script():
                found = next(self.own)
            self._read += [found] * (self._taken >= self._first)
            self._taken += 1


def source_of(iterator: Any) -> MicroBatchSource | None:
    """Return the source of all replicas' micro-batches behind `iterator`; None if there is none.

    Supported are adaptra_megatron.routable_data, and iterators of torch's DataLoader over Megatron's sequential
    sampler, also inside Megatron's RerunDataIterator.
    """
    while iterator is not None:
        if (given := getattr(iterator, "micro_batch", None)) is not None:
            length = getattr(iterator, "length", None)
            return MicroBatchSource(owned(given), None if length is None else owned(length))
        sampler = getattr(iterator, "_index_sampler", None)  # torch.utils.data.dataloader._BaseDataLoaderIter
        if sampler is not None:
            return MicroBatchSource(owned(SampledShares(sampler, iterator))) if _is_sequential(sampler) else None
        iterator = getattr(iterator, "iterable", None)  # megatron.core.rerun_state_machine.RerunDataIterator
    return None


def _is_sequential(sampler: Any) -> bool:
    """Return whether `SampledShares` can compute a sampler's samples. The shuffling sampler has no attributes with the
    start and end of a share.
    """
    if not hasattr(sampler, "get_start_end_idx") or not hasattr(sampler, "micro_batch_times_data_parallel_size"):
        return False
    return next(iter(sampler), None) == _samples(sampler, sampler.data_parallel_rank, 0)


def _samples(sampler: Any, replica: int, number: int) -> list[int]:
    """Return the sample indices of a replica's micro-batch: each global batch is split among all replicas."""
    sampler = copy.copy(sampler)
    sampler.data_parallel_rank = replica
    start, end = sampler.get_start_end_idx()
    first = sampler.consumed_samples + number * sampler.micro_batch_times_data_parallel_size
    return list(range(first + start, first + end))


class SampledShares:
    """Other replicas' shares of a data loader's samples. Reads only routed micro-batches, without worker processes."""

    def __init__(self, sampler: Any, loader: Any) -> None:
        """`loader`: torch's iterator of a DataLoader, for its data set and collate function."""
        self._sampler, self._dataset, self._collate = sampler, loader._dataset, loader._collate_fn

    def __call__(self, replica: int, number: int) -> Any:
        """Return the `number`-th micro-batch of `replica`."""
        return self._collate([self._dataset[index] for index in _samples(self._sampler, replica, number)])
