# SPDX-License-Identifier: Apache-2.0
"""Messages to one neighbour, from posting until it has acknowledged them: all that may have to be sent again."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch

from adaptra_megatron.transport.messages import MessageKey


@dataclass(eq=False)
class Outgoing:
    """One message under way. Holding it holds its bytes."""

    sequence: int
    key: MessageKey
    tensor: torch.Tensor
    """Contiguous, no autograd history."""
    posted_s: float
    written: bool = False
    """Whether it is in the ring of the present session, wholly or in part."""


class Outbox:
    """In the order of posting. Not safe for threads: its link's lock guards it."""

    def __init__(self, window_messages: int, window_nbytes: int) -> None:
        """How much may be on its way unacknowledged; one message always may, however large."""
        self._window_messages, self._window_nbytes = window_messages, window_nbytes
        self._unacknowledged: OrderedDict[int, Outgoing] = OrderedDict()
        self._next_sequence = 0
        self._written_messages = 0
        self._written_nbytes = 0

    def __len__(self) -> int:
        return len(self._unacknowledged)

    def post(self, key: MessageKey, tensor: torch.Tensor, now_s: float) -> Outgoing:
        """Append a message."""
        message = Outgoing(self._next_sequence, key, tensor, now_s)
        self._unacknowledged[message.sequence] = message
        self._next_sequence += 1
        return message

    def oldest(self) -> Outgoing | None:
        """What has waited longest for its acknowledgement."""
        return next(iter(self._unacknowledged.values()), None)

    def next_to_write(self) -> Outgoing | None:
        """The first message that is not in the ring yet, if the window has room for it."""
        full = self._written_messages >= self._window_messages or self._written_nbytes >= self._window_nbytes
        if full or self._written_messages == len(self._unacknowledged):
            return None
        return next(message for message in self._unacknowledged.values() if not message.written)

    def mark_written(self, message: Outgoing) -> None:
        """Count a message as on its way; called before its first byte is."""
        message.written = True
        self._written_messages += 1
        self._written_nbytes += message.tensor.nbytes

    def mark_unwritten(self, message: Outgoing) -> None:
        """It did not get through: send it again. Nothing happens if it was acknowledged meanwhile."""
        if message.written and message.sequence in self._unacknowledged:
            self._forget(message)

    def rewind(self) -> None:
        """A new session has begun: everything that is not acknowledged is to be sent again."""
        for message in self._unacknowledged.values():
            self.mark_unwritten(message)

    def acknowledge(self, sequence: int) -> Outgoing | None:
        """Let go of a message. None if it was acknowledged before: acknowledgements may come twice."""
        message = self._unacknowledged.pop(sequence, None)
        if message is not None and message.written:
            self._forget(message)
        return message

    def _forget(self, message: Outgoing) -> None:
        message.written = False
        self._written_messages -= 1
        self._written_nbytes -= message.tensor.nbytes
