# SPDX-License-Identifier: Apache-2.0
"""The host path: messages leave the training process through shared memory, and a delegate does the rest.

Over shm the two training processes share a ring, so a message costs two copies; over tcp each shares rings with its own
delegate. Nothing is sent on a stream of the device: a slow transfer never sits in front of compute.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from adaptra_megatron.transport.affinity import started_on
from adaptra_megatron.transport.bell import Bell
from adaptra_megatron.transport.control import Start
from adaptra_megatron.transport.cuda_device import Device
from adaptra_megatron.transport.dual_link import DualLink
from adaptra_megatron.transport.host_link import HostLink
from adaptra_megatron.transport.host_settings import HostSettings
from adaptra_megatron.transport.host_setup import Meeting, meet
from adaptra_megatron.transport.line_messages import NoteCame
from adaptra_megatron.transport.lines import Lines
from adaptra_megatron.transport.link_setup import LinkMaker
from adaptra_megatron.transport.messages import MessageKey, MessageTimes, TensorSpecification, TransportError
from adaptra_megatron.transport.note_mail import NoteMail
from adaptra_megatron.transport.pair_group import LinkGroup
from adaptra_megatron.transport.paths import LinkCounters, Path, PathSettings, ProbeTimes
from adaptra_megatron.transport.placement import agree_on_host_path, job_secret
from adaptra_megatron.transport.rendezvous import Rendezvous
from adaptra_megatron.transport.supervisor import Link, Supervisor
from adaptra_megatron.transport.verbs_wire import SLOT_NBYTES as VERBS_SLOT_NBYTES

logger = logging.getLogger("adaptra_megatron.transport.host_path")

COMES_UP_S = 60.0
"""How long the links may take, once all stages have met: a delegate has as long to import what it needs."""
_GREETING_NBYTES = 1 << 20


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
        rendezvous: Rendezvous,
        chunks: int,
        settings: HostSettings,
        paths: PathSettings | None = None,
        maker: LinkMaker | None = None,
        device: Device | None = None,
    ) -> None:
        """Called by all stages of the pipeline at the same point; returns when all links are up and have greeted.

        `chunks`: model chunks per stage; with one, nothing goes between the last stage and the first. `paths` and
        `maker`: when to use the device path, and what makes it; None: never. `device`: of the tensors; None: the CPU.
        Raises TransportError on all stages alike if one cannot take part, or a link does not come up.
        """
        self.stage = rendezvous.stage
        self.rendezvous = rendezvous
        self._maker, self._paths, self._device = maker, paths, device
        self._timeout_s, self._sizes_vary = settings.timeout_s, False
        self._sent: list[MessageTimes] = []
        self._received: list[MessageTimes] = []
        self._peer_of: dict[MessageKey, int] = {}
        self._came_by: dict[int, Path] = {}
        self._bell = Bell()
        self._links: dict[int, HostLink] = {}
        self._supervisor: Supervisor | None = None
        self._lines: Lines | None = None
        peers = neighbours(self.stage, rendezvous.stages, wrap=chunks > 1)
        meeting = meet(rendezvous, peers, settings)
        self._transports = meeting.transports
        limit_s = min(COMES_UP_S, settings.timeout_s)
        try:
            self._together("started", lambda: self._bring_up(meeting, settings))
            self._together("greeted", lambda: self._greet(limit_s))
        except BaseException:
            self._close_links()
            raise
        for link in self._links.values():
            if isinstance(link, DualLink):
                link.begin()
        logger.info("stage %d: the host path is up: %s", self.stage, self._transports)
        logger.debug("stage %d: it copies on CPUs %s", self.stage, sorted(settings.cpus) or "of any NUMA node")

    def _together(self, name: str, step: Callable[[], None]) -> None:
        """A step of all stages. Raises TransportError on all of them where it fails on one, whatever it raises."""
        failure: Exception | None = None
        try:
            step()
        except Exception as cause:
            failure = cause
        agree_on_host_path(self.rendezvous, name, failure)

    def _bring_up(self, meeting: Meeting, settings: HostSettings) -> None:
        self._secret = job_secret(dist.distributed_c10d._get_default_store())
        of_link = {peer: _settings_for(transport, settings) for peer, transport in meeting.transports.items()}
        try:
            with started_on(settings.cpus):
                self._lines = lines = Lines(
                    self.stage,
                    self.rendezvous.name,
                    bytes.fromhex(meeting.pipeline),
                    self._secret,
                    list(meeting.line_listeners.values()),
                    {peer: meeting.place(peer) for peer in of_link},
                )
                for peer in of_link:
                    self._links[peer] = self._make_link(peer, of_link[peer])
                self._supervisor = Supervisor(
                    _start(meeting, settings, self._secret),
                    list(meeting.listeners.values()),
                    [
                        Link(link, meeting.request(peer, settings), of_link[peer].slots, of_link[peer].slot_nbytes)
                        for peer, link in self._links.items()
                    ],
                )
                lines.begin(self._links)
        except BaseException:
            meeting.close()
            raise

    def _make_link(self, peer: int, settings: HostSettings) -> HostLink:
        stage, maker, lines = self.stage, self._maker, self._lines
        assert lines is not None
        if self._paths is None or maker is None:
            return HostLink(stage, peer, settings, self._device, self._bell)

        def make_group(as_sender: bool, session: int, timeout_s: float) -> LinkGroup:
            return maker.make((stage, peer) if as_sender else (peer, stage), session, timeout_s)

        mail = NoteMail(lambda number, packet: lines.say(peer, NoteCame(number, packet.decode())))
        return DualLink(stage, peer, settings, self._paths, make_group, mail, self._device, self._bell)

    def _greet(self, limit_s: float) -> None:
        """A tensor each way over the host path of each link, compared bit by bit. Raises TransportError."""
        deadline_s = time.monotonic() + limit_s
        greeting = torch.arange(_GREETING_NBYTES, dtype=torch.int32).remainder_(251).to(torch.uint8)
        if self._device is not None:
            greeting = greeting.to(self._device.device)
        for link in self._links.values():
            link.wait_until_up(deadline_s)
            link.send_greeting(greeting)
        for link in self._links.values():
            link.receive_greeting(greeting, deadline_s)

    def describe(self, specification: TensorSpecification) -> None:
        """Messages describe themselves here; only where they live matters. Raises TransportError for another device."""
        device = torch.device("cpu") if self._device is None else self._device.device
        if specification.device != device:
            raise TransportError(
                f"stage {self.stage}: the host path was made for tensors on {device}, not on {specification.device}; "
                "use --adaptra-host-transport off"
            )
        self._sizes_vary = specification.shape is None
        for link in self._links.values():
            link.describe(specification)

    def post_send(self, key: MessageKey, peer: int, tensor: torch.Tensor) -> None:
        self._sent.append(self._links[peer].post_send(key, tensor))

    def post_receive(self, key: MessageKey, peer: int) -> None:
        self._links[peer].post_receive(key)
        self._peer_of[key] = peer
        if self._sizes_vary and not self.sees_arrivals(peer):
            # A link's thread launches what follows a header: nothing may come between them.
            self.wait_any([key], time.monotonic() + self._timeout_s)

    def ready(self, key: MessageKey) -> bool:
        return self._links[self._peer_of[key]].ready(key)

    def sees_arrivals(self, peer: int) -> bool:
        """Threads of a link see what comes by either path, but on a GPU the device path has kernels in its queues."""
        return self._device is None or not self._links[peer].uses_device

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
        answer = self._delegate.counters(timeout_s)
        refused = {} if answer is None else answer.refused
        return HostCounters(self.delegate_starts, refused, self.link_counters())

    def link_counters(self) -> dict[int, LinkCounters]:
        """By peer. Never waits."""
        return {
            peer: LinkCounters(
                transport=self._delegate.transport(peer) or self._transports[peer],
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
        """The bursts that have ended since the last call, of all links."""
        links = [link for link in self._links.values() if isinstance(link, DualLink)]
        return [probe for link in links for probe in link.take_probes()]

    @property
    def delegate_starts(self) -> int:
        """How often this stage's delegate was started: 1 unless it died."""
        return self._delegate.starts

    @property
    def delegate_process_id(self) -> int | None:
        """Of the running delegate; None between two."""
        return self._delegate.process_id

    def say_failed(self, cause: str) -> None:
        """Tell all stages of the pipeline that this one ends with an error. Returns at once."""
        if self._lines is not None:
            self._lines.fail(cause)

    def close(self, *, drained: bool = True) -> bool:
        self._close_links()
        return self._maker is None or self._maker.close()

    def _close_links(self) -> None:
        for link in self._links.values():
            link.close()
        if self._supervisor is not None:
            self._supervisor.close()
        if self._lines is not None:
            self._lines.close()

    @property
    def _delegate(self) -> Supervisor:
        assert self._supervisor is not None, "there is one once the links have come up"
        return self._supervisor


def _settings_for(transport: str, settings: HostSettings) -> HostSettings:
    """An RNIC's work per slot is much the same whatever its size: over verbs, slots are larger."""
    slot_nbytes = max(settings.slot_nbytes, VERBS_SLOT_NBYTES) if transport == "verbs" else settings.slot_nbytes
    return replace(settings, transport=transport, slot_nbytes=slot_nbytes)


def neighbours(stage: int, stages: int, *, wrap: bool) -> list[int]:
    """Stages that `stage` exchanges messages with; `wrap`: the first and the last are neighbours too."""
    candidates = {stage - 1, stage + 1}
    if wrap:
        candidates = {candidate % stages for candidate in candidates}
    return sorted(candidate for candidate in candidates if 0 <= candidate < stages and candidate != stage)


def _start(meeting: Meeting, settings: HostSettings, secret: bytes) -> Start:
    return Start(
        stage=meeting.stage,
        pipeline=meeting.pipeline,
        secret=secret.hex(),
        listeners=list(meeting.listeners),
        handshake_s=settings.handshake_s,
        stall_s=settings.stall_s,
        max_message_nbytes=settings.max_message_nbytes,
        rnics=list(settings.rnics),
    )
