# SPDX-License-Identifier: Apache-2.0
"""Bursts of probes that measure the path which a link's messages do not take, to choose between the two.

The probes of a burst go one after the other, each once the one before is known to have arrived: so each finds the path
idle, and tells what one message takes. A burst counts as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from adaptra_megatron.transport.gpu.cuda_device import Computed
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
    """Number of the probe that left last."""

    @property
    def due(self) -> bool:
        """Return whether the next probe is to leave now."""
        return len(self.sent_s) == len(self.arrived_s) < self.count

    @property
    def over(self) -> bool:
        """Return whether all have arrived."""
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
        """Times of the probes of a burst that is over."""
        pairs = zip(self.sent_s, self.arrived_s, strict=True)
        return [ProbeTimes(peer, self.path, self.nbytes, sent_s, arrived_s) for sent_s, arrived_s in pairs]


class HostProber:
    """Probes the host path of a link, a burst at a time. Its link's lock guards it."""

    def __init__(self, peer: int, count: int, send: Callable[[Computed, int, float], None]) -> None:
        """`count`: probes in a burst. `send(message, number, now_s)`: send a probe under this number; never waits."""
        self._peer, self._count, self._send = peer, count, send
        self._burst: Burst | None = None
        self._message: Computed | None = None
        self._next = 0

    @property
    def under_way(self) -> bool:
        """Return whether a burst is."""
        return self._burst is not None

    def begin(self, message: Computed, now_s: float) -> None:
        """A burst of probes that are all this message, whose content is not read."""
        self._burst, self._message = Burst(Path.HOST, message.tensor.nbytes, self._count), message
        self._send_next(now_s)

    def answered(self, number: int, arrived_s: float, now_s: float) -> list[ProbeTimes]:
        """The peer has a probe, by its own clock; what the burst has told, if that was the last one."""
        burst = self._burst
        if burst is None or not burst.answered(number, arrived_s):
            return []
        if not burst.over:
            self._send_next(now_s)
            return []
        self.drop()
        return burst.times(self._peer)

    def drop(self) -> None:
        """What is under way tells nothing."""
        self._burst = self._message = None

    def _send_next(self, now_s: float) -> None:
        assert self._burst is not None
        assert self._message is not None
        number, self._next = self._next, self._next + 1
        self._burst.sent(number, now_s)
        self._send(self._message, number, now_s)
