# SPDX-License-Identifier: Apache-2.0
"""Counts the activations a stage holds, by the rule that the planner and the simulator use."""

from __future__ import annotations

from adaptra_megatron.runtime.memory import MemoryMeter
from adaptra_megatron.schedule.actions import Kind


class ActivationCapError(RuntimeError):
    """An order would hold more activations than the cap; names stage, action, count, cap and bytes where known."""


class ActivationAccount:
    """Activations (of one chunk's micro-batch) held by one stage: a forward takes 1, its gradients give it back."""

    def __init__(
        self,
        stage: int,
        cap: float | None,
        released_at_backward_input: float,
        meter: MemoryMeter | None = None,
    ) -> None:
        """`meter`: is told of every action, to learn what the activations take."""
        self.stage = stage
        self.held = 0.0
        self.peak = 0.0
        self._cap = cap
        self._meter = meter
        self._chunk = 0
        self._released = {
            Kind.FORWARD: 0.0,
            Kind.BACKWARD: 1.0,
            Kind.BACKWARD_INPUT: released_at_backward_input,
            Kind.BACKWARD_WEIGHT: 1.0 - released_at_backward_input,
        }

    def before(self, kind: Kind, micro_batch: int, chunk: int) -> None:
        """Take what a forward needs. Raises ActivationCapError instead of passing the cap."""
        if kind is Kind.FORWARD:
            if self._cap is not None and self.held + 1.0 > self._cap + _ROUNDING:
                raise self._refusal(self._cap, micro_batch, chunk)
            self.held += 1.0
            self.peak = max(self.peak, self.held)
        if self._meter is not None:
            self._chunk = chunk
            self._meter.before()

    def after(self, kind: Kind) -> None:
        """Give back what a gradient releases."""
        self.held -= self._released[kind]
        if self._meter is not None:
            self._meter.after(kind, self._chunk)

    def _refusal(self, cap: float, micro_batch: int, chunk: int) -> ActivationCapError:
        nbytes = self._meter.activation_nbytes if self._meter is not None else None
        size = "" if nbytes is None else f" ({(self.held + 1.0) * nbytes / 1e6:,.0f} MB at {nbytes / 1e6:,.1f} MB each)"
        return ActivationCapError(
            f"stage {self.stage} holds {self.held:g} activations; the forward of micro-batch {micro_batch}, "
            f"chunk {chunk} would pass the cap of {cap:g}{size}. Raise --adaptra-max-in-flight, or "
            "--adaptra-memory-fraction where the cap was measured, or use another plan"
        )


_ROUNDING = 1e-9
