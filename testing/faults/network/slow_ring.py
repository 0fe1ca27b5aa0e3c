# SPDX-License-Identifier: Apache-2.0
"""Decorate a host path's outbound ring: all written data come out late, in order and whole.

The ring carries all messages of the host path to its peer (tensors, notes, acknowledgements), so all of them are
delayed. A message is copied when it is written, and enters the real ring at its arrival time. This is for messages in
host memory: a device cannot copy into this ring.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from adaptra_megatron.transport._ring import Description, Ring, RingError
from testing.faults.precise_sleep import sleep_until

CLOSING_S = 2.0
"""Longest wait of closing for messages in flight."""
PATIENCE_S = 1.0
"""Longest attempt to write into a full ring before it is checked again."""

DueTime = Callable[[int | None], float]
"""When a message of this many bytes, or an acknowledgement (None), that is written now arrives: seconds of
`time.monotonic()`, not after the present where the link is healthy."""


@dataclass(frozen=True)
class _Delayed:
    due_s: float
    write: Callable[[float], None]
    """Writes into the real ring, given a deadline; raises TimeoutError or RingError."""


class SlowRing:
    """Producer's side of a Ring. As with Ring itself, one thread at a time writes; writing never waits.

    If the ring is closed meanwhile, messages in flight are lost, as on a link that breaks.
    """

    def __init__(self, ring: Ring, name: str, due_s: DueTime) -> None:
        """`name`: of the link, for the thread."""
        self._ring, self._due_s = ring, due_s
        self._unwritten = 0
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[_Delayed | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_late, name=f"slow-host-path-{name}", daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Return whether the real ring is closed."""
        return self._ring.closed

    def write(self, description: Description, address: int, nbytes: int, deadline_s: float) -> None:
        """Write as Ring.write, but late. Raises RingClosedError, and the errors of Ring.write if the link is
        healthy.
        """
        due_s = self._due_s(nbytes)
        if self._passes(due_s):
            # Of a message for which there was no room, the part that was written comes twice, and is dropped.
            with contextlib.suppress(TimeoutError):
                self._ring.write(description, address, nbytes, deadline_s)
                return
        content = ctypes.create_string_buffer(nbytes)
        ctypes.memmove(content, address, nbytes)
        self._put(
            _Delayed(due_s, lambda until_s: self._ring.write(description, ctypes.addressof(content), nbytes, until_s))
        )

    def write_some(
        self, description: Description, address: int, nbytes: int, offset: int, most_nbytes: int, patience_s: float
    ) -> int:
        """Write as Ring.write_some, but the whole message, and late."""
        del offset, most_nbytes
        self.write(description, address, nbytes, time.monotonic() + patience_s)
        return nbytes + 1

    def write_ack(self, sequence: int, deadline_s: float) -> None:
        """Write as Ring.write_ack, but late."""
        self._write_control(lambda until_s: self._ring.write_ack(sequence, until_s), deadline_s)

    def write_bye(self, deadline_s: float) -> None:
        """Write as Ring.write_bye, but late."""
        self._write_control(self._ring.write_bye, deadline_s)

    def _write_control(self, write: Callable[[float], None], deadline_s: float) -> None:
        due_s = self._due_s(None)
        if self._passes(due_s):
            with contextlib.suppress(TimeoutError):
                write(deadline_s)
                return
        self._put(_Delayed(due_s, write))

    def close(self) -> None:
        """Deliver messages in flight, for two seconds at most, then close the real ring. Safe to call twice."""
        self.retire()
        self._thread.join(CLOSING_S)
        self._ring.close()

    def retire(self) -> None:
        """End the thread once messages in flight are delivered. Returns at once."""
        self._queue.put(None)

    def _passes(self, due_s: float) -> bool:
        """Return whether to write at once: if nothing is queued and the message is not delayed, or if the ring is
        closed.
        """
        with self._lock:
            return self._ring.closed or (not self._unwritten and due_s <= time.monotonic())

    def _put(self, delayed: _Delayed) -> None:
        with self._lock:
            self._unwritten += 1
        self._queue.put(delayed)

    def _write_late(self) -> None:
        while (delayed := self._queue.get()) is not None:
            sleep_until(delayed.due_s)
            with contextlib.suppress(RingError):  # its producer sees by itself that the ring is closed
                self._write(delayed)
            with self._lock:
                self._unwritten -= 1

    def _write(self, delayed: _Delayed) -> None:
        while True:
            try:
                delayed.write(time.monotonic() + PATIENCE_S)
                return
            except TimeoutError:
                continue  # the peer is slow: a ring that is full and then closed raises RingClosedError
