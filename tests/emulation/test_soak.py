# SPDX-License-Identifier: Apache-2.0
"""The fault campaign, small enough for every run of the tests; `make soak` is the full one."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaptra_megatron.emulation.fork_server import ForkServer
from adaptra_megatron.emulation.soak import Campaign, run_round
from adaptra_megatron.emulation.soak_plan import Kind
from adaptra_megatron.emulation.soak_report import percentile, table

# How fast links recover says `make soak`; here it is that they do, on a machine that may be busy with other things.
CAMPAIGN = Campaign(kills=50, stops=24, path_faults=30, flaps=1000, spacing=5, longest_recovery_s=8.0)


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
    assert report.switches >= CAMPAIGN.flaps
    assert report.elements_compared > 100_000
    assert min(report.by_device, report.by_host) > 1000
    pauses = [recovery.pause_s for record in report.records for recovery in record.recoveries()]
    assert len(pauses) == CAMPAIGN.kills + CAMPAIGN.stops + CAMPAIGN.path_faults
    assert 0.0 < percentile(pauses, 0.5) < 1.0
