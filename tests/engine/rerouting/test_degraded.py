# SPDX-License-Identifier: Apache-2.0
"""What cells run while others are dead: every micro-batch passes every stage once, and messages meet."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.emulated_time import EmulatedTime
from support.made_up.job import SECRET, layout
from torch.distributed import HashStore

from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.common.layout import Cell
from adaptra_megatron.common.sealed_store import SealedStore
from adaptra_megatron.control.deciders.route_decider import CellOrder
from adaptra_megatron.elastic import protocol_store
from adaptra_megatron.elastic.generation import Generation, GenerationId
from adaptra_megatron.engine.rerouting import DegradedRoutes, evaluation_order
from adaptra_megatron.schedule.costs import uniform_costs


@st.composite
def degraded_jobs(draw: st.DrawFn) -> tuple[int, int, int, frozenset[Cell]]:
    """Replicas, stages, micro-batches, and dead cells that leave one of each stage."""
    replicas, stages, micro_batches = draw(st.integers(2, 4)), draw(st.integers(2, 4)), draw(st.integers(1, 6))
    dead = set()
    for stage in range(stages):
        survivor = draw(st.integers(0, replicas - 1))
        dead |= {Cell(each, stage) for each in range(replicas) if each != survivor and draw(st.booleans())}
    return replicas, stages, micro_batches, frozenset(dead)


def pipelines(replicas: int, stages: int) -> list[tuple[int, ...]]:
    return [tuple(range(replica * stages, (replica + 1) * stages)) for replica in range(replicas)]


def check(
    orders: dict[Cell, CellOrder], replicas: int, stages: int, micro_batches: int, kinds: str, chunks: int = 1
) -> None:
    """Each action of each micro-batch once a stage, and what one cell sends another expects."""
    for stage in range(stages):
        ran = Counter(
            (action.kind, action.replica, action.micro_batch, action.chunk)
            for cell, order in orders.items()
            if cell.stage == stage
            for action in order.actions
        )
        for kind in kinds:
            expected = set(itertools.product(kind, range(replicas), range(micro_batches), range(chunks)))
            assert {each for each in ran if each[0] == kind} == expected
        assert set(ran.values()) == {1}
    sent, awaited = Counter[Any](), Counter[Any]()
    for cell, order in orders.items():
        for action in order.actions:
            virtual, there = action.chunk * stages + cell.stage, {"F": 1}.get(action.kind, -1)
            message = action.kind == "F", action.replica, action.micro_batch
            if action.target is not None:
                sent[cell, Cell(action.target, (virtual + there) % stages), message, virtual + there] += 1
            if action.source is not None:
                awaited[Cell(action.source, (virtual - there) % stages), cell, message, virtual] += 1
    assert sent == awaited


@given(degraded_jobs(), st.integers(1, 3))
def test_evaluation_passes_every_stage_once(job: tuple[int, int, int, frozenset[Cell]], chunks: int) -> None:
    replicas, stages, micro_batches, dead = job
    orders = {}
    for rank in range(replicas * stages):
        seen = layout(pipelines(replicas, stages), rank)
        if seen.cell not in dead:
            orders[seen.cell] = evaluation_order(seen, dead, micro_batches, chunks)
    check(orders, replicas, stages, micro_batches, "F", chunks)
    here, at, before = set[Any](), dict.fromkeys(orders, 0), -1
    while sum(at.values()) > before:
        before = sum(at.values())
        for cell, order in orders.items():
            for action in order.actions[at[cell] :]:
                made = action.replica, action.micro_batch, action.chunk * stages + cell.stage
                if action.source is not None and (*made[:2], made[2] - 1) not in here:
                    break
                here.add(made)
                at[cell] += 1
    assert at == {cell: len(order.actions) for cell, order in orders.items()}, "cells wait for each other for ever"
    for order in orders.values():
        awaiting = [place for place, each in enumerate(order.actions) if each.source is not None]
        assert sorted(order.receives) == awaiting
        for place in awaiting:
            assert order.receives.index(place) < order.actions[place].receives_before, "posted when it is needed"


def test_training_is_planned_by_the_lowest_live_rank_and_read_by_the_others() -> None:
    control, dead = ControlStore(HashStore(), SECRET, "job"), frozenset({Cell(0, 0), Cell(1, 1)})
    live = frozenset({1, 2, 4, 5})
    generation = Generation(GenerationId(1), live, dead)
    control = control.in_generation(generation.id)
    orders = {}
    for rank in sorted(live):
        seen = layout(pipelines(3, 2), rank)
        costs = uniform_costs(
            2, 4, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0, max_in_flight=8 if rank == 1 else 4
        )
        routes = DegradedRoutes(seen, generation, control, 5.0, lambda: None)
        orders[seen.cell] = routes.order(costs, split=True, forward_only=False)
        moved = Counter[tuple[int, int]]()
        for stage, source, _, count in () if routes.planned is None else routes.planned.moved:
            moved[stage, source] += count
        assert moved == ({(0, 0): 4, (1, 1): 4} if rank == 1 else {}), "the log says what dead cells' work goes where"
    check(orders, 3, 2, 4, "FIW")
    assert {order.cap for order in orders.values()} == {8}, "each has planned by itself"


def test_routes_of_a_large_job_are_stored_cell_by_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """All cells' orders together have 1.3 MB: more than one value of the store may have."""
    sizes, original = list[int](), SealedStore.set

    def measured(store: SealedStore, key: str, value: bytes) -> None:
        sizes.append(len(value))
        original(store, key, value)

    monkeypatch.setattr(SealedStore, "set", measured)
    generation = Generation(GenerationId(1), frozenset(range(1, 128)), frozenset({Cell(0, 0)}))
    control = ControlStore(HashStore(), SECRET, "job").in_generation(generation.id)
    costs = uniform_costs(16, 128, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
    for rank in (1, 127):
        routes = DegradedRoutes(layout(pipelines(8, 16), rank), generation, control, 60.0, lambda: None)
        assert len(routes.order(costs, split=True, forward_only=False).actions) >= 2 * 128
    assert sum(sizes) > 1 << 20
    assert max(sizes) < 1 << 16


def test_a_wait_for_routes_ends_with_the_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    control = ControlStore(HashStore(), SECRET, "job")
    generation = Generation(GenerationId(1), frozenset({1, 2, 3}), frozenset({Cell(0, 0)}))
    costs = uniform_costs(2, 4, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)

    def ended() -> None:
        raise InterruptedError("rank 1 has died, too")

    routes = DegradedRoutes(layout(pipelines(2, 2), 2), generation, control, 5.0, ended)
    with pytest.raises(InterruptedError, match="rank 1"):
        routes.order(costs, split=True, forward_only=False)
    # A short limit would also be that of each request to the store.
    monkeypatch.setattr(protocol_store, "time", EmulatedTime())
    silent = DegradedRoutes(layout(pipelines(2, 2), 2), generation, control, 20.0, lambda: None)
    with pytest.raises(RuntimeError, match="has not planned for the live cells within"):
        silent.order(costs, split=True, forward_only=False)
