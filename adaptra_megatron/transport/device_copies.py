# SPDX-License-Identifier: Apache-2.0
"""How a link's messages get from where the training has them into host memory, and back: not at all on the CPU, by
copies on streams of their own on a GPU.

A link asks its `Copies` for a `Payload` per message sent and a `Receipt` per message received, and treats all devices
alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from adaptra_megatron.transport.cuda_device import Computed, Device, device_error
from adaptra_megatron.transport.incoming_copies import IncomingCopies
from adaptra_megatron.transport.outgoing_copies import OutgoingCopies

UNLIMITED_NBYTES = 1 << 62


class Payload(Protocol):
    """The bytes of a message to send. Holding it holds them."""

    @property
    def shape(self) -> Sequence[int]:
        """Of the tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor."""

    @property
    def nbytes(self) -> int:
        """Of all parts."""

    @property
    def ready(self) -> bool:
        """Whether writing can begin: the first part is in host memory, or never will be (`address` then raises)."""

    def parts(self) -> Sequence[tuple[int, int]]:
        """First byte and end of each part, in order; one empty part for a message without bytes."""

    def address(self, end: int, deadline_s: float) -> int:
        """Where the message is in host memory, once all its bytes before `end` are there.

        Raises TimeoutError at the deadline, TransportError when the device failed.
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
    """What one link uses. `computed` and `Receipt.take` belong to the training thread."""

    @property
    def device(self) -> torch.device:
        """Where the training has its tensors."""

    @property
    def pooled_nbytes(self) -> int:
        """How much unused memory of received messages the link is to keep."""

    def computed(self, tensor: torch.Tensor) -> Computed:
        """A tensor that what is on the current stream by now makes, for this or any other thread to send.

        Raises TransportError when the device failed.
        """

    def stage(self, message: Computed) -> Payload:
        """A tensor (contiguous, no autograd history) to send by the host path. Any thread; returns at once.

        Raises TransportError when the device failed.
        """

    def receive(self, host: torch.Tensor) -> Receipt:
        """A message that has arrived. For threads that hold no lock: new memory is page-locked here."""

    def receive_on_device(self, tensor: torch.Tensor) -> Receipt:
        """A message that another path brought to where the training has its tensors, and that is complete."""

    def close(self, timeout_s: float) -> None:
        """Wait until no copy is under way, then let go of all memory. Safe to call twice."""


class HostPayload:
    """A tensor in host memory."""

    __slots__ = ("_tensor",)
    ready = True

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    @property
    def shape(self) -> Sequence[int]:
        return self._tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._tensor.dtype

    @property
    def nbytes(self) -> int:
        return self._tensor.nbytes

    def parts(self) -> Sequence[tuple[int, int]]:
        return ((0, self._tensor.nbytes),)

    def address(self, end: int, deadline_s: float) -> int:
        return self._tensor.data_ptr()

    def computed(self) -> Computed:
        return Computed(self._tensor, None)


class HostReceipt:
    """A received tensor that stays in host memory."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def begin(self) -> None:
        """Nothing to do."""

    def take(self) -> torch.Tensor:
        return self._tensor


class DeviceReceipt:
    """A received tensor that came to the device, complete, on a stream of another path."""

    __slots__ = ("_device", "_link", "_tensor")

    def __init__(self, tensor: torch.Tensor, device: Device, link: str) -> None:
        self._tensor, self._device, self._link = tensor, device, link

    def begin(self) -> None:
        """Nothing to do."""

    def take(self) -> torch.Tensor:
        # Its memory is that stream's, which does not know what the training still does with it once it is freed.
        try:
            self._device.keep_until_done_on(self._tensor, self._device.current_stream())
        except RuntimeError as cause:
            raise device_error(self._link, cause) from cause
        return self._tensor


class NoCopies:
    """Copies for training on the CPU: messages are sent from and used in the memory they are in."""

    device = torch.device("cpu")

    def __init__(self, pooled_nbytes: int) -> None:
        self.pooled_nbytes = pooled_nbytes

    def computed(self, tensor: torch.Tensor) -> Computed:
        return Computed(tensor, None)

    def stage(self, message: Computed) -> Payload:
        return HostPayload(message.tensor)

    def receive(self, host: torch.Tensor) -> Receipt:
        return HostReceipt(host)

    def receive_on_device(self, tensor: torch.Tensor) -> Receipt:
        return HostReceipt(tensor)

    def close(self, timeout_s: float) -> None:
        """Nothing to wait for."""


class DeviceCopies:
    """Copies for training on a device: a stream for each direction of the link, so that neither waits for the other
    nor for anything but the computation that made the message."""

    pooled_nbytes = UNLIMITED_NBYTES  # the promise that page-locking needs: see `PageLocks`

    def __init__(self, device: Device, *, link: str, limit_nbytes: int, unit_nbytes: int, on_ready: Callable[[], None]):
        """`link`: "stage->stage" for errors and thread names. `limit_nbytes`: of page-locked memory for messages to
        send. `unit_nbytes`: parts are a multiple of it. `on_ready`: called, by a thread of this object that holds
        no lock, whenever a staged message has become ready."""
        self.device = device.device
        self._on, self._link = device, link
        self._outgoing = OutgoingCopies(
            device, link=link, limit_nbytes=limit_nbytes, unit_nbytes=unit_nbytes, on_ready=on_ready
        )
        self._incoming = IncomingCopies(device, link=link)

    def computed(self, tensor: torch.Tensor) -> Computed:
        return self._outgoing.computed(tensor)

    def stage(self, message: Computed) -> Payload:
        return self._outgoing.stage(message)

    def receive(self, host: torch.Tensor) -> Receipt:
        return self._incoming.receive(host)

    def receive_on_device(self, tensor: torch.Tensor) -> Receipt:
        return DeviceReceipt(tensor, self._on, self._link)

    def close(self, timeout_s: float) -> None:
        self._outgoing.close(timeout_s)
        self._incoming.close(timeout_s)


def copies_for(
    device: Device | None,
    *,
    link: str,
    window_nbytes: int,
    pooled_nbytes: int,
    unit_nbytes: int,
    on_ready: Callable[[], None],
) -> Copies:
    """What a link whose tensors are on `device`, or on the CPU (None), uses."""
    if device is None:
        return NoCopies(pooled_nbytes)
    return DeviceCopies(device, link=link, limit_nbytes=window_nbytes, unit_nbytes=unit_nbytes, on_ready=on_ready)
