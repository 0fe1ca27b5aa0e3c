# SPDX-License-Identifier: Apache-2.0
"""Keep a busy machine from affecting the planner: it decides in time, and for the emulated durations, or for CPU times.

For tests of decisions, and of their effects on the numbers.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from adaptra_megatron.control.decisions import Decision, DecisionWriter
from adaptra_megatron.control.measurements import StageMeasurement, stage_measurement
from adaptra_megatron.engine.execution.executor import ClockTimer
from adaptra_megatron.telemetry.action_records import ActionRecord
from testing.faults.emulated_compute import EmulatedCompute
from testing.replacing import Replaced, Replacement

DECIDES_WITHIN_S = 120.0
"""Longest wait of an iteration for its decision."""
_LOOK_EVERY_S = 0.002


def prompt_planner() -> Replaced:
    """Decorate `DecisionWriter.needed`: each iteration waits for the decision that follows from earlier measurements.

    Without it the iteration would continue with the present plan. Active until undone. Raises ExchangeError after
    DECIDES_WITHIN_S.
    """
    needed = DecisionWriter.needed

    @functools.wraps(needed)
    def patient(writer: DecisionWriter, iteration: int) -> Decision:
        until_s = time.monotonic() + DECIDES_WITHIN_S
        while writer.published(iteration) is None:
            if time.monotonic() > until_s:
                raise TimeoutError(f"the planner has decided nothing for iteration {iteration}")
            time.sleep(_LOOK_EVERY_S)
        return needed(writer, iteration)

    return Replaced([Replacement(DecisionWriter, "needed", patient, "emulated prompt planner")])


def exact_times(compute: EmulatedCompute) -> Replaced:
    """Decorate `stage_measurement`, so that it reports the durations emulated by `compute` instead of measured ones.

    This lasts until the result is undone. Times of messages are still measured. If replicas make updates separately, a
    gradient counts as one backward of the first stage.
    """
    from adaptra_megatron.megatron import replica_updates

    def seconds(record: ActionRecord, behind: ActionRecord | None) -> float:
        alone_s = compute.action_seconds(record.kind, record.chunk)
        if not record.combined:
            return alone_s
        if record.kind != "F" or behind is None:  # the backward of a pair, whose time is the forward's
            return 0.0
        backward_s, whole_s = (compute.action_seconds(kind, behind.chunk) for kind in (behind.kind, "B"))
        return compute.combined_seconds(alone_s, backward_s, whole_s)

    def computing_s(begun_s: float) -> float:
        return compute.action_seconds("B", 0)

    return Replaced(
        [_measured_as(seconds), Replacement(replica_updates, "computing_s", computing_s, "emulated exact times")]
    )


def cpu_times() -> Replaced:
    """Decorate `stage_measurement`, so that it reports the CPU time of the training thread as an action's duration.

    This lasts until the result is undone. For computation that is not emulated. Times of messages are still measured.
    """

    def mark(timer: ClockTimer) -> float:
        moment = _Moment(time.monotonic())
        moment.cpu_s = time.thread_time()
        return moment

    def seconds(record: ActionRecord, behind: ActionRecord | None) -> float:
        assert isinstance(record.start_s, _Moment)
        assert isinstance(record.end_s, _Moment)
        return record.end_s.cpu_s - record.start_s.cpu_s

    return Replaced([_measured_as(seconds), Replacement(ClockTimer, "mark", mark, "emulated idle machine")])


class _Moment(float):
    cpu_s: float
    """CPU time of the thread at this moment."""


def _measured_as(seconds: Callable[[ActionRecord, ActionRecord | None], float]) -> Replacement:
    """Return the replacement that reports durations of actions as `seconds(record, next record)`."""
    from adaptra_megatron.engine import measuring

    @functools.wraps(stage_measurement)
    def exact(
        pipeline: int, stage: int, micro_batches: int, records: Sequence[ActionRecord], *args: Any, **keywords: Any
    ) -> StageMeasurement:
        lasting = [
            record._replace(
                wait_start_s=float(record.wait_start_s),
                start_s=float(record.start_s),
                end_s=record.start_s + seconds(record, behind),
            )
            for record, behind in zip_longest(records, records[1:])
        ]
        return stage_measurement(pipeline, stage, micro_batches, lasting, *args, **keywords)

    return Replacement(measuring, "stage_measurement", exact, "emulated exact times")
