# SPDX-License-Identifier: Apache-2.0
"""A link turns slow and heals while a pipeline trains: found, planned for and explained, in time."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from adaptra_megatron.emulation.fork_server import ForkServer
from adaptra_megatron.emulation.variants import Variant, run_variants
from adaptra_megatron.runtime.exchange import DELAY
from adaptra_megatron.telemetry.event_log import read_events
from adaptra_megatron.telemetry.events import LinkDetection, PlanMade, PlanSwitched, StageDetection, StampedEvent

STAGES, MICRO_BATCHES, COMPUTE_MS, LATENCY_MS, ONSET, HEALED, ITERATIONS = 4, 12, 10, 60, 8, 20, 24


@pytest.mark.timeout(120)
def test_a_slow_link_is_found_planned_for_and_explained(tmp_path: Path, fork_server: ForkServer) -> None:
    arguments = (
        f"--pipeline-model-parallel-size {STAGES} --num-layers {STAGES} --global-batch-size {MICRO_BATCHES} "
        f"--mock-data --no-gradient-accumulation-fusion --hidden-size 32 --seq-length 16 --train-iters {ITERATIONS} "
        f"--emulate-compute-ms {COMPUTE_MS},{COMPUTE_MS},{COMPUTE_MS} "
        f"--emulate-slow-link 1-2:latency_ms={LATENCY_MS},from={ONSET},until={HEALED} "
        f"--adaptra --adaptra-max-in-flight 8 --adaptra-trace-dir {tmp_path / 'run'}"
    ).split()
    (ours,) = run_variants(
        STAGES, [Variant("adaptra", tuple(arguments))], timeout_s=100, server=fork_server, directory=tmp_path
    )
    assert ours.links_struck == dict.fromkeys(("1>2", "2>1"), (HEALED - ONSET) * MICRO_BATCHES)
    events = read_events(tmp_path / "run")
    _check_detections(_of(events, LinkDetection))
    _check_plans(events)
    seconds = ours.pipeline_seconds
    struck, recovered = median(seconds[ONSET : ONSET + DELAY]), median(seconds[ONSET + DELAY : HEALED])
    assert recovered < 0.9 * struck, seconds


def _check_detections(detections: list[Any]) -> None:
    """Both directions, at the onset and when the link has healed, with their numbers."""
    for source, target in ((1, 2), (2, 1)):
        said = [event for event in detections if (event.source, event.target) == (source, target)]
        onset = next(event for event in said if event.latency_s >= LATENCY_MS / 1e3)
        assert (onset.before, onset.after, onset.path) == ("healthy", "slow", "device")
        assert onset.latency_s < 1.5 * LATENCY_MS / 1e3
        assert said[-1].after == "healthy"


def _check_plans(events: list[StampedEvent]) -> None:
    """The plan for the slow link runs two iterations after the onset, and every change says why."""
    found = [event.reason for kind in (LinkDetection, StageDetection) for event in _of(events, kind)]
    plans = _of(events, PlanMade)
    assert plans[0].reason == "first costs"
    switches = {entry.event.number: entry for entry in events if isinstance(entry.event, PlanSwitched)}
    for made in plans:
        if made.adopted and made.number in switches and switches[made.number].stamp.iteration >= ONSET:
            assert any(reason in made.reason for reason in found), made.reason
    for_slow = next(
        made for made in plans if made.adopted and f"slow since iteration {ONSET}, a message" in made.reason
    )
    assert re.search(r"link (1->2|2->1) of pipeline 0, device path: slow since .* takes \d+(\.\d)? ms", for_slow.reason)
    assert for_slow.predicted_s < 0.95 * for_slow.current_predicted_s
    switch: Any = switches[for_slow.number].event
    assert switches[for_slow.number].stamp.iteration == ONSET + DELAY
    assert (switch.predicted_s, switch.before_predicted_s) == (for_slow.predicted_s, for_slow.current_predicted_s)
    # Whether or not another order is worth a switch by then.
    assert any(f"healthy since iteration {HEALED}, a message" in made.reason for made in plans)


def _of(events: list[StampedEvent], kind: type[Any]) -> list[Any]:
    return [entry.event for entry in events if isinstance(entry.event, kind)]
