# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a made-up job measure: four stages, one link of which is as slow as reported."""

from __future__ import annotations

from adaptra_megatron.control.measurements import StageMeasurement, stage_measurement
from adaptra_megatron.telemetry.action_records import ActionRecord
from adaptra_megatron.transport.link_paths import Path as LinkPath
from adaptra_megatron.transport.message_keys import Direction, MessageKey, MessageTimes

MICRO_BATCHES, PERIOD_S = 12, 5.0


class MeasuredJob:
    """Every action takes a second, and messages 0->1 as long as each call says."""

    def __init__(self) -> None:
        self.iteration = 0

    def measure(self, latency_s: float, *, slow_stage: float = 1.0) -> list[StageMeasurement]:
        """Measurements of the next iteration; stage 3 takes `slow_stage` times as long."""
        number = self.iteration
        self.iteration += 1
        keys = [MessageKey(number, Direction.ACTIVATION, 0, micro_batch) for micro_batch in range(MICRO_BATCHES)]
        found = []
        for stage in range(4):
            seconds = slow_stage if stage == 3 else 1.0
            records = []
            for micro_batch in range(MICRO_BATCHES):
                for place, kind in enumerate("FBIW"):
                    start_s = PERIOD_S * micro_batch + place
                    records.append(ActionRecord(number, stage, kind, 0, micro_batch, 0.0, start_s, start_s + seconds))
            sent = [MessageTimes(key, 1, at, at, 1000, LinkPath.DEVICE) for key, at in _moments(keys)]
            received = [MessageTimes(key, 0, 0.0, at + latency_s, 1000, LinkPath.DEVICE) for key, at in _moments(keys)]
            times = sent if stage == 0 else [], received if stage == 1 else []
            found.append(stage_measurement(0, stage, MICRO_BATCHES, records, times, 0.0))
        return found


def _moments(keys: list[MessageKey]) -> list[tuple[MessageKey, float]]:
    return [(key, 1.0 + PERIOD_S * key.micro_batch) for key in keys]
