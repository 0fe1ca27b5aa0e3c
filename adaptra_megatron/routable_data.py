# SPDX-License-Identifier: Apache-2.0
"""Make a training script's own data iterators routable between replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class RoutableMicroBatches(Iterator[Any]):
    """A data iterator that can also return any other replica's micro-batches.

    Megatron-LM's sequential data loaders do not need it: adaptra computes the shares of other replicas itself.
    """

    def __init__(
        self,
        own: Iterator[Any],
        micro_batch: Callable[[int, int], Any],
        length: Callable[[int, int], float] | None = None,
    ) -> None:
        """`own`: iterator of this data-parallel rank. `micro_batch(replica, number)`: item `number` of the iterator of
        data-parallel rank `replica`, counted from 0 at the first training iteration of this process. Micro-batches of
        one iteration may be requested in any order.

        `length(replica, number)`: cost of computing that micro-batch, in any unit (tokens, seconds); called before its
        iteration. Whole micro-batches are then swapped between replicas to balance their work. It must return the same
        on every rank of the job, including ranks that read no data, where `own` may be empty.
        """
        self._own, self.micro_batch, self.length = own, micro_batch, length

    def __next__(self) -> Any:
        return next(self._own)
