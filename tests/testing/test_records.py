# SPDX-License-Identifier: Apache-2.0
from testing.stock import IterationRecorder


def test_take_returns_one_iteration_in_order_and_forgets_it() -> None:
    recorder = IterationRecorder(stage=2)
    recorder.add(7, "F", 0, 0, 1.0, 1.5, 2.0)
    recorder.add(7, "B", 1, 3, 2.0, 4.0, 7.0)
    first, second = recorder.take(7)
    assert (first.stage, first.kind, first.wait_s, first.compute_s) == (2, "F", 0.5, 0.5)
    assert (second.chunk, second.micro_batch, second.wait_s, second.compute_s) == (1, 3, 2.0, 3.0)
    assert recorder.take(7) == []


def test_records_that_are_not_taken_do_not_pile_up() -> None:
    recorder = IterationRecorder(stage=0)
    for iteration in range(5):
        recorder.add(iteration, "F", 0, 0, 0.0, 0.0, 1.0)
    assert [record.iteration for record in recorder.take(3)] == [3]
    assert len(recorder) == 1
    assert [record.iteration for record in recorder.take(4)] == [4]
