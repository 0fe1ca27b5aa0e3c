# SPDX-License-Identifier: Apache-2.0
"""Wire within a host: the two training processes share their outbound rings, and the delegates only exchange them.

After the exchange the connection carries nothing. Its end means that the peer's delegate, or its training process, has
ended.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence

from adaptra_megatron.common.handshake import receive_descriptor, send_descriptor, wait_readable
from adaptra_megatron.transport._ring import Ring
from adaptra_megatron.transport.wires.wire import Traffic


class ShmWire:
    """Wire over a ring that both training processes map."""

    def __init__(self, outbound: Ring, timeout_s: float) -> None:
        """`timeout_s`: longest wait for the peer's ring."""
        self.inbound: Ring | None = None
        self._outbound = outbound
        self._timeout_s = timeout_s
        self._connection: socket.socket | None = None
        self._watch: asyncio.Task[None] | None = None

    async def begin(self, connections: Sequence[socket.socket], ended: Callable[[str], None]) -> None:
        (self._connection,) = connections
        # Before the peer's is awaited: both ends do the same.
        send_descriptor(self._connection, self._outbound.fd)
        try:
            descriptor = await asyncio.wait_for(receive_descriptor(self._connection), self._timeout_s)
        except asyncio.TimeoutError:
            raise OSError(f"the peer's ring did not come within {self._timeout_s:g} s") from None
        try:
            self.inbound = Ring.attach(descriptor)
        finally:
            os.close(descriptor)
        self._watch = asyncio.ensure_future(self._wait_for_end(self._connection, ended))

    async def stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        if self._connection is not None:
            self._connection.close()
        for ring in (self._outbound, self.inbound):
            if ring is not None:
                ring.close()

    async def drain(self, timeout_s: float) -> None:
        """Return at once: the peer's training process reads the rest without the delegates."""

    def traffic(self) -> Traffic:
        return Traffic(0, 0)  # the delegates do not see what goes through the shared rings

    async def _wait_for_end(self, connection: socket.socket, ended: Callable[[str], None]) -> None:
        await wait_readable(connection)  # nothing is sent any more: only its end makes it readable
        ended("the peer's delegate went away")
