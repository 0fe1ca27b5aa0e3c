# SPDX-License-Identifier: Apache-2.0
"""Bookkeeping of the verbs wire: chunks on rails, what has arrived, and what two delegates may say to each other."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptra_megatron.transport.wires.verbs.verbs_messages import (
    LARGEST_NBYTES,
    Fenced,
    Grant,
    Hello,
    Raise,
    Raised,
    Ready,
    Unable,
    VerbsDecoder,
    VerbsEndpoint,
    encode,
)
from adaptra_megatron.transport.wires.verbs.verbs_session import Assignment, Stripes, VerbsReceived

ENDPOINT = VerbsEndpoint(gid="fe80::1", lid=0, number=17, packet_sequence=5, mtu=5, address=1 << 47, key=99)
MESSAGES = [
    Hello(rails=2, slots=16, slot_nbytes=1 << 18),
    Unable(cause="no RDMA device"),
    Grant(chunks=5),
    Raise(rail=1, attempt=3, endpoint=ENDPOINT),
    Raised(rail=1, attempt=3, endpoint=ENDPOINT),
    Ready(rail=0, attempt=1),
    Fenced(rail=0, attempt=1, below=7, beyond=[9, 12], cause="RETRY_EXC_ERR"),
]


def test_chunks_go_where_the_least_is_on_its_way_and_only_into_granted_slots() -> None:
    stripes = Stripes(2)
    for chunk in range(4):
        stripes.add(chunk, 100)
    assert stripes.next() is None
    stripes.use(0)
    stripes.use(1)
    assert stripes.next() is None, "no slot was granted"
    stripes.grant(3)
    assert [stripes.next() for _ in range(3)] == [Assignment(0, 0, 100), Assignment(1, 1, 100), Assignment(0, 2, 100)]
    assert stripes.next() is None
    stripes.grant(4)
    assert stripes.delivered(0, 0) == 100
    assert stripes.delivered(0, 2) == 100
    assert stripes.next() == Assignment(0, 3, 100)
    stripes.add(4, 100)
    stripes.grant(2)  # came late, over another rail
    assert stripes.next() is None
    stripes.grant(stripes.granted_number(5))
    assert stripes.next() == Assignment(0, 4, 100)


def test_what_a_dead_rail_has_not_delivered_leaves_again_oldest_first() -> None:
    stripes = Stripes(2)
    stripes.use(0)
    stripes.grant(9)
    for chunk in range(5):
        stripes.add(chunk, 10 + chunk)
        stripes.next()
    stripes.avoid(0)
    stripes.use(1)
    assert stripes.next() is None, "chunks leave again only when both ends are fenced off"
    assert stripes.in_flight(0) == stripes.pending == 5
    assert stripes.settle(0, 1, [3]) == [(0, 10), (3, 13)]
    assert [stripes.next() for _ in range(4)] == [Assignment(1, n, 10 + n) for n in (1, 2, 4)] + [None]
    assert stripes.in_flight(0) == 0


@given(st.permutations(range(20)), st.integers(0, 1 << 33))
def test_received_counts_each_chunk_once(order: list[int], start: int) -> None:
    received = VerbsReceived(20)
    received.below = start
    for position, chunk in enumerate(order):
        assert received.number((start + chunk) & 0xFFFFFFFF) == start + chunk
        assert received.note(start + chunk)
        assert not received.note(start + chunk)
        missing = [start + other for other in sorted(order[position + 1 :])]
        assert received.below == min(missing, default=start + 20)
        assert received.beyond == [start + n for n in sorted(order[: position + 1]) if start + n > received.below]


def test_a_chunk_without_a_slot_is_refused() -> None:
    received = VerbsReceived(4)
    with pytest.raises(ValueError, match="chunk 4 came before its slot was granted"):
        received.number(4)
    with pytest.raises(ValueError, match="chunk -1 came"):
        received.number(0xFFFFFFFF)


@given(st.integers(1, 40))
def test_messages_survive_any_cutting(step: int) -> None:
    stream = b"".join(map(encode, MESSAGES))
    decoder = VerbsDecoder()
    decoded = [message for at in range(0, len(stream), step) for message in decoder.feed(stream[at : at + step])]
    assert decoded == MESSAGES


@pytest.mark.parametrize(
    "body",
    [
        {"is": "grant"},
        {"is": "grant", "chunks": 1, "more": 2},
        {"is": "grant", "chunks": -1},
        {"is": "grant", "chunks": True},
        {"is": "grant", "chunks": 1 << 64},
        {"is": "nothing"},
        {"is": []},
        {},
        [],
        {"is": "ready", "rail": "0", "attempt": 1},
        {"is": "raise", "rail": 0, "attempt": 1, "endpoint": ["gid", 0, 1, 2, 3, 4]},
        {"is": "raise", "rail": 0, "attempt": 1, "endpoint": [1, 0, 1, 2, 3, 4, 5]},
        {"is": "fenced", "rail": 0, "attempt": 1, "below": 0, "beyond": ["1"], "cause": ""},
    ],
)
def test_what_is_no_message_is_refused(body: object) -> None:
    encoded = json.dumps(body).encode()
    with pytest.raises(ValueError, match="a message"):
        VerbsDecoder().feed(struct.pack("<I", len(encoded)) + encoded)


def test_a_message_nested_deep_is_refused() -> None:
    body = b"[" * (LARGEST_NBYTES - 1)
    with pytest.raises(ValueError, match="a message"):
        VerbsDecoder().feed(struct.pack("<I", len(body)) + body)


def test_an_oversized_message_is_refused_before_it_is_there() -> None:
    with pytest.raises(ValueError, match="exceeds the limit"):
        VerbsDecoder().feed(struct.pack("<I", LARGEST_NBYTES + 1))
