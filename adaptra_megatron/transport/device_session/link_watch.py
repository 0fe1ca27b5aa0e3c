# SPDX-License-Identifier: Apache-2.0
"""Watch all links of a process for errors and deadlines, in a thread: nothing else waits for their transfers.

Its calls of the GPU's driver may not return: PyTorch has seen cudaEventQuery hang. No deadline would hold any more. So
a second thread, which calls no driver and takes no lock, ends the process when the first one does not advance.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, Protocol

from adaptra_megatron.common.log import logger_of
from adaptra_megatron.transport.gpu.cuda_device import DeviceThread

logger = logger_of(__name__)

INTERVAL_S = 0.2
STANDS_S = 60.0
"""Longest time that one check of all links may take, or the links' own timeout where that is longer."""
_ENDS_S = 1.0
"""Longest wait for a thread to end: the device's driver may block it."""
_FLUSH_S = 1.0
"""Longest time for flushing output in a process that ends because of a failure."""


class Failure(NamedTuple):
    """Failure of a link: cause and time."""

    at_s: float
    """Time of the failure, or at which the overdue message was due (time.monotonic)."""
    cause: str


class WatchedLink(Protocol):
    """Interface of a link for the watch; called by its thread."""

    timeout_s: float
    """Longest time that a call for the link may take."""

    def failure(self, now_s: float) -> Failure | None:
        """Return why the link is no longer usable; None while it is. Never waits."""

    def abort(self, cause: str) -> None:
        """Abort the link. Never waits."""

    @property
    def settled(self) -> bool:
        """Return whether the link has ended and its memory is free, so that it needs no watch."""


def end_process() -> None:
    """End this process at once with a failure, whatever its other threads and its GPU do."""
    with suppress(RuntimeError):  # an interpreter that shuts down starts no threads
        threading.Thread(target=_end_soon, name="adaptra-end", daemon=True).start()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _end_soon() -> None:
    """End the process after _FLUSH_S even if the reader of its output has stopped."""
    time.sleep(_FLUSH_S)
    os._exit(1)


class LinkWatch:
    """Thread that checks all links for errors and deadlines, from the first `add` to `close`."""

    def __init__(
        self,
        interval_s: float = INTERVAL_S,
        stands_s: float = STANDS_S,
        last_resort: Callable[[], None] = end_process,
    ) -> None:
        """`last_resort`: ends the process when a check itself does not return."""
        self.failed: Callable[[WatchedLink, str], None] = lambda link, cause: link.abort(cause)
        """Called by the thread with a link and its failure, the earliest failure first, until the link no longer
        reports it."""
        self._interval_s, self._stands_s, self._last_resort = interval_s, stands_s, last_resort
        self._lock = threading.Lock()
        self._links: list[WatchedLink] = []
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._looks = 0
        """Number of checks of all links so far."""
        self._logged: set[str] = set()

    def add(self, link: WatchedLink) -> None:
        """Watch a link until it has settled."""
        with self._lock:
            self._links.append(link)
            self._stands_s = max(self._stands_s, link.timeout_s)
            if self._threads:
                return
            self._threads = [
                DeviceThread(self._run, "adaptra-link-watch"),
                threading.Thread(target=self._watch_itself, name="adaptra-watch-of-watch", daemon=True),
            ]
            for thread in self._threads:
                thread.start()

    def close(self) -> None:
        """End the threads. Links that have not settled stay referenced, since the device may still use their memory."""
        self._closed.set()
        for thread in self._threads:
            thread.join(_ENDS_S)

    def _run(self) -> None:
        while not self._closed.wait(self._interval_s):
            with self._lock:
                links = list(self._links)
            now_s = time.monotonic()
            # The earliest failure first: it is the cause, and later ones may follow from it.
            found = [(failure, link) for link in links if (failure := self._failure(link, now_s)) is not None]
            for failure, link in sorted(found, key=lambda each: each[0].at_s):
                try:
                    self.failed(link, failure.cause)
                except Exception as error:  # with this thread all deadlines would end
                    self._log_once(link, error)
            settled = {id(link) for link in links if self._settled(link)}
            with self._lock:
                self._links = [link for link in self._links if id(link) not in settled]
            self._looks += 1

    def _failure(self, link: WatchedLink, now_s: float) -> Failure | None:
        try:
            return link.failure(now_s)
        except Exception as error:  # of one link: the others are to be watched
            self._log_once(link, error)
            return Failure(now_s, f"it cannot be watched: {type(error).__name__}: {error}")

    def _settled(self, link: WatchedLink) -> bool:
        try:
            return link.settled
        except Exception as error:  # it is kept, and what the device may use with it
            self._log_once(link, error)
            return False

    def _log_once(self, link: WatchedLink, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        if text not in self._logged:
            self._logged.add(text)
            logger.error("the watch of links met with an error at %r: %s", link, text, exc_info=error)

    def _watch_itself(self) -> None:
        looks, stood_s = -1, 0.0
        # Measured in this thread's own pauses: the clock goes on while the whole process is stopped.
        while not self._closed.wait(pause_s := min(1.0, self._stands_s / 4)):
            looks, stood_s = self._looks, stood_s + pause_s if self._looks == looks else 0.0
            if stood_s > self._stands_s:
                logger.error(
                    "the watch of links has been blocked for %.0f s in a call of the GPU's driver, so that no deadline "
                    "is kept: this process ends. Look at the driver's log (dmesg, nvidia-smi -q) of this host",
                    stood_s,
                )
                self._last_resort()
                return
