# SPDX-License-Identifier: Apache-2.0
"""Trainings in which one replica comes last to gradient synchronisation: it is named, and nothing changes by that."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaptra_megatron.emulation.jobs.fork_server import ForkServer
from adaptra_megatron.emulation.jobs.variants import Variant, check_equal, run_variants
from adaptra_megatron.telemetry.events.event_log import read_events
from adaptra_megatron.telemetry.events.events import ArrivalsSeen, StragglerDetection

ITERATIONS = 36


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("ranks", "layout", "slow"),
    [(3, "", (1, 0)), pytest.param(4, "--pipeline-model-parallel-size 2", (1, 1), marks=pytest.mark.slow)],
    ids=["replicas", "pipelines"],
)
def test_the_replica_that_comes_last_is_named(
    ranks: int, layout: str, slow: tuple[int, int], tmp_path: Path, fork_server: ForkServer
) -> None:
    times_ms = ",".join(3 * [f"{12:g}"])
    arguments = (
        f"--mock-data --no-gradient-accumulation-fusion --num-layers 2 --hidden-size 32 --seq-length 16 {layout} "
        f"--global-batch-size {2 * ranks} --train-iters {ITERATIONS} --emulate-compute-ms {times_ms}"
    )
    traces = {name: tmp_path / name for name in ("healthy", "late")}
    watched = f"{arguments} --adaptra --adaptra-policy observe --adaptra-trace-dir"
    replica, stage = slow
    reports = run_variants(
        ranks,
        [
            Variant("healthy", tuple(f"{watched} {traces['healthy']}".split())),
            Variant(
                "late",
                tuple(f"{watched} {traces['late']} --emulate-slow-cell {replica}.{stage}:2.5".split()),
                like="healthy",
            ),
        ],
        timeout_s=170,
        server=fork_server,
        directory=tmp_path / "run",
    )
    check_equal(reports)
    healthy, late = (
        [found for found in read_events(each) if isinstance(found.event, (StragglerDetection, ArrivalsSeen))]
        for each in traces.values()
    )
    assert [found.event for found in healthy if isinstance(found.event, StragglerDetection)] == []
    assert [found.event for found in healthy if isinstance(found.event, ArrivalsSeen)]
    named = [found.event for found in late if isinstance(found.event, StragglerDetection)]
    assert {(event.replica, event.stage, event.after) for event in named} == {(replica, stage, "late")}
    assert named[0].share is not None
    assert named[0].share > 0.1
    assert {found.stamp.rank for found in late} == {0}
    lags_s = [found.event for found in late if isinstance(found.event, ArrivalsSeen)][-1].lags_s
    assert max(range(len(lags_s[stage])), key=lags_s[stage].__getitem__) == replica
    logs = (tmp_path / "run" / "rank0.log").read_text()
    assert f"replica {replica} (stage {stage}, rank " in logs
    assert "comes last to gradient synchronisation since iteration " in logs
