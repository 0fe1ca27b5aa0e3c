# SPDX-License-Identifier: Apache-2.0
"""What processes of a job say to each other, spoilt: what is read is of its declared types, or ValueError is raised."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Callable, Collection, Mapping
from random import Random
from typing import Any, get_args

import msgspec
import numpy as np

from adaptra_megatron.common import typed_messages
from adaptra_megatron.common.typed_messages import encoded
from adaptra_megatron.control.decisions import (
    Decision,
    Forecast,
    LinkName,
    Moved,
    Order,
    PackedFigures,
    Paths,
    RoutingSection,
    TelemetrySection,
    decision_of,
)
from adaptra_megatron.control.measurements import (
    ActionColumns,
    BrokenPath,
    MeasuredColumns,
    StageMeasurement,
    measurement_of,
)
from adaptra_megatron.control.stage_memory import StageMemory
from adaptra_megatron.schedule.classic import one_f_one_b
from adaptra_megatron.schedule.costs import LinkCost, uniform_costs
from adaptra_megatron.telemetry.action_records import ActionRecord, Iterations
from adaptra_megatron.telemetry.scalars import JobFigures, LinkFigures, MemoryFigures
from adaptra_megatron.transport.delegate import delegate_control as control
from adaptra_megatron.transport.failover import control_messages
from adaptra_megatron.transport.link_paths import Path, ProbeTimes
from adaptra_megatron.transport.message_keys import Direction, MessageKey, MessageTimes
from fuzz.mutations import spoil_stream
from fuzz.verbs_talk import anything

_MESSAGES = 8
_SPREAD = 64
"""How many times its packet's size a message may be: values of one digit are objects."""
_DEFAULTS = 16
"""Fields of a message that need not be said."""
_LEAVES = (int, float, str, bytes, type(None), enum.Enum, np.ndarray)


def case(random: Random, deadline_s: float) -> int:
    """Some messages, each with one thing or another changed."""
    for _ in range(_MESSAGES):
        message, kinds, pack, unpack = random.choice(_MADE)
        loads, dumps = (json.loads, _json) if pack is typed_messages.packed else (msgspec.msgpack.decode, _packed)
        packet = _spoilt(random, pack(message), loads, dumps)
        try:
            read = unpack(packet)
        except ValueError:
            continue
        assert type(read) in kinds
        assert _count(read) <= _SPREAD * len(packet) + _DEFAULTS
        again = pack(read)
        assert pack(unpack(again)) == again
    return _MESSAGES


