# SPDX-License-Identifier: Apache-2.0
"""The demonstration itself, as short as it can be."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from adaptra_megatron.telemetry.trace import read_traces


def start_demo(out: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "testing.demo.demo", "--out", str(out), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_interrupts,
    )


def heed_interrupts() -> None:
    """What a shell starts in the background ignores SIGINT, and so would all that tests start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def descendants(pid: int) -> list[int]:
    """All processes that `pid` started, and what those started."""
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [grandchild for child in children for grandchild in descendants(child)]


@pytest.mark.timeout(150)
def test_a_short_demonstration_holds(tmp_path: Path) -> None:
    process = start_demo(tmp_path, "--iterations", "4", "--micro-batches", "6")
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["losses_equal"] is True
    assert summary["iterations"] == 4
    for half in ("healthy_s", "slow_s"):
        assert summary["lower_bound"][half] < summary["adaptra"][half]
        assert summary["lower_bound"][half] < summary["stock"][half]
    assert Path(summary["png"]).read_bytes().startswith(b"\x89PNG")
    assert len(json.loads(Path(summary["trace"]).read_text())["traceEvents"]) > 1000
    assert sum(line.rstrip().endswith("same") for line in output.splitlines()) == 4
    for run, kinds in (("stock", {"F", "B"}), ("adaptra", {"F", "I", "W"})):
        for rank in read_traces(tmp_path / "traces" / run):
            assert kinds <= {record.kind for record in rank.records}
            assert {record.iteration for record in rank.records} == {0, 1, 2, 3}


@pytest.mark.timeout(120)
def test_interrupt_ends_every_rank(tmp_path: Path) -> None:
    process = start_demo(tmp_path)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "iteration   1/" in line:
                break
        started = descendants(process.pid)
        assert len(started) >= 5  # the fork server and four ranks
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the fork server gets it too
        _, errors = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "interrupted" in errors
    assert "Traceback" not in errors
    deadline_s = time.monotonic() + 10
    while (alive := [pid for pid in started if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert not alive
