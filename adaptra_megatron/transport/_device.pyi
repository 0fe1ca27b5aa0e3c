# SPDX-License-Identifier: Apache-2.0
"""What the device path asks of CUDA and NCCL for a message: one call each, and no GIL. Native code: csrc/device."""

from collections.abc import Mapping
from typing import Any

import torch

class DeviceCallError(RuntimeError):
    """What the driver or NCCL refused, in their words; or a launch that took too long, or was given up."""

class Work:
    """A transfer under way. Holding it holds the bytes. Others may ask while the driver does not answer one thread.

    The event behind it on the link's stream tells no time: a timed one would hold up all that shares its queue.
    """

    @property
    def tensor(self) -> torch.Tensor: ...
    deadline_s: float
    """When waiting for it makes no sense any more (time.monotonic)."""

    def query(self) -> bool:
        """Return whether it is done. Raises DeviceCallError where the device has failed."""

    def synchronize(self) -> None:
        """Sleep until it is done. Raises DeviceCallError likewise."""

class Transfers:
    """Sends or receives of one end of a link; one thread at a time begins any, all else is for all."""

    def __init__(self, addresses: Mapping[str, int], device: int, communicator: int, stream: int, peer: int) -> None:
        """`addresses`: of functions, by their names. `device`: its index. `stream`: of the link."""

    def begin(
        self, sends: bool, tensor: torch.Tensor, address: int, nbytes: int, after: int | None, limit_s: float
    ) -> Work:
        """Put a transfer of `tensor` on the link's stream, behind what is on the stream `after` by now, wait until it
        is there, and let go of the bytes of what is done.

        Raises DeviceCallError where that takes longer than `limit_s`, or `end` was called.
        """

    def follow(self, work: Any, stream: int, deadline_s: float) -> None:
        """What is put on `stream` from now on runs after `work`, one of `begin`, which is due by `deadline_s`."""

    def free_done(self) -> None:
        """Let go of the bytes of what is done. A device that failed keeps all."""

    def under_way(self) -> list[Work]:
        """Let go of what is done, and return the rest in the order of the stream."""

    def end(self) -> None:
        """A thread that waits in `begin` leaves."""
