# SPDX-License-Identifier: Apache-2.0
"""Three steps of a production job, whose last stage is known to be too long (see production/README.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaptra_megatron.common.layout import Cell
from adaptra_megatron.schedule.jobs.job_planner import plan_job
from adaptra_megatron.schedule.routing.routed_costs import RoutedCosts, seconds_of_cells
from adaptra_megatron.tools.cli.planning.cost_inputs import read_given
from adaptra_megatron.tools.recordings.reading import read_recording
from adaptra_megatron.tools.replay.analysis import analyse
from adaptra_megatron.tools.replay.analysis_wording import headline

TRACE = Path(__file__).parent / "production" / "trace-ST-3-steps.parquet"
PUBLISHED_PROMPT_S = {34: 2.0583, 36: 2.0898, 259: 2.1687}
"""Steps without launch delays, as the authors of the trace replay them."""


def test_a_production_job_is_replayed_and_its_straggler_named() -> None:
    pytest.importorskip("pyarrow")
    analysis = analyse(read_recording(TRACE))
    found = analysis.stragglers
    assert max(map(abs, found.replay_errors)) < 0.001
    assert dict(zip(found.numbers, found.prompt_s, strict=True)) == pytest.approx(PUBLISHED_PROMPT_S, rel=0.002)
    assert headline(analysis).endswith("a long last stage")
    assert max(analysis.slowness.values()) < 1.05
    assert found.last_stage_share > 1.0
    assert "exchange" not in {remedy.key for remedy in analysis.remedies.rows}


def test_a_plan_of_the_recorded_costs_is_no_faster_than_their_bound() -> None:
    pytest.importorskip("pyarrow")
    found = plan_job(read_given(TRACE).job)
    assert found.lower_bound.seconds <= found.simulation.makespan_s * (1 + 1e-9)


def test_long_micro_batches_of_a_recording_make_no_cell_slow() -> None:
    pytest.importorskip("pyarrow")
    slowness = analyse(read_recording(TRACE)).slowness
    routed = RoutedCosts(job=read_given(TRACE).job)
    for name in ("forward_s", "backward_input_s", "backward_weight_s"):
        first, *others = seconds_of_cells(routed.replicas, name)
        for replica, row in enumerate(others, start=1):
            pace = [slowness[Cell(replica, stage)] / slowness[Cell(0, stage)] for stage in range(routed.stages)]
            assert [a / b for a, b in zip(row, first, strict=True)] == pytest.approx(pace)
