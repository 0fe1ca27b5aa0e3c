# SPDX-License-Identifier: Apache-2.0
"""False alarms and delays of detection under noise, with fixed seeds."""

from __future__ import annotations

import pytest
from support.made_up.links import MIB, NOISY, SyntheticJob, SyntheticLink

from adaptra_megatron.control.detector.detector import Detector
from adaptra_megatron.control.detector.observations import Finding, LinkId, StageId, State

SEEDS = range(5)
LEARNED = 12
LINK = LinkId(0, 1, 2, "device")


def observed(detector: Detector, job: SyntheticJob, iterations: int) -> list[Finding]:
    return [finding for _ in range(iterations) for finding in detector.observe(job.sample())]


@pytest.mark.parametrize(
    ("iterations", "job"),
    [
        # 10% noise everywhere, exponential jitter of 2 ms, 1% outliers of ten times, 500 ms pauses
        (1100, SyntheticJob(1, pause_every=7)),
        (100, SyntheticJob(2, pause_every=3)),
        (100, SyntheticJob(3, pause_every=7, micro_batches=8)),
        (100, SyntheticJob(4, pause_every=7, micro_batches=4)),
        # jitter of 30 ms on a link that keeps the order, and a link that is always busy
        (100, SyntheticJob(5, pause_every=7, usual=SyntheticLink(jitter_s=0.03, noise=0.1, outliers=0.01))),
        (
            150,
            SyntheticJob(6, pause_every=7, usual=SyntheticLink(jitter_s=0.002, bandwidth_bytes_per_s=4 * MIB / 0.04)),
        ),
    ],
    ids=["all-noise", "frequent-pauses", "8-messages", "4-messages", "jitter-30ms", "saturated"],
)
def test_noise_raises_no_alarm(iterations: int, job: SyntheticJob) -> None:
    alarms = observed(Detector(), job, iterations)
    assert alarms == []


@pytest.mark.parametrize(
    ("changes", "within"),
    [
        ({"latency_s": 0.032}, 1),
        # the outliers now take 0.6 s each, and hold up all that comes after them
        ({"latency_s": 0.062}, 2),
        ({"bandwidth_bytes_per_s": NOISY.bandwidth_bytes_per_s / 10}, 2),
        ({"bandwidth_bytes_per_s": NOISY.bandwidth_bytes_per_s / 100}, 2),
        ({"latency_s": 0.012}, 2),
        ({"jitter_s": 0.03}, 2),
    ],
    ids=["plus-30ms", "plus-60ms", "bandwidth-10x", "bandwidth-100x", "plus-10ms", "jitter-15x"],
)
def test_a_change_is_found_in_time_and_so_is_its_end(changes: dict[str, float], within: int) -> None:
    for seed in SEEDS:
        job, detector = SyntheticJob(seed, pause_every=7), Detector()
        assert observed(detector, job, LEARNED) == []
        job.set_link(1, 2, **changes)
        (onset,) = observed(detector, job, within)
        assert (onset.subject, onset.state, onset.since_iteration) == (LINK, State.SLOW, LEARNED), f"seed {seed}"
        observed(detector, job, 4)
        assert detector.estimates().links[LINK].state is State.SLOW
        job.links.clear()
        (recovery,) = observed(detector, job, 2)
        assert (recovery.subject, recovery.state) == (LINK, State.HEALTHY), f"seed {seed}"


def test_a_burst_of_jitter_is_no_change() -> None:
    """One iteration of few messages, each 30 ms later in the mean: by chance alone they rarely agree."""
    alarms = 0
    for seed in range(100):
        job, detector = SyntheticJob(seed, micro_batches=12, usual=SyntheticLink()), Detector()
        assert observed(detector, job, LEARNED) == []
        job.set_link(1, 2, jitter_s=0.03)
        found = observed(detector, job, 1)
        job.links.clear()
        alarms += bool(found + observed(detector, job, 4))
    assert alarms <= 5


def test_estimates_follow_the_truth() -> None:
    job, detector = SyntheticJob(7, pause_every=7), Detector()
    observed(detector, job, LEARNED)
    before = detector.estimates().links[LINK]
    job.set_link(1, 2, latency_s=0.032)
    observed(detector, job, 1)
    slower = detector.estimates().links[LINK]
    assert slower.transfer_s - before.transfer_s == pytest.approx(0.030, abs=0.005)
    assert slower.bandwidth_bytes_per_s is None
    job.set_link(1, 2, bandwidth_bytes_per_s=4 * MIB / 0.02)
    observed(detector, job, 4)
    narrow = detector.estimates().links[LINK]
    assert narrow.bandwidth_bytes_per_s == pytest.approx(4 * MIB / 0.02, rel=0.05)
    assert narrow.occupancy_s(4 * MIB) == pytest.approx(0.02, rel=0.05)
    assert narrow.latency_s == pytest.approx(before.transfer_s - 4 * MIB / NOISY.bandwidth_bytes_per_s, abs=0.002)


def test_a_slow_gpu_is_found_in_two_iterations() -> None:
    for seed in SEEDS:
        job, detector = SyntheticJob(seed, pause_every=7), Detector()
        observed(detector, job, LEARNED)
        job.slowdown[2] = 1.25
        findings = observed(detector, job, 2)
        assert {(finding.subject, finding.state) for finding in findings} == {(StageId(0, 2), State.SLOW)}
        estimate = detector.estimates().stages[StageId(0, 2)]
        assert estimate.durations_s["F", 0] == pytest.approx(0.0125, rel=0.1)
        job.slowdown.clear()
        assert observed(detector, job, 3)[-1].state is State.HEALTHY
