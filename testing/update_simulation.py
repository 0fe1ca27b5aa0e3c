# SPDX-License-Identifier: Apache-2.0
"""Simulate replicas that compute gradients and report them, event by event: the reference for predicted paces."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from adaptra_megatron.gradsync.sync_modes import AVERAGED, SETTLING, Mode, Pace
from adaptra_megatron.gradsync.update_order import CatchUp, Update, Updates

ComputeS = Callable[[int, int], float]
"""Seconds that a replica takes for its n-th gradient (from 0)."""


class Made(NamedTuple):
    """An update, or the gift of a late gradient to another replica, with its time."""

    at_s: float
    event: Update | CatchUp


def updates_of(replicas: int, mode: Mode, max_staleness: int, compute_s: ComputeS) -> Iterator[Made]:
    """Iterate over all updates from time 0 on, without end. Transfers take no time. Raises ScheduleError for counts
    below 1.
    """
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
    """Return the mean pace over the same updates as `modes.pace`, which predicts it."""
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
