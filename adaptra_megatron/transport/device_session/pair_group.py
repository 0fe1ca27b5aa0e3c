# SPDX-License-Identifier: Apache-2.0
"""One end of a directed link for one session: the interface, and its implementation over gloo for CPU tensors.

No operation is collective over more ranks than the link's two ends, so a link can be created again in the middle of an
iteration. Over NCCL see nccl_link.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch

from adaptra_megatron.transport.gpu.cuda_device import CudaEvent

_EXPIRED = timedelta(milliseconds=1)
_LIFELINE_TAG = (1 << 31) - 1
ENDED = "the session was ended"


class PairEnds(NamedTuple):
    """The global ranks at the ends of a directed link."""

    source: int
    target: int


class PairWork(Protocol):
    """A send or receive in progress, as torch.distributed's Work."""

    def wait(self, timeout: timedelta) -> bool:
        """Block until it is done. Raises RuntimeError if it failed or timed out."""


class LinkGroup(Protocol):
    """One end of one session of a directed link. One thread sends, one receives; `abort` is for any thread.

    Methods raise RuntimeError if they fail, and once the session has ended.
    """

    ends: PairEnds
    tagged: bool
    """True if messages are matched by tag, so that receives may be posted in any order."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return fresh memory for a receive."""

    def bring(self, host: torch.Tensor) -> torch.Tensor:
        """Return a small host tensor [n] in a form that the group can send. Returns without waiting."""

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a small received tensor [n] in host memory."""

    def begin_after(self, event: CudaEvent) -> None:
        """Make later sends and receives begin after `event`. Returns at once."""

    def send(self, tensor: torch.Tensor, tag: int) -> Any:
        """Begin to send a contiguous tensor; its bytes are held until they have left."""

    def receive(self, buffer: torch.Tensor, tag: int) -> Any:
        """Begin to fill `buffer` with the message of this tag; without tags, with the next one."""

    def wait(self, work: Any, timeout_s: float) -> None:
        """Block until `work` is done. A wait that expires ends the session."""

    def abort(self, cause: str = ENDED) -> None:
        """End the session: every wait at this end raises; over gloo at both ends. For any thread, any number
        of times.
        """

    def wait_until_freed(self, deadline_s: float) -> bool:
        """Return whether the ended session has released everything by `deadline_s`."""


class PairGroup:
    """One end of a directed link over gloo."""

    tagged = True

    def __init__(self, group: Any, ends: PairEnds, *, sends: bool) -> None:
        """`group`: process group of the two ends for this session alone (`epoch_group`). `sends`: True at the
        source."""
        self.ends = ends
        self._group, self._peer = group, 1 if sends else 0
        # Never answered. To let a wait expire is the only way to make gloo close a pair, which ends all other waits.
        self._lifeline: Any = self._group.recv([torch.empty(1, dtype=torch.uint8)], self._peer, _LIFELINE_TAG)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def bring(self, host: torch.Tensor) -> torch.Tensor:
        return host

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def begin_after(self, event: CudaEvent) -> None:
        """Nothing to do: host memory has no events."""
        event.synchronize()

    # Looked up on the class at each call: fault injection and instrumentation replace them there.
    def send(self, tensor: torch.Tensor, tag: int) -> PairWork:
        """Send a contiguous tensor. The caller keeps its bytes until the peer has confirmed them."""
        work: PairWork = self._group.send([tensor], self._peer, tag)
        return work

    def receive(self, buffer: torch.Tensor, tag: int) -> PairWork:
        """Fill `buffer` with the message of this tag."""
        work: PairWork = self._group.recv([buffer], self._peer, tag)
        return work

    def wait(self, work: PairWork, timeout_s: float) -> None:
        """Block until `work` is done. Raises RuntimeError if it failed; a timeout ends the session."""
        work.wait(timedelta(seconds=timeout_s))

    def abort(self, cause: str = ENDED) -> None:
        """End the session: every wait at both ends raises. Safe to call twice, and from any thread."""
        with contextlib.suppress(RuntimeError):
            self._lifeline.wait(_EXPIRED)

    def wait_until_freed(self, deadline_s: float) -> bool:
        """Return True: the group is freed with its last reference."""
        return True
