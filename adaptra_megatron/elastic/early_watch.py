# SPDX-License-Identifier: Apache-2.0
"""A thread that ends this process when another rank dies before training survives that: while the job is set up."""

from __future__ import annotations

import os
import threading

from adaptra_megatron.common.job.membership import MembershipRecords
from adaptra_megatron.common.log import logger_of

logger = logger_of(__name__)

_CONNECT_S, _LOOKS_S = 60.0, 0.5


class StartupFailureMonitor:
    """From construction to `close`, if a launcher says which ranks live."""

    def __init__(self) -> None:
        self._closed = threading.Event()
        threading.Thread(target=self._work, name="adaptra-early-watch", daemon=True).start()

    def close(self) -> None:
        """End the thread; from now on deaths are another's business."""
        self._closed.set()

    def _work(self) -> None:
        try:
            records = MembershipRecords.of_rank(_CONNECT_S)
            while not self._closed.wait(_LOOKS_S):
                membership = records.newest()
                if membership is None or self._closed.is_set():
                    return
                if membership.left:
                    whys = "; ".join(f"rank {each.rank} on host {each.host}: {each.why}" for each in membership.left)
                    logger.error(
                        "%s, before the first iteration: the ranks do not know each other yet, so the job ends; "
                        "nothing has been trained, start it again",
                        whys,
                    )
                    os._exit(1)  # the training thread waits in the store or in a collective for minutes
        except (KeyError, RuntimeError):  # no launcher of ours, or its store is gone: training will say so
            return
