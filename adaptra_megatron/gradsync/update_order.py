# SPDX-License-Identifier: Apache-2.0
"""Assign gradients to updates, by the order in which replicas arrive: every replica computes the same assignment.

A replica *arrives* with a gradient and waits for the update that uses it. A late replica, if the mode allows it, hands
its gradient to another replica, its parent, which adds it to its own. The late replica then gets the present parameters
from the parent and continues, so that no update waits for it. Replicas *meet* where all act together (a checkpoint, an
evaluation, the end): no further update is made until all are there, with the same parameters. Meetings are not
announced. So no update is made from parameters before a replica has *begun* to compute with them, which shows that it
does not meet the others first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from adaptra_megatron.gradsync.sync_modes import Mode
from adaptra_megatron.schedule.ir import ScheduleError, require_counts


class Handover(NamedTuple):
    """Transfer of parameters and optimizer state from one replica to another."""

    source: int
    target: int


class Update(NamedTuple):
    """The gradients of one optimizer step."""

    version: int
    """Number of earlier updates: the version of the parameters that it is applied to."""
    members: tuple[int, ...]
    """Replicas with a gradient in it, in ascending order."""
    stale: tuple[int, ...]
    """Members whose gradients are of older parameters."""
    handovers: tuple[Handover, ...]
    """Transfers to members that lack the parameters of `version`; they come before the rest of the update."""
    whole: bool
    """True if all replicas are members."""
    gradients: int
    """Number of gradients: the members', and those that others gave to them."""

    @property
    def together(self) -> bool:
        """Return whether this update equals an update of synchronous training."""
        return self.whole and not self.stale and self.gradients == len(self.members)

    @property
    def begins(self) -> int:
        """The member that reports when it has begun again: one that was not late, if there is one."""
        return next((each for each in self.members if each not in self.stale), self.members[0])


class CatchUp(NamedTuple):
    """A late replica gives its gradients to its parent, and gets parameters and optimizer state in return."""

    version: int
    replica: int
    handovers: tuple[Handover, ...]
    """One transfer, from the parent."""


class Met(NamedTuple):
    """All replicas meet, with the parameters of `version`."""

    version: int


Event = Update | CatchUp | Met


class Updates:
    """Updates that follow from the arrivals and meetings so far."""

    def __init__(self, replicas: int, max_staleness: int) -> None:
        """`max_staleness`: maximum number of updates between reading parameters and using their gradient.

        Raises ScheduleError unless both are above 0.
        """
        require_counts(replicas=replicas, max_staleness=max_staleness)
        self.mode = Mode.ssgd(replicas)
        """Mode of later updates; may be changed between two calls."""
        self.version = 0
        self.max_staleness = max_staleness
        self.read = [0] * replicas
        """Version of the parameters of each replica's present gradient."""
        self._has = [0] * replicas
        self._latest = tuple(range(replicas))
        """Members of the last update."""
        self._given: dict[int, list[int]] = {}
        """Versions of the parameters of gradients given to each replica, until its next update."""
        self._arrived: dict[int, None] = {}
        self._here: set[int] = set()
        self._begun = True

    @property
    def missing(self) -> list[int]:
        """Replicas that have neither arrived with a gradient nor reached the meeting."""
        return [each for each in range(len(self.read)) if each not in self._arrived and each not in self._here]

    @property
    def absent(self) -> list[int]:
        """Replicas that have not reached the present meeting; none if there is no meeting."""
        return [each for each in range(len(self.read)) if each not in self._here] if self._here else []

    def begins(self, replica: int) -> None:
        """Record that `replica` computes with the parameters of its last update.

        One member of each update without all replicas must report this.
        """
        self._begun = self._begun or self.read[replica] == self.version

    def arrives(self, replica: int) -> list[Event]:
        """Record that a gradient of `replica` is ready. Raises ScheduleError if its previous one still waits."""
        if replica in self._arrived or replica in self._here:
            raise ScheduleError(f"replica {replica} hands in a gradient, and waits already")
        self._arrived[replica] = None
        self.begins(replica)
        return self._catch_up([replica] if self._here else self.mode.delivering(self._arrived))

    def meets(self, replica: int) -> list[Event]:
        """Record that `replica` is at a meeting. Raises ScheduleError if it already is, or has other parameters."""
        if replica in self._here or self._has[replica] != self.version:
            raise ScheduleError(
                f"replica {replica} comes to a meeting at version {self.version} with version {self._has[replica]}: "
                "evaluate, save and end in the same iterations everywhere"
            )
        first = not self._here
        self._here.add(replica)
        events = self._catch_up(list(self._arrived)) if first else []
        if len(self._here) == len(self.read):
            self._here.clear()
            events.append(Met(self.version))
        return events

    def next_update(self) -> Update | None:
        """Make and return the next update; None if more replicas must arrive first."""
        if self._here or not self._begun:
            return None
        left_behind = [
            each
            for each, read in enumerate(self.read)
            if self.version + 1 - min([read, *self._given.get(each, ())]) > self.max_staleness
        ]
        ready = self.mode.ready(self._arrived)
        if not ready or any(each not in self._arrived for each in left_behind):
            return None
        members = tuple(sorted({*ready, *left_behind}))
        update = Update(
            self.version,
            members,
            tuple(each for each in members if self.read[each] < self.version),
            self._handovers(members),
            len(members) == len(self.read),
            len(members) + sum(len(self._given.pop(each, ())) for each in members),
        )
        self.version += 1
        self._latest = members
        self._begun = False
        for each in members:
            del self._arrived[each]
            self._has[each] = self.read[each] = self.version
        return update

    def _catch_up(self, replicas: Sequence[int]) -> list[Event]:
        events: list[Event] = []
        for each in replicas:
            if self._has[each] == self.version:
                continue
            # The members of the last update have its parameters; others may have got them and be slow.
            parent = self._latest[each % len(self._latest)]
            events.append(CatchUp(self.version, each, (Handover(parent, each),)))
            self._given.setdefault(parent, []).extend([self.read[each], *self._given.pop(each, ())])
            self._has[each] = self.read[each] = self.version
            del self._arrived[each]
        return events

    def _handovers(self, replicas: Sequence[int]) -> tuple[Handover, ...]:
        """Return transfers to those of `replicas` that lack the present version, from up-to-date replicas in turn."""
        late = [each for each in replicas if self._has[each] < self.version]
        return tuple(Handover(self._latest[place % len(self._latest)], each) for place, each in enumerate(late))
