# SPDX-License-Identifier: Apache-2.0
"""A recording as `adaptra analyze` takes it, whatever it was read from."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass

from adaptra_megatron.tools.replay.operations import RecordedStep
from adaptra_megatron.tools.replay.rank_clocks import OneClock, on_one_clock
from adaptra_megatron.tools.replay.replayed_messages import with_messages

MOST_NAMED = 8
"""Numbers that a sentence names; of more, it says how many there are."""


class RecordingError(ValueError):
    """A recording that cannot be read: the message names the file, what was expected and the remedy."""


class NoTraceError(RecordingError):
    """A file that is JSON and no trace: in a directory it may stand beside some."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"{name} {what}")
        self.name, self.what = name, what

    def __reduce__(self) -> tuple[type[NoTraceError], tuple[str, str]]:
        return type(self), (self.name, self.what)


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """Point at which a run changed, as its log says."""

    step: int
    why: str


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Steps of one job, by their numbers."""

    name: str
    source: str
    """What it was read from, in words."""
    steps: tuple[RecordedStep, ...]
    notes: tuple[str, ...] = ()
    """What was estimated, corrected or taken for something, in sentences."""
    left_out: tuple[str, ...] = ()
    """Why other steps could not be read."""
    beginnings: tuple[Beginning, ...] = ()
    """The parts that a run of our own falls into, but the first."""

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
    """The recording of `steps` on one clock, with the messages that were not recorded. `one_clock`: they are on one
    already. Raises RecordingError if no step is left."""
    # Steps that lack actions, as routed ones do, would blur what is found of clocks and messages.
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
    """Every number."""

    def __contains__(self, number: object) -> bool:
        return True


Wanted = Container[int]
"""Numbers of the steps to read."""
ALL_STEPS = AllSteps()


def because(reasons: Collection[str]) -> str:
    """The first of `reasons`, behind a colon, and how many more there are."""
    first = next(iter(reasons), None)
    if first is None:
        return ""
    return f": {first}{f' (and {len(reasons) - 1} more like it)' if len(reasons) > 1 else ''}"


def no_such_step(name: str, numbers: Iterable[int]) -> RecordingError:
    """For steps that were asked for and are not there."""
    there = sorted(numbers)
    return RecordingError(
        f"{name} has none of the steps asked for: there {'is' if len(there) == 1 else 'are'} {numbered(there)}"
    )


def numbered(numbers: Collection[int]) -> str:
    """Such as "3", "0-5", "1, 4, 7": sorted numbers in a sentence."""
    row = sorted(numbers)
    if len(row) > 2 and row[-1] - row[0] == len(row) - 1:
        return f"{row[0]}-{row[-1]}"
    named = ", ".join(map(str, row[:MOST_NAMED]))
    return named if len(row) <= MOST_NAMED else f"{named} and {len(row) - MOST_NAMED} more"
