# SPDX-License-Identifier: Apache-2.0
"""Bursts of probes that measure the path which a link's messages do not take: somebody may want to know which is better.

The probes of a burst go one after the other, each once the one before is known to have arrived: so each finds the path
idle, and tells what one message takes. A burst counts as a whole or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from adaptra_megatron.transport.paths import Path, ProbeTimes


@dataclass
class Burst:
    """Pure bookkeeping of one burst at its sender; its link's lock guards it."""

    path: Path
    nbytes: int
    count: int
    sent_s: list[float] = field(default_factory=list)
    arrived_s: list[float] = field(default_factory=list)
    _number: int = -1
    """Of the probe that left last."""

    @property
    def due(self) -> bool:
        """Whether the next probe is to leave now."""
        return len(self.sent_s) == len(self.arrived_s) < self.count

    @property
    def over(self) -> bool:
        """Whether all have arrived."""
        return len(self.arrived_s) == self.count

    def sent(self, number: int, now_s: float) -> None:
        """The next probe leaves, under this number."""
        self._number = number
        self.sent_s.append(now_s)

    def answered(self, number: int, arrived_s: float) -> bool:
        """A probe has arrived; False if it is none of this burst's, but of one that was cut short."""
        if self.waiting_since_s is None or number != self._number:
            return False
        self.arrived_s.append(arrived_s)
        return True

    @property
    def waiting_since_s(self) -> float | None:
        """When the probe left that has not arrived; None where there is none."""
        return self.sent_s[-1] if len(self.sent_s) > len(self.arrived_s) else None

    def times(self, peer: int) -> list[ProbeTimes]:
        """Of a burst that is over."""
        pairs = zip(self.sent_s, self.arrived_s, strict=True)
        return [ProbeTimes(peer, self.path, self.nbytes, sent_s, arrived_s) for sent_s, arrived_s in pairs]
