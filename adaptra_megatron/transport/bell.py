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
        self, keys: Collection[MessageKey], is_here: Callable[[MessageKey], bool], attend: Callable[[], float]
    ) -> None:
        """Return as soon as any of `keys` is here.

        `attend` is called before each sleep: it does what a long wait calls for, returns until when nothing else is to
        be done (monotonic seconds), and raises where waiting makes no sense any more.
        """
        self._listening = keys
        try:
            while True:
                self._rung.clear()
                if any(map(is_here, keys)):
                    return
                until_s = attend()
                self._rung.wait(min(_LOOK_AGAIN_S, max(0.0, until_s - time.monotonic())))
        finally:
            self._listening = ()
