# SPDX-License-Identifier: Apache-2.0
"""Define `Wire`: one session of one link in the delegate, which carries frames between two rings.

A wire keeps these rules. Exactly-once delivery, handshakes and reconnecting are the link's responsibility:

1. A frame is delivered whole or not at all, and unchanged. Frames may be reordered or duplicated.
2. Any failure (connection, peer, RNIC, a corrupted ring, a frame that is stalled for `stall_s`) ends the session by one
   call of `ended(cause)`, in the event loop. No failure is raised elsewhere, and none is silent.
3. After `ended` or `stop`, no frame of this session reaches the ring of a later one.
4. `begin` may raise OSError or RuntimeError; the caller then calls `stop`. `stop` returns when nothing of the session
   runs any more.
5. Nothing blocks the event loop, as one delegate carries all links of its rank.

New wires are rows of wire_registry.WIRES. A session is cheap to replace, so a wire repairs nothing itself.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from adaptra_megatron.transport._ring import Ring


class Traffic(NamedTuple):
    """Payload bytes moved so far."""

    sent_nbytes: int
    received_nbytes: int


class Wire(Protocol):
    """One session of one link. The module's docstring has the rules."""

    @property
    def inbound(self) -> Ring | None:
        """Ring that the training process reads, if the wire got it from the peer; None if the training process created
        the ring itself.
        """

    async def begin(self, connections: Sequence[socket.socket], ended: Callable[[str], None]) -> None:
        """Take over authenticated connections, in the order of their lanes, and start. `ended` is called in the event
        loop.

        Raises OSError or RuntimeError (above all RingError) if they cannot be used; the caller then calls `stop`.
        """

    async def stop(self) -> None:
        """End at once and close the connections; return when nothing of the session runs any more."""

    async def drain(self, timeout_s: float) -> None:
        """Let the outbound ring, which is closed, run empty for at most `timeout_s`."""

    def traffic(self) -> Traffic:
        """Return payload bytes moved so far."""
