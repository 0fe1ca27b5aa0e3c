#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes pages of made-up runs, for `make test-pages` to look at: PYTHONPATH=tests scripts/write_example_pages.py OUT

OUT/report.html: a link turns slow, a plan answers, a replica comes last. OUT/damaged.html: that, with files missing.
OUT/long.html: a long run that is slow again and again. OUT/lost.html: a rank of three replicas dies. OUT/analysis.html:
what would help. OUT/plan.html: the orders of a plan.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from support.made_up.runs import Iteration, write_events, write_replicas, write_run
from support.processes import REPOSITORY

from adaptra_megatron.common.reasons import reason_fields
from adaptra_megatron.telemetry.events import (
    ArrivalsSeen,
    Event,
    Fault,
    IterationsTimed,
    LinkDetection,
    PathChanged,
    PlanMade,
    PlanSwitched,
    RanksLost,
    RoutesChosen,
    StragglerDetection,
    SwitchMeasured,
)
from adaptra_megatron.tools.cli.main import main as adaptra

REASON = "a message of 4 MiB takes 2000 ms, before 0.5 ms", ("; seen in nearly all messages of the iteration alike",)
LOST = RanksLost(
    epoch=1,
    ranks={"rank 4 (stage 1 of replica 1 on node7)": "was ended by SIGKILL"},
    dead_cells=["1.1"],
    live=8,
    seconds=0.75,
    moved=((1, 1, 0, 3), (1, 1, 2, 3)),
)


def main(out: Path) -> int:
    shutil.rmtree(out / "runs", ignore_errors=True)
    run, long, lost = (out / "runs" / name for name in ("gpt-7b", "long", "lost"))
    slow, planned = Iteration(delay_s=2.0), Iteration(delay_s=1.0, split=True)
    write_run(run, [Iteration()] * 8 + [slow] * 4 + [planned] * 8 + [Iteration(split=True)] * 6)
    write_events(run, events(), ended=False)
    write_run(long, ([Iteration()] * 14 + [slow] * 10) * 12)
    for replica in range(3):
        write_run(lost, [Iteration()] * (4 if replica == 1 else 9), first_rank=replica, ranks_apart=3)
    write_replicas(lost, 3, [(LOST, 4)])
    status = 0
    for name, directory, command, option in (
        ("report", run, "report", "-o"),
        ("long", long, "report", "-o"),
        ("lost", lost, "report", "-o"),
        ("analysis", run, "analyze", "--html"),
        ("plan", REPOSITORY / "examples" / "costs.json", "plan", "--html"),
    ):
        status |= adaptra([command, str(directory), option, str(out / f"{name}.html")])
    damaged = out / "runs" / "damaged"
    shutil.copytree(run, damaged)
    (damaged / "rank-00001.jsonl").unlink()
    return status | adaptra(["report", str(damaged), "-o", str(out / "damaged.html")])


def events() -> list[tuple[Event, int]]:
    """Events of a run that resumes after Megatron's iteration 500."""
    found = {"before": "healthy", "after": "slow", "since_iteration": 8, **reason_fields(REASON)}
    speeds = {
        f"{replica}.{stage}": 0.4 if (replica, stage) == (0, 1) else 1.0 for replica in (0, 1) for stage in (0, 1)
    }
    return [
        (LinkDetection(source=0, target=1, **found), 9),
        (LinkDetection(source=1, target=0, **found), 9),
        (
            PlanMade(
                number=1,
                adopted=True,
                **reason_fields(("link 0->1: slow since iteration ", 8, (", ", REASON))),
                findings=1,
                predicted_s=30.0,
                current_predicted_s=40.0,
                lower_bound_s=28.0,
            ),
            10,
        ),
        (PlanSwitched(number=1, before=0, predicted_s=30.0, before_predicted_s=40.0), 12),
        (SwitchMeasured(number=1, before_measured_s=40.0, after_measured_s=30.0, iterations=3), 15),
        (PathChanged(source=0, target=1, before="device", after="host", cause="stalled", failover=True), 16),
        (
            RoutesChosen(
                number=2,
                reason="stage 1 of replica 0 gives 3 of its 8 micro-batches to replica 1",
                predicted_s=11.0,
                current_predicted_s=17.0,
                lower_bound_s=10.5,
                speeds=speeds,
                micro_batches=8,
                moved=((1, 0, 1, 3),),
            ),
            18,
        ),
        (
            StragglerDetection(
                replica=3,
                before="healthy",
                after="late",
                reason="by 3200 ms, the last one in 18 of the last 20 iterations, which costs 12% of an iteration; its "
                "host's CPUs are 97% busy with other processes",
                remedy="end or move these, or give the job CPUs of its own",
                stage=1,
                first_rank=7,
                host="node7",
                since_iteration=14,
            ),
            20,
        ),
        (
            ArrivalsSeen(
                until=20,
                iterations=20,
                lags_s=[[0.1, -0.2, 0.4, 2.9, -0.1], [0.0, -0.3, 0.2, 3.2, 0.9], [-0.1, -0.1, 0.3, 2.8, 0.1]],
                last=[[0, 0, 2, 18, 0], [1, 0, 0, 18, 1], [0, 0, 3, 17, 0]],
            ),
            20,
        ),
        (Fault(what="delegate restarted", detail="it was killed", stage=1), 20),
        (IterationsTimed(first=0, seconds=[24.0] * 8 + [40.0] * 4 + [30.0] * 8 + [24.0] * 6, step=501), 25),
    ]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
