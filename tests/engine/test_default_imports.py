# SPDX-License-Identifier: Apache-2.0
"""A rank that is given --adaptra and no other flag imports no feature that it does not run, and runs a user's hook."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.line_counts import lines_of

PROGRAM = str(Path(__file__).with_name("imported_ranks.py"))
MOST_CODE, MOST_LINES = 15_900, 25_000
"""Lines of code, and lines of all kinds, on any rank on the CPU; one on a GPU needs NCCL's links and copies, too. May
fall; what makes it grow is imported where it is used instead."""
BY_FLAG = ("engine.fault_tolerance", "engine.rejoining", "engine.rerouting", "engine.update_features")
BY_FLAG += ("engine.megatron_spans", "elastic.recovery", "gradsync.replica_sums")
BY_FLAG += ("gradsync.all_reduce_algorithms", "telemetry.event_log", "telemetry.exported_figures")
BY_FLAG += (
    "telemetry.trace",
    "control.deciders.path_decider",
    "control.deciders.decision_engine",
    "schedule.planner",
)
BY_FLAG += ("control.stragglers.straggler_host", "transport.gpu.device_copies", "transport.device_session.nccl_link")
BY_FLAG += ("patches.rank_failure_patches", "patches.update_patches", "megatron.feature_refusals")
BY_FLAG += ("megatron.replica_updates", "megatron.staggered_optimizer", "megatron.state.conservation")


@pytest.mark.timeout(180)
def test_no_feature_is_imported_unasked_and_a_users_hook_runs(start_ranks: Callable[..., Any], tmp_path: Path) -> None:
    arguments = (
        "--pipeline-model-parallel-size 2 --num-layers 2 --global-batch-size 4 --mock-data --hidden-size 32 "
        "--no-gradient-accumulation-fusion --seq-length 16 --train-iters 2 --adaptra"
    )
    results = start_ranks(4, [PROGRAM, str(tmp_path), *arguments.split()], timeout_s=150.0)
    for rank, result in enumerate(results):
        said = re.findall(
            rf"^iteration (\d+): slowest is [FBIW] of micro-batch \d, stage {rank // 2}, ", result.output, re.M
        )
        assert said == ["0", "1"], "the hook of examples/ has seen each iteration once"
        files = json.loads((tmp_path / f"{rank}.json").read_text())
        lines = {name: lines_of(Path(file).read_text()) for name, file in files.items() if file.endswith(".py")}
        assert {"adaptra_megatron.engine.pipeline", "adaptra_megatron.transport.dual_path.dual_link"} < lines.keys()
        by_flag = {f"adaptra_megatron.{each}" for each in BY_FLAG}
        assert all(map(find_spec, by_flag)), "each of them is a module"
        assert not by_flag & lines.keys()
        largest = sorted(lines.items(), key=lambda each: -each[1].code)
        assert (code := sum(each.code for each in lines.values())) <= MOST_CODE, (code, largest)
        assert (total := sum(each.lines for each in lines.values())) <= MOST_LINES, (total, largest)
