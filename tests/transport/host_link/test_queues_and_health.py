# SPDX-License-Identifier: Apache-2.0
"""What the host path remembers: unacknowledged messages, arrivals, the link's health, and where stages are."""

from __future__ import annotations

import math
import threading

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from transport_checks import CPU, retransmit_queue

from adaptra_megatron.common import control_store
from adaptra_megatron.common import layout as identity
from adaptra_megatron.common.typed_messages import packed
from adaptra_megatron.transport._ring import Inbox, Ring
from adaptra_megatron.transport.delegate.delegate_control import StartDelegate
from adaptra_megatron.transport.dual_path.host_transport import neighbours
from adaptra_megatron.transport.gpu.cuda_device import Computed
from adaptra_megatron.transport.gpu.host_copies import HostPayload, HostReceipt
from adaptra_megatron.transport.host_link.frames import check_can_travel, describe, key_of
from adaptra_megatron.transport.host_link.host_link_state import HostLinkState, LinkHealth
from adaptra_megatron.transport.host_link.message_queues import MessageArrival, ReceiveQueue, RetransmitQueue
from adaptra_megatron.transport.link_ends import LinkEnds
from adaptra_megatron.transport.link_paths import Path
from adaptra_megatron.transport.message_keys import Direction, MessageKey, TransportError
from adaptra_megatron.transport.setup import host_placement as placement

NUMBERS = st.integers(0, 9)


def key(micro_batch: int) -> MessageKey:
    return MessageKey(0, Direction.ACTIVATION, 0, micro_batch)


def computed(tensor: torch.Tensor) -> Computed:
    return Computed(tensor, None)


class TwoEnds(RuleBasedStateMachine):
    """A retransmit queue and its peer's arrivals over a path that breaks at any time: all are used once."""

    window = 3

    def __init__(self) -> None:
        super().__init__()
        self.retransmit_queue, self.arrivals = retransmit_queue(self.window), ReceiveQueue()
        self.path: list[tuple[int, MessageKey, torch.Tensor]] = []
        self.seen: set[int] = set()
        self.sent = self.asked = 0
        self.used: list[int] = []

    @rule()
    def post(self) -> None:
        self.retransmit_queue.post(key(self.sent), self.sent, computed(torch.full((2,), float(self.sent))), 0.0)
        self.sent += 1

    @rule()
    def write(self) -> None:
        message = self.retransmit_queue.next_to_write()
        if message is not None:
            self.retransmit_queue.mark_written(message)
            self.path.append((message.sequence, message.key, message.computed.tensor))

    @rule()
    def deliver(self) -> None:
        if self.path:
            sequence, name, tensor = self.path.pop(0)
            if sequence in self.seen:
                self.arrivals.arrive_again(sequence)
            else:
                self.seen.add(sequence)
                self.arrivals.arrive(name, MessageArrival(sequence, HostReceipt(tensor), 0.0))

    @rule()
    def ask(self) -> None:
        if self.asked < self.sent:
            self.arrivals.post(key(self.asked), 0.0)
            self.asked += 1

    @rule(number=NUMBERS)
    def use(self, number: int) -> None:
        ready = [n for n in range(self.asked) if key(n) in self.arrivals]
        if ready:
            chosen = ready[number % len(ready)]
            arrival, _posted_s = self.arrivals.pop(key(chosen))
            assert arrival.receipt.take()[0] == chosen
            self.used.append(chosen)

    @rule()
    def acknowledge(self) -> None:
        if self.arrivals.due:
            self.retransmit_queue.acknowledge(self.arrivals.due.popleft())

    @rule()
    def acknowledgement_lost_with_the_path(self) -> None:
        if self.arrivals.due:
            self.arrivals.due.popleft()
        self.path.clear()
        self.retransmit_queue.rewind()

    @invariant()
    def nothing_is_used_twice_and_the_window_holds(self) -> None:
        assert len(set(self.used)) == len(self.used)
        assert len(self.path) <= self.window
        assert len(self.arrivals) <= self.window + len([n for n in range(self.asked) if key(n) in self.arrivals])

    def teardown(self) -> None:
        """A path that holds long enough brings everything."""
        while self.asked < self.sent:
            self.ask()
        self.acknowledgement_lost_with_the_path()
        for _ in range(6 * self.sent + 6):
            self.write()
            self.deliver()
            self.use(0)
            self.acknowledge()
        assert sorted(self.used) == list(range(self.sent))
        assert not len(self.retransmit_queue)


TestTwoEnds = TwoEnds.TestCase


