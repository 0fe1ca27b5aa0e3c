# SPDX-License-Identifier: Apache-2.0
"""T7: what a split backward keeps in memory until its weight gradient runs, compared with what plans assume."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from adaptra_megatron.schedule.ir import Kind

Bytes = Mapping[str, float]
"""By how they are counted: "allocated", in live tensors; "active", with freed ones that a stream may still use."""
MIB = 1 << 20


class NotedMeter:
    """A decorator of runtime.memory.MemoryMeter that notes what each action changes."""

    def __init__(self, meter: Any, in_use: Callable[[], Bytes]) -> None:
        """`in_use`: called around each action, and whenever the meter is about to forget the peak so far."""
        self._meter, self._in_use = meter, in_use
        self._before: Bytes = {}
        self._changes: dict[tuple[Kind, int], list[Bytes]] = defaultdict(list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._meter, name)

    def begin(self, plan: int) -> None:
        """As the meter's."""
        self._in_use()
        self._meter.begin(plan)

    def before(self) -> None:
        """As the meter's."""
        self._meter.before()
        self._before = self._in_use()

    def after(self, kind: Kind, chunk: int, *, alone: bool = True) -> None:
        """As the meter's."""
        now = self._in_use()
        if alone:
            self._changes[kind, chunk].append({name: now[name] - self._before[name] for name in now})
        self._meter.after(kind, chunk, alone=alone)

    def kept(self) -> dict[str, float] | None:
        """Bytes in use after an input gradient that are not after a whole backward, of the chunk with the most; and
        those of an "activation". None where backwards were not run in both ways."""
        kept = []
        for kind, chunk in self._changes:
            if kind is Kind.BACKWARD_INPUT and (Kind.BACKWARD, chunk) in self._changes:
                split, whole = self._typical(kind, chunk), self._typical(Kind.BACKWARD, chunk)
                kept.append({name: split[name] - whole[name] for name in split})
        if not kept or self._meter.activation_nbytes is None:
            return None
        return {**max(kept, key=lambda each: each["allocated"]), "activation": self._meter.activation_nbytes}

    def _typical(self, kind: Kind, chunk: int) -> Bytes:
        changes = self._changes[kind, chunk]
        return {name: statistics.median(change[name] for change in changes) for name in changes[0]}


def judge_kept(kept: Sequence[Mapping[str, float] | None], released: Sequence[float] | None) -> tuple[str, bool]:
    """What was seen of the memory between I and W, and whether plans reckon with it.

    `kept`: by stage, as NotedMeter tells. `released`: by stage, the fraction of an activation that plans take an input
    gradient to give back; None: no costs were measured.
    """
    if released is None:
        return "no costs were measured", False
    seen, shown = [], True
    for stage, each in enumerate(kept):
        if each is None:
            return f"stage {stage} did not run backwards both split and whole", False
        fraction, reckoned = each["allocated"] / each["activation"], 1.0 - released[stage]
        shown = shown and fraction <= reckoned
        seen.append(
            f"stage {stage}: {each['allocated'] / MIB:.1f} MiB allocated and {each['active'] / MIB:.1f} active, "
            f"{fraction:.2f} of an activation, where plans reckon with {reckoned:.2f}"
        )
    return "; ".join(seen), shown
