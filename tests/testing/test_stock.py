# SPDX-License-Identifier: Apache-2.0
"""Stock Megatron's own loops, recorded by decorators around the functions that they look up."""

import types
from pathlib import Path
from typing import Any

import pytest

from adaptra_megatron.schedule.classic import stock_order
from adaptra_megatron.telemetry.action_records import ActionRecord
from adaptra_megatron.telemetry.trace import read_traces
from testing.jobs.fork_server import ForkServer
from testing.jobs.variants import Variant, run_variants
from testing.stock import StockRecording, trace_stock

NAMES = (
    "forward_step",
    "backward_step",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)


def small_schedules() -> types.ModuleType:
    """A module whose loop finds its steps as Megatron's does: 2 forwards, then their backwards."""
    module = types.ModuleType("schedules")
    source = """
def forward_step(fail=False, current_microbatch=None, vp_stage=None):
    if fail:
        raise ArithmeticError("forward")
    return "output"
def backward_step():
    return "gradient"
def forward_backward_pipelining_without_interleaving(*, model, forward_only=False, fail=False):
    done = [forward_step(fail, current_microbatch=m) for m in range(2)]
    return done if forward_only else done + [backward_step() for _ in range(2)]
def forward_backward_pipelining_with_interleaving(*, model, forward_only=False):
    done = [forward_step(current_microbatch=m, vp_stage=c) for c in range(len(model)) for m in range(2)]
    return done + [backward_step() for _ in range(2 * len(model))]
"""
    exec(source, module.__dict__)
    return module


@pytest.fixture
def recorded() -> list[tuple[int, list[ActionRecord]]]:
    return []


def test_iterations_are_numbered_and_results_pass_through(recorded: list[Any]) -> None:
    schedules = small_schedules()
    recording = StockRecording(schedules, 3, lambda number, records: recorded.append((number, records)))
    loop = schedules.forward_backward_pipelining_without_interleaving
    assert loop(model=["chunk"]) == ["output", "output", "gradient", "gradient"]
    assert loop(model="chunk", forward_only=True) == ["output", "output"]
    loop(model=["chunk"])
    recording.undo()
    assert [number for number, _ in recorded] == [0, 1]
    for number, records in recorded:
        assert [(record.kind, record.chunk, record.micro_batch) for record in records] == [
            ("F", 0, 0),
            ("F", 0, 1),
            ("B", 0, 0),
            ("B", 0, 1),
        ]
        assert {(record.iteration, record.stage) for record in records} == {(number, 3)}
        for before, after in zip(records, records[1:], strict=False):
            assert before.end_s == after.wait_start_s <= after.start_s <= after.end_s


def test_backwards_of_chunks_mirror_their_forwards(recorded: list[Any]) -> None:
    schedules = small_schedules()
    StockRecording(schedules, 0, lambda number, records: recorded.append(records))
    schedules.forward_backward_pipelining_with_interleaving(model=["first", "second"])
    found = [(record.kind, record.chunk, record.micro_batch) for record in recorded[0]]
    assert found[:4] == [("F", 0, 0), ("F", 0, 1), ("F", 1, 0), ("F", 1, 1)]
    assert found[4:] == [("B", 1, 0), ("B", 1, 1), ("B", 0, 0), ("B", 0, 1)]


def test_undo_puts_every_function_back_once(recorded: list[Any]) -> None:
    schedules = small_schedules()
    stock = {name: getattr(schedules, name) for name in NAMES}
    recording = StockRecording(schedules, 0, lambda *_: None)
    assert all(getattr(schedules, name) is not function for name, function in stock.items())
    recording.undo()
    assert all(getattr(schedules, name) is function for name, function in stock.items())
    schedules.forward_step = later = object()
    recording.undo()
    assert schedules.forward_step is later


def test_undo_refuses_to_drop_what_was_put_on_top() -> None:
    schedules = small_schedules()
    recording = StockRecording(schedules, 0, lambda *_: None)
    ours = schedules.forward_step
    schedules.backward_step = lambda: "another tool's"
    with pytest.raises(RuntimeError, match=r"schedules\.backward_step was replaced"):
        recording.undo()
    assert schedules.forward_step is ours


def test_a_failing_step_leaves_nothing_behind(recorded: list[Any]) -> None:
    schedules = small_schedules()
    StockRecording(schedules, 0, lambda number, records: recorded.append((number, records)))
    loop = schedules.forward_backward_pipelining_without_interleaving
    with pytest.raises(ArithmeticError):
        loop(model=["chunk"], fail=True)
    assert schedules.forward_step(current_microbatch=0) == "output"  # outside an iteration: not recorded
    loop(model=["chunk"])
    assert [(number, len(records)) for number, records in recorded] == [(0, 4)]


def test_a_directory_that_cannot_be_written_does_not_stop_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    schedules = small_schedules()
    with trace_stock(schedules, tmp_path / "file" / "traces", rank=0, stage=0):
        for _ in range(3):
            assert len(schedules.forward_backward_pipelining_without_interleaving(model=["chunk"])) == 4
    assert "training goes on" in caplog.text


def test_the_records_of_real_megatron_are_its_orders(fork_server: ForkServer, tmp_path: Path) -> None:
    layout = [*("--pipeline-model-parallel-size", "2"), *("--num-layers", "4"), *("--global-batch-size", "6")]
    layout += [*("--train-iters", "2"), "--mock-data", *("--eval-iters", "1"), *("--eval-interval", "1")]
    layout += [*("--hidden-size", "32"), *("--seq-length", "16")]
    chunks = {"plain": 1, "interleaved": 2}
    run_variants(
        2,
        [
            Variant(
                name,
                (
                    *layout,
                    "--adaptra-trace-dir",
                    str(tmp_path / name),
                    *(("--num-virtual-stages-per-pipeline-rank", str(count)) if count > 1 else ()),
                ),
            )
            for name, count in chunks.items()
        ],
        timeout_s=90,
        server=fork_server,
        directory=tmp_path / "logs",
    )
    for name, count in chunks.items():
        orders = stock_order(2, 6, count).orders
        traces = read_traces(tmp_path / name)
        assert [trace.stage for trace in traces] == [0, 1]
        for trace in traces:
            for iteration in (0, 1):
                found = [(r.kind, r.chunk, r.micro_batch) for r in trace.iteration(iteration)]
                assert found == [(a.kind.value, a.chunk, a.micro_batch) for a in orders[trace.stage]]
