# SPDX-License-Identifier: Apache-2.0
"""Every order that has a name is valid wherever its row says that it runs, and refused elsewhere."""

from __future__ import annotations

import pytest

from adaptra_megatron.schedule.ir import ScheduleError
from adaptra_megatron.schedule.order_registry import SCHEDULES, make_schedule
from adaptra_megatron.schedule.schedule_checks import check_schedule

each_name = pytest.mark.parametrize("name", SCHEDULES)


@each_name
def test_a_named_order_is_valid_and_has_the_counts_it_was_asked_for(name: str) -> None:
    for chunks in {SCHEDULES[name].chunks[0], min(3, SCHEDULES[name].chunks[-1])}:
        for stages, micro_batches in ((2, 4), (3, 9), (4, 8), (5, 30)):
            schedule = make_schedule(name, stages, micro_batches, chunks)
            check_schedule(schedule)
            assert (schedule.stages, schedule.micro_batches, schedule.chunks) == (stages, micro_batches, chunks)


@each_name
def test_other_numbers_of_chunks_are_refused_with_orders_that_run_them(name: str) -> None:
    for chunks in {1, 2, 3} - set(SCHEDULES[name].chunks[:3]):
        with pytest.raises(ScheduleError, match=f"runs .* per stage, not {chunks}: take gpipe, ") as refused:
            make_schedule(name, 4, 8, chunks)
        for other in str(refused.value).partition("take ")[2].partition(", or set")[0].split(", "):
            assert make_schedule(other, 4, 8, chunks).chunks == chunks


def test_group_sizes_reach_the_orders_that_have_them() -> None:
    assert make_schedule("interleaved", 2, 8, 2, 4) != make_schedule("interleaved", 2, 8, 2)
