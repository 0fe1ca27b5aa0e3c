# SPDX-License-Identifier: Apache-2.0
"""A device's memory that is only counted."""

from __future__ import annotations

from collections.abc import Mapping

from adaptra_megatron.control.stage_memory import DeviceBytes
from adaptra_megatron.schedule.ir import Kind


class MadeUpMemory:
    """Implements MemorySource. Bytes that were freed stay reserved, as in torch's caching allocator."""

    def __init__(self, total: int, static: int = 0) -> None:
        """`static`: what the model and its optimizer take."""
        self.total = total
        self.of_others = 0
        """What other processes, and libraries of this one, have taken."""
        self.allocated = self.reserved = self.peak = self.peak_ever = static
        self.lingering = 0
        """Freed, but not to be had before another stream is done with it."""
        self.shortage_count = 0
        self.asked = 0
        """How often the allocated bytes were asked for."""

    def allocate(self, nbytes: int) -> None:
        """Negative: free."""
        self.allocated += nbytes
        active = self.allocated + self.lingering
        self.peak, self.peak_ever = max(self.peak, active), max(self.peak_ever, active)
        self.reserved = max(self.reserved, active)
        assert self.allocated >= 0, "freed more than there was"

    def allocated_nbytes(self) -> int:
        self.asked += 1
        return self.allocated

    def reserved_nbytes(self) -> int:
        return self.reserved

    def begin_peak(self) -> None:
        self.peak = self.allocated + self.lingering

    def peak_nbytes(self) -> int:
        return self.peak

    def device_nbytes(self) -> DeviceBytes:
        return DeviceBytes(self.total - self.of_others - self.reserved, self.total)

    def shortages(self) -> int:
        return self.shortage_count


class MadeUpStage:
    """What the actions of a stage allocate and free.

    A forward is given its input (`message` bytes, allocated before), keeps `activation` bytes as well and hands its
    output, of the same size, to the transport, which holds it until the next action is over. Gradients likewise.
    """

    def __init__(
        self,
        memory: MadeUpMemory,
        activation: int,
        *,
        message: int,
        released: float = 0.0,
        scratch: int | Mapping[Kind, int] = 0,
    ) -> None:
        """`released`: of `activation`, by an input gradient; negative: it keeps more. `scratch`: what each action needs
        before it gives anything back."""
        self.memory = memory
        self._activation, self._message = activation, message
        self._scratch = scratch if isinstance(scratch, Mapping) else dict.fromkeys(Kind, scratch)
        self._after_input = round((1.0 - released) * activation)
        self._in_transport = 0

    def receive(self, kind: Kind) -> None:
        """The message that the action needs is there."""
        if kind is not Kind.BACKWARD_WEIGHT:
            self.memory.allocate(self._message)

    def compute(self, kind: Kind) -> None:
        """Everything between the executor's two words to its account."""
        memory, message = self.memory, self._message
        sends = kind is not Kind.BACKWARD_WEIGHT
        memory.allocate(message if sends else 0)
        memory.allocate(self._scratch[kind])
        memory.allocate(-self._scratch[kind])
        if kind is Kind.FORWARD:
            memory.allocate(self._activation)
        elif kind is Kind.BACKWARD:
            memory.allocate(-self._activation - message)  # and the input
        elif kind is Kind.BACKWARD_INPUT:
            memory.allocate(self._after_input - self._activation - message)
        else:
            memory.allocate(-self._after_input)
        self._sent = message if sends else 0

    def end(self, kind: Kind) -> None:
        """The action's own references are gone, and the message that was sent before has left."""
        if kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            self.memory.allocate(-self._message)  # the gradient that came
        self.memory.allocate(-self._in_transport)
        self._in_transport = self._sent

    def flush(self) -> None:
        """All messages have left."""
        self.memory.allocate(-self._in_transport)
        self._in_transport = 0
