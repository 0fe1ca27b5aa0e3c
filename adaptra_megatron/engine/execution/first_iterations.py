# SPDX-License-Identifier: Apache-2.0
"""Know iterations that find a GPU cold: the first of their kind, in which kernels are loaded and tuned and buffers
made.

All of that makes the host wait for its whole device, at any call. Receives that are posted by launch order end all the
same. So these iterations differ from others in two things alone: they run stock's order with whole backwards, which
holds no more memory than stock does while allocators grow, and end with a wait for the device, so that nothing of them
is left when a plan begins.
"""

from __future__ import annotations

from collections.abc import Callable

from adaptra_megatron.megatron.megatron_call import PipelineCall

COLD = "kernels loaded and tuned for the first time"
"""What disturbs the timings of such an iteration."""


class FirstIterations:
    """One rank's, alike on all ranks: training and evaluation, each shape of messages, each number of micro-batches."""

    def __init__(self, synchronize: Callable[[], None] | None) -> None:
        """`synchronize`: waits for the GPU; None on a CPU, where no iteration is cold."""
        self.cold = False
        """Set while the iteration under way is one."""
        self._synchronize = synchronize
        self._seen: set[tuple[bool, tuple[int, ...] | None, int]] = set()

    def begin(self, call: PipelineCall) -> None:
        """The iteration of `call` begins."""
        kind = call.forward_only, call.message_shape, call.micro_batches
        self.cold = self._synchronize is not None and kind not in self._seen
        self._seen.add(kind)

    def end(self) -> None:
        """All of the iteration has been launched: wait for the device if it was cold."""
        if self.cold and self._synchronize is not None:
            self._synchronize()
