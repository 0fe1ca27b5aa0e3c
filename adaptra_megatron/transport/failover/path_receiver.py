# SPDX-License-Identifier: Apache-2.0
"""State machine of the receiving end of a link with two paths: posts receives on the device path, and detects failures.

1. Receives are posted for exactly the numbers that Open and SwitchAt give to the device path, in order.
2. If a message is late, the receiver first asks whether it was sent (QuerySent). If not, the sending stage is slow and
   the path has not failed.
3. Once sent, a message may take `stall_s` plus a transfer time: its bytes at `slow_nbytes_per_s`, or twice the latest
   message's time per byte, at most `longest_transfer_s`. Then the session is declared Dead, with the number of messages
   that arrived.
4. A dead session stays dead: a message that arrives by it later is dropped.

Messages of the host path need no bookkeeping here: their frames carry the key. Uses no clock, thread or I/O, like
path_sender.py.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

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
    ReceivePosted,
    SentCount,
    SwitchAt,
)
from adaptra_megatron.transport.link_paths import PROBE_NBYTES, PathSettings, TransferTimes
from adaptra_megatron.transport.message_keys import MessageKey

Specification = TypeVar("Specification")

_REMEMBERED = 1024
"""Number of latest keys kept: more than the host path's window, which bounds how old an unacknowledged one is."""
_CONFIRMED_TOGETHER, _CONFIRMED_NBYTES = 8, 32 << 20
_LATE_S = 0.1
"""A check later than this may mean that this process did not run, and has not read what has arrived."""
_PROVES, _MEASURES = -1, -2
"""Stand-ins for message numbers: a probe of a new session, and a probe of a measuring burst."""


@dataclass(frozen=True)
class DeviceReceive(Generic[Specification]):
    """A receive to post in this session with this index; a negative number means a probe."""

    session: int
    index: int
    number: int
    specification: Specification | None
    """Shape and dtype; None for a probe."""
    probe_nbytes: int = PROBE_NBYTES


@dataclass
class ReceiverEffects(Generic[Specification]):
    """Actions that the caller must perform after this state change."""

    notes: list[FromReceiver] = field(default_factory=list)
    receives: list[DeviceReceive[Specification]] = field(default_factory=list)
    confirm: tuple[int, int] | None = None
    """(session, number of its messages that have arrived) to acknowledge."""
    begin: list[int] = field(default_factory=list)
    """Sessions to make."""
    end: list[int] = field(default_factory=list)
    """Sessions to end."""

    def __bool__(self) -> bool:
        return bool(self.notes or self.receives or self.confirm or self.begin or self.end)


@dataclass
class _Interval:
    """Interval of message numbers that a session carries."""

    next: int
    """First number without a receive."""
    until: int | None
    skipped: frozenset[int]


@dataclass(frozen=True)
class _Burst:
    """Probes that a session carries between two intervals."""

    count: int
    nbytes: int


@dataclass
class _Session:
    number: int
    ready: bool = False
    issued: int = 0
    """Number of receives posted so far: the index of the next."""
    received: int = 0
    confirmed: int = 0
    unconfirmed_nbytes: int = 0
    ahead: deque[_Interval | _Burst] = field(default_factory=deque)
    """Intervals and bursts whose receives have not all been posted, in order."""
    opened: _Interval | None = None
    """The latest interval."""
    frozen: int | None = None
    """Number from which on no receive is posted until SwitchAt comes; None: no Close is in progress."""
    waiting: deque[int] = field(default_factory=deque)
    """Numbers of the posted receives, in order; negative for probes."""
    asked_s: float = math.inf
    sent: int = 0
    """Count in the sender's last SentCount."""
    sent_s: float = math.inf
    """Time at which that arrived."""
    sent_nbytes: int = 0
    """Size of the first missing message."""
    excused_until_s: float = 0.0
    """Time that it got, once, as the check came late; else 0."""


