# SPDX-License-Identifier: Apache-2.0
import pytest
from support.played_schedules import played

from adaptra_megatron.schedule.classic import one_f_one_b
from adaptra_megatron.schedule.costs import uniform_costs
from adaptra_megatron.telemetry.action_records import ActionRecord
from adaptra_megatron.tools.recordings.run_files import bubble_fraction, iteration_span_s


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (4, 8), (8, 24)])
def test_bubble_of_one_f_one_b_is_the_textbook_one(stages: int, micro_batches: int) -> None:
    costs = uniform_costs(stages, micro_batches, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
    bubbles = bubble_fraction(played(one_f_one_b(stages, micro_batches), costs, start_s=100.0))
    assert list(bubbles) == list(range(stages))
    assert list(bubbles.values()) == pytest.approx([(stages - 1) / (micro_batches + stages - 1)] * stages)


def test_ranks_that_share_a_stage_count_as_their_mean() -> None:
    fast = ActionRecord(0, 0, "F", 0, 0, 0.0, 0.0, 2.0)
    slow = ActionRecord(0, 0, "F", 0, 0, 0.0, 0.0, 4.0)
    other = ActionRecord(0, 1, "F", 0, 0, 4.0, 4.0, 10.0)
    assert bubble_fraction([fast, slow, other]) == pytest.approx({0: 0.7, 1: 0.4})
    assert iteration_span_s([fast, slow, other]) == (0.0, 10.0)


def test_the_bubble_is_that_of_one_iteration() -> None:
    with pytest.raises(ValueError, match=r"iterations \[0, 1\]"):
        bubble_fraction([ActionRecord(iteration, 0, "F", 0, 0, 0.0, 0.0, 1.0) for iteration in (0, 1)])
    with pytest.raises(ValueError, match=r"iterations \[\]"):
        bubble_fraction([])
