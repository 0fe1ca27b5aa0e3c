# SPDX-License-Identifier: Apache-2.0
"""The device path of a link turns slow and heals while a pipeline trains: its messages take the host path meanwhile."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest

from adaptra_megatron.emulation.fork_server import ForkServer
from adaptra_megatron.emulation.variants import Variant, check_equal, run_variants
from adaptra_megatron.runtime.exchange import DELAY
from adaptra_megatron.telemetry.event_log import read_events
from adaptra_megatron.telemetry.events import PathChosen, PlanSwitched, StampedEvent

STAGES, MICRO_BATCHES, COMPUTE_MS, LATENCY_MS, ONSET, HEALED, ITERATIONS = 4, 12, 8, 60, 9, 18, 26


@pytest.mark.timeout(120)
def test_a_link_whose_device_path_is_slow_takes_the_host_path_until_it_heals(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    arguments = (
        f"--pipeline-model-parallel-size {STAGES} --num-layers {STAGES} --global-batch-size {MICRO_BATCHES} "
        f"--mock-data --no-gradient-accumulation-fusion --hidden-size 32 --seq-length 16 --train-iters {ITERATIONS} "
    ).split()
    trouble = (
        f"--emulate-compute-ms {COMPUTE_MS},{COMPUTE_MS},{COMPUTE_MS} "
        f"--emulate-slow-link 1-2:latency_ms={LATENCY_MS},from={ONSET},until={HEALED} "
        f"--adaptra --adaptra-host-transport shm --adaptra-trace-dir {tmp_path / 'run'}"
    ).split()
    reports = run_variants(
        STAGES,
        [Variant("stock", tuple(arguments)), Variant("adaptra", (*arguments, *trouble), like="stock")],
        timeout_s=100,
        server=fork_server,
        directory=tmp_path,
    )
    check_equal(reports)
    ours = reports[1]
    events = read_events(tmp_path / "run")
    away, back = _choices(events, "host"), _choices(events, "device")
    assert {(event.source, event.target) for event in away} == {(1, 2), (2, 1)}
    assert {(event.source, event.target) for event in back} == {(1, 2), (2, 1)}
    switched = {entry.event.number: entry.stamp.iteration for entry in events if isinstance(entry.event, PlanSwitched)}
    for event in away:
        assert ONSET + DELAY <= switched[event.number] <= ONSET + DELAY + 1
        assert "slow since iteration" in event.reason or "the device path is slow" in event.reason
        assert event.gain_s > 0.5 * LATENCY_MS / 1e3
    for event in back:
        assert HEALED + DELAY <= switched[event.number] <= HEALED + DELAY + 2
        assert "the device path is healthy" in event.reason
    seconds = ours.pipeline_seconds
    healthy, struck = median(seconds[4:ONSET]), median(seconds[ONSET : ONSET + DELAY])
    diverted = median(seconds[ONSET + DELAY + 1 : HEALED])
    assert diverted - healthy < 0.4 * (struck - healthy), seconds


def _choices(events: list[StampedEvent], path: str) -> list[Any]:
    return [entry.event for entry in events if isinstance(entry.event, PathChosen) and entry.event.after == path]