class Receiver(Generic[Specification]):
    """Receiving end of a directed link. Not thread-safe: callers hold the link's lock."""

    def __init__(self, settings: PathSettings) -> None:
        self.posted = 0
        self.effects: ReceiverEffects[Specification] = ReceiverEffects()
        self.deaths = 0
        """Number of device sessions that have ended."""
        self.cause = "it has not come up yet"
        self.died: str | None = None
        """Cause of the end of the last session that had passed its probes."""
        self.was_healthy = False
        """True if the session that ended last had carried messages."""
        self._settings = settings
        self._transfers = TransferTimes(settings)
        self._asked: dict[int, tuple[MessageKey, Specification]] = {}
        self._session: _Session | None = None

    @property
    def alive(self) -> bool:
        """Return whether messages may arrive by the device path."""
        return self._session is not None

    @property
    def proven(self) -> bool:
        """Return whether the session has passed its probes."""
        return self._session is not None and self._session.received >= self._settings.probes

    @property
    def carries(self) -> bool:
        """Return whether this session has carried messages, or will."""
        return self._session is not None and self._session.opened is not None

    @property
    def in_use(self) -> bool:
        """Return whether the device path has messages in flight, or will carry more."""
        current = self._session
        if current is None or current.opened is None:
            return False
        return current.opened.until is None or any(number >= 0 for number in current.waiting)

    def expects(self, key: MessageKey) -> bool:
        """Return whether this message is expected on the device path."""
        return self._session is not None and any(
            number >= 0 and self.key(number) == key for number in self._session.waiting
        )

    def post(self, key: MessageKey, specification: Specification) -> int:
        """Assign the next number of the directed link to a message whose receive is posted; return it."""
        number = self.posted
        self._asked[number] = (key, specification)
        self._asked.pop(number - _REMEMBERED, None)
        self.posted += 1
        self._issue()
        return number

    def key(self, number: int) -> MessageKey:
        """Return the key of one of the latest messages."""
        return self._asked[number][0]

    def made(self, session: int) -> None:
        """Record that the session's group has been made."""
        current = self._session
        if current is None or current.number != session:
            self.effects.end.append(session)
            return
        current.ready = True
        # Before all others, as the sender begins with the probes: messages of a session match by order.
        for _ in range(self._settings.probes):
            self._receive(current, _PROVES)
        self._issue()

    def arrived(self, session: int, nbytes: int, now_s: float) -> int | None:
        """Record the arrival of the session's next message; return its number.

        Returns None if the session has ended: the message then counts as not arrived.
        """
        current = self._session
        if current is None or current.number != session:
            return None
        number = current.waiting.popleft()
        # Measured from the answer to the query, so it is a lower bound; 0 if the message arrived unasked.
        self._transfers.took(nbytes, now_s - current.sent_s if current.sent > current.received else 0.0)
        current.received += 1
        # The sender's answer was about this message: the next one is asked about anew.
        current.asked_s = current.sent_s = math.inf
        current.excused_until_s = 0.0
        current.unconfirmed_nbytes += nbytes
        due = current.received - current.confirmed
        # If messages are awaited, acknowledgements may be collected, as the sender does not wait for them. It may wait
        # for those of probes, which it sends together with later messages.
        more = any(each >= 0 for each in current.waiting)
        if not more or due >= _CONFIRMED_TOGETHER or current.unconfirmed_nbytes >= _CONFIRMED_NBYTES:
            current.confirmed, current.unconfirmed_nbytes = current.received, 0
            self.effects.confirm = (session, current.received)
        if number == _MEASURES:
            self.effects.notes.append(Probed(session, current.received - 1, now_s))
        return number

    def confirm_again(self) -> None:
        """Repeat the last acknowledgement, which may not have arrived."""
        if self._session is not None and self._session.confirmed:
            self.effects.confirm = (self._session.number, self._session.confirmed)

    def failed(self, session: int, cause: str) -> None:
        """End the session: messages that have not arrived will come by the host path."""
        current = self._session
        if current is None or current.number != session:
            return
        self.deaths += 1
        if self.proven:
            self.died = cause
        self.cause, self.was_healthy = cause, current.opened is not None
        self._session = None
        # Dead has the number that arrived; an acknowledgement of an ended session would be ignored.
        self.effects.confirm = None
        self.effects.notes.append(Dead(session, current.received, cause))
        self.effects.end.append(session)

    def on_note(self, note: FromSender, now_s: float) -> None:
        """Handle a note. All but CreateSession are ignored if they belong to another session."""
        if isinstance(note, CreateSession):
            if self._session is not None:
                self.failed(self._session.number, "the sender began another session")
            self._session = _Session(note.session)
            self.effects.begin.append(note.session)
            return
        current = self._session
        if current is None or current.number != note.session:
            return
        if isinstance(note, Failed):
            self.failed(note.session, note.cause)
        elif isinstance(note, Open):
            current.opened = _Interval(note.number, None, frozenset(note.skipped))
            current.ahead.append(current.opened)
            self._issue()
        elif isinstance(note, Measure):
            current.ahead.append(_Burst(note.count, note.nbytes))
            self._issue()
        elif isinstance(note, Close):
            assert current.opened is not None, "the sender leaves what it never took"
            # From here on nothing is posted on the device path until SwitchAt, so that both ends agree on the last
            # number.
            current.frozen = max(self.posted, current.opened.next)
            self.effects.notes.append(ReceivePosted(note.session, current.frozen))
        elif isinstance(note, SwitchAt):
            assert current.opened is not None, "the sender leaves what it never took"
            current.opened.until = note.number
            current.frozen = None
            self._issue()
        elif isinstance(note, SentCount):
            current.sent, current.sent_s, current.sent_nbytes = note.count, now_s, note.nbytes

    def suspect(self, since_s: float, now_s: float) -> float:
        """Check a message of the device path for which the training has waited since `since_s`.

        Asks the sender whether it was sent, and declares the session dead if it was and is overdue. Returns the time of
        the next call.
        """
        current, settings = self._session, self._settings
        if current is None or not current.waiting:
            return now_s + settings.suspicion_s
        index = current.received
        if current.sent > index and math.isfinite(current.sent_s):
            until_s = current.sent_s + settings.stall_s + self._transfers.allowed_s(current.sent_nbytes)
            if now_s > until_s + _LATE_S and not current.excused_until_s:
                current.excused_until_s = now_s + settings.suspicion_s
            if now_s < (until_s := max(until_s, current.excused_until_s)):
                return until_s
            waited_s = now_s - current.sent_s
            # A lower bound: after this failure, a path that is merely slow gets more time.
            self._transfers.took(current.sent_nbytes, waited_s)
            self.failed(current.number, f"what was sent did not arrive for {waited_s:.1f} s")
            return math.inf
        asked_s = current.asked_s if math.isfinite(current.asked_s) else since_s
        if now_s < asked_s + settings.suspicion_s:
            return asked_s + settings.suspicion_s
        # Again and again: the answer before may have been that the message was not sent yet.
        current.asked_s = now_s
        self.effects.notes.append(QuerySent(current.number, index))
        return now_s + settings.suspicion_s

    def _issue(self) -> None:
        """Post the receives that are due, in sending order, but only of messages that the training has posted.

        The sizes of other messages are unknown.
        """
        current = self._session
        if current is None or not current.ready:
            return
        while current.ahead:
            part = current.ahead[0]
            if isinstance(part, _Burst):
                for _ in range(part.count):
                    self._receive(current, _MEASURES, part.nbytes)
                self.effects.notes.append(ReadyForProbe(current.number))
            else:
                self._issue_interval(current, part)
                # What is behind it is sent after it, and a session's messages match by order.
                if part.until is None or part.next < part.until:
                    return
            current.ahead.popleft()

    def _issue_interval(self, current: _Session, interval: _Interval) -> None:
        limit = self.posted
        if interval.until is not None:
            limit = min(limit, interval.until)
        elif current.frozen is not None:
            limit = min(limit, current.frozen)
        while interval.next < limit:
            if interval.next not in interval.skipped:
                self._receive(current, interval.next)
            interval.next += 1

    def _receive(self, current: _Session, number: int, probe_nbytes: int = PROBE_NBYTES) -> None:
        specification = None if number < 0 else self._asked[number][1]
        receive = DeviceReceive(current.number, current.issued, number, specification, probe_nbytes)
        self.effects.receives.append(receive)
        current.issued += 1
        current.waiting.append(number)
