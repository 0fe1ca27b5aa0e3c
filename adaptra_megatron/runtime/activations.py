# SPDX-License-Identifier: Apache-2.0
"""Counts the activations a stage holds, by the rule that the planner and the simulator use."""

from __future__ import annotations

from adaptra_megatron.schedule.actions import Kind


class ActivationCapError(RuntimeError):
    """An order would hold more activations than the cap; names stage, action, count and cap."""


class ActivationAccount:
    """Activations (of one chunk's micro-batch) held by one stage: a forward takes 1, its gradients give it back."""

    def __init__(self, stage: int, cap: float | None, released_at_backward_input: float) -> None:
        self.stage = stage
        self.held = 0.0
        self.peak = 0.0
        self._cap = cap
        self._released = {
            Kind.FORWARD: 0.0,
            Kind.BACKWARD: 1.0,
            Kind.BACKWARD_INPUT: released_at_backward_input,
            Kind.BACKWARD_WEIGHT: 1.0 - released_at_backward_input,
        }

    def before(self, kind: Kind, micro_batch: int, chunk: int) -> None:
        """Take what a forward needs. Raises ActivationCapError instead of passing the cap."""
        if kind is not Kind.FORWARD:
            return
        if self._cap is not None and self.held + 1.0 > self._cap + _ROUNDING:
            raise ActivationCapError(
                f"stage {self.stage} holds {self.held:g} activations; the forward of micro-batch {micro_batch}, "
                f"chunk {chunk} would pass the cap of {self._cap:g}. Raise --adaptra-max-in-flight or use another plan"
            )
        self.held += 1.0
        self.peak = max(self.peak, self.held)

    def after(self, kind: Kind) -> None:
        """Give back what a gradient releases."""
        self.held -= self._released[kind]


_ROUNDING = 1e-9
