# SPDX-License-Identifier: Apache-2.0
"""The host path: messages leave the training process through shared memory, and a delegate does the rest.

Over shm the two training processes share a ring, so a message costs two copies; over tcp each shares rings with its own
delegate. Nothing is sent on a stream of the device: a slow transfer never sits in front of compute.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from adaptra_megatron.transport.bell import Bell
from adaptra_megatron.transport.control import Start
from adaptra_megatron.transport.cuda_device import CudaDevice
from adaptra_megatron.transport.dual_link import DualLink
from adaptra_megatron.transport.host_link import CPU, HostLink
from adaptra_megatron.transport.host_settings import HostSettings
from adaptra_megatron.transport.host_setup import Meeting, meet
from adaptra_megatron.transport.messages import MessageKey, MessageTimes, TensorSpecification, TransportError
from adaptra_megatron.transport.nccl_pair_group import NcclPairGroup, gpu_identity
from adaptra_megatron.transport.note_mail import NoteMail
from adaptra_megatron.transport.pair_group import LinkGroup, PairEnds, PairGroup
from adaptra_megatron.transport.paths import Path, PathCounters, PathSettings, ProbeTimes
from adaptra_megatron.transport.placement import job_secret
from adaptra_megatron.transport.supervisor import Link, Supervisor
from adaptra_megatron.transport.verbs_wire import SLOT_NBYTES as VERBS_SLOT_NBYTES

logger = logging.getLogger("adaptra_megatron.transport.host_path")


@dataclass(frozen=True)
class LinkCounters:
    """What one link has seen."""

    transport: str
    sessions: int
    """How often it came up."""
    doubles: int
    """Messages that came again and were dropped."""
    unacknowledged: int
    paths: PathCounters | None
    """None where there is the host path only."""


@dataclass(frozen=True)
class HostCounters:
    """What the host path of one stage has seen."""

    delegate_starts: int
    refused: dict[str, int]
    """Connections that the present delegate did not let in, by reason; empty if it does not answer."""
    links: dict[int, LinkCounters]
    """By peer."""


class HostTransport:
    """Transport through a delegate process."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        chunks: int,
        settings: HostSettings,
        paths: PathSettings | None = None,
        device: torch.device = CPU,
    ) -> None:
        """Called by all ranks of the pipeline's process group at the same point; returns when all links are up.

        `chunks`: model chunks per stage; with one, nothing goes between the last stage and the first. `paths`: when to
        use the device path; None: never. `device`: of the tensors, with its index.
        Raises TransportError if a link does not come up, on all ranks at once if one cannot take part.
        """
        self._device = device
        self.stage = group.rank()
        self._sent: list[MessageTimes] = []
        self._received: list[MessageTimes] = []
        self._peer_of: dict[MessageKey, int] = {}
        self._came_by: dict[int, Path] = {}
        self._bell = Bell()
        peers = neighbours(self.stage, group.size(), wrap=chunks > 1)
        meeting = meet(group, peers, settings)
        self._transports = meeting.transports
        self._links: dict[int, HostLink] = {}
        of_link = {peer: _settings_for(meeting.transports[peer], settings) for peer in peers}
        try:
            for peer in peers:
                self._links[peer] = self._make_link(group, peer, of_link[peer], paths, meeting.pipeline)
            self._supervisor = Supervisor(
                _start(meeting, settings),
                list(meeting.listeners.values()),
                [
                    Link(link, meeting.request(peer, settings), of_link[peer].slots, of_link[peer].slot_nbytes)
                    for peer, link in self._links.items()
                ],
            )
        except BaseException:
            for link in self._links.values():
                link.close()
            meeting.close()
            raise
        deadline_s = time.monotonic() + settings.timeout_s
        try:
            for link in self._links.values():
                link.wait_until_up(deadline_s)
        except BaseException:
            self.close()
            raise
        logger.info("stage %d: the host path is up: %s", self.stage, self._transports)

    def _make_link(
        self, group: dist.ProcessGroup, peer: int, settings: HostSettings, paths: PathSettings | None, pipeline: str
    ) -> HostLink:
        if paths is None:
            return HostLink(self.stage, peer, settings, self._device, self._bell)
        store: Any = dist.distributed_c10d._get_default_store()
        store = store.clone()
        ours, theirs = f"{self.stage}-{peer}", f"{peer}-{self.stage}"
        ranks = PairEnds(dist.get_global_rank(group, self.stage), dist.get_global_rank(group, peer))

        def make_group(as_sender: bool, session: int, timeout_s: float) -> LinkGroup:
            prefix = f"adaptra/device/{pipeline}/{ours if as_sender else theirs}/{session}"
            ends = ranks if as_sender else PairEnds(ranks.target, ranks.source)
            # A store of its own: whoever waits in a store keeps others waiting.
            own = PrefixStore(prefix, store.clone())
            if self._device.type == "cpu":
                return PairGroup(own, ends, sends=as_sender, timeout_s=timeout_s)
            identity = gpu_identity(self._device)
            return NcclPairGroup(own, ends, CudaDevice(self._device), identity, sends=as_sender, timeout_s=timeout_s)

        mail = NoteMail(store, f"adaptra/notes/{pipeline}/{ours}", f"adaptra/notes/{pipeline}/{theirs}")
        return DualLink(self.stage, peer, settings, paths, make_group, mail, self._device, self._bell)

    def describe(self, specification: TensorSpecification) -> None:
        """Messages describe themselves here; only where they live matters. Raises TransportError for another device."""
        if specification.device != self._device:
            raise TransportError(
                f"stage {self.stage}: the host path was made for tensors on {self._device}, not on "
                f"{specification.device}; use --adaptra-host-transport off"
            )
        for link in self._links.values():
            link.describe(specification)

    def post_send(self, key: MessageKey, peer: int, tensor: torch.Tensor) -> None:
        self._sent.append(self._links[peer].post_send(key, tensor))

    def post_receive(self, key: MessageKey, peer: int) -> None:
        self._links[peer].post_receive(key)
        self._peer_of[key] = peer

    def ready(self, key: MessageKey) -> bool:
        return self._links[self._peer_of[key]].ready(key)

    def sees_arrivals(self, peer: int) -> bool:
        """Threads of a link see what comes by either path, but on a GPU the device path has kernels in its queues."""
        return self._device.type == "cpu" or not self._links[peer].uses_device

    def wait_any(self, keys: Collection[MessageKey], until_s: float) -> bool:
        if any(map(self.ready, keys)):
            return True
        began_s = time.monotonic()
        by_peer: dict[int, list[MessageKey]] = {}
        for key in keys:
            by_peer.setdefault(self._peer_of[key], []).append(key)

        def attend() -> float:
            return min(self._links[peer].attend(few, began_s) for peer, few in by_peer.items())

        return self._bell.wait_for(keys, until_s, self.ready, attend)

    def wait(self, key: MessageKey, deadline_s: float) -> torch.Tensor:
        peer = self._peer_of.pop(key)
        tensor, times = self._links[peer].wait(key, deadline_s)
        self._received.append(times)
        self._came_by[peer] = times.path
        return tensor

    def came_by(self, peer: int) -> Path:
        return self._came_by.get(peer, Path.HOST)

    def flush(self, deadline_s: float) -> None:
        for link in self._links.values():
            link.flush(deadline_s)

    def take_times(self) -> tuple[Sequence[MessageTimes], Sequence[MessageTimes]]:
        sent, self._sent = self._sent, []
        received, self._received = self._received, []
        return sent, received

    def counters(self, timeout_s: float = 5.0) -> HostCounters:
        """For reports and tests; waits for the delegate's answer."""
        answer = self._supervisor.counters(timeout_s)
        refused = {} if answer is None else answer.refused
        return HostCounters(self._supervisor.starts, refused, self.link_counters())

    def link_counters(self) -> dict[int, LinkCounters]:
        """By peer. Waits for nobody."""
        return {
            peer: LinkCounters(
                transport=self._supervisor.transport(peer) or self._transports[peer],
                sessions=link.sessions,
                doubles=link.doubles,
                unacknowledged=link.unacknowledged,
                paths=link.path_counters() if isinstance(link, DualLink) else None,
            )
            for peer, link in self._links.items()
        }

    @property
    def peers(self) -> Sequence[int]:
        """Stages that this one has links to."""
        return list(self._links)

    def prefer(self, peer: int, path: Path) -> None:
        """Send to `peer` by this path while it is healthy; a link with the host path only stays there."""
        link = self._links[peer]
        if isinstance(link, DualLink):
            link.prefer(path)

    def measure(self, peer: int) -> None:
        """Begin to probe the path that messages to `peer` do not take; `take_probes` has the result, some time later.

        A burst of messages of the usual size, one after the other. Nothing happens while that path is down, on a link
        with the host path only, and before the first message. Never waits.
        """
        link = self._links[peer]
        if isinstance(link, DualLink):
            link.measure()

    def take_probes(self) -> list[ProbeTimes]:
        """Of the bursts that have ended since the last call, of all links."""
        links = [link for link in self._links.values() if isinstance(link, DualLink)]
        return [probe for link in links for probe in link.take_probes()]

    @property
    def delegate_starts(self) -> int:
        """How often this stage's delegate was started: 1 unless it died."""
        return self._supervisor.starts

    @property
    def delegate_process_id(self) -> int | None:
        """Of the running delegate; None between two."""
        return self._supervisor.process_id

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._supervisor.close()


def _settings_for(transport: str, settings: HostSettings) -> HostSettings:
    """An RNIC's work per slot is much the same whatever its size: over verbs, slots are larger."""
    if transport != "verbs":
        return settings
    return replace(settings, slot_nbytes=max(settings.slot_nbytes, VERBS_SLOT_NBYTES))


def neighbours(stage: int, stages: int, *, wrap: bool) -> list[int]:
    """Stages that `stage` exchanges messages with; `wrap`: the first and the last are neighbours too."""
    candidates = {stage - 1, stage + 1}
    if wrap:
        candidates = {candidate % stages for candidate in candidates}
    return sorted(candidate for candidate in candidates if 0 <= candidate < stages and candidate != stage)


def _start(meeting: Meeting, settings: HostSettings) -> Start:
    store = dist.distributed_c10d._get_default_store()
    return Start(
        stage=meeting.stage,
        pipeline=meeting.pipeline,
        secret=job_secret(store).hex(),
        listeners=list(meeting.listeners),
        handshake_s=settings.handshake_s,
        stall_s=settings.stall_s,
        max_message_nbytes=settings.max_message_nbytes,
        rnics=list(settings.rnics),
    )
