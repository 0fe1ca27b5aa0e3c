# SPDX-License-Identifier: Apache-2.0
"""The two ways of a link's messages between where the training has them and its rings: host memory, and a device's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from adaptra_megatron.transport._ring import Description, Event, Ring
from adaptra_megatron.transport.gpu.copies import Copies, Payload, Receipt
from adaptra_megatron.transport.gpu.cuda_device import Computed, Device, device_error
from adaptra_megatron.transport.gpu.incoming_copies import IncomingCopies
from adaptra_megatron.transport.gpu.outgoing_copies import OutgoingCopies
from adaptra_megatron.transport.gpu.page_locks import PageLocks

UNLIMITED_NBYTES = 1 << 62


class HostPayload:
    """A tensor in host memory."""

    __slots__ = ("_tensor",)
    inline = ready = True

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

    def write(self, ring: Ring, description: Description, deadline_s: float) -> None:
        ring.write(description, self._tensor.data_ptr(), self._tensor.nbytes, deadline_s)

    def computed(self) -> Computed:
        return Computed(self._tensor, None)


class HostReceipt:
    """A received tensor in host memory."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def begin(self) -> None:
        """Do nothing: there is no copy."""

    def take(self) -> torch.Tensor:
        return self._tensor


class DeviceReceipt:
    """A received tensor that another path brought to the device, complete."""

    __slots__ = ("_device", "_link", "_tensor")

    def __init__(self, tensor: torch.Tensor, device: Device, link: str) -> None:
        self._tensor, self._device, self._link = tensor, device, link

    def begin(self) -> None:
        """Do nothing: the tensor is there."""

    def take(self) -> torch.Tensor:
        # Its memory is that stream's, which does not know what the training still does with it once it is freed.
        try:
            self._device.keep_until_done_on(self._tensor, self._device.current_stream())
        except RuntimeError as cause:
            raise device_error(self._link, cause) from cause
        return self._tensor


class NoCopies:
    """Copies for training on the CPU: tensors are sent from, and used in, the memory they are in."""

    device = torch.device("cpu")
    by_parts = False

    def __init__(self, pooled_nbytes: int) -> None:
        self.pooled_nbytes = pooled_nbytes

    def use_rings(self, outbound: Ring, inbound: Ring) -> None:
        """Do nothing: any ring will do."""

    def computed(self, tensor: torch.Tensor) -> Computed:
        return Computed(tensor, None)

    def stage(self, message: Computed) -> Payload:
        return HostPayload(message.tensor)

    def receive(self, host: torch.Tensor, block_nbytes: int) -> Receipt:
        return HostReceipt(host)

    def receive_part(self, part: Event, dtype: torch.dtype, ring: Ring) -> Receipt | None:
        raise AssertionError("nothing is received by parts here")

    def receive_on_device(self, tensor: torch.Tensor) -> Receipt:
        return HostReceipt(tensor)

    def close(self, timeout_s: float) -> None:
        """Return at once: there are no copies."""


class DeviceCopies:
    """Copies for training on a GPU, with a stream for each direction of the link, which wait only for the
    computation that makes a message."""

    pooled_nbytes = UNLIMITED_NBYTES  # the promise that page-locking needs: see `PageLocks`
    by_parts = True

    def __init__(self, device: Device, *, link: str, on_ready: Callable[[], None]) -> None:
        """`link`: "stage->stage" for errors and thread names. `on_ready`: called, by a thread without locks,
        whenever a staged message becomes ready."""
        self.device = device.device
        self._on, self._link = device, link
        self._locks = PageLocks(device, link)
        self._outgoing = OutgoingCopies(device, link=link, locks=self._locks, on_ready=on_ready)
        self._incoming = IncomingCopies(device, link=link, locks=self._locks)

    def use_rings(self, outbound: Ring, inbound: Ring) -> None:
        self._outgoing.use_ring(outbound)
        self._incoming.use_ring(inbound)

    def computed(self, tensor: torch.Tensor) -> Computed:
        return self._outgoing.computed(tensor)

    def stage(self, message: Computed) -> Payload:
        return self._outgoing.stage(message)

    def receive(self, host: torch.Tensor, block_nbytes: int) -> Receipt:
        return self._incoming.receive(host, block_nbytes)

    def receive_part(self, part: Event, dtype: torch.dtype, ring: Ring) -> Receipt | None:
        return self._incoming.receive_part(part, dtype, ring)

    def receive_on_device(self, tensor: torch.Tensor) -> Receipt:
        return DeviceReceipt(tensor, self._on, self._link)

    def close(self, timeout_s: float) -> None:
        if all([self._outgoing.close(timeout_s), self._incoming.close(timeout_s)]):
            self._locks.close()


def copies_for(device: Device | None, *, link: str, pooled_nbytes: int, on_ready: Callable[[], None]) -> Copies:
    """Return the Copies of a link for tensors on `device`; None: the CPU."""
    return NoCopies(pooled_nbytes) if device is None else DeviceCopies(device, link=link, on_ready=on_ready)
