# SPDX-License-Identifier: Apache-2.0
"""The training process's end of the link to one peer: its host path, and the device path beside it where there is one.

The training thread only takes locks that are never held during a large copy or a wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch

from adaptra_megatron.log import logger_of
from adaptra_megatron.transport._ring import Ring
from adaptra_megatron.transport.arrival_signal import ArrivalSignal
from adaptra_megatron.transport.dual_path.link_parts import LinkParts
from adaptra_megatron.transport.dual_path.two_paths import SecondPath
from adaptra_megatron.transport.gpu.cuda_device import Computed, Device
from adaptra_megatron.transport.host_link.frames import check_can_travel
from adaptra_megatron.transport.host_link.receive_queue import Arrival
from adaptra_megatron.transport.host_link.state import GiveUp, Session
from adaptra_megatron.transport.host_link.writer import FAREWELL_S
from adaptra_megatron.transport.host_settings import HostSettings
from adaptra_megatron.transport.link_ends import LinkEnds
from adaptra_megatron.transport.messages import (
    Direction,
    MessageKey,
    MessageTimes,
    TensorSpecification,
    TransportError,
)
from adaptra_megatron.transport.paths import Path, PathCounters, ProbeTimes
from adaptra_megatron.transport.wires.registry import WIRES

logger = logger_of(__name__)

_GREETING = MessageKey(0, Direction.ACTIVATION, (1 << 16) - 1, 0)
"""No model has as many chunks."""


class DualLink:
    """Both directions between this rank and a peer. Made known to the supervisor, which brings it up.

    It owns the link's lock: each method takes it for its caller, unless it says otherwise, and calls what the link is
    made of with it.
    """

    def __init__(
        self,
        ends: LinkEnds,
        settings: HostSettings,
        device: Device | None = None,
        arrival_signal: ArrivalSignal | None = None,
        opens_s: float = 0.0,
        second: SecondPath | None = None,
    ) -> None:
        """`device`: where the tensors are that are sent, and that received ones are to be brought to; None: the CPU.
        `arrival_signal`: rings for all that arrives. `opens_s`: see LinkHealth. `second`: None for the host path only.
        """
        self.sessions = 0
        """How often the link came up."""
        self.ends = ends
        self.opening = 1
        """Which opening of the link this is, settled before it comes up."""
        self._settings = settings
        signal = arrival_signal if arrival_signal is not None else ArrivalSignal()
        self._lock = threading.Lock()
        self._parts = parts = LinkParts(
            self._lock, ends, settings, device, signal, opens_s, second, self, self._payload_ready
        )
        self._state, self._health = parts.state, parts.state.health
        self._copies, self._receive_queue = parts.copies, parts.receive_queue
        self._writer, self._reader = parts.writer, parts.reader
        self._paths, self._device = parts.paths, parts.device_path
        self._writer.thread.start()
        self._reader.thread.start()

    # What brings it up, and ends it, calls: from any thread.

    def takes(self, transport: str) -> None:
        """What is to carry it has been settled."""
        with self._lock:
            self._health.travels(one_network=WIRES[transport].one_network)

    def begin(self) -> None:
        """Bring up the device path, if there is to be one. Until then, all goes by the host path."""
        if self._parts.has_device_path:
            self._paths.thread.start()

    def fail(self, cause: str) -> None:
        """It does not come up."""
        with self._lock:
            self._state.fail(cause)

    @property
    def of_no_use(self) -> bool:
        """Return whether it carries nothing any more, for whatever reason."""
        return self._state.finished or self._health.failed

    # What the training thread calls.

    def wait_until_up(self, deadline_s: float) -> None:
        """Raises TransportError if the link does not come up in time."""
        with self._lock:
            while self._state.session is None:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or self._health.failed:
                    raise self._health.not_up_error(self._settings.timeout_s)
                self._state.news.wait(left_s)

    def send_greeting(self, greeting: torch.Tensor) -> None:
        """The first message over the host path, which both ends know; before all others. Raises as `post_send`."""
        outgoing, now_s = self._outgoing(_GREETING, greeting), time.monotonic()
        with self._lock:
            self._parts.check_usable(_GREETING, now_s, receiving=False)
            self._parts.host.send(_GREETING, outgoing, 0, now_s)

    def receive_greeting(self, greeting: torch.Tensor, deadline_s: float) -> None:
        """Receive the peer's, and wait until it has this end's. Raises TransportError if it is not as this end's."""
        with self._lock:
            self._parts.ask_for(_GREETING, time.monotonic())
        received, _times = self._wait(_GREETING, deadline_s)
        if not torch.equal(received, greeting):
            raise TransportError(
                f"{self.ends.here}, link {self.ends.direction(receiving=True)}: what came over the host path is not "
                f"what was sent, in a message of {greeting.nbytes} bytes"
            )
        self.flush(deadline_s)

    def post_send(self, key: MessageKey, tensor: torch.Tensor) -> MessageTimes:
        """Returns when it was posted. Raises TransportError for what cannot travel and where the link is broken."""
        outgoing, now_s = self._outgoing(key, tensor), time.monotonic()
        with self._lock:
            self._parts.check_usable(key, now_s, receiving=False)
            path = self._paths.send(key, outgoing, now_s)
            work = self._paths.take_prompt()
        self._paths.do(work)
        return MessageTimes(key, self.ends.peer, now_s, now_s, tensor.nbytes, path)

    def describe(self, specification: TensorSpecification) -> None:
        """Say what the messages to come look like, for the device path, on which they may not say so themselves."""
        with self._lock:
            self._parts.micro_batches = specification.micro_batches
            self._paths.describe(specification)

    def post_receive(self, key: MessageKey) -> None:
        """Ask for a message. Raises TransportError where the link is broken and the message is not here."""
        now_s = time.monotonic()
        with self._lock:
            self._parts.check_usable(key, now_s, receiving=True)
            self._paths.receive(key)
            self._parts.ask_for(key, now_s)
            work = self._paths.take_prompt()
        self._paths.do(work)

    def prefer(self, path: Path) -> None:
        """Send by this path while it is healthy, from the next agreed message on."""
        with self._lock:
            self._paths.prefer(path)

    def measure(self) -> None:
        """Probe the path that messages do not take, unless it is being probed, with messages of the usual size."""
        with self._lock:
            self._paths.measure(self._copies.device)
            work = self._paths.take_prompt()
        self._paths.do(work)

    def take_probes(self) -> list[ProbeTimes]:
        """Times of the bursts of probes that ended since the last call."""
        with self._lock:
            return self._paths.take_probes()

    def path_counters(self) -> PathCounters | None:
        """For reports and tests; None for a link with the host path only."""
        with self._lock:
            return self._paths.counters() if self._parts.has_device_path else None

    def ready(self, key: MessageKey) -> bool:
        """Return whether the message has arrived."""
        return key in self._receive_queue

    def attend(self, keys: Sequence[MessageKey], since_s: float) -> float:
        """Do what having waited for `keys` since `since_s` calls for; returns when to call this again.

        Raises TransportError for one that is lost.
        """
        with self._lock:
            return self._parts.attend(keys, since_s)

    def wait(self, key: MessageKey, deadline_s: float) -> tuple[torch.Tensor, MessageTimes]:
        """A message that was asked for. Raises TransportError if it is lost, or not here at the deadline."""
        return self._wait(key, deadline_s)

    def _wait(self, key: MessageKey, deadline_s: float) -> tuple[torch.Tensor, MessageTimes]:
        with self._lock:
            arrival, posted_s = self._parts.wait(key, deadline_s)
        tensor = arrival.receipt.take()
        path = Path.DEVICE if arrival.sequence is None else Path.HOST
        return tensor, MessageTimes(key, self.ends.peer, posted_s, arrival.arrived_s, tensor.nbytes, path)

    def flush(self, deadline_s: float) -> None:
        """Wait until the peer has acknowledged all messages. Raises TransportError if it does not by the deadline."""
        with self._lock:
            self._parts.flush(deadline_s)

    def close(self) -> None:
        """Say what is still to be said to the peer, unless the link was ended; end the threads. Safe to call twice."""
        with self._lock:
            self._state.closing = True
            for thread in (self._writer.thread, self._reader.thread, self._paths.thread):
                thread.wake()
            session = self._state.session
        if self._health.over and session is not None:
            session.outbound.close()  # a write under way is not waited for
        self._writer.thread.join(2 * FAREWELL_S)  # what the peer sees of the device path after a farewell is no failure
        if (session := self._state.session) is not None:
            session.outbound.close()
            session.inbound.close()
        self._reader.thread.join(FAREWELL_S)
        self._copies.close(FAREWELL_S)
        self._paths.thread.join(self._paths.settings.probe_limit_s + 1.0)
        self._device.close()

    @property
    def unacknowledged(self) -> int:
        """Messages that are kept to be sent again."""
        with self._lock:
            return len(self._parts.retransmit_queue)

    @property
    def stale(self) -> int:
        """Messages of attempts that had ended, which were dropped."""
        return self._receive_queue.stale

    @property
    def doubles(self) -> int:
        """Messages that came again and were dropped."""
        return self._reader.doubles + self._receive_queue.doubles

    @property
    def uses_device(self) -> bool:
        """Return whether messages go, or are awaited, by another path than the host path."""
        with self._lock:
            return self._paths.uses_device

    # What the supervisor calls.

    @property
    def finished(self) -> bool:
        """Return whether the link is not to be brought up again."""
        return self._state.finished

    def connected(self, outbound: Ring, inbound: Ring, give_up: GiveUp) -> None:
        """A new session has begun: what is not acknowledged is sent again."""
        self._copies.use_rings(outbound, inbound)
        with self._lock:
            self.sessions += 1
            self._parts.begin(Session(outbound, inbound, give_up))
        if self.sessions > 1:
            logger.info("link %s, to %s: the host path is up again", self.ends, self.ends.there)

    def disconnected(self, cause: str) -> None:
        """The session is over, or the attempt to begin one failed."""
        with self._lock:
            self._parts.end(cause)

    # What the line tells.

    def line_up(self) -> None:
        """The peer's host answers."""
        with self._lock:
            self._health.line_changed(None)
            self._paths.line_renewed()

    def line_down(self, cause: str) -> None:
        """The peer's host does not answer."""
        with self._lock:
            self._health.line_changed(cause)
            self._state.notify_waiting()

    def peer_runs(self, running: bool) -> None:
        """The peer's process has stopped running, or runs again."""
        with self._lock:
            self._health.peer_runs(running, time.monotonic())

    def lost(self, rank: int, cause: str) -> None:
        """A rank is gone for good."""
        self._end(rank, cause)

    def ended(self, cause: str) -> None:
        """The link is ended, by either end: what is under way on it comes to nothing. Any thread."""
        self._end(None, cause)
        self._device.abort_all()

    def _end(self, rank: int | None, cause: str) -> None:
        with self._lock:
            self._health.lose(rank, cause)
            self._state.notify_waiting()

    def note_came(self, number: int, packet: bytes) -> int:
        """A note has come by the line; returns below which number all have."""
        with self._lock:
            try:
                return self._parts.note_came(number, packet)
            except ValueError as cause:
                self._state.fail(f"{self.ends.there} sent an invalid message: {cause}")
                return 0

    def noted(self, below: int) -> None:
        """The peer has all notes below this number."""
        with self._lock:
            self._paths.noted(below)

    # What the device path tells, from its threads.

    def device_made(self, as_sender: bool, session: int) -> None:
        with self._lock:
            self._paths.made(as_sender, session)

    def device_arrived(self, session: int, tensor: torch.Tensor, arrived_s: float) -> None:
        with self._lock:
            key = self._paths.arrived(session, tensor.nbytes, arrived_s)
            if key is not None:
                self._parts.deliver(key, Arrival(None, self._copies.receive_on_device(tensor), arrived_s))
            self._paths.settle()

    def device_failed(self, as_sender: bool, session: int, cause: str) -> None:
        with self._lock:
            self._paths.failed(as_sender, session, cause)

    # Without the lock.

    def _payload_ready(self) -> None:
        with self._lock:
            self._writer.thread.wake()

    def _outgoing(self, key: MessageKey, tensor: torch.Tensor) -> Computed:
        """What to send, checked. Raises TransportError for what cannot travel."""
        check_can_travel(key, tensor, self._copies.device, self._settings.max_message_nbytes)
        # An alias: Megatron's deallocate_output_tensor swaps the storage under the caller's tensor.
        return self._copies.computed(tensor.detach().contiguous())
