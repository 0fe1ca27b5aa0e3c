# SPDX-License-Identifier: Apache-2.0
"""Recordings of every kind, read as steps, and the errors of files that are none."""

from __future__ import annotations

import builtins
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.made_up.runs import Iteration, write_events, write_run

from adaptra_megatron.common.layout import Cell
from adaptra_megatron.telemetry.events import LinkDetection
from adaptra_megatron.telemetry.trace import trace_path
from adaptra_megatron.tools.recordings.chrome import read_chrome
from adaptra_megatron.tools.recordings.reading import read_recording
from adaptra_megatron.tools.recordings.recorded_places import Asked
from adaptra_megatron.tools.recordings.recording import Recording, RecordingError
from adaptra_megatron.tools.recordings.run_record import read_run
from adaptra_megatron.tools.replay.analysis import analyse
from adaptra_megatron.tools.replay.analysis_wording import headline
from adaptra_megatron.tools.replay.operations import OpType
from adaptra_megatron.tools.replay.replay_engine import batches_of, replay
from adaptra_megatron.tools.report.perfetto import merge_traces

Event = dict[str, Any]


def check_replays(recording: Recording) -> None:
    for batch in batches_of(recording.steps):
        seconds = {step.number: step.seconds for step in recording.steps}
        expected = [seconds[number] for number in batch.numbers]
        assert replay(batch).max(axis=0)[0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("split", [False, True])
def test_our_own_run_is_read_and_replayed(tmp_path: Path, split: bool) -> None:
    write_run(tmp_path, [Iteration(delay_s=delay_s, split=split) for delay_s in (0.0, 0.0, 0.9)])
    recording = read_recording(tmp_path)
    assert [step.number for step in recording.steps] == [1, 2, 3]
    assert [step.seconds for step in recording.steps] == pytest.approx(
        [iteration.seconds for iteration in read_run(tmp_path).iterations]
    )
    optypes = {each.optype for each in recording.steps[0].operations}
    assert (OpType.BACKWARD_WEIGHT in optypes) == split
    check_replays(recording)


def test_a_delay_of_a_link_of_our_own_run_is_found(tmp_path: Path) -> None:
    write_run(tmp_path, [Iteration(delay_s=0.9)])
    (batch,) = batches_of(read_recording(tmp_path).steps)
    links = {
        event.link: float(batch.work_s[index][0])
        for index, event in enumerate(batch.graph.events)
        if event.link is not None
    }
    assert links[0, 1] == pytest.approx(0.9)
    assert links[1, 0] == pytest.approx(0.9)
    assert links[1, 2] == pytest.approx(0.0)


def test_parts_of_our_own_run_are_analysed_by_themselves(tmp_path: Path) -> None:
    """The log says where a link turned slow: what it cost from there on is not spread over the whole run."""
    write_run(tmp_path, [Iteration(delay_s=delay_s) for delay_s in (0.0, 0.0, 0.0, 0.0, 2.0, 2.0)])
    found = LinkDetection(source=0, target=1, before="healthy", after="slow", reason="measured", since_iteration=5)
    write_events(tmp_path, [(found, 6)])
    recording = read_recording(tmp_path)
    assert [(each.step, each.why) for each in recording.beginnings] == [(5, "link 0→1 found slow")]
    analysis = analyse(recording)
    assert [part.stragglers.numbers for part in analysis.parts] == [(0, 1, 2, 3, 4), (5,)]
    healthy, slow = (part.stragglers for part in analysis.parts)
    assert slow.slowdown > 1.2
    assert slow.by_link[0, 1] > 1.05
    assert slow.by_link.get((1, 2), 1.0) == pytest.approx(1.0, abs=0.02)
    assert healthy.slowdown < slow.slowdown
    assert headline(analysis).startswith("Step 5 takes")


def write_rerouted_run(directory: Path, *, all_routed: bool = False) -> None:
    """Two replicas, five iterations. In the third, cell 0.1 has taken micro-batch 5 of replica 1 over: actions have
    their numbers in the job there. In the fifth, the last cell has failed."""
    for replica in range(2):
        write_replica = [Iteration(delay_s=0.9)] * 5
        write_run(directory, write_replica, first_rank=replica, ranks_apart=2)
    moved: list[list[Any]] = []
    for rank in (5, 4, 3, 2, 1, 0):
        path = trace_path(directory, rank)
        header, *lines = path.read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        for row in rows if all_routed else rows[2:3]:
            records = row["records"]
            for record in records:
                record[2] += 6 * (rank % 2)
            if rank == 3:
                moved = [record for record in records if record[2] == 11]
                row["records"] = [record for record in records if record[2] != 11]
            if rank == 2:
                row["records"] += moved
        path.write_text("\n".join([header, *map(json.dumps, rows if rank < 5 else rows[:4])]) + "\n")


def test_rerouted_steps_and_steps_without_a_cell_are_left_out_and_counted(tmp_path: Path) -> None:
    write_rerouted_run(tmp_path)
    analysis = analyse(read_recording(tmp_path))
    assert not analysis.doubt
    assert analysis.stragglers.numbers == (1, 2, 4)
    assert analysis.stragglers == analyse(read_recording(tmp_path, {1, 2, 4})).stragglers
    assert sorted(analysis.left_out) == [
        "step 3: stage 0 of replica 0 has no forward of micro-batch 11: routed to another replica, or not recorded",
        "step 5 was trained by 5 of 6 cells: others had failed, or left no trace of it",
    ]


def test_a_run_whose_steps_are_all_rerouted_is_refused_with_the_reason(tmp_path: Path) -> None:
    write_rerouted_run(tmp_path, all_routed=True)
    with pytest.raises(RecordingError, match="no training step that is complete: .*routed to another replica"):
        read_recording(tmp_path)


def test_a_stage_without_a_trace_is_named(tmp_path: Path) -> None:
    write_run(tmp_path, [Iteration()])
    trace_path(tmp_path, 1).unlink()
    with pytest.raises(RecordingError, match="lacks the traces of stage 1: .*copy the files of all hosts"):
        read_recording(tmp_path)


def test_the_steps_asked_for_are_read(tmp_path: Path) -> None:
    write_run(tmp_path, [Iteration()] * 5)
    assert [step.number for step in read_recording(tmp_path, {1, 3, 99}).steps] == [1, 3]
    with pytest.raises(RecordingError, match="none of the steps asked for: there are 1-5"):
        read_recording(tmp_path, {99})


def test_evaluations_are_no_steps(tmp_path: Path) -> None:
    write_run(tmp_path, [Iteration(), Iteration(forward_only=True), Iteration()])
    assert [step.number for step in read_recording(tmp_path).steps] == [1, 2]


def test_our_own_chrome_trace_says_what_the_run_does(tmp_path: Path) -> None:
    """The slices of iterations and waits in it are no actions."""
    write_run(tmp_path, [Iteration(split=True), Iteration(delay_s=0.9, split=True)])
    own = read_recording(tmp_path)
    merged = read_recording(merge_traces(tmp_path, tmp_path / "merged" / "trace.json.gz"))
    assert [step.number for step in merged.steps] == [0, 1]
    assert [step.seconds for step in merged.steps] == pytest.approx([step.seconds for step in own.steps])
    assert [len(step.operations) for step in merged.steps] == [len(step.operations) for step in own.steps]
    check_replays(merged)


def pair(name: str, start: float, end: float, stage: int, **args: int) -> list[Event]:
    """As MegaScan writes them: what the end alone knows stands there."""
    common = {"name": name, "pid": stage, "tid": 0}
    begin = {**common, "ph": "B", "ts": start, "args": {"iteration": args["iteration"]}}
    return [begin, {**common, "ph": "E", "ts": end, "args": {**args, "pp_rank": stage}}]


def megascan_events() -> list[Event]:
    events: list[Event] = [
        {"name": "iteration begin", "ph": "i", "ts": 0, "pid": 0, "tid": 0, "args": {"iteration": 4}}
    ]
    for number in range(2):
        reported = {"iteration": 4, "microbatch": number}
        events += pair("forward", 100 * number, 100 * number + 90, 0, model_chunk=0, **reported)
        events += pair("forward", 100 * number + 95, 100 * number + 140, 1, model_chunk=1, **reported)
        events += pair("backward", 100 * number + 140, 100 * number + 190, 1, model_chunk=1, **reported)
        events += pair("backward", 100 * number + 300, 100 * number + 390, 0, model_chunk=0, **reported)
    return events


def test_megascan_s_pairs_of_events_are_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(megascan_events()))
    recording = read_recording(path)
    (step,) = recording.steps
    assert (step.number, step.stages) == (4, 2)
    assert step.seconds == pytest.approx(490e-6)
    computed = [each for each in step.operations if each.optype.computes]
    assert {(each.chunk, each.micro_batch) for each in computed} == {(0, 0), (0, 1)}
    check_replays(recording)


