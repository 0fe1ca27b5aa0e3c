# SPDX-License-Identifier: Apache-2.0
"""A launcher's exchange with the coordinator through the job's store, in a thread: a store that hangs holds up no rank.

On node rank 0 the same thread runs the coordinator.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace

from adaptra_megatron.common.authentication.sealed_store import SealedStore
from adaptra_megatron.common.job.membership import Membership, MembershipRecords, launch_store
from adaptra_megatron.common.log import logger_of
from adaptra_megatron.elastic.launch.endpoint import Endpoint, take_seat
from adaptra_megatron.elastic.launch.launch_messages import (
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
from adaptra_megatron.elastic.launch.roster import Policy, Roster

# The one writer of a job's start, epochs and outcome: reads what hosts report in the store, and decides.

logger = logger_of(__name__)


class Coordinator:
    """Runs next to the launcher of node rank 0, which serves the store."""

    def __init__(self, store: SealedStore, nodes: int, policy: Policy) -> None:
        """`store`: of `launch_store`, for this object alone."""
        self._store, self._nodes, self._beat = store, nodes, 0
        self._records = MembershipRecords(store)
        self._roster = Roster(nodes, policy, time.monotonic())
        self._takes_newcomers = False

    @property
    def has_ended(self) -> bool:
        """True once the job's outcome is decided."""
        return self._roster.outcome is not None

    @property
    def all_left(self) -> bool:
        """True once all hosts that are not lost have seen the outcome and ended their ranks."""
        return self._roster.all_left

    @property
    def stalled(self) -> dict[int, int]:
        """Ranks that stand still, and are to be killed; how often each had been started before, by rank."""
        return {rank: self._roster.starts.get(rank, 0) for rank in self._roster.stalled}

    def tick(self) -> None:
        """Read all reports, decide, publish. Raises RuntimeError where the store does, and as `records.read`."""
        roster = self._roster
        self._look_for_replacements()
        for node_rank in range(self._nodes):
            report = read(self._store, host_key(node_rank, roster.turns.get(node_rank, 0)), HostReport)
            if report is not None:
                roster.observe(node_rank, report, time.monotonic())
        self._takes_newcomers = self._takes_newcomers or self._records.layout() is not None
        if (stalled := self._records.stalled()) is not None:
            roster.stall(stalled)
        if roster.membership is not None and roster.membership.arrived:
            roster.admitted = self._records.admitted()  # after the reports: who has ended had written it before
        for departure in roster.away:
            if (ready := self._records.readiness(departure.rank)) is not None:
                roster.ready(departure, ready)
        before = roster.membership
        roster.decide(time.monotonic(), time.time())
        if roster.membership is not None and roster.membership != before:
            self._records.publish(roster.membership)
            _log(roster.membership)
            if roster.start is not None and before is None:
                write(self._store, START_KEY, roster.start)
        self._beat += 1
        state = JobState(
            self._beat,
            roster.outcome,
            tuple(roster.lost),
            self.stalled,
            roster.vacant,
            roster.turns,
            self._takes_newcomers,
            {rank: start for rank, start in roster.starts.items() if roster.trains(rank)},
        )
        write(self._store, JOB_KEY, state)

    def _look_for_replacements(self) -> None:
        roster = self._roster
        for node_rank in roster.vacant:
            turn, before = roster.turns.get(node_rank, 0) + 1, roster.hosts[node_rank]
            if (report := read(self._store, host_key(node_rank, turn), HostReport)) is not None:
                roster.replace(node_rank, report, time.monotonic())
                logger.warning("host %s takes the place of host %s (node rank %d)", report.host, before.host, node_rank)


def _log(membership: Membership) -> None:
    """What is new in an epoch."""
    for left in membership.left:
        if left.epoch == membership.epoch:
            logger.warning("epoch %d: rank %d of host %s has left: %s", left.epoch, left.rank, left.host, left.why)
    for each in membership.arrived:
        if each.epoch == membership.epoch:
            logger.warning(
                "epoch %d: rank %d stands ready again on host %s; it takes part from the next iteration on in which "
                "its whole cell is ready",
                *(each.epoch, each.rank, each.ready.host),
            )


@dataclass(frozen=True)
class View:
    """Latest state that the link has seen."""

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


class LauncherLink:
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
