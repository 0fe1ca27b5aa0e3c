# SPDX-License-Identifier: Apache-2.0
"""Costs as JSON, both ways, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptra_megatron.schedule.costs import (
    LEAST_RELEASED,
    CostError,
    Costs,
    LinkCost,
    costs_from_json,
    costs_to_json,
    uniform_costs,
)
from adaptra_megatron.schedule.jobs.job_costs import Override

SECONDS = st.floats(0.0, 10.0)
GOOD: dict[str, Any] = {
    "stages": 3,
    "micro_batches": 4,
    "forward_s": 0.02,
    "backward_input_s": [0.02, 0.03, 0.04],
    "backward_weight_s": [[0.01], [0.01], [0.02]],
    "links": [{"from": 2, "to": 0, "latency_s": 0.06}],
    "max_in_flight": 5,
    "released_at_backward_input": 0.5,
}


@st.composite
def all_costs(draw: st.DrawFn) -> Costs:
    stages, chunks = draw(st.integers(2, 5)), draw(st.integers(1, 3))
    tables = [tuple(tuple(draw(SECONDS) for _ in range(chunks)) for _ in range(stages)) for _ in range(3)]
    neighbours = [(stage, (stage + step) % stages) for stage in range(stages) for step in (1, -1)]
    pairs = st.tuples(*[st.tuples(*[st.floats(-1.0, 0.5)] * chunks)] * chunks)
    chosen = draw(st.lists(st.sampled_from(neighbours), unique=True))
    return Costs(
        stages=stages,
        chunks=chunks,
        micro_batches=draw(st.integers(1, 9)),
        forward_s=tables[0],
        backward_input_s=tables[1],
        backward_weight_s=tables[2],
        links={link: LinkCost(draw(SECONDS), draw(SECONDS), draw(st.booleans())) for link in chosen},
        max_in_flight=tuple(draw(st.none() | st.floats(1.0, 99.0)) for _ in range(stages)),
        released_at_backward_input=tuple(draw(st.floats(LEAST_RELEASED, 1.0)) for _ in range(stages)),
        backward_s=draw(st.none() | st.just(tables[0])),
        shared_queue=draw(st.booleans()),
        combined_saving=(combined := draw(st.just(()) | st.tuples(*[pairs] * stages))),
        combined_sends_at=draw(st.floats(0.1, 1.0)) if combined else 1.0,
    )


@given(all_costs())
def test_json_gives_back_equal_costs(costs: Costs) -> None:
    assert costs_from_json(json.loads(json.dumps(costs_to_json(costs)))) == costs


def test_numbers_and_rows_are_spread() -> None:
    costs = costs_from_json(GOOD)
    assert costs.forward_s == ((0.02,),) * 3
    assert costs.backward_input_s == ((0.02,), (0.03,), (0.04,))
    assert costs.max_in_flight == (5,) * 3
    assert costs.link(2, 0) == LinkCost(0.06, 0.0)
    assert costs.link(0, 2) == LinkCost()
    assert not costs.can_combine
    two = costs_from_json(GOOD | {"combined_saving": [0.1, 0.2, [[0.3]]], "combined_sends_at": 0.5})
    assert two.can_combine
    assert (two.combined_saving, two.combined_sends_at) == ((((0.1,),), ((0.2,),), ((0.3,),)), 0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": 0}, "stages must be a whole number"),
        ({"stages": True}, "stages must be a whole number"),
        ({"micro_batches": 1.5}, "micro_batches must be a whole number"),
        ({"forward_s": -0.1}, "forward_s of stage 0, chunk 0 must be seconds >= 0"),
        ({"forward_s": float("nan")}, "forward_s"),
        ({"forward_s": "fast"}, "forward_s must be a number or a list"),
        ({"backward_input_s": [0.1, 0.1]}, "backward_input_s has 2 rows for 3 stages"),
        ({"backward_weight_s": [[0.1, 0.1], [0.1], [0.1]]}, "stage 0 has 2 values for 1 chunks"),
        ({"links": [{"from": 0, "to": 5}]}, "link 0->5 does not join"),
        ({"links": [{"from": 0}]}, "a link needs 'from' and 'to'"),
        ({"links": [{"from": 0, "to": 1}, {"from": 0, "to": 1}]}, "link 0->1 is listed twice"),
        ({"links": [{"from": 0, "to": 1, "speed": 1}]}, "unknown field 'speed' in link 0->1"),
        ({"links": [{"from": 0, "to": 1, "latency_s": -1}]}, "latency_s of link 0->1"),
        ({"max_in_flight": 0.5}, "max_in_flight of stage 0 is 0.5"),
        ({"max_in_flight": [1, 2]}, "max_in_flight has 2 entries for 3 stages"),
        ({"released_at_backward_input": 1.5}, "between -16 and 1"),
        ({"released_at_backward_input": [0, 0, -17]}, "of stage 2 must be between -16 and 1"),
        ({"shared_queue": 1}, "shared_queue must be true or false"),
        ({"serial_queue": 1}, "serial_queue must be true or false"),
        ({"serial_queue": True}, "serial_queue needs shared_queue"),
        ({"links": [{"from": 0, "to": 1, "rendezvous": "yes"}]}, "rendezvous of link 0->1 must be true or false"),
        ({"backward_s": [[0.1]]}, "backward_s has 1 rows for 3 stages"),
        ({"combined_saving": 0.6}, "combined_saving of stage 0 must be between -1 and 0.5, got 0.6"),
        ({"combined_saving": [0.1, 0.1]}, "combined_saving must have 3 stages with 1 rows of 1 values"),
        ({"combined_saving": [0.1, [[0.1], [0.1]], 0.1]}, "combined_saving must have 3 stages with 1 rows"),
        ({"combined_saving": "much"}, "combined_saving must be a number, one per stage, or rows per stage"),
        ({"combined_saving": [0.1, [0.1], 0.1]}, "combined_saving"),
        ({"combined_sends_at": 0}, "combined_sends_at must be above 0 and at most 1, got 0"),
        ({"wat": 1}, "unknown field 'wat'"),
    ],
)
def test_what_cannot_be_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CostError) as refused:
        costs_from_json(GOOD | change)
    assert message in str(refused.value)


@pytest.mark.parametrize("name", ["stages", "micro_batches", "forward_s", "backward_input_s", "backward_weight_s"])
def test_a_missing_field_is_named(name: str) -> None:
    with pytest.raises(CostError, match=f"field '{name}' is missing"):
        costs_from_json({key: value for key, value in GOOD.items() if key != name})


def test_links_join_neighbours_only() -> None:
    with pytest.raises(CostError, match="not neighbours in a pipeline of 5"):
        uniform_costs(5, 2, forward_s=1, backward_input_s=1, backward_weight_s=1, links={(0, 2): LinkCost(1.0)})


def test_backward_is_both_gradients_where_it_was_not_measured() -> None:
    assert costs_from_json(GOOD | {"backward_s": 0.02}).whole_backward_s == ((0.02,),) * 3
    assert costs_from_json(GOOD).whole_backward_s == ((0.03,), (0.04,), (0.06,))


def test_seconds_per_micro_batch() -> None:
    """A list in place of a chunk's number; the table gets the mean, and other numbers are for all micro-batches."""
    document = {
        "stages": 2,
        "micro_batches": 3,
        "forward_s": [[[1.0, 2.0, 3.0]], 5.0],
        "backward_input_s": 1.0,
        "backward_weight_s": [[[0.0, 0.0, 0.0]], [[2.0, 4.0, 0.0]]],
    }
    costs = costs_from_json(document)
    assert costs.forward_s == ((2.0,), (5.0,))
    assert costs.micro_batch_s("forward_s", 0, 0) == (1.0, 2.0, 3.0)
    assert costs.micro_batch_s("forward_s", 1, 0) == (5.0, 5.0, 5.0)
    assert costs.micro_batch_s("backward_weight_s", 0, 0) == (0.0, 0.0, 0.0)
    assert costs.micro_batch_s("backward_s", 1, 0) == (3.0, 5.0, 1.0)
    assert costs_from_json(json.loads(json.dumps(costs_to_json(costs)))) == costs
    for wrong, message in (
        ([[[1.0, 2.0]], 5.0], "has 2 values for 3 micro-batches"),
        ([[[1.0, -2.0, 1.0]], 5.0], "forward_s of stage 0, micro-batch 1 must be 0 or more, got -2.0"),
    ):
        with pytest.raises(CostError, match=message):
            costs_from_json({**document, "forward_s": wrong})


def test_a_slow_stage_is_slow_for_each_micro_batch() -> None:
    costs = uniform_costs(2, 2, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
    costs = costs.with_micro_batches({"forward_s": (((1.0, 3.0),), ((2.0, 2.0),))})
    slow = Override(slow_stages={0: 2.0}).applied_to(costs)
    assert slow.micro_batch_s("forward_s", 0, 0) == (2.0, 6.0)
    assert slow.micro_batch_s("forward_s", 1, 0) == (2.0, 2.0)
