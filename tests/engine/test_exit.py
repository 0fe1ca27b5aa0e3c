# SPDX-License-Identifier: Apache-2.0
"""Jobs end cleanly though nothing is undone: threads that wait in native code must not meet a dying interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes import TRAIN_GPT, RankResult, run_ranks

from adaptra_megatron.telemetry.event_log import read_events
from adaptra_megatron.telemetry.events import RunEnded
from adaptra_megatron.tools.local_ranks.launch_ranks import free_port
from testing.jobs.fault_tolerant_jobs import run_with_failures
from testing.jobs.fork_server import ForkServer

SCRIPT = str(Path(__file__).with_name("never_undone.py"))
RAISING = str(Path(__file__).with_name("raising_action.py"))
FORKING = str(Path(__file__).with_name("forking_rank.py"))
SOON_S = 10.0


@pytest.mark.timeout(90)
def test_job_ends_cleanly_without_undo(tmp_path: Path) -> None:
    arguments = (
        "--emulate-cpu --mock-data --pipeline-model-parallel-size 2 --num-layers 2 --train-iters 5 "
        "--global-batch-size 4 --no-gradient-accumulation-fusion --adaptra"
    )
    # Not forked from the server: how a plain interpreter shuts down is what counts here.
    results = run_ranks(2, [SCRIPT, TRAIN_GPT, *arguments.split()], timeout_s=80, log_directory=tmp_path)
    for result in results:
        assert result.returncode == 0, result.output
        assert "terminate called" not in result.output
    assert "iteration        5/" in results[1].output


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("rank", "action", "sizes", "flags"),
    [
        (0, 0, "pp 4", ""),
        (2, 11, "pp 4", "--adaptra-host-transport off"),
        (1, 40, "pp 2 dp 2", ""),
    ],
)
def test_an_error_in_one_rank_ends_all_soon(
    rank: int, action: int, sizes: str, flags: str, tmp_path: Path, start_ranks: Callable[..., list[RankResult]]
) -> None:
    stages, micro_batches = int(sizes.split()[1]), 8
    arguments = (
        f"--mock-data --pipeline-model-parallel-size {stages} --num-layers {stages} --train-iters 9 "
        f"--global-batch-size {micro_batches * 4 // stages} --no-gradient-accumulation-fusion --adaptra {flags}"
    )
    program = [RAISING, str(rank), str(action), *arguments.split()]
    # Where rank 0 raises, the job's store goes with it.
    env = {"MASTER_PORT": str(free_port())} if rank == 0 else {}
    results = start_ranks(4, program, timeout_s=60, env=env, check=False, stop_on_failure=False)
    ended_s = time.monotonic()
    (raised,) = re.findall(r"^raised at (.*)$", results[rank].output, re.MULTILINE)
    assert ended_s - float(raised) < SOON_S
    for result in results:
        assert result.returncode > 0, f"rank {result.rank} ended with {result.returncode}: {result.output}"
        assert "[c10d]" not in result.output, result.output
    assert "ArithmeticError: as a model's own code would" in results[rank].output


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("launcher", "named"),
    [
        ("torch.distributed.run", r"Root Cause \(first observed failure\):(?s:.*)rank +: 1 "),
        ("adaptra_megatron.tools.cli", r"rank 1 on host \S+ was the first to end: it ended with exit status 1"),
    ],
    ids=["torchrun", "adaptra-launch"],
)
def test_who_fails_is_seen_though_it_cleans_up_first(launcher: str, named: str, tmp_path: Path) -> None:
    """The training takes its patches back, and more, while the error goes up through it; and launchers end all others
    as soon as one has ended."""
    arguments = (
        "--mock-data --pipeline-model-parallel-size 2 --num-layers 2 --train-iters 9 --global-batch-size 8 "
        "--no-gradient-accumulation-fusion --adaptra"
    )
    command = [sys.executable, "-m", launcher, *["launch"] * launcher.startswith("adaptra"), "--nproc-per-node", "4"]
    done = subprocess.run(
        [*command, RAISING, "1", "2", *arguments.split()],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CLEANS_UP_S": "1", "CLEANS_UP_UNTIL": "3"},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150.0,
    )
    assert done.returncode == 1, done.stdout
    name = r"rank 1 \(stage 0 on \S+\)"
    for shown in (
        rf"{name}: this error was raised here(?s:.)*?raising_action.py\", line \d+, in raise_in_time",
        rf"rank 3 \(stage 1 on \S+\): this job ends with an error of {name}: ArithmeticError: as a model",
        named,
    ):
        assert re.search(shown, done.stdout), done.stdout


@pytest.mark.timeout(120)
@pytest.mark.parametrize("function", ["forward_step", "loss", "data"])
def test_an_error_of_the_script_is_no_death(function: str, tmp_path: Path, fork_server: ForkServer) -> None:
    """Though it reads like one: the job ends at once, and every rank names the one at fault."""
    arguments = (
        "--mock-data --pipeline-model-parallel-size 2 --num-layers 2 --train-iters 5 --global-batch-size 4 "
        "--no-gradient-accumulation-fusion --adaptra --adaptra-reroute failures"
    )
    argv = [RAISING, "3", function, *arguments.split()]
    results = run_with_failures(4, argv, timeout_s=100, server=fork_server, log_directory=tmp_path)
    error = "DistNetworkError: data server: connection refused, or timed out"
    for result in results:
        assert result.returncode == 1, result.output
        last = result.output.strip().splitlines()[-1]
        assert last.endswith(error), last
        assert (result.rank == 3) != ("this job ends with an error of rank 3 (stage 1 on " in last)
    assert "this error was raised here" in results[3].output
    assert "in refused" in results[3].output


@pytest.mark.timeout(120)
@pytest.mark.parametrize("path", ["device", "host"])
def test_a_forked_child_leaves_all_to_its_parent(path: str, tmp_path: Path) -> None:
    arguments = (
        "--mock-data --pipeline-model-parallel-size 2 --num-layers 2 --train-iters 5 --global-batch-size 4 "
        f"--no-gradient-accumulation-fusion --adaptra --adaptra-path {path} --adaptra-trace-dir {tmp_path}/run"
    )
    # Not forked from the server: how a plain interpreter shuts down is what counts here.
    results = run_ranks(2, [FORKING, *arguments.split()], timeout_s=110, log_directory=tmp_path)
    for result in results:
        assert result.returncode == 0, result.output
        assert "terminate called" not in result.output
        assert result.output.count("forked workers gave their data") == 3
    for error in ("SystemExit", "ValueError"):
        assert f"a child ended that raised {error}" in results[0].output
    endings = [found.stamp.rank for found in read_events(tmp_path / "run") if isinstance(found.event, RunEnded)]
    assert sorted(endings) == [0, 1], "of the parents alone"
    assert all("trained 5 iterations" in result.output for result in results)
