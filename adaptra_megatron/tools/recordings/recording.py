# SPDX-License-Identifier: Apache-2.0
"""Define recordings as `adaptra analyze` reads them, in any format, and correct the clocks of their hosts.

A message that was used before it was sent proves that two clocks differ. Then the quickest messages in both directions
between two neighbouring stages are assumed to take equally long, and half the difference is that of the clocks.
Without such a message nothing is shifted: a link may really be slow in one direction.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass, replace

from adaptra_megatron.common.layout import Cell
from adaptra_megatron.tools.replay.operations import RecordedStep, ReplayError, with_sequence_numbers
from adaptra_megatron.tools.replay.replayed_messages import pairs_of, with_messages

_NOISE = 0.03
"""Share of an action's time that a message may come too early: an action often ends after it has sent."""
_TOO_EARLY = 0.15
"""The same for two messages in both directions together, beyond which no difference of clocks explains it."""


@dataclass(frozen=True, kw_only=True)
class OneClock:
    """Steps with all times on one clock."""

    steps: tuple[RecordedStep, ...]
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def on_one_clock(steps: Iterable[RecordedStep]) -> OneClock:
    """Return the steps with their cells' clocks corrected; steps whose order no clock explains are left out."""
    found, left_out = [], []
    gaps_s: dict[int, list[float]] = defaultdict(list)
    apart = 0
    for step in steps:
        try:
            shifts_s = _shifts(step, gaps_s)
        except ReplayError as error:
            left_out.append(str(error))
            continue
        shifted = _shifted(step, shifts_s)
        aligned = _aligned(shifted)
        apart += aligned is not shifted
        found.append(aligned)
    notes = [_gap_in_words(stage, row) for stage, row in sorted(gaps_s.items())]
    if apart:
        notes.append(f"Replicas have clocks of their own in {apart} steps: they are taken to begin at the same time.")
    return OneClock(steps=tuple(found), left_out=tuple(left_out), notes=tuple(notes))


def _gap_in_words(stage: int, row: Sequence[float]) -> str:
    least, most = 1e3 * min(row), 1e3 * max(row)
    apart = _number(most) if most - least <= 0.01 * abs(most) else f"{_number(least)} to {_number(most)}"
    return (
        f"The clock of stage {stage + 1} is {apart} ms ahead of that of stage {stage}, for messages were used before "
        "they were sent: corrected."
    )


def _number(milliseconds: float) -> str:
    return f"{milliseconds:.3g}" if abs(milliseconds) < 100.0 else f"{milliseconds:,.0f}"


def _shifts(step: RecordedStep, gaps_s: dict[int, list[float]]) -> dict[Cell, float]:
    """Return the seconds by which the clock of each cell is ahead of its first stage's. Raises ReplayError if no clock
    explains the times."""
    ways_s: dict[tuple[int, int, int], float] = {}
    for message in pairs_of(step):
        source, target = message.link
        key = (message.sender.cell.replica, source, target)
        ways_s[key] = min(ways_s.get(key, math.inf), message.user.start_s - message.sender.end_s)
    action_s = statistics.median([each.duration_s for each in step.operations if each.optype.computes] or [0.0])
    found: dict[Cell, float] = {}
    for replica in {cell.replica for cell in step.cells}:
        ahead_s = 0.0
        for stage in range(step.stages):
            there_s, back_s = ways_s.get((replica, stage - 1, stage)), ways_s.get((replica, stage, stage - 1))
            if there_s is not None and back_s is not None and min(there_s, back_s) < -_NOISE * action_s:
                if there_s + back_s < -_TOO_EARLY * action_s:
                    raise ReplayError(
                        f"step {step.number}: stages {stage - 1} and {stage} of replica {replica} use each other's "
                        f"messages up to {-1e3 * min(there_s, back_s):.3g} ms before they are sent, and no difference "
                        "of clocks explains that: are stages and micro-batches named rightly, do ranges contain waits?"
                    )
                if there_s + back_s >= -_NOISE * action_s:
                    gap_s = (there_s - back_s) / 2.0
                    ahead_s += gap_s
                    gaps_s[stage - 1].append(gap_s)
            found[Cell(replica, stage)] = ahead_s
    return found


def _shifted(step: RecordedStep, shifts_s: dict[Cell, float]) -> RecordedStep:
    if not any(shifts_s.values()):
        return step
    moved = (each._replace(start_s=each.start_s - shifts_s.get(each.cell, 0.0)) for each in step.operations)
    return replace(step, operations=with_sequence_numbers(moved))


