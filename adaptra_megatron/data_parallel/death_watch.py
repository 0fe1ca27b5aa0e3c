# SPDX-License-Identifier: Apache-2.0
"""A watch under --adaptra-sync-mode: replicas see at once when one of them is killed, and stop.

They see it also while they wait for something else. Jobs that survive rank failures learn it from the launcher:
`epochs.membership_watch`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from adaptra_megatron.job.control_store import ControlStore
from adaptra_megatron.job.process_groups import epoch_group
from adaptra_megatron.log import logger_of

_FAREWELL_TAG = 0
_AGES = timedelta(days=3650)
"""For a rank to end: as long as its training takes. It is waited for by a thread that has nothing else to do."""
_CLOSE_S = 2.0

logger = logger_of(__name__)


class DeathWatch:
    """One rank's end. Each watches the one behind it, by a connection that its kernel closes when its process ends.

    One that is stopped (SIGSTOP), or slow, keeps its connections. So does one whose host is cut off: that is for the
    timeouts of others.
    """

    def __init__(
        self,
        control: ControlStore,
        name: str,
        ranks: Sequence[int],
        rank: int,
        timeout_s: float,
        died: Callable[[int], None],
    ) -> None:
        """All of `ranks` (global ones, 2 or more) call this at about the same time. `died`: called in a thread, with
        the rank that is gone without a farewell. Raises RuntimeError when one does not come within `timeout_s`."""
        own = ranks.index(rank)
        self._before = (own - 1) % len(ranks)
        self._watched, behind = ranks[(own + 1) % len(ranks)], (own + 1) % len(ranks)
        self._died, self._timeout_s = died, timeout_s
        self._closed = False
        self._group: Any = epoch_group(control, name, ranks, rank, timeout_s)
        self._farewell = self._group.recv([torch.zeros(1)], behind, _FAREWELL_TAG)
        self._thread = threading.Thread(target=self._watch, name="adaptra-deaths", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Say farewell to the rank that watches this one."""
        self._closed = True
        try:
            self._group.send([torch.zeros(1)], self._before, _FAREWELL_TAG).wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as cause:  # it is gone
            logger.debug("says no farewell: %s", cause)
        self._thread.join(_CLOSE_S)

    def _watch(self) -> None:
        try:
            self._farewell.wait(_AGES)
        except RuntimeError as cause:
            logger.debug("rank %d has gone: %s", self._watched, cause)
            if not self._closed:
                self._died(self._watched)