def _count(value: Any) -> int:
    """Values within, all of which are of kinds that may be declared."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, msgspec.Struct):
        return sum(_count(each) for each in msgspec.structs.asdict(value).values()) + 1
    if dataclasses.is_dataclass(value):
        return sum(_count(each) for each in vars(value).values()) + 1
    if isinstance(value, Mapping):
        return sum(_count(key) + _count(each) for key, each in value.items()) + 1
    if isinstance(value, list | tuple):
        return sum(map(_count, value)) + 1
    assert isinstance(value, _LEAVES), f"{value!r} is of no declared type"
    assert not isinstance(value, int) or -(1 << 63) <= value < 1 << 64
    return 1


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _packed(value: Any) -> bytes:
    try:
        return encoded(value)
    except OverflowError:  # MessagePack cannot say a number that large
        return b""


def _spoilt(random: Random, packet: bytes, loads: Callable[[bytes], Any], dumps: Callable[[Any], bytes]) -> bytes:
    """As it travels, with a value at any depth, the spelling, or nothing changed."""
    way = random.random()
    if way < 0.2:
        return packet
    if way < 0.5:
        return spoil_stream(random, packet)
    if way < 0.55:
        nested = random.choice((b"[", b'{"is":', b'{"a":[', b"\x91", b"\x81\xa1a"))
        return nested * random.choice((10, 900, 5000, 20_000))
    said: Any = loads(packet)
    place = said
    while random.random() < 0.6:
        inner = [
            each for each in (place.values() if isinstance(place, dict) else place) if isinstance(each, dict | list)
        ]
        if not inner:
            break
        place = random.choice(inner)
    if isinstance(place, dict):
        place[random.choice([*place, "is", "more"])] = anything(random)
        if random.random() < 0.2:
            del place[random.choice(list(place))]
    else:
        place.insert(random.randrange(len(place) + 1), anything(random))
        if random.random() < 0.7:
            del place[random.randrange(len(place))]
    return dumps(said)


def _told(packet: bytes) -> Any:
    return typed_messages.unpacked(packet, control.Message, control._LARGEST_NBYTES)


def _noted(packet: bytes) -> Any:
    return typed_messages.unpacked(packet, control_messages.Note, 2 * control_messages.NOTE_NBYTES)


_GRADIENT = MessageKey(2, Direction.GRADIENT, 0, 1)
_MEASUREMENT = StageMeasurement(
    pipeline=0,
    stage=1,
    iteration=2,
    micro_batches=3,
    actions=ActionColumns.of([ActionRecord(2, 1, kind, 0, m, 0.0, 1.0, 2.0) for m in range(3) for kind in "FB"]),
    sends=MeasuredColumns.of([MessageTimes(MessageKey(2, Direction.ACTIVATION, 0, 1), 2, 1.0, 2.0, 9, Path.HOST)], 0.5),
    receives=MeasuredColumns.of(
        [MessageTimes(MessageKey(2, Direction.GRADIENT, 0, 1), 2, 1.0, 2.0, 9, Path.DEVICE)], 0.5
    ),
    memory=StageMemory(1.0, 2.0, 3.0, None),
    probes=(ProbeTimes(1, Path.HOST, 3, 1.0, 2.0),),
    broken=(BrokenPath(1, Path.DEVICE, "gone"),),
    nbytes={0: 9, 1: 8, 2: 9},
)
_DECISION = Decision(
    3,
    Order.of(
        one_f_one_b(2, 2),
        uniform_costs(
            *(2, 2), forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0, links={(0, 1): LinkCost(0.5)}
        ).with_micro_batches({"forward_s": (((1.0, 3.0),), ((2.0, 2.0),))}),
    ),
    Forecast(1.0, None),
    Paths((LinkName(0, 1, 2),)),
    RoutingSection(1, 4, (Moved(0, 0, 1, 2),), {"0.0": "{}"}, (1.0, 1.5)),
    TelemetrySection(
        (Iterations(1, 2),),
        PackedFigures.of(
            JobFigures(
                bubble_fraction=0.1,
                links={(0, 1): LinkFigures(latency_s=1.0)},
                memory={1: MemoryFigures(activation_nbytes=1.0, free_nbytes=2.0, cap=float("inf"))},
            )
        ),
    ),
)
_OPEN = control.OpenLink(
    peer=1, session=2, transport="tcp", connects=True, address=["127.0.0.1", 9], source="", lanes=2
)
_START = control.StartDelegate(
    rank=0, job="00", secret="ab", listeners=["tcp"], handshake_s=5.0, stall_s=5.0, max_message_nbytes=9
)
_TO_AND_FRO = (
    *(_START, _OPEN, control.Ping(number=1), control.Stop(drain_s=1.0), control.Up(peer=1, session=2, transport="shm")),
    *(control.Down(peer=1, session=2, cause="gone"), control.DelegateCounters(number=1, refused={"junk": 2})),
)
_NOTES = (
    *(
        control_messages.CreateSession(1),
        control_messages.Open(1, 2, [3, 4]),
        control_messages.SwitchAt(1, 2),
        control_messages.Dead(1, 2, "gone"),
        control_messages.Measure(1, 3, 1 << 20),
    ),
    *(control_messages.Probed(1, 2, 3.0), control_messages.Received(1, 2), control_messages.HostProbed(1, 2.0)),
)
_MADE: list[tuple[Any, Collection[type], Callable[[Any], bytes], Callable[[bytes], Any]]] = [
    *((message, get_args(control.Message), typed_messages.packed, _told) for message in _TO_AND_FRO),
    *((note, get_args(control_messages.Note), typed_messages.packed, _noted) for note in _NOTES),
    *2 * [(_MEASUREMENT, (StageMeasurement,), encoded, measurement_of)],
    *2 * [(_DECISION, (Decision,), encoded, decision_of)],
]
