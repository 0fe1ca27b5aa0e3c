# SPDX-License-Identifier: Apache-2.0
"""The verbs wire over real queue pairs: contents, striping, rails that die in the middle, and their repair.

Runs in the guest of scripts/softroce_vm.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy
import pytest
from rails import SLOT_NBYTES, End, Pair, link_down, packets_lost, random_bytes

MEBIBYTE = 1 << 20
SIZES = [1, 2, 127, 4095, 4096, 4097, 65537, SLOT_NBYTES - 1, SLOT_NBYTES, SLOT_NBYTES + 1, MEBIBYTE + 3, 16 * MEBIBYTE]


@pytest.fixture
def make_pair() -> Iterator[Callable[[str], Pair]]:
    made: list[Pair] = []

    def make(rails: str) -> Pair:
        made.append(Pair(rails))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


def exchange(sender: End, receiver: End, contents: list[numpy.ndarray], meanwhile: Callable[[], None]) -> None:
    """Send and check everything; `meanwhile` runs once the first message has arrived and others are under way."""
    thread = threading.Thread(target=lambda: [sender.send(content) for content in contents], daemon=True)
    thread.start()
    for number, content in enumerate(contents):
        event = receiver.receive()
        assert event.micro_batch == event.sequence
        assert bytes(event.payload) == content.tobytes(), f"message {number} of {content.nbytes} bytes"
        if number == 0:
            meanwhile()
    thread.join(10)
    assert not thread.is_alive()


def nothing() -> None: ...


def assert_each_chunk_once(sender: End, receiver: End) -> None:
    assert sorted(receiver.wire.arrived) == list(range(sender.sent_chunks))


def test_every_size_arrives_as_it_was_sent(make_pair: Callable[[str], Pair]) -> None:
    pair = make_pair("ab")
    contents = [random_bytes(nbytes, nbytes) for nbytes in SIZES]
    exchange(pair.left, pair.right, contents, nothing)
    exchange(pair.right, pair.left, contents[::-1][1:], nothing)
    for sender, receiver in ((pair.left, pair.right), (pair.right, pair.left)):
        assert_each_chunk_once(sender, receiver)
        deadline_s = time.monotonic() + 10.0
        while sender.session.sent_nbytes != receiver.session.received_nbytes:  # it counts what it knows to be there
            assert time.monotonic() < deadline_s, (sender.session.sent_nbytes, receiver.session.received_nbytes)
            time.sleep(0.01)
        assert min(sender.session.rail_chunks) > 0, "a rail carried nothing"


def test_one_rail_alone(make_pair: Callable[[str], Pair]) -> None:
    pair = make_pair("a")
    exchange(pair.left, pair.right, [random_bytes(3 * MEBIBYTE, 1)], nothing)
    assert_each_chunk_once(pair.left, pair.right)


def messages(count: int) -> list[numpy.ndarray]:
    return [random_bytes(2 * MEBIBYTE + 17 * number, number) for number in range(count)]


def carry_on(pair: Pair, rail: int) -> None:
    """The rail comes back by itself and carries chunks again, in both directions."""
    pair.wait_for_state(rail, "up")
    before = [end.session.rail_chunks[rail] for end in (pair.left, pair.right)]
    exchange(pair.left, pair.right, messages(2), nothing)
    exchange(pair.right, pair.left, messages(2), nothing)
    after = [end.session.rail_chunks[rail] for end in (pair.left, pair.right)]
    assert all(now > then for now, then in zip(after, before, strict=True)), f"{before} then {after}"
    assert not pair.left.causes + pair.right.causes, "the session ended"
    assert_each_chunk_once(pair.left, pair.right)
    assert_each_chunk_once(pair.right, pair.left)


def test_a_rail_whose_packets_are_lost(make_pair: Callable[[str], Pair]) -> None:
    pair = make_pair("ab")
    seen: list[float] = []
    with packets_lost("a"):
        exchange(pair.left, pair.right, messages(3), nothing)
        seen.append(pair.wait_for_state(0, "down", 10.0))
        exchange(pair.left, pair.right, messages(1), nothing)
    assert_each_chunk_once(pair.left, pair.right)
    carry_on(pair, 0)


def test_packets_are_lost_in_the_middle_of_a_transfer(make_pair: Callable[[str], Pair]) -> None:
    pair = make_pair("ab")
    fault = packets_lost("b")
    exchange(pair.left, pair.right, messages(6), lambda: fault.__enter__())
    assert pair.states(1) != ["up", "up"], "the failure went unnoticed"
    fault.__exit__(None, None, None)
    assert_each_chunk_once(pair.left, pair.right)
    carry_on(pair, 1)


@pytest.mark.parametrize("interface", ["va0", "va1"])
def test_a_link_goes_down_in_the_middle_of_a_transfer(make_pair: Callable[[str], Pair], interface: str) -> None:
    pair = make_pair("ab")
    fault = link_down(interface)
    exchange(pair.left, pair.right, messages(6), lambda: fault.__enter__())
    pair.wait_for_state(0, "down", 10.0)
    assert "up" in pair.states(1)
    fault.__exit__(None, None, None)
    assert_each_chunk_once(pair.left, pair.right)
    carry_on(pair, 0)
