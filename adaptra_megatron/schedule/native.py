# SPDX-License-Identifier: Apache-2.0
"""Convert costs and orders to the plain numbers of the native core, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence

from adaptra_megatron.schedule import _native
from adaptra_megatron.schedule.costs import Costs, PerChunk
from adaptra_megatron.schedule.ir import Action, Kind, Order, Schedule

# An action of a known stage is one number: (micro_batch * chunks + chunk) * 8 + index of its kind here, and 4 more for
# a forward that is combined with the backward behind it.
_KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
_COMBINED = 4
CODES_PER_CHUNK = 8
"""Numbers of actions of one chunk's micro-batch."""
_INDEX_OF_KIND = {kind: index for index, kind in enumerate(_KINDS)}


def problem_from_costs(costs: Costs) -> _native.Problem:
    """Return the native form of `costs`."""
    return _native.Problem(
        stages=costs.stages,
        chunks=costs.chunks,
        micro_batches=costs.micro_batches,
        forward_s=_seconds("forward_s", costs),
        backward_input_s=_seconds("backward_input_s", costs),
        backward_weight_s=_seconds("backward_weight_s", costs),
        backward_s=_seconds("backward_s", costs),
        stage_of=costs.placement.stage_of,
        links=[(*ends, *costs.link(*ends)) for ends in costs.placement.links],
        cap=[math.inf if cap is None else cap for cap in costs.max_in_flight],
        released=costs.released_at_backward_input,
        shared_queue=costs.shared_queue,
        serial_queue=costs.serial_queue,
        combined_saving=[saving for rows in costs.combined_saving for row in rows for saving in row],
        combined_sends_at=costs.combined_sends_at,
    )


def _seconds(name: str, costs: Costs) -> list[float]:
    """Return seconds per stage and chunk or, if micro-batches differ, per micro-batch."""
    if not costs.micro_batch_factors:
        table: PerChunk = costs.whole_backward_s if name == "backward_s" else getattr(costs, name)
        return [seconds for row in table for seconds in row]
    places = ((stage, chunk) for stage in range(costs.stages) for chunk in range(costs.chunks))
    return [seconds for place in places for seconds in costs.micro_batch_s(name, *place)]


def encode_action(action: Action, chunks: int) -> int:
    """Return the integer code of an action."""
    return (
        (action.micro_batch * chunks + action.chunk) * CODES_PER_CHUNK
        + _COMBINED * action.combined
        + _INDEX_OF_KIND[action.kind]
    )


def encode_order(order: Order, chunks: int) -> list[int]:
    """Return the integer codes of one stage's order."""
    return [
        (micro_batch * chunks + chunk) * CODES_PER_CHUNK + _COMBINED * combined + _INDEX_OF_KIND[kind]
        for _, kind, chunk, micro_batch, combined in order
    ]


def encode_schedule(schedule: Schedule) -> list[list[int]]:
    """Return the integer codes of all stages' orders."""
    return [encode_order(order, schedule.chunks) for order in schedule.orders]


def decode_orders(codes: Sequence[Sequence[int]], costs: Costs) -> Schedule:
    """Return the schedule that the codes of all stages represent."""
    problem = problem_from_costs(costs)
    return Schedule(
        stages=costs.stages,
        chunks=costs.chunks,
        micro_batches=costs.micro_batches,
        custom_placement=costs.custom_placement,
        orders=tuple(
            _native.actions(problem, stage, stage_codes, Action, _KINDS) for stage, stage_codes in enumerate(codes)
        ),
    )
