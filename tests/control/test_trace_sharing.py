# SPDX-License-Identifier: Apache-2.0
"""A request for a trace reaches the leaders of all replicas, once each."""

from __future__ import annotations

from support.made_up.job import SECRET
from torch.distributed import HashStore

from adaptra_megatron.common.sealed_store import SealedStore
from adaptra_megatron.control.decisions import TelemetrySection
from adaptra_megatron.control.finding_sharing import SharedRequests
from adaptra_megatron.telemetry.trace_requests import Iterations


def test_every_replica_gets_each_request_once() -> None:
    store = SealedStore(HashStore(), SECRET, "requests")
    all_asked = [
        TelemetrySection(),
        TelemetrySection((Iterations(3, 4),)),
        TelemetrySection((Iterations(9, 9),)),
        TelemetrySection(policy="observe"),
        TelemetrySection(),
    ]
    asked = list(all_asked)
    first = SharedRequests(store, lambda: asked.pop(0))
    others = [SharedRequests(store, None) for _ in range(2)]
    found = [[leader.new() for leader in (first, *others)] for _ in all_asked]
    assert found == [[wanted] * 3 for wanted in all_asked]
