# SPDX-License-Identifier: Apache-2.0
"""Decorators that keep what a busy machine does to a training away from its planner: it decides in time, for the times
that are emulated. For tests of what is decided, and of what decisions do to the numbers."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

from adaptra_megatron.control.decision_reader import DecisionWriter
from adaptra_megatron.control.decisions import Decision
from adaptra_megatron.control.measurements import StageMeasurement, stage_measurement
from adaptra_megatron.telemetry.action_records import ActionRecord
from testing.faults.emulated_compute import EmulatedCompute
from testing.replacing import Replaced, Replacement

DECIDES_WITHIN_S = 120.0
"""How long an iteration waits for its decision."""
_LOOK_EVERY_S = 0.002


def prompt_planner() -> Replaced:
    """A decorator around `DecisionWriter.needed`, in force until undone: each iteration waits for the decision that
    follows from what was measured in the iterations before, where the training would otherwise keep what runs.

    An iteration without a decision after DECIDES_WITHIN_S raises ExchangeError.
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
    """A decorator around `stage_measurement`, in force until undone: actions are reported to have lasted what `compute`
    has them last in the present iteration, by kind and chunk. Times of messages stay as they were measured. Where
    replicas make updates apart, a gradient is reported to have taken as long as one backward of the first stage."""
    from adaptra_megatron.engine.measurement import measuring
    from adaptra_megatron.megatron import replica_updates

    @functools.wraps(stage_measurement)
    def exact(
        pipeline: int, stage: int, micro_batches: int, records: Sequence[ActionRecord], *args: Any, **keywords: Any
    ) -> StageMeasurement:
        lasting = [
            record._replace(end_s=record.start_s + compute.action_seconds(record.kind, record.chunk))
            for record in records
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
