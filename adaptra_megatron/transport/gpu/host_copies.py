# SPDX-License-Identifier: Apache-2.0
"""Move a link's messages between the training and its rings if both are in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from adaptra_megatron.transport._ring import Description, Event, Ring
from adaptra_megatron.transport.gpu.copies import PART_NBYTES, PATIENCE_S, Copies, Payload, Receipt
from adaptra_megatron.transport.gpu.cuda_device import Computed, Device


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

    def write(self, ring: Ring, description: Description, deadline_s: float, offset: int = 0) -> int:
        nbytes, patience_s = self._tensor.nbytes, PATIENCE_S if deadline_s else 0.0
        return ring.write_some(description, self._tensor.data_ptr(), nbytes, offset, PART_NBYTES, patience_s)


class HostReceipt:
    """A received tensor in host memory."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def begin(self) -> None:
        """Do nothing: there is no copy."""

    def take(self) -> torch.Tensor:
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


def copies_for(device: Device | None, *, link: str, pooled_nbytes: int, on_ready: Callable[[], None]) -> Copies:
    """Return the Copies of a link for tensors on `device`; None: the CPU."""
    if device is None:
        return NoCopies(pooled_nbytes)
    from adaptra_megatron.transport.gpu.device_copies import DeviceCopies  # much, which the CPU does not need

    return DeviceCopies(device, link=link, on_ready=on_ready)
