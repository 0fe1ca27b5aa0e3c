# SPDX-License-Identifier: Apache-2.0
"""Links of which only the lines work."""

from __future__ import annotations

import threading
import time

from transport_checks import retransmit_queue

from adaptra_megatron.transport.host_link.message_queues import OVERDUE_S, ReceiveQueue
from adaptra_megatron.transport.lines.lines import ControlConnections, LinkNote

SECRET, JOB = bytes(32), bytes(16)


class End:
    """One end; implements lines.LineEnd."""

    def __init__(self, lines: ControlConnections) -> None:
        self.lock = threading.Lock()
        self.outgoing = retransmit_queue(
            send_note=lambda number, packet: lines.send(self, LinkNote(number, packet.decode()))
        )
        self.incoming = ReceiveQueue()
        self.ups, self.down = 0, ""
        self.read: list[bytes] = []
        self.runs: list[bool] = []
        self.failures: list[tuple[int, str]] = []

    def on_connected(self) -> None:
        with self.lock:
            self.ups += 1
            self.outgoing.on_reconnected()

    def on_disconnected(self, cause: str) -> None:
        self.down = cause

    def on_peer_running(self, running: bool) -> None:
        self.runs.append(running)

    def on_rank_failed(self, rank: int, cause: str) -> None:
        self.failures.append((rank, cause))

    def ended(self, cause: str) -> None:
        self.down = cause

    def on_note_received(self, number: int, packet: bytes) -> int:
        with self.lock:
            self.read += self.incoming.take_note(number, packet)
            return self.incoming.noted_below

    def noted(self, below: int) -> None:
        with self.lock:
            self.outgoing.noted(below)

    def send(self, text: str) -> None:
        with self.lock:
            self.outgoing.post_note(text.encode(), time.monotonic() - OVERDUE_S)

    def keep(self) -> None:
        with self.lock:
            self.outgoing.send_overdue(time.monotonic())
