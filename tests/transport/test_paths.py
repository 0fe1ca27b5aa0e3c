# SPDX-License-Identifier: Apache-2.0
"""The two ends of a directed link with two paths, over a network that loses sessions, delays notes and drops the host
path at will: whatever happens, every message that is asked for arrives, with its own content."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from adaptra_megatron.transport.inlet import DeviceReceive, Inlet, InletEffects
from adaptra_megatron.transport.messages import Direction, MessageKey
from adaptra_megatron.transport.notes import Note, decode_note
from adaptra_megatron.transport.outlet import DeviceSend, Outlet, OutletEffects, Posted
from adaptra_megatron.transport.paths import Path, PathSettings, ProbeTimes
from adaptra_megatron.transport.tagged_json import packed

SETTINGS = PathSettings(probes=2, probe_pause_s=0.01, first_rest_s=0.1, longest_rest_s=1.0)
FEW = st.integers(1, 4)


def key(number: int) -> MessageKey:
    return MessageKey(0, Direction.ACTIVATION, 0, number)


class Session:
    """One device session: what the sender put in, what the receiver expects, and whether it still works."""

    def __init__(self) -> None:
        self.sent: dict[int, DeviceSend[str]] = {}
        self.expected: dict[int, DeviceReceive[int]] = {}
        self.arrived = 0
        self.broken = False


class TwoPaths(RuleBasedStateMachine):
    """Plays what dual_link.py does around an Outlet and an Inlet."""

    def __init__(self) -> None:
        super().__init__()
        self.outlet: Outlet[str] = Outlet(SETTINGS, len)
        self.inlet: Inlet[int] = Inlet(SETTINGS)
        self.now_s = 0.0
        self.host_down_since_s: float | None = None
        self.host: deque[Posted[str]] = deque()
        self.elsewhere: set[int] = set()
        self.to_inlet: deque[Note] = deque()
        self.to_outlet: deque[Note] = deque()
        self.confirmations: deque[tuple[int, int]] = deque()
        self.measured: list[ProbeTimes] = []
        self.sessions: dict[int, Session] = {}
        self.makes: list[tuple[bool, int]] = []
        self.here: dict[int, str] = {}
        """What has arrived, by number; asked for or not."""

    @initialize(up=st.booleans())
    def begin(self, up: bool) -> None:
        """Most of what can go wrong needs a device path that has come up."""
        self._tick()
        if up:
            self.everything_moves(12)
            assert self.outlet.path is Path.DEVICE

    # What changes from outside.

    @rule(count=FEW)
    def post(self, count: int) -> None:
        for _ in range(count):
            number = self.outlet.posted
            message, path = self.outlet.post(key(number), f"message {number}")
            assert message.number == number
            if path is Path.HOST:
                self.host.append(message)
            self._carry_out()

    @rule(count=FEW)
    def ask(self, count: int) -> None:
        for _ in range(count):
            asked = self.inlet.posted
            assert self.inlet.post(key(asked), asked) == self.inlet.posted - 1
            self._carry_out()

    @rule(path=st.sampled_from(Path))
    def prefer(self, path: Path) -> None:
        self.outlet.prefer(path)
        self._tick()

    @rule(nbytes=st.sampled_from([100, 2000]))
    def measure(self, nbytes: int) -> None:
        self.outlet.measure(nbytes)
        self._carry_out()

    @rule(seconds=st.sampled_from([0.001, 0.05, 0.3, 1.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self._tick()

    @rule()
    def host_breaks(self) -> None:
        if self.host_down_since_s is None:
            self.host_down_since_s = self.now_s
            self.confirmations.clear()

    @rule()
    def host_is_repaired(self) -> None:
        self.host_down_since_s = None
        self.inlet.confirm_again()
        self._carry_out()

    @rule(at_sender=st.booleans())
    def session_fails(self, at_sender: bool) -> None:
        for number, session in self.sessions.items():
            if not session.broken:
                session.broken = True
                if at_sender:
                    self.outlet.failed(number, "a test")
                else:
                    self.inlet.failed(number, "a test")
        self._carry_out()

    @rule()
    def waits_for_the_oldest(self) -> None:
        wanted = next((number for number in range(self.inlet.posted) if number not in self.here), None)
        if wanted is not None and self.inlet.expects(key(wanted)):
            assert self.inlet.suspect(self.now_s - 1.0, self.now_s) > self.now_s
            self._carry_out()

    # What the network does.

    @rule(rounds=st.integers(1, 12))
    def everything_moves(self, rounds: int) -> None:
        for _ in range(rounds):
            self.notes_arrive(4)
            self.groups_are_made()
            self.device_messages_arrive(4)
            self.host_messages_arrive(4)
            self.time_passes(0.05)

    @rule(count=FEW)
    def notes_arrive(self, count: int) -> None:
        for _ in range(count):
            if self.to_inlet:
                self.inlet.heard(self.to_inlet.popleft(), self.now_s)  # type: ignore[arg-type]
                self._carry_out()
            if self.to_outlet:
                self.outlet.heard(self.to_outlet.popleft(), self.now_s)  # type: ignore[arg-type]
                self._carry_out()
            if self.confirmations:
                self.outlet.confirmed(*self.confirmations.popleft())

    @rule()
    def groups_are_made(self) -> None:
        makes, self.makes = self.makes, []
        for as_sender, number in makes:
            self.sessions.setdefault(number, Session())
            if as_sender:
                self.outlet.made(number, self.now_s)
            else:
                self.inlet.made(number)
            self._carry_out()
        self._tick()

    @rule(count=FEW)
    def device_messages_arrive(self, count: int) -> None:
        for number, session in list(self.sessions.items()):
            for _ in range(count):
                index = session.arrived
                if session.broken or index not in session.sent or index not in session.expected:
                    break
                session.arrived += 1
                send, receive = session.sent[index], session.expected[index]
                sent = -1 if send.message is None else send.message.number
                assert max(receive.number, -1) == sent, "what arrives is not what is expected with this index"
                assert receive.probe_nbytes == send.probe_nbytes
                taken = self.inlet.arrived(number, 10, self.now_s)
                if taken is not None and taken >= 0:
                    assert send.message is not None
                    assert taken == sent
                    self.here.setdefault(taken, send.message.payload)
                self._carry_out()

    @rule(count=FEW)
    def host_messages_arrive(self, count: int) -> None:
        for _ in range(count):
            if self.host and self.host_down_since_s is None:
                message = self.host.popleft()
                self.elsewhere.discard(message.number)
                self.here.setdefault(message.number, message.payload)

    # The glue.

    def _tick(self) -> None:
        down_s = 0.0 if self.host_down_since_s is None else max(1e-9, self.now_s - self.host_down_since_s)
        unacknowledged = [message for message in self.host if message.number not in self.elsewhere]
        self.outlet.tick(self.now_s, down_s, lambda: unacknowledged)
        self._carry_out()

    def _carry_out(self) -> None:
        outlet, self.outlet.effects = self.outlet.effects, OutletEffects()
        inlet, self.inlet.effects = self.inlet.effects, InletEffects()
        self.to_inlet += [decode_note(packed(note)) for note in outlet.notes]
        self.to_outlet += [decode_note(packed(note)) for note in inlet.notes]
        if inlet.confirm is not None:
            self.confirmations.append(inlet.confirm)
        self.elsewhere |= set(outlet.withdrawals)
        waiting = {message.number for message in self.host}
        for message in outlet.resends:
            self.elsewhere.discard(message.number)
            if message.number not in waiting:
                self.host.append(message)
        if outlet.measured is not None:
            self.measured += outlet.measured.times(1)
        for send in outlet.sends:
            session = self.sessions.get(send.session)
            if session is not None:
                session.sent[send.index] = send
        for receive in inlet.receives:
            assert receive.number < self.inlet.posted, "nobody knows yet what this message looks like"
            assert receive.specification == (None if receive.number < 0 else receive.number)
            session = self.sessions.get(receive.session)
            if session is not None:
                session.expected[receive.index] = receive
        self.makes += [(True, number) for number in outlet.begin] + [(False, number) for number in inlet.begin]
        for number in (*outlet.end, *inlet.end):
            if number in self.sessions:
                self.sessions[number].broken = True

    @invariant()
    def content_is_its_own(self) -> None:
        assert all(payload == f"message {number}" for number, payload in self.here.items())

    @invariant()
    def probes_tell_the_truth(self) -> None:
        assert len(self.measured) % SETTINGS.measuring_probes == 0
        assert all(0.0 <= probe.sent_s <= probe.arrived_s <= self.now_s for probe in self.measured)

    def teardown(self) -> None:
        """Everything works from now on: whatever was posted and asked for arrives, and nothing is retained."""
        while self.inlet.posted < self.outlet.posted:
            self.ask(1)
        while self.outlet.posted < self.inlet.posted:
            self.post(1)
        self.host_is_repaired()
        # Sessions broken on one side only are noticed by the other, as connections that end are.
        for number, session in self.sessions.items():
            if session.broken:
                self.inlet.failed(number, "its connection ended")
        self._carry_out()
        self.everything_moves(150)
        assert sorted(self.here) == list(range(self.outlet.posted))
        assert self.outlet.retained == 0
        assert self.outlet.device_healthy
        assert self.outlet.path is self.outlet.preferred
        known = len(self.measured)
        self.outlet.prefer(Path.HOST)
        self.everything_moves(10)
        self.measure(500)
        self.everything_moves(10)
        assert [probe.nbytes for probe in self.measured[known:]][-SETTINGS.measuring_probes :] == [500] * 3


TestTwoPaths = TwoPaths.TestCase


class Wire:
    """A link whose notes take no time, and whose device path takes some for each message; a clock that jumps."""

    def __init__(self, settings: PathSettings) -> None:
        self.outlet: Outlet[int] = Outlet(settings, lambda nbytes: nbytes)
        self.inlet: Inlet[int] = Inlet(settings)
        self.nbytes_per_s = math.inf
        self.now_s = 100.0
        self.arrivals: deque[tuple[float, int, int]] = deque()
        """When, in which session, and how large: what is on its way."""
        self.posted = 0
        self.here = 0

    def come_up(self) -> None:
        """A session that carries messages."""
        for _ in range(1000):
            if self.outlet.path is Path.DEVICE:
                return
            self.pass_until(self.now_s + 0.1)
        raise AssertionError("the device path does not come up")

    def message_s(self, nbytes: int) -> float | None:
        """Send one, and wait for it as the training does; how long that took, None if its session died."""
        key_, began_s = key(self.posted), self.now_s
        self.posted += 1
        self.inlet.post(key_, 0)
        _message, path = self.outlet.post(key_, nbytes)
        assert path is Path.DEVICE
        self._settle()
        while self.inlet.expects(key_):
            again_s = self.inlet.suspect(began_s, self.now_s)
            if not self.inlet.alive:
                self._settle()
                return None
            self.pass_until(again_s)
        return self.now_s - began_s

    def pass_until(self, until_s: float) -> None:
        """Up to the next thing that happens, at the latest."""
        self._settle()
        due_s = self.arrivals[0][0] if self.arrivals else math.inf
        self.now_s = min(until_s, due_s, max(self.now_s, self.outlet.next_tick_s))
        if self.now_s == due_s:
            _due_s, session, nbytes = self.arrivals.popleft()
            self.inlet.arrived(session, nbytes, self.now_s)
        self.outlet.tick(self.now_s, 0.0, list)
        self._settle()

    def _settle(self) -> None:
        while True:
            outlet, self.outlet.effects = self.outlet.effects, OutletEffects()
            inlet, self.inlet.effects = self.inlet.effects, InletEffects()
            if outlet == OutletEffects() and inlet == InletEffects():
                return
            for send in outlet.sends:
                nbytes = send.probe_nbytes if send.message is None else send.message.payload
                start_s = max(self.now_s, self.arrivals[-1][0] if self.arrivals else 0.0)
                self.arrivals.append((start_s + nbytes / self.nbytes_per_s, send.session, nbytes))
            for note in outlet.notes:
                self.inlet.heard(note, self.now_s)
            for answer in inlet.notes:
                self.outlet.heard(answer, self.now_s)
            if inlet.confirm is not None:
                self.outlet.confirmed(*inlet.confirm)
            for session in outlet.begin:
                self.arrivals.clear()
                self.outlet.made(session, self.now_s)
                self.inlet.made(session)


class TestSlowPath:
    """Slow is not dead, and dead is noticed soon."""

    settings = PathSettings()
    sizes = st.integers(1, 400 << 20)

    @how(max_examples=30)
    @given(sizes, st.floats(settings.slow_nbytes_per_s, 1e11))
    def test_a_path_that_is_merely_slow_is_never_given_up(self, nbytes: int, nbytes_per_s: float) -> None:
        wire = Wire(self.settings)
        wire.come_up()
        wire.nbytes_per_s = nbytes_per_s
        for _ in range(3):
            took_s = wire.message_s(nbytes)
            assert took_s == pytest.approx(nbytes / nbytes_per_s)

    @how(max_examples=30)
    @given(sizes)
    def test_a_dead_path_is_given_up_as_soon_as_a_slow_one_would_have_been_done(self, nbytes: int) -> None:
        settings = self.settings
        wire = Wire(settings)
        wire.come_up()
        began_s, wire.nbytes_per_s = wire.now_s, 1e-9
        assert wire.message_s(nbytes) is None
        transfer_s = min(settings.longest_transfer_s, nbytes / settings.slow_nbytes_per_s)
        assert wire.now_s - began_s == pytest.approx(settings.suspicion_s + settings.stall_s + transfer_s)

    @how(max_examples=30)
    @given(st.floats(2.0, 15.0), st.floats(1.5, 4.0))
    def test_a_path_slower_than_that_is_learnt_to_be_slow(self, transfer_s: float, factor: float) -> None:
        nbytes = 100 << 20
        settings = replace(self.settings, longest_transfer_s=2.5 * transfer_s)
        wire = Wire(settings)
        wire.come_up()
        wire.nbytes_per_s = nbytes / transfer_s
        deaths = 0
        while wire.message_s(nbytes) is None:
            deaths += 1
            wire.come_up()
        assert deaths <= math.ceil(math.log2(transfer_s)), "at least twice as patient each time"
        wire.nbytes_per_s /= factor ** (factor < 2.0)
        assert wire.message_s(nbytes) is not None, "not twice as slow as it was"
        wire.nbytes_per_s = math.inf
        assert wire.message_s(nbytes) == 0.0
        began_s, wire.nbytes_per_s = wire.now_s, 1e-9
        assert wire.message_s(nbytes) is None
        assert wire.now_s - began_s < settings.suspicion_s + settings.stall_s + 1.1, "its past is forgotten"

    def test_a_probe_of_the_usual_size_may_take_as_long_as_a_message(self) -> None:
        wire = Wire(replace(self.settings, preferred=Path.HOST))
        while not wire.outlet.device_healthy:
            wire.pass_until(wire.now_s + 0.1)
        nbytes, limit_s = 800 << 20, self.settings.probe_limit_s
        for transfer_s, survives in ((limit_s + 7.0, True), (limit_s + 9.5, True), (limit_s + 11.0, False)):
            wire.nbytes_per_s = nbytes / transfer_s
            wire.outlet.measure(nbytes)
            for _ in range(200):
                wire.pass_until(wire.now_s + 1.0)
            assert (wire.outlet.failures == 0) == survives, wire.outlet.cause
