# SPDX-License-Identifier: Apache-2.0
"""Define how a link moves its messages between the training's device and its rings.

A link gets from its `Copies` a `Payload` per sent message and a `Receipt` per received message, and treats all devices
alike. On the CPU the threads that write and read the ring copy messages; on a GPU, streams of the link do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from adaptra_megatron.transport._ring import Description, Event, Ring
from adaptra_megatron.transport.gpu.cuda_device import Computed

PART_NBYTES = 4 << 20
"""Bytes of a message that are written in one turn, while other links may wait for theirs."""
PATIENCE_S = 5e-4
"""Longest wait for a slot of a ring that is being emptied: to be woken for each would take longer."""


class Payload(Protocol):
    """Bytes of a message to send; keeps them alive."""

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
        """Return whether any thread may write the payload at once, since its bytes are in host memory."""

    @property
    def ready(self) -> bool:
        """Return whether `write` can begin: the tensor has been computed, or the device has failed (`write` then
        raises).
        """

    def write(self, ring: Ring, description: Description, deadline_s: float, offset: int = 0) -> int:
        """Write the message, or a part of it, into a ring, from `offset` on; return where to go on, `nbytes + 1` at
        its end. May be repeated, with another ring.

        Only a device is waited for, until `deadline_s`, and room for PATIENCE_S; not at all if that is 0. Raises
        TimeoutError if the ring has no room for a device's copy, RingClosedError, and TransportError if the device
        failed.
        """


class Receipt(Protocol):
    """A received message on its way from host memory to the training's device."""

    def begin(self) -> None:
        """Begin the copy, once the receive is posted. For any thread, any number of times; returns at once."""

    def take(self) -> torch.Tensor:
        """Return the tensor, usable by later work on the calling thread's current stream. Never waits.

        Raises TransportError if the device failed.
        """


class Copies(Protocol):
    """Copies of one link between the training's device and its rings.

    The training thread calls `computed` and takes receipts.
    """

    @property
    def device(self) -> torch.device:
        """Device of the training's tensors."""

    @property
    def pooled_nbytes(self) -> int:
        """Bytes of unused memory of received messages that the link keeps."""

    @property
    def by_parts(self) -> bool:
        """Return whether posted messages are received part by part, directly from the ring."""

    def use_rings(self, outbound: Ring, inbound: Ring) -> None:
        """Prepare the rings of a new session for copies, which may take long. Not for the training thread."""

    def computed(self, tensor: torch.Tensor) -> Computed:
        """Return a tensor with an event behind its computation on the current stream; any thread may then send it.

        Raises TransportError if the device failed.
        """

    def stage(self, message: Computed) -> Payload:
        """Prepare a contiguous tensor without autograd history for the host path. For any thread; returns at once.

        Raises TransportError if the device failed.
        """

    def receive(self, host: torch.Tensor, block_nbytes: int) -> Receipt:
        """Take a whole message at the beginning of a host block of `block_nbytes`. Call without locks: new memory is
        page-locked.
        """

    def receive_part(self, part: Event, dtype: torch.dtype, ring: Ring) -> Receipt | None:
        """Take a part of a message and release its slots soon; return the receipt with the last part, else None."""

    def receive_on_device(self, tensor: torch.Tensor) -> Receipt:
        """Take a complete message that another path received on the device."""

    def close(self, timeout_s: float) -> None:
        """Wait for copies in progress, at most `timeout_s`, then free all memory. May be called twice."""
