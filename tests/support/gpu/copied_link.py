# SPDX-License-Identifier: Apache-2.0
"""The copies of a link on a device, real or simulated, with both of its rings ending in the test."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from adaptra_megatron.transport._ring import DATA_TYPES, Description, Event, Inbox, Ring
from adaptra_megatron.transport.gpu.device_copies import UNLIMITED_NBYTES, DeviceCopies
from adaptra_megatron.transport.host_link.frames import tensor_of, type_of
from testing.waiting import until

MEBIBYTE = 1 << 20
SLOT = 1 << 16
SLOTS = 16
PART = 4 * SLOT
"""A quarter of the ring."""


def soon() -> float:
    return time.monotonic() + 5.0


def numbers(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 255, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def describe(sequence: int, tensor: Any) -> Description:
    return Description(
        sequence=sequence,
        iteration=0,
        direction=0,
        chunk=0,
        micro_batch=sequence,
        dtype=DATA_TYPES[str(tensor.dtype).removeprefix("torch.")],
        shape=tuple(tensor.shape),
    )


class CopiedLink:
    """What this link sends is read here, and what it receives is written here."""

    def __init__(self, device: Any) -> None:
        self.reported = 0
        self.copies = DeviceCopies(device, link="0->1", on_ready=self._tell)
        self.far_inbox = Inbox(max_message_nbytes=1 << 30, pooled_nbytes=1 << 26)
        self.inbox = Inbox(max_message_nbytes=1 << 30, pooled_nbytes=UNLIMITED_NBYTES, for_device=True)
        self.threads = ThreadPoolExecutor(4)
        self._sequence = 0
        self.outbound = self.inbound = Ring.create(2, SLOT)
        self.connect()
        self.sending: Any = self.copies._outgoing._stream
        self.receiving: Any = self.copies._incoming._stream

    def _tell(self) -> None:
        self.reported += 1

    def connect(self) -> None:
        """New rings."""
        self.outbound.close()
        self.inbound.close()
        self.outbound, self.inbound = (Ring.create(SLOTS, SLOT) for _ in range(2))
        self.copies.use_rings(self.outbound, self.inbound)

    def stage(self, tensor: torch.Tensor) -> Any:
        """Send a tensor that is computed on the current stream."""
        return self.copies.stage(self.copies.computed(tensor))

    def write(self, payload: Any, sequence: int = 0, deadline_s: float = 0.0) -> Future[None]:
        """As the link's writing thread does, once the payload is ready."""

        def write() -> None:
            until(lambda: payload.ready)
            payload.write(self.outbound, describe(sequence, payload), deadline_s or soon())

        return self.threads.submit(write)

    def arrive(self) -> torch.Tensor:
        """What the peer receives next."""
        event = _next(self.far_inbox, self.outbound)
        assert event.kind == Event.Kind.MESSAGE
        return tensor_of(event)

    def carry(self, payload: Any, sequence: int = 0) -> torch.Tensor:
        """A payload all the way to the peer."""
        written = self.write(payload, sequence)
        arrived = self.arrive()
        written.result(5.0)
        return arrived

    def send(self, values: torch.Tensor, *, asked: bool) -> int:
        """Have the peer send `values`, after it was asked for them or not; returns the message's number."""
        number, self._sequence = self._sequence, self._sequence + 1
        if asked:
            self.inbox.ask(iteration=0, direction=0, chunk=0, micro_batch=number)
        self.threads.submit(
            self.inbound.write, describe(number, values), values.data_ptr(), values.nbytes, time.monotonic() + 20.0
        )
        return number

    def read(self) -> Any:
        """Handle one event of the inbound ring, as the link's reading thread does: a receipt if that completes one."""
        event = _next(self.inbox, self.inbound)
        if event.kind == Event.Kind.PART:
            return self.copies.receive_part(event, type_of(event), self.inbound)
        return self.copies.receive(tensor_of(event), event.block_nbytes)

    def receive(self, values: torch.Tensor, *, asked: bool = True) -> Any:
        """The receipt for `values`."""
        self.send(values, asked=asked)
        while (receipt := self.read()) is None:
            pass
        return receipt

    def close(self) -> None:
        self.copies.close(5.0)
        self.outbound.close()
        self.inbound.close()
        self.threads.shutdown()


def _next(inbox: Inbox, ring: Ring) -> Event:
    """What comes next, whatever came before again meanwhile."""
    deadline_s = soon()
    while (event := inbox.next(ring, deadline_s)) is None:
        assert time.monotonic() < deadline_s, "nothing comes"
    return event
