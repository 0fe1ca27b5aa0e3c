# SPDX-License-Identifier: Apache-2.0
"""How the two ends of a link agree on which opening of it they are at, whichever of them opens it first or more often.

Each end says in the job's store what it is at; the greater number of two that are open counts. An end never comes back
to a number, so connections and device sessions of one opening get into no other.
"""

from __future__ import annotations

from typing import NamedTuple


class Opening(NamedTuple):
    """What one end of a link says of itself."""

    number: int = 0
    """How often the link has been opened, at the end that has done so most often as far as this one knows."""
    open: bool = False


class LinkOpenings:
    """Openings of one link at one of its ends. Pure bookkeeping, not safe for threads."""

    def __init__(self, number: int = 0) -> None:
        """`number`: openings before; one, which is open, for a link that is made at the start."""
        self.mine = Opening(number, open=number > 0)

    def begin(self) -> None:
        """This end opens the link."""
        self.mine = Opening(self.mine.number + 1, open=True)

    def end(self) -> None:
        """This end has closed it."""
        self.mine = self.mine._replace(open=False)

    def agreed(self, theirs: Opening) -> bool:
        """Return whether both ends are at one opening, by what the peer says; follows a peer that is ahead."""
        if not (self.mine.open and theirs.open):
            return False
        if theirs.number > self.mine.number:
            self.mine = theirs
        return theirs.number == self.mine.number
