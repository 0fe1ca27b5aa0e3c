# SPDX-License-Identifier: Apache-2.0
"""Measure how long this rank waits for gradient synchronisation and for data, and report when it arrives there.

The last replica is found by the arrival times. On a CPU, Megatron's `finish_grad_sync` returns once the sums are
complete, so the host's clock suffices. On a GPU it returns once the current stream waits for NCCL's
(torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp: WorkNCCL::synchronizeStream), or has the reduction in its queue. So
two events on the current stream are compared: the first is reached when this rank's gradients are computed, the second
when the result of the reduction is there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch

from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.control.detector.straggler_arrivals import Row
from adaptra_megatron.control.sidecar.planner_client import PlannerClient
from adaptra_megatron.control.stragglers.straggler_watch import StragglerWatch
from adaptra_megatron.engine.iteration_hooks import IterationHooks, StockHooks
from adaptra_megatron.engine.measuring import EndedIteration
from adaptra_megatron.engine.training_job import Job, listen_for
from adaptra_megatron.megatron.megatron_call import PipelineCall
from adaptra_megatron.telemetry.run_telemetry import RunTelemetry
from adaptra_megatron.transport.gpu.training_device import current_device
from adaptra_megatron.transport.message_keys import Transport, TwoPathTransport

if TYPE_CHECKING:
    from adaptra_megatron.engine.pipeline import Pipeline

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


_MOST_PENDING = 8
"""Maximum number of iterations whose end on the GPU is awaited."""


class _Pending(NamedTuple):
    iteration: int
    seconds: float
    computed_s: float | None
    waits: IterationWaits


class SyncArrivals:
    """Arrivals of one rank at gradient synchronisation. For the training thread."""

    def __init__(self, watch: StragglerWatch, waits: SyncWaits) -> None:
        self._watch, self._waits = watch, waits
        self._pending: deque[_Pending] = deque(maxlen=_MOST_PENDING)

    def take(self) -> IterationWaits | None:
        """Return the waits of this iteration, which has been launched. Pass them to `add` once it has run."""
        return self._waits.take()

    def add(self, iteration: int, seconds: float, waits: IterationWaits | None, computed_s: float | None) -> None:
        """Report a training iteration. `computed_s`: time in forwards and backwards; None: all time except waits."""
        self._watch.lasts(seconds)
        if waits is not None:
            self._pending.append(_Pending(iteration, seconds, computed_s, waits))
        while self._pending and (synced_s := self._pending[0].waits.synced_s()) is not None:
            done = self._pending.popleft()
            computed_s = max(0.0, done.seconds - synced_s - done.waits.data_s)
            if done.computed_s is not None:
                computed_s = done.computed_s
            self._watch.add(Row(done.iteration, done.seconds, synced_s, computed_s, done.waits.data_s))

    def close(self) -> None:
        """End the thread."""
        self._watch.close()


def moments_of(device: torch.device) -> Moments:
    """Return the timer of the device on which gradients are computed."""
    if device.type != "cuda":
        return ClockMoments()
    return StreamMoments(
        lambda: torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
        torch.cuda.is_current_stream_capturing,
    )


def arrivals_of(
    job: Job,
    config: AdaptraConfig,
    telemetry: RunTelemetry,
    waits: SyncWaits,
    planner: PlannerClient | None = None,
    transport: Transport | None = None,
) -> SyncArrivals:
    """Return this rank's arrivals, and begin to measure `waits` if they are needed. `planner`: whose processes find
    stragglers, too; None if this rank has none. `transport`: of the pipeline; None for stock's schedule.
    """
    layout = job.layout
    ranks = [layout.reporter(cell) for cell in layout.cells]
    watch = StragglerWatch(
        *(layout, job.control, telemetry, config.host_policy),
        lambda: listen_for(layout, ranks, config, "so replicas that come last are not found"),
        host=None if planner is None else planner.host,
        loop=transport.loop if isinstance(transport, TwoPathTransport) else None,
    )
    if watch.measures:
        waits.want(moments_of(current_device()))
    return SyncArrivals(watch, waits)


class MonitoredIterations(IterationHooks):
    """Reports each training iteration of a pipeline."""

    def __init__(self, pipeline: Pipeline, arrivals: SyncArrivals) -> None:
        super().__init__(pipeline)
        self._arrivals = arrivals
        self._waits: IterationWaits | None = None
        """Waits of the latest iteration, until it is measured."""

    def commit(self, call: PipelineCall) -> None:
        if not call.forward_only:
            self._waits = self._arrivals.take()

    def measured(self, ended: EndedIteration) -> None:
        computed_s = sum(record.compute_s for record in ended.report.records)
        self._arrivals.add(ended.iteration, ended.seconds, self._waits, computed_s)

    def close(self) -> None:
        self._arrivals.close()


class MonitoredStock(StockHooks):
    """Reports each iteration of stock's schedule."""

    def __init__(self, arrivals: SyncArrivals) -> None:
        self._arrivals = arrivals

    def end(self, iteration: int, seconds: float) -> None:
        self._arrivals.add(iteration, seconds, self._arrivals.take(), None)

    def close(self) -> None:
        self._arrivals.close()
