# SPDX-License-Identifier: Apache-2.0
"""Measure how long this rank waits for gradient synchronisation and for data in each training iteration.

On a CPU, Megatron's `finish_grad_sync` returns once the sums are complete, so the host's clock suffices. On a GPU it
returns once the current stream waits for NCCL's (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:
WorkNCCL::synchronizeStream), or has the reduction in its queue. So two events on the current stream are compared: the
first is reached when this rank's gradients are computed, the second when the result of the reduction is there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol, TypeVar

Result = TypeVar("Result")
_Pair = tuple[Any, Any]


class Moments(Protocol):
    """Marks times on the device that computes gradients."""

    def can_mark(self) -> bool:
        """Return whether a mark made now belongs to this iteration."""

    def mark(self) -> Any:
        """Return a mark of the present moment, without waiting."""

    def seconds(self, pairs: Iterable[_Pair]) -> float | None:
        """Return the sum of seconds between the marks of all pairs; None if some are not reached yet. Each mark is used
        once.
        """


class ClockMoments:
    """Marks by the host's clock, for computation that blocks the thread, as on a CPU."""

    mark = staticmethod(time.monotonic)

    def can_mark(self) -> bool:
        return True

    def seconds(self, pairs: Iterable[_Pair]) -> float | None:
        return sum((end_s - begin_s for begin_s, end_s in pairs), 0.0)


class StreamMoments:
    """Marks by reused events in the current stream of a GPU."""

    def __init__(self, new_event: Callable[[], Any], captures: Callable[[], bool]) -> None:
        """`new_event`: makes an event, as torch.cuda.Event with `enable_timing` does. `captures`: returns whether a
        CUDA graph is being captured.
        """
        self._new_event, self._captures = new_event, captures
        self._unused: deque[Any] = deque()

    def can_mark(self) -> bool:
        # An event that is captured is a graph's node, and torch raises for it where it is asked.
        return not self._captures()

    def mark(self) -> Any:
        event = self._unused.pop() if self._unused else self._new_event()
        event.record()
        return event

    def seconds(self, pairs: Iterable[_Pair]) -> float | None:
        pairs = list(pairs)
        if not all(end.query() for _, end in pairs):
            return None
        for pair in pairs:
            self._unused.extend(pair)
        return sum(1e-3 * float(begin.elapsed_time(end)) for begin, end in pairs)


class IterationWaits(NamedTuple):
    """Waits of one iteration."""

    moments: Moments
    pairs: tuple[_Pair, ...]
    data_s: float

    def synced_s(self) -> float | None:
        """Return the seconds in gradient synchronisation; None while the GPU has not finished it."""
        return self.moments.seconds(self.pairs)


class SyncWaits:
    """Waits of one process, over all chunks. For the training thread; measures nothing before `want`."""

    def __init__(self) -> None:
        self._moments: Moments | None = None
        self._pairs: list[_Pair] = []
        self._data_s = 0.0

    def want(self, moments: Moments) -> None:
        """Measure from now on. Call `take` after each iteration."""
        self._moments = moments

    def synchronize(self, finish: Callable[[], Result]) -> Result:
        """Call `finish`, which ends the synchronisation of a chunk's gradients."""
        if self._moments is None or not self._moments.can_mark():
            return finish()
        begin = self._moments.mark()
        result = finish()
        self._pairs.append((begin, self._moments.mark()))
        return result

    def read(self, next_batch: Callable[[], Result]) -> Result:
        """Call `next_batch`, which waits for a micro-batch's data."""
        if self._moments is None:
            return next_batch()
        begun_s = time.monotonic()
        try:
            return next_batch()
        finally:
            self._data_s += time.monotonic() - begun_s

    def take(self) -> IterationWaits | None:
        """Return the waits since the previous call; None if no gradients were synchronised."""
        pairs, data_s = tuple(self._pairs), self._data_s
        self._pairs, self._data_s = [], 0.0
        return IterationWaits(self._moments, pairs, data_s) if pairs and self._moments is not None else None
