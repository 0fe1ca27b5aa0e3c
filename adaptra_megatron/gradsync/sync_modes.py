# SPDX-License-Identifier: Apache-2.0
"""Define synchronisation modes (STAR, arXiv 2512.09685), predict the time of an update in each, and find which one
reaches a loss first.

A replica computes a gradient, reports it, and begins again with the parameters of the update that used it. Times are
seconds per gradient. Versions of parameters count updates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from adaptra_megatron.schedule.ir import ScheduleError, require_counts

STRAGGLING = 0.2
"""Minimum fraction by which a straggler is slower than the fastest (STAR, section 3.2 of the released code)."""
LEAST_GAIN = 0.05
"""Minimum fraction of time that a mode further from synchronous training must save; less is within the uncertainty."""
SETTLING, AVERAGED = 256, 1024
"""Number of updates that a pace skips, and of those that it averages.

The members of an update depend on how far each replica is in its computation. If times are no multiples of each other,
these phases never repeat: they drift by a fraction of a gradient per update. With nearly equal times that takes
thousands of updates. So the mean depends on the averaged updates: by 2.8% in the worst case known, by 1.1% in 600
random ones. That is less than `LEAST_GAIN`, and real times do not stay constant for as long.
"""


class ModeKind(Enum):
    """Kind of a synchronisation mode."""

    SSGD = "ssgd"
    """Updates by all replicas together: synchronous training."""
    X_ORDER = "x-order"
    """Updates by any x replicas."""
    DYNAMIC = "dynamic"
    """Updates by groups of replicas of similar speed, each in its own turn; small groups add to the others' updates."""


@dataclass(frozen=True)
class Mode:
    """A kind of mode, with its parameters."""

    kind: ModeKind
    x: int
    """Number of gradients that make an update; for `DYNAMIC`, the size of its smallest group."""
    groups: tuple[tuple[int, ...], ...]
    """Replicas that update together: one group of all, except for `DYNAMIC`."""

    @classmethod
    def ssgd(cls, replicas: int) -> Mode:
        """Return the mode of synchronous training."""
        return cls(ModeKind.SSGD, replicas, (tuple(range(replicas)),))

    @classmethod
    def x_order(cls, replicas: int, x: int) -> Mode:
        """Return the mode of updates by any `x` gradients. Raises ScheduleError unless 1 <= `x` <= `replicas`."""
        require_counts(x=x)
        if x > replicas:
            raise ScheduleError(f"x is {x}, but there are {replicas} replicas: at most all of them make an update")
        return cls.ssgd(replicas) if x == replicas else cls(ModeKind.X_ORDER, x, (tuple(range(replicas)),))

    @classmethod
    def dynamic(cls, groups: Iterable[Sequence[int]]) -> Mode:
        """Return the mode of updates by `groups`. Raises ScheduleError unless they contain each replica once."""
        found = tuple(tuple(sorted(group)) for group in groups)
        members = sorted(replica for group in found for replica in group)
        if not found or not all(found) or members != list(range(len(members))):
            raise ScheduleError(f"groups {found} are not all replicas, each of them once")
        return cls.ssgd(len(members)) if len(found) == 1 else cls(ModeKind.DYNAMIC, min(map(len, found)), found)

    @property
    def replicas(self) -> int:
        """Return the number of replicas."""
        return sum(map(len, self.groups))

    def adds_to_others(self, group: Sequence[int]) -> bool:
        """Return whether late gradients of `group`, one of `groups`, are added to the next update of other replicas.

        STAR does so with the children of a ring (section 3.1 of the released code's description). It helps where the
        other replicas contribute most of the progress: with an optimizer that divides by the size of gradients, such as
        Adam, an update from few, noisy gradients helps hardly more than none.
        """
        if self.kind is ModeKind.DYNAMIC:
            return len(group) < max(map(len, self.groups)) / 2
        return self.kind is ModeKind.X_ORDER and self.x > self.replicas / 2

    def delivering(self, arrived: Iterable[int]) -> list[int]:
        """Return the replicas among `arrived` whose gradients, if late, are added to others' now."""
        here = set(arrived)
        if self.kind is ModeKind.DYNAMIC:
            groups = [group for group in self.groups if self.adds_to_others(group) and here.issuperset(group)]
            return sorted(replica for group in groups for replica in group)
        return sorted(here) if self.adds_to_others(self.groups[0]) else []

    def ready(self, arrived: Iterable[int]) -> list[int]:
        """Return the replicas among `arrived` whose gradients make an update; none if others are awaited."""
        here = set(arrived)
        if self.kind is ModeKind.DYNAMIC:
            groups = [group for group in self.groups if here.issuperset(group)]
            if all(map(self.adds_to_others, groups)):
                return []
            return sorted(replica for group in groups for replica in group)
        return sorted(here) if len(here) >= self.x else []

    def __str__(self) -> str:
        if self.kind is ModeKind.X_ORDER:
            return f"x-order, {self.x} of {self.replicas}"
        return "dynamic, groups " + " ".join(map(str, self.groups)) if self.kind is ModeKind.DYNAMIC else "ssgd"


