# SPDX-License-Identifier: Apache-2.0
"""Receive a stage's messages of one iteration, posting receives in the launch order of their senders.

On GPUs a posted receive occupies the device until its message comes. Receives are posted in launch order and not too
far ahead, so that none keeps the device from work that other ranks wait for (see transfers.launch_order). On CPUs
receives block nothing. There some are posted ahead, so that messages need not wait for them and their transfer times
can be measured.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch

from adaptra_megatron.engine.execution.stage_program import Program, ProgramStep
from adaptra_megatron.schedule.transfers.launch_order import OrderedMessage
from adaptra_megatron.transport.message_keys import Direction, MessageKey, MessageTimes, Transport

# Which ranks messages go to, and under what keys: between a schedule's terms and a transport's.


@dataclass(frozen=True)
class Addresses:
    """Addresses of one attempt at an iteration, for a rank of a pipeline."""

    ranks: Sequence[int]
    """Global ranks of the pipeline, by stage."""
    iteration: int
    attempt: int = 0
    """Number of the attempt at the iteration."""
    replica: int = 0
    """Replica of this rank."""
    micro_batches: int | None = None
    """Number of micro-batches of each replica; None if there is one replica."""
    pipeline: Sequence[int] | None = None
    """None: the same as `ranks`. If micro-batches are routed between replicas, messages name global ranks: then `ranks`
    holds all ranks of the job, and this is the pipeline.
    """

    def key(self, message: OrderedMessage) -> MessageKey:
        """Return the message's key in the job."""
        direction = Direction.GRADIENT if message.gradient else Direction.ACTIVATION
        number = self._first + message.micro_batch
        return MessageKey(self.iteration, direction, message.chunk, number, self.attempt)

    def key_in_pipeline(self, key: MessageKey) -> MessageKey:
        """Return the key with the micro-batch's index in the program in place of the job-wide one."""
        return key._replace(micro_batch=key.micro_batch - self._first)

    def in_pipeline(self, times: Sequence[MessageTimes]) -> list[MessageTimes]:
        """Return the times of messages within the pipeline; peers are stages, micro-batches as in the program."""
        pipeline = self.ranks if self.pipeline is None else self.pipeline
        return [
            entry._replace(peer=pipeline.index(entry.peer), key=self.key_in_pipeline(entry.key))
            for entry in times
            if entry.peer in pipeline
        ]

    def nbytes(self, times: Iterable[MessageTimes]) -> dict[int, int]:
        """Return the size of each micro-batch's message in bytes, by the micro-batch's index in the program."""
        return {self.key_in_pipeline(entry.key).micro_batch: entry.nbytes for entry in times}

    @property
    def _first(self) -> int:
        """Return the job-wide index of the replica's first micro-batch."""
        return self.replica * (self.micro_batches or 0)


class Inbox:
    """Messages that one stage receives in one iteration.

    Every wait raises TransportError if a peer fails, or is silent for longer than the timeout.
    """

    def __init__(
        self, transport: Transport, program: Program, addresses: Addresses, *, timeout_s: float, ahead: int = 0
    ) -> None:
        """`timeout_s`: longest wait for one message. `ahead`: number of receives posted before their turn."""
        self._transport = transport
        self._addresses = addresses
        self._timeout_s, self._ahead = timeout_s, ahead
        self._places = program.receives
        self._unposted = iter(program.receives)
        self._posted = 0

    def post_before(self, step: ProgramStep) -> None:
        """Post the receives that precede `step`. Call it before anything of the step is launched."""
        self._post(step.receives_before + self._ahead)

    def post_before_send(self, step: ProgramStep) -> None:
        """Post the receives that come between `step` and its send."""
        self._post(step.receives_before_send)

    def ask_for(self, messages: Collection[OrderedMessage]) -> None:
        """Post the receives of `messages`, and all earlier ones, now. Allowed only where the CPU sees arrivals."""
        for message in messages:
            self._post(self._places[message] + 1)

    def has(self, message: OrderedMessage) -> bool:
        """Return whether `take` would return at once."""
        self.ask_for([message])
        return self._transport.ready(self._addresses.key(message))

    def wait_any(self, messages: Sequence[OrderedMessage], patience_s: float | None = None) -> bool:
        """Wait until one of `messages` has arrived, `patience_s` at most; return whether one has."""
        self.ask_for(messages)
        keys = [self._addresses.key(message) for message in messages]
        if patience_s is not None and patience_s < self._timeout_s:
            return self._transport.wait_any(keys, time.monotonic() + patience_s)
        if not self._transport.wait_any(keys, self._deadline_s()):
            self._transport.wait(keys[0], time.monotonic())  # raises: it says what is known of the link
        return True

    def take(self, message: OrderedMessage) -> torch.Tensor:
        """Return the message, waiting for it. Its receive must have been posted."""
        return self._transport.wait(self._addresses.key(message), self._deadline_s())

    def _post(self, count: int) -> None:
        """Post receives until at least `count` are posted."""
        for message in itertools.islice(self._unposted, max(0, count - self._posted)):
            self._transport.post_receive(self._addresses.key(message), self._addresses.ranks[message.source])
            self._posted += 1

    def _deadline_s(self) -> float:
        return time.monotonic() + self._timeout_s