class Tries(RuleBasedStateMachine):
    """Both ends of a link begin the same micro-batches again and again, each when it likes; nothing is lost by then."""

    def __init__(self) -> None:
        super().__init__()
        self.arrivals = ReceiveQueue()
        self.path: list[tuple[int, MessageKey]] = []
        self.sending = self.receiving = 0
        self.sent = self.asked = self.sequence = 0
        self.used: list[tuple[int, int]] = []
        self.delivered: set[int] = set()
        self.acknowledged: set[int] = set()

    @rule()
    def send(self) -> None:
        self.path.append((self.sequence, key(self.sent)._replace(attempt=self.sending)))
        self.sequence += 1
        self.sent += 1

    @rule()
    def sender_tries_again(self) -> None:
        self.sending, self.sent = self.sending + 1, 0

    @rule(number=NUMBERS)
    def deliver(self, number: int) -> None:
        if self.path:
            sequence, name = self.path.pop(number % len(self.path))
            content = torch.tensor([name.attempt, name.micro_batch])
            self.arrivals.arrive(name, MessageArrival(sequence, HostReceipt(content), 0.0))
            self.delivered.add(sequence)

    @rule()
    def ask(self) -> None:
        self.arrivals.post(key(self.asked)._replace(attempt=self.receiving), 0.0)
        self.asked += 1

    @rule()
    def receiver_tries_again(self) -> None:
        self.receiving, self.asked = self.receiving + 1, 0

    @rule(number=NUMBERS)
    def use(self, number: int) -> None:
        name = key(number)._replace(attempt=self.receiving)
        if number < self.asked and name in self.arrivals:
            arrival, _posted_s = self.arrivals.pop(name)
            assert arrival.receipt.take().tolist() == [self.receiving, number]
            self.used.append((self.receiving, number))

    @rule()
    def acknowledge(self) -> None:
        while self.arrivals.due:
            self.acknowledged.add(self.arrivals.due.popleft())

    @invariant()
    def nothing_is_used_twice(self) -> None:
        assert len(set(self.used)) == len(self.used)

    def teardown(self) -> None:
        """What has come of tries that are over is acknowledged, dropped and counted."""
        self.receiving, self.asked = max(self.sending, self.receiving) + 1, 0
        self.ask()
        while self.path:
            self.deliver(0)
        self.acknowledge()
        assert self.acknowledged == self.delivered
        assert not len(self.arrivals)
        assert self.arrivals.stale == len(self.delivered) - len(self.used)
        assert not self.arrivals.doubles


TestTries = Tries.TestCase
TestTries.settings = settings(max_examples=50, stateful_step_count=40)


def test_a_key_comes_back_from_the_wire_as_it_went_and_later_tries_have_higher_numbers() -> None:
    names = [
        MessageKey(iteration, direction, 3, 70_000, attempt)
        for iteration in (0, 7, 1 << 40)
        for attempt in (0, 1, 65_535)
        for direction in Direction
    ]
    ring, inbox = Ring.create(32, 4096), Inbox(max_message_nbytes=4096, pooled_nbytes=0)
    for sequence, name in enumerate(names):
        tensor = torch.zeros(2)
        ring.write(describe(sequence, name, HostPayload(tensor)), tensor.data_ptr(), tensor.nbytes, math.inf)
    events = [inbox.next(ring, math.inf) for _ in names]
    assert [key_of(event) for event in events if event is not None] == names
    turns = [event.iteration for event in events if event is not None]
    assert turns == sorted(turns)


def test_a_key_is_told_by_iteration_and_micro_batch_of_its_replica() -> None:
    name = MessageKey(7, Direction.GRADIENT, 1, 19, 2)
    assert str(name) == "gradient of micro-batch 19 for chunk 1 in iteration 7, attempt 2"
    assert name.spelled(8) == "gradient of micro-batch 3 of replica 2 for chunk 1 in iteration 7, attempt 2"
    assert str(key(3)) == "activation of micro-batch 3 for chunk 0 in iteration 0"


def test_the_window_counts_bytes_and_lets_one_large_message_through() -> None:
    queue = retransmit_queue(10, 100)
    for number, nbytes in enumerate((500, 60, 60)):
        queue.post(key(number), number, computed(torch.zeros(nbytes, dtype=torch.uint8)), 0.0)
    written = []
    while (message := queue.next_to_write()) is not None:
        queue.mark_written(message)
        written.append(message.sequence)
    assert written == [0]
    assert queue.acknowledge(0) is not None
    assert queue.acknowledge(0) is None
    while (message := queue.next_to_write()) is not None:
        queue.mark_written(message)
        written.append(message.sequence)
    assert written == [0, 1, 2]
    oldest = queue.oldest()
    assert oldest is not None
    assert oldest.sequence == 1


