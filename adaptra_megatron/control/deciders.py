# SPDX-License-Identifier: Apache-2.0
"""Define deciders, and what they share while one decision is made. All live in one thread alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Protocol

from adaptra_megatron.common.reasons import Reason
from adaptra_megatron.control.decisions import Forecast, Section
from adaptra_megatron.control.detector.link_findings import Estimates, Finding
from adaptra_megatron.control.detector.samples import IterationSample
from adaptra_megatron.control.measurements import StageMeasurement
from adaptra_megatron.control.order.cost_estimates import InUse
from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.telemetry.events.events import Event
from adaptra_megatron.telemetry.tracing.trace_requests import Iterations


class Context:
    """State that is known when a decision is made. Deciders find in it what those before them have changed."""

    routed = False
    """True where micro-batches are routed between replicas, so that no pipeline's own order counts."""
    forecast: Forecast | None = None
    """Forecast of an iteration under the new plan; None where the plan does not change, or there is none."""

    def __init__(
        self,
        latest: Sequence[StageMeasurement],
        estimates: Estimates,
        findings: Sequence[Finding],
        carried: InUse,
        number: int,
        estimate_costs: Callable[[Context], Costs | None],
    ) -> None:
        """`latest`: the last iteration of all ranks. `findings`: new since the last decision. `carried`: the path that
        messages of each link took. `number`: of the plan that runs."""
        self.latest, self.estimates, self.findings, self.carried = latest, estimates, findings, carried
        self.in_use = carried
        """Expected path of each link."""
        self.number = number
        self.reasons: list[Reason] = []
        """Why the next plan is another one than this, in words."""
        self.before: Costs | None = None
        """Costs as they would be without these changes."""
        self._estimate_costs = estimate_costs

    @property
    def micro_batches(self) -> int:
        """Micro-batches of the latest iteration."""
        return self.latest[0].micro_batches

    @cached_property
    def costs(self) -> Costs | None:
        """Expected costs; None until every action has been measured."""
        return self._estimate_costs(self)

    def expect(self, in_use: InUse) -> None:
        """Links are to be expected to take these paths."""
        self.in_use = in_use
        self.__dict__.pop("costs", None)

    def change(self, reasons: Sequence[Reason]) -> None:
        """The plan that is decided on is another one than that which runs."""
        self.before = self.costs if self.before is None else self.before
        self.reasons += reasons


class DecisionTelemetry(Protocol):
    """Part of RunTelemetry that deciders use."""

    def log(self, event: Event) -> None:
        """Something happened, in the iteration that runs."""

    def requests(self) -> tuple[Iterations, ...]:
        """Return which iterations every rank is to trace, new since the last call."""


class Decider(Protocol):
    """Decides on one section of each decision."""

    def observe(self, measurements: Sequence[StageMeasurement], sample: IterationSample) -> None:
        """Take one iteration of all ranks in; `sample`: the two ends of its messages joined."""

    def decide(self, context: Context) -> Section | None:
        """Return what is to run; None where there is nothing to say."""
