# SPDX-License-Identifier: Apache-2.0
"""State machine of the sending end of a link with two paths.

1. Messages are numbered in the order of posting, over both paths. The device path carries intervals of numbers.
2. Planned change to the host path: the sender sends Close; the receiver answers with the first number without a posted
   receive; SwitchAt names the maximum of that number and the number of posted messages. Neither end waits, nothing is
   sent twice.
3. Change to the device path: one note, Open(number).
4. Failure: only the receiver knows which messages have arrived (Dead). Only then are the others sent again by the host
   path, since the sender cannot tell a late message from a lost one.
5. A host path that is down for `host_patience_s` is left in the same way, with all its undelivered messages.
6. After a failure the next session starts after a back-off, and must carry eight probes before it carries messages.

Phases of a device session; messages take the device path while it carries or drains, else the host path:

    PROPOSED -> PROVING -> STANDBY -> CARRYING -> DRAINING      CreateSession, group made, probes arrived, Open, Close
                              ^----------------------'          posted up to the number of SwitchAt
    any of them -> FAILED -> no session, for a back-off         Failed, or the receiver's Dead, which ends the session

The link's RetransmitQueue keeps the messages. There is no clock, thread or I/O here: times are arguments (seconds of
the monotonic clock), and actions are recorded in `effects`. So tests run both ends through every order of events.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from adaptra_megatron.common.backoff import Backoff
from adaptra_megatron.transport.failover.control_messages import (
    Close,
    CreateSession,
    Dead,
    Failed,
    FromReceiver,
    FromSender,
    Measure,
    Open,
    Probed,
    QuerySent,
    ReadyForProbe,
    Received,
    ReceivePosted,
    SentCount,
    SwitchAt,
)
from adaptra_megatron.transport.gpu.cuda_device import Computed, is_computed
from adaptra_megatron.transport.host_link.message_queues import Outgoing, RetransmitQueue
from adaptra_megatron.transport.link_paths import PROBE_NBYTES, Path, PathSettings, ProbeTimes, TransferTimes, why_down
from adaptra_megatron.transport.message_keys import MessageKey


@dataclass
class Burst:
    """State of one probe burst at its sender. Not thread-safe: callers hold the link's lock.

    A probe is sent once the previous one has arrived. So it finds the path idle, and its transfer time is that of a
    single message. A burst is either complete or discarded.
    """

    path: Path
    nbytes: int
    count: int
    message: Computed | None = None
    """Message of every probe of the host path; its bytes mean nothing."""
    sent_s: list[float] = field(default_factory=list)
    arrived_s: list[float] = field(default_factory=list)
    _number: int = -1
    """Number of the latest probe."""

    @property
    def due(self) -> bool:
        """Return whether the next probe is to be sent now."""
        return len(self.sent_s) == len(self.arrived_s) < self.count

    @property
    def over(self) -> bool:
        """Return whether all probes have arrived."""
        return len(self.arrived_s) == self.count

    def sent(self, number: int, now_s: float) -> None:
        """Record that the next probe is sent, under this number."""
        self._number = number
        self.sent_s.append(now_s)

    def answered(self, number: int, arrived_s: float) -> bool:
        """Record the arrival of a probe; return False if its burst was cut short."""
        if self.waiting_since_s is None or number != self._number:
            return False
        self.arrived_s.append(arrived_s)
        return True

    @property
    def waiting_since_s(self) -> float | None:
        """Time at which the probe in flight was sent; None if none is in flight."""
        return self.sent_s[-1] if len(self.sent_s) > len(self.arrived_s) else None

    def times(self, peer: int) -> list[ProbeTimes]:
        """Return the times of a finished burst."""
        pairs = zip(self.sent_s, self.arrived_s, strict=True)
        return [ProbeTimes(peer, self.path, self.nbytes, sent_s, arrived_s) for sent_s, arrived_s in pairs]


@dataclass(frozen=True)
class DeviceSend:
    """A send in this session with this index; without a message, it is a probe."""

    session: int
    index: int
    message: Outgoing | None
    probe_nbytes: int = PROBE_NBYTES


@dataclass
class SenderEffects:
    """Actions that the caller must perform, in this order within each list."""

    notes: list[FromSender] = field(default_factory=list)
    sends: list[DeviceSend] = field(default_factory=list)
    resends: list[Outgoing] = field(default_factory=list)
    """Messages to resend by the host path."""
    begin: list[int] = field(default_factory=list)
    """Sessions to make."""
    end: list[int] = field(default_factory=list)
    """Sessions to end, after the sends."""
    measured: Burst | None = None
    """A finished probe burst of the device path."""

    def __bool__(self) -> bool:
        return bool(self.notes or self.sends or self.resends or self.begin or self.end or self.measured)


class SenderPhase(enum.Enum):
    """Phase of a device session at its sending end."""

    PROPOSED = "its group is being made"
    PROVING = "probes are under way"
    STANDBY = "its probes have arrived; in standby"
    CARRYING = "messages take it"
    DRAINING = "messages take it up to an agreed number"
    FAILED = "this end saw it fail, and waits for the receiver's count"


_HEALTHY = (SenderPhase.STANDBY, SenderPhase.CARRYING, SenderPhase.DRAINING)
_CARRIES = (SenderPhase.CARRYING, SenderPhase.DRAINING)


@dataclass
class _Session:
    """A device session, from its proposal until the receiver's Dead."""

    number: int
    since_s: float
    phase: SenderPhase = SenderPhase.PROPOSED
    carried: bool = False
    """True if it carried messages when it failed."""
    proven_s: float = math.inf
    """Time at which all probes had arrived."""
    probed: int = 0
    next_probe_s: float = 0.0
    sent: int = 0
    received: int = 0
    until: int | None = None
    """While it drains: first number that takes the host path; None until agreed on."""
    retained: dict[int, Outgoing] = field(default_factory=dict)
    """Unconfirmed messages, by index."""
    burst: Burst | None = None
    """The announced burst; None if none is."""
    probe_nbytes: int = PROBE_NBYTES
    """Size of the latest probe."""
    awaited: bool = False
    """True once the receiver has posted receives of the burst."""


