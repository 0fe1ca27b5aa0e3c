# SPDX-License-Identifier: Apache-2.0
"""Connect a rank to the sidecar process of another rank, such as the planner process of its leading rank: reports go
there, and what follows from them comes back."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from adaptra_megatron.common.authentication.handshake import HandshakeError, Purpose, connect, tune_connection
from adaptra_megatron.common.backoff import Backoff
from adaptra_megatron.common.log import logger_of
from adaptra_megatron.control.decisions import MOST_NBYTES
from adaptra_megatron.control.rounds import HEAD, Address, framed

logger = logger_of(__name__)

CONNECT_S = 10.0
"""Longest wait for a TCP connection: the leading rank listens before it tells its address."""
HANDSHAKE_S = 60.0
"""Longest wait for the handshake: one planner process may have to take over from another, on a busy machine."""
_PAUSE_S = (0.5, 1.5)
"""From one attempt to connect to the next: not all ranks at the same moments. Twice as long after each failure."""
_MOST_DOUBLED = 32.0
"""Times the first pause."""
_SEND_S = 1.0
"""How long a report may take to get into the kernel's buffer, which holds dozens."""
_PART_NBYTES = 1 << 16


class ReportLink:
    """Connection for one thread, which it never holds up for long: connections are made in threads of their own.

    The latest reports are sent again over each new connection: another process may not have seen them. Where no
    connection can be made, one line of the log says so, and what is reported is lost.
    """

    def __init__(
        self,
        secret: bytes,
        purpose: Purpose,
        kept: int,
        wake: Callable[[], None],
        *,
        process: str = "planner process",
        effect: str = "Its replica keeps the plan that runs until there is one",
    ) -> None:
        """`kept`: how many reports are sent again. `wake`: has the thread call `keep`, from any thread. `process`,
        `effect`: where this leads, and what comes of it while there is no connection, in words."""
        self._secret, self._purpose, self._wake = secret, purpose, wake
        self._process, self._effect = process, effect
        self._recent: deque[bytes] = deque(maxlen=kept)
        self._connection: socket.socket | None = None
        self._made: socket.socket | None = None
        """A connection that has been made, and is not in use yet."""
        self._making = False
        self._again_s, self._backoff = 0.0, Backoff(1.0, _MOST_DOUBLED)
        """When to try again, and how many attempts in a row have failed."""
        self._failure = ""
        """What the latest failed attempt says: where it led, and why it failed."""
        self._failure_logged = False
        """Set from the line in the log to the next connection."""
        self._received = bytearray()
        self._closed = False

    @property
    def connection(self) -> socket.socket | None:
        """The socket whose being readable calls for `receive`; None while there is none."""
        return self._connection

    def keep(self, address: Address) -> float | None:
        """See to it that there is a connection. Returns seconds until the next call; None: no need."""
        if self._connection is not None or self._making:
            return None
        if self._made is not None:
            self._connection, self._made = self._made, None
            self._backoff.reset()
            self._failure_logged = False
            for frame in list(self._recent):
                self._send(frame)
            return None
        if (rest_s := self._again_s - time.monotonic()) > 0.0:
            return rest_s
        self._making = True
        threading.Thread(target=self._make, args=(address,), name="adaptra-connecting", daemon=True).start()
        return None

    def report(self, iteration: int, report: bytes) -> None:
        """Send a report, now or with the next connection."""
        frame = framed(iteration, report)
        self._recent.append(frame)
        self._send(frame)
        # Not when an attempt fails: at the end of a job, the leading rank may go first.
        if self._backoff.failures > 1 and not self._failure_logged:
            self._failure_logged = True
            logger.warning(
                "rank %d cannot hand in what it measures: no connection to the %s of rank %d at %s. %s: allow TCP "
                "connections to that host between the job's hosts, or name another network by --adaptra-interface",
                *(self._purpose.source, self._process, self._purpose.target, self._failure, self._effect),
            )

    def receive(self) -> list[tuple[int, bytes]]:
        """Return what has come: iterations and their decisions. To be called when the connection is readable."""
        assert self._connection is not None, "nothing can be readable"
        try:
            part = self._connection.recv(_PART_NBYTES)
        except OSError:
            part = b""
        if not part:
            self._lose()
        self._received += part
        found = []
        while len(self._received) >= HEAD.size:
            iteration, nbytes = HEAD.unpack_from(self._received)
            if nbytes > MOST_NBYTES:
                self._lose()
                break
            if len(self._received) < HEAD.size + nbytes:
                break
            found.append((iteration, bytes(self._received[HEAD.size : HEAD.size + nbytes])))
            del self._received[: HEAD.size + nbytes]
        return found

    def close(self) -> None:
        """End the connection. A thread that is making one ends within CONNECT_S and HANDSHAKE_S."""
        self._closed = True
        self._lose()
        if self._made is not None:
            self._made.close()

    def _send(self, frame: bytes) -> None:
        if self._connection is not None:
            try:
                self._connection.sendall(frame)
            except OSError:
                self._lose()

    def _lose(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        self._received.clear()

    def _make(self, address: Address) -> None:
        factor = 1.0
        try:
            connection = socket.create_connection(address, CONNECT_S)
            try:
                tune_connection(connection)
                connection.setblocking(False)
                asyncio.run(connect(connection, self._secret, self._purpose, HANDSHAKE_S))
            except BaseException:
                connection.close()
                raise
            connection.settimeout(_SEND_S)
            self._made = connection
            if self._closed:
                connection.close()
        except (OSError, HandshakeError) as cause:
            self._failure = f"{address.host}:{address.port} ({cause})"
            factor = self._backoff.next_s()
        self._again_s = time.monotonic() + random.uniform(*_PAUSE_S) * factor
        self._making = False
        self._wake()
