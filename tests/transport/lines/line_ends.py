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
        self.mail = ControlChannel(lambda number, packet: lines.say(self, LinkNote(number, packet.decode())))
        self.ups, self.down = 0, ""
        self.read: list[bytes] = []
        self.runs: list[bool] = []
        self.losses: list[tuple[int, str]] = []

    def line_up(self) -> None:
        with self.lock:
            self.ups += 1
            self.mail.line_renewed()

    def line_down(self, cause: str) -> None:
        self.down = cause

    def peer_runs(self, running: bool) -> None:
        self.runs.append(running)

    def lost(self, rank: int, cause: str) -> None:
        self.losses.append((rank, cause))

    def ended(self, cause: str) -> None:
        self.down = cause

    def note_came(self, number: int, packet: bytes) -> int:
        with self.lock:
            self.read += self.mail.take(number, packet)
            return self.mail.acknowledged_below

    def noted(self, below: int) -> None:
        with self.lock:
            self.mail.noted(below)

    def say(self, text: str) -> None:
        with self.lock:
            self.mail.post(text.encode(), time.monotonic() - OVERDUE_S)

    def keep(self) -> None:
        with self.lock:
            self.mail.say_overdue(time.monotonic())
