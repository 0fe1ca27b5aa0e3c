# SPDX-License-Identifier: Apache-2.0
"""The training process's end of the host path to one neighbour: a writer that fills the outbound ring, and a reader
that empties the inbound ring into fresh tensors, each with a thread of its own; here is what they carry, and for whom.

The training thread only takes locks that are never held during a large copy or a wait. A message is acknowledged when
it has arrived and has been asked for, as a send over torch.distributed completes when its receive is posted; until
then its sender keeps it, and sends it again whenever the rings had to be replaced.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence

import torch

from adaptra_megatron.transport._ring import Event, Ring
from adaptra_megatron.transport.arrivals import Arrival, Arrivals
from adaptra_megatron.transport.bell import Bell
from adaptra_megatron.transport.copies import Receipt
from adaptra_megatron.transport.cuda_device import Computed, Device
from adaptra_megatron.transport.device_copies import copies_for
from adaptra_megatron.transport.frames import check_can_travel, is_probe, key_of, note_of
from adaptra_megatron.transport.host_link_reader import HostLinkReader
from adaptra_megatron.transport.host_link_state import GiveUp, HostLinkState, Session
from adaptra_megatron.transport.host_link_writer import FAREWELL_S, HostLinkWriter
from adaptra_megatron.transport.host_settings import HostSettings
from adaptra_megatron.transport.messages import (
    Direction,
    MessageKey,
    MessageTimes,
    TensorSpecification,
    TransportError,
)
from adaptra_megatron.transport.outbox import Outbox
from adaptra_megatron.transport.paths import Path

logger = logging.getLogger("adaptra_megatron.transport.host_link")

_GREETING = MessageKey(0, Direction.ACTIVATION, (1 << 16) - 1, 0)
"""No model has as many chunks."""


class HostLink:
    """Both directions between this stage and `peer`. Made known to the supervisor, which brings it up."""

    def __init__(
        self, stage: int, peer: int, settings: HostSettings, device: Device | None = None, bell: Bell | None = None
    ) -> None:
        """`device`: where the tensors are that are sent, and that received ones are to be brought to; None: the CPU.
        `bell`: rings for all that arrives."""
        self.sessions = 0
        """How often the link came up."""
        self._stage, self._peer, self._settings = stage, peer, settings
        self._state = HostLinkState(stage, peer, settings.grace_s, one_network=settings.transport != "verbs")
        self._lock, self._health = self._state.lock, self._state.health
        self._outbox = Outbox(settings.window_messages, settings.window_nbytes)
        self._arrivals = Arrivals()
        self._posted = 0
        self._awaited: MessageKey | None = None
        self._bell = bell if bell is not None else Bell()
        self._flushing = False
        self._writer = HostLinkWriter(self._state, self._outbox, self._arrivals.due, settings.timeout_s)
        self._copies = copies_for(
            device,
            link=f"{stage}<->{peer}",
            pooled_nbytes=settings.pooled_nbytes,
            on_ready=self._writer.payload_ready,
        )
        self._reader = HostLinkReader(self._state, self._copies, self._writer, self._arrivals.due, self, settings)
        self._writer.start()
        self._reader.start()

    # What the training thread calls.

    def wait_until_up(self, deadline_s: float) -> None:
        """Raises TransportError if the link does not come up in time."""
        with self._lock:
            while self._state.session is None:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise self._health.not_up_error(self._settings.timeout_s)
                self._state.news.wait(left_s)

    def send_greeting(self, greeting: torch.Tensor) -> None:
        """The first message over the link, which both ends know; before all others. Raises as `post_send`."""
        HostLink.post_send(self, _GREETING, greeting)

    def receive_greeting(self, greeting: torch.Tensor, deadline_s: float) -> None:
        """Receive the peer's, and wait until it has this end's. Raises TransportError if it is not as this end's."""
        HostLink.post_receive(self, _GREETING)
        received, _times = HostLink.wait(self, _GREETING, deadline_s)
        if not torch.equal(received, greeting):
            raise TransportError(
                f"stage {self._stage}, link {self._peer}->{self._stage}: what came over the host path is not what was "
                f"sent, in a message of {greeting.nbytes} bytes"
            )
        HostLink.flush(self, deadline_s)

    def post_send(self, key: MessageKey, tensor: torch.Tensor) -> MessageTimes:
        """Returns when it was posted. Raises TransportError for what cannot travel and where the link is broken."""
        outgoing = self._outgoing(key, tensor)
        now_s = time.monotonic()
        with self._lock:
            if now_s >= self._health.broken_from_s():
                raise self._health.error("could not send", key, now_s, now_s, receiving=False)
            self._writer.enqueue(key, self._copies.stage(outgoing), self._posted, now_s)
            self._posted += 1
        return MessageTimes(key, self._peer, now_s, now_s, tensor.nbytes, Path.HOST)

    def describe(self, specification: TensorSpecification) -> None:
        """Say what the messages to come look like, for a path on which they do not say so themselves."""

    def post_receive(self, key: MessageKey) -> None:
        """Ask for a message. Raises TransportError where the link is broken and the message is not here."""
        now_s = time.monotonic()
        with self._lock:
            if key not in self._arrivals and now_s >= self._health.broken_from_s():
                raise self._health.error("waited for", key, now_s, now_s, receiving=True)
            self._ask_for(key, now_s)

    def ready(self, key: MessageKey) -> bool:
        """Whether the message has arrived."""
        return key in self._arrivals

    def attend(self, keys: Sequence[MessageKey], since_s: float) -> float:
        """Do what having waited for `keys` since `since_s` calls for; returns when to call this again.

        Raises TransportError for one that is lost.
        """
        with self._lock:
            now_s = time.monotonic()
            again_s = math.inf
            for key in keys:
                until_s = self.given_up_from_s(key)
                if now_s >= until_s and key not in self._arrivals:
                    raise self._not_received(key, self._arrivals.posted_s(key), now_s)
                again_s = min(again_s, until_s, self.look_again_s(key, now_s))
            return again_s

    def wait(self, key: MessageKey, deadline_s: float) -> tuple[torch.Tensor, MessageTimes]:
        """A message that was asked for. Raises TransportError if it is lost, or not here at the deadline."""
        with self._lock:
            self._awaited = key
            arrived = self._reader.wait_for(lambda: key in self._arrivals, deadline_s, key)
            self._awaited = None
            if not arrived:
                raise self._not_received(key, self._arrivals.posted_s(key), time.monotonic())
            arrival, posted_s = self._arrivals.pop(key)
        tensor = arrival.receipt.take()
        path = Path.DEVICE if arrival.sequence is None else Path.HOST
        return tensor, MessageTimes(key, self._peer, posted_s, arrival.arrived_s, tensor.nbytes, path)

    def flush(self, deadline_s: float) -> None:
        """Wait until the peer has acknowledged all messages. Raises TransportError if it does not by the deadline."""
        with self._lock:
            self._flushing = True
            flushed = self._reader.wait_for(self._all_sent, deadline_s)
            self._flushing = False
            if not flushed:
                raise self._not_sent(time.monotonic())

    def close(self) -> None:
        """Say what is still to be said to the peer, then end the threads. Safe to call twice."""
        with self._lock:
            self._state.closing = True
            self._writer.wake()
            self._reader.wake()
        self._writer.join()
        if (session := self._state.session) is not None:
            session.outbound.close()
            session.inbound.close()
        self._reader.join(FAREWELL_S)
        self._copies.close(FAREWELL_S)

    @property
    def unacknowledged(self) -> int:
        """Messages that are kept to be sent again."""
        with self._lock:
            return len(self._outbox)

    @property
    def doubles(self) -> int:
        """Messages that came again and were dropped."""
        return self._reader.doubles + self._arrivals.doubles

    @property
    def uses_device(self) -> bool:
        """Whether messages go, or are awaited, by another path than the host path."""
        return False

    # What the supervisor calls.

    @property
    def finished(self) -> bool:
        """Whether the link is not to be brought up again."""
        return self._state.finished

    def connected(self, outbound: Ring, inbound: Ring, give_up: GiveUp) -> None:
        """A new session has begun: what is not acknowledged is sent again."""
        self._copies.use_rings(outbound, inbound)
        with self._lock:
            self._state.begin(Session(outbound, inbound, give_up))
            self._health.up()
            self.sessions += 1
            self._outbox.rewind()
            self._writer.wake()
            self._reader.wake()
        if self.sessions > 1:
            logger.info("stage %d, link to stage %d: the host path is up again", self._stage, self._peer)

    def disconnected(self, cause: str) -> None:
        """The session is over, or the attempt to begin one failed."""
        with self._lock:
            self._health.down(cause, time.monotonic())
            self._state.session = None
            self._state.note_end(cause)
            self._state.news.notify_all()

    # What the line tells.

    def line_up(self) -> None:
        """The peer's host answers."""
        with self._lock:
            self._health.line_changed(None)

    def line_down(self, cause: str) -> None:
        """The peer's host does not answer."""
        with self._lock:
            self._health.line_changed(cause)
            self._state.tell_waiting()

    def peer_runs(self, running: bool) -> None:
        """The peer's process has stopped running, or runs again."""
        with self._lock:
            self._health.peer_runs(running, time.monotonic())

    def lost(self, stage: int, cause: str) -> None:
        """A stage of the pipeline is gone for good."""
        with self._lock:
            self._health.lose(stage, cause)
            self._state.tell_waiting()

    def note_came(self, number: int, packet: bytes) -> int:
        """A note has come by the line; returns below which number all have."""
        self._state.fail(f"stage {self._peer} sent what cannot be: note {number}, but this link has one path only")
        return 0

    def noted(self, below: int) -> None:
        """The peer has all notes below this number."""

    # What the reader tells and asks; the lock is held.

    def take(self, event: Event, receipt: Receipt | None) -> None:
        """An event of the inbound ring. Raises ValueError for one that cannot be."""
        if receipt is not None:
            self._deliver(key_of(event), Arrival(event.sequence, receipt, event.arrived_s))
        elif event.kind == Event.Kind.ACK:
            self._acknowledged(event.sequence)
            if self._flushing and self._all_sent():
                self._state.tell_waiting()
            elif self._outbox.next_to_write() is not None:
                self._writer.wake()
        elif event.kind == Event.Kind.BYE:
            self._state.heard_bye = True
            self._state.note_farewell()
        elif event.kind == Event.Kind.REPEATED:
            self._arrivals.arrive_again(event.sequence)
        else:
            self._arrivals.due.append(event.sequence)
            if is_probe(event):
                self._probed(event.iteration, event.arrived_s)
            else:
                self.heard(*note_of(event))

    def given_up_from_s(self, key: MessageKey | None) -> float:
        """When waiting for `key` (None: for everything to be sent) stops making sense."""
        return self._health.broken_from_s()

    def look_again_s(self, key: MessageKey | None, now_s: float) -> float:
        """When to look whether something has to be done for what is waited for."""
        return math.inf

    # What a link with a second path uses.

    def _outgoing(self, key: MessageKey, tensor: torch.Tensor) -> Computed:
        """What to send, checked. Raises TransportError for what cannot travel."""
        check_can_travel(key, tensor, self._copies.device, self._settings.max_message_nbytes)
        # An alias: Megatron's deallocate_output_tensor swaps the storage under the caller's tensor.
        return self._copies.computed(tensor.detach().contiguous())

    def _ask_for(self, key: MessageKey, now_s: float) -> None:
        """The caller holds the lock."""
        if key not in self._arrivals:
            self._reader.ask(key)
        self._arrivals.post(key, now_s)
        if self._arrivals.due:
            self._writer.acknowledge()

    def _deliver(self, key: MessageKey, arrival: Arrival) -> None:
        """The caller holds the lock."""
        if not self._arrivals.arrive(key, arrival):
            return
        self._bell.arrived(key)
        if key == self._awaited:
            self._state.tell_waiting()

    # What a link with a second path does differently; the lock is held.

    def heard(self, number: int, packet: bytes) -> None:
        """A note has come. Raises ValueError for one that cannot be."""
        raise ValueError(f"note {number} came, but this link has one path only")

    def _acknowledged(self, sequence: int) -> None:
        """The peer has, and needs, what was sent with this number."""
        self._outbox.acknowledge(sequence)

    def _probed(self, number: int, arrived_s: float) -> None:
        """A probe has come. Raises ValueError: nobody measures a link that has one path only."""
        raise ValueError(f"probe {number} came, but this link has one path only")

    def _all_sent(self) -> bool:
        return not len(self._outbox)

    def _not_received(self, key: MessageKey, since_s: float, now_s: float) -> TransportError:
        return self._health.error("waited for", key, since_s, now_s, receiving=True)

    def _not_sent(self, now_s: float) -> TransportError:
        oldest = self._outbox.oldest()
        assert oldest is not None
        assert oldest.key is not None
        return self._health.error("could not send", oldest.key, oldest.posted_s, now_s, receiving=False)
