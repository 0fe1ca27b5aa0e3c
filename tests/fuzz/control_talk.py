# SPDX-License-Identifier: Apache-2.0
"""What processes of a job say to each other, spoilt: what is read is of its declared types, or ValueError is raised."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping
from random import Random
from typing import Any

import numpy as np

from adaptra_megatron.runtime.decision_reader import MOST_NBYTES
from adaptra_megatron.runtime.decisions import Decision, LinkName
from adaptra_megatron.runtime.measurements import MESSAGE, BrokenPath, StageMeasurement
from adaptra_megatron.runtime.memory import StageMemory
from adaptra_megatron.telemetry.scalars import JobFigures, LinkFigures, MemoryFigures
from adaptra_megatron.telemetry.trace_requests import Iterations
from adaptra_megatron.transport import control, notes, tagged_json
from adaptra_megatron.transport.paths import Path, ProbeTimes
from fuzz.mutations import spoil_stream
from fuzz.verbs_talk import anything

_MESSAGES = 8
_SPREAD = 64
"""Of what is read, how many times its packet's size it may be: values of one digit are objects."""
_LEAVES = (int, float, str, bytes, type(None), enum.Enum, np.ndarray)


def case(random: Random, deadline_s: float) -> int:
    """Some messages, each with one thing or another changed."""
    for _ in range(_MESSAGES):
        message, kinds, most_nbytes = random.choice(_MADE)
        packet = _spoilt(random, tagged_json.packed(message))
        try:
            read = tagged_json.unpacked(packet, kinds, most_nbytes)
        except ValueError:
            continue
        assert type(read) in (kinds.values() if isinstance(kinds, dict) else (kinds,))
        assert _count(read) <= _SPREAD * len(packet)
        again = tagged_json.packed(read)
        assert tagged_json.packed(tagged_json.unpacked(again, kinds, 2 * most_nbytes)) == again
    return _MESSAGES


def _count(value: Any) -> int:
    """Values within, all of which are of kinds that may be declared."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if dataclasses.is_dataclass(value):
        return sum(_count(each) for each in vars(value).values()) + 1
    if isinstance(value, Mapping):
        return sum(_count(key) + _count(each) for key, each in value.items()) + 1
    if isinstance(value, list | tuple):
        return sum(map(_count, value)) + 1
    assert isinstance(value, _LEAVES), f"{value!r} is of no declared type"
    assert not isinstance(value, int) or -(1 << 63) <= value < 1 << 64
    return 1


def _spoilt(random: Random, packet: bytes) -> bytes:
    """As it travels, with a value at any depth, the spelling, or nothing changed."""
    way = random.random()
    if way < 0.2:
        return packet
    if way < 0.5:
        return spoil_stream(random, packet)
    if way < 0.55:
        return random.choice((b"[", b'{"is":', b'{"a":[')) * random.choice((10, 900, 5000, 20_000))
    said: Any = json.loads(packet)
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
    return json.dumps(said).encode()


_MEASUREMENT = StageMeasurement(
    pipeline=0,
    stage=1,
    iteration=2,
    micro_batches=3,
    span_s=(1.0, 2.0),
    durations_s={("F", 0): np.arange(3, dtype=np.float32), ("B", 0): np.arange(2, dtype=np.float32)},
    sent=np.zeros(2, MESSAGE),
    received=np.zeros(1, MESSAGE),
    memory=StageMemory(1.0, 2.0, 3.0, None),
    probes=(ProbeTimes(1, Path.HOST, 3, 1.0, 2.0),),
    broken=(BrokenPath(1, Path.DEVICE, "gone"),),
)
_DECISION = Decision(
    3,
    "F,0,0",
    (Iterations(1, 2),),
    JobFigures(
        bubble_fraction=0.1,
        links={(0, 1): LinkFigures(latency_s=1.0)},
        memory={1: MemoryFigures(activation_nbytes=1.0, free_nbytes=2.0, cap=float("inf"))},
    ),
    caps=(1.0, None),
    diverted=(LinkName(0, 1, 2),),
)
_OPEN = control.Open(peer=1, session=2, transport="tcp", connects=True, address=["127.0.0.1", 9], source="", lanes=2)
_START = control.Start(
    stage=0, pipeline="00", secret="ab", listeners=["tcp"], handshake_s=5.0, stall_s=5.0, max_message_nbytes=9
)
_TO_AND_FRO = (
    *(_START, _OPEN, control.Ping(number=1), control.Stop(drain_s=1.0), control.Up(peer=1, session=2, transport="shm")),
    *(control.Down(peer=1, session=2, cause="gone"), control.Counters(number=1, refused={"junk": 2})),
)
_NOTES = (
    *(
        notes.Meet(1),
        notes.Open(1, 2, [3, 4]),
        notes.Until(1, 2),
        notes.Dead(1, 2, "gone"),
        notes.Measure(1, 3, 1 << 20),
    ),
    *(notes.Probed(1, 2, 3.0), notes.Received(1, 2), notes.HostProbed(1, 2.0)),
)
_MADE: list[tuple[Any, Any, int]] = [
    *((message, control._KINDS, control._LARGEST_NBYTES) for message in _TO_AND_FRO),
    *((note, notes._KINDS, notes.NOTE_NBYTES) for note in _NOTES),
    *2 * [(_MEASUREMENT, StageMeasurement, MOST_NBYTES)],
    *2 * [(_DECISION, Decision, MOST_NBYTES)],
]
