# SPDX-License-Identifier: Apache-2.0
"""The device path of a link turns slow and heals while a pipeline trains: its messages take the host path meanwhile."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest

from adaptra_megatron.control.decisions import DELAY
from adaptra_megatron.telemetry.event_log import read_events
from adaptra_megatron.telemetry.events import PathChosen, PlanMade, PlanSwitched, StampedEvent
from campaigns.story_check import FOUND_WITHIN
from testing.jobs.fork_server import ForkServer
from testing.jobs.variants import Variant, VariantReport, check_equal, run_variants

STAGES, MICRO_BATCHES, COMPUTE_MS, LATENCY_MS, ONSET, HEALED, ITERATIONS = 4, 12, 16, 120, 9, 18, 32


def train(directory: Path, server: ForkServer, fault: str) -> tuple[VariantReport, list[StampedEvent]]:
    """A training of four stages with `fault`, compared with stock's; what it reported."""
    arguments = (
        f"--pipeline-model-parallel-size {STAGES} --num-layers {STAGES} --global-batch-size {MICRO_BATCHES} "
        f"--mock-data --no-gradient-accumulation-fusion --hidden-size 32 --seq-length 16 --train-iters {ITERATIONS}"
    ).split()
    trouble = (
        f"--emulate-compute-ms {COMPUTE_MS},{COMPUTE_MS},{COMPUTE_MS} --emulate-slow-link {fault} "
        "--emulate-prompt-planner --emulate-exact-times "
        f"--adaptra --adaptra-max-in-flight 8 --adaptra-host-transport shm --adaptra-trace-dir {directory / 'run'}"
    ).split()
    reports = run_variants(
        STAGES,
        [Variant("stock", tuple(arguments)), Variant("adaptra", (*arguments, *trouble), like="stock")],
        timeout_s=400,
        server=server,
        directory=directory,
    )
    check_equal(reports)
    return reports[1], read_events(directory / "run")


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_a_link_whose_device_path_is_slow_takes_the_host_path_until_it_heals(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    """On a busy machine, other links may be slow in truth, and this one again once it has healed: what they do then is
    not judged."""
    fault = f"1-2:latency_ms={LATENCY_MS},from={ONSET},until={HEALED}"
    ours, events = train(tmp_path, fork_server, fault)
    away, back = (
        [_first_choice(events, path, source, target) for source, target in ((1, 2), (2, 1))]
        for path in ("host", "device")
    )
    switched = _switches(events)
    for event in away:
        assert ONSET + DELAY <= switched[event.number] < ONSET + DELAY + FOUND_WITHIN
        assert "the device path is slow" in event.reason
        assert event.gain_s > 0.5 * LATENCY_MS / 1e3
    for event in back:  # once probes of less than a millisecond tell so, which is the machine's matter
        assert switched[event.number] >= HEALED + DELAY
        assert "the device path is healthy" in event.reason
    for link in ("1>2", "2>1"):  # messages until the switch, and probes
        assert 0 < ours.links_struck[link] < MICRO_BATCHES * (HEALED - ONSET)


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_a_cable_that_slows_both_paths_is_planned_around(tmp_path: Path, fork_server: ForkServer) -> None:
    fault = f"1-2:latency_ms={LATENCY_MS},from={ONSET},until={HEALED},path=both"
    ours, events = train(tmp_path, fork_server, fault)
    switched = _switches(events)
    planned = [
        entry.event
        for entry in events
        if isinstance(entry.event, PlanMade)
        and entry.event.adopted
        and max(link["latency_s"] for link in entry.event.costs["links"]) > 0.9 * LATENCY_MS / 1e3
    ]
    assert ONSET + DELAY <= switched[planned[0].number] < ONSET + DELAY + FOUND_WITHIN
    for path in ("host", "device"):
        links = [(event.source, event.target) for event in _choices(events, path)]
        assert len(links) == len(set(links)) <= 2, "a link goes there and back once at most"
    seconds = ours.pipeline_seconds
    struck, planned_s = median(seconds[ONSET : ONSET + DELAY]), median(seconds[ONSET + DELAY + 1 : HEALED])
    assert planned_s < 0.9 * struck, seconds


def _switches(events: list[StampedEvent]) -> dict[int, int]:
    """By plan: the iteration from which it was in force, itself or as part of a later one that overtook it."""
    ran = {entry.event.number: entry.stamp.iteration for entry in events if isinstance(entry.event, PlanSwitched)}
    return {made: min(at for number, at in ran.items() if number >= made) for made in range(1, max(ran) + 1)}


def _choices(events: list[StampedEvent], path: str) -> list[Any]:
    return [entry.event for entry in events if isinstance(entry.event, PathChosen) and entry.event.after == path]


def _first_choice(events: list[StampedEvent], path: str, source: int, target: int) -> Any:
    made = [event for event in _choices(events, path) if (event.source, event.target) == (source, target)]
    assert made, f"link {source}>{target} never took the {path} path"
    return made[0]
