# SPDX-License-Identifier: Apache-2.0
"""Links turn slow, move and heal while pipelines train: found, planned for and explained; the numbers do not move."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adaptra_megatron.control.decisions import DELAY
from adaptra_megatron.schedule.classic import stock_order
from adaptra_megatron.schedule.csv_format import schedule_to_csv
from adaptra_megatron.telemetry.event_log import read_events
from adaptra_megatron.telemetry.events import LinkDetection, PathChosen, PlanMade, PlanSwitched
from campaigns.closed_loop import Campaign, CampaignReport, run_campaign
from testing.faults.network.link_story import FIRST_TURN
from testing.jobs.fork_server import ForkServer
from testing.jobs.variants import Variant, check_equal, run_variants

BUSY_MACHINE = ("--emulate-prompt-planner", "--emulate-exact-times")
"""Decisions come in time, and actions last what is emulated, whatever else the machine does; they are long
compared with how late its messages may be. `make closed-loop` measures all of it."""
STORY = Campaign(seed=19, stages=4, micro_batches=10, iterations=46, action_ms=20.0, cap=6.0, more=BUSY_MACHINE)
REPLICAS = replace(STORY, seed=8, data_parallel=2, micro_batches=8, iterations=20)
TENSOR_PARALLEL = replace(STORY, seed=6, tensor_parallel=2, micro_batches=8, iterations=20)
TWO_PATHS = replace(STORY, seed=55, host_transport="shm")
LONG = Campaign(iterations=200, stages=8)


def _hold(report: CampaignReport, problems: list[str]) -> None:
    assert not problems, "\n".join([*problems, report.summary()])


@pytest.mark.timeout(620)
def test_every_turn_of_a_story_is_found_planned_for_and_explained(fork_server: ForkServer, tmp_path: Path) -> None:
    """The campaign itself judges whether all findings were right; this shows that it took place, and that plans were in
    force in time."""
    report = run_campaign(STORY, tmp_path, fork_server, timeout_s=500)
    _hold(report, report.problems)
    assert sum(turn.fault is not None for turn in report.story.turns()) >= 4
    assert {rank["peak_in_flight"] <= STORY.cap for rank in report.ours.adaptra} == {True}
    assert report.ours.elements_compared > 100_000
    in_time = [
        switched - detection.since_iteration
        for switched, plan in _plans_in_force(report)
        for detection in _found(report)
        if detection.after == "slow" and detection.reason in plan.reason
    ]
    assert min(in_time) == DELAY
    reasons = [plan.reason for _, plan in _plans_in_force(report)]
    assert any(
        re.search(r"link \d->\d of pipeline 0, device path: slow since .* takes \d+(\.\d)? ms", r) for r in reasons
    )
    assert any("healthy since iteration" in reason for reason in reasons)


@pytest.mark.timeout(620)
def test_links_with_two_paths_take_the_better_one_and_stages_order_themselves(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """Some spells strike the device path alone: messages go round them by the host path, where arrivals are seen and
    stages need no order; others strike both."""
    report = run_campaign(TWO_PATHS, tmp_path, fork_server, timeout_s=500)
    _hold(report, report.problems)
    struck = {len(fault.paths): (fault.source, fault.target) for fault in report.story.spells}
    chosen = [entry.event for entry in report.events if isinstance(entry.event, PathChosen)]
    assert struck[1] in {(choice.source, choice.target) for choice in chosen if choice.after == "host"}
    assert any(choice.after == "device" for choice in chosen), "and back when it has healed"
    by_host = sum(link["paths"]["sent_by_host"] for rank in report.ours.adaptra for link in rank["links"].values())
    assert by_host > TWO_PATHS.micro_batches


def _plans_in_force(report: CampaignReport) -> Iterator[tuple[int, Any]]:
    """Each plan that ran after the first turn, with its first iteration."""
    plans = {e.event.number: e.event for e in report.events if isinstance(e.event, PlanMade) and e.event.adopted}
    for entry in report.events:
        if isinstance(entry.event, PlanSwitched) and entry.stamp.iteration >= FIRST_TURN:
            yield entry.stamp.iteration, plans[entry.event.number]


def _found(report: CampaignReport) -> list[Any]:
    return [entry.event for entry in report.events if isinstance(entry.event, LinkDetection)]


@pytest.mark.timeout(620)
@pytest.mark.parametrize(
    "campaign",
    [pytest.param(REPLICAS, id="dp2-pp4"), pytest.param(TENSOR_PARALLEL, id="tp2-pp4", marks=pytest.mark.slow)],
)
def test_pipelines_with_slow_links_of_their_own_agree(
    campaign: Campaign, fork_server: ForkServer, tmp_path: Path
) -> None:
    """Lanes of a replica on one plan; each replica on its own, which is close to what its own links allow. Eight
    processes share the cores: what is found besides the story, or planned for, may well be true, and is not judged."""
    report = run_campaign(campaign, tmp_path, fork_server, timeout_s=500)
    besides = re.compile("false alarm|iteration .* names no finding")
    problems = [problem for problem in report.problems if not besides.match(problem)]
    _hold(report, problems)
    made = [entry for entry in report.events if isinstance(entry.event, PlanMade)]
    assert {entry.stamp.rank for entry in made} == {ranks[0] for ranks in campaign.replicas}, "each has a leader"
    assert {entry.event.predicted_s <= 1.05 * entry.event.lower_bound_s for entry in made} == {True}
    ran = [{fingerprint for _, fingerprint in report.ours.plans[ranks[0]]} for ranks in campaign.replicas]
    assert len(ran) == 1 or ran[0] != ran[1], "replicas with links of their own run plans of their own"
    assert {fault.pipeline for fault in report.story.spells} == {0, 1}, "each pipeline has slow links of its own"
    assert {detection.pipeline for detection in _found(report)} == {0, 1}
    assert len(report.ours.plans) == campaign.world_size
    assert report.ours.elements_compared > 100_000


@pytest.mark.timeout(420)
def test_observing_changes_no_bit_and_no_order_but_says_what_it_sees(fork_server: ForkServer, tmp_path: Path) -> None:
    stages, micro_batches, iterations = 3, 6, 12
    arguments = (
        f"--pipeline-model-parallel-size {stages} --num-layers {stages} --global-batch-size {micro_batches} "
        f"--mock-data --no-gradient-accumulation-fusion --hidden-size 32 --seq-length 16 --train-iters {iterations} "
    )
    observing = (
        f"--emulate-compute-ms 160,160,160 {' '.join(BUSY_MACHINE)} --emulate-slow-link 1>2:latency_ms=640,from=8 "
        f"--adaptra --adaptra-host-transport off --adaptra-policy observe --adaptra-trace-dir {tmp_path / 'run'}"
    )
    stock, observed = run_variants(
        stages,
        [
            Variant("stock", tuple(arguments.split())),
            Variant("observed", tuple((arguments + observing).split()), like="stock"),
        ],
        timeout_s=300,
        server=fork_server,
        directory=tmp_path,
    )
    check_equal([stock, observed])
    order = schedule_to_csv(stock_order(stages, micro_batches, 1, None))
    assert {rank["schedule_csv"] for rank in observed.adaptra} == {order}
    assert {number for rank in observed.plans for number, _ in rank} == {0}
    assert len({fingerprint for rank in observed.plans for _, fingerprint in rank}) == 1
    events = [entry.event for entry in read_events(tmp_path / "run")]
    found = [(e.source, e.target, e.after, e.since_iteration) for e in events if isinstance(e, LinkDetection)]
    assert (1, 2, "slow", 8) in found
    assert not [event for event in events if isinstance(event, (PlanMade, PlanSwitched))]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_long_story_on_eight_stages(fork_server: ForkServer, tmp_path: Path) -> None:
    report = run_campaign(LONG, tmp_path, fork_server, timeout_s=1400)
    _hold(report, report.problems)