def kineto(rank: int, starts: dict[str, float]) -> dict[str, Any]:
    events: list[Event] = [{"ph": "X", "name": "ProfilerStep#7", "ts": 0.0, "dur": 1000.0, "pid": 1, "tid": 1}]
    events += [
        {"ph": "X", "cat": "user_annotation", "name": name, "ts": start, "dur": 100.0, "pid": 1, "tid": 1}
        for name, start in starts.items()
    ]
    events.append({"ph": "X", "name": "aten::forward_helper", "ts": 5.0, "dur": 1.0, "pid": 1, "tid": 1})
    return {"distributedInfo": {"rank": rank}, "traceEvents": events}


def test_kineto_s_files_of_each_rank_are_read_by_the_number_of_stages(tmp_path: Path) -> None:
    for rank in range(4):
        late = 100.0 if rank >= 2 else 0.0
        starts = {"forward mb 0": late, "F 1": late + 100.0, "backward mb 0": 500.0 - late, "B 1": 600.0 - late}
        data = json.dumps(kineto(rank, starts)).encode()
        (tmp_path / f"rank{rank}.json.gz").write_bytes(gzip.compress(data))
    recording = read_recording(tmp_path, asked=Asked(stages=2))
    (step,) = recording.steps
    assert step.number == 7
    assert step.cells == (Cell(0, 0), Cell(0, 1), Cell(1, 0), Cell(1, 1))
    check_replays(recording)
    with pytest.raises(RecordingError, match="4 ranks that do not say on which stage they ran: give the pipeline size"):
        read_recording(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "neither JSON nor Parquet"),
        ("{}", "has no list of traceEvents"),
        ("[]", "names no forwards and backwards"),
        ('[{"ph": "X", "name": "forward"}]', "'forward' has no time"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(RecordingError, match=message):
        read_chrome(path)


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="neither rank-"):
        read_recording(tmp_path)


