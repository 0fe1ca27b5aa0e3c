# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from adaptra_megatron.telemetry.event_log import EventFile, EventLog, EventLogError, event_path, read_events
from adaptra_megatron.telemetry.events import (
    ArrivalsSeen,
    Event,
    EventError,
    Fault,
    LinkDetection,
    MemoryWanted,
    PathChanged,
    PathChosen,
    PlanMade,
    PlanSwitched,
    RunEnded,
    RunStarted,
    StageDetection,
    Stamp,
    StampedEvent,
    StragglerDetection,
    SwitchMeasured,
    decode,
    encode,
)

START = RunStarted(
    layout={"stages": 4, "world_size": 8}, versions={"megatron-core": "0.16.1"}, config={"policy": "adapt"}, host="a"
)
EVENTS: list[Event] = [
    START,
    LinkDetection(
        source=3,
        target=4,
        before="healthy",
        after="slow",
        reason="80 ms",
        latency_s=0.08,
        path="device",
        source_rnics=["mlx5_0"],
    ),
    StageDetection(stage=2, before="healthy", after="slow", reason="F takes 1.5 x as long", slow_down=1.5),
    StragglerDetection(replica=5, before="healthy", after="late", reason="by 180 ms", causes=["cpu"], share=0.12),
    ArrivalsSeen(until=40, iterations=20, lags_s=[[0.0, 0.18]], last=[[2, 18]]),
    StageDetection(
        stage=1, before="slow", after="slow", reason="since 7 (of 9)", reason_parts=["since ", 7, [" (of ", 9, ")"]]
    ),
    PlanMade(number=1, adopted=True, reason="costs", predicted_s=1.5, current_predicted_s=2.0, costs={"stages": 4}),
    MemoryWanted(held=2.0, predicted_s=2.6, caps={"3": 2.0}, source=0, target=1),
    PathChosen(number=1, source=3, target=4, before="device", after="host", reason="it is slow", gain_s=0.06),
    PlanSwitched(number=1, before=0, predicted_s=1.5, before_predicted_s=2.0, before_measured_s=2.1),
    SwitchMeasured(number=1, before_measured_s=2.1, after_measured_s=1.6, iterations=3),
    PathChanged(source=3, target=4, before="device", after="host", cause="stalled for 0.8 s", failover=True),
    Fault(what="delegate restarted", detail="it was killed", stage=3, peer=4),
    RunEnded(reason="training finished"),
]


class CountingClock:
    """Each look is a second later."""

    def __init__(self) -> None:
        self.looks = 0

    def wall_s(self) -> float:
        self.looks += 1
        return 1000.0 + self.looks

    def monotonic_s(self) -> float:
        return float(self.looks)


def stamped(event: Event, sequence: int = 0, *, run: str = "run", rank: int = 0, at_s: float = 0.0) -> StampedEvent:
    stamp = Stamp(run=run, rank=rank, sequence=sequence, iteration=7, wall_s=at_s, monotonic_s=at_s)
    return StampedEvent(stamp=stamp, event=event)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.name)
def test_every_event_survives_its_line(event: Event) -> None:
    line = encode(stamped(event))
    assert "\n" not in line
    assert decode(line) == stamped(event)


def test_numbers_that_json_has_not_become_null() -> None:
    event = PlanMade(number=1, adopted=True, reason="", predicted_s=math.inf, current_predicted_s=math.inf)
    document = json.loads(encode(stamped(event)))
    assert document["predicted_s"] is None
    read = decode(encode(stamped(event))).event
    assert isinstance(read, PlanMade)
    assert math.isnan(read.predicted_s)
    assert read.current_predicted_s is None


def test_fields_of_a_later_version_are_passed_over() -> None:
    document = json.loads(encode(stamped(RunEnded(reason="done"))))
    assert decode(json.dumps({**document, "mood": "good"})).event == RunEnded(reason="done")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "no JSON"),
        ("7", "no JSON object"),
        ('{"event":"party"}', "'party' is none of run_started"),
        ('{"event":"run_ended","reason":"x"}', "missing"),
        (encode(stamped(START)).replace('"version":1', '"version":9'), "version 9"),
        (encode(stamped(RunEnded(reason="x"))).replace('"rank":0', '"rank":"0"'), "rank of event 'run_ended' is '0'"),
        (encode(stamped(RunEnded(reason="x"))).replace('"rank":0', '"rank":true'), "is True"),
        (encode(stamped(EVENTS[5])).replace('[" (of ",9,")"]', "{}"), "reason_parts of event 'stage'"),
    ],
)
def test_what_is_no_event_is_refused(line: str, message: str) -> None:
    with pytest.raises(EventError, match=message):
        decode(line)


