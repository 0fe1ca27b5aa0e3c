# SPDX-License-Identifier: Apache-2.0
"""The two ends of a directed link with two paths, over a network that loses sessions, delays notes and drops the host
path at will: whatever happens, every message that is asked for arrives, with its own content."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from transport_checks import retransmit_queue

from adaptra_megatron.common.typed_messages import packed
from adaptra_megatron.transport.failover.control_messages import Note, Received, decode_note
from adaptra_megatron.transport.failover.path_receiver import DeviceReceive, Receiver, ReceiverEffects
from adaptra_megatron.transport.failover.path_sender import DeviceSend, Sender, SenderEffects
from adaptra_megatron.transport.gpu.cuda_device import Computed
from adaptra_megatron.transport.host_link.message_queues import Outgoing
from adaptra_megatron.transport.link_paths import Path, PathSettings, ProbeTimes
from adaptra_megatron.transport.message_keys import Direction, MessageKey

SETTINGS = PathSettings(probes=2, probe_pause_s=0.01, first_rest_s=0.1, longest_rest_s=1.0)
FEW = st.integers(1, 4)


def key(number: int) -> MessageKey:
    return MessageKey(0, Direction.ACTIVATION, 0, number)


class Session:
    """One device session: what the sender put in, what the receiver expects, and whether it still works."""

    def __init__(self) -> None:
        self.sent: dict[int, DeviceSend] = {}
        self.expected: dict[int, DeviceReceive[int]] = {}
        self.arrived = 0
        self.broken = False


class PathSwitch(RuleBasedStateMachine):
    """Plays what two_paths.py does around an Sender and an Receiver."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = retransmit_queue(1 << 20, 1 << 40)
        self.sender = Sender(SETTINGS, self.queue)
        self.receiver: Receiver[int] = Receiver(SETTINGS)
        self.now_s = 0.0
        self.host_down_since_s: float | None = None
        self.host: deque[Outgoing] = deque()
        """Messages that the host path carries in this session and has not acknowledged."""
        self.to_receiver: deque[Note] = deque()
        self.to_sender: deque[Note] = deque()
        self.confirmations: deque[tuple[int, int]] = deque()
        self.measured: list[ProbeTimes] = []
        self.sessions: dict[int, Session] = {}
        self.makes: list[tuple[bool, int]] = []
        self.here: dict[int, int] = {}
        """What has arrived, by number; asked for or not."""

    @initialize(up=st.booleans())
    def begin(self, up: bool) -> None:
        """Most of what can go wrong needs a device path that has come up."""
        self._tick()
        if up:
            self.everything_moves(12)
            assert self.sender.path is Path.DEVICE

    # What changes from outside.

    @rule(count=FEW)
    def post(self, count: int) -> None:
        for _ in range(count):
            number = self.sender.posted
            message = self.sender.post(key(number), Computed(torch.tensor([number]), None), self.now_s)
            assert message.number == number
            self._carry_out()

    @rule(count=FEW)
    def ask(self, count: int) -> None:
        for _ in range(count):
            asked = self.receiver.posted
            assert self.receiver.post(key(asked), asked) == self.receiver.posted - 1
            self._carry_out()

    @rule(path=st.sampled_from(Path))
    def prefer(self, path: Path) -> None:
        self.sender.prefer(path)
        self._tick()

    @rule(nbytes=st.sampled_from([100, 2000]))
    def measure(self, nbytes: int) -> None:
        self.sender.measure(nbytes)
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
            self.receiver.confirm_again()
            self._carry_out()

    @rule()
    def host_is_repaired(self) -> None:
        self.host_down_since_s = None
        self.host.clear()
        self.queue.rewind()
        self.receiver.confirm_again()
        self._carry_out()

    @rule(at_sender=st.booleans())
    def session_fails(self, at_sender: bool) -> None:
        for number, session in self.sessions.items():
            if not session.broken:
                session.broken = True
                if at_sender:
                    self.sender.failed(number, "a test")
                else:
                    self.receiver.failed(number, "a test")
        self._carry_out()

    @rule()
    def waits_for_the_oldest(self) -> None:
        wanted = next((number for number in range(self.receiver.posted) if number not in self.here), None)
        if wanted is not None and self.receiver.expects(key(wanted)):
            assert self.receiver.suspect(self.now_s - 1.0, self.now_s) > self.now_s
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
            if self.to_receiver:
                self.receiver.on_note(self.to_receiver.popleft(), self.now_s)  # type: ignore[arg-type]
                self._carry_out()
            if self.to_sender:
                self.sender.on_note(self.to_sender.popleft(), self.now_s)  # type: ignore[arg-type]
                self._carry_out()
            if self.confirmations:
                self.sender.confirmed(*self.confirmations.popleft())

    @rule()
    def groups_are_made(self) -> None:
        makes, self.makes = self.makes, []
        for as_sender, number in makes:
            self.sessions.setdefault(number, Session())
            if as_sender:
                self.sender.made(number, self.now_s)
            else:
                self.receiver.made(number)
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
                taken = self.receiver.arrived(number, 10, self.now_s)
                if taken is not None and taken >= 0:
                    assert send.message is not None
                    assert taken == sent
                    self.here.setdefault(taken, int(send.message.computed.tensor))
                self._carry_out()

    @rule(count=FEW, acknowledged=st.booleans())
    def host_messages_arrive(self, count: int, acknowledged: bool = True) -> None:
        """They may arrive while their acknowledgements are still to come, or are lost with the host path."""
        if self.host_down_since_s is not None:
            return
        while (message := self.queue.next_to_write()) is not None:
            self.queue.mark_written(message)
            self.host.append(message)
        for message in list(self.host)[:count]:
            self.here.setdefault(message.number, int(message.computed.tensor))
            if acknowledged:
                self.host.remove(message)
                assert self.queue.acknowledge(message.sequence) is message

    def all_come_and_the_receiver_goes_on(self) -> None:
        """As at the end of an iteration: once the receiver has all messages, it asks for some of the next."""
        for _ in range(2000):
            if len(self.here) == self.sender.posted:
                break
            self.notes_arrive(1)
            self.groups_are_made()
            self.device_messages_arrive(1)
            self.host_messages_arrive(1)
            self.now_s += 0.01
        self.ask(2)

    # The glue.

    def _tick(self) -> None:
        down_s = 0.0 if self.host_down_since_s is None else max(1e-9, self.now_s - self.host_down_since_s)
        self.sender.tick(self.now_s, down_s)
        self._carry_out()

    def _carry_out(self) -> None:
        sender, self.sender.effects = self.sender.effects, SenderEffects()
        receiver, self.receiver.effects = self.receiver.effects, ReceiverEffects()
        self.to_receiver += [decode_note(packed(note)) for note in sender.notes]
        self.to_sender += [decode_note(packed(note)) for note in receiver.notes]
        if receiver.confirm is not None and self.host_down_since_s is None:
            self.confirmations.append(receiver.confirm)
        elif receiver.confirm is not None:
            self.to_sender.append(Received(*receiver.confirm))
        for message in sender.resends:
            self.queue.carry(message, Path.HOST)
        if sender.measured is not None:
            self.measured += sender.measured.times(1)
        for send in sender.sends:
            session = self.sessions.get(send.session)
            if session is not None:
                session.sent[send.index] = send
        for receive in receiver.receives:
            assert receive.number < self.receiver.posted, "the shape of this message is not known yet"
            assert receive.specification == (None if receive.number < 0 else receive.number)
            session = self.sessions.get(receive.session)
            if session is not None:
                session.expected[receive.index] = receive
        self.makes += [(True, number) for number in sender.begin] + [(False, number) for number in receiver.begin]
        for number in (*sender.end, *receiver.end):
            if number in self.sessions:
                self.sessions[number].broken = True

    @invariant()
    def content_is_its_own(self) -> None:
        assert all(content == number for number, content in self.here.items())

    @invariant()
    def probes_tell_the_truth(self) -> None:
        assert len(self.measured) % SETTINGS.measuring_probes == 0
        assert all(0.0 <= probe.sent_s <= probe.arrived_s <= self.now_s for probe in self.measured)

    def teardown(self) -> None:
        """Everything works from now on: whatever was posted and asked for arrives, and nothing is retained."""
        self.host_is_repaired()
        self.settle()
        assert self.sender.path is self.sender.preferred
        known = len(self.measured)
        self.sender.prefer(Path.HOST)
        self.everything_moves(10)
        self.measure(500)
        self.everything_moves(10)
        assert [probe.nbytes for probe in self.measured[known:]][-SETTINGS.measuring_probes :] == [500] * 3

    def settle(self) -> None:
        while self.receiver.posted < self.sender.posted:
            self.ask(1)
        while self.sender.posted < self.receiver.posted:
            self.post(1)
        # Sessions broken on one side only are noticed by the other, as connections that end are.
        for number, session in self.sessions.items():
            if session.broken:
                self.receiver.failed(number, "its connection ended")
        self._carry_out()
        self.all_come_and_the_receiver_goes_on()
        self.everything_moves(150)
        self.waits_for_the_oldest()
        self.notes_arrive(4)
        assert sorted(self.here) == list(range(self.sender.posted))
        assert self.sender.retained == 0, "the sender waits for this before it posts what the receiver waits for"
        self.post(2)
        self.everything_moves(50)
        assert sorted(self.here) == list(range(self.sender.posted))
        assert self.sender.retained == 0
        assert not len(self.queue)
        assert self.sender.device_healthy