@pytest.fixture
def without_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., Any] = builtins.__import__

    def no_pyarrow(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "pyarrow":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_pyarrow)


@pytest.mark.usefixtures("without_pyarrow")
def test_without_pyarrow_the_error_says_what_to_install(tmp_path: Path) -> None:
    path = tmp_path / "trace.parquet"
    path.write_bytes(b"PAR1")
    with pytest.raises(RecordingError, match=r"needs pyarrow: pip install 'adaptra-megatron\[traces\]'"):
        read_recording(path)


def test_parquet_is_read_where_pyarrow_is(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet
    from support.made_up.recordings import recorded_step

    step = recorded_step(5, 2, 2, 3, lambda optype, cell, number: 1.0 + 0.25 * cell.stage)
    rows = [
        {
            "dp_rank": each.cell.replica,
            "stage": each.cell.stage,
            "step": 5,
            "optype": each.optype.value,
            "start_ts": each.start_s,
            "duration": each.duration_s,
            "seq_id": each.sequence,
            "mc": -1 if each.optype.peer else each.chunk,
            "mb_id": each.micro_batch,
        }
        for each in step.operations
    ]
    path = tmp_path / "trace.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    recording = read_recording(path)
    assert recording.steps == (step,)
    lacking = pyarrow.Table.from_pylist([{"step": 1}])
    parquet.write_table(lacking, path)
    with pytest.raises(RecordingError, match="lacks the columns dp_rank"):
        read_recording(path)
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(RecordingError, match="is no Parquet file"):
        read_recording(path)
