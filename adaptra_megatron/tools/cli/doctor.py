# SPDX-License-Identifier: Apache-2.0
"""Define `adaptra doctor`: what this host supports, and how two of its processes exchange messages."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from adaptra_megatron import __version__
from adaptra_megatron.tools.host_checks.devices import check_gpus, check_rnics, find_interfaces
from adaptra_megatron.tools.host_checks.host_findings import HostFinding, HostLevel, Roots
from adaptra_megatron.tools.host_checks.software import (
    check_native_modules,
    check_patches,
    check_refusals,
    check_versions,
)
from adaptra_megatron.tools.host_checks.transport_checks import (
    USABLE,
    check_limits,
    check_shm,
    check_tcp,
    check_verbs,
    limits_of_this_process,
)
from adaptra_megatron.tools.local_ranks.launch_ranks import LaunchError, run_ranks
from adaptra_megatron.transport.host_settings import HostSettings

DEADLINE_S = 120.0
"""Time limit for all transports together, with the start of the processes, which may read torch from a network."""
_RANK_MODULE = "adaptra_megatron.tools.local_ranks.self_test_rank"
_LEAST_S = 2.0
"""Minimum seconds left for a check to start."""


def run_self_test(transports: Sequence[str], deadline_s: float = DEADLINE_S) -> list[HostFinding]:
    """Return one finding per transport, within about `deadline_s` seconds (the launcher takes up to 5 s to end its
    ranks)."""
    until_s = time.monotonic() + deadline_s
    found: dict[str, HostFinding] = {}
    while waiting := [name for name in transports if name not in found]:
        left_s = until_s - time.monotonic()
        if left_s < _LEAST_S:
            late = {name: _failed(name, f"not run: {deadline_s:g} s were over before its turn") for name in waiting}
            found |= late
            break
        outcomes, cause = _run_ranks(waiting, left_s)
        found |= {outcome["transport"]: _passed(outcome) for outcome in outcomes}
        if cause is not None and len(outcomes) < len(waiting):
            failed = waiting[len(outcomes)]  # they run one after the other; the rest gets another pair of processes
            found[failed] = _failed(failed, cause)
    return [found[name] for name in transports]


def _run_ranks(transports: Sequence[str], timeout_s: float) -> tuple[list[dict[str, Any]], str | None]:
    """Run a pair of processes; return their measurements, and the failure that ended them, if any."""
    with tempfile.TemporaryDirectory(prefix="adaptra-doctor-") as directory:
        results = Path(directory) / "results"
        results.touch()
        argv = ["-m", _RANK_MODULE, str(results), *transports]
        cause = None
        try:
            run_ranks(2, argv, timeout_s=timeout_s, log_directory=Path(directory) / "logs")
        except LaunchError as error:
            cause = _last_output(error, timeout_s)
        outcomes = [json.loads(line) for line in results.read_text().splitlines()]
    if cause is None and len(outcomes) < len(transports):
        cause = "the processes ended without a result"
    return outcomes, cause


def _last_output(error: LaunchError, timeout_s: float) -> str:
    """Return the last line of each rank that failed by itself: Python's exception. Without ranks, the error."""
    if not error.results:
        return str(error)
    said = []
    for result in error.results:
        if result.returncode > 0:
            lines = [line for line in result.output.splitlines() if line.strip()] or ["nothing"]
            said.append(f"process {result.rank} says {lines[-1].removeprefix(f'[rank{result.rank}]:').strip()}")
    return "; ".join(said) or f"it was not over within {timeout_s:.0f} s"


def _passed(outcome: dict[str, Any]) -> HostFinding:
    text = (
        f"two processes exchange tensors of {outcome['message_mib']} MiB at {outcome['gib_per_s']:.2f} GiB/s, "
        f"4 KiB there and back in {outcome['round_trip_us']:.0f} us"
    )
    return HostFinding(subject=outcome["transport"], level=HostLevel.OK, text=text, details=outcome)


