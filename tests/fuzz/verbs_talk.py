# SPDX-License-Identifier: Apache-2.0
"""What a delegate may say of its queue pairs, spoilt: the decoder understands it, or raises ValueError."""

from __future__ import annotations

import json
import struct
from random import Random
from typing import Any, get_args

import msgspec

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
    VerbsMessage,
    encode,
)
from fuzz.mutations import number, spoil_list, spoil_stream

_MESSAGES = 8
_FED_AT_ONCE = 4096


def case(random: Random, deadline_s: float) -> int:
    """One stream into one decoder, in pieces."""
    stream = b"".join(_spoilt(random, _message(random)) for _ in range(_MESSAGES))
    if random.random() < 0.3:
        stream = spoil_stream(random, stream)
    decoder, at = VerbsDecoder(), 0
    while at < len(stream):
        piece = stream[at : at + random.randrange(1, _FED_AT_ONCE)]
        at += len(piece)
        try:
            messages = decoder.feed(piece)
        except ValueError:
            return _MESSAGES  # and the connection ends
        for message in messages:
            _check(message)
        assert len(decoder._unread) <= LARGEST_NBYTES + _FED_AT_ONCE
    return _MESSAGES


def _check(message: VerbsMessage) -> None:
    assert isinstance(message, get_args(VerbsMessage))
    for name, value in msgspec.structs.asdict(message).items():
        if name == "cause":
            assert isinstance(value, str)
            continue
        counts = value if name == "beyond" else list(value)[1:] if name == "endpoint" else [value]
        assert all(type(count) is int and 0 <= count < 1 << 64 for count in counts), f"{name} is {value!r}"


def _message(random: Random) -> VerbsMessage:
    endpoint = VerbsEndpoint("fe80::1", *(random.randrange(1 << 16) for _ in range(6)))
    rail = {"rail": random.randrange(4), "attempt": random.randrange(9)}
    return random.choice(
        [
            Hello(rails=2, slots=16, slot_nbytes=1 << 19),
            Unable(cause="no device"),
            Grant(chunks=random.randrange(1 << 20)),
            Raise(**rail, endpoint=endpoint),
            Raised(**rail, endpoint=endpoint),
            Ready(**rail),
            Fenced(**rail, below=7, beyond=random.sample(range(99), random.randrange(9)), cause="gone"),
        ]
    )


def _spoilt(random: Random, message: VerbsMessage) -> bytes:
    """As it travels, with one thing or another changed in the object, its spelling, or the size before it."""
    packet = encode(message)
    if random.random() < 0.5:
        return packet
    said: Any = json.loads(packet[4:])
    if random.random() < 0.7:
        said[random.choice([*said, "is", "more"])] = anything(random)
        if random.random() < 0.2:
            del said[random.choice(list(said))]
        body = json.dumps(said).encode()
    elif random.random() < 0.2:
        body = random.choice((b"[", b'{"is":', b'{"a":[')) * random.choice((10, 900, 5000, 20_000))
    else:
        body = spoil_stream(random, packet[4:])
    body = body[:LARGEST_NBYTES]
    return struct.pack("<I", len(body) if random.random() < 0.95 else number(random) % (1 << 32)) + body


def anything(random: Random) -> Any:
    nothing: list[Any] = []
    for _ in range(random.randrange(4)):
        spoil_list(random, nothing, number(random))
    values = (None, True, -1, 0.5, float("nan"), float("inf"), "x" * random.choice((0, 1, 9999)), nothing, [nothing])
    return random.choice((*values, {"is": nothing}, number(random), 10 ** random.choice((20, 400, 4000))))
