# SPDX-License-Identifier: Apache-2.0
"""Decide on the mode in which updates are made, from what replicas measure: the same on all that are given the same."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean, median
from typing import NamedTuple

from adaptra_megatron.gradsync.sync_modes.modes import (
    AVERAGED,
    SETTLING,
    Candidate,
    Mode,
    ModeKind,
    Pace,
    choose,
    stragglers,
)
from adaptra_megatron.gradsync.sync_modes.updates import CatchUp, Update, Updates

# Replicas that compute, hand gradients in and go on, event by event: what a mode does before it is run.

ComputeS = Callable[[int, int], float]
"""Seconds that a replica takes for its n-th gradient (from 0)."""


class Made(NamedTuple):
    """An update, or a late gradient that is given to another replica, and when that was."""

    at_s: float
    event: Update | CatchUp


def updates_of(replicas: int, mode: Mode, max_staleness: int, compute_s: ComputeS) -> Iterator[Made]:
    """All from time 0 on, without end. What is sent takes no time. Raises ScheduleError for counts below 1."""
    state = Updates(replicas, max_staleness)
    state.mode = mode
    numbers = [0] * replicas
    computing = [(compute_s(each, 0), each) for each in range(replicas)]
    heapq.heapify(computing)

    def restarted(at_s: float, several: Iterable[int]) -> None:
        for each in several:
            numbers[each] += 1
            heapq.heappush(computing, (at_s + compute_s(each, numbers[each]), each))

    while True:
        at_s, replica = heapq.heappop(computing)
        for event in state.arrives(replica):
            assert isinstance(event, CatchUp), "there are no meetings"
            yield Made(at_s, event)
            restarted(at_s, [event.replica])
        while (update := state.next_update()) is not None:
            yield Made(at_s, update)
            state.begins(update.begins)
            restarted(at_s, update.members)


def simulated_pace(mode: Mode, max_staleness: int, compute_s: ComputeS) -> Pace:
    """The mean over the same updates as `modes.pace`, which foretells it: over others it would be another."""
    count, last = mode.replicas, SETTLING + AVERAGED - 1
    mass, mass_read, given = 0.0, [0.0] * count, dict[int, list[float]]()
    begun_s = ended_s = gradients = staleness = 0.0
    number = 0
    for at_s, event in updates_of(count, mode, max_staleness, compute_s):
        if isinstance(event, CatchUp):
            ((parent, replica),) = event.handovers
            given.setdefault(parent, []).extend([mass_read[replica], *given.pop(replica, ())])
            mass_read[replica] = mass
            continue
        read = [mass_read[each] for each in event.members]
        read += [each for member in event.members for each in given.pop(member, ())]
        if number >= SETTLING:
            gradients += event.gradients
            staleness += sum(mass - each for each in read)
        elif number == SETTLING - 1:
            begun_s = at_s
        mass += event.gradients / count
        for each in event.members:
            mass_read[each] = mass
        ended_s = at_s
        if number == last:
            break
        number += 1
    return Pace((ended_s - begun_s) / AVERAGED, gradients / AVERAGED, staleness / gradients)


KEPT, LEAST = 5, 3
"""Times of a replica whose median is the prediction of its next one, and as many as there must be. Held against means
and autoregression on recorded jobs by benchmarks/sync_predictors.py."""
_SQUARES = 50
_UNKNOWN = math.inf


class Gradient(NamedTuple):
    """Description of a gradient that a replica hands in."""

    compute_s: float
    """Time that it took."""
    square: float
    """Squared norm of it, the mean over a replica's batch; of one stage's parameters."""
    update_square: float | None
    """The squared norm of the mean over all replicas in the update before; None where they were not all together."""


def predicted_s(times_s: Sequence[float]) -> float:
    """A replica's next time, from its last ones."""
    return median(times_s)


class ModeDecider:
    """Decides anew when the predicted stragglers change."""

    def __init__(self, replicas: int, kinds: Iterable[ModeKind], max_staleness: int) -> None:
        """`kinds`: those to choose from, besides synchronous training."""
        self._kinds, self._max_staleness = tuple(kinds), max_staleness
        self._times_s: list[deque[float]] = [deque(maxlen=KEPT) for _ in range(replicas)]
        self._warm = [False] * replicas
        self._squares = [0.0] * replicas
        self._small: float | None = None
        self._pairs: deque[tuple[float, float]] = deque(maxlen=_SQUARES)
        self._stragglers: frozenset[int] = frozenset()

    @property
    def noise(self) -> float:
        """The gradient noise scale in batches of one replica (arXiv 1812.06162, appendix A.1), by the norms of one
        replica's gradient and of the mean of all; infinite before there are any, and where they say nothing."""
        if not self._pairs:
            return _UNKNOWN
        replicas = len(self._times_s)
        small, big = (fmean(pair[which] for pair in self._pairs) for which in (0, 1))
        signal = (replicas * big - small) / (replicas - 1)
        variance = max(0.0, (small - big) / (1 - 1 / replicas))
        return variance / signal if signal > 0 else _UNKNOWN

    @property
    def times_s(self) -> list[float] | None:
        """Predicted times of all replicas; None while one of them has too few."""
        if min(map(len, self._times_s)) < LEAST:
            return None
        return [predicted_s(each) for each in self._times_s]

    def arrived(self, replica: int, gradient: Gradient) -> None:
        """`replica` hands one in. Its first is left out: it takes as long as compilers and allocators do."""
        if self._warm[replica]:
            self._times_s[replica].append(max(gradient.compute_s, 1e-9))
        self._warm[replica] = True
        self._squares[replica] = gradient.square
        if gradient.update_square is not None and self._small is not None:
            self._pairs.append((self._small, gradient.update_square))
            self._small = None

    def decide(self, update: Update) -> Candidate | None:
        """Return what to go on with after `update`; None where that stays as it is."""
        self._small = fmean(self._squares) if update.together else None
        times_s = self.times_s
        if times_s is None or (found := stragglers(times_s, self._stragglers)) == self._stragglers:
            return None
        self._stragglers = found
        return choose(times_s, self._kinds if found else (), self._max_staleness, self.noise)