class DevicePathAlone(PathSwitch):
    """The host path does not come back."""

    def teardown(self) -> None:
        self.host_breaks()
        self.settle()


TestTwoPaths = PathSwitch.TestCase
TestDevicePathAlone = DevicePathAlone.TestCase


def test_messages_before_probes_are_confirmed_though_more_are_asked_for() -> None:
    """Messages change their path back while probes are expected behind the last of an iteration: the sender waits for
    its confirmation before it posts what the receiver, which has begun the next iteration, waits for."""
    paths = PathSwitch()
    paths.begin(up=True)
    paths.ask(2)
    paths.post(2)
    paths.prefer(Path.HOST)
    paths.notes_arrive(4)
    paths.measure(100)
    paths.notes_arrive(4)
    paths.prefer(Path.DEVICE)
    paths.device_messages_arrive(2)
    assert sorted(paths.here) == [0, 1]
    paths.ask(2)
    paths.everything_moves(100)
    assert paths.sender.retained == 0
    paths.teardown()


def test_a_message_that_came_by_both_paths_is_confirmed_though_more_are_asked_for() -> None:
    """The acknowledgement is lost with the host path, so the message goes by the device path too. Meanwhile the
    receiver has begun the next iteration, whose messages the sender posts once the last one's are confirmed."""
    paths = PathSwitch()
    paths.begin(up=True)
    paths.prefer(Path.HOST)
    paths.everything_moves(4)
    assert paths.sender.path is Path.HOST
    paths.ask(1)
    paths.post(1)
    paths.host_messages_arrive(1, acknowledged=False)
    assert sorted(paths.here) == [0]
    paths.ask(2)
    paths.host_breaks()
    paths.everything_moves(30)
    assert paths.sender.path is Path.DEVICE
    assert paths.sender.retained == 1
    paths.waits_for_the_oldest()
    paths.notes_arrive(1)
    assert paths.sender.retained == 0
    paths.teardown()


