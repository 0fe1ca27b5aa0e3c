# SPDX-License-Identifier: Apache-2.0
"""Hosts and ranks of a job as the coordinator sees them: who has left, and whether the job goes on. No store, no clock.

What hosts report and the time are given; what comes of it is read off.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from adaptra_megatron.job.membership import Arrival, Departure, Membership, Readiness
from adaptra_megatron.launch.records import Ending, HostReport, Outcome, Start
from adaptra_megatron.launch.silence import Silence


@dataclass(frozen=True, kw_only=True)
class Policy:
    """When a job ends."""

    no_kill: bool
    """Ranks that live go on when others die. False: the first failure ends the job, as torchrun does."""
    min_ranks: int
    """With fewer than this the job ends."""
    heartbeat_timeout_s: float
    """A host that is silent for longer counts as dead."""
    join_timeout_s: float
    """Hosts that have not come by then never do."""


class Roster:
    """One job, from the first host that reports to its outcome."""

    def __init__(self, nodes: int, policy: Policy, now_s: float) -> None:
        self.start: Start | None = None
        """Known once all hosts have come."""
        self.membership: Membership | None = None
        """Membership of the present epoch, with the start."""
        self.outcome: Outcome | None = None
        self.hosts: dict[int, HostReport] = {}
        """Last reports, by node rank."""
        self.lost: dict[int, str] = {}
        """Why hosts count as dead, by node rank; not those that have been replaced since."""
        self.turns: dict[int, int] = {}
        """Node ranks that other hosts have taken, and how often."""
        self.stalled: dict[int, str] = {}
        """What ranks have done that others have waited for in vain, by rank."""
        self._nodes, self._policy, self._begun_s = nodes, policy, now_s
        self._silences: dict[int, Silence] = {}
        self._details: dict[int, str] = {}
        self._silent: set[str] = set()
        """Why hosts have ever counted as dead."""
        self._done_before: set[int] = set()
        """Ranks that ended with status 0 on hosts that have been replaced."""
        self._ready: dict[int, Readiness] = {}
        """Processes in the places of ranks that had left, by rank, of which no membership tells yet."""

    @property
    def vacant(self) -> tuple[int, ...]:
        """Node ranks that other hosts may take: not that of the job's store."""
        if self.membership is None or self.outcome is not None:
            return ()
        return tuple(node for node, report in self.hosts.items() if node and (node in self.lost or report.left))

    def replace(self, node_rank: int, report: HostReport, now_s: float) -> None:
        """Go on with another host in the place of one that is `vacant`, by its first report."""
        before = self.hosts[node_rank]
        self._done_before |= {self._rank(node_rank, each.local_rank) for each in before.endings if not each.failed}
        self.turns[node_rank] = self.turns.get(node_rank, 0) + 1
        self.lost.pop(node_rank, None)
        self.hosts[node_rank], self._silences[node_rank] = report, Silence(now_s)

    def observe(self, node_rank: int, report: HostReport, now_s: float) -> None:
        """Look at a host's report, new or not. One that counts as dead stays so."""
        self.hosts[node_rank] = report
        silent_s = self._silences.setdefault(node_rank, Silence(now_s)).observe(report.beat, now_s)
        if silent_s > self._policy.heartbeat_timeout_s and not report.left:
            text = f"host {report.host} (node rank {node_rank}) has been silent for {silent_s:.1f} s"
            self._silent.add(self.lost.setdefault(node_rank, text))

    @property
    def away(self) -> list[Departure]:
        """Departures of ranks that do not stand ready again."""
        if self.membership is None:
            return []
        live = set(self.membership.live)
        return [self.membership.departure(rank) for rank in range(self.membership.world_size) if rank not in live]

    def ready(self, departure: Departure, ready: Readiness) -> None:
        """Look at what the process in the place of a rank that had left has said, new or not."""
        if ready.left == departure.epoch:
            self._ready[departure.rank] = ready

    def decide(self, now_s: float, time_s: float) -> None:
        """Draw the consequences. `time_s`: Unix time."""
        if self.outcome is None:
            self.outcome = self._begin(now_s, time_s) if self.membership is None else self._go_on(time_s)

    @property
    def all_left(self) -> bool:
        """True once no host is waited for any more."""
        return all(node in self.lost or report.left for node, report in self.hosts.items())

    def _begin(self, now_s: float, time_s: float) -> Outcome | None:
        for node, report in self.hosts.items():
            if cause := self.lost.get(node) or _departing(node, report):
                return Outcome(True, f"{cause}, before all hosts had come")
        missing = [node for node in range(self._nodes) if node not in self.hosts]
        waited_s = now_s - self._begun_s
        if missing:
            if waited_s <= self._policy.join_timeout_s:
                return None
            nodes = ", ".join(map(str, missing))
            text = f"{len(missing)} of {self._nodes} hosts (node ranks {nodes}) have not come within {waited_s:.0f} s: "
            return Outcome(True, text + "see whether their launchers run, with the same endpoint, run id and --nnodes")
        sizes = [self.hosts[node].nproc for node in range(self._nodes)]
        world_size = sum(sizes)
        if world_size < self._policy.min_ranks:
            return Outcome(True, f"--min-ranks is {self._policy.min_ranks}, but the job has {world_size} ranks")
        self.start = Start(tuple(sum(sizes[:node]) for node in range(self._nodes)), world_size)
        self.membership = Membership(0, world_size, time_s, ())
        return None

    def _go_on(self, time_s: float) -> Outcome | None:
        assert self.membership is not None
        for node, report in self.hosts.items():
            if (cause := _departing(node, report)) and (node == 0 or not self._policy.no_kill):
                return Outcome(True, f"{cause}, so all ranks have been ended")
        departed = sorted(self._departures(time_s), key=lambda each: each.at_s)
        if departed and not self._policy.no_kill:
            return Outcome(True, self._failures(departed))
        if departed:
            left = self.membership.left + tuple(departed)
            self.membership = replace(self.membership, epoch=departed[0].epoch, at_s=time_s, left=left)
        elif self._ready:
            epoch = self.membership.epoch + 1
            earlier = (each for each in self.membership.arrived if each.rank not in self._ready)
            arrivals = (Arrival(rank, epoch, ready) for rank, ready in sorted(self._ready.items()))
            arrived = (*earlier, *arrivals)
            self.membership = replace(self.membership, epoch=epoch, at_s=time_s, arrived=arrived)
            self._ready.clear()
        live = set(self.membership.live)
        if len(live) < self._policy.min_ranks:
            text = f"{len(live)} ranks are left, fewer than the {self._policy.min_ranks} that the job goes on with"
            return Outcome(True, f"{text} (--min-ranks): {self._failures(self.membership.left)}")
        if live - self._finished():
            return None
        away = self.away
        return Outcome(False, f"ended well, but without {len(away)} ranks: {self._failures(away)}" if away else "")

    def _departures(self, time_s: float) -> Iterator[Departure]:
        """Ranks that have left since the present epoch began."""
        assert self.membership is not None
        epoch, live = self.membership.epoch + 1, set(self.membership.live)
        starts = {each.rank: each.ready.start for each in self.membership.arrived}
        for node, report in self.hosts.items():
            ended = {(each.local_rank, each.start): each for each in report.endings}
            for local_rank in range(report.nproc):
                rank = self._rank(node, local_rank)
                ending = ended.get((local_rank, starts.get(rank, 0)))
                if rank not in live or rank in self._done_before:
                    continue
                if ending is not None and ending.failed:
                    before = f"{self.stalled.pop(rank)}, and " if rank in self.stalled else ""
                    self._details[rank] = _details(ending, report)
                    after = f", after its launcher {report.leaving}" if ending.asked else ""
                    yield Departure(rank, epoch, report.host, f"{before}{ending.why}{after}", ending.at_s)
                elif ending is None and node in self.lost:
                    yield Departure(rank, epoch, report.host, self.lost[node], time_s)
                elif ending is None and report.left:
                    yield Departure(rank, epoch, report.host, f"its launcher {report.leaving}", time_s)

    def _finished(self) -> set[int]:
        return self._done_before | {
            self._rank(node, each.local_rank)
            for node, report in self.hosts.items()
            for each in report.endings
            if not each.failed
        }

    def _rank(self, node: int, local_rank: int) -> int:
        assert self.start is not None
        return self.start.first_ranks[node] + local_rank

    def _failures(self, departed: tuple[Departure, ...] | list[Departure]) -> str:
        """The first in full, the others by number."""
        first, *others = departed
        also = f"; then ranks {', '.join(str(each.rank) for each in others)}" if others else ""
        what = f"rank {first.rank} on host {first.host} was the first to end: it {first.why}"
        if first.why in self._silent:
            what = f"{first.why}: its ranks, of which {first.rank} is the first, count as dead"
        return f"{what}{also}{self._details.get(first.rank, '')}"


def _departing(node: int, report: HostReport) -> str:
    """Why a host ends its ranks of its own accord, if it does."""
    return f"the launcher of host {report.host} (node rank {node}) {report.leaving}" if report.leaving else ""


def _details(ending: Ending, report: HostReport) -> str:
    return f"\n  local rank {ending.local_rank} of {report.host}, process {ending.process_id}\n{ending.details}"
