# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.processes import LaunchError, run_ranks

from adaptra_megatron.tools.local_ranks.launch_ranks import rank_environment
from testing.jobs.fork_server import ForkServer
from testing.waiting import until

PROGRAM = """
import os, subprocess, sys, time
rank, what = int(os.environ["RANK"]), sys.argv[1]
print("rank", rank, "of", os.environ["WORLD_SIZE"], "runs", os.getpid(), flush=True)
if what == "slowly":
    for part in ("half ", "a line", "\\n", "\\nno end"):
        print(part, end="", flush=True)
        time.sleep(0.2)
if what == "child":
    print("child", subprocess.Popen(["sleep", "300"]).pid, flush=True)
if rank == 0:
    if what == "exit":
        sys.exit(7)
    if what == "raise":
        raise ValueError("no such thing")
    if what == "kill":
        os.kill(os.getpid(), 9)
if what not in ("pass", "slowly"):
    time.sleep(300)
"""


@pytest.fixture(params=["forked", "started"])
def server(request: pytest.FixtureRequest) -> ForkServer | None:
    return request.getfixturevalue("fork_server") if request.param == "forked" else None


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def until_gone(pids: list[int]) -> None:
    until(lambda: not any(map(is_running, pids)), lambda: f"still running: {list(filter(is_running, pids))}", 10)


def test_all_ranks_run(server: ForkServer | None, program: str, tmp_path: Path) -> None:
    lines: list[str] = []
    results = run_ranks(3, [program, "pass"], timeout_s=30, server=server, log_directory=tmp_path, echo=lines.append)
    assert [result.returncode for result in results] == [0, 0, 0]
    for rank, result in enumerate(results):
        assert f"rank {rank} of 3 runs" in result.output
    assert "\n".join(lines) == results[2].output.rstrip("\n")


def test_only_whole_lines_are_echoed(server: ForkServer | None, program: str, tmp_path: Path) -> None:
    lines: list[str] = []
    run_ranks(1, [program, "slowly"], timeout_s=30, server=server, log_directory=tmp_path, echo=lines.append)
    assert lines[1:] == ["half a line", "", "no end"]


def test_a_process_number_that_is_used_again_is_another_process(
    fork_server: ForkServer, program: str, tmp_path: Path
) -> None:
    most = int(Path("/proc/sys/kernel/pid_max").read_text())
    fork_server._returncodes.update(dict.fromkeys(range(most), 0))  # as after many ranks
    results = run_ranks(1, [program, "exit"], timeout_s=30, server=fork_server, log_directory=tmp_path, check=False)
    fork_server._returncodes.clear()
    assert [result.returncode for result in results] == [7]
    assert "rank 0 of 1 runs" in results[0].output


@pytest.mark.parametrize(
    ("what", "returncode", "shown"), [("exit", 7, ""), ("raise", 1, "ValueError: no such thing"), ("kill", -9, "")]
)
def test_failing_rank_ends_the_job_at_once(
    server: ForkServer | None, program: str, tmp_path: Path, what: str, returncode: int, shown: str
) -> None:
    started = time.monotonic()
    with pytest.raises(LaunchError, match="rank 0 failed first") as caught:
        run_ranks(2, [program, what], timeout_s=60, server=server, log_directory=tmp_path)
    assert time.monotonic() - started < 20
    assert [result.returncode for result in caught.value.results] == [returncode, -signal.SIGKILL]
    assert shown in str(caught.value)


def test_hanging_ranks_show_their_stacks(server: ForkServer | None, program: str, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"ranks \[0, 1\] still ran after 8 s") as caught:
        run_ranks(2, [program, "hang"], timeout_s=8, server=server, log_directory=tmp_path)
    assert len(re.findall(r'program.py", line \d+ in <module>', str(caught.value))) == 2


def test_what_ranks_started_is_killed_too(server: ForkServer | None, program: str, tmp_path: Path) -> None:
    with pytest.raises(LaunchError) as caught:
        run_ranks(1, [program, "child"], timeout_s=2, server=server, log_directory=tmp_path)
    output = caught.value.results[0].output
    until_gone([int(line.split()[1]) for line in output.splitlines() if line.startswith("child")])


def test_failures_can_be_looked_at_instead(server: ForkServer | None, program: str, tmp_path: Path) -> None:
    results = run_ranks(1, [program, "exit"], timeout_s=30, server=server, log_directory=tmp_path, check=False)
    assert results[0].returncode == 7


@pytest.mark.parametrize(("option", "what"), [([], "child"), (["--no-preload"], "hang")], ids=["forked", "started"])
def test_ranks_die_with_a_killed_launcher(program: str, tmp_path: Path, option: list[str], what: str) -> None:
    """Forked ones take along what they have started."""
    launcher = subprocess.Popen(
        [sys.executable, "-m", "testing.jobs.launch_command", "--nproc", "2", "--log-dir", str(tmp_path)]
        + [*option, program, what],
        env=rank_environment({}),
    )
    logs = [tmp_path / "rank0.log", tmp_path / "rank1.log"]
    word = "child" if what == "child" else "runs"
    until(lambda: all(log.exists() and word in log.read_text() for log in logs), "the ranks did not start", 60)
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait(timeout=10)
    until_gone([int(pid) for log in logs for pid in re.findall(r"(?:runs|child) (\d+)\n", log.read_text())])
