# SPDX-License-Identifier: Apache-2.0
"""Name the two ranks at the ends of a link, for messages and logs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class LinkEnds:
    """The two ends of a link, seen from one of them: global ranks."""

    rank: int
    """Rank of this end."""
    peer: int
    name: Callable[[int], str] = "rank {}".format
    """Name of a rank in messages, as `JobLayout.name`."""

    @property
    def here(self) -> str:
        """Name of this end."""
        return self.name(self.rank)

    @property
    def there(self) -> str:
        """Name of the peer."""
        return self.name(self.peer)

    def direction(self, *, receiving: bool) -> str:
        """Return one direction of the link, "source->target"."""
        source, target = (self.peer, self.rank) if receiving else (self.rank, self.peer)
        return f"{source}->{target}"

    def __str__(self) -> str:
        return f"{self.rank}<->{self.peer}"
