# SPDX-License-Identifier: Apache-2.0
"""Trainings in which one replica comes last to gradient synchronisation: it is named, and nothing changes by that."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from adaptra_megatron.telemetry.event_log import read_events
from adaptra_megatron.telemetry.events import ArrivalsSeen, StragglerDetection
from testing.faults.holds import HELD_S
from testing.jobs.fork_server import ForkServer
from testing.jobs.variants import Variant, check_equal, run_variants

ITERATIONS, SLOWER = 36, 12
"""Half a second later than the others: not even a busy machine has them come as late in truth."""
RUN_S = 2 * HELD_S


def let_go_when(traces: Path, sort: type[ArrivalsSeen | StragglerDetection]) -> None:
    """Let the training that writes `traces` end once an event of that `sort` is in its log: the process that judges
    arrivals starts, and looks, when the machine has the time."""
    until_s = time.monotonic() + RUN_S
    while not any(isinstance(found.event, sort) for found in read_events(traces, lambda _damage: None)):
        if time.monotonic() > until_s:
            return  # the held ranks say so
        time.sleep(0.1)
    (traces / "seen").touch()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ranks", "layout", "slow"),
    [(3, "", (1, 0)), pytest.param(4, "--pipeline-model-parallel-size 2", (1, 1), marks=pytest.mark.slow)],
    ids=["replicas", "pipelines"],
)
def test_the_replica_that_comes_last_is_named(
    ranks: int, layout: str, slow: tuple[int, int], tmp_path: Path, fork_server: ForkServer
) -> None:
    arguments = (
        f"--mock-data --no-gradient-accumulation-fusion --num-layers 2 --hidden-size 32 --seq-length 16 {layout} "
        f"--global-batch-size {2 * ranks} --train-iters {ITERATIONS} --emulate-compute-ms 8,8,8"
    )
    traces = {name: tmp_path / name for name in ("healthy", "late")}
    replica, stage = slow
    watched = {
        name: f"{arguments} --adaptra --adaptra-policy observe --adaptra-trace-dir {directory} "
        f"--emulate-hold {ITERATIONS - 1}:{directory / 'seen'}"
        for name, directory in traces.items()
    }
    healthy_one = Variant("healthy", tuple(watched["healthy"].split()))
    late_one = Variant(
        "late", (*watched["late"].split(), "--emulate-slow-cell", f"{replica}.{stage}:{SLOWER}"), "healthy"
    )
    with ThreadPoolExecutor(2) as watching:
        watching.submit(let_go_when, traces["healthy"], ArrivalsSeen)
        watching.submit(let_go_when, traces["late"], StragglerDetection)
        reports = run_variants(
            ranks, [healthy_one, late_one], timeout_s=RUN_S, server=fork_server, directory=tmp_path / "run"
        )
    check_equal(reports)
    healthy, late = (
        [found for found in read_events(each) if isinstance(found.event, (StragglerDetection, ArrivalsSeen))]
        for each in traces.values()
    )
    # On a busy machine a replica may come last for a while in truth: that none is named otherwise is test_judge's.
    assert [found.event for found in healthy if isinstance(found.event, ArrivalsSeen)]
    named = [found.event for found in late if isinstance(found.event, StragglerDetection)]
    (ours, *_again) = [
        event for event in named if (event.replica, event.stage, event.after) == (replica, stage, "late")
    ]
    assert ours.share is not None
    assert ours.share > 0.1
    assert {found.stamp.rank for found in late} == {0}
    lags_s = [found.event for found in late if isinstance(found.event, ArrivalsSeen)][-1].lags_s
    assert max(range(len(lags_s[stage])), key=lags_s[stage].__getitem__) == replica
    logs = (tmp_path / "run" / "rank0.log").read_text()
    assert f"replica {replica} (stage {stage}, rank " in logs
    assert "comes last to gradient synchronisation since iteration " in logs