class Sender:
    """Sending end of a directed link. Not thread-safe: callers hold the link's lock."""

    def __init__(self, settings: PathSettings, queue: RetransmitQueue) -> None:
        """`queue`: keeps the messages of both paths."""
        self.posted = 0
        """Number of messages posted so far: the number of the next one."""
        self.latest_nbytes = 0
        """Bytes of the message posted last; 0 before the first."""
        self.effects = SenderEffects()
        self.by_path = {Path.DEVICE: 0, Path.HOST: 0}
        """Messages posted, by the path of their first transmission."""
        self.switches = 0
        """Number of changes of path, for whatever reason."""
        self.failures = 0
        """Number of device sessions that failed after they had been healthy."""
        self.cause = "it has not come up yet"
        """Cause of the last failure."""
        self.died: str | None = None
        """Cause of the end of the last healthy session."""
        self.was_healthy = False
        """True if the session that failed last had been healthy."""
        self._settings, self._queue = settings, queue
        self._transfers = TransferTimes(settings)
        self._preferred = settings.preferred
        self._session: _Session | None = None
        self._sessions = 0
        self._rest_until_s = -math.inf
        self._backoff = Backoff(settings.first_rest_s, settings.longest_rest_s)

    @property
    def preferred(self) -> Path:
        """Path used while it is healthy."""
        return self._preferred

    @property
    def path(self) -> Path:
        """Path of the next message."""
        return Path.DEVICE if self._session is not None and self._session.phase in _CARRIES else Path.HOST

    @property
    def device_healthy(self) -> bool:
        """Return whether the device path carries messages, or could carry them."""
        return self._session is not None and self._session.phase in _HEALTHY

    @property
    def retained(self) -> int:
        """Number of device-path messages that the receiver has not confirmed."""
        return len(self._session.retained) if self._session is not None else 0

    @property
    def given_up(self) -> str | None:
        """Return why the device path is down; None while it is usable, and before it first came up."""
        return why_down(self.died, self.cause) if self._backoff.failures and not self.device_healthy else None

    def prefer(self, path: Path) -> None:
        """Prefer `path` from the next `tick` on."""
        self._preferred = path

    def post(self, key: MessageKey, computed: Computed, now_s: float) -> Outgoing:
        """Number a message and choose its path. For the device path, the send is left in `effects`. Raises
        TransportError if the device failed.
        """
        path = self.path
        message = self._queue.post(key, self.posted, computed, now_s, path)
        self.posted, self.latest_nbytes = self.posted + 1, computed.tensor.nbytes
        self.by_path[path] += 1
        if path is Path.DEVICE:
            assert self._session is not None
            self._send(self._session, message)
            self._leave_if_over(self._session)
        return message

    def measure(self, nbytes: int) -> None:
        """Begin a probe burst on the device path, if that is healthy and idle, and `standby` is set."""
        session = self._session
        # A session that carries messages is timed by them.
        if session is None or session.phase is not SenderPhase.STANDBY or session.burst is not None:
            return
        if not self._settings.standby:
            return
        session.burst, session.awaited = Burst(Path.DEVICE, nbytes, self._settings.measuring_probes), False
        self.effects.notes.append(Measure(session.number, session.burst.count, nbytes))

    def made(self, session: int, now_s: float) -> None:
        """Record that the session's group has been made at this end."""
        if self._session is not None and self._session.number == session:
            if self._session.phase is SenderPhase.PROPOSED:
                self._session.phase = SenderPhase.PROVING
            self._session.next_probe_s = now_s
        else:  # it was given up while the two ends met
            self.effects.end.append(session)

    def failed(self, session: int, cause: str) -> None:
        """Record a failure of the session at this end. The receiver decides which messages have arrived."""
        current = self._session
        if current is not None and current.number == session and current.phase is not SenderPhase.FAILED:
            # Only the receiver knows what has arrived: until its Dead, messages are retained and later ones take the
            # host path.
            current.carried, current.phase = current.phase in _CARRIES, SenderPhase.FAILED
            self.cause = cause
            self.effects.notes.append(Failed(session, cause))

    def confirmed(self, session: int, received: int) -> None:
        """Release the first `received` messages of the session, which the receiver has."""
        current = self._session
        if current is None or current.number != session:
            return
        for index in [index for index in current.retained if index < received]:
            self._queue.confirm(current.retained.pop(index))
        current.received = max(current.received, received)

    def on_note(self, note: FromReceiver, now_s: float) -> None:
        """Handle a note; those of earlier sessions are ignored."""
        current = self._session
        if current is None or current.number != note.session:
            return
        if isinstance(note, Dead):
            self._on_session_closed(current, note, now_s)
        elif isinstance(note, Received):
            self.confirmed(note.session, note.count)
        elif isinstance(note, QuerySent):
            # The query confirms all earlier messages. The receiver may hold back their acknowledgement until more
            # arrives, which in turn may wait for it.
            self.confirmed(note.session, note.index)
            # A posted message may still be in computation. The receiver must not count that time against the path.
            waiting = (index for index, each in current.retained.items() if not is_computed(each.computed))
            asked_for = current.retained.get(note.index)
            nbytes = asked_for.computed.tensor.nbytes if asked_for is not None else current.probe_nbytes
            self.effects.notes.append(SentCount(note.session, next(waiting, current.sent), nbytes))
        elif isinstance(note, ReadyForProbe):
            current.awaited = True
            self._measure(current, now_s)
        elif isinstance(note, Probed):
            self._probed(current, note, now_s)
        elif isinstance(note, ReceivePosted) and current.phase is SenderPhase.DRAINING and current.until is None:
            # Messages up to `posted` are on the device path already, and receives up to `number` are posted there: both
            # must complete.
            current.until = max(self.posted, note.number)
            self.effects.notes.append(SwitchAt(note.session, current.until))
            self._leave_if_over(current)

    def tick(self, now_s: float, host_down_s: float) -> None:
        """Perform timed actions. `host_down_s`: how long the host path has been down; 0 while it is up."""
        if self._session is None:
            # Without a standby session one is made only once the host path has been down for long.
            wanted = self._settings.standby or host_down_s > self._settings.host_patience_s
            if wanted and now_s >= self._rest_until_s:
                self._sessions += 1
                self._session = _Session(self._sessions, now_s)
                self.effects.notes.append(CreateSession(self._sessions))
                self.effects.begin.append(self._sessions)
            return
        self._prove(self._session, now_s)
        self._give_up_measuring(self._session, now_s)
        self._choose(self._session, host_down_s)

    @property
    def next_tick_s(self) -> float:
        """Return the time of the next timed action."""
        session = self._session
        if session is None:
            # While the host path is down, that ticks.
            return self._rest_until_s if self._settings.standby else math.inf
        if session.phase is SenderPhase.FAILED:
            return math.inf
        if session.phase in _HEALTHY:
            return self._probe_due_s(session)
        limit_s = session.since_s + self._settings.probe_limit_s
        return min(limit_s, session.next_probe_s) if session.phase is SenderPhase.PROVING else limit_s

    def _prove(self, session: _Session, now_s: float) -> None:
        """Send the probes of a new session that are due; promote the session once all have arrived."""
        if session.phase not in (SenderPhase.PROPOSED, SenderPhase.PROVING):
            return
        settings = self._settings
        if session.received >= settings.probes:
            session.phase, session.proven_s, session.next_probe_s = SenderPhase.STANDBY, now_s, math.inf
            return
        if now_s >= session.since_s + settings.probe_limit_s:
            self.failed(session.number, f"its probes did not get through in {settings.probe_limit_s:g} s")
            return
        while (
            session.phase is SenderPhase.PROVING and session.probed < settings.probes and now_s >= session.next_probe_s
        ):
            self._send_probe(session, PROBE_NBYTES)
            # A path that has failed before must hold for a while, not just for a moment.
            session.next_probe_s = now_s + (settings.probe_pause_s if self._backoff.failures else 0.0)
        if session.probed == settings.probes:
            session.next_probe_s = math.inf

    def _send_probe(self, session: _Session, nbytes: int) -> None:
        self.effects.sends.append(DeviceSend(session.number, session.sent, None, nbytes))
        session.sent += 1
        session.probed += 1
        session.probe_nbytes = nbytes

    def _measure(self, session: _Session, now_s: float) -> None:
        """Send the burst's next probe, if it is due."""
        burst = session.burst
        if burst is not None and session.awaited and burst.due:
            burst.sent(session.sent, now_s)
            self._send_probe(session, burst.nbytes)

    def _probed(self, session: _Session, note: Probed, now_s: float) -> None:
        burst = session.burst
        since_s = burst.waiting_since_s if burst is not None else None
        if burst is None or since_s is None or not burst.answered(note.index, note.arrived_s):
            return
        self._transfers.took(burst.nbytes, now_s - since_s)
        if burst.over:
            self.effects.measured, session.burst = burst, None
        else:
            self._measure(session, now_s)

    def _give_up_measuring(self, session: _Session, now_s: float) -> None:
        burst = session.burst
        if burst is not None and now_s >= self._probe_due_s(session):
            assert burst.waiting_since_s is not None
            waited_s = now_s - burst.waiting_since_s
            # Although it has not arrived: the lower bound keeps the next attempt from failing by the same, too short
            # limit.
            self._transfers.took(burst.nbytes, waited_s)
            self.failed(session.number, f"a probe did not arrive in {waited_s:.1f} s")

    def _probe_due_s(self, session: _Session) -> float:
        """Return the time at which the probe in flight is overdue."""
        burst = session.burst
        if burst is None or burst.waiting_since_s is None:
            return math.inf
        return burst.waiting_since_s + self._settings.probe_limit_s + self._transfers.allowed_s(burst.nbytes)

    def _cut_burst_short(self, session: _Session) -> None:
        """Send the rest of the announced burst at once, unmeasured: the receiver expects it before further messages."""
        if session.burst is not None:
            for _ in range(session.burst.count - len(session.burst.sent_s)):
                self._send_probe(session, session.burst.nbytes)
            session.burst = None

    def _choose(self, session: _Session, host_down_s: float) -> None:
        if session.phase not in _HEALTHY:
            return
        host_dead = host_down_s > self._settings.host_patience_s
        stranded = self._queue.messages(Path.HOST) if host_dead else []
        if stranded and (session.phase is not SenderPhase.STANDBY or session.sent > session.probed):
            # Their numbers are below those that the session has carried, but a receiver posts in ascending order: only
            # a new session can carry them.
            self.failed(session.number, "messages were left on a dead host path")
        elif session.phase is SenderPhase.STANDBY and (self._preferred is Path.DEVICE or host_dead):
            self._open(session, stranded)
        # Not while the host path is down for a moment: messages would wait there.
        elif session.phase is SenderPhase.CARRYING and self._preferred is Path.HOST and host_down_s == 0:
            session.phase = SenderPhase.DRAINING
            self.effects.notes.append(Close(session.number))

    def _open(self, session: _Session, stranded: Sequence[Outgoing]) -> None:
        """Move to the device path: all later messages, and those stranded on a failed host path."""
        self._cut_burst_short(session)
        first = min((message.number for message in stranded), default=self.posted)
        taken = {message.number for message in stranded}
        # These have been delivered on the host path: the receiver must not post receives for them.
        skipped = [number for number in range(first, self.posted) if number not in taken]
        self.effects.notes.append(Open(session.number, first, skipped))
        session.phase, session.until = SenderPhase.CARRYING, None
        self.switches += 1
        for message in stranded:
            self._queue.carry(message, Path.DEVICE)
            self._send(session, message)

    def _send(self, session: _Session, message: Outgoing) -> None:
        session.retained[session.sent] = message
        self.effects.sends.append(DeviceSend(session.number, session.sent, message))
        session.sent += 1

    def _leave_if_over(self, session: _Session) -> None:
        """End draining once all messages before the agreed number are posted; the session stays in standby."""
        if session.phase is SenderPhase.DRAINING and session.until is not None and self.posted >= session.until:
            session.phase = SenderPhase.STANDBY
            self.switches += 1

    def _on_session_closed(self, session: _Session, note: Dead, now_s: float) -> None:
        self.confirmed(note.session, note.received)
        self.cause = note.cause
        self.was_healthy = math.isfinite(session.proven_s)
        if self.was_healthy:
            self.failures += 1
            self.died = note.cause
            # Only after a long healthy time: a path that flaps must not begin with the shortest pause each time.
            if now_s - session.proven_s >= self._settings.forgiven_after_s:
                self._backoff.reset()
        if session.carried or session.phase in _CARRIES:
            self.switches += 1
        self._rest_until_s = now_s + self._backoff.next_s()
        self.effects.resends += session.retained.values()
        self.effects.end.append(session.number)
        self._session = None
