# SPDX-License-Identifier: Apache-2.0
"""Hosts and ranks of a job as the coordinator sees them, and when the job ends. No store, no clock.

Reports and times are arguments; results are attributes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf

from adaptra_megatron.common.membership import Departure, Membership, Readiness, Stalled
from adaptra_megatron.elastic.launch.launch_messages import (
    KILLED_S,
    HostReport,
    LaunchOutcome,
    RankEnding,
    Silence,
    Start,
)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Rules by which a job ends."""

    no_kill: bool
    """True: live ranks continue when others fail. False: the first failure ends the job, as with torchrun."""
    min_ranks: int
    """Minimum number of live ranks: below it the job ends."""
    heartbeat_timeout_s: float
    """A host that has been silent for longer counts as dead."""
    join_timeout_s: float
    """Longest wait for all hosts to arrive."""


class Roster:
    """State of one job, from its first report to its outcome."""

    def __init__(self, nodes: int, policy: Policy, now_s: float) -> None:
        self.start: Start | None = None
        """None until all hosts have arrived."""
        self.membership: Membership | None = None
        """Membership of the present epoch; None until all hosts have arrived."""
        self.outcome: LaunchOutcome | None = None
        self.hosts: dict[int, HostReport] = {}
        """Latest reports, by node rank."""
        self.lost: dict[int, str] = {}
        """Why hosts count as dead, by node rank; without those that have been replaced."""
        self.turns: dict[int, int] = {}
        """How often other hosts have taken each node rank."""
        self.stalled: dict[int, str] = {}
        """Observed stall of each live rank that others found stalled."""
        self._stalled_s: dict[int, float] = {}
        """Time at which each of them was seen to be."""
        self.admitted: Mapping[int, int] = {}
        """Epoch of the arrival of each restarted rank that has been admitted."""
        self._nodes, self._policy, self._begun_s = nodes, policy, now_s
        self._silences: dict[int, Silence] = {}
        self._details: dict[int, str] = {}
        self._silent: set[str] = set()
        """All reasons for which hosts have ever counted as dead."""
        self._done_before: dict[int, float] = {}
        """Time at which ranks ended with status 0, on hosts that have been replaced."""
        self._unfinished: list[Departure] = []
        """Departures of ranks that trained, after others had ended with status 0."""
        self._ready: dict[int, Readiness] = {}
        """Readiness of restarted ranks, by rank, that is in no membership yet."""

    @property
    def vacant(self) -> tuple[int, ...]:
        """Node ranks that other hosts may take; never 0, whose host serves the job's store."""
        if self.membership is None or self.outcome is not None:
            return ()
        return tuple(node for node, report in self.hosts.items() if node and (node in self.lost or report.left))

    def replace(self, node_rank: int, report: HostReport, now_s: float) -> None:
        """Record that another host has taken a `vacant` node rank, by its first report."""
        before = self.hosts[node_rank]
        self._done_before |= {
            self._rank(node_rank, each.local_rank): each.at_s for each in before.endings if not each.failed
        }
        self.turns[node_rank] = self.turns.get(node_rank, 0) + 1
        self.lost.pop(node_rank, None)
        self.hosts[node_rank], self._silences[node_rank] = report, Silence(now_s)

    def observe(self, node_rank: int, report: HostReport, now_s: float) -> None:
        """Process a host's latest report, new or not. A host that counts as dead stays dead."""
        self.hosts[node_rank] = report
        # By the beat, not the time in the report: clocks of hosts differ.
        silent_s = self._silences.setdefault(node_rank, Silence(now_s)).observe(report.beat, now_s)
        if silent_s > self._policy.heartbeat_timeout_s and not report.left:
            text = f"host {report.host} (node rank {node_rank}) has been silent for {silent_s:.1f} s"
            self._silent.add(self.lost.setdefault(node_rank, text))

    @property
    def away(self) -> list[Departure]:
        """Departures of ranks that are not ready to rejoin."""
        if self.membership is None:
            return []
        live = set(self.membership.live)
        return [self.membership.departure(rank) for rank in range(self.membership.world_size) if rank not in live]

    @property
    def starts(self) -> dict[int, int]:
        """Return how often the process of each rank that arrived again had been started before."""
        return {} if self.membership is None else {each.rank: each.ready.start for each in self.membership.arrived}

    def trains(self, rank: int) -> bool:
        """Return whether the latest process of this rank trains: False while it waits for admission, or if it was
        refused.
        """
        return self._arrival(rank) <= self.admitted.get(rank, 0)

    def stall(self, stalled: Stalled) -> None:
        """Process a report of stalled ranks, new or not. It applies to their present processes alone."""
        live = () if self.membership is None else self.membership.live
        for rank in stalled.ranks:
            if rank in live and stalled.arrivals.get(rank, 0) == self._arrival(rank):
                self.stalled[rank] = stalled.why

    def ready(self, departure: Departure, ready: Readiness) -> None:
        """Process the readiness of a process that replaces a departed rank, new or not."""
        if ready.left == departure.epoch:
            self._ready[departure.rank] = ready

    def decide(self, now_s: float, time_s: float) -> None:
        """Update membership and outcome. `time_s`: Unix time."""
        if self.outcome is None:
            self.outcome = self._begin(now_s, time_s) if self.membership is None else self._go_on(now_s, time_s)

    @property
    def all_left(self) -> bool:
        """True once the coordinator need not wait for any host."""
        return all(node in self.lost or report.left for node, report in self.hosts.items())

    def _begin(self, now_s: float, time_s: float) -> LaunchOutcome | None:
        for node, report in self.hosts.items():
            if cause := self.lost.get(node) or _departing(node, report):
                return LaunchOutcome(True, f"{cause}, before all hosts had come")
        missing = [node for node in range(self._nodes) if node not in self.hosts]
        waited_s = now_s - self._begun_s
        if missing:
            if waited_s <= self._policy.join_timeout_s:
                return None
            nodes = ", ".join(map(str, missing))
            text = f"{len(missing)} of {self._nodes} hosts (node ranks {nodes}) have not come within {waited_s:.0f} s: "
            return LaunchOutcome(
                True, text + "see whether their launchers run, with the same endpoint, run id and --nnodes"
            )
        sizes = [self.hosts[node].nproc for node in range(self._nodes)]
        world_size = sum(sizes)
        if world_size < self._policy.min_ranks:
            return LaunchOutcome(True, f"--min-ranks is {self._policy.min_ranks}, but the job has {world_size} ranks")
        self.start = Start(tuple(sum(sizes[:node]) for node in range(self._nodes)), world_size)
        self.membership = Membership(0, world_size, time_s, ())
        return None

    def _go_on(self, now_s: float, time_s: float) -> LaunchOutcome | None:
        assert self.membership is not None
        for node, report in self.hosts.items():
            # The store is served by node rank 0: without it no rank can go on.
            if (cause := _departing(node, report)) and (node == 0 or not self._policy.no_kill):
                return LaunchOutcome(True, f"{cause}, so all ranks have been ended")
        self._stalled_s = {rank: self._stalled_s.get(rank, now_s) for rank in self.stalled}
        departed = sorted(self._departures(now_s, time_s), key=lambda each: each.at_s)
        for each in departed:  # or the rank's next process would be killed for it
            self.stalled.pop(each.rank, None)
        if departed and not self._policy.no_kill:
            return LaunchOutcome(True, self._failures(departed))
        if departed:
            self._note_unfinished(departed)
            # All departures of one poll make one epoch: each epoch makes the ranks regroup.
            self.membership = self.membership.without(departed, time_s)
        elif self._ready:
            self.membership = self.membership.with_ready(self._ready, time_s)
            self._ready.clear()
        live, arrived = self.membership.live, self.membership.arrived
        if len(live) < self._policy.min_ranks:
            text = f"{len(live)} ranks are left, fewer than the {self._policy.min_ranks} that the job goes on with"
            return LaunchOutcome(True, f"{text} (--min-ranks): {self._failures(self.membership.left)}")
        # Without restarted ranks that wait: only ranks that train can admit them.
        training = set(live).difference(each.rank for each in arrived if not self.trains(each.rank))
        return None if training - self._finished().keys() else self._end(training)

    def _end(self, training: set[int]) -> LaunchOutcome:
        """Return the outcome once all ranks in `training` have ended with status 0 and no other rank trains."""
        assert self.membership is not None
        away = [self.membership.departure(rank) for rank in range(self.membership.world_size) if rank not in training]
        away.sort(key=lambda each: (each.epoch, each.at_s))
        if not training:
            waiting = ", ".join(map(str, self.membership.live))
            text = f"no rank is left that trained, so ranks {waiting}, started again, cannot be admitted any more"
            return LaunchOutcome(True, f"{text}: {self._failures(away)}")
        if self._unfinished:
            done = ", ".join(map(str, sorted(training)))
            text = f"ranks {done} ended with status 0, but others failed after the first of them had"
            return LaunchOutcome(True, f"{text}: {self._failures(self._unfinished)}")
        return LaunchOutcome(
            False, f"ended well, but without {len(away)} ranks: {self._failures(away)}" if away else ""
        )

    def _note_unfinished(self, departed: list[Departure]) -> None:
        """Record departures of ranks that failed after others had finished: their part of the work is missing."""
        assert self.membership is not None
        staying = set(self.membership.live).difference(each.rank for each in departed)
        done_s = min((at_s for rank, at_s in self._finished().items() if rank in staying), default=inf)
        self._unfinished += [each for each in departed if each.at_s > done_s and self.trains(each.rank)]

    def _departures(self, now_s: float, time_s: float) -> Iterator[Departure]:
        """Iterate over the ranks that have left since the present epoch began."""
        assert self.membership is not None
        epoch, live, starts = self.membership.epoch + 1, set(self.membership.live), self.starts
        for node, report in self.hosts.items():
            ended: dict[int, RankEnding] = {}
            for each in report.endings:  # one of a later start says as much, should that of this one not be kept
                if each.start >= starts.get(self._rank(node, each.local_rank), 0):
                    ended.setdefault(each.local_rank, each)
            for local_rank in range(report.nproc):
                rank, ending = self._rank(node, local_rank), ended.get(local_rank)
                if rank not in live or rank in self._done_before:
                    continue
                stall = self.stalled.get(rank, "")
                # Others wait for a stalled rank, so its work was not done even if it has ended with status 0.
                # A reported ending goes before the silence of its host, since it names the cause.
                if ending is not None and (ending.failed or stall):
                    before = f"{stall}, and " if stall else ""
                    self._details[rank] = _details(ending, report)
                    after = f", after its launcher {report.leaving}" if ending.asked else ""
                    yield Departure(rank, epoch, report.host, f"{before}{ending.why}{after}", ending.at_s)
                elif ending is None and node in self.lost:
                    yield Departure(rank, epoch, report.host, self.lost[node], time_s)
                elif ending is None and report.left:
                    yield Departure(rank, epoch, report.host, f"its launcher {report.leaving}", time_s)
                elif ending is None and stall and now_s - self._stalled_s[rank] > KILLED_S:
                    why = f"{stall}, was killed, and has not ended yet: see whether its device or the kernel hangs"
                    yield Departure(rank, epoch, report.host, why, time_s)

    def _finished(self) -> dict[int, float]:
        """Return when ranks ended with status 0 (Unix time)."""
        return self._done_before | {
            self._rank(node, each.local_rank): each.at_s
            for node, report in self.hosts.items()
            for each in report.endings
            if not each.failed
        }

    def _arrival(self, rank: int) -> int:
        """Return the epoch of a rank's latest arrival; 0 for its first process."""
        arrived = () if self.membership is None else self.membership.arrived
        return next((each.epoch for each in arrived if each.rank == rank), 0)

    def _rank(self, node: int, local_rank: int) -> int:
        assert self.start is not None
        return self.start.first_ranks[node] + local_rank

    def _failures(self, departed: tuple[Departure, ...] | list[Departure]) -> str:
        """Describe the first failure in full, and list the ranks of the other failures."""
        first, *others = departed
        also = f"; then ranks {', '.join(str(each.rank) for each in others)}" if others else ""
        what = f"rank {first.rank} on host {first.host} was the first to end: it {first.why}"
        if first.why in self._silent:
            what = f"{first.why}: its ranks, of which {first.rank} is the first, count as dead"
        return f"{what}{also}{self._details.get(first.rank, '')}"


def _departing(node: int, report: HostReport) -> str:
    """Return why a launcher itself ends its ranks; empty if it does not."""
    return f"the launcher of host {report.host} (node rank {node}) {report.leaving}" if report.leaving else ""


def _details(ending: RankEnding, report: HostReport) -> str:
    return f"\n  local rank {ending.local_rank} of {report.host}, process {ending.process_id}\n{ending.details}"
