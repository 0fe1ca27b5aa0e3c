# SPDX-License-Identifier: Apache-2.0
"""The planner process's connections to the ranks that follow: their reports come in, decisions go out.

Decisions are in the job's store as well: a rank that this does not reach looks there.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
from collections.abc import Callable

from adaptra_megatron.authentication.acceptor import Acceptor
from adaptra_megatron.authentication.handshake import (
    JOB_NBYTES,
    SESSION_NBYTES,
    HandshakeError,
    Purpose,
    Refusal,
)
from adaptra_megatron.authentication.socket_io import tune_connection
from adaptra_megatron.control.measurements import MOST_NBYTES
from adaptra_megatron.control.rounds import HEAD, framed

HANDSHAKE_S = 10.0
_MOST_UNSENT_NBYTES = 1 << 20
"""To a rank that does not read: more of it is not kept for it."""


def purpose_of(place: str, rank: int, leader: int) -> Purpose:
    """What `rank` connects for. `place`: in the job's store, where decisions are."""
    name = hashlib.sha256(f"adaptra: reports of {place}".encode()).digest()[:JOB_NBYTES]
    return Purpose(name, rank, leader, bytes(SESSION_NBYTES), 0, 1)


class ReportServer:
    """Takes reports in from every rank that knows the job's secret, and passes decisions on to all that are there."""

    def __init__(self, secret: bytes, place: str, leader: int, reported: Callable[[int, int, bytes], object]) -> None:
        """`reported(rank, iteration, report)` may raise ValueError, which ends the connection."""
        self._place, self._leader, self._reported = place, leader, reported
        self._acceptor = Acceptor(secret, HANDSHAKE_S, self._serve)
        self._writers: dict[int, asyncio.StreamWriter] = {}

    def listen(self, listener: socket.socket) -> None:
        """Accept on a listening socket from now on."""
        self._acceptor.listen(listener)

    def pass_on(self, iteration: int, decision: bytes) -> None:
        """Send a decision to all ranks that are connected; never waits."""
        frame = framed(iteration, decision)
        for writer in self._writers.values():
            if writer.transport.get_write_buffer_size() < _MOST_UNSENT_NBYTES:
                writer.write(frame)

    async def _serve(self, purpose: Purpose, connection: socket.socket) -> None:
        """Until the connection ends. Raises HandshakeError for one that is meant for something else."""
        rank = purpose.source
        if purpose != purpose_of(self._place, rank, self._leader):
            raise HandshakeError(Refusal.MISDIRECTED, "this takes in reports of another replica")
        tune_connection(connection)
        reader, writer = await asyncio.open_connection(sock=connection)
        self._writers[rank] = writer
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, OSError, ValueError):
                while True:
                    iteration, nbytes = HEAD.unpack(await reader.readexactly(HEAD.size))
                    if nbytes > MOST_NBYTES:
                        break
                    self._reported(rank, iteration, await reader.readexactly(nbytes))
        finally:
            if self._writers.get(rank) is writer:
                del self._writers[rank]
            writer.close()
