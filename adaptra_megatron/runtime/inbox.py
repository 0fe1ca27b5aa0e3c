# SPDX-License-Identifier: Apache-2.0
"""What a stage receives in one iteration: asked for early, in the order in which each neighbour sends it."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

import torch

from adaptra_megatron.runtime.program import Program, ReceiveWindow, message_key
from adaptra_megatron.schedule.routing import Message
from adaptra_megatron.transport.messages import Transport


class Inbox:
    """Every wait ends by itself: with TransportError when a peer fails or is silent for longer than the timeout."""

    def __init__(
        self, transport: Transport, program: Program, iteration: int, *, lookahead: int, timeout_s: float
    ) -> None:
        """`lookahead`: receives posted ahead per neighbour. `timeout_s`: longest wait for one message."""
        self._transport = transport
        self._iteration = iteration
        self._timeout_s = timeout_s
        self._windows = {peer: ReceiveWindow(messages, lookahead) for peer, messages in program.expected.items()}

    def open(self) -> None:
        """Post the first receives."""
        for peer in self._windows:
            self._post(peer, None)

    def sees_arrivals(self, messages: Collection[Message]) -> bool:
        """Whether `has` can tell of all of them."""
        return all(self._transport.sees_arrivals(message.source) for message in messages)

    def has(self, message: Message) -> bool:
        """Whether `take` would return at once."""
        self._post(message.source, message)
        return self._transport.ready(message_key(message, self._iteration))

    def wait_any(self, messages: Sequence[Message], patience_s: float | None = None) -> bool:
        """Until one of them is here, or for `patience_s`; returns whether one is."""
        for message in messages:
            self._post(message.source, message)
        keys = [message_key(message, self._iteration) for message in messages]
        if patience_s is not None and patience_s < self._timeout_s:
            return self._transport.wait_any(keys, time.monotonic() + patience_s)
        if not self._transport.wait_any(keys, self._deadline_s()):
            self._transport.wait(keys[0], time.monotonic())  # raises: it says what is known of the link
        return True

    def take(self, message: Message) -> torch.Tensor:
        """The message, as soon as it is here."""
        self._post(message.source, message)
        tensor = self._transport.wait(message_key(message, self._iteration), self._deadline_s())
        self._windows[message.source].consume()
        self._post(message.source, None)
        return tensor

    def _post(self, peer: int, message: Message | None) -> None:
        for due in self._windows[peer].open_until(message):
            self._transport.post_receive(message_key(due, self._iteration), peer)

    def _deadline_s(self) -> float:
        return time.monotonic() + self._timeout_s
