# SPDX-License-Identifier: Apache-2.0
"""Links of which only the lines work."""

from __future__ import annotations

import threading
import time

from adaptra_megatron.transport.failover.control_messages import OVERDUE_S, ControlChannel
from adaptra_megatron.transport.lines.lines import ControlConnections, LinkNote

SECRET, JOB = bytes(32), bytes(16)


class End:
    """One end; implements lines.LineEnd."""

    def __init__(self, lines: ControlConnections) -> None:
        self.lock = threading.Lock()
        self.channel = ControlChannel(lambda number, packet: lines.send(self, LinkNote(number, packet.decode())))
        self.ups, self.down = 0, ""
        self.read: list[bytes] = []
        self.runs: list[bool] = []
        self.failures: list[tuple[int, str]] = []

    def on_connected(self) -> None:
        with self.lock:
            self.ups += 1
            self.channel.on_reconnected()

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
            self.read += self.channel.take(number, packet)
            return self.channel.acknowledged_below

    def noted(self, below: int) -> None:
        with self.lock:
            self.channel.noted(below)

    def send(self, text: str) -> None:
        with self.lock:
            self.channel.post(text.encode(), time.monotonic() - OVERDUE_S)

    def keep(self) -> None:
        with self.lock:
            self.channel.send_overdue(time.monotonic())