class Wire:
    """A link whose notes take no time, and whose device path takes some for each message; a clock that jumps."""

    def __init__(self, settings: PathSettings) -> None:
        self.sender = Sender(settings, retransmit_queue(1 << 20, 1 << 40))
        self.receiver: Receiver[int] = Receiver(settings)
        self.nbytes_per_s = math.inf
        self.now_s = 100.0
        self.arrivals: deque[tuple[float, int, int]] = deque()
        """When, in which session, and how large: what is on its way."""
        self.posted = 0
        self.here = 0

    def come_up(self) -> None:
        """A session that carries messages."""
        for _ in range(1000):
            if self.sender.path is Path.DEVICE:
                return
            self.pass_until(self.now_s + 0.1)
        raise AssertionError("the device path does not come up")

    def message_s(self, nbytes: int) -> float | None:
        """Send one, and wait for it as the training does; how long that took, None if its session died."""
        key_, began_s = self.post(nbytes), self.now_s
        while self.receiver.expects(key_):
            again_s = self.receiver.suspect(began_s, self.now_s)
            if not self.receiver.alive:
                self._settle()
                return None
            self.pass_until(again_s)
        return self.now_s - began_s

    def post(self, nbytes: int) -> MessageKey:
        """Send a message that the training then waits for."""
        key_ = key(self.posted)
        self.posted += 1
        self.receiver.post(key_, 0)
        tensor = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        assert self.sender.post(key_, Computed(tensor, None), self.now_s).path is Path.DEVICE
        self._settle()
        return key_

    def pass_until(self, until_s: float, host_down_s: float = 0.0) -> None:
        """Up to the next thing that happens, at the latest."""
        self._settle()
        due_s = self.arrivals[0][0] if self.arrivals else math.inf
        self.now_s = min(until_s, due_s, max(self.now_s, self.sender.next_tick_s))
        if self.now_s == due_s:
            _due_s, session, nbytes = self.arrivals.popleft()
            self.receiver.arrived(session, nbytes, self.now_s)
        self.sender.tick(self.now_s, host_down_s)
        self._settle()

    def _settle(self) -> None:
        while True:
            sender, self.sender.effects = self.sender.effects, SenderEffects()
            receiver, self.receiver.effects = self.receiver.effects, ReceiverEffects()
            if sender == SenderEffects() and receiver == ReceiverEffects():
                return
            for send in sender.sends:
                nbytes = send.probe_nbytes if send.message is None else send.message.computed.tensor.nbytes
                start_s = max(self.now_s, self.arrivals[-1][0] if self.arrivals else 0.0)
                self.arrivals.append((start_s + nbytes / self.nbytes_per_s, send.session, nbytes))
            for note in sender.notes:
                self.receiver.on_note(note, self.now_s)
            for answer in receiver.notes:
                self.sender.on_note(answer, self.now_s)
            if receiver.confirm is not None:
                self.sender.confirmed(*receiver.confirm)
            for session in sender.begin:
                self.arrivals.clear()
                self.sender.made(session, self.now_s)
                self.receiver.made(session)


