# SPDX-License-Identifier: Apache-2.0
"""Connect a sidecar process to the ranks that report to it: reports come in, decisions go out.

Decisions are in the job's store as well: a rank that this does not reach looks there.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
from collections.abc import Callable, Collection

from adaptra_megatron.common.authentication.acceptor import MOST_UNPROVEN, Acceptor
from adaptra_megatron.common.authentication.handshake import (
    JOB_NBYTES,
    SESSION_NBYTES,
    HandshakeError,
    HandshakeRefusal,
    Purpose,
    tune_connection,
)
from adaptra_megatron.control.measurements import MOST_NBYTES
from adaptra_megatron.control.rounds import HEAD, framed

HANDSHAKE_S = 10.0
"""Longest wait for the next word of a peer that has not proven itself."""
_MOST_UNSENT_NBYTES = 1 << 20
"""To a rank that does not read: more of it is not kept for it."""


def purpose_of(place: str, rank: int, leader: int) -> Purpose:
    """Purpose of the connection of `rank`. `place`: in the job's store, where decisions are."""
    name = hashlib.sha256(f"adaptra: reports of {place}".encode()).digest()[:JOB_NBYTES]
    return Purpose(name, rank, leader, bytes(SESSION_NBYTES), 0, 1)


class ReportServer:
    """Takes reports in from ranks, which prove the job's secret, and passes decisions on to all of them that are
    connected.

    A connection that is lost is the rank's to make again; of two, decisions go by the later one.
    """

    def __init__(
        self, secret: bytes, place: str, reporters: Collection[int], reported: Callable[[int, int, bytes], object]
    ) -> None:
        """`reporters`: the ranks that are decided for, the leading one among them, which is the first.
        `reported(rank, iteration, report)` takes a report in."""
        self._place, self._reporters, self._leader = place, frozenset(reporters), min(reporters)
        self._reported = reported
        # After the leading rank's first word in the job's store, all ranks connect at once.
        self._acceptor = Acceptor(secret, HANDSHAKE_S, self._serve, max(MOST_UNPROVEN, len(reporters)))
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
        """Take reports in until the connection ends. Raises HandshakeError for one that is meant for something else."""
        rank = purpose.source
        if rank not in self._reporters or purpose != purpose_of(self._place, rank, self._leader):
            raise HandshakeError(HandshakeRefusal.MISDIRECTED, "this takes in reports of other ranks")
        tune_connection(connection)
        reader, writer = await asyncio.open_connection(sock=connection)
        self._writers[rank] = writer
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, OSError):
                while True:
                    iteration, nbytes = HEAD.unpack(await reader.readexactly(HEAD.size))
                    if nbytes > MOST_NBYTES:
                        break
                    self._reported(rank, iteration, await reader.readexactly(nbytes))
        finally:
            if self._writers.get(rank) is writer:
                del self._writers[rank]
            writer.close()
