# SPDX-License-Identifier: Apache-2.0
"""Which ranks messages go to, and under what keys: between a schedule's terms and a transport's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from adaptra_megatron.schedule.transfers.messages import Message
from adaptra_megatron.transport.messages import Direction, MessageKey, MessageTimes


@dataclass(frozen=True)
class Addresses:
    """Addresses of one attempt at an iteration, as a rank of a pipeline has them."""

    ranks: Sequence[int]
    """The pipeline's: global ranks, by stage."""
    iteration: int
    attempt: int = 0
    """Which try at the iteration."""
    replica: int = 0
    """This rank's."""
    micro_batches: int | None = None
    """Number of micro-batches of each replica; None: there is one replica alone."""
    pipeline: Sequence[int] | None = None
    """None: it is `ranks`. Where micro-batches are routed between replicas, messages name ranks, `ranks` are all of the
    job's, and this is the pipeline."""

    def key(self, message: Message) -> MessageKey:
        """The message's name in the job."""
        direction = Direction.GRADIENT if message.gradient else Direction.ACTIVATION
        number = self._first + message.micro_batch
        return MessageKey(self.iteration, direction, message.chunk, number, self.attempt)

    def key_in_pipeline(self, key: MessageKey) -> MessageKey:
        """The same by the number of its micro-batch in the program."""
        return key._replace(micro_batch=key.micro_batch - self._first)

    def in_pipeline(self, times: Sequence[MessageTimes]) -> list[MessageTimes]:
        """Times of messages within the pipeline, by its stages and by the numbers of micro-batches in the program."""
        pipeline = self.ranks if self.pipeline is None else self.pipeline
        return [
            entry._replace(peer=pipeline.index(entry.peer), key=self.key_in_pipeline(entry.key))
            for entry in times
            if entry.peer in pipeline
        ]

    def nbytes(self, times: Iterable[MessageTimes]) -> dict[int, int]:
        """Bytes of the messages of each micro-batch, by its number in the program."""
        return {self.key_in_pipeline(entry.key).micro_batch: entry.nbytes for entry in times}

    @property
    def _first(self) -> int:
        """What the replica's first micro-batch is in the job."""
        return self.replica * (self.micro_batches or 0)
