# SPDX-License-Identifier: Apache-2.0
"""What the device path asks of CUDA and NCCL for a message: one call each, and no GIL. Native code: csrc/device."""

from collections.abc import Mapping
from typing import Any

class DeviceCallError(RuntimeError):
    """What the driver or NCCL refused, in their words; or a launch that took too long, or was given up."""

class Event:
    """A point in a stream; a `cuda_device.Event`. Another thread may ask while the driver does not answer this one."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...

class Transfers:
    """Sends or receives of one end of a link; one thread at a time begins any, `follow` and `end` are for all."""

    def __init__(self, addresses: Mapping[str, int], device: int, communicator: int, stream: int, peer: int) -> None:
        """`addresses`: of functions, by their names. `device`: its index. `stream`: of the link."""

    def begin(self, sends: bool, address: int, nbytes: int, after: int | None, limit_s: float) -> Event:
        """Put a transfer on the link's stream, behind what is on the stream `after` by now, and wait until it is there.

        Raises DeviceCallError where that takes longer than `limit_s`, or `end` was called.
        """

    def follow(self, event: Any, stream: int) -> None:
        """What is put on `stream` from now on runs after `event`, one of `begin`."""

    def end(self) -> None:
        """A thread that waits in `begin` leaves."""
