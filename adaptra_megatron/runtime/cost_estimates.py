# SPDX-License-Identifier: Apache-2.0
"""From the detector's estimates to the costs a plan is made for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from adaptra_megatron.detector.findings import Estimates, LinkEstimate, State
from adaptra_megatron.detector.samples import IterationSample, LinkId, StageId
from adaptra_megatron.runtime.plans import Layout
from adaptra_megatron.schedule.actions import Kind
from adaptra_megatron.schedule.costs import Costs, LinkCost, PerChunk
from adaptra_megatron.telemetry.scalars import LinkFigures
from adaptra_megatron.transport.paths import Path

DirectedLink = tuple[int, int]
"""Source and target stage."""
InUse = dict[tuple[int, int, int], LinkId]
"""By pipeline, source and target: the path that messages take."""


def paths_in_use(before: InUse, sample: IterationSample) -> InUse:
    """The path that carried most of each link's messages in `sample`; where there were none, as before."""
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
    """Costs of the slowest pipeline, stage by stage and link by link; None until every action has been measured.

    A stage whose backwards ran whole lately (in stock's order, say) keeps the costs that they had when split, and the
    other way round. Where they cannot be split at all, the whole backward counts as input gradient.
    """
    shape = stages, chunks = layout.stages, layout.chunks
    forward_s = _slowest(estimates, Kind.FORWARD, *shape)
    backward_input_s = _slowest(estimates, Kind.BACKWARD_INPUT if can_split else Kind.BACKWARD, *shape)
    backward_weight_s = _slowest(estimates, Kind.BACKWARD_WEIGHT, *shape) if can_split else ((0.0,) * chunks,) * stages
    if forward_s is None or backward_input_s is None or backward_weight_s is None:
        return None
    by_device = {(used.source, used.target) for used in in_use.values() if used.path == Path.DEVICE.value}
    return Costs(
        stages=stages,
        chunks=chunks,
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
        backward_s=_slowest(estimates, Kind.BACKWARD, *shape) if can_split else None,
        shared_queue=layout.shared_queue,
    )


def link_figures(estimates: Estimates, in_use: InUse) -> dict[DirectedLink, LinkFigures]:
    """For whoever watches: each link as it is in the pipeline where it is slowest."""
    figures = {}
    for link, found in _by_link(estimates, in_use).items():
        slowest = max(found, key=lambda estimate: estimate.transfer_s)
        states = {estimate.state for estimate in found}
        state = next(state for state in (State.DEAD, State.SLOW, State.HEALTHY) if state in states)
        figures[link] = LinkFigures(
            latency_s=slowest.latency_s, bandwidth_bytes_s=slowest.bandwidth_bytes_per_s, state=state.value
        )
    return figures


def _slowest(estimates: Estimates, kind: Kind, stages: int, chunks: int) -> PerChunk | None:
    """Seconds per stage and chunk, the slowest pipeline's; None where one has not been measured."""
    pipelines: dict[int, list[StageId]] = {}
    for identity in estimates.stages:
        pipelines.setdefault(identity.stage, []).append(identity)
    rows = []
    for stage in range(stages):
        row = []
        for chunk in range(chunks):
            key = kind.value, chunk
            known = (estimates.stages[identity].durations_s for identity in pipelines.get(stage, ()))
            seconds = [durations_s[key] for durations_s in known if key in durations_s]
            if not seconds:
                return None
            row.append(max(seconds))
        rows.append(tuple(row))
    return tuple(rows)


def _by_link(estimates: Estimates, in_use: InUse) -> dict[DirectedLink, Sequence[LinkEstimate]]:
    """Of all pipelines."""
    found: dict[DirectedLink, list[LinkEstimate]] = {}
    for identity in in_use.values():
        if identity in estimates.links:
            found.setdefault((identity.source, identity.target), []).append(estimates.links[identity])
    return dict(sorted(found.items()))


def _slowest_link(found: Iterable[LinkEstimate]) -> LinkCost:
    costs = [(estimate.latency_s, estimate.occupancy_s(estimate.nbytes)) for estimate in found]
    return LinkCost(latency_s=max(latency_s for latency_s, _ in costs), occupancy_s=max(busy_s for _, busy_s in costs))
