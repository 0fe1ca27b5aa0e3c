# SPDX-License-Identifier: Apache-2.0
"""A link with two paths: messages take the device path or the host path and, when one dies, the other.

The two directions are independent: the Outlet at the sending stage decides, the Inlet at the receiving stage follows.
Both are bookkeeping; here is heard what they have to know, and what they ask for is passed on to the link's two sides.
Notes between them go by the host path, and by the link's line while that is down. What may take time (sending on the
device path, making and ending its sessions) happens without the lock.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence

import torch

from adaptra_megatron.transport._ring import Ring
from adaptra_megatron.transport.arrivals import Arrival
from adaptra_megatron.transport.bell import Bell
from adaptra_megatron.transport.cuda_device import Computed, Device, is_computed
from adaptra_megatron.transport.device_path import DevicePath, DeviceWork, MakeGroup
from adaptra_megatron.transport.dual_link_device import DeviceSide
from adaptra_megatron.transport.dual_link_host import HostSide, confirmation
from adaptra_megatron.transport.dual_link_keeper import Keeper
from adaptra_megatron.transport.host_link import HostLink
from adaptra_megatron.transport.host_link_state import GiveUp
from adaptra_megatron.transport.host_settings import HostSettings
from adaptra_megatron.transport.inlet import Inlet, InletEffects
from adaptra_megatron.transport.messages import MessageKey, MessageTimes, TensorSpecification, TransportError
from adaptra_megatron.transport.note_mail import NoteMail
from adaptra_megatron.transport.notes import FromSender, HostProbed, Note, Open, Received, decode_note
from adaptra_megatron.transport.outlet import Outlet, OutletEffects
from adaptra_megatron.transport.paths import Path, PathCounters, PathSettings, ProbeTimes
from adaptra_megatron.transport.probes import HostProber

logger = logging.getLogger("adaptra_megatron.transport.dual_link")


class DualLink(HostLink):
    """Both directions between this stage and `peer`, each on either path. Used, and brought up, as a HostLink is."""

    def __init__(
        self,
        stage: int,
        peer: int,
        settings: HostSettings,
        paths: PathSettings,
        make_group: MakeGroup,
        mail: NoteMail,
        device: Device | None = None,
        bell: Bell | None = None,
    ) -> None:
        super().__init__(stage, peer, settings, device, bell)
        self._paths, self._mail = paths, mail
        self._outlet: Outlet[Computed] = Outlet(paths, lambda message: message.tensor.nbytes, is_computed)
        self._inlet: Inlet[TensorSpecification] = Inlet(paths)
        self._specification = TensorSpecification((), torch.float32, torch.device("cpu"))
        self._wait_began_s = math.inf
        self._usual_nbytes = 0
        self._measured: list[ProbeTimes] = []
        limits = {"meeting_s": paths.probe_limit_s, "timeout_s": settings.timeout_s}
        self._device = DevicePath(make_group, self, **limits)
        self._device_side = DeviceSide(self._state, self._outlet, self._inlet, self._device)
        self._host_side = HostSide(self._state, self._outbox, self._copies, self._writer, self._arrivals.due, mail)
        self._host_probes = HostProber(peer, paths.measuring_probes, self._host_side.send_probe)
        self._keeper = Keeper(self._state, mail, self._device_side, self)
        self._begun = False

    # What the training thread calls.

    def begin(self) -> None:
        """Bring up the device path too. Until then, all goes by the host path."""
        self._begun = True
        self._keeper.start()

    def prefer(self, path: Path) -> None:
        """Send by this path while it is healthy, from the next agreed message on."""
        with self._lock:
            self._outlet.prefer(path)
            self._keeper.wake()

    def measure(self) -> None:
        """Probe the path that messages do not take, unless it is being probed, with messages of the usual size."""
        if not self._usual_nbytes:
            return
        with self._lock:
            if self._outlet.path is Path.HOST:
                self._outlet.measure(self._usual_nbytes)
            elif not (self._host_probes.under_way or self._outbox.probing) and self._state.session is not None:
                nothing = torch.empty(self._usual_nbytes, dtype=torch.uint8, device=self._copies.device)
                self._host_probes.begin(Computed(nothing, None), time.monotonic())  # its bytes mean nothing
            work = self._due_here()
        self._device_side.do(work)

    def take_probes(self) -> list[ProbeTimes]:
        """Of the bursts that ended since the last call."""
        with self._lock:
            measured, self._measured = self._measured, []
        return measured

    def path_counters(self) -> PathCounters:
        """For reports and tests."""
        with self._lock:
            by_path = self._outlet.by_path
            down_since_s = self._health.down_since_s
            down = down_since_s is not None and time.monotonic() - down_since_s > self._paths.host_patience_s
            return PathCounters(
                path=self._outlet.path,
                sent_by_device=by_path[Path.DEVICE],
                sent_by_host=by_path[Path.HOST],
                switches=self._outlet.switches,
                sessions_lost=self._outlet.failures + self._inlet.deaths,
                device_down=self._outlet.given_up,
                host_down=self._health.cause if down else None,
            )

    @property
    def uses_device(self) -> bool:
        with self._lock:
            return self._outlet.path is Path.DEVICE or self._outlet.retained > 0 or self._inlet.in_use

    def post_send(self, key: MessageKey, tensor: torch.Tensor) -> MessageTimes:
        outgoing = self._outgoing(key, tensor)
        now_s = time.monotonic()
        with self._lock:
            if not self._device_lives(self._outlet.device_healthy) and now_s >= self._health.broken_from_s():
                raise self._error("could not send", key, now_s, now_s, receiving=False)
            self._usual_nbytes = tensor.nbytes
            message, path = self._outlet.post(key, outgoing)
            if path is Path.HOST:
                self._writer.enqueue(key, self._copies.stage(outgoing), message.number, now_s)
            work = self._due_here()
        self._device_side.do(work)
        return MessageTimes(key, self._peer, now_s, now_s, tensor.nbytes, path)

    def describe(self, specification: TensorSpecification) -> None:
        with self._lock:
            self._specification = specification

    def post_receive(self, key: MessageKey) -> None:
        now_s = time.monotonic()
        with self._lock:
            alone = not self._device_lives(self._inlet.alive)
            if alone and key not in self._arrivals and now_s >= self._health.broken_from_s():
                raise self._error("waited for", key, now_s, now_s, receiving=True)
            self._inlet.post(key, self._specification)
            self._ask_for(key, now_s)
            work = self._due_here()
        self._device_side.do(work)

    def attend(self, keys: Sequence[MessageKey], since_s: float) -> float:
        self._wait_began_s = since_s
        return super().attend(keys, since_s)

    def wait(self, key: MessageKey, deadline_s: float) -> tuple[torch.Tensor, MessageTimes]:
        self._wait_began_s = time.monotonic()
        return super().wait(key, deadline_s)

    def close(self) -> None:
        super().close()  # says good-bye: what the peer then sees of the device path is no failure
        with self._lock:
            self._keeper.wake()
        if self._begun:
            self._keeper.join(self._paths.probe_limit_s + 1.0)
        self._device.close()

    # What the line tells.

    def line_up(self) -> None:
        super().line_up()
        with self._lock:
            self._mail.line_renewed()
            self._keeper.wake()

    def note_came(self, number: int, packet: bytes) -> int:
        with self._lock:
            try:
                self.heard(number, packet)
            except ValueError as cause:
                self._health.fail(f"stage {self._peer} sent what cannot be: {cause}")
                self._state.tell_waiting()
            return self._mail.heard_below

    def noted(self, below: int) -> None:
        with self._lock:
            self._mail.noted(below)

    # What the supervisor calls.

    def connected(self, outbound: Ring, inbound: Ring, give_up: GiveUp) -> None:
        super().connected(outbound, inbound, give_up)
        with self._lock:
            self._inlet.confirm_again()
            self._host_probes.drop()  # what was under way tells how long the link was down
            self._settle_effects()
            self._keeper.wake()

    def disconnected(self, cause: str) -> None:
        super().disconnected(cause)
        with self._lock:
            self._keeper.wake()

    # What the host path tells and asks, with the lock held.

    def _acknowledged(self, sequence: int) -> None:
        if (confirmed := confirmation(sequence)) is not None:
            self._confirmed(*confirmed)
            return
        message = self._outbox.acknowledge(sequence)
        if message is not None and message.key is None and not message.probe:
            self._mail.acknowledged(message.number)

    def heard(self, number: int, packet: bytes) -> None:
        now_s = time.monotonic()
        for readable in self._mail.take(number, packet):
            note = decode_note(readable)
            try:
                self._heard(note, now_s)
            except (AssertionError, LookupError) as cause:
                raise ValueError(f"{note}, which does not fit what was said before") from cause
        self._settle_effects()
        self._keeper.wake()

    def _heard(self, note: Note, now_s: float) -> None:
        if isinstance(note, FromSender):
            self._inlet.heard(note, now_s)
        elif isinstance(note, HostProbed):
            self._measured += self._host_probes.answered(note.number, note.arrived_s, now_s)
        elif isinstance(note, Received):
            self._confirmed(note.session, note.count)
        else:
            self._outlet.heard(note, now_s)

    def _probed(self, number: int, arrived_s: float) -> None:
        self._host_side.say(HostProbed(number, arrived_s), time.monotonic())

    def _all_sent(self) -> bool:
        return not len(self._outbox) and not self._outlet.retained

    def given_up_from_s(self, key: MessageKey | None) -> float:
        device = self._outlet.device_healthy and not len(self._outbox) if key is None else self._inlet.expects(key)
        return math.inf if self._device_lives(device) else self._health.broken_from_s()

    def _device_lives(self, usable: bool) -> bool:
        return usable and not self._health.lost

    def look_again_s(self, key: MessageKey | None, now_s: float) -> float:
        look_again_s = now_s + self._paths.suspicion_s
        if key is not None and self._inlet.expects(key):
            look_again_s = min(look_again_s, self._inlet.suspect(self._wait_began_s, now_s))
            self._settle_effects()
            if self._device_side.pending:
                self._keeper.wake()
        return look_again_s

    def _not_received(self, key: MessageKey, since_s: float, now_s: float) -> TransportError:
        return self._error("waited for", key, since_s, now_s, receiving=True)

    def _not_sent(self, now_s: float) -> TransportError:
        oldest = self._outbox.oldest()
        key, since_s = (oldest.key, oldest.posted_s) if oldest is not None else (self._outlet.oldest_retained(), now_s)
        assert key is not None
        return self._error("could not send", key, since_s, now_s, receiving=False)

    def _error(self, doing: str, key: MessageKey, since_s: float, now_s: float, *, receiving: bool) -> TransportError:
        half = self._inlet if receiving else self._outlet
        carries = self._inlet.carries if receiving else self._outlet.path is Path.DEVICE
        alive = self._inlet.alive if receiving else self._outlet.device_healthy
        also = f"the device path is {'up' if alive else 'down: ' + half.cause}"
        if self._health.lost:
            also = ""
        elif alive and not carries:
            also += ", but the two stages could not agree to change to it"
        return self._health.error(doing, key, since_s, now_s, receiving=receiving, also=also)

    # Effects: those on the host path at once, those on the device path once somebody does them without the lock.

    def _settle_effects(self) -> None:
        """The caller holds the lock."""
        now_s = time.monotonic()
        outlet, self._outlet.effects = self._outlet.effects, OutletEffects()
        inlet, self._inlet.effects = self._inlet.effects, InletEffects()
        for note in (*outlet.notes, *inlet.notes):
            self._host_side.say(note, now_s)
            if isinstance(note, Open):
                logger.info("link %d->%d: messages go by the device path", self._stage, self._peer)
        if inlet.confirm is not None:
            self._host_side.confirm(*inlet.confirm, now_s)
        if outlet.measured is not None:
            self._measured += outlet.measured.times(self._peer)
        self._host_side.move(outlet, now_s)
        self._device_side.add(outlet, inlet, header=self._specification.shape is None)

    def _confirmed(self, session: int, received: int) -> None:
        self._outlet.confirmed(session, received)
        self._device.confirmed(session, received)
        if self._flushing and self._all_sent():
            self._state.tell_waiting()
        if not self._outlet.device_healthy:
            self._keeper.wake()  # these may have been the probes

    def _due_here(self) -> DeviceWork:
        """What the calling thread is to do at once; the rest is the keeper's. The caller holds the lock."""
        self._settle_effects()
        work = self._device_side.take_prompt()
        if self._device_side.pending:
            self._keeper.wake()
        return work

    # What the device path tells, from its threads.

    def device_made(self, as_sender: bool, session: int) -> None:
        with self._lock:
            if as_sender:
                self._outlet.made(session, time.monotonic())
            else:
                self._inlet.made(session)
            self._settle_effects()
            self._keeper.wake()

    def device_arrived(self, session: int, tensor: torch.Tensor, arrived_s: float) -> None:
        with self._lock:
            number = self._inlet.arrived(session, tensor.nbytes, arrived_s)
            if number is not None and number >= 0:
                self._deliver(self._inlet.key(number), Arrival(None, self._copies.receive_on_device(tensor), arrived_s))
            self._settle_effects()
            if self._device_side.pending:
                self._keeper.wake()

    def device_failed(self, as_sender: bool, session: int, cause: str) -> None:
        with self._lock:
            if as_sender:
                self._outlet.failed(session, cause)
            else:
                self._inlet.failed(session, cause)
            self._settle_effects()
            self._keeper.wake()

    # What the keeper asks, with the lock held.

    def tick(self, now_s: float, down_s: float) -> None:
        """Let time pass. `down_s`: for how long the host path has been down, 0 if it is up."""
        if not self.finished:
            self._outlet.tick(now_s, down_s, self._host_side.unacknowledged)
        self._settle_effects()

    def next_tick_s(self) -> float:
        """When time alone brings something."""
        return self._outlet.next_tick_s