def test_a_probe_is_on_its_way_until_it_is_acknowledged() -> None:
    queue = retransmit_queue(10, 100)
    queue.post(key(0), 0, computed(torch.zeros(1)), 0.0)
    assert not queue.probing
    queue.post_probe(0, computed(torch.zeros(1)), 0.0)
    probe = queue.next_to_write()
    assert probe is not None
    queue.mark_written(probe)
    queue.rewind()
    assert queue.probing
    queue.acknowledge(probe.sequence)
    assert not queue.probing


@pytest.mark.parametrize("how", ["carried", "delivered"])
def test_the_host_path_does_not_write_messages_that_it_has_not_begun_and_the_device_path_has(how: str) -> None:
    queue = retransmit_queue(1)
    begun, left, kept = (queue.post(key(n), n, computed(torch.zeros(2)), 0.0) for n in range(3))
    queue.mark_written(begun)
    for message in (begun, left):
        if how == "carried":
            queue.carry(message, Path.DEVICE)
        else:
            queue.confirm(message)
    queue.rewind()  # a new session
    written = []
    while (message := queue.next_to_write()) is not None:
        queue.mark_written(message)
        written.append(message)
        assert queue.acknowledge(message.sequence) is message
    assert written == [begun, kept]
    assert [message.sequence for message in written] == [0, 1]
    assert queue.messages(Path.DEVICE) == ([left] if how == "carried" else [])
    queue.carry(left, Path.HOST)
    assert queue.next_to_write() is (left if how == "carried" else None)


def test_the_device_path_may_carry_a_message_that_could_not_be_staged_for_the_host_path() -> None:
    def failing(_computed: Computed) -> HostPayload:
        raise TransportError("the device failed")

    queue = RetransmitQueue(1, 1 << 20, failing, lambda number, packet: None)
    message = queue.post(key(0), 0, computed(torch.zeros(2)), 0.0, Path.DEVICE)
    with pytest.raises(TransportError, match="the device failed"):
        queue.carry(message, Path.HOST)
    queue.carry(message, Path.DEVICE)
    assert queue.messages(Path.DEVICE) == [message]
    assert queue.next_to_write() is None


def test_a_key_that_comes_twice_is_kept_once() -> None:
    arrivals = ReceiveQueue()
    arrivals.arrive(key(0), MessageArrival(0, HostReceipt(torch.zeros(1)), 1.0))
    arrivals.arrive(key(0), MessageArrival(9, HostReceipt(torch.ones(1)), 2.0))
    assert list(arrivals.due) == [9], "the duplicate's sender may drop it, that of the first not yet"
    arrivals.post(key(0), 3.0)
    assert list(arrivals.due) == [9, 0]
    arrival, posted_s = arrivals.pop(key(0))
    assert (arrival.arrived_s, posted_s) == (1.0, 3.0)


def test_health_says_until_when_waiting_makes_sense() -> None:
    health = LinkHealth(LinkEnds(1, 2), grace_s=5.0, now_s=100.0)
    assert health.broken_from_s() == 105.0
    health.up()
    assert health.broken_from_s() == math.inf
    health.down("it broke", 200.0)
    health.down("connection refused", 203.0)
    assert health.broken_from_s() == 205.0, "failed attempts do not prolong the grace period"
    text = str(health.error("waited for", str(key(3)), 199.0, 206.0, receiving=True))
    for part in ("rank 1, link 2->1", str(key(3)), "for 7 s", "down for 6.0 s: connection refused", "rank 2 first"):
        assert part in text
    health.up()
    assert "(--adaptra-timeout-s)" in str(health.error("waited for", str(key(3)), 0.0, 600.0, receiving=True))
    health.close_peer(700.0)
    health.close_peer(800.0)
    assert 700.0 < health.broken_from_s() < 701.0, "what it closed for may be on its way"
    assert "rank 2 has closed its end" in str(health.error("x", str(key(0)), 0.0, 1.0, receiving=False))


def test_grace_is_for_a_peer_that_runs() -> None:
    health = LinkHealth(LinkEnds(1, 2), grace_s=5.0, now_s=100.0)
    health.up()
    health.on_peer_running(False, 200.0)
    health.down("it broke", 201.0)
    assert health.broken_from_s() == math.inf, "it is there, and cannot connect"
    text = str(health.error("waited for", str(key(3)), 201.0, 800.0, receiving=True))
    assert "the process of rank 2 is there, but has not run for 600 s" in text
    health.on_peer_running(True, 300.0)
    assert health.broken_from_s() == 305.0
    health.line_changed("timed out")
    assert health.broken_from_s() == -math.inf
    assert "the host of rank 2 does not answer: timed out" in str(
        health.error("x", str(key(0)), 0.0, 1.0, receiving=True)
    )
    health.line_changed(None)
    assert health.broken_from_s() == 305.0
    health.lose(7, "rank 7 is gone")
    assert health.broken_from_s() == -math.inf
    assert "rank 7 is gone. Look at rank 7 first" in str(health.error("x", str(key(0)), 0.0, 1.0, receiving=True))


