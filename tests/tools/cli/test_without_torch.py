# SPDX-License-Identifier: Apache-2.0
"""Where torch is not installed: what only plans, replays and tells works, and the rest says what it lacks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from support.played_schedules import played

from adaptra_megatron.schedule.classic import one_f_one_b
from adaptra_megatron.schedule.costs import uniform_costs
from adaptra_megatron.telemetry.trace import TraceWriter

PROGRAM = """
import json, sys
sys.modules["torch"] = None
from adaptra_megatron.tools.cli.main import main
print("\\n" + json.dumps([main(command) for command in json.loads(sys.argv[1])]))
"""


def statuses(*commands: list[str]) -> tuple[list[int], str]:
    """Exit status of each, and what they print."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_planning_and_reading_runs_need_no_torch(tmp_path: Path) -> None:
    costs, run = tmp_path / "costs.json", tmp_path / "run"
    given = {"stages": 2, "micro_batches": 4, "forward_s": 1, "backward_input_s": 1, "backward_weight_s": 1}
    costs.write_text(json.dumps(given))
    records = played(
        one_f_one_b(2, 4), uniform_costs(2, 4, forward_s=0.02, backward_input_s=0.02, backward_weight_s=0.02)
    )
    for rank in range(2):
        writer = TraceWriter(run, rank, rank)
        writer.write(0, [record for record in records if record.stage == rank])
        writer.close()
    commands = [
        ["plan", str(costs), "--html", str(tmp_path / "plan.html")],
        ["simulate", str(costs), "--schedule", "zb-h1"],
        ["analyze", str(run)],
        ["report", str(run)],
        ["trace", str(run)],
    ]
    found, said = statuses(*commands)
    assert found == [0] * len(commands), said
    assert (run / "report.html").stat().st_size > 10_000


def test_what_needs_torch_says_so_in_a_line() -> None:
    found, said = statuses(["launch", "--nproc-per-node", "2", "train.py"], ["bench", "transport"])
    assert found == [2, 2]
    assert said.splitlines() == [
        f"adaptra: {command} needs torch, which is not installed here" for command in ("launch", "bench")
    ]
