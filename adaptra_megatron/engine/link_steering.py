# SPDX-License-Identifier: Apache-2.0
"""Apply decisions on paths to one rank's links."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from adaptra_megatron.control.decisions import Decision, Paths
from adaptra_megatron.control.measurements import BrokenPath
from adaptra_megatron.transport.link_paths import Path, ProbeTimes
from adaptra_megatron.transport.message_keys import TwoPathTransport


class FixedPaths:
    """Leaves links on their path, because there is only one path or because nothing decides on paths."""

    def steer(self, paths: Paths) -> None:
        """Switch links to the decided paths. Applying them twice changes nothing."""

    def steer_early(self, decision: Callable[[], Decision | None]) -> None:
        """Switch links to the next iteration's paths if `decision` returns its decision already. Later, once its
        receives are posted, its first messages would still take the old path."""

    def measure(self, paths: Paths) -> None:
        """Start to probe the links that a decision asks for."""

    def take_probes(self) -> list[ProbeTimes]:
        """Return the probes since the last call; peers as stages."""
        return []

    def broken(self) -> list[BrokenPath]:
        """Return the broken paths; peers as stages."""
        return []


class LinkSteering(FixedPaths):
    """Switches the outgoing links of this rank to the decided paths. No call waits for a peer."""

    def __init__(self, transport: TwoPathTransport, ranks: Sequence[int], preferred: Path) -> None:
        """`ranks`: this rank's pipeline, by stage. Links to other ranks keep their path."""
        self._transport, self._ranks, self._preferred = transport, ranks, preferred
        self._taken: dict[int, Path] = {}

    def steer(self, paths: Paths) -> None:
        """See FixedPaths."""
        diverted = {self._ranks[link.target] for link in paths.diverted if self._is_ours(link.pipeline, link.source)}
        for peer in (peer for peer in self._transport.peers if peer in self._ranks):
            path = self._preferred.other if peer in diverted else self._preferred
            if self._taken.get(peer, self._preferred) is not path:
                self._transport.prefer(peer, path)
                self._taken[peer] = path

    def steer_early(self, decision: Callable[[], Decision | None]) -> None:
        """See FixedPaths."""
        early = decision()
        if early is not None and early.paths is not None:
            self.steer(early.paths)

    def measure(self, paths: Paths) -> None:
        """See FixedPaths."""
        for link in paths.probed:
            if self._is_ours(link.pipeline, link.source):
                self._transport.measure(self._ranks[link.target])

    def take_probes(self) -> list[ProbeTimes]:
        """See FixedPaths."""
        probes = [probe for probe in self._transport.take_probes() if probe.peer in self._ranks]
        return [probe._replace(peer=self._ranks.index(probe.peer)) for probe in probes]

    def broken(self) -> list[BrokenPath]:
        """See FixedPaths."""
        found = []
        for peer, link in self._transport.link_counters().items():
            if link.paths is not None and peer in self._ranks:
                causes = {Path.DEVICE: link.paths.device_down, Path.HOST: link.paths.host_down}
                found += [
                    BrokenPath(self._ranks.index(peer), path, cause)
                    for path, cause in causes.items()
                    if cause is not None
                ]
        return found

    def _is_ours(self, pipeline: int, source: int) -> bool:
        return pipeline == self._ranks[0] and self._ranks[source] == self._transport.rank
