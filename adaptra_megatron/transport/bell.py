# SPDX-License-Identifier: Apache-2.0
"""Wakes the one thread that waits for any of several messages, whichever link and thread sees one of them arrive."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from adaptra_megatron.transport.messages import MessageKey

_LOOK_AGAIN_S = 0.25
"""What is no arrival (a broken link, say) rings no bell, so it is looked for as often as this."""


class Bell:
    """One per transport. The waiting thread may be only one; whoever delivers messages may be any."""

    def __init__(self) -> None:
        self._listening: Collection[MessageKey] = ()
        self._rung = threading.Event()

    def arrived(self, key: MessageKey) -> None:
        """Call once `key` can be asked for: whoever waits looks only after this, or sees it anyway."""
        if key in self._listening:
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
