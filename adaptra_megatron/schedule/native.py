# SPDX-License-Identifier: Apache-2.0
"""Bridge to the native core: costs and orders as the plain numbers it takes, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence

from adaptra_megatron.schedule import _native
from adaptra_megatron.schedule.actions import Action, Kind, Order, Schedule
from adaptra_megatron.schedule.costs import Costs

# An action of a known stage is one number: (micro_batch * chunks + chunk) * 4 + index of its kind here.
_KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
_INDEX_OF_KIND = {kind: index for index, kind in enumerate(_KINDS)}


def problem_from_costs(costs: Costs) -> _native.Problem:
    """The native twin of `costs`."""
    stages = costs.stages
    return _native.Problem(
        stages=stages,
        chunks=costs.chunks,
        micro_batches=costs.micro_batches,
        forward_s=[seconds for row in costs.forward_s for seconds in row],
        backward_input_s=[seconds for row in costs.backward_input_s for seconds in row],
        backward_weight_s=[seconds for row in costs.backward_weight_s for seconds in row],
        backward_s=[seconds for row in costs.whole_backward_s for seconds in row],
        to_next=[costs.link(stage, (stage + 1) % stages) for stage in range(stages)],
        to_previous=[costs.link(stage, (stage - 1) % stages) for stage in range(stages)],
        cap=[math.inf if cap is None else cap for cap in costs.max_in_flight],
        released=costs.released_at_backward_input,
        shared_queue=costs.shared_queue,
    )


def encode_action(action: Action, chunks: int) -> int:
    """The code of one action."""
    return (action.micro_batch * chunks + action.chunk) * 4 + _INDEX_OF_KIND[action.kind]


def encode_order(order: Order, chunks: int) -> list[int]:
    """The codes of one stage's actions."""
    return [(micro_batch * chunks + chunk) * 4 + _INDEX_OF_KIND[kind] for _, kind, chunk, micro_batch in order]


def encode_schedule(schedule: Schedule) -> list[list[int]]:
    """The codes of every stage's actions."""
    return [encode_order(order, schedule.chunks) for order in schedule.orders]


def decode_orders(codes: Sequence[Sequence[int]], costs: Costs) -> Schedule:
    """The schedule that per-stage codes stand for."""
    problem = problem_from_costs(costs)
    return Schedule(
        stages=costs.stages,
        chunks=costs.chunks,
        micro_batches=costs.micro_batches,
        orders=tuple(
            _native.actions(problem, stage, stage_codes, Action, _KINDS) for stage, stage_codes in enumerate(codes)
        ),
    )
