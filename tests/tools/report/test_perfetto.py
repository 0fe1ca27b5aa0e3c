# SPDX-License-Identifier: Apache-2.0
import gzip
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.played_schedules import played, rank_traces

from adaptra_megatron.schedule.classic import interleaved, one_f_one_b, zb_h1
from adaptra_megatron.schedule.costs import LinkCost, uniform_costs_for
from adaptra_megatron.schedule.ir import Schedule
from adaptra_megatron.schedule.simulator import peak_in_flight
from adaptra_megatron.telemetry.action_records import ArrivalRecord
from adaptra_megatron.telemetry.trace import RankTrace, TraceWriter
from adaptra_megatron.tools.report.perfetto import Instant, chrome_trace, merge_traces, write_trace

SCHEDULES = {
    "1f1b": one_f_one_b(4, 8),
    "zb-h1": zb_h1(4, 8),
    "interleaved": interleaved(4, 8, 2),
}


def traces_of(schedule: Schedule, iterations: int = 2) -> list[RankTrace]:
    slow = LinkCost(latency_s=0.06)
    costs = uniform_costs_for(
        schedule,
        forward_s=0.02,
        backward_input_s=0.03,
        backward_weight_s=0.01,
        links={(1, 2): slow, (2, 1): slow},
    )
    records = []
    for iteration in range(iterations):
        records += played(schedule, costs, iteration=iteration, start_s=1000.0 + 10 * iteration)
    return rank_traces(records)


def slices(document: dict[str, Any], category: str) -> list[dict[str, Any]]:
    return [event for event in document["traceEvents"] if event.get("cat") == category and event["ph"] == "X"]


@pytest.mark.parametrize("name", SCHEDULES)
def test_document_follows_the_format(name: str) -> None:
    document = json.loads(json.dumps(chrome_trace(traces_of(SCHEDULES[name]))))
    latest = 0.0
    for event in document["traceEvents"]:
        assert event["ph"] in "MXsfC"
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            continue
        assert event["ts"] >= latest
        latest = event["ts"]
        if event["ph"] == "X":
            assert event["dur"] >= 0
    assert len(slices(document, "compute")) == 2 * sum(len(order) for order in SCHEDULES[name].orders)


@pytest.mark.parametrize("name", SCHEDULES)
def test_slices_of_a_thread_nest(name: str) -> None:
    """Perfetto drops a slice that begins within another one and ends after it."""
    document = chrome_trace(traces_of(SCHEDULES[name]))
    threads = defaultdict(list)
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append(event)
    assert threads
    for events in threads.values():
        open_ends: list[float] = []
        for event in events:
            end = event["ts"] + event["dur"]
            while open_ends and open_ends[-1] <= event["ts"] + 1e-6:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 1e-6
            open_ends.append(end)
            assert len(open_ends) <= 2  # an action within its iteration


def test_times_arguments_and_names() -> None:
    document = chrome_trace(traces_of(SCHEDULES["1f1b"]), label="stock", run=1)
    first = slices(document, "compute")[0]
    assert (first["name"], first["ts"], first["dur"]) == ("F 0", 0.0, 20_000.0)
    assert first["args"] == {"iteration": 0, "chunk": 0, "micro_batch": 0}
    names = {
        event["pid"]: event["args"]["name"] for event in document["traceEvents"] if event["name"] == "process_name"
    }
    assert sorted(names.values()) == [f"stock stage {stage}" for stage in range(4)]
    assert first["pid"] in names
    threads = {event["args"]["name"] for event in document["traceEvents"] if event["name"] == "thread_name"}
    assert {"rank 0 compute", "rank 3 waiting"} <= threads
    waits = slices(document, "wait")
    assert any(event["dur"] == pytest.approx(100_000) for event in waits)  # F 0 of stage 2: two forwards and the link


@pytest.mark.parametrize("name", SCHEDULES)
def test_an_arrow_per_message_starts_and_ends_inside_slices(name: str) -> None:
    schedule = SCHEDULES[name]
    document = chrome_trace(traces_of(schedule))
    arrows: dict[int, dict[str, Any]] = defaultdict(dict)
    for event in document["traceEvents"]:
        if event["ph"] in "sf":
            arrows[event["id"]][event["ph"]] = event
    messages = 2 * (schedule.virtual_stages - 1) * schedule.micro_batches
    assert len(arrows) == 2 * messages
    computes = slices(document, "compute")
    for ends in arrows.values():
        assert ends["f"]["ts"] >= ends["s"]["ts"]
        for event in ends.values():
            assert any(
                (other["pid"], other["tid"]) == (event["pid"], event["tid"])
                and other["ts"] <= event["ts"] < other["ts"] + other["dur"]
                for other in computes
            )