class Pace(NamedTuple):
    """Steady pace of training in a mode."""

    update_s: float
    """Mean time between updates."""
    gradients: float
    """Mean number of gradients in an update."""
    staleness: float
    """Mean over gradients of the progress that others made between the reading of parameters and the use of the
    gradient, in full updates.
    """

    @property
    def batch_s(self) -> float:
        """Mean time per gradient."""
        return self.update_s / self.gradients


def require_times(times_s: Sequence[float]) -> None:
    """Raise ScheduleError unless there is at least one time, and all are above 0."""
    if not times_s or min(times_s) <= 0:
        raise ScheduleError(f"times are {list(times_s)}; each replica has one, above 0")


def pace(times_s: Sequence[float], mode: Mode, max_staleness: int) -> Pace:
    """Return the pace of replicas whose gradients always take `times_s`, by simulating updates one by one.

    No replica falls behind by more than `max_staleness` updates: the others then wait for it. Raises ScheduleError for
    invalid times, or a number of times other than the replicas of `mode`.
    """
    require_times(times_s)
    require_counts(max_staleness=max_staleness)
    count = len(times_s)
    if mode.replicas != count:
        raise ScheduleError(f"{count} times for a mode of {mode.replicas} replicas")
    left_s, read, mass_read = list(times_s), [0] * count, [0.0] * count
    given: list[list[tuple[int, float]]] = [[] for _ in range(count)]  # versions that others' late gradients read
    latest: Sequence[int] = range(count)
    total_s = gradients = staleness = mass = 0.0
    groups = mode.groups if mode.kind is ModeKind.DYNAMIC else tuple((each,) for each in range(count))
    adding = {i for group in groups if mode.adds_to_others(group) for i in group}
    for version in range(SETTLING + AVERAGED):
        # Late ones that add theirs to others' begin anew then, with the present parameters.
        added_s = {i: max(left_s[j] for j in group) for group in groups for i in group if i in adding}
        added_s = {i: at_s for i, at_s in added_s.items() if read[i] < version}
        here_s = [added_s[i] + times_s[i] if i in added_s else left_s[i] for i in range(count)]
        late = [i for i in range(count) if version + 1 - min([read[i], *(v for v, _ in given[i])]) > max_staleness]
        behind = {latest[i % len(latest)] if i in added_s else i for i in late}
        awaited_s = max([*(added_s.get(i, 0.0) for i in late), *(here_s[i] for i in behind)], default=0.0)
        if mode.kind is ModeKind.DYNAMIC:
            leading = [group for group in mode.groups if not mode.adds_to_others(group)]
            first_s = min(max(here_s[i] for i in group) for group in leading)
        else:
            first_s = sorted(here_s)[mode.x - 1]
        step_s = max(first_s, awaited_s, 0.0)
        here = [i for i in range(count) if here_s[i] <= step_s]
        if mode.kind is not ModeKind.DYNAMIC and awaited_s <= first_s:
            here = sorted(here, key=lambda i: (here_s[i], i))[: mode.x]
        members = set(mode.ready(here)) | behind
        added = [i for i, at_s in added_s.items() if at_s <= step_s]
        for i in added:
            given[latest[i % len(latest)]] += [(read[i], mass_read[i]), *given[i]]
            given[i], read[i], mass_read[i] = [], version, mass
        used = [*(mass_read[i] for i in members), *(each for i in members for _, each in given[i])]
        if version >= SETTLING:
            total_s, gradients, staleness = (
                total_s + step_s,
                gradients + len(used),
                staleness + sum(mass - u for u in used),
            )
        mass += len(used) / count
        latest = sorted(members)
        for i in range(count):
            reached_s = here_s[i] if i in added else left_s[i]
            left_s[i] = times_s[i] if i in members else max(0.0, reached_s - step_s)
        for i in members:
            given[i], read[i], mass_read[i] = [], version + 1, mass
    return Pace(total_s / AVERAGED, gradients / AVERAGED, staleness / gradients)


