# SPDX-License-Identifier: Apache-2.0
"""A link with two paths: messages take the device path or the host path and, when one dies, the other.

The two directions are independent: the Outlet at the sending stage decides, the Inlet at the receiving stage follows.
Both are bookkeeping; here is what they ask for. Notes between them go by the host path, and by the job's store while
that is down. What may take time (sending on the device path, making and ending its sessions) happens without the lock.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence

import torch

from adaptra_megatron.transport._ring import Ring
from adaptra_megatron.transport.arrivals import Arrival
from adaptra_megatron.transport.bell import Bell
from adaptra_megatron.transport.cuda_device import Computed, is_computed
from adaptra_megatron.transport.device_copies import HostPayload
from adaptra_megatron.transport.device_path import DevicePath, DeviceWork, MakeGroup
from adaptra_megatron.transport.host_link import CPU, HostLink
from adaptra_megatron.transport.host_settings import HostSettings
from adaptra_megatron.transport.inlet import Inlet, InletEffects
from adaptra_megatron.transport.messages import MessageKey, MessageTimes, TensorSpecification, TransportError
from adaptra_megatron.transport.note_mail import OVERDUE_S, NoteMail
from adaptra_megatron.transport.notes import FromSender, HostProbed, Note, Open, Received, decode_note
from adaptra_megatron.transport.outlet import Outlet, OutletEffects, Posted
from adaptra_megatron.transport.paths import Path, PathCounters, PathSettings, ProbeTimes
from adaptra_megatron.transport.probes import HostProber
from adaptra_megatron.transport.tagged_json import packed

logger = logging.getLogger("adaptra_megatron.transport.dual_link")

_CONFIRMS = 1 << 63
"""An acknowledgement with this bit is of the device path: a session, and how many of its messages have arrived."""
_COUNT_BITS = 40
_TICK_S = 0.05
_IDLE_S = 60.0
_FETCH_S = 2.0
"""How long the training waits for anything before it is looked for in the store though the host path is up."""


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
        device: torch.device = CPU,
        bell: Bell | None = None,
    ) -> None:
        self._paths, self._mail = paths, mail
        self._outlet: Outlet[Computed] = Outlet(paths, is_computed)
        self._inlet: Inlet[TensorSpecification] = Inlet(paths)
        self._specification = TensorSpecification((), torch.float32, torch.device("cpu"))
        self._work = DeviceWork()
        self._wait_began_s = math.inf
        self._fetch_wanted = False
        self._told_ended = {True: False, False: False}
        self._usual_nbytes = 0
        self._measured: list[ProbeTimes] = []
        self._host_probes = HostProber(peer, paths.measuring_probes, self._send_host_probe)
        limits = {"meeting_s": paths.probe_limit_s, "timeout_s": settings.timeout_s}
        self._device = DevicePath(make_group, self, **limits)
        super().__init__(stage, peer, settings, device, bell)
        self._to_keep = threading.Condition(self._lock)
        self._keeper = threading.Thread(target=self._keep, name=f"adaptra-paths-{peer}", daemon=True)
        self._keeper.start()

    # What the training thread calls.

    def prefer(self, path: Path) -> None:
        """Send by this path while it is healthy, from the next agreed message on."""
        with self._lock:
            self._outlet.prefer(path)
            self._to_keep.notify()

    def measure(self) -> None:
        """Probe the path that messages do not take, unless it is being probed, with messages of the usual size."""
        if not self._usual_nbytes:
            return
        with self._lock:
            if self._outlet.path is Path.HOST:
                self._outlet.measure(self._usual_nbytes)
            elif not self._host_probes.under_way and self._session is not None:
                nothing = torch.empty(self._usual_nbytes, dtype=torch.uint8, device=self._copies.device)
                self._host_probes.begin(self._copies.computed(nothing), time.monotonic())
            work = self._due_here()
        self._do(work)

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

    def post_send(self, key: MessageKey, tensor: torch.Tensor) -> MessageTimes:
        outgoing = self._outgoing(key, tensor)
        now_s = time.monotonic()
        with self._lock:
            if not self._outlet.device_healthy and now_s >= self._health.broken_from_s():
                raise self._error("could not send", key, now_s, now_s, receiving=False)
            self._usual_nbytes = tensor.nbytes
            message, path = self._outlet.post(key, outgoing)
            if path is Path.HOST:
                self._enqueue(key, self._copies.stage(outgoing), message.number, now_s)
            work = self._due_here()
        self._do(work)
        return MessageTimes(key, self._peer, now_s, now_s, tensor.nbytes, path)

    def describe(self, specification: TensorSpecification) -> None:
        with self._lock:
            self._specification = specification

    def post_receive(self, key: MessageKey) -> None:
        now_s = time.monotonic()
        with self._lock:
            if not self._inlet.alive and key not in self._arrivals and now_s >= self._health.broken_from_s():
                raise self._error("waited for", key, now_s, now_s, receiving=True)
            self._inlet.post(key, self._specification)
            self._ask_for(key, now_s)
            work = self._due_here()
        self._do(work)

    def attend(self, keys: Sequence[MessageKey], since_s: float) -> float:
        self._wait_began_s = since_s
        return super().attend(keys, since_s)

    def wait(self, key: MessageKey, deadline_s: float) -> tuple[torch.Tensor, MessageTimes]:
        self._wait_began_s = time.monotonic()
        return super().wait(key, deadline_s)

    def close(self) -> None:
        super().close()  # says good-bye: what the peer then sees of the device path is no failure
        with self._lock:
            self._to_keep.notify()
        self._keeper.join(self._paths.probe_limit_s + 1.0)
        self._device.close()

    # What the supervisor calls.

    def connected(self, outbound: Ring, inbound: Ring) -> None:
        super().connected(outbound, inbound)
        with self._lock:
            self._inlet.confirm_again()
            self._host_probes.drop()  # what was under way tells how long the link was down
            self._settle_effects()
            self._to_keep.notify()

    def disconnected(self, cause: str) -> None:
        super().disconnected(cause)
        with self._lock:
            self._to_keep.notify()

    # What the host path asks, with the lock held.

    def _acknowledged(self, sequence: int) -> None:
        if sequence & _CONFIRMS:
            session, received = (sequence & ~_CONFIRMS) >> _COUNT_BITS, sequence & ((1 << _COUNT_BITS) - 1)
            self._confirmed(session, received)
            return
        message = self._outbox.acknowledge(sequence)
        if message is not None and message.key is None and not message.probe:
            self._mail.acknowledged(message.number)

    def _heard(self, number: int, packet: bytes) -> None:
        now_s = time.monotonic()
        for readable in self._mail.take(number, packet):
            note = decode_note(readable)
            if isinstance(note, FromSender):
                self._inlet.heard(note, now_s)
            elif isinstance(note, HostProbed):
                self._measured += self._host_probes.answered(note.number, note.arrived_s, now_s)
            elif isinstance(note, Received):
                self._confirmed(note.session, note.count)
            else:
                self._outlet.heard(note, now_s)
        self._settle_effects()
        self._to_keep.notify()

    def _probed(self, number: int, arrived_s: float) -> None:
        self._say(HostProbed(number, arrived_s), time.monotonic())

    def _send_host_probe(self, nothing: Computed, number: int, now_s: float) -> None:
        """The caller holds the lock."""
        try:
            self._enqueue(None, self._copies.stage(nothing), number, now_s, probe=True)
        except TransportError as cause:
            self._health.fail(str(cause))

    def _all_sent(self) -> bool:
        return not len(self._outbox) and not self._outlet.retained

    def _given_up_from_s(self, key: MessageKey | None) -> float:
        device = self._outlet.device_healthy and not len(self._outbox) if key is None else self._inlet.expects(key)
        return math.inf if device else self._health.broken_from_s()

    def _look_again_s(self, key: MessageKey | None, now_s: float) -> float:
        look_again_s = now_s + self._paths.suspicion_s
        if now_s > self._wait_began_s + _FETCH_S and not self._fetch_wanted:
            self._fetch_wanted = True
            self._to_keep.notify()
        if key is not None and self._inlet.expects(key):
            look_again_s = min(look_again_s, self._inlet.suspect(self._wait_began_s, now_s))
            self._settle_effects()
            if self._work:
                self._to_keep.notify()
        return look_again_s

    def _not_received(self, key: MessageKey, since_s: float, now_s: float) -> TransportError:
        return self._error("waited for", key, since_s, now_s, receiving=True)

    def _not_sent(self, now_s: float) -> TransportError:
        oldest = self._outbox.oldest()
        key, since_s = (oldest.key, oldest.posted_s) if oldest is not None else (self._outlet.oldest_retained(), now_s)
        assert key is not None
        return self._error("could not send", key, since_s, now_s, receiving=False)

    def _error(self, doing: str, key: MessageKey, since_s: float, now_s: float, *, receiving: bool) -> TransportError:
        alive = self._inlet.carries if receiving else self._outlet.device_healthy
        cause = self._inlet.cause if receiving else self._outlet.cause
        also = "the device path is up" if alive else f"the device path is down: {cause}"
        return self._health.error(doing, key, since_s, now_s, receiving=receiving, also=also)

    # Effects: the parts that need the lock at once, the others to `_work`.

    def _settle_effects(self) -> None:
        """The caller holds the lock."""
        now_s = time.monotonic()
        outlet, self._outlet.effects = self._outlet.effects, OutletEffects()
        inlet, self._inlet.effects = self._inlet.effects, InletEffects()
        for note in (*outlet.notes, *inlet.notes):
            self._say(note, now_s)
            if isinstance(note, Open):
                logger.info("link %d->%d: messages go by the device path", self._stage, self._peer)
        if inlet.confirm is not None:
            self._confirm(*inlet.confirm, now_s)
        if outlet.measured is not None:
            self._measured += outlet.measured.times(self._peer)
        self._move(outlet, now_s)
        work = self._work
        work.sends += [(send, self._specification.shape is None) for send in outlet.sends]
        work.receives += inlet.receives
        work.begin += [(True, session) for session in outlet.begin] + [(False, session) for session in inlet.begin]
        work.end += [(True, session) for session in outlet.end] + [(False, session) for session in inlet.end]

    def _move(self, outlet: OutletEffects[Computed], now_s: float) -> None:
        """Messages between the host path and the device path."""
        if not outlet.withdrawals and not outlet.resends:
            return
        waiting = {message.number: message for message in self._outbox.messages(elsewhere=True)}
        for number in outlet.withdrawals:
            self._outbox.send_elsewhere(waiting[number])
        for message in outlet.resends:
            if message.number in waiting:
                self._outbox.send_after_all(waiting[message.number])
            else:
                self._send_again(message, now_s)
        self._tell_waiting()

    def _send_again(self, message: Posted[Computed], now_s: float) -> None:
        # Not the training thread, maybe: it hears of a device that fails where it waits.
        try:
            payload = self._copies.stage(message.payload)
        except TransportError as cause:
            self._health.fail(str(cause))
            return
        self._enqueue(message.key, payload, message.number, now_s)

    def _say(self, note: Note, now_s: float) -> None:
        packet = packed(note)
        number = self._mail.post(packet, now_s)
        payload = HostPayload(torch.frombuffer(bytearray(packet), dtype=torch.uint8))
        self._enqueue(None, payload, number, now_s)

    def _confirm(self, session: int, received: int, now_s: float) -> None:
        if self._session is None:
            self._say(Received(session, received), now_s)
            return
        self._arrivals.due.append(_CONFIRMS | session << _COUNT_BITS | received)
        self._acknowledge()

    def _confirmed(self, session: int, received: int) -> None:
        self._outlet.confirmed(session, received)
        self._device.confirmed(session, received)
        if self._flushing and self._all_sent():
            self._tell_waiting()
        if not self._outlet.device_healthy:
            self._to_keep.notify()  # these may have been the probes

    def _due_here(self) -> DeviceWork:
        """What the calling thread is to do at once; the rest is the keeper's. The caller holds the lock."""
        self._settle_effects()
        work = self._work
        if not work:
            return work
        self._work = DeviceWork(begin=work.begin, end=work.end)
        if self._work:
            self._to_keep.notify()
        return DeviceWork(sends=work.sends, receives=work.receives)

    def _do(self, work: DeviceWork) -> None:
        """Without the lock."""
        for send, header in work.sends:
            self._device.send(send, header=header)
        for receive in work.receives:
            self._device.receive(receive)
        for as_sender, session in work.begin:
            self._device.begin(as_sender, session)
        for as_sender, session in work.end:
            self._tell_ended(as_sender)
            self._device.end(as_sender, session)

    def _tell_ended(self, as_sender: bool) -> None:
        with self._lock:
            half = self._outlet if as_sender else self._inlet
            level = logging.WARNING if half.was_healthy else logging.INFO
            if self.finished or (self._told_ended[as_sender] and not half.was_healthy):
                level = logging.DEBUG  # tried again and again, as between two stages on one GPU
            self._told_ended[as_sender] = True
            cause = half.cause
        link = f"{self._stage}->{self._peer}" if as_sender else f"{self._peer}->{self._stage}"
        logger.log(level, "link %s: the device path is down (%s); messages go by the host path", link, cause)

    # What the device path tells, from its threads.

    def device_made(self, as_sender: bool, session: int) -> None:
        with self._lock:
            if as_sender:
                self._outlet.made(session, time.monotonic())
            else:
                self._inlet.made(session)
            self._settle_effects()
            self._to_keep.notify()

    def device_arrived(self, session: int, tensor: torch.Tensor, arrived_s: float) -> None:
        with self._lock:
            number = self._inlet.arrived(session, tensor.nbytes, arrived_s)
            if number is not None and number >= 0:
                self._deliver(self._inlet.key(number), Arrival(None, self._copies.receive_on_device(tensor), arrived_s))
            self._settle_effects()
            if self._work:
                self._to_keep.notify()

    def device_failed(self, as_sender: bool, session: int, cause: str) -> None:
        with self._lock:
            if as_sender:
                self._outlet.failed(session, cause)
            else:
                self._inlet.failed(session, cause)
            self._settle_effects()
            self._to_keep.notify()

    # The keeper: time, and whatever must not hold up anybody else.

    def _keep(self) -> None:
        while True:
            with self._lock:
                if self._closing:
                    return
                now_s = time.monotonic()
                down_since_s = self._health.down_since_s
                down_s = 0.0 if down_since_s is None else max(now_s - down_since_s, 1e-9)
                if not self.finished:
                    self._outlet.tick(now_s, down_s, self._unacknowledged)
                self._settle_effects()
                work, self._work = self._work, DeviceWork()
                overdue = self._mail.overdue(now_s)
                fetch = self._fetch_wanted or (down_s > OVERDUE_S and not self.finished)
                if not (work or overdue or fetch):
                    self._to_keep.wait(self._pause_s(now_s))
                    continue
                self._fetch_wanted = False
            self._do(work)
            self._mail.put(overdue)
            if fetch:
                self._fetch()

    def _fetch(self) -> None:
        notes = self._mail.fetch()
        with self._lock:
            try:
                for number, packet in notes:
                    self._heard(number, packet)
            except ValueError as cause:
                self._health.fail(f"stage {self._peer} left what cannot be in the store: {cause}")
                self._news.notify_all()
            self._to_keep.wait(_TICK_S)

    def _pause_s(self, now_s: float) -> float:
        """Until time alone brings something."""
        until_s = math.inf
        if not self.finished:
            until_s = self._outlet.next_tick_s
            if self._health.down_since_s is not None:
                until_s = min(until_s, now_s + _TICK_S)
        if (posted_s := self._mail.oldest_unheard_s) is not None:
            until_s = min(until_s, posted_s + OVERDUE_S)
        return min(_IDLE_S, max(1e-3, until_s - now_s))

    def _unacknowledged(self) -> list[Posted[Computed]]:
        try:
            return [
                Posted(message.number, message.key, message.payload.computed())
                for message in self._outbox.messages()
                if message.key is not None
            ]
        except TransportError as cause:
            self._health.fail(str(cause))
            self._tell_waiting()
            return []