def test_the_log_stamps_with_its_clock_and_the_jobs_time(tmp_path: Path) -> None:
    clock = CountingClock()
    times = {"wall_s": clock.wall_s, "monotonic_s": clock.monotonic_s}
    log = EventLog(tmp_path / "new", START, run="a", rank=3, clock_offset_s=50.0, **times)
    log.iteration = 4
    log.log(Fault(what="delegate restarted"))
    log.log(PlanSwitched(number=1, before=0), iteration=6)
    log.close()
    log.close()
    read = read_events(tmp_path / "new")
    assert [entry.event for entry in read] == [
        START,
        Fault(what="delegate restarted"),
        PlanSwitched(number=1, before=0),
    ]
    assert [(entry.stamp.iteration, entry.stamp.sequence, entry.stamp.rank) for entry in read] == [
        (-1, 0, 3),
        (4, 1, 3),
        (6, 2, 3),
    ]
    assert [(entry.stamp.wall_s, entry.stamp.monotonic_s) for entry in read] == [
        (1001.0, 51.0),
        (1002.0, 52.0),
        (1003.0, 53.0),
    ]


def test_ranks_are_read_in_order_of_time_and_earlier_runs_left_out(tmp_path: Path) -> None:
    for run, begin_s in (("old", 0.0), ("new", 100.0)):
        for rank in (0, 1):
            file = EventFile(tmp_path, stamped(START, 0, run=run, rank=rank, at_s=begin_s))
            for number in (1, 2):
                at_s = begin_s + 10 * number + rank
                file.append(stamped(Fault(what=f"{run} {number}"), number, run=run, rank=rank, at_s=at_s))
            file.close()
    read = read_events(tmp_path)
    assert [(entry.event.name, entry.stamp.rank) for entry in read[:2]] == [("run_started", 0), ("run_started", 1)]
    assert [(entry.event, entry.stamp.rank) for entry in read[2:]] == [
        (Fault(what="new 1"), 0),
        (Fault(what="new 1"), 1),
        (Fault(what="new 2"), 0),
        (Fault(what="new 2"), 1),
    ]


def test_files_are_bounded_and_each_tells_whose_it_is(tmp_path: Path) -> None:
    limit = 2000
    file = EventFile(tmp_path, stamped(START), max_nbytes=limit, max_old_files=2)
    for number in range(1, 200):
        file.append(stamped(Fault(what=f"fault {number}"), number, at_s=number))
    file.close()
    paths = sorted(tmp_path.iterdir())
    assert paths == sorted(event_path(tmp_path, 0, age) for age in range(3))
    for path in paths:
        assert path.stat().st_size <= limit
        assert decode(path.read_text().split("\n")[0]).event == START
    read = [entry.stamp.sequence for entry in read_events(tmp_path)]
    assert read == [0, *range(read[1], 200)]
    assert len(read) > 15


def test_a_killed_process_leaves_a_log_that_can_be_read_and_continued(tmp_path: Path) -> None:
    program = (
        "import sys; sys.path[:0] = [sys.argv[2]]; from test_events import *\n"
        "file = EventFile(sys.argv[1], stamped(START))\n"
        "for number in range(1, 50): file.append(stamped(Fault(what='x' * 100), number, at_s=number))\n"
        'import os; os.write(file._descriptor, b\'{"run":"run","ra\'); print(\'ready\', flush=True); input()'
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, tmp_path, Path(__file__).parent],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGKILL)
    assert event_path(tmp_path, 0).read_text().endswith('"ra')
    assert [entry.stamp.sequence for entry in read_events(tmp_path)] == list(range(50))
    file = EventFile(tmp_path, stamped(START, run="next", at_s=1e9))
    file.close()
    assert [entry.stamp.run for entry in read_events(tmp_path)] == ["next"]
    assert len(event_path(tmp_path, 0).read_text().splitlines()) == 51


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    EventFile(tmp_path, stamped(START)).close()
    with event_path(tmp_path, 0).open("a") as file:
        file.write("{}\n" + encode(stamped(START)) + "\n")
    with pytest.raises(EventLogError, match="line 2: event None"):
        read_events(tmp_path)


def test_no_log_is_an_empty_one(tmp_path: Path) -> None:
    assert read_events(tmp_path) == []


def test_a_directory_that_cannot_be_written_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING, logger="adaptra_megatron"):
        log = EventLog(tmp_path / "file", START, run="a", rank=0)
        for _ in range(10):
            log.log(Fault(what="x"))
        log.close()
    assert len(caplog.records) == 1
    assert "no more events of rank 0" in caplog.text
