# SPDX-License-Identifier: Apache-2.0
"""Recognise cold iterations: the first of their kind on a GPU, in which kernels are loaded and tuned and buffers made.

Any call in a cold iteration may make the host wait for its whole device. Receives end nevertheless, as they are posted
in launch order. So cold iterations differ from others in only two ways. They run stock's order with whole backwards, so
that they hold no more memory than stock while allocators grow. They end with a wait for the device, so that none of
their work is pending when a plan begins.
"""

from __future__ import annotations

from collections.abc import Callable

from adaptra_megatron.megatron.megatron_call import PipelineCall

COLD = "kernels loaded and tuned for the first time"
"""Name of the disturbance in the timings of a cold iteration."""


class FirstIterations:
    """Recognises one rank's cold iterations: training and evaluation, each message shape, each number of micro-batches.

    All ranks agree without communication.
    """

    def __init__(self, synchronize: Callable[[], None] | None) -> None:
        """`synchronize`: waits for the GPU; None on a CPU, where no iteration is cold."""
        self.cold = False
        """True while the present iteration is cold."""
        self._synchronize = synchronize
        self._seen: set[tuple[bool, tuple[int, ...] | None, int]] = set()

    def begin(self, call: PipelineCall) -> None:
        """Record the start of the iteration of `call`."""
        kind = call.forward_only, call.message_shape, call.micro_batches
        self.cold = self._synchronize is not None and kind not in self._seen
        self._seen.add(kind)

    def end(self) -> None:
        """Wait for the device if the iteration, now launched, was cold."""
        if self.cold and self._synchronize is not None:
            self._synchronize()
