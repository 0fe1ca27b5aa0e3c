# SPDX-License-Identifier: Apache-2.0
"""Report one rank's arrival times at gradient synchronisation, by which the last replica is found."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import torch

from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.control.detector.straggler_arrivals import Row
from adaptra_megatron.control.stragglers.straggler_watch import StragglerWatch
from adaptra_megatron.engine.iteration_hooks import IterationHooks, StockHooks
from adaptra_megatron.engine.listening import listen_for
from adaptra_megatron.engine.measurement.measuring import EndedIteration
from adaptra_megatron.engine.measurement.sync_waits import (
    ClockMoments,
    IterationWaits,
    Moments,
    StreamMoments,
    SyncWaits,
)
from adaptra_megatron.engine.training_job import Job
from adaptra_megatron.megatron.megatron_call import PipelineCall
from adaptra_megatron.telemetry.run_telemetry import RunTelemetry
from adaptra_megatron.transport.gpu.training_device import current_device

if TYPE_CHECKING:
    from adaptra_megatron.engine.pipeline import Pipeline

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


def arrivals_of(job: Job, config: AdaptraConfig, telemetry: RunTelemetry, waits: SyncWaits) -> SyncArrivals:
    """Return this rank's arrivals, and begin to measure `waits` if they are needed."""
    layout = job.layout
    ranks = [layout.reporter(cell) for cell in layout.cells]
    watch = StragglerWatch(
        *(layout, job.control, telemetry, config.host_policy),
        lambda: listen_for(layout, ranks, config, "so replicas that come last are not found"),
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
        """See IterationHooks."""
        if not call.forward_only:
            self._waits = self._arrivals.take()

    def measured(self, ended: EndedIteration) -> None:
        """See IterationHooks."""
        computed_s = sum(record.compute_s for record in ended.report.records)
        self._arrivals.add(ended.iteration, ended.seconds, self._waits, computed_s)

    def close(self) -> None:
        """See IterationHooks."""
        self._arrivals.close()


class MonitoredStock(StockHooks):
    """Reports each iteration of stock's schedule."""

    def __init__(self, arrivals: SyncArrivals) -> None:
        self._arrivals = arrivals

    def end(self, iteration: int, seconds: float) -> None:
        """See StockHooks."""
        self._arrivals.add(iteration, seconds, self._arrivals.take(), None)

    def close(self) -> None:
        """See StockHooks."""
        self._arrivals.close()
