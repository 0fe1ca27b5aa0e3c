# SPDX-License-Identifier: Apache-2.0
"""What ranks tell each other when they meet in a new epoch, and what follows from it."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

MOST_NBYTES = 1 << 28

COMMIT, REDO = "commit", "redo"
"""Fates of an attempt: written once, by the first rank that comes to it."""


@dataclass(frozen=True)
class KeptResult:
    """Result of one operation outside of calls."""

    place: str
    """Group, and number of the operation."""
    outputs: tuple[str, ...] | None
    """Bytes in base 64; None: too many to keep."""


@dataclass(frozen=True)
class RankState:
    """Where one rank has come to."""

    attempted: str | None
    """The attempt whose fate it does not know: see `attempt_name`. None: it has come to the end of none since its last
    commit."""
    kept: tuple[KeptResult, ...]


@dataclass(frozen=True)
class Agreement:
    """What all ranks of an epoch begin with."""

    committed: tuple[str, ...]
    """Attempts that are, of those whose fate some rank did not know."""
    kept: tuple[KeptResult, ...]


def committed_with(epoch: int | None) -> str:
    """The fate of an attempt that is committed. `epoch`: that in which workers that stand ready are to be admitted,
    before the next iteration; None: there are none."""
    return COMMIT if epoch is None else f"{COMMIT} {epoch}"


def read_fate(fate: str) -> tuple[bool, int | None]:
    """Return whether an attempt is committed, and the epoch that `committed_with` was given."""
    word, _, epoch = fate.partition(" ")
    return word == COMMIT, int(epoch) if epoch else None


def attempt_name(call: int, epoch: int) -> str:
    """The one attempt at a call that an epoch makes."""
    return f"{call}/{epoch}"


def agreed(states: Sequence[RankState], decide: Callable[[str], str]) -> Agreement:
    """What follows from the states of all live ranks. `decide`: the fate of an attempt, REDO unless it is written."""
    attempts = sorted({state.attempted for state in states if state.attempted is not None})
    committed = tuple(attempt for attempt in attempts if read_fate(decide(attempt))[0])
    kept = {result.place: result for state in states for result in state.kept}
    return Agreement(committed, tuple(kept.values()))


def packed_results(results: dict[str, Sequence[bytes] | None]) -> tuple[KeptResult, ...]:
    """As they travel."""
    return tuple(
        KeptResult(place, None if outputs is None else tuple(base64.b64encode(each).decode() for each in outputs))
        for place, outputs in results.items()
    )


def unpacked_results(kept: Iterable[KeptResult]) -> dict[str, Sequence[bytes] | None]:
    """As they are looked up. Raises ValueError for what is no base 64."""
    return {
        each.place: None if each.outputs is None else [base64.b64decode(text, validate=True) for text in each.outputs]
        for each in kept
    }
