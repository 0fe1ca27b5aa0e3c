# SPDX-License-Identifier: Apache-2.0
"""Keeps clocks of different hosts related while a job runs, in a thread of its own per rank.

The first stage of each pipeline answers with its clock; the ranks of its pipeline on other hosts ask it every few
seconds, over a TCP connection that begins with the job's handshake. Without an answer, the latest relation is kept
and its drift trusted, the log says so once, and the rank tries again: no training waits for any of this.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Callable

from adaptra_megatron.authentication.acceptor import Acceptor
from adaptra_megatron.authentication.handshake import (
    SESSION_NBYTES,
    HandshakeError,
    Purpose,
    Refusal,
    connect,
)
from adaptra_megatron.authentication.socket_io import ConnectionEndedError, receive_exactly, tune_connection
from adaptra_megatron.backoff import Backoff
from adaptra_megatron.control.clocks.clock_fit import ClockFit, ClockLine, Stamps, round_of
from adaptra_megatron.log import logger_of

logger = logger_of(__name__)

INTERVAL_S = 10.0
EXCHANGES = 8
"""In a row: the fastest ones count."""
_ANSWER_S = 2.0
"""Longest wait for an answer, a connection or a handshake."""
_REST_S = (1.0, 60.0)
"""After a failure, twice as long each time."""
_ASKED = b"clock?\0\0"
_ANSWER = struct.Struct("<dd")
_PURPOSE = Purpose(b"adaptra: a clock", 0, 0, bytes(SESSION_NBYTES), 0, 1)
"""No pipeline's name, which is random: who wants a link is at the wrong door here, and the other way round."""

Clock = Callable[[], float]
Address = tuple[str, int]


class ClockServer:
    """Answers every peer that knows the job's secret with this rank's clock."""

    def __init__(self, listener: socket.socket, secret: bytes, clock: Clock = time.monotonic) -> None:
        """`listener`: listens already; belongs to the server from now on."""
        self._listener, self._secret, self._clock = listener, secret, clock
        self._loop = asyncio.new_event_loop()
        self._work = self._loop.create_task(self._serve())
        self._thread = threading.Thread(target=self._run, name="adaptra-clock", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and all connections. Safe to call twice."""
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._work.cancel)
        self._thread.join(_ANSWER_S)
        self._listener.close()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._work)
        except asyncio.CancelledError:
            pass
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        acceptor = Acceptor(self._secret, _ANSWER_S, self._answer)
        acceptor.listen(self._listener)
        try:
            await asyncio.get_running_loop().create_future()  # until this task is cancelled
        finally:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    async def _answer(self, purpose: Purpose, connection: socket.socket) -> None:
        """Until the connection ends. Raises HandshakeError for one that is meant for something else."""
        if purpose != _PURPOSE:
            raise HandshakeError(Refusal.MISDIRECTED, "this is a clock")
        loop = asyncio.get_running_loop()
        with connection, contextlib.suppress(OSError):
            tune_connection(connection)
            while await receive_exactly(connection, len(_ASKED)) == _ASKED:
                received_s = self._clock()
                await loop.sock_sendall(connection, _ANSWER.pack(received_s, self._clock()))


class ClockFollower:
    """Keeps this rank's clock related to that of a ClockServer."""

    def __init__(
        self,
        address: Address,
        secret: bytes,
        beginning: ClockLine,
        *,
        name: str = "",
        clock: Clock = time.monotonic,
        interval_s: float = INTERVAL_S,
    ) -> None:
        """`beginning`: the relation until the first answers. `name`: of this rank, for the log."""
        self._address, self._secret = address, secret
        self._name, self._clock, self._interval_s = name, clock, interval_s
        self._fit = ClockFit()
        self.line = beginning
        """The latest relation; replaced as a whole, so any thread may read it."""
        self.rounds = 0
        self._said_lost = False
        self._closing = threading.Event()
        self._connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._follow, name="adaptra-clock", daemon=True)
        self._thread.start()

    @property
    def connected(self) -> bool:
        """Return whether a connection was accepted so far, proven or not."""
        return self._connection is not None

    def close(self) -> None:
        """End the thread and the connection. Safe to call twice."""
        self._closing.set()
        if (connection := self._connection) is not None:
            with contextlib.suppress(OSError):  # it has ended by itself
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(2 * _ANSWER_S)

    def _follow(self) -> None:
        backoff = Backoff(*_REST_S)
        while not self._closing.is_set():
            before = self.rounds
            try:
                self._ask_until_lost()
            except (OSError, HandshakeError) as cause:
                # Not while closing, nor at the first failure: at the end of a job, the first stage may go first.
                if self.rounds == before and not self._closing.is_set():
                    self._say_lost(cause)
            if self.rounds > before:
                backoff.reset()
            self._closing.wait(backoff.next_s())

    def _ask_until_lost(self) -> None:
        with socket.create_connection(self._address, _ANSWER_S) as connection:
            self._connection = connection
            tune_connection(connection)
            connection.setblocking(False)
            asyncio.run(connect(connection, self._secret, _PURPOSE, _ANSWER_S))
            connection.settimeout(_ANSWER_S)
            while not self._closing.is_set():
                stamps = [self._ask(connection) for _ in range(EXCHANGES)]
                self.line = self._fit.add(round_of(stamps))
                self.rounds += 1
                # Not all ranks of a pipeline at the same moments.
                self._closing.wait(self._interval_s * random.uniform(0.9, 1.1))

    def _ask(self, connection: socket.socket) -> Stamps:
        sent_s = self._clock()
        connection.sendall(_ASKED)
        answer = b""
        while len(answer) < _ANSWER.size:
            part = connection.recv(_ANSWER.size - len(answer))
            if not part:
                raise ConnectionEndedError("the other side ended the connection")
            answer += part
        back_s = self._clock()
        received_s, answered_s = _ANSWER.unpack(answer)
        return Stamps(sent_s, received_s, answered_s, back_s)

    def _say_lost(self, cause: Exception) -> None:
        if not self._said_lost:
            self._said_lost = True
            logger.warning(
                "%s: the clock of its pipeline's first stage does not answer at %s:%d (%s: %s); one-way times "
                "use the last measured offset and drift",
                *(self._name, *self._address, type(cause).__name__, cause),
            )


class RelatedClock:
    """This rank's clock as related to its pipeline's, and what keeps it so."""

    def __init__(
        self,
        offset_s: float,
        to_job_s: float = 0.0,
        *,
        server: ClockServer | None = None,
        follower: ClockFollower | None = None,
    ) -> None:
        """`offset_s`: the relation where nothing keeps it. `to_job_s`: what leads from the pipeline's clock to the
        job's. `server`, `follower`: this rank's, closed with this."""
        self._offset_s, self._to_job_s = offset_s, to_job_s
        self._server, self._follower = server, follower

    @property
    def first_offset_s(self) -> float:
        """Seconds to add to this rank's monotonic clock to get the job's, as they were first related."""
        return self._offset_s + self._to_job_s

    def offset_at(self, local_s: float) -> float:
        """Seconds to add to `local_s`, a moment of this rank's monotonic clock, to get the pipeline's."""
        return self._offset_s if self._follower is None else self._follower.line.offset_at(local_s)

    def drifted(self, local_s: float) -> float | None:
        """Seconds to add to `local_s` to get the job's clock, where they change over time; None where they do not."""
        return None if self._follower is None else self.offset_at(local_s) + self._to_job_s

    def close(self) -> None:
        """End what keeps the relation. Safe to call twice."""
        if self._follower is not None:
            self._follower.close()
        if self._server is not None:
            self._server.close()
