# SPDX-License-Identifier: Apache-2.0
"""One rank's part in the choice of paths: it sends as decided, measures what is asked for, and says what is broken."""

from __future__ import annotations

from adaptra_megatron.runtime.decisions import Decision
from adaptra_megatron.runtime.measurements import BrokenPath
from adaptra_megatron.transport.messages import TwoPathTransport
from adaptra_megatron.transport.paths import Path, ProbeTimes


class LinkSteering:
    """Of the links that this rank sends over. Nothing here waits for a peer."""

    def __init__(self, transport: TwoPathTransport, pipeline: int, preferred: Path) -> None:
        """`pipeline`: the first global rank of this rank's pipeline."""
        self._transport, self._pipeline, self._preferred = transport, pipeline, preferred
        self._taken: dict[int, Path] = {}

    def steer(self, decision: Decision) -> None:
        """Take the paths of `decision`. Said again, it changes nothing."""
        diverted = {link.target for link in decision.diverted if self._is_ours(link.pipeline, link.source)}
        for peer in self._transport.peers:
            path = self._preferred.other if peer in diverted else self._preferred
            if self._taken.get(peer, self._preferred) is not path:
                self._transport.prefer(peer, path)
                self._taken[peer] = path

    def measure(self, decision: Decision) -> None:
        """Begin to measure the paths that `decision` asks about."""
        for link in decision.probed:
            if self._is_ours(link.pipeline, link.source):
                self._transport.measure(link.target)

    def take_probes(self) -> list[ProbeTimes]:
        """What has been measured since the last call."""
        return self._transport.take_probes()

    def broken(self) -> list[BrokenPath]:
        """What cannot be taken at present."""
        found = []
        for peer, link in self._transport.link_counters().items():
            if link.paths is not None:
                causes = {Path.DEVICE: link.paths.device_down, Path.HOST: link.paths.host_down}
                found += [BrokenPath(peer, path, cause) for path, cause in causes.items() if cause is not None]
        return found

    def _is_ours(self, pipeline: int, source: int) -> bool:
        return (pipeline, source) == (self._pipeline, self._transport.stage)
