# SPDX-License-Identifier: Apache-2.0
import logging
import threading
import time
from pathlib import Path

import pytest

from adaptra_megatron.telemetry import trace
from adaptra_megatron.telemetry.action_records import ActionRecord, ArrivalRecord
from adaptra_megatron.telemetry.trace import TraceError, TraceWriter, read_trace, read_traces, trace_path

RECORDS = [ActionRecord(4, 1, "F", 0, 2, 10.0, 10.25, 11.0), ActionRecord(4, 1, "W", 1, 0, 11.0, 11.0, 12.5)]


def test_what_was_written_is_read_back_on_the_common_clock(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "new" / "directory", rank=3, stage=1, clock_offset_s=-8.0)
    writer.write(4, RECORDS)
    writer.write(5, [RECORDS[0]._replace(iteration=5)])
    writer.close()
    (read,) = read_traces(tmp_path / "new" / "directory")
    assert (read.rank, read.stage) == (3, 1)
    assert read.iteration(4) == [
        ActionRecord(4, 1, "F", 0, 2, 2.0, 2.25, 3.0),
        ActionRecord(4, 1, "W", 1, 0, 3.0, 3.0, 4.5),
    ]
    assert [record.iteration for record in read.records] == [4, 4, 5]


def test_an_iteration_may_have_an_offset_of_its_own(tmp_path: Path) -> None:
    """Clocks drift apart while a job runs."""
    writer = TraceWriter(tmp_path, rank=3, stage=1, clock_offset_s=-8.0)
    arrival = ArrivalRecord(4, 0, 1, "F", 0, 2, 10.5)
    writer.write(4, RECORDS[:1], [arrival], -8.5)
    writer.write(5, [RECORDS[0]._replace(iteration=5)])
    writer.close()
    read = read_trace(trace_path(tmp_path, 3))
    assert [record.start_s for record in read.records] == [1.75, 2.25]
    assert read.arrivals == (arrival._replace(arrived_s=2.0),)


def test_ranks_are_read_in_order_and_an_old_file_is_replaced(tmp_path: Path) -> None:
    for rank in (10, 2, 2):
        writer = TraceWriter(tmp_path, rank=rank, stage=0)
        writer.write(4, RECORDS)
        writer.close()
        writer.close()
    assert [(read.rank, len(read.records)) for read in read_traces(tmp_path)] == [(2, 2), (10, 2)]


def test_the_latest_iterations_are_kept_and_no_more(tmp_path: Path) -> None:
    limit = 4096
    writer = TraceWriter(tmp_path, rank=2, stage=1, clock_offset_s=-8.0, max_nbytes=limit)
    for iteration in range(200):
        writer.write(iteration, [record._replace(iteration=iteration) for record in RECORDS])
    writer.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["rank-00002.jsonl", "rank-00002.jsonl.1"]
    assert all(0 < file.stat().st_size <= limit for file in files)
    (read,) = read_traces(tmp_path)
    numbers = sorted({record.iteration for record in read.records})
    assert numbers == list(range(numbers[0], 200)), "without a gap"
    assert 20 < len(numbers) < 200
    assert read.records[0].start_s == 2.25
    again = TraceWriter(tmp_path, rank=2, stage=1, goes_on=True, max_nbytes=limit)
    again.write(200, [RECORDS[0]._replace(iteration=200)])
    again.close()
    assert read_trace(trace_path(tmp_path, 2)).records[-1].iteration == 200
    assert len(list(tmp_path.iterdir())) == 2
    TraceWriter(tmp_path, rank=2, stage=1).close()
    assert read_trace(trace_path(tmp_path, 2)).records == (), "another run begins"


def test_a_directory_that_cannot_be_made_stops_recording_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING, logger="adaptra_megatron"):
        writer = TraceWriter(tmp_path / "file" / "traces", rank=5, stage=0)
        for iteration in range(2000):
            writer.write(iteration, RECORDS)
        writer.close()
    assert writer.failed
    assert len(caplog.records) == 1
    assert "no more tracing of rank 5" in caplog.text
    assert "training goes on" in caplog.text


def test_a_disk_that_hangs_never_blocks_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    released = threading.Event()
    hung = threading.Event()

    def hang(*_: object) -> None:
        hung.set()
        released.wait(30)

    monkeypatch.setattr(trace._TraceFile, "_write", hang)
    with caplog.at_level(logging.WARNING, logger="adaptra_megatron"):
        writer = TraceWriter(tmp_path, rank=0, stage=0)
        assert hung.wait(10)
        started_s = time.monotonic()
        for iteration in range(trace.QUEUED_ITERATIONS + 10):
            writer.write(iteration, RECORDS)
        writer.close(timeout_s=0.1)
        assert time.monotonic() - started_s < 5.0
    released.set()
    assert writer.failed
    assert len(caplog.records) == 1


def test_a_record_that_cannot_be_encoded_stops_recording(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = TraceWriter(tmp_path, rank=0, stage=0)
    writer.write(4, [RECORDS[0]._replace(micro_batch=object())])
    writer.close()
    assert writer.failed
    assert "not JSON serializable" in caplog.text


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = trace_path(tmp_path, 0)
    writer = TraceWriter(tmp_path, rank=0, stage=1)
    writer.write(4, RECORDS)
    writer.write(5, RECORDS)
    writer.close()
    path.write_text(path.read_text()[:-7])
    assert [record.iteration for record in read_trace(path).records] == [4, 4]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("no json\n", "line 1: expected a trace header"),
        ('{"rank":0}\n', "line 1: expected a trace header"),
        ('{"version":9,"rank":0,"stage":0,"clock_offset_s":0}\n', "version 9"),
        ('{"version":1,"rank":0,"stage":0,"clock_offset_s":0}\n{"iteration":0,"records":[["F",0]]}\n', "line 2"),
        ('{"version":1,"rank":0,"stage":0,"clock_offset_s":0}\n7\n', "line 2: expected one iteration's records"),
    ],
)
def test_a_damaged_file_is_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    path = trace_path(tmp_path, 0)
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        read_traces(tmp_path)


def test_a_directory_without_traces_names_the_flag(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="--adaptra-trace-dir"):
        read_traces(tmp_path)
