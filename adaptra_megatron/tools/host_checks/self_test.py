# SPDX-License-Identifier: Apache-2.0
"""Two processes of this host exchange messages over each transport: what `adaptra doctor --self-test` does."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adaptra_megatron.tools.host_checks.host_findings import HostFinding, HostLevel
from adaptra_megatron.tools.local_ranks.launch_ranks import LaunchError, run_ranks

DEADLINE_S = 30.0
"""For all transports together, the start of the processes included."""
_RANK_MODULE = "adaptra_megatron.tools.host_checks.self_test_rank"
_LEAST_S = 2.0
"""Below that, beginning is pointless."""


def run_self_test(transports: Sequence[str], deadline_s: float = DEADLINE_S) -> list[HostFinding]:
    """One finding per transport, within about `deadline_s` seconds (the launcher takes up to 2 s to end its ranks)."""
    until_s = time.monotonic() + deadline_s
    found: dict[str, HostFinding] = {}
    while waiting := [name for name in transports if name not in found]:
        left_s = until_s - time.monotonic()
        if left_s < _LEAST_S:
            late = {name: _failed(name, f"not run: {deadline_s:g} s were over before its turn") for name in waiting}
            found |= late
            break
        outcomes, cause = _run(waiting, left_s)
        found |= {outcome["transport"]: _passed(outcome) for outcome in outcomes}
        if cause is not None and len(outcomes) < len(waiting):
            failed = waiting[len(outcomes)]  # they run one after the other; the rest gets another pair of processes
            found[failed] = _failed(failed, cause)
    return [found[name] for name in transports]


def _run(transports: Sequence[str], timeout_s: float) -> tuple[list[dict[str, Any]], str | None]:
    """Measurements of a pair of processes, and the failure that ended it, if any."""
    with tempfile.TemporaryDirectory(prefix="adaptra-doctor-") as directory:
        results = Path(directory) / "results"
        results.touch()
        argv = ["-m", _RANK_MODULE, str(results), *transports]
        cause = None
        try:
            run_ranks(2, argv, timeout_s=timeout_s, log_directory=Path(directory) / "logs")
        except LaunchError as error:
            cause = _last_words(error, timeout_s)
        outcomes = [json.loads(line) for line in results.read_text().splitlines()]
    if cause is None and len(outcomes) < len(transports):
        cause = "the processes ended without a result"
    return outcomes, cause


def _last_words(error: LaunchError, timeout_s: float) -> str:
    """The last line of each rank that failed by itself: what Python says about its exception."""
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
