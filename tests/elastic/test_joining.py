# SPDX-License-Identifier: Apache-2.0
"""Processes that are started again and refused: they would train with other settings, or cannot take part at all."""

from __future__ import annotations

import socket
import sys
import time
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from adaptra_megatron.common.layout import Cell, JobLayout, Worker, host_identity
from adaptra_megatron.common.membership import (
    START_VARIABLE,
    Arrival,
    Departure,
    Membership,
    MembershipRecords,
    Readiness,
)
from adaptra_megatron.common.sealed_store import SealedStore
from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.elastic import rejoin
from adaptra_megatron.elastic.failure_errors import EpochEndedError, JobLostError, UnrecoverableError, of_backend
from adaptra_megatron.elastic.process_group_manager import live_groups
from adaptra_megatron.elastic.protocol import Phase
from adaptra_megatron.elastic.rejoin import RejoiningRank, refuse_other_settings
from adaptra_megatron.engine.rejoining import settings_of


def settings(**changed: Any) -> dict[str, str]:
    config = AdaptraConfig(reroute="failures", prometheus_port=changed.pop("prometheus_port", 1024))
    return {**config.common, **settings_of(Namespace(**{"lr": 0.1, "seed": 7, "log_dir": "here", **changed}))}


def test_all_differences_are_named() -> None:
    with pytest.raises(
        UnrecoverableError, match=r"--lr is 0.2 here and 0.1 there; --seed is not known here and 7 there"
    ):
        refuse_other_settings(3, {"--lr": "0.2"}, {"--lr": "0.1", "--seed": "7"})
    both = r"--lr is 0.2 here and 0.1 there; --seed is not known here and 7 there"
    with pytest.raises(UnrecoverableError, match=both):
        refuse_other_settings(3, {"--lr": "0.2"}, {"--lr": "0.1", "--seed": "7"})
    with pytest.raises(UnrecoverableError, match=r"rank 3 has been started again with other settings .*: --lr is 0.2 "):
        refuse_other_settings(3, settings(lr=0.2), settings())


def test_what_belongs_to_a_host_may_differ() -> None:
    refuse_other_settings(3, settings(prometheus_port=2048, log_dir="there"), settings())


@pytest.mark.parametrize("reroute", ["off", "stragglers"])
def test_a_job_that_does_not_survive_failures_lets_none_in(reroute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    assert live_groups(AdaptraConfig(reroute=reroute)) is None
    monkeypatch.setenv(START_VARIABLE, "1")
    with pytest.raises(UnrecoverableError, match=f"rank 3 has been started again .* --adaptra-reroute {reroute} it"):
        live_groups(AdaptraConfig(reroute=reroute))


def test_a_broken_connection_is_explained_by_the_departure_that_is_known_later() -> None:
    """Torch's error does not name the rank that has failed."""
    rejoining, looks = object.__new__(RejoiningRank), iter((None, None, "departed"))
    # Nothing is known before the error, however long its thread takes.
    rejoining._records = SimpleNamespace(newest=lambda: next(looks) if sys.exc_info()[0] else None)
    rejoining.layout, rejoining.timeout_s = SimpleNamespace(rank=1, name=lambda rank: f"rank {rank}"), 60.0
    state = SimpleNamespace(phase=Phase.COMING, is_struck_by=lambda membership: membership == "departed")
    joined: Any = SimpleNamespace(rank=state)

    def broken() -> None:
        with of_backend():
            raise RuntimeError("Connection closed by peer")

    with pytest.raises(EpochEndedError, match="was late or has failed while rank 1 was to take its place") as found:
        rejoining.wait(joined, broken, "the state")
    assert "Connection closed" in str(found.value.__context__)


def test_a_rank_is_not_lost_whose_stage_has_one_that_is_back() -> None:
    """The rank that led fails once it has admitted rank 1 again: of what it writes then, rank 1 writes as much itself
    as a process that is started again has to know."""
    records = MembershipRecords(SealedStore(HashStore(), bytes(32), "here"))
    left = tuple(Departure(rank, epoch, "host", "was killed by SIGKILL", 0.0) for rank, epoch in ((1, 1), (0, 3)))
    arrived = (Arrival(1, 2, Readiness(1, 1, "host", "boot/net")),)
    records.publish(Membership(3, 2, 0.0, left, arrived))
    rejoining: Any = object.__new__(RejoiningRank)
    rejoining._records = records
    rejoining.layout = JobLayout(0, {each: Worker(Cell(each, 0), 0, "host", "boot/net") for each in range(2)})
    with pytest.raises(JobLostError, match="all 2 cells of stage 0 are dead"):
        rejoining._cell_is_whole()
    records.say_admitted({1: 2})
    assert not rejoining._cell_is_whole()


def test_a_rank_waits_for_the_rest_of_its_cell_as_long_as_the_job_and_then_for_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host of rank 3, which is of the same cell, is replaced after a while; then none of those that live comes."""
    store = SealedStore(HashStore(), bytes(32), "here")
    records, looks = MembershipRecords(store), list[float]()
    ready = Readiness(1, 1, socket.gethostname(), host_identity())
    left = tuple(Departure(rank, 1, "host", "was killed by SIGKILL", 0.0) for rank in (2, 3))
    records.publish(Membership(2, 4, 0.0, left, (Arrival(2, 2, ready),)))

    def look(_store: object, _name: str) -> None:
        looks.append(time.monotonic())
        if len(looks) == 30:
            records.publish(Membership(3, 4, 0.0, left, (Arrival(2, 2, ready), Arrival(3, 3, ready))))

    monkeypatch.setattr(rejoin, "check_abort", look)
    monkeypatch.setattr(rejoin, "_LOOKS_AT_ALL_S", 0.0)
    monkeypatch.setattr(rejoin, "_LOOKS_S", 0.01)
    monkeypatch.setenv(START_VARIABLE, "1")
    rejoining: Any = object.__new__(RejoiningRank)
    rejoining._place, rejoining._store, rejoining._records, rejoining.timeout_s = left[0], store, records, 0.2
    workers = {each: Worker(Cell(each // 2, 0), each % 2, "host", "boot/net") for each in range(4)}
    rejoining.layout = JobLayout(2, workers)
    with pytest.raises(UnrecoverableError, match=r"rank 2, started again, has waited 0\.2 s"):
        rejoining.stand_ready()
    assert looks[29] - looks[0] > 0.2
    assert 0.2 < looks[-1] - looks[29] < 20.0
