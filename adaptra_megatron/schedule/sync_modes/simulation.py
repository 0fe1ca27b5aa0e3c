# SPDX-License-Identifier: Apache-2.0
"""Replicas that compute, hand gradients in and go on, event by event: what a mode does before it is run."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import NamedTuple

from adaptra_megatron.schedule.errors import require_counts
from adaptra_megatron.schedule.sync_modes.modes import Mode, Pace
from adaptra_megatron.schedule.sync_modes.updates import Update, Updates

ComputeS = Callable[[int, int], float]
"""Seconds that a replica takes for its n-th gradient (from 0)."""


class Made(NamedTuple):
    """An update, and when it was made."""

    at_s: float
    update: Update


def updates_of(replicas: int, mode: Mode, max_staleness: int, compute_s: ComputeS) -> Iterator[Made]:
    """All updates from time 0 on, without end. What is sent takes no time. Raises ScheduleError for counts below 1."""
    state = Updates(replicas, max_staleness)
    state.mode = mode
    numbers = [0] * replicas
    computing = [(compute_s(each, 0), each) for each in range(replicas)]
    heapq.heapify(computing)
    while True:
        at_s, replica = heapq.heappop(computing)
        state.arrives(replica)
        while (update := state.next_update()) is not None:
            yield Made(at_s, update)
            state.begins(update.members[0])
            for member in update.members:
                numbers[member] += 1
                heapq.heappush(computing, (at_s + compute_s(member, numbers[member]), member))


def simulated_pace(mode: Mode, max_staleness: int, compute_s: ComputeS, updates: int = 2000) -> Pace:
    """The mean over the second half of so many updates; see `modes.pace`, which foretells it."""
    require_counts(updates=updates)
    count, half = mode.replicas, updates // 2
    mass, mass_read = 0.0, [0.0] * count
    begun_s = ended_s = gradients = staleness = 0.0
    for number, (at_s, update) in enumerate(updates_of(count, mode, max_staleness, compute_s)):
        if number > half:
            gradients += len(update.members)
            staleness += sum(mass - mass_read[each] for each in update.members)
        elif number == half:
            begun_s = at_s
        mass += len(update.members) / count
        for each in update.members:
            mass_read[each] = mass
        ended_s = at_s
        if number == updates:
            break
    made = updates - half
    return Pace((ended_s - begun_s) / made, gradients / made, staleness / gradients)