def test_two_runs_share_a_file_without_sharing_processes_threads_or_arrows(tmp_path: Path) -> None:
    documents = [chrome_trace(traces_of(SCHEDULES["1f1b"]), label=str(run), run=run) for run in (0, 1)]
    path = write_trace(tmp_path / "new" / "both.json.gz", *documents)
    with gzip.open(path, "rt") as file:
        joined = json.load(file)
    assert len(joined["traceEvents"]) == sum(len(document["traceEvents"]) for document in documents)
    for field in ("pid", "tid", "id"):
        used = [{event[field] for event in each["traceEvents"] if event.get(field)} for each in documents]
        assert used[0]
        assert not used[0] & used[1]


def test_a_missing_stage_costs_the_arrows_only() -> None:
    document = chrome_trace([trace for trace in traces_of(SCHEDULES["1f1b"]) if trace.stage != 2])
    assert {event["ph"] for event in document["traceEvents"]} == {"M", "X", "C"}
    assert len(slices(document, "compute")) == 2 * 3 * 16


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_a_stage_holds_is_counted(name: str) -> None:
    schedule = SCHEDULES[name]
    document = chrome_trace(traces_of(schedule))
    held: dict[str, list[int]] = defaultdict(list)
    for event in document["traceEvents"]:
        if event["ph"] == "C":
            held[event["name"]].append(event["args"]["activations"])
    assert sorted(held) == [f"activations held, rank {rank}" for rank in range(4)]
    peaks = [int(peak) for peak in peak_in_flight(schedule, (0.0,) * 4)]
    for rank, (_name, values) in enumerate(sorted(held.items())):
        assert max(values) == peaks[rank]
        assert min(values) == values[-1] == 0


def test_messages_are_named_by_their_link_and_say_what_they_took() -> None:
    traces = [
        replace(
            trace,
            arrivals=tuple(
                ArrivalRecord(each.iteration, 1, 2, "F", 0, each.micro_batch, each.start_s)
                for each in trace.records
                if (each.stage, each.kind) == (2, "F")
            ),
        )
        for trace in traces_of(SCHEDULES["1f1b"])
    ]
    document = chrome_trace(traces)
    names = {event["name"] for event in document["traceEvents"] if event["ph"] in "sf"}
    assert names == {f"link {a}->{b}" for a, b in ((0, 1), (1, 2), (2, 3), (1, 0), (2, 1), (3, 2))}
    took = [event for event in document["traceEvents"] if event["name"] == "link 1->2, rank 2, ms"]
    assert len(took) == 16
    assert min(event["args"]["ms"] for event in took) == pytest.approx(60.0)


def test_what_happened_is_there_and_when_it_was() -> None:
    traces = traces_of(SCHEDULES["1f1b"])
    instants = [Instant(1000.5, "Link 1→2 is slow", "60 ms"), Instant(3.0, "The run started", "before what is traced")]
    document = chrome_trace(traces, instants=instants, wall_clock_offset_s=1.7e9)
    (shown,) = (event for event in document["traceEvents"] if event["ph"] == "i")
    assert (shown["name"], shown["ts"], shown["args"]) == ("Link 1→2 is slow", 500_000.0, {"why": "60 ms"})
    assert document["baseTimeNanoseconds"] == round((1.7e9 + 1000.0) * 1e9)


def test_merge_joins_all_ranks_of_a_directory(tmp_path: Path) -> None:
    traces = traces_of(SCHEDULES["zb-h1"])
    for trace in traces:
        writer = TraceWriter(tmp_path, rank=trace.rank, stage=trace.stage, clock_offset_s=100.0 * trace.rank)
        for iteration in (0, 1):
            # What the rank's own clock showed: behind the common one by its offset.
            local = [
                record._replace(
                    wait_start_s=record.wait_start_s - 100.0 * trace.rank,
                    start_s=record.start_s - 100.0 * trace.rank,
                    end_s=record.end_s - 100.0 * trace.rank,
                )
                for record in trace.iteration(iteration)
            ]
            writer.write(iteration, local)
        writer.close()
    path = merge_traces(tmp_path)
    assert path == tmp_path / "trace.json.gz"
    merged = json.loads(gzip.decompress(path.read_bytes()))
    expected = chrome_trace(traces)
    assert len(merged["traceEvents"]) == len(expected["traceEvents"])
    for left, right in zip(slices(merged, "compute"), slices(expected, "compute"), strict=True):
        assert left["name"] == right["name"]
        assert left["ts"] == pytest.approx(right["ts"], abs=0.01)


def test_an_empty_run_is_an_empty_trace() -> None:
    document = chrome_trace([RankTrace(rank=0, stage=0, records=())])
    assert {event["ph"] for event in document["traceEvents"]} == {"M"}
