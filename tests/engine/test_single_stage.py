# SPDX-License-Identifier: Apache-2.0
"""Jobs without pipelines: stock's schedule runs, and telemetry tells of its iterations."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaptra_megatron.telemetry.event_log import read_events
from adaptra_megatron.telemetry.events import IterationsTimed, RunEnded, RunStarted
from testing.jobs.fork_server import ForkServer
from testing.jobs.variants import Variant, check_equal, run_variants

ITERATIONS = 6


@pytest.mark.timeout(120)
@pytest.mark.parametrize("layout", ["--overlap-grad-reduce", "--tensor-model-parallel-size 2 --sequence-parallel"])
def test_a_job_of_one_stage_is_stocks_bit_for_bit(layout: str, tmp_path: Path, fork_server: ForkServer) -> None:
    arguments = tuple(
        f"--num-layers 2 --mock-data --no-gradient-accumulation-fusion --global-batch-size 8 "
        f"--train-iters {ITERATIONS} --eval-iters 1 --eval-interval 3 {layout}".split()
    )
    traces = tmp_path / "traces"
    reports = run_variants(
        2,
        [
            Variant("stock", arguments),
            Variant("adapt", (*arguments, "--adaptra", "--adaptra-trace-dir", str(traces)), like="stock"),
            Variant("observe", (*arguments, "--adaptra", "--adaptra-policy", "observe"), like="stock"),
        ],
        timeout_s=100,
        server=fork_server,
        directory=tmp_path / "run",
    )
    check_equal(reports)
    for report in reports[1:]:
        assert [rank["training_iterations"] for rank in report.adaptra] == [ITERATIONS] * 2
        assert all(rank["split_weight_gradients"] == 0 for rank in report.adaptra)
    events = read_events(traces)
    for kind in (RunStarted, RunEnded):
        assert {entry.stamp.rank for entry in events if isinstance(entry.event, kind)} == {0, 1}
    assert [entry for entry in events if isinstance(entry.event, IterationsTimed)]
    logs = "".join(log.read_text() for log in (tmp_path / "run").rglob("*.log"))
    assert logs.count("pipelines have 1 stage (PP 1): there is nothing to adapt, stock's schedule runs") == 2
