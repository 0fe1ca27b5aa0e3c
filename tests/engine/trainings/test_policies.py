# SPDX-License-Identifier: Apache-2.0
"""A user has a running job go by another policy: every rank of a replica does so in the same iteration."""

from __future__ import annotations

import hashlib
import itertools
import threading
from pathlib import Path

import pytest

from adaptra_megatron.schedule.classic import stock_order
from adaptra_megatron.schedule.csv_format import schedule_to_csv
from adaptra_megatron.telemetry.event_log import read_events
from adaptra_megatron.telemetry.events import Event, PlanSwitched, PolicyChanged
from adaptra_megatron.telemetry.trace_requests import ask_for_policy
from testing.faults.holds import HELD_S
from testing.jobs.fork_server import ForkServer
from testing.jobs.variants import Variant, check_equal, run_variants
from testing.waiting import until

STAGES, MICRO_BATCHES = 2, 6
HOLDS = 6, 12, 18
ITERATIONS = 22
STOCK = hashlib.sha256(schedule_to_csv(stock_order(STAGES, MICRO_BATCHES, 1, None)).encode()).hexdigest()[:16]


def ask(run: Path, holds: list[Path]) -> None:
    """Once all of the replicas' leaders adapt, observe; then adapt again; then off."""

    def said(kind: type[Event]) -> int:
        return sum(isinstance(found.event, kind) for found in read_events(run, lambda _problem: None))

    until(lambda: said(PlanSwitched) >= 2, limit_s=HELD_S)
    for number, policy in enumerate(("observe", "adapt", "off"), start=1):
        ask_for_policy(run, policy)
        holds[number - 1].touch()
        until(lambda expected=2 * number: said(PolicyChanged) >= expected, limit_s=HELD_S)  # type: ignore[misc]


@pytest.mark.timeout(200)
def test_a_running_job_goes_by_another_policy_and_back(fork_server: ForkServer, tmp_path: Path) -> None:
    """Two replicas with leaders of their own. Numbers stay stock's to the bit all the time."""
    run, holds = tmp_path / "trace", [tmp_path / f"seen{number}" for number in range(len(HOLDS))]
    run.mkdir()
    training = (
        f"--pipeline-model-parallel-size {STAGES} --num-layers {STAGES} --global-batch-size {2 * MICRO_BATCHES} "
        f"--mock-data --no-gradient-accumulation-fusion --hidden-size 32 --seq-length 16 --train-iters {ITERATIONS}"
    ).split()
    ours = "--adaptra --emulate-compute-ms 5,5,5 --emulate-exact-times --emulate-prompt-planner "
    ours += f"--adaptra-trace-dir {run} --adaptra-trace asked"
    for iteration, file in zip(HOLDS, holds, strict=True):
        ours += f" --emulate-hold {iteration}:{file}"
    asking = threading.Thread(target=ask, args=(run, holds))
    asking.start()
    stock, adaptra = run_variants(
        4,
        [Variant("stock", tuple(training)), Variant("ours", (*training, *ours.split()), like="stock")],
        timeout_s=180,
        server=fork_server,
        directory=tmp_path / "run",
    )
    asking.join()
    check_equal([stock, adaptra])
    for first, last in ((0, 2), (1, 3)):
        assert adaptra.plans[first] == adaptra.plans[last], "stages of one replica run one plan"
    for plans in adaptra.plans:
        runs_stock = [fingerprint == STOCK for _number, fingerprint in plans]
        assert [order for order, _ in itertools.groupby(runs_stock)] == [False, True, False, True], plans
