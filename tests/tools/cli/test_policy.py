# SPDX-License-Identifier: Apache-2.0
"""`adaptra policy`, with a stand-in of the job; what the job takes for a request, and what it refuses."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

import pytest
from support.made_up.runs import write_events

from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.engine.pipeline import accepted
from adaptra_megatron.telemetry.events import Event, IterationsTimed, PlanSwitched, PolicyChanged
from adaptra_megatron.telemetry.trace_requests import policy_file, take_policy
from adaptra_megatron.tools.cli.main import main

BEFORE: list[tuple[Event, int]] = [
    (IterationsTimed(first=0, seconds=[1.0] * 9, step=101), 9),
    (PolicyChanged(number=1, before="adapt", after="observe"), 4),
    (PlanSwitched(number=1, before=0), 6),
    (PolicyChanged(number=2, before="observe", after="adapt"), 7),
    (PlanSwitched(number=2, before=1), 8),
]


def test_a_job_is_asked_and_its_answer_is_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_events(tmp_path, BEFORE, ended=False)
    taken: list[str] = []

    def job() -> None:
        while not taken:
            time.sleep(0.01)
            taken.extend(filter(None, [take_policy(tmp_path)]))
        more = [(PolicyChanged(number=3, before="adapt", after="off"), 20), (PlanSwitched(number=3, before=2), 22)]
        write_events(tmp_path / "new", [*BEFORE, *more], ended=False)
        (tmp_path / "new" / "events-00000.jsonl").replace(tmp_path / "events-00000.jsonl")

    running = threading.Thread(target=job)
    running.start()
    assert main(["policy", str(tmp_path), "off"]) == 0
    running.join()
    assert taken == ["off"]
    assert capsys.readouterr().out == "policy off from iteration 123 on\n"


def test_where_no_job_reads_it_the_request_is_taken_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", str(tmp_path), "off"]) == 2
    assert "name the --adaptra-trace-dir of a job" in capsys.readouterr().err
    write_events(tmp_path, BEFORE)
    assert main(["policy", str(tmp_path), "observe", "--timeout-s", "0.3"]) == 2
    assert "no job has read" in capsys.readouterr().err
    assert not policy_file(tmp_path).exists()
    with pytest.raises(SystemExit, match="2"):
        main(["policy", str(tmp_path), "faster"])


def test_a_job_takes_each_request_once_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert take_policy(tmp_path) == ""
    policy_file(tmp_path).write_text("observe\n")
    assert [take_policy(tmp_path), take_policy(tmp_path)] == ["observe", ""]
    with caplog.at_level(logging.WARNING, logger="adaptra_megatron"):
        policy_file(tmp_path).write_bytes(b"\xff" * (1 << 20))
        assert take_policy(tmp_path) == ""
    (line,) = caplog.messages
    assert "none of adapt, observe, off" in line
    assert len(line) < 1000
    os.mkfifo(policy_file(tmp_path))
    assert take_policy(tmp_path) == "", "it is not waited for"


@pytest.mark.parametrize(
    ("policy", "config", "why"),
    [
        ("", AdaptraConfig(), None),
        ("off", AdaptraConfig(), None),
        ("observe", AdaptraConfig(reroute="failures"), None),
        ("off", AdaptraConfig(reroute="failures"), "--adaptra-reroute failures"),
        ("observe", AdaptraConfig(reroute="stragglers"), "--adaptra-reroute stragglers"),
        ("observe", AdaptraConfig(staggered_optimizer=True), "--adaptra-staggered-optimizer"),
        ("adapt", AdaptraConfig(policy="observe"), "--adaptra-policy observe"),
    ],
)
def test_what_cannot_be_had_while_a_job_runs_is_refused_in_its_log(
    policy: str, config: AdaptraConfig, why: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="adaptra_megatron"):
        assert accepted(policy, config) == ("" if why else policy)
    assert len(caplog.messages) == bool(why)
    assert all(why is not None and why in line and "restart" in line for line in caplog.messages)
