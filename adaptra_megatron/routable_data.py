# SPDX-License-Identifier: Apache-2.0
"""For training scripts with data iterators of their own whose micro-batches are to be routed between replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class RoutableMicroBatches(Iterator[Any]):
    """A data iterator, and what any replica's would yield.

    Megatron-LM's sequential data loaders need none of this: they say themselves what other replicas read.
    """

    def __init__(
        self,
        own: Iterator[Any],
        micro_batch: Callable[[int, int], Any],
        length: Callable[[int, int], float] | None = None,
    ) -> None:
        """`own`: the iterator of this data-parallel rank. `micro_batch(replica, number)`: what the iterator of
        data-parallel rank `replica` yields as its `number`-th, counted from 0 at the first training iteration of this
        process; those of one iteration are asked for in any order.

        `length(replica, number)`, asked before its iteration: what computing that micro-batch takes, in any unit
        (tokens, seconds). Whole micro-batches are then swapped between replicas, so that all have as much to do. It
        must say the same on every rank of the job, also where no data are read: there, `own` may be empty.
        """
        self._own, self.micro_batch, self.length = own, micro_batch, length

    def __next__(self) -> Any:
        return next(self._own)
