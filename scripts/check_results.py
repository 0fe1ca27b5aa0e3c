#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Names the pages of benchmarks/results that were measured before what they measure was last changed.

scripts/check_results.py            a line for each; exit status 1 if there is any, 0 else, and in a shallow clone
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = "benchmarks/results"
_PACKAGE = "adaptra_megatron"
_SCHEDULES = (f"{_PACKAGE}/schedule/planner.py", f"{_PACKAGE}/schedule/bounds.py", "csrc/schedule")
_RUNTIME = (f"{_PACKAGE}/runtime/execution", f"{_PACKAGE}/runtime/dispatch")
_LINKS = (f"{_PACKAGE}/transport/host_link", f"{_PACKAGE}/transport/wires", "csrc/ring")

SOURCES: Mapping[str, Sequence[str]] = {
    "analyze.md": ("benchmarks/analyze.py", f"{_PACKAGE}/schedule/replay", f"{_PACKAGE}/telemetry/analysis"),
    "closed_loop.md": ("campaigns/closed_loop.py", f"{_PACKAGE}/control/order", f"{_PACKAGE}/detector"),
    "control_plane.md": ("benchmarks/control_plane.py", f"{_PACKAGE}/control"),
    "deaths.md": ("benchmarks/deaths.py", f"{_PACKAGE}/epochs"),
    "deaths_campaign.md": ("campaigns/deaths.py", f"{_PACKAGE}/epochs"),
    "gradient_sync.md": ("benchmarks/gradient_sync.py", f"{_PACKAGE}/data_parallel"),
    "host_path.md": ("benchmarks/host_path.py", *_LINKS),
    "online.md": ("benchmarks/online.py", f"{_PACKAGE}/runtime/dispatch"),
    "outliving.md": ("benchmarks/outliving.py", f"{_PACKAGE}/epochs"),
    "overhead.md": ("benchmarks/overhead.py", *_RUNTIME),
    "pipeline.md": ("benchmarks/pipeline.py", *_SCHEDULES, *_RUNTIME),
    "planner.md": ("benchmarks/planner.py", *_SCHEDULES),
    "published.md": ("campaigns/published", *_SCHEDULES),
    "replicas.md": ("benchmarks/replicas.py", f"{_PACKAGE}/schedule/jobs", *_SCHEDULES),
    "rerouting.md": ("benchmarks/rerouting.py", f"{_PACKAGE}/runtime/rerouting"),
    "routing.md": ("benchmarks/routing.py", f"{_PACKAGE}/schedule/routing", "csrc/schedule/routing"),
    "soak.md": ("campaigns/soak.py", f"{_PACKAGE}/transport"),
    "staggered_optimizer.md": (
        "benchmarks/staggered_optimizer.py",
        f"{_PACKAGE}/runtime/megatron/staggered_optimizer.py",
    ),
    "sync_modes_virtual.md": ("benchmarks/sync_modes_virtual.py", f"{_PACKAGE}/schedule/sync_modes"),
    "sync_modes.md": ("benchmarks/sync_modes.py", f"{_PACKAGE}/schedule/sync_modes", f"{_PACKAGE}/data_parallel"),
    "sync_predictors.md": ("benchmarks/sync_predictors.py",),
    "traces.md": ("benchmarks/traces.py", f"{_PACKAGE}/schedule/replay", f"{_PACKAGE}/schedule/routing"),
    "transport.md": ("benchmarks/transport.py", *_LINKS),
    "verbs.md": ("benchmarks/verbs.py", f"{_PACKAGE}/transport/wires/verbs"),
}
"""By page: the files and folders whose work it measures."""


def out_of_date(repository: Path, sources: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, str]]:
    """Pages and the source that was committed after each of them, the latest one if there are several.

    Yields nothing where commit times are not known: outside of git, and in a shallow clone.
    """
    if _git(repository, "rev-parse", "--is-shallow-repository") != "false":
        return
    for page, measured in sources.items():
        written_s = _committed_s(repository, f"{RESULTS}/{page}")
        newest_s, newest = max((_committed_s(repository, source), source) for source in measured)
        if newest_s > written_s:
            yield page, newest


def _committed_s(repository: Path, path: str) -> int:
    return int(_git(repository, "log", "-1", "--format=%ct", "--", path) or 0)


def _git(repository: Path, *arguments: str) -> str:
    try:
        ran = subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, text=True, timeout=60)
    except OSError:
        return ""
    return ran.stdout.strip()


def main() -> int:
    """Print the pages; the exit status."""
    found = list(out_of_date(REPOSITORY, SOURCES))
    for page, source in found:
        print(f"{RESULTS}/{page} is older than {source}: measure again")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
