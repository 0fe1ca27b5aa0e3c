# SPDX-License-Identifier: Apache-2.0
"""Failover of the verbs wire over simulated rails: lost packets, late packets, lost acknowledgements, dead links.

Time is simulated. A write into a slot that has been published is what fencing must prevent, and fails the test.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptra_megatron.transport.wires.verbs.rail import Completion, Did, QueuePairError, RailState, RailTiming
from adaptra_megatron.transport.wires.verbs.verbs_messages import Fenced, Raise, Ready, VerbsEndpoint, VerbsMessage
from adaptra_megatron.transport.wires.verbs.verbs_session import VerbsSession

SLOTS = 4
TIMING = RailTiming()


@dataclass
class Packet:
    source: SimulatedPair
    use: int
    target_use: int
    did: Did
    number: int


@dataclass
class SimulatedRail:
    """A connection that delivers in order, or holds everything back until later, or loses acknowledgements."""

    name: str
    link: bool = True
    held: bool = False
    silent: bool = False
    """What arrives is not acknowledged."""
    under_way: deque[Packet] = field(default_factory=deque)
    dropped_late: int = 0

    def deliver(self) -> None:
        while self.under_way and not self.held and self.link:
            packet = self.under_way.popleft()
            target = packet.source.other
            if target.use != packet.target_use or target.state not in ("ready", "connected"):
                self.dropped_late += 1
                continue
            if packet.did is Did.WRITE:
                target.world.write(packet.number)
                target.finished.append(Completion(Did.RECEIVE, packet.number, None))
            elif packet.did is Did.GRANT:
                target.finished.append(Completion(Did.ON_GRANT, packet.number & 0xFFFFFFFF, None))
            if not self.silent and packet.source.use == packet.use and packet.source.state == "connected":
                packet.source.finished.append(Completion(packet.did, packet.number, None))


class SimulatedPair:
    """See verbs_rail.QueuePair."""

    other: SimulatedPair
    peer_use = 0

    def __init__(self, rail: SimulatedRail, world: World, stubborn: bool) -> None:
        """`stubborn`: stopping it flushes nothing."""
        self.device, self.rail, self.world, self.stubborn = rail.name, rail, world, stubborn
        self.state, self.use, self.receives = "reset", 0, 0
        self.finished: list[Completion] = []

    def port_active(self) -> bool:
        return self.rail.link

    def prepare(self) -> VerbsEndpoint:
        self.use += 1
        self.state, self.receives = "ready", SLOTS
        return VerbsEndpoint("", 0, self.use, 0, 5, 0, 0)

    def connect(self, peer: VerbsEndpoint) -> None:
        self.peer_use, self.state = peer.number, "connected"

    def probe(self) -> None:
        self._send(Did.PROBE, 0)

    def write(self, chunk: int, nbytes: int) -> None:
        self._send(Did.WRITE, chunk)

    def grant(self, chunks: int) -> None:
        self._send(Did.GRANT, chunks)

    def _send(self, did: Did, number: int) -> None:
        if self.state != "connected":
            raise QueuePairError(f"it is {self.state}")
        self.rail.under_way.append(Packet(self, self.use, self.peer_use, did, number))

    def completions(self) -> list[Completion]:
        finished, self.finished = self.finished, []
        return finished

    def event(self) -> str | None:
        return None if self.rail.link else "event PORT_ERR"

    def stop(self) -> None:
        self.state = "error"
        if not self.stubborn:
            self.finished += [Completion(Did.RECEIVE, 0, "WR_FLUSH_ERR")] * self.receives
            self.receives = 0

    @property
    def drained(self) -> bool:
        return self.receives == 0

    def reset(self) -> None:
        self.state, self.receives = "reset", 0


class World:
    """One end: what its session does to it. See verbs_session.Outside."""

    session: VerbsSession
    other: World

    def __init__(self) -> None:
        self.received: deque[VerbsMessage] = deque()
        self.written: set[int] = set()
        self.committed: list[int] = []
        self.released: list[int] = []
        self.claimed = self.taken = 0

    def send(self, message: VerbsMessage) -> None:
        self.other.received.append(message)

    def release(self, chunk: int) -> None:
        assert chunk not in self.released
        assert chunk in self.other.written, "dropped what has not arrived"
        self.released.append(chunk)

    def commit(self, chunk: int) -> int:
        assert chunk in self.written
        self.committed.append(chunk)
        return 1

    def write(self, chunk: int) -> None:
        assert chunk < self.claimed, "into a slot that still belongs to the reader"
        assert chunk not in self.committed, "into a slot that has been published"
        self.written.add(chunk)

    def claim(self) -> None:
        """The reader of the ring takes all that was published in order; freed slots are claimed again."""
        published = set(self.committed)
        free_from = next(chunk for chunk in range(len(published) + 1) if chunk not in published)
        while self.claimed < free_from + SLOTS:
            self.session.claimed(self.claimed)
            self.claimed += 1


class Simulation:
    def __init__(self, rails: int = 2, stubborn: bool = False) -> None:
        self.now_s = 100.0
        self.rails = [SimulatedRail(f"rail{index}") for index in range(rails)]
        self.ends = World(), World()
        pairs = [[SimulatedPair(rail, end, stubborn) for rail in self.rails] for end in self.ends]
        for left, right in zip(*pairs, strict=True):
            left.other, right.other = right, left
        for index, end in enumerate(self.ends):
            end.other = self.ends[1 - index]
            end.session = VerbsSession(
                pairs[index], initiates=index == 0, slots=SLOTS, outside=end, now_s=self.now_s, timing=TIMING
            )

    def step(self, seconds: float = 0.001) -> None:
        self.now_s += seconds
        for rail in self.rails:
            rail.deliver()
        for end in self.ends:
            end.claim()
            while end.received:
                end.session.on_message(end.received.popleft(), self.now_s)
            end.session.advance(self.now_s)

    def send(self, end: int, chunks: int) -> None:
        world = self.ends[end]
        for _ in range(chunks):
            world.session.taken(world.taken, 1000)
            world.taken += 1

    def run(self, limit_s: float) -> float:
        """Until everything has arrived and is known to have; how long it took."""
        begun_s = self.now_s
        while any(end.session.pending for end in self.ends):
            assert self.now_s - begun_s < limit_s, [end.session.outage() for end in self.ends]
            self.step(0.01)
        return self.now_s - begun_s

    def until(self, rail: int, state: RailState, limit_s: float = 30.0) -> None:
        begun_s = self.now_s
        while any(end.session.rail_states[rail] is not state for end in self.ends):
            assert self.now_s - begun_s < limit_s
            self.step(0.01)

    def check(self) -> None:
        for end in self.ends:
            assert sorted(end.other.committed) == sorted(end.released) == list(range(end.taken))


def up(rails: int = 2, stubborn: bool = False) -> Simulation:
    simulation = Simulation(rails, stubborn)
    for rail in range(rails):
        simulation.until(rail, RailState.UP)
    return simulation


def test_both_directions_over_both_rails() -> None:
    simulation = up()
    simulation.send(0, 20)
    simulation.send(1, 30)
    simulation.run(1.0)
    simulation.check()
    assert all(min(end.session.rail_chunks) > 0 for end in simulation.ends)
    assert simulation.ends[0].session.sent_nbytes == 20_000


@pytest.mark.parametrize("stubborn", [False, True])
@pytest.mark.parametrize("fault", ["held", "silent"])
def test_without_completions_the_deadline_decides_and_nothing_arrives_late(fault: str, stubborn: bool) -> None:
    simulation = up(stubborn=stubborn)
    simulation.send(0, 3)
    setattr(simulation.rails[0], fault, True)
    simulation.send(0, 17)
    assert simulation.run(10.0) < TIMING.silence_s + 2 * TIMING.fence_s + 0.2 < 2.0, "failover took too long"
    simulation.check()
    assert RailState.UP in [end.session.rail_states[1] for end in simulation.ends]
    setattr(simulation.rails[0], fault, False)
    simulation.until(0, RailState.UP)
    assert fault == "silent" or simulation.rails[0].dropped_late > 0, "nothing was late"
    before = simulation.ends[0].session.rail_chunks[0]
    simulation.send(0, 20)
    simulation.run(1.0)
    simulation.check()
    assert simulation.ends[0].session.rail_chunks[0] > before


def test_a_dead_link_is_left_at_once_and_used_again() -> None:
    simulation = up()
    simulation.send(0, 40)
    simulation.step()
    simulation.rails[1].link = False
    assert simulation.run(1.0) < 0.5
    simulation.check()
    for _ in range(500):
        simulation.step(0.01)
    assert simulation.ends[0].session.rail_states[1] is RailState.DOWN
    assert "no link" in simulation.ends[0].session.outage()[1]
    simulation.rails[1].link = True
    simulation.until(1, RailState.UP)


def test_attempts_on_a_bad_rail_become_rarer() -> None:
    simulation = up()
    simulation.rails[0].held = True
    simulation.send(0, 8)
    simulation.run(10.0)
    attempts = 0
    for _ in range(6000):
        states = [end.session.rail_states[0] for end in simulation.ends]
        simulation.step(0.01)
        attempts += states[0] is RailState.DOWN and simulation.ends[0].session.rail_states[0] is RailState.RAISING
    assert 4 < attempts < 14, "one attempt takes raise_s, and pauses grow to longest_pause_s"


def test_an_outage_of_all_rails_is_told_with_its_causes() -> None:
    simulation = up()
    for rail in simulation.rails:
        rail.link = False
    simulation.send(1, 4)
    for _ in range(300):
        simulation.step(0.01)
    outage_s, causes = simulation.ends[1].session.outage()
    assert outage_s > 2.5
    assert all(f"rail{rail}: the peer gave it up: event PORT_ERR" in causes for rail in range(2))
    for rail in simulation.rails:
        rail.link = True
    simulation.run(30.0)
    simulation.check()


def test_rails_that_were_tried_in_vain_are_hopeless() -> None:
    simulation = Simulation()
    simulation.rails[0].link, simulation.rails[1].held = False, True
    session = simulation.ends[0].session
    simulation.step()
    assert not session.hopeless, "the second is still being raised"
    for _ in range(300):
        simulation.step(0.01)
    assert session.hopeless
    simulation.rails[1].held = False
    simulation.until(1, RailState.UP)
    assert not session.hopeless


def test_grants_alone_on_a_dead_rail_are_repeated() -> None:
    simulation = up()
    simulation.send(0, SLOTS)
    while simulation.ends[0].session.pending:
        simulation.step()
    simulation.rails[0].held = True
    simulation.step()
    assert [packet.did for packet in simulation.rails[0].under_way] == [Did.GRANT]
    simulation.send(0, 2 * SLOTS)
    assert simulation.run(10.0) < 2 * (TIMING.silence_s + 2 * TIMING.fence_s + 0.2)
    simulation.check()
    assert simulation.ends[1].session.rail_states[0] is not RailState.UP


def test_an_idle_session_has_nothing_to_do() -> None:
    simulation = up()
    simulation.send(0, 3)
    simulation.run(1.0)
    assert [end.session.next_s() for end in simulation.ends] == [None, None]


@pytest.mark.parametrize(
    "message",
    [
        Ready(rail=2, attempt=1),
        Ready(rail=0, attempt=7),
        Fenced(rail=0, attempt=0, below=0, beyond=[], cause=""),
        Raise(rail=0, attempt=2, endpoint=VerbsEndpoint("", 0, 1, 0, 5, 0, 0)),
    ],
)
def test_what_a_peer_cannot_say_is_refused(message: VerbsMessage) -> None:
    simulation = up()
    with pytest.raises(ValueError, match="rail"):
        simulation.ends[1].session.on_message(message, simulation.now_s)


FAULTS = st.tuples(st.sampled_from(["held", "silent", "link"]), st.integers(0, 2), st.booleans())
STEPS = st.tuples(FAULTS | st.none(), st.integers(0, 1), st.integers(0, 6), st.sampled_from([0.001, 0.05, 0.6, 2.0]))


@settings(max_examples=150)
@given(st.lists(STEPS, max_size=25), st.booleans(), st.sampled_from([1, 3]))
def test_whatever_breaks_every_chunk_arrives_once(
    steps: list[tuple[tuple[str, int, bool] | None, int, int, float]], stubborn: bool, rails: int
) -> None:
    simulation = Simulation(rails, stubborn)
    for fault, end, chunks, seconds in steps:
        if fault is not None:
            name, rail, value = fault
            setattr(simulation.rails[rail % rails], name, value)
        simulation.send(end, chunks)
        for _ in range(4):
            simulation.step(seconds / 4)
    for rail in simulation.rails:
        rail.link, rail.held, rail.silent = True, False, False
    simulation.run(60.0)
    simulation.check()
