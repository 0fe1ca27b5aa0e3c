# SPDX-License-Identifier: Apache-2.0
"""Convert between messages of the training (keys, tensors) and frames on the wire (numbers, bytes).

Wire format of the host path, the same in a ring's slot and on a TCP connection (csrc/ring/frame.hpp has the layout):

1. A frame is a header of 128 bytes and up to one slot of payload. Its magic number fixes the byte order. Its version is
   that of the ring (`kRingVersion`, frame.hpp) or of the connection (`VERSION`, common/handshake.py); another one is
   refused before the first frame.
2. The header names message (sequence number, key), data type, shape, and the payload's offset in the message. So frames
   of one message may come in any order, over several connections, and twice.
3. `check_frame` (native) validates a header before it is used: each payload is a whole slot or the message's last. So
   frames neither overlap nor leave gaps, and sizes are bounded before memory is allocated.
4. The key's iteration and attempt share a field: `iteration << 16 | attempt`.
5. Direction 2 marks frames without a tensor: a note (chunk 0; its number replaces the iteration) or a probe (chunk 1).
"""

from __future__ import annotations

import torch

from adaptra_megatron.transport._ring import DATA_TYPES, Description, Event, Inbox
from adaptra_megatron.transport.failover.control_messages import NOTE_NBYTES
from adaptra_megatron.transport.gpu.copies import Payload
from adaptra_megatron.transport.message_keys import Direction, MessageKey, TransportError

MOST_DIMENSIONS = 8
_DIRECTIONS = tuple(Direction)
_NOTE = len(_DIRECTIONS)
"""Direction of notes and probes; their number takes the place of the iteration."""
_ATTEMPT_BITS = 16
"""Bits for the attempt, the lowest of the iteration field: so the field increases with each attempt, too."""
_PROBE = 1
"""Chunk field of a probe; a note has 0."""
_CODES: dict[torch.dtype, int] = {getattr(torch, name): code for name, code in DATA_TYPES.items()}
_TYPES = {code: dtype for dtype, code in _CODES.items()}


def check_can_travel(key: MessageKey, tensor: torch.Tensor, device: torch.device, max_nbytes: int) -> None:
    """Raise TransportError for a tensor on another device than `device`, or one that no frame can describe."""
    if tensor.device != device:
        raise TransportError(f"the {key} is on {tensor.device}, but this link carries tensors of {device}")
    if tensor.dtype not in _CODES:
        raise TransportError(f"the {key} has data type {tensor.dtype}, which is none of {', '.join(DATA_TYPES)}")
    if tensor.dim() > MOST_DIMENSIONS:
        raise TransportError(f"the {key} has shape {tuple(tensor.shape)}, more than {MOST_DIMENSIONS} dimensions")
    if tensor.nbytes > max_nbytes:
        raise TransportError(f"the {key} has {tensor.nbytes} bytes, more than the limit of {max_nbytes}")


def describe(sequence: int, key: MessageKey, message: Payload) -> Description:
    """Describe a message; `check_can_travel` has accepted it."""
    return Description(
        sequence=sequence,
        iteration=_turn(key),
        direction=_DIRECTIONS.index(key.direction),
        chunk=key.chunk,
        micro_batch=key.micro_batch,
        dtype=_CODES[message.dtype],
        shape=message.shape,
    )


def describe_note(sequence: int, number: int, packet: Payload) -> Description:
    """Describe a note; `packet`: uint8 [nbytes]."""
    return Description(
        sequence=sequence,
        iteration=number,
        direction=_NOTE,
        chunk=0,
        micro_batch=0,
        dtype=_CODES[torch.uint8],
        shape=packet.shape,
    )


def describe_probe(sequence: int, number: int, message: Payload) -> Description:
    """Describe a probe."""
    return Description(
        sequence=sequence,
        iteration=number,
        direction=_NOTE,
        chunk=_PROBE,
        micro_batch=0,
        dtype=_CODES[message.dtype],
        shape=message.shape,
    )


def is_probe(event: Event) -> bool:
    """Return whether the event is a probe."""
    return event.kind == Event.Kind.MESSAGE and event.direction == _NOTE and event.chunk == _PROBE


def ask(inbox: Inbox, key: MessageKey) -> None:
    """Receive this message in parts, unless it has begun to arrive."""
    inbox.ask(
        iteration=_turn(key),
        direction=_DIRECTIONS.index(key.direction),
        chunk=key.chunk,
        micro_batch=key.micro_batch,
    )


def is_tensor(event: Event) -> bool:
    """Return whether the event is a whole message with a key, not a note or probe."""
    return event.kind == Event.Kind.MESSAGE and event.direction != _NOTE


def note_of(event: Event) -> tuple[int, bytes]:
    """Return number and bytes of a received note. Raises ValueError if it is too long."""
    packet = bytes(event.payload)
    if len(packet) > NOTE_NBYTES:
        raise ValueError(f"a note of {len(packet)} bytes is longer than {NOTE_NBYTES}")
    return event.iteration, packet


def key_of(event: Event) -> MessageKey:
    """Return the key of a received message."""
    iteration, attempt = divmod(event.iteration, 1 << _ATTEMPT_BITS)
    return MessageKey(iteration, _DIRECTIONS[event.direction], event.chunk, event.micro_batch, attempt)


def _turn(key: MessageKey) -> int:
    assert key.attempt < 1 << _ATTEMPT_BITS, f"{key.attempt} attempts at one iteration"
    return key.iteration << _ATTEMPT_BITS | key.attempt


def type_of(event: Event) -> torch.dtype:
    """Return the data type of a message, or of the message that a part belongs to."""
    return _TYPES[event.dtype]


def tensor_of(event: Event) -> torch.Tensor:
    """Return the received tensor, which shares the memory it was received into."""
    shape, dtype = event.shape, type_of(event)
    if 0 in shape:  # no memory to make it from
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(event.payload, dtype=dtype).view(shape)
