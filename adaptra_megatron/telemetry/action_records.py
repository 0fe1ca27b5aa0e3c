# SPDX-License-Identifier: Apache-2.0
"""Record what one rank did and when: the record of an action, the list that an executor appends to, and which
iterations are asked for."""

from __future__ import annotations

from typing import NamedTuple


class ActionRecord(NamedTuple):
    """One action as it ran. All times are `time.monotonic()` seconds of the rank's host."""

    iteration: int
    stage: int
    """Pipeline rank."""
    kind: str
    """`str(schedule.actions.Kind)`: "F", "B", "I" or "W"."""
    chunk: int
    micro_batch: int
    wait_start_s: float
    """Time at which the rank began to wait for the message the action needs; `start_s` if it needed none."""
    start_s: float
    """Time at which it had what it needed and began to compute."""
    end_s: float

    @property
    def wait_s(self) -> float:
        """Seconds spent waiting for the action's message."""
        return self.start_s - self.wait_start_s

    @property
    def compute_s(self) -> float:
        """Seconds spent computing."""
        return self.end_s - self.start_s


class ArrivalRecord(NamedTuple):
    """Arrival of a message at the stage that needed it, which may be before that stage began to wait."""

    iteration: int
    source: int
    stage: int
    """The one that received it, for its own action of `kind`, `chunk` and `micro_batch`."""
    kind: str
    """"F" for an activation, "B" for a gradient, whether the backward that used it was split or not."""
    chunk: int
    micro_batch: int
    arrived_s: float
    """`time.monotonic()` seconds of the receiving rank's host."""


class Iterations(NamedTuple):
    """From `first` to `last`, both included; Megatron's numbers, from 1 and over restarts."""

    first: int
    last: int


class IterationRecorder:
    """Collects one rank's records.

    Not thread-safe: the thread that runs the pipeline adds, and takes between iterations. An action costs one tuple and
    one list append, so recording can stay on in every run.
    """

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self._records: list[ActionRecord] = []

    def __len__(self) -> int:
        return len(self._records)

    def add(
        self,
        iteration: int,
        kind: str,
        chunk: int,
        micro_batch: int,
        wait_start_s: float,
        start_s: float,
        end_s: float,
    ) -> None:
        """Append one action of this rank's stage, in the order in which actions ran."""
        self._records.append(
            ActionRecord(iteration, self.stage, kind, chunk, micro_batch, wait_start_s, start_s, end_s)
        )

    def take(self, iteration: int) -> list[ActionRecord]:
        """Remove and return the records of `iteration`, in the order in which they ran; empty if there are none.

        Records of earlier iterations that were not taken are dropped, so a forgotten `take` cannot grow without end.
        """
        taken = [record for record in self._records if record.iteration == iteration]
        self._records = [record for record in self._records if record.iteration > iteration]
        return taken
