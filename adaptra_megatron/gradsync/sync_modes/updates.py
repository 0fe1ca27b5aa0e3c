# SPDX-License-Identifier: Apache-2.0
"""Assign gradients to updates: that follows from the order in which replicas arrive, everywhere alike.

A replica *arrives* with a gradient and waits for the update that uses it; or, where it is late and the mode says so, it
gives the gradient to a replica that adds it to its own, its parent, has the present parameters from it and goes on, so
that no update waits for it. Replicas *meet* where the training does what all do together (a checkpoint, an evaluation,
its end): no update is made until all are there, with the same parameters. Where that is need not be known before: no
update is made of parameters before a replica has *begun* to compute with them, and so was not to meet the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from adaptra_megatron.gradsync.sync_modes.modes import Mode
from adaptra_megatron.schedule.ir import ScheduleError, require_counts


class Handover(NamedTuple):
    """Parameters and optimizer state that one replica has of another."""

    source: int
    target: int


class Update(NamedTuple):
    """Gradients that are added up, and the step that they make."""

    version: int
    """Updates before it: that of the parameters to which it is applied."""
    members: tuple[int, ...]
    """Replicas, ascending."""
    stale: tuple[int, ...]
    """Members whose gradients are of older parameters."""
    handovers: tuple[Handover, ...]
    """To members that do not have the parameters of `version`; before anything else of it."""
    whole: bool
    """True where all replicas are members."""
    gradients: int
    """In it: the members', and those that others have given to them."""

    @property
    def together(self) -> bool:
        """Return whether it is one of synchronous training."""
        return self.whole and not self.stale and self.gradients == len(self.members)

    @property
    def begins(self) -> int:
        """The member that says when it has begun anew: one that was not late, if there is one."""
        return next((each for each in self.members if each not in self.stale), self.members[0])


class CatchUp(NamedTuple):
    """A late replica gives its gradient, with those that it was given, to its parent, and has parameters and state."""

    version: int
    replica: int
    handovers: tuple[Handover, ...]
    """One: the source is the parent."""


class Met(NamedTuple):
    """All replicas are there, with the parameters of `version`."""

    version: int


Event = Update | CatchUp | Met


class Updates:
    """Updates that follow from arrivals and meetings so far."""

    def __init__(self, replicas: int, max_staleness: int) -> None:
        """`max_staleness`: most updates between the reading of parameters and the one that uses their gradient.

        Raises ScheduleError unless both are above 0.
        """
        require_counts(replicas=replicas, max_staleness=max_staleness)
        self.mode = Mode.ssgd(replicas)
        """Mode of the updates to come; may be changed between two calls."""
        self.version = 0
        self.max_staleness = max_staleness
        self.read = [0] * replicas
        """Versions of the parameters with which each computes, or has computed what it has handed in."""
        self._has = [0] * replicas
        self._latest = tuple(range(replicas))
        """Members of the last update."""
        self._given: dict[int, list[int]] = {}
        """Versions of the parameters of gradients that replicas were given, until these are members of an update."""
        self._arrived: dict[int, None] = {}
        self._here: set[int] = set()
        self._begun = True

    @property
    def missing(self) -> list[int]:
        """Replicas that are neither waiting for an update nor at the meeting."""
        return [each for each in range(len(self.read)) if each not in self._arrived and each not in self._here]

    @property
    def absent(self) -> list[int]:
        """Replicas for which a meeting waits; none where there is no meeting."""
        return [each for each in range(len(self.read)) if each not in self._here] if self._here else []

    def begins(self, replica: int) -> None:
        """`replica` computes with the parameters of its last update. Needed of one member of each that is not whole."""
        self._begun = self._begun or self.read[replica] == self.version

    def arrives(self, replica: int) -> list[Event]:
        """A gradient of `replica` is ready. Raises ScheduleError where its last one waits still."""
        if replica in self._arrived or replica in self._here:
            raise ScheduleError(f"replica {replica} hands in a gradient, and waits already")
        self._arrived[replica] = None
        self.begins(replica)
        return self._catch_up([replica] if self._here else self.mode.delivering(self._arrived))

    def meets(self, replica: int) -> list[Event]:
        """`replica` has come to where all meet. Raises ScheduleError where it is there, or has other parameters."""
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
        """The update that can be made now, which then has been; None where more must arrive first."""
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
        """To those of them that lack the present version, from those that have it in turn."""
        late = [each for each in replicas if self._has[each] < self.version]
        return tuple(Handover(self._latest[place % len(self._latest)], each) for place, each in enumerate(late))
