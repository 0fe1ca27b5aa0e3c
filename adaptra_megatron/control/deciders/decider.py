# SPDX-License-Identifier: Apache-2.0
"""Define deciders, the context they share during one decision, and the costs that plans are made for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np

from adaptra_megatron.common.reasons import Reason
from adaptra_megatron.control.deciders.plan_state import Layout
from adaptra_megatron.control.decisions import Forecast, Section
from adaptra_megatron.control.detector.observations import (
    Estimates,
    Finding,
    IterationSample,
    LinkEstimate,
    LinkId,
    State,
)
from adaptra_megatron.control.measurements import StageMeasurement
from adaptra_megatron.schedule.costs import Costs, LinkCost, PerChunk
from adaptra_megatron.schedule.ir import Kind
from adaptra_megatron.telemetry.action_records import Iterations
from adaptra_megatron.telemetry.events import Event
from adaptra_megatron.telemetry.scalars import LinkFigures
from adaptra_megatron.transport.link_paths import Path

DirectedLink = tuple[int, int]
"""Source and target stage."""
InUse = dict[tuple[int, int, int], LinkId]
"""The path in use, by pipeline, source and target."""


def paths_in_use(before: InUse, sample: IterationSample) -> InUse:
    """Return the path that carried most messages of each link in `sample`; a link without messages keeps its path."""
    after, most = dict(before), dict[tuple[int, int, int], int]()
    for link, carried in sample.links.items():
        place = link.pipeline, link.source, link.target
        arrived = int(np.count_nonzero(carried.messages.arrived))
        if arrived > most.get(place, 0):
            after[place], most[place] = link, arrived
    return after


def estimate_costs(
    estimates: Estimates,
    in_use: InUse,
    layout: Layout,
    *,
    micro_batches: int,
    can_split: bool,
    caps: tuple[float | None, ...],
    released_at_backward_input: tuple[float, ...],
) -> Costs | None:
    """Return the costs of the slowest pipeline, by stage and by link; None until every action has been measured.

    A stage that lately ran whole backwards (in stock's order, say) keeps its earlier costs of split ones, and vice
    versa. `can_split`: whether plans split backwards. If not, a whole backward counts as the input gradient. If all
    backwards ran whole so far (`layout.whole_first`), the costs of the parts are estimated.
    """
    slowest = _slowest(estimates)
    if can_split and layout.whole_first:
        _guess_parts(slowest)
    if not can_split:
        for (stage, kind, chunk), seconds in list(slowest.items()):
            if kind is Kind.BACKWARD:
                slowest[stage, Kind.BACKWARD_INPUT, chunk] = seconds
                slowest[stage, Kind.BACKWARD_WEIGHT, chunk] = 0.0
    tables = {kind: _table(slowest, kind, layout) for kind in Kind}
    forward_s, backward_input_s = tables[Kind.FORWARD], tables[Kind.BACKWARD_INPUT]
    backward_weight_s = tables[Kind.BACKWARD_WEIGHT]
    if forward_s is None or backward_input_s is None or backward_weight_s is None:
        return None
    by_device = {(used.source, used.target) for used in in_use.values() if used.path == Path.DEVICE.value}
    return Costs(
        stages=layout.stages,
        chunks=layout.chunks,
        micro_batches=micro_batches,
        forward_s=forward_s,
        backward_input_s=backward_input_s,
        backward_weight_s=backward_weight_s,
        links={
            link: _slowest_link(found)._replace(rendezvous=layout.rendezvous and link in by_device)
            for link, found in _by_link(estimates, in_use).items()
        },
        max_in_flight=caps,
        released_at_backward_input=released_at_backward_input,
        backward_s=tables[Kind.BACKWARD] if can_split else None,
        shared_queue=layout.shared_queue,
        serial_queue=layout.serial_queue,
    )


def link_figures(estimates: Estimates, in_use: InUse) -> dict[DirectedLink, LinkFigures]:
    """Return figures for TensorBoard and Prometheus: each link as in the pipeline where it is slowest."""
    figures = {}
    for link, found in _by_link(estimates, in_use).items():
        slowest = max(found, key=lambda estimate: estimate.transfer_s)
        states = {estimate.state for estimate in found}
        state = next(state for state in (State.DEAD, State.SLOW, State.HEALTHY) if state in states)
        figures[link] = LinkFigures(
            latency_s=slowest.latency_s, bandwidth_bytes_s=slowest.bandwidth_bytes_per_s, state=state.value
        )
    return figures


def _slowest(estimates: Estimates) -> dict[tuple[int, Kind, int], float]:
    """Return the seconds of the slowest pipeline, by stage, kind and chunk."""
    found: dict[tuple[int, Kind, int], float] = {}
    for identity, estimate in estimates.stages.items():
        for (kind, chunk), seconds in estimate.durations_s.items():
            place = identity.stage, Kind(kind), chunk
            found[place] = max(seconds, found.get(place, 0.0))
    return found


def _guess_parts(seconds: dict[tuple[int, Kind, int], float]) -> None:
    """Add estimates for input and weight gradients where only whole backwards were measured.

    Layers are recomputed in the backward then: the input gradient gets the time of a forward and half the rest.
    """
    for (stage, kind, chunk), whole_s in list(seconds.items()):
        parts = (stage, Kind.BACKWARD_INPUT, chunk), (stage, Kind.BACKWARD_WEIGHT, chunk)
        if kind is Kind.BACKWARD and not any(part in seconds for part in parts):
            forward_s = min(seconds.get((stage, Kind.FORWARD, chunk), 0.0), whole_s)
            half_s = (whole_s - forward_s) / 2
            seconds[parts[0]], seconds[parts[1]] = forward_s + half_s, half_s


def _table(slowest: Mapping[tuple[int, Kind, int], float], kind: Kind, layout: Layout) -> PerChunk | None:
    """Return the seconds by stage and chunk; None if any has not been measured."""
    rows = [[slowest.get((stage, kind, chunk)) for chunk in range(layout.chunks)] for stage in range(layout.stages)]
    known = [[seconds for seconds in row if seconds is not None] for row in rows]
    return tuple(map(tuple, known)) if known == rows else None


def _by_link(estimates: Estimates, in_use: InUse) -> dict[DirectedLink, Sequence[LinkEstimate]]:
    """Return the estimates of each link, from all pipelines."""
    found: dict[DirectedLink, list[LinkEstimate]] = {}
    for identity in in_use.values():
        if identity in estimates.links:
            found.setdefault((identity.source, identity.target), []).append(estimates.links[identity])
    return dict(sorted(found.items()))


def _slowest_link(found: Iterable[LinkEstimate]) -> LinkCost:
    costs = [(estimate.latency_s, estimate.occupancy_s(estimate.nbytes)) for estimate in found]
    return LinkCost(latency_s=max(latency_s for latency_s, _ in costs), occupancy_s=max(busy_s for _, busy_s in costs))


class Context:
    """Shared state of one decision. A decider sees what those before it have changed."""

    routed = False
    """Whether micro-batches are routed between replicas, so that no pipeline has an order of its own."""
    forecast: Forecast | None = None
    """Forecast under the new plan; None if the plan does not change."""

    def __init__(
        self,
        latest: Sequence[StageMeasurement],
        estimates: Estimates,
        findings: Sequence[Finding],
        carried: InUse,
        number: int,
        estimate_costs: Callable[[Context], Costs | None],
    ) -> None:
        """Set up. `latest`: measurements of the last iteration. `findings`: new since the last decision. `carried`:
        the path that each link's messages took. `number`: number of the current plan."""
        self.latest, self.estimates, self.findings, self.carried = latest, estimates, findings, carried
        self.in_use = carried
        """The expected path of each link."""
        self.number = number
        self.reasons: list[Reason] = []
        """Why the plan changes."""
        self.before: Costs | None = None
        """The costs without these changes."""
        self._estimate_costs = estimate_costs

    @property
    def micro_batches(self) -> int:
        """Micro-batches of the latest iteration."""
        return self.latest[0].micro_batches

    @cached_property
    def costs(self) -> Costs | None:
        """The expected costs; None until every action has been measured."""
        return self._estimate_costs(self)

    def expect(self, in_use: InUse) -> None:
        """Set the expected path of each link. The costs follow."""
        self.in_use = in_use
        self.__dict__.pop("costs", None)

    def change(self, reasons: Sequence[Reason]) -> None:
        """Declare that this decision changes the plan, for `reasons`."""
        self.before = self.costs if self.before is None else self.before
        self.reasons += reasons


class DecisionTelemetry(Protocol):
    """The part of RunTelemetry that deciders use."""

    def log(self, event: Event) -> None:
        """Record an event of the current iteration."""

    def requests(self) -> tuple[Iterations, ...]:
        """Return the iterations that every rank is asked to trace, new since the last call."""


class Decider(Protocol):
    """Decides on one section of each decision."""

    def observe(self, measurements: Sequence[StageMeasurement], sample: IterationSample) -> None:
        """Take in one iteration. `measurements`: of all ranks. `sample`: the same, with both ends of each message
        joined."""

    def decide(self, context: Context) -> Section | None:
        """Return this decider's section; None if nothing changes."""
