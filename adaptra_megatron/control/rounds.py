# SPDX-License-Identifier: Apache-2.0
"""Reports of all ranks of a replica, put together until an iteration is over; and how they travel."""

from __future__ import annotations

import struct
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from adaptra_megatron.common.typed_messages import Decoder
from adaptra_megatron.control.measurements import StageMeasurement, measurement_of

HEAD = struct.Struct("<QI")
"""In front of a rank's report to the planner process, and of a decision that it passes on: iteration, and bytes."""

PLANNER_KEY = "planner"
"""In the job's store: the address to which ranks that follow connect."""

MOST_AWAITED = 8
"""Iterations kept open for reports that have not come: ranks of a replica are at most two apart."""


class Address(NamedTuple):
    """Address at which the planner process listens."""

    host: str
    port: int


address_of: Decoder[Address] = Decoder(Address, 1 << 10)
"""An address as it is in the store."""
Round = Sequence[StageMeasurement]
"""What all ranks measured in one iteration, by pipeline and stage."""


def framed(iteration: int, body: bytes) -> bytes:
    """A report, or a decision, as it travels."""
    return HEAD.pack(iteration, len(body)) + body


class Reported(NamedTuple):
    """Reports of an iteration that is over."""

    iteration: int
    reports: Mapping[int, bytes]
    """By rank: each a `StageMeasurement`, not looked at yet."""
    lost: Sequence[int]
    """Ranks whose reports do not come any more."""


class Gathering:
    """Reports of all ranks that are planned for together, for the planner process.

    An iteration is over once each rank has reported it, or a later one: ranks report in ascending order, so what is
    missing then was lost, with a connection or with the planner process before this. It is over as well, without the
    reports that are missing, once MOST_AWAITED later ones are awaited: a rank that never reports, because it cannot
    connect, costs plans and not memory.
    """

    def __init__(self, reporters: Collection[int]) -> None:
        self._reporters = reporters
        self._reports: dict[int, dict[int, bytes]] = defaultdict(dict)
        self._latest = dict.fromkeys(reporters, -1)
        """The latest iteration that each rank has reported."""
        self._awaited: deque[int] = deque()
        self._behind: set[int] = set()
        """Ranks whose reports of the first awaited iteration are missing."""
        self._over = -1
        """The latest iteration that has been taken."""

    @property
    def awaited(self) -> int | None:
        """The earliest iteration that is to be decided on."""
        return self._awaited[0] if self._awaited else None

    @property
    def missing(self) -> Sequence[int]:
        """Ranks that have not reported it."""
        return sorted(self._behind)

    def expect(self, iteration: int) -> None:
        """`iteration`, the next one in ascending order, is to be decided on."""
        self._awaited.append(iteration)
        if len(self._awaited) == 1:
            self._look_for_first()

    def add(self, rank: int, iteration: int, report: bytes) -> bool:
        """Keep a report of one of the reporters; twice the same is once. Returns whether an iteration may be taken."""
        if iteration > self._over:
            self._reports[iteration][rank] = report
        self._latest[rank] = max(iteration, self._latest[rank])
        if self._awaited and iteration >= self._awaited[0]:
            self._behind.discard(rank)
        return self.over

    @property
    def over(self) -> bool:
        """Return whether an iteration may be taken."""
        return bool(self._awaited) and (not self._behind or len(self._awaited) > MOST_AWAITED)

    def take(self) -> list[Reported]:
        """Take all that are awaited and over."""
        taken = []
        while self.over:
            self._over = self._awaited.popleft()
            reports = self._reports.pop(self._over, {})
            lost = [rank for rank in self._reporters if rank not in reports]
            taken.append(Reported(self._over, reports, lost))
            self._look_for_first()
        for iteration in [earlier for earlier in self._reports if earlier <= self._over]:
            del self._reports[iteration]
        return taken

    def _look_for_first(self) -> None:
        if self._awaited:
            self._behind = {rank for rank, latest in self._latest.items() if latest < self._awaited[0]}


def round_of(reported: Reported) -> Round:
    """Raises ValueError for what is no measurement."""
    return sorted(map(measurement_of, reported.reports.values()), key=lambda one: (one.pipeline, one.stage))