def stragglers(times_s: Sequence[float], before: frozenset[int] = frozenset()) -> frozenset[int]:
    """Return the replicas that are slower than the fastest one by more than the fraction `STRAGGLING`.

    For replicas that were stragglers `before`, half of `STRAGGLING` suffices, so that measurement noise does not move
    them in and out.
    """
    require_times(times_s)
    fastest_s = min(times_s)
    return frozenset(
        replica
        for replica, time_s in enumerate(times_s)
        if time_s / fastest_s - 1 > (STRAGGLING / 2 if replica in before else STRAGGLING)
    )


def clusters(times_s: Sequence[float]) -> list[list[int]]:
    """Group replicas of similar speed, the fastest first.

    Each takes at most `STRAGGLING` longer than the mean of the faster ones in its group.
    """
    require_times(times_s)
    found: list[list[int]] = []
    for replica in sorted(range(len(times_s)), key=times_s.__getitem__):
        last = found[-1] if found else []
        if last and times_s[replica] <= (1 + STRAGGLING) * sum(times_s[i] for i in last) / len(last):
            last.append(replica)
        else:
            found.append([replica])
    return found


class Candidate(NamedTuple):
    """A mode with its predicted pace and progress."""

    mode: Mode
    pace: Pace
    progress_s: float
    """Seconds for the progress of one synchronous update."""


def progress_s(expected: Pace, replicas: int, noise: float) -> float:
    """Return the seconds in which a mode makes the progress of one synchronous update.

    Steps are scaled by their share of gradients (learning rate times x/N), so every mode needs equally many gradients.
    Gradients of older parameters are worth less, the more the larger the step is. If stale by a whole update, they cost
    the ratio of the largest useful step to that without noise, 1 / (1 + noise / replicas) (noise-scale model of
    McCandlish et al., arXiv 1812.06162, section 2.2). `noise`: the noise scale, in batches of one replica.
    """
    return replicas * expected.batch_s * (1 + expected.staleness / (1 + noise / replicas))


def candidates(
    times_s: Sequence[float], kinds: Iterable[ModeKind], max_staleness: int, noise: float = 0.0
) -> list[Candidate]:
    """Return modes of `kinds` with predictions, from synchronous training to the modes that differ most from it.

    For x, only values after which the next replica is much slower are tried: others only add waits. Raises
    ScheduleError for invalid times or staleness.
    """
    count, wanted = len(times_s), set(kinds)
    like = clusters(times_s)
    modes = [Mode.ssgd(count)]
    if ModeKind.X_ORDER in wanted:
        ends = [sum(map(len, like[: number + 1])) for number in range(len(like) - 1)]
        modes += [Mode.x_order(count, x) for x in sorted({*ends, 1}, reverse=True)]
    if ModeKind.DYNAMIC in wanted and len(like) > 1:
        modes.append(Mode.dynamic(like))
    paces = [pace(times_s, mode, max_staleness) for mode in modes]
    return [Candidate(mode, each, progress_s(each, count, noise)) for mode, each in zip(modes, paces, strict=True)]


def choose(times_s: Sequence[float], kinds: Iterable[ModeKind], max_staleness: int, noise: float = 0.0) -> Candidate:
    """Return the candidate that makes progress fastest. A later candidate must be faster than an earlier one by
    `LEAST_GAIN`.

    Without a straggler, returns synchronous training. Raises the errors of `candidates`.
    """
    best, *others = candidates(times_s, kinds if stragglers(times_s) else (), max_staleness, noise)
    for other in others:
        if other.progress_s < (1 - LEAST_GAIN) * best.progress_s:
            best = other
    return best
