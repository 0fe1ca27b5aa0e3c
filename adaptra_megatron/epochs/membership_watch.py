# SPDX-License-Identifier: Apache-2.0
"""A thread that learns from the launcher which ranks live, and wakes the training when one has died."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from adaptra_megatron.job.membership import Membership, MembershipRecords, Stalled
from adaptra_megatron.log import logger_of

logger = logger_of(__name__)

_LOOKED_S = 1.0
_LOOKS_S, _RANKS_PER_S = 0.05, 20_000
"""Time between two looks in the store: the first, and as long as all ranks take to look, so many in a second."""


class MembershipWatch:
    """From construction to `close`. The store is the launcher's: without it there is no job."""

    def __init__(
        self, records: MembershipRecords, changed: Callable[[Membership], None], looked: Callable[[], None]
    ) -> None:
        """`changed`: called in the thread with each new membership, before it is the newest. `looked`: called in it
        now and then. Both may raise RuntimeError where a store does."""
        self._records, self._changed, self._looked = records, changed, looked
        self._stalled: Stalled | None = None
        """Still to be reported."""
        self._newest = records.newest()
        self._news = threading.Condition()
        self._closed, self._look = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="adaptra-membership", daemon=True)
        self._thread.start()

    @property
    def newest(self) -> Membership | None:
        """The last membership that is known."""
        with self._news:
            return self._newest

    def wait_beyond(self, epoch: int, timeout_s: float) -> Membership | None:
        """The newest membership once it is of an epoch after `epoch`; None if there is none within `timeout_s`."""
        self._look.set()
        with self._news:
            self._news.wait_for(lambda: self._newest is not None and self._newest.epoch > epoch, timeout_s)
            return self._newest if self._newest is not None and self._newest.epoch > epoch else None

    def report(self, stalled: Stalled) -> None:
        """Have the launcher end ranks that stand still."""
        self._stalled = stalled
        self._look.set()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._look.set()
        self._thread.join(timeout=2.0)

    def _work(self) -> None:
        epoch = -1 if self._newest is None else self._newest.epoch
        every_s = _LOOKS_S + (0 if self._newest is None else self._newest.world_size) / _RANKS_PER_S
        looked_s = time.monotonic()
        while not self._closed.is_set():
            self._look.wait(every_s)
            self._look.clear()
            try:
                if self._stalled is not None:
                    self._records.report(self._stalled)
                    self._stalled = None
                if time.monotonic() - looked_s > _LOOKED_S:
                    self._looked()
                    looked_s = time.monotonic()
                found = self._records.newest()
            except RuntimeError as cause:
                logger.warning("the launcher's store does not answer, so deaths are not seen any more: %s", cause)
                return
            if found is None or found.epoch <= epoch:
                continue
            epoch = found.epoch
            self._changed(found)  # first: what it ends is not to be what the training has begun for the new set
            with self._news:
                self._newest = found
                self._news.notify_all()
