# SPDX-License-Identifier: Apache-2.0
"""A request for a trace reaches the leaders of all replicas, once each."""

from __future__ import annotations

from support.made_up.job import SECRET
from torch.distributed import HashStore

from adaptra_megatron.authentication.sealed_store import SealedStore
from adaptra_megatron.control.trace_sharing import SharedRequests
from adaptra_megatron.telemetry.tracing.trace_requests import Iterations


def test_every_replica_gets_each_request_once() -> None:
    store, asked = SealedStore(HashStore(), SECRET, "requests"), [(), (Iterations(3, 4),), (Iterations(9, 9),), ()]
    first = SharedRequests(store, lambda: asked.pop(0))
    others = [SharedRequests(store, None) for _ in range(2)]
    found = [[leader.new() for leader in (first, *others)] for _ in range(4)]
    assert found == [[wanted] * 3 for wanted in ((), (Iterations(3, 4),), (Iterations(9, 9),), ())]
