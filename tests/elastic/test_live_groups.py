# SPDX-License-Identifier: Apache-2.0
"""Ranks die at every kind of moment between calls and in them; all others come to what they would have come to."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from testing.jobs.fault_tolerant_jobs import Host, run_with_failures
from testing.jobs.fork_server import ForkServer

RANKS = str(Path(__file__).with_name("group_ranks.py"))
LANES = str(Path(__file__).with_name("lane_ranks.py"))
REPLICAS, STAGES, MOMENTS = 3, 2, 60
"""Moments: more than a rank has in a run without deaths."""
ENDS_S = 10.0
"""From the first end to the last, of a job that cannot go on."""


def run(directory: Path, server: ForkServer, *deaths: str) -> dict[int, Any]:
    """What each rank that lives has come to."""
    argv = [RANKS, str(REPLICAS), str(STAGES), *deaths]
    results = run_with_failures(REPLICAS * STAGES, argv, timeout_s=40, server=server, log_directory=directory)
    found = {}
    for result in results:
        assert result.returncode in (0, -9), result.output
        if result.returncode == 0:
            (line,) = (line for line in result.output.splitlines() if line.startswith("RESULT "))
            found[result.rank] = json.loads(line.removeprefix("RESULT "))
    return found


@pytest.fixture(scope="module")
def peace(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> dict[int, Any]:
    """What ranks come to if none dies."""
    return run(tmp_path_factory.mktemp("peace"), fork_server)


class TimedHost(Host):
    """Knows when ranks have ended."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self.ended_s: list[float] = []

    def ended(self, rank: int, status: int) -> None:
        super().ended(rank, status)
        self.ended_s.append(time.monotonic())

    def assert_prompt(self) -> None:
        """All have ended soon after the first."""
        assert self.ended_s[-1] - self.ended_s[0] < ENDS_S


def check(found: dict[int, Any], peace: dict[int, Any], dead: set[int]) -> None:
    assert set(found) == set(peace) - dead
    for rank, each in found.items():
        assert each["weight"] == pytest.approx(peace[rank]["weight"], rel=1e-12)
        assert each["seen"] == [pytest.approx(row, rel=1e-12) for row in peace[rank]["seen"]]
        assert each["epochs"] >= 1
        assert each["whole"] is False
        assert peace[rank]["whole"] is True
        assert each["last"] == max(other for other in found if found[other]["stage"] == STAGES - 1)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("moment", [0, 7, 12, 15, 22])
def test_one_rank_dies(moment: int, peace: dict[int, Any], tmp_path: Path, fork_server: ForkServer) -> None:
    rank = moment % (REPLICAS * STAGES)
    check(run(tmp_path, fork_server, f"{rank}:{moment}"), peace, {rank})


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "deaths", [("0:14", "5:14"), ("1:6", "4:30"), ("0:9", "2:9")], ids=["at-once", "in-turn", "stage-left-to-one"]
)
def test_two_ranks_die(deaths: tuple[str, ...], peace: dict[int, Any], tmp_path: Path, fork_server: ForkServer) -> None:
    check(run(tmp_path, fork_server, *deaths), peace, {int(death.split(":")[0]) for death in deaths})


@pytest.mark.timeout(90)
def test_a_stage_without_a_live_cell_ends_the_job(tmp_path: Path, fork_server: ForkServer) -> None:
    argv, host = [RANKS, "2", "2", "0:5", "1:5"], TimedHost(4)
    results = run_with_failures(4, argv, timeout_s=30, server=fork_server, log_directory=tmp_path, host=host)
    assert [result.returncode for result in results] == [-9, -9, 1, 1]
    host.assert_prompt()
    for result in results[2:]:
        assert "all 2 cells of stage 0 are dead" in result.output
        assert "restart from the last checkpoint" in result.output


@pytest.mark.timeout(90)
@pytest.mark.parametrize("moment", [0, 9], ids=["in-a-call", "outside"])
def test_an_error_of_a_rank_is_no_death(moment: int, tmp_path: Path, fork_server: ForkServer) -> None:
    """The job ends with it, at once, and each rank says whose it was."""
    argv, host = [RANKS, "2", "2", f"1:{moment}:error"], TimedHost(4)
    results = run_with_failures(4, argv, timeout_s=30, server=fork_server, log_directory=tmp_path, host=host)
    assert [result.returncode for result in results] == [1] * 4
    host.assert_prompt()
    for result in results:
        assert "ValueError: a matrix is singular" in result.output
        says = "this job ends with an error of rank 1 (stage 0 on host): ValueError: a matrix is singular"
        assert (says in result.output) == (result.rank != 1)


@pytest.mark.timeout(60)
def test_a_rank_without_the_rest_of_its_cell_ends_and_says_no_end_of_the_training(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    results = run_with_failures(4, [LANES], timeout_s=40, server=fork_server, log_directory=tmp_path)
    assert [result.returncode for result in results] == [-9, 1, 0, 0], results
    assert "its cell has lost a rank (rank 0" in results[1].output
    assert all("has come to the end" in result.output for result in results[2:])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_deaths(peace: dict[int, Any], tmp_path: Path, fork_server: ForkServer) -> None:
    """Up to two deaths of ranks that leave one of each stage, at any moment."""
    chosen = random.Random(1)
    for number in range(200):
        ranks = chosen.sample(range(REPLICAS * STAGES), chosen.randint(1, 2))
        deaths = [f"{rank}:{chosen.randrange(MOMENTS)}" for rank in ranks]
        found = run(tmp_path / str(number), fork_server, *deaths)
        died = set(peace) - set(found)
        assert died <= set(ranks), deaths
        if died:
            check(found, peace, died)
