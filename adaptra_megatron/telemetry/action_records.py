# SPDX-License-Identifier: Apache-2.0
"""Define the records of actions and of messages on one rank."""

from __future__ import annotations

from typing import NamedTuple


class ActionRecord(NamedTuple):
    """One action as it ran. Times are `time.monotonic()` seconds of the rank's host."""

    iteration: int
    stage: int
    """Rank within the pipeline."""
    kind: str
    """`str(schedule.actions.Kind)`: "F", "B", "I" or "W"."""
    chunk: int
    micro_batch: int
    wait_start_s: float
    """Start of the wait for the action's message; `start_s` if it needed none."""
    start_s: float
    """Start of the computation, when the message had arrived."""
    end_s: float
    combined: bool = False
    """Whether it is half of a combined action: the forward, with the time of both, or the backward behind it, with
    none."""

    @property
    def wait_s(self) -> float:
        """Seconds spent waiting for the action's message."""
        return self.start_s - self.wait_start_s

    @property
    def compute_s(self) -> float:
        """Seconds spent computing."""
        return self.end_s - self.start_s


class ArrivalRecord(NamedTuple):
    """Arrival of a message at the stage that needs it, which may not be waiting for it yet."""

    iteration: int
    source: int
    stage: int
    """The receiving stage. Kind, chunk and micro-batch are those of its action."""
    kind: str
    """"F" for an activation, "B" for a gradient, whether or not the backward was split."""
    chunk: int
    micro_batch: int
    arrived_s: float
    """`time.monotonic()` seconds of the receiving rank's host."""


class Iterations(NamedTuple):
    """Iterations from `first` to `last`, both included: Megatron's numbers, from 1 and continued after restarts."""

    first: int
    last: int
