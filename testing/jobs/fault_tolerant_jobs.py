# SPDX-License-Identifier: Apache-2.0
"""Run a job on this machine whose ranks may fail while the others continue, as under `adaptra launch --no-kill`.

This process serves the store and runs the launcher's coordinator. Ranks are forked, which starts a job in a fraction of
the time that the launcher's processes take.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

from adaptra_megatron.common.membership import START_VARIABLE, launch_store
from adaptra_megatron.elastic.launch.endpoint import serve_store
from adaptra_megatron.elastic.launch.launch_messages import HostReport, RankEnding, host_key, write
from adaptra_megatron.elastic.launch.launcher import Coordinator
from adaptra_megatron.elastic.launch.roster import Policy
from adaptra_megatron.tools.local_ranks.launch_ranks import RankResult, run_ranks
from testing.jobs.fork_server import ForkServer

RUN_ID = "fault-tolerant"
_STORE_S, _TICK_S, _CLOSES_S = 60.0, 0.05, 2.0


class Host:
    """The job's only host, as its launcher: reports endings of ranks to the coordinator and applies its decisions."""

    def __init__(self, world_size: int, *, restarts: int = 0, store: TCPStore | None = None) -> None:
        """`restarts`: how often a failed rank is restarted. `store`: client of an external store; None: this process
        serves one."""
        self._store = serve_store("127.0.0.1", 0, _STORE_S) if store is None else store
        self._mine, self._restarts = launch_store(self._store, RUN_ID), restarts
        policy = Policy(no_kill=True, min_ranks=1, heartbeat_timeout_s=_STORE_S, join_timeout_s=_STORE_S)
        self._coordinator = Coordinator(self._mine, 1, policy)
        self._report = HostReport(socket.gethostname(), world_size)
        self._lock, self._closed = threading.Lock(), threading.Event()
        self.environment = {
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": RUN_ID,
        }
        """Environment of the ranks, in addition to that of `run_ranks`."""
        self.stalled: list[int] = []
        """Ranks whose processes do not run and are to be killed."""
        self._tick()
        self._thread = threading.Thread(target=self._work, name="adaptra-host", daemon=True)
        self._thread.start()

    @property
    def endings(self) -> Sequence[RankEnding]:
        """Return how processes ended so far, restarted ones included; local ranks are the job's."""
        return self._report.endings

    def ended(self, rank: int, status: int) -> Mapping[str, str] | None:
        """Report the end of `rank`, a failure unless `status` is 0; return the environment of its replacement,
        or None.
        """
        with self._lock:
            start = self._starts(rank)
            ending = RankEnding(rank, 0, status, time.time(), "", start=start)
            self._report = replace(self._report, endings=(*self._report.endings, ending))
            self._tick()
        again = status and start < self._restarts and not self._coordinator.has_ended
        return {START_VARIABLE: str(start + 1)} if again else None

    def close(self) -> None:
        """End the thread, unless it waits for a store that does not answer."""
        self._closed.set()
        self._thread.join(_CLOSES_S)

    def _starts(self, rank: int) -> int:
        """Return how often a rank was started before its present process."""
        return sum(each.local_rank == rank for each in self._report.endings)

    def _work(self) -> None:
        with suppress(RuntimeError):  # of a store that is gone, whose job ends
            while not self._closed.wait(_TICK_S):
                with self._lock:
                    self._tick()

    def _tick(self) -> None:
        self._report = replace(self._report, beat=self._report.beat + 1)
        write(self._mine, host_key(0), self._report)
        self._coordinator.tick()
        self.stalled = [rank for rank, start in self._coordinator.stalled.items() if start == self._starts(rank)]


def run_with_failures(
    world_size: int,
    argv: Sequence[str],
    *,
    timeout_s: float,
    log_directory: Path,
    server: ForkServer | None = None,
    env: Mapping[str, str] | None = None,
    restarts: int = 0,
    host: Host | None = None,
) -> list[RankResult]:
    """Run `argv` as `run_ranks` does until all ranks have ended; return the outcome of each.

    `restarts`: how often a failed rank is restarted. `host`: host of this job, which is closed with it; None: a new one
    that serves the store. Raises LaunchError after `timeout_s`.
    """
    host = Host(world_size, restarts=restarts) if host is None else host
    try:
        return run_ranks(
            world_size,
            argv,
            timeout_s=timeout_s,
            env={**host.environment, **(env or {})},
            log_directory=log_directory,
            server=server,
            check=False,
            stop_on_failure=False,
            ended=host.ended,
            stalled=lambda: host.stalled,
        )
    finally:
        host.close()
