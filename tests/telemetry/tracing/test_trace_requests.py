# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
from pathlib import Path

import pytest

from adaptra_megatron.telemetry.action_records import ActionRecord, Iterations
from adaptra_megatron.telemetry.trace import TraceWriter, read_traces
from adaptra_megatron.telemetry.trace_requests import (
    MOST_PER_REQUEST,
    RequestBox,
    RequestedTraces,
    RequestError,
    parse_request,
    request_directory,
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("120", (120, 120)),
        ("120-125", (120, 125)),
        ("next", (12, 12)),
        ("next-5", (12, 16)),
        ("next-0", (12, 12)),
        ("last", (9, 9)),
        ("last-5", (5, 9)),
        ("last-50", (1, 9)),
        ("1-999999999", (1, MOST_PER_REQUEST)),
        ("next-999999999", (12, 11 + MOST_PER_REQUEST)),
    ],
)
def test_names_of_requests(name: str, expected: tuple[int, int]) -> None:
    assert parse_request(name, running=10) == Iterations(*expected)


@pytest.mark.parametrize("name", ["", "soon", "0", "0-3", "5-", "-5", "7-5", "next-", "1-2-3", ".nfs0001", "1" * 30])
def test_what_names_no_iterations_is_refused(name: str) -> None:
    with pytest.raises(RequestError):
        parse_request(name, running=10)


def test_the_box_takes_each_request_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    box = RequestBox(tmp_path / "traces")
    assert box.take(10) == ()
    for name in ("next-2", "30", "soon"):
        (request_directory(tmp_path / "traces") / name).touch()
    with caplog.at_level(logging.WARNING, logger="adaptra_megatron"):
        assert box.take(10) == (Iterations(30, 30), Iterations(12, 13))
        assert box.take(11) == ()
    assert len(caplog.records) == 1
    assert "'soon' names no iterations" in caplog.text
    assert [path.name for path in request_directory(tmp_path / "traces").iterdir()] == ["soon"]


def test_a_box_that_cannot_be_made_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING, logger="adaptra_megatron"):
        assert RequestBox(tmp_path / "file").take(0) == ()
    assert "no traces on demand" in caplog.text


EVALUATION = 6
"""Shares the number of the training iteration before it."""


def written_iterations(directory: Path, requests: dict[int, list[Iterations]], iterations: int) -> list[int]:
    """Iterations in the trace of a rank to which `requests` came before the given ones; Megatron's begin at 101."""
    traces = RequestedTraces(TraceWriter(directory, rank=0, stage=0), kept_iterations=4)
    for iteration in range(iterations):
        traces.request(requests.get(iteration, []))
        step = 101 + iteration - (iteration >= EVALUATION)
        traces.add(iteration, step, [ActionRecord(iteration, 0, "F", 0, 0, 0.0, 0.0, 1.0)])
    traces.close()
    (trace,) = read_traces(directory)
    return [record.iteration for record in trace.records]


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        ({}, []),
        ({5: [Iterations(107, 108)]}, [7, 8]),
        ({5: [Iterations(104, 105)]}, [3, 4]),
        ({5: [Iterations(104, 106)]}, [3, 4, 5, 6]),
        ({8: [Iterations(101, 105)]}, [4]),
        ({5: [Iterations(107, 109), Iterations(108, 110)]}, [7, 8, 9, 10]),
        ({5: [Iterations(105, 105)], 6: [Iterations(105, 106)]}, [4, 5, 6]),
        ({3: [Iterations(109, 109)], 9: [Iterations(107, 108)]}, [7, 8, 9]),
        ({3: [Iterations(7, 9)]}, []),
    ],
)
def test_what_was_asked_for_is_written_once(
    tmp_path: Path, requests: dict[int, list[Iterations]], expected: list[int]
) -> None:
    assert written_iterations(tmp_path, requests, iterations=12) == expected
