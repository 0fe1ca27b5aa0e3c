# SPDX-License-Identifier: Apache-2.0
"""Perfetto's own format, read back by the classes that its package brings: all that the trace in JSON says."""

from __future__ import annotations

import gzip
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tools.report.test_perfetto import SCHEDULES, slices, traces_of

from adaptra_megatron.telemetry.action_records import ArrivalRecord
from adaptra_megatron.telemetry.trace import TraceError
from adaptra_megatron.tools.cli.main import main as adaptra
from adaptra_megatron.tools.report.perfetto import HAPPENED, Instant, chrome_trace, write_trace

BASE_S = 1.7e9


def document_of(name: str, run: int = 0) -> dict[str, Any]:
    traces = traces_of(SCHEDULES[name])
    arrived = tuple(
        ArrivalRecord(each.iteration, 1, 2, "F", each.chunk, each.micro_batch, each.start_s)
        for each in traces[2].records
        if each.kind == "F"
    )
    traces[2] = replace(traces[2], arrivals=arrived)
    instants = [Instant(1000.5, "Link 1→2 is slow", "60 ms"), Instant(1001.0, "Plan 1", "for it")]
    return chrome_trace(traces, label=f"run {run}", run=run, instants=instants, wall_clock_offset_s=BASE_S)


def packets(path: Path) -> list[Any]:
    pytest.importorskip("perfetto")
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

    data = path.read_bytes()
    trace = Trace()
    trace.ParseFromString(gzip.decompress(data) if path.suffix == ".gz" else data)
    return list(trace.packet)


def arguments(event: Any) -> dict[str, Any]:
    return {each.name: getattr(each, each.WhichOneof("value")) for each in event.debug_annotations}


class Read:
    """What trace processors make of packets: by time, and at equal times by their order in the file."""

    def __init__(self, found: list[Any]) -> None:
        described = [each.track_descriptor for each in found if each.HasField("track_descriptor")]
        self.tracks = {each.uuid: each for each in described}
        assert len(self.tracks) == len(described)
        self.slices: list[tuple[str, int, int, int, Any]] = []
        """Name, thread, start, end, event."""
        self.others: dict[str, list[tuple[int, Any]]] = defaultdict(list)
        """Moments and events of counters and of what happened, by the name of their track."""
        open_slices: dict[int, list[tuple[int, Any]]] = defaultdict(list)
        timed = [each for each in found if each.HasField("track_event")]
        for packet in sorted(timed, key=lambda each: each.timestamp):
            event, now = packet.track_event, packet.timestamp
            track = self.tracks[event.track_uuid]
            if event.type == event.TYPE_SLICE_BEGIN:
                open_slices[track.uuid].append((now, event))
            elif event.type == event.TYPE_SLICE_END:
                start, begun = open_slices[track.uuid].pop()
                self.slices.append((begun.name, track.thread.tid, start, now, begun))
            else:
                self.others[track.name].append((now, event))
        assert not any(open_slices.values())


@pytest.mark.parametrize("name", SCHEDULES)
def test_slices_are_those_of_the_trace_in_json(name: str, tmp_path: Path) -> None:
    document = document_of(name)
    read = Read(packets(write_trace(tmp_path / "trace.pftrace", document)))
    expected = [event for kind in ("compute", "wait", "iteration") for event in slices(document, kind)]
    assert len(expected) > 100
    times = {
        (event["name"], event["tid"], round(event["ts"] * 1e3), round((event["ts"] + event["dur"]) * 1e3))
        for event in expected
    }
    assert {found[:4] for found in read.slices} == times
    assert len(read.slices) == len(expected)
    by_start = {(event["name"], event["tid"], round(event["ts"] * 1e3)): event for event in expected}
    for title, thread, start, _end, event in read.slices:
        assert by_start[title, thread, start]["args"].items() <= arguments(event).items()


@pytest.mark.parametrize("name", SCHEDULES)
def test_arrows_join_the_actions_that_send_and_use_a_message(name: str, tmp_path: Path) -> None:
    document = document_of(name)
    read = Read(packets(write_trace(tmp_path / "trace.pftrace", document)))
    sent = {flow: found for found in read.slices for flow in found[4].flow_ids}
    used = {flow: found for found in read.slices for flow in found[4].terminating_flow_ids}
    arrows = {event["id"]: event["name"] for event in document["traceEvents"] if event["ph"] == "s"}
    assert sent.keys() == used.keys() == arrows.keys()
    for flow, link in arrows.items():
        assert sent[flow][3] <= used[flow][2]
        assert link == arguments(sent[flow][4])["sends by"] == arguments(used[flow][4])["received by"]


def test_counters_happenings_names_and_the_time_of_day(tmp_path: Path) -> None:
    document = document_of("1f1b")
    found = packets(write_trace(tmp_path / "trace.pftrace.gz", document))
    read = Read(found)
    for event in (event for event in document["traceEvents"] if event["ph"] == "C"):
        values = [(now, each.double_counter_value) for now, each in read.others[event["name"]]]
        assert (round(event["ts"] * 1e3), *event["args"].values()) in values
    units = {track.name: track.counter.unit_name for track in read.tracks.values() if track.HasField("counter")}
    assert units["link 1->2, rank 2, ms"] == "ms"
    assert units["activations held, rank 3"] == "activations"
    said = [(now, event.name, arguments(event)) for now, event in read.others[HAPPENED]]
    assert said == [(500_000_000, "Link 1→2 is slow", {"why": "60 ms"}), (1_000_000_000, "Plan 1", {"why": "for it"})]
    processes = {track.process.process_name: track for track in read.tracks.values() if track.HasField("process")}
    assert sorted(processes) == [f"run 0 stage {stage}" for stage in range(4)]
    orders = [track.process.legacy_sort_index for _name, track in sorted(processes.items())]
    assert orders == sorted(orders)
    threads = [track for track in read.tracks.values() if track.HasField("thread")]
    assert {"rank 0 compute", "rank 3 waiting"} <= {track.thread.thread_name for track in threads}
    assert {track.parent_uuid for track in threads} == {track.uuid for track in processes.values()}
    (clocks,) = (each.clock_snapshot.clocks for each in found if each.HasField("clock_snapshot"))
    assert [(clock.clock_id, clock.timestamp) for clock in clocks] == [(6, 0), (1, round((BASE_S + 1000.0) * 1e9))]


def test_two_runs_share_a_file(tmp_path: Path) -> None:
    documents = [document_of("1f1b", run) for run in (0, 1)]
    both = Read(packets(write_trace(tmp_path / "both.pftrace", *documents)))
    alone = Read(packets(write_trace(tmp_path / "one.pftrace", documents[0])))
    assert len(both.slices) == 2 * len(alone.slices)
    assert len(both.others[HAPPENED]) == 2 * len(alone.others[HAPPENED])


def test_without_the_package_json_is_offered_and_nothing_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "perfetto.trace_builder.proto_builder", None)
    with pytest.raises(TraceError, match=r"pip install 'adaptra-megatron\[perfetto\]'; those that end in \.json"):
        write_trace(tmp_path / "new" / "trace.pftrace", document_of("1f1b"))
    assert not list(tmp_path.iterdir())
    costs = tmp_path / "costs.json"
    costs.write_text('{"stages": 2, "micro_batches": 4, "forward_s": 1, "backward_input_s": 1, "backward_weight_s": 1}')
    assert adaptra(["plan", str(costs), "--trace", str(tmp_path / "a.pftrace")]) == 2
    assert "adaptra-megatron[perfetto]" in capsys.readouterr().err
