# SPDX-License-Identifier: Apache-2.0
"""Findings in words."""

from __future__ import annotations

from adaptra_megatron.detector.findings import State
from adaptra_megatron.detector.series import Change
from adaptra_megatron.reasons import Reason

SETTLED = "as in its first iterations"
UNJUDGED = "too few iterations to judge"


def seconds(value_s: float) -> str:
    """In milliseconds, to three digits."""
    return f"{value_s * 1e3:.3g} ms"


def size(nbytes: float) -> str:
    """In the largest binary unit that leaves at least one."""
    for exponent, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes >= 1024**exponent:
            return f"{nbytes / 1024**exponent:.3g} {unit}"
    return f"{nbytes:.0f} bytes"


def change_in_words(what: str, change: Change, state_since: int) -> Reason:
    """Such as `a message of 4 MiB takes 32 ms, before 2 ms (baseline of 20 iterations: 2 ms); seen in ...`.

    `state_since`: the iteration since when the state is what the finding says, which is not said again.
    """
    again = " again" if change.before is State.SLOW and change.state is State.HEALTHY else ""
    since = (" since iteration ", change.since_iteration) if change.since_iteration != state_since else ()
    before = f"{'others' if change.of_others else 'before'} {seconds(change.previous_s)}"
    behind: tuple[Reason, ...] = ()
    if change.learnt_slow:
        before = f"{seconds(change.previous_s)} when it was first measured, while the link was slow already"
    elif not change.of_others and State.SLOW in (change.before, change.state):
        healthy = change.baseline
        text = f" (baseline {seconds(healthy.value)}, of {healthy.iterations} iterations up to "
        behind = ((text, healthy.until_iteration, ")"),)
    seen = ("; seen in ", change.evidence)
    return (f"{what} takes {seconds(change.level_s)}{again}", *since, f", {before}", *behind, seen)
