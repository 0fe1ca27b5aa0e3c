# SPDX-License-Identifier: Apache-2.0
"""Wakes the one thread that waits for any of several messages, whichever link and thread sees one of them arrive."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from adaptra_megatron.transport.message_keys import MessageKey

_LOOK_AGAIN_S = 0.25
"""Poll interval for conditions that raise no signal, such as a broken link."""


class ArrivalSignal:
    """One per transport. One thread may wait; any thread may deliver messages."""

    def __init__(self) -> None:
        self._listening: Collection[MessageKey] = ()
        self._rung = threading.Event()

    def arrived(self, key: MessageKey) -> None:
        """Call once `key` can be taken: a waiting thread looks only after this, or sees it anyway."""
        if key in self._listening:
            self._rung.set()

    def look_again(self) -> None:
        """Have a waiting thread see at once what has become of what it waits for."""
        self._rung.set()

    def wait_for(
        self,
        keys: Collection[MessageKey],
        until_s: float,
        is_here: Callable[[MessageKey], bool],
        attend: Callable[[], float],
    ) -> bool:
        """True as soon as any of `keys` is here, False at `until_s` (time.monotonic).

        `attend` is called before each sleep: it does what a long wait calls for, returns until when nothing else is to
        be done, and raises where waiting makes no sense any more.
        """
        self._listening = keys
        try:
            while True:
                self._rung.clear()
                if any(map(is_here, keys)):
                    return True
                again_s = min(until_s, attend())
                now_s = time.monotonic()
                if now_s >= until_s:
                    return False
                self._rung.wait(min(_LOOK_AGAIN_S, max(0.0, again_s - now_s)))
        finally:
            self._listening = ()
