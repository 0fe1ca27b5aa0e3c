# SPDX-License-Identifier: Apache-2.0
"""Counts the activations a stage holds, by the rule that the planner and the simulator use."""

from __future__ import annotations

from adaptra_megatron.control.memory import MemoryMeter
from adaptra_megatron.schedule.actions import Kind


class ActivationCapError(RuntimeError):
    """An order would hold more activations than the cap; names stage, action, count, cap and bytes where known."""


class ActivationAccount:
    """Activations (of one chunk's micro-batch) held by one stage: a forward takes 1, its gradients give it back.

    Where an input gradient releases less than nothing, it takes that at its start.
    """

    def __init__(
        self,
        stage: int,
        cap: float | None,
        released_at_backward_input: float,
        meter: MemoryMeter | None = None,
    ) -> None:
        """`meter`: gets every action, to measure what the activations take."""
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
        self._taken = {kind: -released for kind, released in self._released.items() if released < 0.0}
        self._taken[Kind.FORWARD] = 1.0

    def before(self, kind: Kind, micro_batch: int, chunk: int) -> None:
        """Take what the action needs. Raises ActivationCapError instead of passing the cap."""
        if (taken := self._taken.get(kind, 0.0)) > 0.0:
            if self._cap is not None and self.held + taken > self._cap + _ROUNDING:
                what = "forward" if kind is Kind.FORWARD else "input gradient"
                raise self._refusal(self._cap, taken, f"{what} of micro-batch {micro_batch}, chunk {chunk}")
            self.held += taken
            self.peak = max(self.peak, self.held)
        if self._meter is not None:
            self._chunk = chunk
            self._meter.before()

    def after(self, kind: Kind) -> None:
        """Give back what a gradient releases."""
        self.held -= max(0.0, self._released[kind])
        if self._meter is not None:
            self._meter.after(kind, self._chunk)

    def _refusal(self, cap: float, taken: float, action: str) -> ActivationCapError:
        nbytes = self._meter.activation_nbytes if self._meter is not None else None
        size = (
            "" if nbytes is None else f" ({(self.held + taken) * nbytes / 1e6:,.0f} MB at {nbytes / 1e6:,.1f} MB each)"
        )
        return ActivationCapError(
            f"stage {self.stage} holds {self.held:g} activations; the {action} would pass the cap of {cap:g}{size}. "
            "Raise --adaptra-max-in-flight, or --adaptra-memory-fraction where the cap was measured, or use another "
            "plan"
        )


_ROUNDING = 1e-9
