# SPDX-License-Identifier: Apache-2.0
"""Wake the one thread that waits for several messages, whichever link and thread sees one of them arrive."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from adaptra_megatron.transport.message_keys import MessageKey

_LOOK_AGAIN_S = 0.25
"""Poll interval for conditions that raise no signal, such as a broken link."""


class ArrivalSignal:
    """Wake the training thread when any awaited message arrives. One per transport; one thread waits, any thread
    delivers."""

    def __init__(self) -> None:
        self._listening: Collection[MessageKey] = ()
        self._rung = threading.Event()

    def arrived(self, key: MessageKey) -> None:
        """Report that `key` has arrived. Call it after the message can be taken, since the waiting thread checks only
        then.
        """
        if key in self._listening:
            self._rung.set()

    def look_again(self) -> None:
        """Wake a waiting thread, so that it sees a failed or aborted link at once."""
        self._rung.set()

    def wait_for(
        self,
        keys: Collection[MessageKey],
        until_s: float,
        is_here: Callable[[MessageKey], bool],
        attend: Callable[[], float],
    ) -> bool:
        """Return True once any of `keys` has arrived, False at `until_s` (time.monotonic).

        `attend` is called before each sleep. It handles long waits and returns when to call it next. It raises for a
        message that cannot come any more.
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