def _aligned(step: RecordedStep) -> RecordedStep:
    """Return the step with replicas shifted to the same start, if they do not overlap at all and share no
    collective."""
    spans: dict[int, tuple[float, float]] = {}
    for each in step.operations:
        first, last = spans.get(each.cell.replica, (math.inf, -math.inf))
        spans[each.cell.replica] = min(first, each.start_s), max(last, each.end_s)
    bare = all(each.optype.computes or each.optype.peer for each in step.operations)
    overlap = max(first for first, _ in spans.values()) <= min(last for _, last in spans.values())
    if overlap or not bare:
        return step
    moved = (each._replace(start_s=each.start_s - spans[each.cell.replica][0]) for each in step.operations)
    return replace(step, operations=with_sequence_numbers(moved))


MOST_NAMED = 8
"""Longest list of numbers in a sentence; of more, it gives the count."""


class RecordingError(ValueError):
    """A recording that cannot be read. Names the file, what was expected, and the remedy."""


class NoTraceError(RecordingError):
    """A JSON file that is no trace; a directory may hold it next to traces."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"{name} {what}")
        self.name, self.what = name, what

    def __reduce__(self) -> tuple[type[NoTraceError], tuple[str, str]]:
        return type(self), (self.name, self.what)


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """Point at which a run changed, from its log."""

    step: int
    why: str


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Steps of one job, by number."""

    name: str
    source: str
    """Format, as text."""
    steps: tuple[RecordedStep, ...]
    notes: tuple[str, ...] = ()
    """Estimates, corrections and assumptions, as sentences."""
    left_out: tuple[str, ...] = ()
    """Why other steps could not be read."""
    beginnings: tuple[Beginning, ...] = ()
    """Changes of the run, by its log: where its later parts begin."""

    def __post_init__(self) -> None:
        if not self.steps:
            said = ". ".join([because(self.left_out), *self.notes[:MOST_NAMED]])
            raise RecordingError(f"{self.name} has no training step that is complete{said}")


def understood(
    *,
    name: str,
    source: str,
    steps: Sequence[RecordedStep],
    left_out: Sequence[str],
    notes: Sequence[str],
    one_clock: bool = False,
) -> Recording:
    """Return the recording of `steps`, on one clock, with the messages that were not recorded. `one_clock`: whether
    they are on one clock already. Raises RecordingError if no step is left."""
    # Incomplete steps (routed ones, say) would distort the estimates of clocks and messages.
    missing = {step.number: what for step in steps if (what := step.missing())}
    left_out = (*missing.values(), *left_out)
    steps = [step for step in steps if step.number not in missing]
    clocked = OneClock(steps=tuple(steps)) if one_clock else on_one_clock(steps)
    return Recording(
        name=name,
        source=source,
        steps=tuple(with_messages(clocked.steps)),
        left_out=(*left_out, *clocked.left_out),
        notes=(*notes, *clocked.notes),
    )


class AllSteps:
    """Contains every number."""

    def __contains__(self, number: object) -> bool:
        return True


Wanted = Container[int]
"""Numbers of the steps to read."""
ALL_STEPS = AllSteps()


def because(reasons: Collection[str]) -> str:
    """Return the first of `reasons` after a colon, and the number of others; "" if there are none."""
    first = next(iter(reasons), None)
    if first is None:
        return ""
    return f": {first}{f' (and {len(reasons) - 1} more like it)' if len(reasons) > 1 else ''}"


def no_such_step(name: str, numbers: Iterable[int]) -> RecordingError:
    """Return the error for requested steps that are missing."""
    there = sorted(numbers)
    return RecordingError(
        f"{name} has none of the steps asked for: there {'is' if len(there) == 1 else 'are'} {numbered(there)}"
    )


def numbered(numbers: Collection[int]) -> str:
    """Format numbers for a sentence, such as "3", "0-5", "1, 4, 7"."""
    row = sorted(numbers)
    if len(row) > 2 and row[-1] - row[0] == len(row) - 1:
        return f"{row[0]}-{row[-1]}"
    named = ", ".join(map(str, row[:MOST_NAMED]))
    return named if len(row) <= MOST_NAMED else f"{named} and {len(row) - MOST_NAMED} more"
