# SPDX-License-Identifier: Apache-2.0
"""The one writer of a job's start, epochs and outcome: reads what hosts report in the store, and decides."""

from __future__ import annotations

import time

from adaptra_megatron.authentication.sealed_store import SealedStore
from adaptra_megatron.job.membership import Membership, MembershipRecords
from adaptra_megatron.launch.records import JOB_KEY, START_KEY, HostReport, JobState, host_key, read, write
from adaptra_megatron.launch.roster import Policy, Roster
from adaptra_megatron.log import logger_of

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
