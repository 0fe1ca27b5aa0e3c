# SPDX-License-Identifier: Apache-2.0
"""The fault campaign, small enough for every run of the tests; `make soak` is the full one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from campaigns.soak import STAGES, run_round
from campaigns.soak_report import percentile, table
from testing.jobs.fork_server import ForkServer
from testing.soak.soak_plan import Campaign, Kind

# How fast links recover says `make soak`; here it is that they do, on a machine that may be busy with other things.
CAMPAIGN = Campaign(
    kills=4,
    stops=3,
    long_stops=0,
    store_stops=1,
    corrupted_rings=2,
    unauthenticated_peers=2,
    signals=2,
    path_faults=4,
    flaps=200,
    spacing=4,
    longest_recovery_s=8.0,
)
STOPPED = Campaign(
    kills=0,
    stops=0,
    long_stops=2,
    long_stop_s=120.0,
    store_stops=0,
    corrupted_rings=0,
    unauthenticated_peers=0,
    signals=0,
    path_faults=0,
    flaps=100,
    longest_recovery_s=8.0,
)


@pytest.mark.timeout(480)
def test_training_under_faults_is_training_in_peace(fork_server: ForkServer, tmp_path: Path) -> None:
    """Numbers, deadlines and what is left behind are judged by the campaign itself; this shows that it took place."""
    said: list[str] = []
    report = run_round(CAMPAIGN, 1, tmp_path, fork_server, said.append)
    assert not report.problems, "\n".join([*report.problems, table(report.records), *said])
    strikes = [record.strikes() for record in report.records]
    assert sum(count[Kind.KILL_DELEGATE] for count in strikes) == CAMPAIGN.kills
    assert sum(count[Kind.STOP_DELEGATE] + count[Kind.STOP_RANK] for count in strikes) == CAMPAIGN.stops
    assert sum(count[kind] for count in strikes for kind in Kind if kind.inside) == CAMPAIGN.path_faults
    assert sum(count[Kind.STOP_STORE] for count in strikes) == CAMPAIGN.store_stops
    assert [count[Kind.KILL_STORE] for count in strikes] == [0, 0, 1]
    assert sum(count[Kind.CORRUPT_RING] for count in strikes) == CAMPAIGN.corrupted_rings
    assert sum(count[Kind.UNAUTHENTICATED_PEERS] for count in strikes) == CAMPAIGN.unauthenticated_peers
    assert sum(count[Kind.SIGNAL_DELEGATE] for count in strikes) == CAMPAIGN.signals
    assert report.switches >= CAMPAIGN.flaps
    assert report.elements_compared > 100_000
    assert min(report.by_device, report.by_host) > 1000
    pauses = [recovery.pause_s for record in report.records for recovery in record.recoveries()]
    assert len(pauses) == sum(count[kind] for count in strikes for kind in Kind)
    assert percentile(pauses, 0.5) > 0.0  # how long they may be is judged by the campaign, and measured by `make soak`


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("transport", "seed"), [("tcp", "12"), ("shm", "5")])
def test_a_rank_that_does_not_run_for_two_minutes_changes_nothing(
    fork_server: ForkServer, tmp_path: Path, transport: str, seed: str
) -> None:
    """Once with a store and once without. Stages are inner ones: the lower end of one link, the upper of another."""
    said: list[str] = []
    campaign = replace(STOPPED, transports=(transport,), seed=seed)
    report = run_round(campaign, 1, tmp_path, fork_server, said.append)
    assert not report.problems, "\n".join([*report.problems, table(report.records), *said])
    for record in report.records:
        (stopped,) = (done for done in record.done if done.fault.kind is Kind.STOP_RANK_LONG)
        assert 0 < stopped.fault.stage < STAGES - 1
        assert stopped.over_s - stopped.at_s > 119.0