def test_a_line_says_nothing_of_a_session_on_another_network() -> None:
    health = LinkHealth(LinkEnds(1, 2), grace_s=5.0, now_s=100.0, one_network=False)
    health.up()
    health.line_changed("timed out")
    assert health.broken_from_s() == math.inf
    health.down("it broke", 201.0)
    assert health.broken_from_s() == -math.inf


@pytest.mark.parametrize("first", ["fin_received", "read_out"])
def test_a_farewell_counts_once_the_session_is_read_whichever_thread_comes_first(first: str) -> None:
    lock = threading.Lock()
    state = HostLinkState(LinkEnds(0, 1), lock, grace_s=10.0)
    for what in sorted(("fin_received", "read_out"), key=lambda what: what != first):
        setattr(state, what, True)
        with lock:
            state.on_fin()
        assert state.peer_closed is (what != first)


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.zeros(1, dtype=torch.float8_e4m3fnuz), "data type torch.float8_e4m3fnuz"),
        (torch.zeros([1] * 9), "more than 8 dimensions"),
        (torch.zeros(11, dtype=torch.uint8), "11 bytes, more than the limit of 10"),
        (torch.zeros(1, device="meta"), "on meta, but this link carries tensors of cpu"),
    ],
)
def test_what_cannot_travel_is_refused_at_once(tensor: torch.Tensor, said: str) -> None:
    with pytest.raises(TransportError, match=said):
        check_can_travel(key(0), tensor, CPU, 10)
    check_can_travel(key(0), torch.zeros(10, dtype=torch.bool), CPU, 10)


def test_transports_are_chosen_by_where_the_stages_are() -> None:
    here = identity.host_identity()
    assert here == identity.host_identity()
    assert placement.choose_transport("auto", here, here, "0<->1") == "shm"
    assert placement.choose_transport("auto", here, "elsewhere/1", "0<->1") == "tcp"
    assert placement.choose_transport("tcp", here, here, "0<->1") == "tcp"
    with pytest.raises(TransportError, match="link 0<->1: shared memory was asked for"):
        placement.choose_transport("shm", here, "elsewhere/1", "0<->1")


def test_listeners_bind_only_the_interface_that_is_needed() -> None:
    assert placement.listening_host(None, one_host=True) == "127.0.0.1"
    assert placement.listening_host("lo", one_host=True) == "127.0.0.1"
    with pytest.raises(TransportError, match="MASTER_ADDR is '127.0.0.1'"):
        placement.listening_host(None, one_host=False, environment={"MASTER_ADDR": "127.0.0.1"})
    with pytest.raises(TransportError, match="cannot tell which interface"):
        placement.listening_host(None, one_host=False, environment={"MASTER_ADDR": "no such host."})
    listener, (host, port) = placement.listen_tcp("127.0.0.1")
    with listener:
        assert listener.getsockname() == (host, port)
    with pytest.raises(TransportError, match=r"cannot listen on 192\.0\.2\.1"):
        placement.listen_tcp("192.0.2.1")  # an address for documentation: no host's


def test_all_ranks_get_the_same_secret() -> None:
    store = dist.HashStore()
    secrets = {control_store.job_secret(store) for _ in range(3)}
    assert len(secrets) == 1
    assert len(secrets.pop()) == 32
    assert control_store.job_secret(dist.HashStore()) != control_store.job_secret(store), "another job, another secret"


@pytest.mark.parametrize("found", ["", "00", "0" * 63 + "g", "0" * 66])
def test_what_is_no_secret_is_not_taken_for_one(found: str) -> None:
    class Tampered:
        def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
            return found.encode()

    with pytest.raises(control_store.SecretError, match="no secret of this release") as caught:
        control_store.job_secret(Tampered())
    assert not found or found not in str(caught.value)


def test_the_secret_is_in_no_description_of_what_a_delegate_is_told() -> None:
    secret = "ab" * 32
    limits = {"handshake_s": 1.0, "stall_s": 1.0, "max_message_nbytes": 1}
    start = StartDelegate(rank=0, job="00", secret=secret, listeners=[], rnics=[], **limits)
    assert secret not in repr(start)
    assert secret.encode() in packed(start), "the delegate has it"


@given(st.integers(2, 9), st.booleans())
def test_neighbours_are_mutual(stages: int, wrap: bool) -> None:
    of = {stage: neighbours(stage, stages, wrap=wrap) for stage in range(stages)}
    for stage, peers in of.items():
        assert all(stage in of[peer] for peer in peers)
        assert stage not in peers
    links = {frozenset((stage, peer)) for stage, peers in of.items() for peer in peers}
    assert len(links) == (stages if wrap and stages > 2 else stages - 1)
