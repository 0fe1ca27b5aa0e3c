# SPDX-License-Identifier: Apache-2.0
"""Runs one call of the checks and writes their table; scripts/gpu_check.sh says how, and what the exit status means."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from markdown_table import markdown_table

from gpu_check.building import (
    BUILD,
    KERNELS,
    REPOSITORY,
    BuildError,
    build_native,
    build_nccl,
    kernel_command,
    run_all,
)
from gpu_check.findings import NOT_OK, Finding, exit_status
from gpu_check.plan import KERNELS as KERNELS_NEEDED
from gpu_check.plan import MEGATRON, MSGSPEC, NATIVE, NCCL, first_call, second_call
from gpu_check.watchdog import Check, left_out, watch

CALL_S = 570.0
"""What one call may take; nothing is begun that might not end by then."""
BUILD_S = 240.0
LEAST_S = 5.0
"""Less makes no sense for any check."""
PROBE_S = 120.0
PROBE = """
import json, torch
name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
capability = "".join(map(str, torch.cuda.get_device_capability(0))) if name else ""
print(json.dumps([name, capability, torch.__version__, str(torch.version.cuda)]))
"""


class Machine(NamedTuple):
    """What is there to check."""

    gpu: str | None
    architecture: str
    """Its compute capability: 90."""
    torch: str
    cuda: str


STAND_IN = Machine("stand-in", "", "of this machine", "none")


def probe() -> Machine:
    """In a process of its own: this one leaves the GPU alone. Raises subprocess.SubprocessError where torch fails."""
    said = subprocess.run([sys.executable, "-c", PROBE], stdout=subprocess.PIPE, text=True, timeout=PROBE_S, check=True)
    return Machine(*json.loads(said.stdout.splitlines()[-1]))


def prepare(machine: Machine, nccl: Path | None, second: bool, until_s: float) -> tuple[dict[str, str], Path | None]:
    """Build what can be built. Returns why what is lacking is, by its name in plan.py, and the library of NCCL."""
    lacking: dict[str, str] = {}
    nvcc = shutil.which("nvcc") or "nvcc"
    library = None
    _try(lacking, NATIVE, lambda: build_native(os.environ.get("CXX", "c++"), until_s))
    _try(lacking, KERNELS_NEEDED, lambda: run_all([kernel_command(nvcc, KERNELS, machine.architecture)], until_s))
    if nccl is None:
        lacking[NCCL] = "--nccl names no sources or library of NCCL 2.30.3 or newer"
    elif second:
        library = _try(lacking, NCCL, lambda: build_nccl(nccl, nvcc, machine.architecture, until_s))
    for name, module in ((MEGATRON, "megatron"), (MSGSPEC, "msgspec")):
        if importlib.util.find_spec(module) is None:
            lacking[name] = f"{name} is not installed"
    return lacking, library


def _try(lacking: dict[str, str], name: str, build: Callable[[], Path | None]) -> Path | None:
    try:
        return build()
    except (BuildError, OSError, tarfile.TarError) as cause:
        print(cause, flush=True)
        lacking[name] = f"{name} could not be built: {str(cause).splitlines()[0]}"
        return None


def run_checks(
    checks: Sequence[Check],
    lacking: Mapping[str, str],
    until_s: float,
    tell: Callable[[Sequence[Finding], str], None],
) -> list[Finding]:
    """Run those for which nothing is lacking and there is time. `tell`: of each, its findings and what its log says of
    processes that crashed or hung."""
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as directory:
        for number, check in enumerate(checks):
            left_s = until_s - time.monotonic()
            reason = next((lacking[need] for need in check.needs if need in lacking), None)
            if reason is None and left_s < LEAST_S:
                reason = "no time was left"
            if reason is not None:
                found, log = left_out(check, reason), ""
            else:
                limited = replace(check, limit_s=min(check.limit_s, left_s))
                found, log = watch(limited, Path(directory, str(number)))
            findings += found
            tell(found, log)
    return findings


def page(title: str, findings: Sequence[Finding], logs: Sequence[str]) -> str:
    """The table as markdown, and the logs of what crashed or hung."""
    rows = [[" ".join(cell.split()) for cell in finding] for finding in findings]
    lines = [title, "", markdown_table(["check", "promise", "seen", "verdict"], rows), ""]
    for log in logs:
        lines += ["```text", log.strip().replace("```", "'''"), "```", ""]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None, probe: Callable[[], Machine] = probe) -> int:
    """The command line. Returns the exit status."""
    begun_s = time.monotonic()
    parser = argparse.ArgumentParser(prog="scripts/gpu_check.sh", allow_abbrev=False)
    parser.add_argument("call", choices=["first", "second"], help="T0 to T3, or T2 of NCCL and T4 to T7")
    parser.add_argument("--nccl", type=Path, help="NCCL 2.30.3 or newer: a tarball or folder of sources, or a library")
    parser.add_argument(
        "--output", type=Path, help="for the table; default: gpu_DEVICE_CALL.md in $OUT, or benchmarks/results"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="run every step on stand-ins of GPUs and NCCL, on the CPU"
    )
    parser.add_argument("--only", nargs="+", default=[""], help="checks whose names begin so: T1 'T4, error'")
    arguments = parser.parse_args(argv)
    if arguments.nccl is not None and not arguments.nccl.exists():
        parser.error(f"--nccl {arguments.nccl} is not there")
    second = arguments.call == "second"
    only = tuple(arguments.only)
    if not any(check.name.startswith(only) for check in (second_call(None) if second else first_call())):
        parser.error(f"--only {' '.join(only)}: no check of the {arguments.call} call has such a name")
    try:
        machine = STAND_IN if arguments.dry_run else probe()
    except subprocess.SubprocessError as cause:
        print(f"torch cannot be asked for a GPU: {cause}")
        return 2
    if machine.gpu is None:
        print(f"torch {machine.torch} finds no GPU (CUDA build: {machine.cuda})")
        return 2
    nccl = arguments.nccl and arguments.nccl.resolve()
    lacking, library = ({}, None) if arguments.dry_run else prepare(machine, nccl, second, begun_s + BUILD_S)
    if library != nccl:
        begun_s = time.monotonic()  # a library that was built here: its time is the machine's, not the checks'
    checks = [each for each in (second_call(library) if second else first_call()) if each.name.startswith(only)]
    if arguments.dry_run:
        sys.path.append(str(REPOSITORY / "tests"))
        checks = list(map(importlib.import_module("support.gpu.dry_run").on_stand_ins, checks))
    named = re.sub(r"\W+", "_", machine.gpu).strip("_").lower()
    folder = Path(os.environ.get("OUT") or (BUILD if arguments.dry_run else REPOSITORY / "benchmarks" / "results"))
    folder.mkdir(parents=True, exist_ok=True)
    output = arguments.output or folder / f"gpu_{named}_{arguments.call}.md"
    title = f"# GPU checks, {arguments.call} call, on one {machine.gpu}\n\ntorch {machine.torch}, CUDA {machine.cuda}."
    findings: list[Finding] = []
    logs: list[str] = []

    def tell(found: Sequence[Finding], log: str) -> None:
        findings.extend(found)
        logs.extend(filter(None, [log]))
        for finding in found:
            print(f"{finding.verdict.upper():8}{finding.check}: {finding.promise}: {finding.seen}", flush=True)
        if log:
            print(log, flush=True)
        output.write_text(page(title, findings, logs))

    run_checks(checks, lacking, begun_s + CALL_S, tell)
    counted = sum(finding.verdict == NOT_OK for finding in findings)
    print(f"{counted} of {len(findings)} lines are not ok; written: {output}")
    if arguments.dry_run:  # what stand-ins show is for tests; here each step is to have run to its end
        return int(bool(logs))
    return exit_status(findings)


if __name__ == "__main__":
    sys.exit(main())
