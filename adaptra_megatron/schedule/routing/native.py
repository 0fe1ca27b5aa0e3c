# SPDX-License-Identifier: Apache-2.0
"""Bridge to the native core: costs and orders of a routed job as the plain numbers it takes, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence

from adaptra_megatron.schedule import _native
from adaptra_megatron.schedule.actions import Kind
from adaptra_megatron.schedule.costs import LinkCost
from adaptra_megatron.schedule.routing.costs import RoutedCosts, seconds_of_cells
from adaptra_megatron.schedule.routing.plans import RoutedAction, RoutedSchedule, Routing

# An action of a known cell is one number: number of its micro-batch in the job * 4 + index of its kind here.
_KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
_INDEX_OF_KIND = {kind: index for index, kind in enumerate(_KINDS)}
_TABLES = ("forward_s", "backward_s", "backward_input_s", "backward_weight_s")
"""In the order of the kinds."""


def problem_from_routed(costs: RoutedCosts) -> _native.RoutedProblem:
    """The native twin of `costs`."""
    replicas, cells = costs.replicas, costs.cells
    tables = [seconds_of_cells(replicas, name) for name in _TABLES]
    own = [
        _alone(replicas[cell.replica].link(cell.stage, cell.stage + step))
        if 0 <= cell.stage + step < costs.stages
        else (0.0, 0.0)
        for cell in cells
        for step in (1, -1)
    ]
    number = {cell: index for index, cell in enumerate(cells)}
    caps = (replicas[cell.replica].max_in_flight[cell.stage] for cell in cells)
    return _native.RoutedProblem(
        replicas=len(replicas),
        stages=costs.stages,
        micro_batches=costs.micro_batches,
        per_cell=[table[cell.replica][cell.stage] for cell in cells for table in tables],
        factor=_factors(costs),
        whole_given=replicas[0].backward_s is not None,
        live=[cell not in costs.dead for cell in cells],
        cap=[math.inf if cap is None else cap for cap in caps],
        released=[replicas[cell.replica].released_at_backward_input[cell.stage] for cell in cells],
        own_latency=[latency_s for latency_s, _ in own],
        own_occupancy=[occupancy_s for _, occupancy_s in own],
        given=[(number[source], number[target], *_alone(link)) for (source, target), link in costs.links.items()],
        sync=costs.sync_s,
        staggered=costs.staggered,
        pinned=[stage in costs.pinned for stage in range(costs.stages)],
    )


def encode_hosts(routing: Routing) -> list[int]:
    """The replica of each stage and micro-batch, stage by stage."""
    return [host for row in routing.hosts for host in row]


def decode_hosts(hosts: Sequence[int], costs: RoutedCosts) -> Routing:
    """The routing that native hosts stand for."""
    count = costs.job_micro_batches
    rows = (tuple(hosts[stage * count : (stage + 1) * count]) for stage in range(costs.stages))
    return Routing(len(costs.replicas), costs.micro_batches, tuple(rows))


def encode_orders(schedule: RoutedSchedule) -> list[list[int]]:
    """The codes of every cell's actions."""
    count = schedule.routing.micro_batches
    return [
        [(replica * count + micro_batch) * 4 + _INDEX_OF_KIND[kind] for kind, replica, micro_batch, _ in order]
        for order in schedule.orders
    ]


def decode_orders(codes: Sequence[Sequence[int]], micro_batches: int) -> tuple[tuple[RoutedAction, ...], ...]:
    """The orders that per-cell codes stand for."""
    made = RoutedAction._make
    return tuple(
        tuple(made((_KINDS[code & 3], *divmod(code >> 2, micro_batches), 0)) for code in order) for order in codes
    )


def _alone(link: LinkCost) -> tuple[float, float]:
    """Latency and occupancy: a rendezvous link carries one message at a time."""
    return (0.0, link.transfer_s) if link.rendezvous else (link.latency_s, link.occupancy_s)


def _factors(costs: RoutedCosts) -> list[float]:
    """Factor of every kind, stage and micro-batch of the job; empty where no micro-batch differs from another."""
    if not any(each.micro_batch_factors for each in costs.replicas):
        return []
    return [
        factor
        for name in _TABLES
        for stage in range(costs.stages)
        for each in costs.replicas
        for factor in each.factors_of(name, stage, 0)
    ]
