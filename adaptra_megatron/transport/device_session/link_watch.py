# SPDX-License-Identifier: Apache-2.0
"""A thread that looks after all links of a process whose transfers nothing else waits for: errors and deadlines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

INTERVAL_S = 0.2


class WatchedLink(Protocol):
    """What the watch asks of a link, from its own thread."""

    def failure(self, now_s: float) -> str | None:
        """Why the link is of no use any more; None while it is. Never waits."""

    def abort(self, cause: str) -> None:
        """End it. Never waits."""

    @property
    def settled(self) -> bool:
        """Return whether it has ended for good, and needs no watch."""


class LinkWatch:
    """Runs while there are links to look after, from `add` to `close`."""

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self.failed: Callable[[WatchedLink, str], None] = lambda link, cause: link.abort(cause)
        """Called by the thread with a link and its failure, again and again until the link says so no more."""
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._links: list[WatchedLink] = []
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, link: WatchedLink) -> None:
        """Look after a link, until it has settled."""
        with self._lock:
            self._links.append(link)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="adaptra-link-watch", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End the thread. Links that have not settled are kept, for the device may still use their memory."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(self._interval_s):
            with self._lock:
                links = list(self._links)
            for link in links:
                if (cause := link.failure(time.monotonic())) is not None:
                    self.failed(link, cause)
            with self._lock:
                self._links = [link for link in self._links if not link.settled]
