# SPDX-License-Identifier: Apache-2.0
"""A launcher's exchange with the coordinator through the job's store, in a thread: a store that hangs holds up no rank.

On node rank 0 the same thread runs the coordinator.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from adaptra_megatron.authentication.sealed_store import SealedStore
from adaptra_megatron.job.membership import launch_store
from adaptra_megatron.launch.coordinator import Coordinator
from adaptra_megatron.launch.endpoint import Endpoint, take_seat
from adaptra_megatron.launch.records import (
    BEAT_S,
    JOB_KEY,
    START_KEY,
    HostReport,
    JobState,
    Start,
    beat_s,
    host_key,
    read,
    write,
)
from adaptra_megatron.launch.roster import Policy


@dataclass(frozen=True)
class View:
    """What the link has seen last."""

    node_rank: int | None = None
    """Known once the link is up."""
    turn: int = 0
    """How many launchers have had this node rank before."""
    port: int = 0
    """TCP port of the store."""
    start: Start | None = None
    state: JobState | None = None
    error: str = ""
    """Why the link is down for good."""


class Link:
    """One launcher's link. `view` and `say` are for the thread that made it."""

    def __init__(
        self, endpoint: Endpoint, run_id: str, nodes: int, node_rank: int | None, policy: Policy, report: HostReport
    ) -> None:
        """Takes up the link in a thread of its own. `report`: the first one."""
        self.view = View()
        """Replaced as a whole."""
        self.changed = threading.Event()
        """Set with each new view."""
        self._endpoint, self._run_id, self._nodes, self._node_rank = endpoint, run_id, nodes, node_rank
        self._policy, self._report = policy, report
        self._said, self._given_up = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="adaptra-launch-link", daemon=True)
        self._thread.start()

    def say(self, report: HostReport) -> None:
        """Send a report at once; its beat is the link's to count."""
        self._report = report
        self._said.set()

    def finish(self, timeout_s: float) -> bool:
        """Wait for the last report, which says `left`, to be there; on node rank 0, for those of all hosts.

        Returns whether they are, or the link is down.
        """
        self._given_up = True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            policy = self._policy
            seat = take_seat(
                self._endpoint,
                self._run_id,
                self._nodes,
                self._node_rank,
                self._report.nproc,
                join_timeout_s=policy.join_timeout_s,
                heartbeat_timeout_s=policy.heartbeat_timeout_s,
                given_up=lambda: self._given_up,
            )
            mine = launch_store(seat.store, self._run_id)
            coordinator = None if seat.node_rank else Coordinator(mine, self._nodes, policy)
            self._show(replace(self.view, node_rank=seat.node_rank, turn=seat.turn, port=seat.store.port))
            self._keep(mine, host_key(seat.node_rank, seat.turn), coordinator)
        except Exception as cause:
            self._show(replace(self.view, error=str(cause).partition("\n")[0]))

    def _keep(self, store: SealedStore, key: str, coordinator: Coordinator | None) -> None:
        beat = 0
        while True:
            self._said.clear()
            report, beat = self._report, beat + 1
            write(store, key, replace(report, beat=beat))
            if coordinator is not None:
                coordinator.tick()
            start = self.view.start or read(store, START_KEY, Start)
            self._show(replace(self.view, start=start, state=read(store, JOB_KEY, JobState)))
            if report.left and (coordinator is None or coordinator.all_left):
                return
            self._said.wait(beat_s(self._nodes) if coordinator is None else BEAT_S)

    def _show(self, view: View) -> None:
        self.view = view
        self.changed.set()
