# SPDX-License-Identifier: Apache-2.0
"""Rules for posting receives that our runtime does not follow, to see what becomes of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from adaptra_megatron.engine.execution.inbox import Addresses, Inbox
from adaptra_megatron.engine.execution.stage_program import Program, ProgramStep
from adaptra_megatron.schedule.transfers.launch_order import OrderedMessage
from adaptra_megatron.transport.message_keys import Transport


class LookAhead(Inbox):
    """A number of receives ahead of what has been used, from each neighbour."""

    ahead = 8

    def __init__(self, transport: Transport, program: Program, addresses: Addresses, **settings: Any) -> None:
        super().__init__(transport, program, addresses, **settings)
        self._keys = (transport, addresses)
        self._messages: dict[int, list[OrderedMessage]] = {}
        """By neighbour, in the order in which it sends them."""
        for message in program.receives:
            self._messages.setdefault(message.source, []).append(message)
        self._asked: Counter[int] = Counter()
        self._used: Counter[int] = Counter()
        for peer in self._messages:
            self._post_until(peer, self.ahead)

    def post_before(self, step: ProgramStep) -> None:
        """Only what the step needs, if that has not been posted."""
        if step.receive is not None:
            place = self._messages[step.receive.source].index(step.receive)
            self._post_until(step.receive.source, place + 1)

    def post_before_send(self, step: ProgramStep) -> None:
        """Post nothing before a send."""

    def take(self, message: OrderedMessage) -> torch.Tensor:
        """Room for one more."""
        tensor = super().take(message)
        self._used[message.source] += 1
        self._post_until(message.source, self._used[message.source] + self.ahead)
        return tensor

    def _post_until(self, peer: int, count: int) -> None:
        transport, addresses = self._keys
        for message in self._messages[peer][self._asked[peer] : count]:
            transport.post_receive(addresses.key(message), peer)
            self._asked[peer] += 1


class JustInTime(LookAhead):
    """What a step needs, right before it."""

    ahead = 0


RULES: dict[str, Any] = {"by launch order": Inbox, "look-ahead 8": LookAhead, "just in time": JustInTime}
