# SPDX-License-Identifier: Apache-2.0
"""The thread that keeps the two paths of a link: time, notes that are overdue, and slow work on the device path.

Whatever must not hold up anybody else.
"""

from __future__ import annotations

import math
import threading
import time
from typing import Protocol

from adaptra_megatron.transport.dual_link_device import DeviceSide
from adaptra_megatron.transport.host_link_state import HostLinkState
from adaptra_megatron.transport.note_mail import NoteMail

_TICK_S = 0.05
_IDLE_S = 60.0


class KeptLink(Protocol):
    """What the keeper asks of its link, with the lock held."""

    def tick(self, now_s: float, down_s: float) -> None:
        """Let time pass. `down_s`: for how long the host path has been down, 0 if it is up."""

    def next_tick_s(self) -> float:
        """When time alone brings something."""


class Keeper:
    """Callers hold the link's lock, unless it says otherwise."""

    def __init__(self, state: HostLinkState, mail: NoteMail, device: DeviceSide, link: KeptLink) -> None:
        self._state, self._mail, self._device, self._link = state, mail, device, link
        self._to_keep = threading.Condition(state.lock)
        self._thread = threading.Thread(target=self._keep, name=f"adaptra-paths-{state.peer}", daemon=True)

    def start(self) -> None:
        """Begin, without the lock. Ends by itself once the link closes and the keeper is woken."""
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for the end, without the lock."""
        self._thread.join(timeout_s)

    def wake(self) -> None:
        """There may be work, another time to wake up, or the link closes."""
        self._to_keep.notify()

    def _keep(self) -> None:
        state = self._state
        while True:
            with state.lock:
                if state.closing:
                    return
                now_s = time.monotonic()
                down_since_s = state.health.down_since_s
                down_s = 0.0 if down_since_s is None else max(now_s - down_since_s, 1e-9)
                self._link.tick(now_s, down_s)
                work = self._device.take_all()
                self._mail.say_overdue(now_s)
                if not work:
                    self._to_keep.wait(self._pause_s(now_s))
                    continue
            self._device.do(work)

    def _pause_s(self, now_s: float) -> float:
        """Until time alone brings something."""
        until_s = math.inf
        if not self._state.finished:
            until_s = self._link.next_tick_s()
            if self._state.health.down_since_s is not None:
                until_s = min(until_s, now_s + _TICK_S)
        until_s = min(until_s, self._mail.overdue_from_s)
        return min(_IDLE_S, max(1e-3, until_s - now_s))
