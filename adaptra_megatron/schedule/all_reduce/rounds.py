# SPDX-License-Identifier: Apache-2.0
"""An all-reduce as rounds of transfers between ranks, each of which sends and receives once a round at most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Transfer(NamedTuple):
    """One chunk on its way. What is sent is what the sender has at the beginning of the round."""

    sender: int
    receiver: int
    chunk: int
    adds: bool = False
    """True where the receiver adds it to what it has of the chunk, instead of putting it in its place."""


Round = tuple[Transfer, ...]


class Step(NamedTuple):
    """One rank's part in a round; either half may be missing."""

    sends: Transfer | None
    receives: Transfer | None


@dataclass(frozen=True)
class Phase:
    """Rounds over a buffer that is cut into `chunks` parts as equal as can be."""

    chunks: int
    rounds: tuple[Round, ...]

    def steps(self, rank: int) -> tuple[Step, ...]:
        """Rounds of one rank, without those that it has no part in."""
        found = []
        for transfers in self.rounds:
            sends = next((each for each in transfers if each.sender == rank), None)
            receives = next((each for each in transfers if each.receiver == rank), None)
            if sends or receives:
                found.append(Step(sends, receives))
        return tuple(found)

    def bounds(self, chunk: int, elements: int) -> tuple[int, int]:
        """First element of a chunk, and the one behind its last, of `elements`; they are equal for an empty chunk."""
        return chunk * elements // self.chunks, (chunk + 1) * elements // self.chunks


NOTHING = Phase(1, ())


@dataclass(frozen=True)
class AllReduce:
    """A whole all-reduce of `ranks` ranks, of which the last, `ranks` - 1, is the straggler.

    Afterwards each rank has the sum over all, and all have added it up in the same way: replicas are equal to the bit.
    """

    ranks: int
    waiting: Phase
    """Without the straggler, while the others wait for it. Without rounds, if there is nothing to do."""
    together: Phase
    """With all, once the straggler is there."""
