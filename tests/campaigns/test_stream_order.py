# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptra_megatron.schedule.classic import interleaved, one_f_one_b, zb_h1, zb_h2
from adaptra_megatron.schedule.costs import Costs, LinkCost, uniform_costs
from adaptra_megatron.schedule.simulator import SimulationError, simulate
from campaigns.published.stream_order import simulate_in_stream_order

seconds = st.floats(0.01, 4.0)


def costs(stages: int, micro_batches: int, delay_s: float, link: int = 0, *, chunks: int = 1) -> Costs:
    delay = LinkCost(delay_s)
    return uniform_costs(
        stages,
        micro_batches,
        chunks=chunks,
        forward_s=1.0,
        backward_input_s=1.0,
        backward_weight_s=1.0,
        links={(link, link + 1): delay, (link + 1, link): delay},
    )


@given(st.integers(2, 5), st.integers(1, 3), st.sampled_from([one_f_one_b, zb_h1, zb_h2]))
def test_healthy_links_cost_nothing(stages: int, rounds: int, make: object) -> None:
    healthy = costs(stages, rounds * stages, 0.0)
    schedule = make(stages, rounds * stages)  # type: ignore[operator]
    assert simulate_in_stream_order(schedule, healthy).start_s == simulate(schedule, healthy).start_s


@given(st.integers(2, 5), st.data(), seconds)
def test_queues_only_add_waiting_and_keep_the_link_busy(stages: int, data: st.DataObject, delay_s: float) -> None:
    link = data.draw(st.integers(0, stages - 2))
    micro_batches = 3 * stages
    slow = costs(stages, micro_batches, delay_s, link)
    schedule = zb_h1(stages, micro_batches)
    queued = simulate_in_stream_order(schedule, slow)
    assert queued.makespan_s >= simulate(schedule, slow).makespan_s - 1e-9
    assert queued.makespan_s >= 2 * micro_batches * delay_s, "activations and gradients share the one queue"
    assert queued.peak_in_flight == simulate(schedule, slow).peak_in_flight


def test_two_stages_by_hand() -> None:
    """F of 2 micro-batches, then B: each message holds both queues for 10 s, the second waits for the first."""
    slow = costs(2, 2, 10.0)
    queued = simulate_in_stream_order(zb_h1(2, 2), slow)
    first, last = queued.end_s
    # Stage 0: F0 1, F1 2. F0 arrives at 11, F1 (ready at 2, waiting for the queue) at 21. B0 of stage 1 ends at 13, but
    # its gradient waits for F1 to have passed: 21 to 31. B1 ends at 23 (F1 22), its gradient 31 to 41.
    by_action = {(str(a.kind), a.micro_batch): end for a, end in zip(queued.schedule.orders[0], first, strict=True)}
    assert by_action["F", 1] == 2.0
    assert by_action["I", 0] == 32.0
    assert by_action["I", 1] == 42.0
    assert queued.makespan_s == pytest.approx(max(first[-1], last[-1]))
    assert simulate(zb_h1(2, 2), slow).makespan_s < queued.makespan_s


def test_a_slow_link_holds_up_the_healthy_link_of_the_same_stage() -> None:
    """As it does in one communicator: pairs with a queue of their own would not be held up."""
    schedule = zb_h1(3, 9)
    slow, twice = costs(3, 9, 2.0, 0), costs(3, 9, 2.0, 0)
    queued = simulate_in_stream_order(schedule, slow)
    delay = LinkCost(2.0)
    both = simulate_in_stream_order(
        schedule,
        Costs(**{**vars(twice), "links": {(0, 1): delay, (1, 0): delay, (1, 2): delay, (2, 1): delay}}),
    )
    assert both.makespan_s >= 4 * 9 * 2.0, "all transfers of the middle stage one after the other"
    assert queued.makespan_s < both.makespan_s


def test_chunks_have_the_way_around_too() -> None:
    schedule = interleaved(4, 8, 2)
    healthy = costs(4, 8, 0.0, chunks=2)
    assert simulate_in_stream_order(schedule, healthy).start_s == simulate(schedule, healthy).start_s
    slow = simulate_in_stream_order(schedule, costs(4, 8, 3.0, chunks=2))
    assert slow.makespan_s >= 2 * 2 * 8 * 3.0


def test_orders_that_do_not_fit_are_refused() -> None:
    with pytest.raises(SimulationError, match="micro_batches"):
        simulate_in_stream_order(zb_h1(2, 2), costs(2, 3, 1.0))
