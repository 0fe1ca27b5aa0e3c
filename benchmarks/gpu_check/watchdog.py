# SPDX-License-Identifier: Apache-2.0
"""Runs each check in processes of its own, which are killed when their time is over."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from adaptra_megatron.tools.local_ranks.launch_ranks import LaunchError, RankResult, run_ranks
from gpu_check.findings import NOT_OK, NOT_RUN, OK, Finding, Report

BENCHMARKS = Path(__file__).parents[1]


@dataclass(frozen=True)
class Check:
    """A module with a function `run(machine, report, *arguments)`, which all its ranks call."""

    name: str
    promise: str
    """What the whole check promises: for the table where the check says nothing itself."""
    module: str
    machine: str
    """`MODULE:NAME` of what is called in each rank, without arguments, for what `run` gets first."""
    limit_s: float
    arguments: tuple[str, ...] = ()
    ranks: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    ends_within_s: float | None = None
    """Ranks are to fail, and all of them to have ended so long after the last line of the report. None: to exit with 0.
    """
    needs: tuple[str, ...] = ()
    """Names of what the machine may lack."""


def watch(check: Check, directory: Path) -> tuple[list[Finding], str]:
    """Run a check. Returns its findings, and what the logs say where its processes crashed or hung, stacks included.

    `directory`: of this check alone.
    """
    directory.mkdir(parents=True)
    report = Report(directory / "report", check.name)
    program = ["-m", "gpu_check.child", str(directory / "report"), check.name, check.module, check.machine]
    paths = (str(BENCHMARKS), check.environment.get("PYTHONPATH"), os.environ.get("PYTHONPATH"))
    failure: LaunchError | None = None
    begun_s = time.monotonic()
    try:
        run_ranks(
            check.ranks,
            [*program, *check.arguments],
            timeout_s=check.limit_s,
            env={**check.environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            log_directory=directory,
            stop_on_failure=check.ends_within_s is None,
        )
    except LaunchError as error:
        failure = error
    ended_s = time.monotonic()
    found = report.read()
    results = failure.results if failure is not None else []
    killed = any(result.returncode == -signal.SIGKILL for result in results)
    if check.ends_within_s is not None and results and not killed and all(result.returncode for result in results):
        seconds = ended_s - found.last_s
        verdict = OK if seconds <= check.ends_within_s else NOT_OK
        found.findings.append(Finding(check.name, check.promise, f"all had ended {seconds:.1f} s later", verdict))
        return found.findings, ""
    if failure is not None:
        seen = f"after {ended_s - begun_s:.0f} s: {', '.join(map(_ending, results))}"
        found.findings.append(Finding(check.name, found.begun or check.promise, seen, NOT_OK))
    elif check.ends_within_s is not None or not found.findings:
        seen = "nothing was reported" if check.ends_within_s is None else "all ended as if nothing had failed"
        found.findings.append(Finding(check.name, check.promise, seen, NOT_OK))
    return found.findings, str(failure or "")


def left_out(check: Check, reason: str) -> list[Finding]:
    """The findings of a check that cannot be run here."""
    return [Finding(check.name, check.promise, reason, NOT_RUN)]


def _ending(result: RankResult) -> str:
    if result.returncode == -signal.SIGKILL:
        return f"rank {result.rank} killed"
    if result.returncode < 0:
        return f"rank {result.rank} died of {signal.Signals(-result.returncode).name}"
    said = result.output.strip().splitlines()[-1:] if result.returncode else []
    return f"rank {result.rank} exited with {result.returncode}{''.join(f' ({line[:200]})' for line in said)}"
