# SPDX-License-Identifier: Apache-2.0
"""Define a transport as the delegate sees it: something that carries a link's frames once its connections are
proven."""

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
    """One session of one link. Failure contract: whatever breaks ends in one call of `ended` with the cause."""

    @property
    def inbound(self) -> Ring | None:
        """The ring that the training process must read, where the wire did not get it from there."""

    async def begin(self, connections: Sequence[socket.socket], ended: Callable[[str], None]) -> None:
        """Take over proven connections, in the order of their lanes, and start. `ended` is called in the event loop.

        Raises OSError, RuntimeError (RingError above all): they cannot be used; the caller then calls `stop`.
        """

    async def stop(self) -> None:
        """End at once, close the connections and return when nothing of the session runs any more."""

    async def drain(self, timeout_s: float) -> None:
        """Let what is in the outbound ring (closed by now) leave, for at most `timeout_s`."""

    def traffic(self) -> Traffic:
        """Return what went through."""
