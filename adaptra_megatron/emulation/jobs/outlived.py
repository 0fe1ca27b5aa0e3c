# SPDX-License-Identifier: Apache-2.0
"""A job on this machine whose ranks may die while the others go on, as under `adaptra launch --no-kill`.

The store and the membership are this process's; ranks are forked, which starts a job in a fraction of the time that the
launcher's processes take.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

from adaptra_megatron.emulation.jobs.fork_server import ForkServer
from adaptra_megatron.emulation.jobs.launch import RankResult, free_port, run_ranks
from adaptra_megatron.job.membership import Departure, Membership, MembershipRecords, launch_store

RUN_ID = "outlived"
_STORE_S = 60.0


class Coordinator:
    """Publishes who lives, as ranks end."""

    def __init__(self, world_size: int) -> None:
        port = free_port()
        self._store = TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_STORE_S)
        )
        self._records = MembershipRecords(launch_store(self._store, RUN_ID))
        self._membership = Membership(0, world_size, time.time(), ())
        self._records.publish(self._membership)
        self.environment = {
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": RUN_ID,
        }
        """For the ranks, beside what `run_ranks` gives them."""

    def ended(self, rank: int, status: int) -> None:
        """`rank` has ended; with any status but 0 the job has lost it."""
        if not status:
            return
        before, now_s = self._membership, time.time()
        departure = Departure(rank, before.epoch + 1, socket.gethostname(), f"exit status {status}", now_s)
        self._membership = Membership(before.epoch + 1, before.world_size, now_s, (*before.left, departure))
        self._records.publish(self._membership)


def run_outlived(
    world_size: int,
    argv: Sequence[str],
    *,
    timeout_s: float,
    log_directory: Path,
    server: ForkServer | None = None,
    env: Mapping[str, str] | None = None,
) -> list[RankResult]:
    """Run `argv` as `run_ranks` does, until all ranks have ended; whatever happened to each is returned.

    Raises LaunchError for a job that runs past `timeout_s`.
    """
    coordinator = Coordinator(world_size)
    return run_ranks(
        world_size,
        argv,
        timeout_s=timeout_s,
        env={**coordinator.environment, **(env or {})},
        log_directory=log_directory,
        server=server,
        check=False,
        stop_on_failure=False,
        ended=coordinator.ended,
    )
