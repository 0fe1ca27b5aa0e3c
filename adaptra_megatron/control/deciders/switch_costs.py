# SPDX-License-Identifier: Apache-2.0
"""Hold a better plan back until it would have paid for the switch to it.

A switch costs time where layers are captured as CUDA graphs in the order of a plan: they are captured anew. How long a
change will last is not known. So the rule for renting or buying applies: keep the plan, add up what the better one
would have saved, and switch once the sum is the cost of a switch. Whatever comes then, that costs at most twice as much
as the best decision in hindsight. A link that is slow for a minute changes nothing if a switch takes a minute.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from adaptra_megatron.common.reasons import joined, reason_fields
from adaptra_megatron.schedule.ir import Schedule, chunks_in_order
from adaptra_megatron.telemetry.events import PlanMade

Chosen = tuple[Schedule | None, PlanMade | None]
"""A schedule to switch to, and the event of its planning; see `Replanner.decide`."""


class DeferredSwitch:
    """The plan that is held back, and what keeping the old one has cost."""

    def __init__(self) -> None:
        self._held: tuple[Schedule, PlanMade] | None = None
        self._lost_s = 0.0

    def decide(self, chosen: Chosen, current: Schedule, switch_s: float, *, urgent: bool = False) -> Chosen:
        """Return what to do in place of `chosen`, the choice if a switch were free; once per iteration.

        `switch_s`: seconds that a switch takes. `urgent`: whether `current` cannot go on.
        """
        schedule, made = chosen
        if made is not None and (schedule is None or urgent or not switch_s or not moves_forwards(current, schedule)):
            self._held, self._lost_s = None, 0.0
            return chosen
        if self._held is not None:
            _, before = self._held
            self._lost_s += max(0.0, (before.current_predicted_s or before.predicted_s) - before.predicted_s)
        if schedule is not None and made is not None:
            self._held = schedule, made
        if self._held is not None and self._lost_s >= switch_s:
            return self._switch(switch_s)
        if made is None:
            return None, None
        reason = joined([_reason(made), f"held back until it has saved the {switch_s:.1f} s of a switch"])
        return None, dataclasses.replace(
            made, adopted=False, predicted_s=made.current_predicted_s or made.predicted_s, **reason_fields(reason)
        )

    def _switch(self, switch_s: float) -> Chosen:
        assert self._held is not None
        schedule, made = self._held
        reason = joined([_reason(made), f"it would have saved {self._lost_s:.1f} s, a switch takes {switch_s:.1f} s"])
        self._held, self._lost_s = None, 0.0
        return schedule, dataclasses.replace(made, **reason_fields(reason))


def _reason(made: PlanMade) -> Sequence[object]:
    return made.reason_parts or made.reason


def moves_forwards(before: Schedule, after: Schedule) -> bool:
    """Return whether any stage's forwards and backwards are in another order. Weight gradients do not count."""
    pairs = zip(before.orders, after.orders, strict=True)
    return any(chunks_in_order(old) != chunks_in_order(new) for old, new in pairs)
