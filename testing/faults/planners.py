# SPDX-License-Identifier: Apache-2.0
"""Keep a busy machine from affecting the planner: it decides in time, and for the emulated durations.

For tests of decisions, and of their effects on the numbers.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from adaptra_megatron.control.decisions import Decision, DecisionWriter
from adaptra_megatron.control.measurements import StageMeasurement, stage_measurement
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
    from adaptra_megatron.engine import measuring
    from adaptra_megatron.megatron import replica_updates

    def seconds(record: ActionRecord, behind: ActionRecord | None) -> float:
        alone_s = compute.action_seconds(record.kind, record.chunk)
        if not record.combined:
            return alone_s
        if record.kind != "F" or behind is None:  # the backward of a pair, whose time is the forward's
            return 0.0
        backward_s, whole_s = (compute.action_seconds(kind, behind.chunk) for kind in (behind.kind, "B"))
        return compute.combined_seconds(alone_s, backward_s, whole_s)

    @functools.wraps(stage_measurement)
    def exact(
        pipeline: int, stage: int, micro_batches: int, records: Sequence[ActionRecord], *args: Any, **keywords: Any
    ) -> StageMeasurement:
        lasting = [
            record._replace(end_s=record.start_s + seconds(record, behind))
            for record, behind in zip_longest(records, records[1:])
        ]
        return stage_measurement(pipeline, stage, micro_batches, lasting, *args, **keywords)

    def computing_s(begun_s: float) -> float:
        return compute.action_seconds("B", 0)

    reason = "emulated exact times"
    return Replaced(
        [
            Replacement(measuring, "stage_measurement", exact, reason),
            Replacement(replica_updates, "computing_s", computing_s, reason),
        ]
    )