def _failed(transport: str, cause: str) -> HostFinding:
    return HostFinding(
        subject=transport,
        level=HostLevel.PROBLEM,
        text=f"two processes of this host could not exchange tensors: {cause}",
        remedy="see transports above; docs/messages.md explains the error messages",
        details={"cause": cause},
    )


Report = dict[str, list[HostFinding]]
"""Findings by section."""
_STYLES = {HostLevel.OK: "green", HostLevel.NOTE: "yellow", HostLevel.PROBLEM: "bold red"}
_WIDEST = 120


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `doctor` to the commands of `adaptra`."""
    parser = commands.add_parser(
        "doctor",
        help="check what this host supports, and what is missing",
        description="Check what this host supports: RNICs, GPUs, transports, limits, versions, patches. "
        "Exit status 1 if --adaptra cannot work here.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--self-test",
        action="store_true",
        help=f"also exchange tensors between two processes over each usable transport ({DEADLINE_S:g} s at most)",
    )
    parser.set_defaults(run=_run)


def examine(roots: Roots, environment: Mapping[str, str], *, self_test: bool) -> Report:
    """Run all checks on this host; only the trees named by `roots` may be made up."""
    transports = [check_shm(), check_tcp(find_interfaces(roots), environment), check_verbs(roots)]
    report = {
        "RNICs": check_rnics(roots),
        "GPUs": check_gpus(roots, environment),
        "transports": transports,
        "limits": check_limits(roots, limits_of_this_process(roots), HostSettings()),
        "versions": check_versions(roots),
        "native modules": check_native_modules(),
        "patches": [*check_patches(), *check_refusals()],
    }
    if self_test:
        usable = [finding.subject for finding in transports if finding.details.get(USABLE)]
        report["self-test"] = run_self_test(usable)
    return report


def works(report: Report) -> bool:
    """Return whether --adaptra can work on this host."""
    return not any(finding.fatal for findings in report.values() for finding in findings)


def _run(options: argparse.Namespace) -> int:
    report = examine(Roots(), os.environ, self_test=options.self_test)
    (print_json if options.json else print_text)(report)
    return 0 if works(report) else 1


def print_json(report: Report) -> None:
    """Print one JSON object on one line. Its keys are an interface: add, never rename."""
    findings = [{"section": section, **asdict(finding)} for section, found in report.items() for finding in found]
    document = {"version": __version__, "host": platform.node(), "works": works(report), "findings": findings}
    print(json.dumps(document, allow_nan=False))


def print_text(report: Report) -> None:
    """Print a paragraph per section, a line or two per finding, and a summary."""
    show = _writer()
    show(f"adaptra {__version__} on {platform.node()}", "bold")
    width = min(shutil.get_terminal_size((_WIDEST, 24)).columns, _WIDEST)
    for section, findings in report.items():
        show(f"\n{section}", "bold")
        for finding in findings:
            _show_finding(finding, width, show)
    show("\n" + _summary(report), "bold")


def _show_finding(finding: HostFinding, width: int, show: Callable[[str, str], None]) -> None:
    indent = " " * 10
    lines = [f"{finding.subject}: {finding.text}", *([f"-> {finding.remedy}"] if finding.remedy else [])]
    wrapped = [
        textwrap.fill(line, width, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False)
        for line in lines
    ]
    level = finding.level
    show(f"  {level.value:8}" + "\n".join(wrapped)[len(indent) :], _STYLES[level] if level is not HostLevel.OK else "")


def _summary(report: Report) -> str:
    levels = [finding.level for findings in report.values() for finding in findings]
    counts = f"problems: {levels.count(HostLevel.PROBLEM)}, notes: {levels.count(HostLevel.NOTE)}"
    if works(report):
        return f"--adaptra can run here; {counts}"
    blocking = [finding.subject for findings in report.values() for finding in findings if finding.fatal]
    return f"--adaptra cannot run here before this is remedied: {', '.join(dict.fromkeys(blocking))}; {counts}"


def _writer() -> Callable[[str, str], None]:
    """Return a function that prints text in a style, if rich is installed and the terminal has colours."""
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        return lambda text, style: print(text)
    console = Console(highlight=False, soft_wrap=True)
    return lambda text, style: console.print(Text(text, style=style))
