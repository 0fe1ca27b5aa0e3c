# SPDX-License-Identifier: Apache-2.0
"""A following rank's connection to the planner process of its leading rank: reports go there, decisions come back."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from adaptra_megatron.authentication.handshake import HandshakeError, Purpose, connect
from adaptra_megatron.authentication.socket_io import tune_connection
from adaptra_megatron.control.decisions import MOST_NBYTES
from adaptra_megatron.control.rounds import HEAD, Address, framed
from adaptra_megatron.log import logger_of
from adaptra_megatron.sparing_log import SparingLog

logger = logger_of(__name__)

CONNECT_S = 30.0
"""A planner process that has just been started answers within seconds."""
_REST_S = (0.5, 1.5)
"""From one attempt to connect to the next: not all ranks at the same moments."""
_SEND_S = 1.0
"""How long a report may take to get into the kernel's buffer, which holds dozens."""
_PART_NBYTES = 1 << 16


class PlannerLink:
    """For one thread, which it never holds up for long: connections are made in threads of their own.

    The latest reports are sent again over each new connection: another planner process may not have seen them.
    """

    def __init__(self, secret: bytes, purpose: Purpose, kept: int, wake: Callable[[], None]) -> None:
        """`kept`: how many reports are sent again. `wake`: has the thread call `keep`, from any thread."""
        self._secret, self._purpose, self._wake = secret, purpose, wake
        self._recent: deque[bytes] = deque(maxlen=kept)
        self._connection: socket.socket | None = None
        self._made: socket.socket | None = None
        """A connection that has been made, and is not in use yet."""
        self._making = False
        self._again_s, self._failures = 0.0, 0
        """When to try again, and how many attempts in a row have failed."""
        self._received = bytearray()
        self._warnings = SparingLog(logger)

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

    def receive(self) -> list[tuple[int, bytes]]:
        """What has come: iterations and their decisions. To be called when the connection is readable."""
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
        """End the connection; one that is being made is left to itself."""
        self._lose()

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
        try:
            connection = socket.create_connection(address, CONNECT_S)
            try:
                tune_connection(connection)
                connection.setblocking(False)
                asyncio.run(connect(connection, self._secret, self._purpose, CONNECT_S))
            except BaseException:
                connection.close()
                raise
            connection.settimeout(_SEND_S)
            self._made, self._failures = connection, 0
        except (OSError, HandshakeError) as cause:
            self._failures += 1
            if self._failures > 1:  # at the end of a job, the leading rank may go first
                self._warnings.warning("what is measured cannot be handed in at %s:%d: %s", *address, cause)
        self._again_s = time.monotonic() + random.uniform(*_REST_S)
        self._making = False
        self._wake()
