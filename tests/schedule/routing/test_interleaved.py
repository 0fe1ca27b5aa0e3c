# SPDX-License-Identifier: Apache-2.0
"""Orders of cells with several chunks around dead cells: complete, within caps, and free of deadlock in any replay."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptra_megatron.common.layout import Cell
from adaptra_megatron.control.deciders.route_decider import CellOrder, cell_orders
from adaptra_megatron.schedule.costs import Costs, LinkCost
from adaptra_megatron.schedule.ir import Kind, interleaved
from adaptra_megatron.schedule.routing.interleaved import dispatch_interleaved, routing_around
from adaptra_megatron.schedule.routing.routed_costs import RoutingError
from adaptra_megatron.schedule.routing.routed_plans import RoutedMessage, RoutedSchedule
from adaptra_megatron.schedule.routing.routed_simulator import RoutedSimulation


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Costs, int, frozenset[Cell]]:
    """Costs of a pipeline, the number of replicas, and dead cells that leave one of each stage."""
    replicas, stages, chunks = draw(st.integers(1, 3)), draw(st.integers(2, 4)), draw(st.integers(1, 3))
    dead = set()
    for stage in range(stages):
        survivor = draw(st.integers(0, replicas - 1))
        dead |= {Cell(each, stage) for each in range(replicas) if each != survivor and draw(st.booleans())}
    seconds = st.integers(0, 3).map(float)
    tables = [tuple(tuple(1.0 + draw(seconds) for _ in range(chunks)) for _ in range(stages)) for _ in range(3)]
    caps = tuple(draw(st.one_of(st.none(), st.integers(chunks, 4 * chunks).map(float))) for _ in range(stages))
    costs = Costs(
        stages=stages,
        chunks=chunks,
        micro_batches=draw(st.integers(1, 5)),
        forward_s=tables[0],
        backward_input_s=tables[1],
        backward_weight_s=tables[2],
        links={ends: LinkCost(draw(seconds)) for ends in interleaved(stages, chunks).links},
        max_in_flight=caps,
    )
    return costs, replicas, frozenset(dead)


def dispatched(job: tuple[Costs, int, frozenset[Cell]]) -> RoutedSimulation:
    costs, replicas, dead = job
    return dispatch_interleaved(costs, routing_around(dead, replicas, costs.stages, costs.micro_batches))


@settings(max_examples=25, deadline=None)
@given(jobs())
def test_every_chunk_of_every_micro_batch_runs_once_at_a_live_cell_within_its_cap(
    job: tuple[Costs, int, frozenset[Cell]],
) -> None:
    costs, replicas, dead = job
    simulation = dispatched(job)
    schedule = simulation.schedule
    for number, order in enumerate(schedule.orders):
        cell = Cell(*divmod(number, costs.stages))
        assert not order or cell not in dead
        cap, peak = costs.max_in_flight[cell.stage], simulation.peak_in_flight[number]
        assert cap is None or peak <= cap
        starts_s, ends_s = simulation.start_s[number], simulation.end_s[number]
        assert all(end_s <= start_s for end_s, start_s in zip(ends_s, starts_s[1:], strict=False)), "one at a time"
    for stage in range(costs.stages):
        ran = Counter(action for replica in range(replicas) for action in schedule.order(Cell(replica, stage)))
        assert set(ran.values()) == {1}
        assert len(ran) == 2 * replicas * costs.micro_batches * costs.chunks
        assert {action.kind for action in ran} == {Kind.FORWARD, Kind.BACKWARD}


def replayed(schedule: RoutedSchedule) -> int:
    """Number of actions that run where each cell waits for what its next action needs; all, if none waits for ever."""
    here, at = set[RoutedMessage](), [0] * len(schedule.orders)
    forwards = set[tuple[int, int, int, int]]()
    moved = True
    while moved:
        moved = False
        for number, order in enumerate(schedule.orders):
            stage = number % schedule.stages
            while at[number] < len(order):
                action = order[at[number]]
                needed = schedule.needed(stage, action)
                place = stage, action.replica, action.micro_batch, action.chunk
                if needed is not None and needed not in here:
                    break
                if action.kind is Kind.FORWARD:
                    forwards.add(place)
                else:
                    assert place in forwards, "a backward before its forward"
                if (sent := schedule.produced(stage, action)) is not None:
                    assert sent not in here
                    here.add(sent)
                at[number] += 1
                moved = True
    return sum(at)


@settings(max_examples=25, deadline=None)
@given(jobs())
def test_no_cell_waits_for_ever_and_receives_are_posted_as_messages_are_made(
    job: tuple[Costs, int, frozenset[Cell]],
) -> None:
    costs, replicas, _ = job
    simulation = dispatched(job)
    schedule = simulation.schedule
    total = 2 * replicas * costs.micro_batches * costs.stages * costs.chunks
    assert replayed(schedule) == total
    sent = Counter(schedule.messages())
    awaited = Counter(
        message
        for number, order in enumerate(schedule.orders)
        for action in order
        if (message := schedule.needed(number % costs.stages, action)) is not None
    )
    assert sent == awaited
    assert set(sent.values()) <= {1}
    for text in cell_orders(simulation, costs).values():
        order = CellOrder.unpacked(text)
        needs = [place for place, action in enumerate(order.actions) if action.source is not None]
        assert sorted(order.receives) == needs
        for place in needs:
            assert order.receives.index(place) < order.actions[place].receives_before, "posted before it is awaited"


def test_what_cannot_be_is_refused() -> None:
    costs = Costs(
        stages=2,
        chunks=2,
        micro_batches=2,
        forward_s=((1.0, 1.0),) * 2,
        backward_input_s=((1.0, 1.0),) * 2,
        backward_weight_s=((1.0, 1.0),) * 2,
        max_in_flight=(4.0, 1.0),
    )
    with pytest.raises(RoutingError, match="stage 1 may hold 1 activations, fewer than the 2 chunks"):
        dispatch_interleaved(costs, routing_around((), 1, 2, 2))
    with pytest.raises(RoutingError, match="all 2 cells of stage 0"):
        routing_around({Cell(0, 0), Cell(1, 0)}, 2, 2, 2)
