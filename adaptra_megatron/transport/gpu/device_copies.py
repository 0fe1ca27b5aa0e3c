# SPDX-License-Identifier: Apache-2.0
"""Move a link's messages between a GPU and its rings, in both directions."""

from __future__ import annotations

from collections.abc import Callable

import torch

from adaptra_megatron.transport._ring import Event, Ring
from adaptra_megatron.transport.gpu.copies import Payload, Receipt
from adaptra_megatron.transport.gpu.cuda_device import Computed, Device, device_error
from adaptra_megatron.transport.gpu.incoming_copies import IncomingCopies
from adaptra_megatron.transport.gpu.outgoing_copies import OutgoingCopies
from adaptra_megatron.transport.gpu.page_locks import PageLocks

UNLIMITED_NBYTES = 1 << 62


class DeviceReceipt:
    """A received tensor that is already on the device: another path brought it."""

    __slots__ = ("_device", "_link", "_tensor")

    def __init__(self, tensor: torch.Tensor, device: Device, link: str) -> None:
        self._tensor, self._device, self._link = tensor, device, link

    def begin(self) -> None:
        """Do nothing: the tensor is on the device."""

    def take(self) -> torch.Tensor:
        # Its memory is that stream's, which does not know what the training still does with it once it is freed.
        try:
            self._device.keep_until_done_on(self._tensor, self._device.current_stream())
        except RuntimeError as cause:
            raise device_error(self._link, cause) from cause
        return self._tensor


class DeviceCopies:
    """Copies for training on a GPU, with a stream for each direction of the link.

    The streams wait only for the computation of a message.
    """

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
