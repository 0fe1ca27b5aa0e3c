# SPDX-License-Identifier: Apache-2.0
"""Puts together what one rank measures in an iteration, for those who look for stragglers."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.control.stragglers.watch import StragglerWatch
from adaptra_megatron.detector.stragglers import Row
from adaptra_megatron.runtime.device import current_device
from adaptra_megatron.runtime.job import Job
from adaptra_megatron.runtime.listening import listen_for
from adaptra_megatron.runtime.measurement.sync_waits import IterationWaits, SyncWaits, moments_of
from adaptra_megatron.telemetry.run_telemetry import RunTelemetry

_MOST_PENDING = 8
"""Iterations whose end on the GPU is awaited."""


class _Pending(NamedTuple):
    iteration: int
    seconds: float
    computed_s: float | None
    waits: IterationWaits


class Arrivals:
    """One rank's, of its pipeline. For the training thread."""

    def __init__(self, watch: StragglerWatch, waits: SyncWaits) -> None:
        self._watch, self._waits = watch, waits
        self._pending: deque[_Pending] = deque(maxlen=_MOST_PENDING)

    @classmethod
    def make(cls, job: Job, config: AdaptraConfig, telemetry: RunTelemetry, waits: SyncWaits | None) -> Arrivals | None:
        """None where no replica waits for another, or they are not to be watched."""
        layout = job.layout
        if waits is None or layout.replicas < 2:
            return None
        ranks = [layout.reporter(cell) for cell in layout.cells]
        watch = StragglerWatch(
            *(layout, job.control, telemetry, config.host_policy),
            lambda: listen_for(layout, ranks, config, "so replicas that come last are not found"),
        )
        if watch.measures:
            waits.want(moments_of(current_device()))
        return cls(watch, waits)

    def take(self) -> IterationWaits | None:
        """What this iteration, which has been launched, waited for; to be given to `add` once that has happened."""
        return self._waits.take()

    def add(self, iteration: int, seconds: float, waits: IterationWaits | None, computed_s: float | None) -> None:
        """A training iteration is over. `computed_s`: in forwards and backwards; None: all but waiting."""
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
