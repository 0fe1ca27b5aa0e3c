# SPDX-License-Identifier: Apache-2.0
"""Move a link's messages from where the training has them into a ring, and out of one: what a link asks for.

A link asks its `Copies` for a `Payload` per message sent and a `Receipt` per message received, and treats all devices
alike. On the CPU messages are copied by those who write and read the ring; on a GPU, by copies on streams of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from adaptra_megatron.transport._ring import Description, Event, Ring
from adaptra_megatron.transport.gpu.cuda_device import Computed


class Payload(Protocol):
    """The bytes of a message to send. Holding it holds them."""

    @property
    def shape(self) -> Sequence[int]:
        """Shape of the tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the tensor."""

    @property
    def nbytes(self) -> int:
        """Size of the tensor."""

    @property
    def inline(self) -> bool:
        """Return whether any thread may write it, as that takes no longer than a copy."""

    @property
    def ready(self) -> bool:
        """Return whether writing can begin: the message has been made, or never will be (`write` then raises)."""

    def write(self, ring: Ring, description: Description, deadline_s: float) -> None:
        """Put all of it into a ring. May be done again, with another ring.

        Raises TimeoutError where the ring has no room for so long, RingClosedError, TransportError when the device
        failed; a part of it may then be in the ring.
        """

    def computed(self) -> Computed:
        """The message where the training has its tensors, for another path. Any thread.

        Raises TransportError when the device failed.
        """


class Receipt(Protocol):
    """A message that is in host memory, on its way to where the training wants it."""

    def begin(self) -> None:
        """It was asked for: do what can be done ahead. Any thread, any number of times; never takes long."""

    def take(self) -> torch.Tensor:
        """The tensor, for what the calling thread computes on its current stream from now on. Never waits.

        Raises TransportError when the device failed.
        """


class Copies(Protocol):
    """Copies of one link. `computed` and `Receipt.take` belong to the training thread."""

    @property
    def device(self) -> torch.device:
        """Return where the training has its tensors."""

    @property
    def pooled_nbytes(self) -> int:
        """Return how much unused memory of received messages the link is to keep."""

    @property
    def by_parts(self) -> bool:
        """Return whether messages that were asked for are to be received part by part, out of the ring."""

    def use_rings(self, outbound: Ring, inbound: Ring) -> None:
        """A session begins: make its rings fit to be copied from and to. Not for the training thread: may take long."""

    def computed(self, tensor: torch.Tensor) -> Computed:
        """A tensor that what is on the current stream by now makes, for this or any other thread to send.

        Raises TransportError when the device failed.
        """

    def stage(self, message: Computed) -> Payload:
        """A tensor (contiguous, no autograd history) to send by the host path. Any thread; returns at once.

        Raises TransportError when the device failed.
        """

    def receive(self, host: torch.Tensor, block_nbytes: int) -> Receipt:
        """A message that has arrived, at the beginning of a block of memory of that size. For threads that hold no
        lock: new memory is page-locked here."""

    def receive_part(self, part: Event, dtype: torch.dtype, ring: Ring) -> Receipt | None:
        """A part of a message of this type; None while others are missing. Its slots are released here, soon."""

    def receive_on_device(self, tensor: torch.Tensor) -> Receipt:
        """A message that another path brought to where the training has its tensors, and that is complete."""

    def close(self, timeout_s: float) -> None:
        """Wait until no copy is under way, then free all memory. Safe to call twice."""
