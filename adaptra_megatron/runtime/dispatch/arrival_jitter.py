# SPDX-License-Identifier: Apache-2.0
"""Judges if a neighbour's messages keep coming at the same moments, iteration by iteration. No clock, no torch.

A plan is best while they do: it was searched for, while a stage that decides as messages come sees one action ahead.
What is compared are the gaps between messages, which neither a late start nor one late message shifts for long.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from adaptra_megatron.telemetry.records import ArrivalRecord

CHANGE = 0.25
"""Share of an action: arrivals are irregular where half of the gaps change by more between iterations."""
UNSTEADY_AFTER = 2
"""Iterations in a row: a pause or a new plan changes gaps once, between two pairs of iterations at most."""
STEADY_AFTER = 3
TRIED_AFTER = 30
"""Iterations after which what is unsteady counts as steady again, to be seen as it is: a stage that leaves the plan
changes its neighbours' moments, and they change those of its own messages."""

_Message = tuple[str, int, int]


class ArrivalJitter:
    """Arrival jitter of the messages of one neighbour."""

    def __init__(self) -> None:
        self.unsteady = False
        self._gaps_s: dict[_Message, float] = {}
        self._in_a_row = 0
        """Iterations that contradict `unsteady`."""
        self._since = 0
        """Iterations since it became so."""

    def observe(self, arrivals: Iterable[ArrivalRecord], action_s: float) -> None:
        """One iteration's arrivals from this neighbour; `action_s`: mean seconds of an action."""
        gaps_s = _gaps_s(arrivals)
        changes_s = [abs(gap_s - self._gaps_s[key]) for key, gap_s in gaps_s.items() if key in self._gaps_s]
        self._gaps_s = gaps_s
        if not changes_s:
            return
        unsteady = statistics.median(changes_s) > CHANGE * action_s
        self._in_a_row = self._in_a_row + 1 if unsteady != self.unsteady else 0
        self._since += 1
        if self.unsteady and (self._in_a_row >= STEADY_AFTER or self._since >= TRIED_AFTER):
            self._become(False)
        elif not self.unsteady and self._in_a_row >= UNSTEADY_AFTER:
            self._become(True)

    def _become(self, unsteady: bool) -> None:
        self.unsteady, self._in_a_row, self._since = unsteady, 0, 0


def _gaps_s(arrivals: Iterable[ArrivalRecord]) -> dict[_Message, float]:
    """Seconds between each message and the one of the micro-batch before, of the same kind and chunk."""
    moments_s = {(record.kind, record.chunk, record.micro_batch): record.arrived_s for record in arrivals}
    return {
        (kind, chunk, micro_batch): arrived_s - moments_s[kind, chunk, micro_batch - 1]
        for (kind, chunk, micro_batch), arrived_s in moments_s.items()
        if (kind, chunk, micro_batch - 1) in moments_s
    }
