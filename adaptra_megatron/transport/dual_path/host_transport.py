# SPDX-License-Identifier: Apache-2.0
"""The host path: messages leave the training process through shared memory, and a delegate carries them on.

Over shm the two training processes share a ring, so a message costs two copies. Over tcp each shares rings with its own
delegate. Nothing is sent on a stream of the device, so a slow transfer never delays computation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.common.log import logger_of
from adaptra_megatron.transport.arrival_signal import ArrivalSignal
from adaptra_megatron.transport.device_session.pair_group import LinkGroup
from adaptra_megatron.transport.dual_path.dual_link import DualLink
from adaptra_megatron.transport.dual_path.link_opener import LinkOpener
from adaptra_megatron.transport.dual_path.two_paths import SecondPath
from adaptra_megatron.transport.gpu.cuda_device import Device
from adaptra_megatron.transport.host_link.link_thread import LinkThreads
from adaptra_megatron.transport.host_settings import HostSettings
from adaptra_megatron.transport.lines.lines import LinkNote
from adaptra_megatron.transport.link_ends import LinkEnds
from adaptra_megatron.transport.link_paths import LinkCounters, Path, PathSettings, ProbeTimes
from adaptra_megatron.transport.message_keys import MessageKey, MessageTimes, TensorSpecification, TransportError
from adaptra_megatron.transport.setup.host_setup import meet
from adaptra_megatron.transport.setup.link_setup import LinkMaker, greeting
from adaptra_megatron.transport.setup.rendezvous import Rendezvous, agree_on_host_path
from adaptra_megatron.transport.setup.rnic_affinity import started_on

logger = logger_of(__name__)

CLOSES_S = 5.0
"""Longest time for closing links that are being opened or taken down."""
COMES_UP_S = 60.0
"""Longest time for links to come up once their ends have met: a delegate has as long to import its modules."""


@dataclass(frozen=True)
class HostCounters:
    """Counters of the host path of one rank."""

    delegate_starts: int
    refused: dict[str, int]
    """Number of connections that the running delegate refused, by reason; empty if it does not answer."""
    links: dict[int, LinkCounters]
    """By peer."""


class HostTransport:
    """Transport over links with a host path (delegates) and, given `maker`, a device path."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        chunks: int,
        settings: HostSettings,
        paths: PathSettings | None = None,
        maker: LinkMaker | None = None,
        device: Device | None = None,
    ) -> None:
        """Bring up and greet all links of this rank's pipeline. Called by all its stages at the same point.

        `chunks`: model chunks per stage; with several, the last stage and the first are linked too. `paths`, `maker`:
        settings and maker of the device path; None: host path only. `device`: of the tensors; None: the CPU. Raises
        TransportError, alike on all stages, if one cannot take part or a link does not come up.
        """
        layout = rendezvous.layout
        self.rank, self._layout, self._settings = layout.rank, layout, settings
        self._maker, self._paths, self._device = maker, paths, device
        self._specification: TensorSpecification | None = None
        self._sent: list[MessageTimes] = []
        self._received: list[MessageTimes] = []
        self._peer_of: dict[MessageKey, int] = {}
        self._last_paths: dict[int, Path] = {}
        self._arrival_signal = ArrivalSignal()
        self._threads = LinkThreads()
        self._links: dict[int, DualLink] = {}
        self._limit_s = min(COMES_UP_S, settings.timeout_s)
        stages = neighbours(rendezvous.stage, rendezvous.stages, wrap=chunks > 1)
        peers = [rendezvous.ranks[stage] for stage in stages]
        setup = meet(rendezvous, peers, settings)
        transports = dict(setup.transports)
        self._opener = LinkOpener(rendezvous.control, layout, setup, settings)
        self.loop = self._opener.loop
        try:
            _together(rendezvous, "started", lambda: self._bring_up(peers))
            _together(rendezvous, "greeted", self._greet)
        except BaseException:
            self._close_links()
            raise
        for link in self._links.values():
            link.begin()
        logger.debug("rank %d: the host path is up: %s", self.rank, transports)
        logger.debug("rank %d: copies run on CPUs %s", self.rank, sorted(settings.cpus) or "of any NUMA node")

    def _bring_up(self, peers: Sequence[int]) -> None:
        with started_on(self._settings.cpus):
            for peer in peers:
                self._links[peer] = self._make_link(peer)
            self._opener.start(self._links.values())

    def _make_link(self, peer: int, opens_s: float = 0.0) -> DualLink:
        ends, maker, lines = LinkEnds(self.rank, peer, self._layout.name), self._maker, self._opener.lines

        def make_group(as_sender: bool, session: int, timeout_s: float) -> LinkGroup:
            directed = (ends.rank, peer) if as_sender else (peer, ends.rank)
            assert maker is not None
            return maker.make(directed, session, timeout_s, link.opening)

        def send_note(number: int, packet: bytes) -> None:
            lines.send(link, LinkNote(number, packet.decode()))

        second = None if self._paths is None or maker is None else SecondPath(self._paths, make_group, send_note)
        link = DualLink(ends, self._settings, self._device, self._arrival_signal, opens_s, second, self._threads)
        return link

    def _greet(self) -> None:
        """Send a tensor each way over the host path of each link and compare it bit by bit. Raises TransportError."""
        deadline_s = time.monotonic() + self._limit_s
        expected = greeting() if self._device is None else greeting().to(self._device.device)
        for link in self._links.values():
            link.wait_until_up(deadline_s)
            link.send_greeting(expected)
        for link in self._links.values():
            link.receive_greeting(expected, deadline_s)

    # Links between any ranks, while the job runs: see TwoPathTransport. All but `abort` are for the training thread.

    def open_link(self, peer: int) -> None:
        link = self._links.get(peer)
        if link is not None and not link.unusable:
            return
        if peer == self.rank or peer not in self._layout.workers:
            raise TransportError(
                f"{self._layout.name(self.rank)} cannot have a link to rank {peer}: it is no other rank"
            )
        self.close_link(peer)
        with started_on(self._settings.cpus):
            link = self._links[peer] = self._make_link(peer, self._limit_s)
        if self._specification is not None:
            link.describe(self._specification)
        self._opener.open(link, self._limit_s)

    def wait_for_link(self, peer: int, deadline_s: float) -> None:
        self._link(peer).wait_until_up(deadline_s)

    def close_link(self, peer: int) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            self._opener.take_down(link, None)
            self._last_paths.pop(peer, None)
            self._peer_of = {key: source for key, source in self._peer_of.items() if source != peer}

    def abort(self, cause: str, peers: Collection[int] | None = None) -> None:
        for link in [link for peer, link in list(self._links.items()) if peers is None or peer in peers]:
            link.ended(cause)
            self._opener.take_down(link, cause)
        self._arrival_signal.look_again()

    def enter(self, control: ControlStore) -> None:
        self._opener.control = control
        if self._maker is not None:
            self._maker.control = control

    def _link(self, peer: int) -> DualLink:
        if (link := self._links.get(peer)) is None:
            names = self._layout.name(self.rank), self._layout.name(peer)
            raise TransportError(f"{names[0]} has no link to {names[1]}: open_link opens one")
        return link

    def describe(self, specification: TensorSpecification) -> None:
        """Set shape, dtype and device of the messages to come. Raises TransportError for another device than the
        links'."""
        device = torch.device("cpu") if self._device is None else self._device.device
        if specification.device != device:
            raise TransportError(
                f"{self._layout.name(self.rank)}: the host path was made for tensors on {device}, not on "
                f"{specification.device}; use --adaptra-host-transport off"
            )
        self._specification = specification
        self._peer_of.clear()  # nothing of an attempt that was given up is waited for any more
        for link in self._links.values():
            link.describe(specification)

    def post_send(self, key: MessageKey, peer: int, tensor: torch.Tensor) -> None:
        self._sent.append(self._link(peer).post_send(key, tensor))

    def post_receive(self, key: MessageKey, peer: int) -> None:
        self._link(peer).post_receive(key)
        self._peer_of[key] = peer
        specification = self._specification
        if specification is not None and specification.shape is None and not self.can_poll(peer):
            # A link's thread launches what follows a header: nothing may come between them.
            self.wait_any([key], time.monotonic() + self._settings.timeout_s)

    def ready(self, key: MessageKey) -> bool:
        return self._links[self._peer_of[key]].ready(key)

    def can_poll(self, peer: int) -> bool:
        """Return whether arrivals can be polled: not while a GPU's device path has kernels in its queues."""
        return self._device is None or not self._link(peer).uses_device

    def wait_any(self, keys: Collection[MessageKey], until_s: float) -> bool:
        if any(map(self.ready, keys)):
            return True
        began_s = time.monotonic()
        by_peer: dict[int, list[MessageKey]] = {}
        for key in keys:
            by_peer.setdefault(self._peer_of[key], []).append(key)

        def attend() -> float:
            return min(self._links[peer].attend(few, began_s) for peer, few in by_peer.items())

        return self._arrival_signal.wait_for(keys, until_s, self.ready, attend)

    def wait(self, key: MessageKey, deadline_s: float) -> torch.Tensor:
        peer = self._peer_of.pop(key)
        tensor, times = self._links[peer].wait(key, deadline_s)
        self._received.append(times)
        self._last_paths[peer] = times.path
        return tensor

    def last_receive_path(self, peer: int) -> Path:
        return self._last_paths.get(peer, Path.HOST)

    def flush(self, deadline_s: float) -> None:
        for link in self._links.values():
            link.flush(deadline_s)

    def take_times(self) -> tuple[Sequence[MessageTimes], Sequence[MessageTimes]]:
        sent, self._sent = self._sent, []
        received, self._received = self._received, []
        return sent, received

    def counters(self, timeout_s: float = 5.0) -> HostCounters:
        """Return counters for reports and tests; waits for the delegate's answer, at most `timeout_s`."""
        answer = self._opener.supervisor.counters(timeout_s)
        refused = {} if answer is None else answer.refused
        return HostCounters(self.delegate_starts, refused, self.link_counters())

    def link_counters(self) -> dict[int, LinkCounters]:
        """Return the counters of each link, by peer. Never waits."""
        return {
            peer: LinkCounters(
                transport=self._opener.transport(peer),
                sessions=link.sessions,
                doubles=link.doubles,
                stale=link.stale,
                unacknowledged=link.unacknowledged,
                paths=link.path_counters(),
            )
            for peer, link in self._links.items()
        }

    @property
    def peers(self) -> Sequence[int]:
        """Ranks to which this rank has links."""
        return list(self._links)

    def prefer(self, peer: int, path: Path) -> None:
        """Prefer `path` for messages to `peer` while it is healthy; without a device path nothing changes."""
        self._links[peer].prefer(path)

    def measure(self, peer: int) -> None:
        """Begin to probe the unused path to `peer` by a burst of messages of the usual size.

        `take_probes` returns the times later. Nothing happens while that path is down, on a link without a device path,
        and before the first message. Never waits.
        """
        self._links[peer].measure()

    def take_probes(self) -> list[ProbeTimes]:
        """Return the probe bursts of all links that have ended since the last call."""
        return [probe for link in self._links.values() for probe in link.take_probes()]

    @property
    def delegate_starts(self) -> int:
        """Number of times this rank's delegate was started: 1 unless it failed."""
        return self._opener.supervisor.starts

    @property
    def delegate_process_id(self) -> int | None:
        """Process id of the running delegate; None while none runs."""
        return self._opener.supervisor.process_id

    def report_failure(self, cause: str) -> None:
        """Report to all peers that this rank ends with an error; they pass it on. Returns at once."""
        self._opener.lines.fail(cause)

    def close(self, *, drained: bool = True) -> bool:
        self._close_links()
        return self._maker is None or self._maker.close()

    def _close_links(self) -> None:
        self._opener.close(self._links.values(), CLOSES_S)


def _together(rendezvous: Rendezvous, name: str, step: Callable[[], None]) -> None:
    """Run a step on all stages. If it fails on one, with any error, all raise TransportError."""
    failure: Exception | None = None
    try:
        step()
    except Exception as cause:
        failure = cause
    agree_on_host_path(rendezvous, name, failure)


def neighbours(stage: int, stages: int, *, wrap: bool) -> list[int]:
    """Return the stages linked to `stage`; `wrap`: the first and the last are linked too."""
    candidates = {stage - 1, stage + 1}
    if wrap:
        candidates = {candidate % stages for candidate in candidates}
    return sorted(candidate for candidate in candidates if 0 <= candidate < stages and candidate != stage)
