# SPDX-License-Identifier: Apache-2.0
"""The first messages of two delegates over the connection of a verbs wire."""

from __future__ import annotations

import asyncio
import socket

from adaptra_megatron.transport._ring import Ring
from adaptra_megatron.transport.wires.verbs.verbs_messages import Hello, Raise, VerbsEndpoint, encode
from adaptra_megatron.transport.wires.verbs.verbs_wire import VerbsWire

HELLO = Hello(rails=1, slots=4, slot_nbytes=4096)


def test_a_peer_that_raises_its_rail_at_once_is_no_misfit() -> None:
    """It has this end's Hello, and this end's event loop was busy meanwhile: both messages are read together."""
    endpoint = VerbsEndpoint(gid="::1", lid=0, number=1, packet_sequence=1, mtu=3, address=0, key=0)
    raises = Raise(rail=0, attempt=1, endpoint=endpoint)

    async def main() -> tuple[Hello, list[object]]:
        here, there = socket.socketpair()
        with here, there:
            here.setblocking(False)
            there.sendall(encode(HELLO) + encode(raises))
            rings = Ring.create(4, 4096), Ring.create(4, 4096)
            wire = VerbsWire(*rings, connects=False, devices=[], timeout_s=5.0)
            wire._connection = here
            theirs, early = await wire._exchange(HELLO)
            return theirs, list(early)

    assert asyncio.run(main()) == (HELLO, [raises])
