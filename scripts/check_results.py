#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Names the pages of benchmarks/results that were measured before what they measure was last changed.

scripts/check_results.py            a line for each; exit status 1 if there is any, 0 else, and in a shallow clone

A file counts as changed if it does something else: comments, docstrings, annotations, imports, spaces, the words of
errors and of the log, underscores before names, and where the file is may differ from when the page was committed.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = "benchmarks/results"
_PACKAGE = "adaptra_megatron"


def _in(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/{name}" for name in names)


_SEARCH = (
    *("search.cpp", "local_search.cpp", "timing.cpp", "dispatch.cpp", "split_choice.cpp"),
    *("bounds.cpp", "waves.cpp"),
)
_PLANS = (f"{_PACKAGE}/schedule/planner.py", *_in("csrc/schedule", *_SEARCH))
_ROUTED_PLANS = (
    *(
        f"{_PACKAGE}/schedule/routing/routed_planner.py",
        f"{_PACKAGE}/schedule/routing/routed_simulator.py",
        f"{_PACKAGE}/schedule/routing/routed_costs.py",
    ),
    "csrc/schedule/routing",
)
_SYNC_MODES = _in(f"{_PACKAGE}/gradsync", "sync_modes.py", "update_order.py", "mode_decider.py")
_RUNTIME = (f"{_PACKAGE}/engine/execution/executor.py", f"{_PACKAGE}/engine/dispatch.py")
_HOST_PATH = (
    *(
        f"{_PACKAGE}/transport/host_link/link_thread.py",
        f"{_PACKAGE}/transport/host_link/host_link_reader.py",
        f"{_PACKAGE}/transport/host_link/host_link_writer.py",
    ),
    *(f"{_PACKAGE}/transport/wires/shm_wire.py", f"{_PACKAGE}/transport/wires/tcp_wire.py"),
    *_in("csrc/ring", "ring.cpp", "tcp_pump.cpp", "slot_access.cpp", "spin.hpp"),
)
_FAULT_TOLERANCE = (
    f"{_PACKAGE}/elastic/recovery.py",
    f"{_PACKAGE}/elastic/protocol_store.py",
    f"{_PACKAGE}/elastic/protocol.py",
    f"{_PACKAGE}/elastic/fence.py",
    f"{_PACKAGE}/elastic/process_group.py",
    f"{_PACKAGE}/elastic/process_group_manager.py",
    f"{_PACKAGE}/elastic/process_group.py",
)

SOURCES: Mapping[str, Sequence[str]] = {
    "analyze.md": (
        "benchmarks/analyze.py",
        f"{_PACKAGE}/tools/replay",
        *(f"{_PACKAGE}/tools/replay/analysis.py", f"{_PACKAGE}/tools/replay/analysis_wording.py"),
    ),
    "closed_loop.md": (
        "benchmarks/closed_loop.py",
        *(f"{_PACKAGE}/control/deciders/decider.py", f"{_PACKAGE}/control/deciders/plan_state.py"),
        *(
            f"{_PACKAGE}/control/detector/detector.py",
            f"{_PACKAGE}/control/detector/detector.py",
            f"{_PACKAGE}/control/detector/series.py",
            f"{_PACKAGE}/control/detector/series.py",
        ),
    ),
    "control_plane.md": (
        *_in("benchmarks", "control_plane.py", "control_plane_rank.py"),
        *(
            f"{_PACKAGE}/control/exchange.py",
            f"{_PACKAGE}/control/decisions.py",
            f"{_PACKAGE}/common/typed_messages.py",
        ),
        *(f"{_PACKAGE}/control/sidecar/planner_process.py", f"{_PACKAGE}/control/sidecar/planner_connections.py"),
    ),
    "deaths.md": ("benchmarks/deaths.py", *_ROUTED_PLANS, *_FAULT_TOLERANCE),
    "deaths_campaign.md": ("campaigns/deaths.py", "campaigns/death_stories.py", f"{_PACKAGE}/elastic"),
    "device_queues.md": (
        "benchmarks/device_queues.py",
        "tests/support/device_model",
        *_PLANS,
        *_in("csrc/schedule", "device.cpp", "launch.cpp"),
        f"{_PACKAGE}/engine/execution/inbox.py",
    ),
    "gradient_sync.md": (
        *_in("benchmarks", "gradient_sync.py", "gradient_sync_rank.py"),
        *(f"{_PACKAGE}/gradsync/straggler_all_reduce.py", f"{_PACKAGE}/gradsync/peer_messages.py"),
        *(
            f"{_PACKAGE}/gradsync/all_reduce_rounds.py",
            f"{_PACKAGE}/gradsync/stragglar.py",
            f"{_PACKAGE}/gradsync/all_reduce_algorithms.py",
        ),
    ),
    "host_path.md": ("benchmarks/host_path.py", f"{_PACKAGE}/transport/dual_path", *_HOST_PATH),
    "online.md": (
        "benchmarks/online.py",
        *(
            f"{_PACKAGE}/engine/dispatch.py",
            f"{_PACKAGE}/engine/online_order.py",
        ),
    ),
    "fault_tolerance.md": ("benchmarks/fault_tolerance.py", *_FAULT_TOLERANCE),
    "overhead.md": (
        *_in("benchmarks", "overhead.py", "overhead_rank.py"),
        *(f"{_PACKAGE}/engine/execution/executor.py", f"{_PACKAGE}/engine/execution/executor.py"),
        *(
            f"{_PACKAGE}/control/measurements.py",
            f"{_PACKAGE}/control/deciders/decision_engine.py",
            f"{_PACKAGE}/common/typed_messages.py",
        ),
        f"{_PACKAGE}/control/detector/detector.py",
    ),
    "pipeline.md": ("benchmarks/pipeline.py", *_PLANS, *_RUNTIME),
    "combined.md": ("benchmarks/combined.py", *_PLANS),
    "planner.md": ("benchmarks/planner.py", "tests/schedule/planner_cases.py", *_PLANS),
    "published.md": (*_in("campaigns/published", "cases.py", "simulated.py", "stream_order.py", "real.py"), *_PLANS),
    "replicas.md": ("benchmarks/replicas.py", *_PLANS, *_RUNTIME),
    "rerouting.md": (
        "benchmarks/rerouting.py",
        *_in(f"{_PACKAGE}/engine", "rerouting.py", "routed_inputs.py"),
        *_ROUTED_PLANS,
    ),
    "routing.md": ("benchmarks/routing.py", *_ROUTED_PLANS),
    "soak.md": (
        "campaigns/soak.py",
        *(f"{_PACKAGE}/transport/delegate", f"{_PACKAGE}/transport/dual_path", f"{_PACKAGE}/transport/failover"),
        *_HOST_PATH,
    ),
    "staggered_optimizer.md": (
        "benchmarks/staggered_optimizer.py",
        f"{_PACKAGE}/megatron/staggered_optimizer.py",
        f"{_PACKAGE}/schedule/periods.py",
    ),
    "sync_modes_virtual.md": ("benchmarks/sync_modes_virtual.py", *_SYNC_MODES),
    "sync_modes.md": (
        "benchmarks/sync_modes.py",
        *_SYNC_MODES,
        *(
            f"{_PACKAGE}/gradsync/replica_sums.py",
            f"{_PACKAGE}/gradsync/straggler_all_reduce.py",
            f"{_PACKAGE}/gradsync/update_log.py",
        ),
    ),
    "sync_predictors.md": ("benchmarks/sync_predictors.py", f"{_PACKAGE}/gradsync/mode_decider.py"),
    "traces.md": ("benchmarks/traces.py", f"{_PACKAGE}/schedule/routing/balance.py", *_ROUTED_PLANS),
    "transport.md": (f"{_PACKAGE}/tools/local_ranks/transport_bench.py", *_HOST_PATH),
    "verbs.md": ("benchmarks/verbs.py", f"{_PACKAGE}/transport/wires/verbs"),
}
"""By page: the files and folders whose work it measures."""


class _Change(NamedTuple):
    """A file that differs between two commits: its path now, and its contents as git names them ("": none)."""

    path: str
    before: str
    after: str


def out_of_date(repository: Path, sources: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Pages, and the files that have come to do something else since the page was committed.

    Yields nothing where commits are not known: outside of git, and in a shallow clone.
    """
    if _git(repository, "rev-parse", "--is-shallow-repository").strip() != "false":
        return
    contents = functools.cache(lambda name: _git(repository, "cat-file", "blob", name) if name else "")
    changes = functools.cache(lambda commit: list(_changes(repository, commit)))
    meaning = functools.cache(lambda suffix, name: behaviour(contents(name), suffix))
    for page, measured in sources.items():
        commit = _git(repository, "log", "-1", "--format=%H", "--", f"{RESULTS}/{page}").strip()
        if not commit:
            continue
        found = []
        for change in changes(commit):
            if not any(change.path == source or change.path.startswith(f"{source}/") for source in measured):
                continue
            suffix = PurePath(change.path).suffix
            if meaning(suffix, change.before) != meaning(suffix, change.after):
                found.append(change.path)
        if found:
            yield page, tuple(found)


def _changes(repository: Path, commit: str) -> Iterator[_Change]:
    """What has changed since `commit`; a file that was moved keeps its past."""
    for line in _git(repository, "diff", "--raw", "-M", "--no-abbrev", commit, "HEAD").splitlines():
        state, *paths = line.split("\t")
        before, after = (name.strip("0") and name for name in state.split()[2:4])
        yield _Change(paths[-1], before, after)


def behaviour(text: str, suffix: str) -> str:
    """Equal for two texts of a file that do the same; what may differ: see above."""
    if suffix == ".py":
        return ast.dump(_Behaviour().visit(ast.parse(text)))
    if suffix in (".cpp", ".hpp"):
        return _CPP.sub(lambda found: found["kept"] or "", text)
    return text


_CPP = re.compile(r"//[^\n]*|/\*.*?\*/|\s+|(?P<kept>\"(?:\\.|[^\"\\])*\")", re.DOTALL)


class _Behaviour(ast.NodeTransformer):
    """Leaves what a program does."""

    def visit(self, node: ast.AST) -> ast.AST | None:
        if isinstance(node, ast.Import | ast.ImportFrom) or _only_says(node):
            return None
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            node.exc.args = []
        self.generic_visit(node)
        for field in ("name", "id", "attr"):
            if isinstance(name := getattr(node, field, None), str):
                setattr(node, field, name.lstrip("_") or name)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg | ast.AnnAssign):
            node.annotation = ast.Constant(None)
        return node


def _only_says(node: ast.AST) -> bool:
    """Return whether a statement is a docstring or a line of the log."""
    if not isinstance(node, ast.Expr):
        return False
    if isinstance(node.value, ast.Constant):
        return isinstance(node.value.value, str)
    called = node.value.func if isinstance(node.value, ast.Call) else None
    return isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "logger"


def _git(repository: Path, *arguments: str) -> str:
    try:
        ran = subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, text=True, timeout=60)
    except OSError:
        return ""
    return ran.stdout


def main() -> int:
    """Print the pages; the exit status."""
    found = list(out_of_date(REPOSITORY, SOURCES))
    for page, changed in found:
        print(f"{RESULTS}/{page} is older than {', '.join(changed)}: measure again")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
