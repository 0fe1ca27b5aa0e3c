# SPDX-License-Identifier: Apache-2.0
"""Training by a script that knows nothing of us: with the flag it runs on our executor, with the same numbers."""

from __future__ import annotations

from pathlib import Path

from support.processes import RankResult, compare_dumps, run_ranks
from support.start_up import STAND_IN, check_start_up_line

ITERATIONS = 3


def train(dump: Path, *flags: str, **how: bool) -> list[RankResult]:
    """On plain Python processes, as torchrun starts them; the flag is on their command line. `how`: for run_ranks."""
    check_start_up_line()
    command = [str(STAND_IN / "train.py"), "--train-iters", str(ITERATIONS), "--dump-state", str(dump), *flags]
    return run_ranks(2, command, timeout_s=140, log_directory=dump.with_suffix(".logs"), **how)


def test_the_flag_changes_who_runs_and_no_number(tmp_path: Path) -> None:
    for result in train(tmp_path / "stock"):
        assert "iterations run by adaptra: 0" in result.output
    for result in train(tmp_path / "ours", "--adaptra"):
        assert f"iterations run by adaptra: {ITERATIONS}" in result.output
    assert compare_dumps(tmp_path / "stock", tmp_path / "ours") > 10_000


def test_every_rank_refuses_what_its_parser_refuses(tmp_path: Path) -> None:
    flags = ("--adaptra", "--adaptra-timeout-s", "0")
    for result in train(tmp_path / "refused", *flags, check=False, stop_on_failure=False):
        assert result.returncode == 2
        assert "error: --adaptra-timeout-s is 0.0; it must be above 0" in result.output