def test_a_path_that_is_not_held_ready_is_made_when_the_host_path_is_down() -> None:
    """And not probed while it is up again: in a queue of the device that would keep computation."""
    settings = PathSettings(preferred=Path.HOST, standby=False)
    wire = Wire(settings)
    for _ in range(100):
        wire.pass_until(wire.now_s + 1.0)
    assert (wire.sender.device_healthy, wire.arrivals) == (False, deque())
    assert wire.sender.next_tick_s == math.inf
    for down_s in (0.1, settings.host_patience_s + 0.1, settings.host_patience_s + 0.2):
        wire.pass_until(wire.now_s + 0.1, host_down_s=down_s)
    for _ in range(settings.probes + 2):
        wire.pass_until(wire.now_s + 0.1, host_down_s=1.0)
    assert wire.sender.path is Path.DEVICE
    for _ in range(2):
        wire.pass_until(wire.now_s + 0.1)
    wire.sender.measure(1 << 20)
    wire.pass_until(wire.now_s + 0.1)
    assert (wire.sender.path, wire.sender.device_healthy, wire.arrivals) == (Path.HOST, True, deque())


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

    def test_a_process_that_did_not_run_reads_what_has_arrived_before_it_gives_up_a_path(self) -> None:
        wire = Wire(self.settings)
        wire.come_up()
        wire.nbytes_per_s = 1e-9
        wire.post(1)
        began_s = wire.now_s
        while wire.receiver._session.sent <= wire.receiver._session.received:
            wire.pass_until(wire.receiver.suspect(began_s, wire.now_s))
        wire.now_s = wire.receiver.suspect(began_s, wire.now_s) + 5.0  # stopped
        again_s = wire.receiver.suspect(began_s, wire.now_s)
        assert (wire.receiver.alive, again_s) == (True, wire.now_s + self.settings.suspicion_s)
        wire.now_s = again_s + 5.0
        wire.receiver.suspect(began_s, wire.now_s)
        assert not wire.receiver.alive, "once"

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
        while not wire.sender.device_healthy:
            wire.pass_until(wire.now_s + 0.1)
        nbytes, limit_s = 800 << 20, self.settings.probe_limit_s
        for transfer_s, survives in ((limit_s + 7.0, True), (limit_s + 9.5, True), (limit_s + 11.0, False)):
            wire.nbytes_per_s = nbytes / transfer_s
            wire.sender.measure(nbytes)
            for _ in range(200):
                wire.pass_until(wire.now_s + 1.0)
            assert (wire.sender.failures == 0) == survives, wire.sender.cause
