# SPDX-License-Identifier: Apache-2.0
"""Sums over real processes, around any straggler and of any size, and errors that name a rank that is gone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import RankResult

from adaptra_megatron.gradsync.all_reduce_rounds import hidden, ring
from adaptra_megatron.gradsync.peer_messages import PeerError, PeerMessage, Peers
from adaptra_megatron.gradsync.stragglar import stragglar

RANKS = str(Path(__file__).with_name("all_reduce_ranks.py"))
StartRanks = Callable[..., list[RankResult]]
slow = pytest.mark.slow


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", [2, 3, 4, *(pytest.param(each, marks=slow) for each in (5, 6, 7, 8))])
def test_sums_are_complete_and_replicas_equal(start_ranks: StartRanks, ranks: int) -> None:
    for result in start_ranks(ranks, [RANKS, "sums"], timeout_s=100):
        assert "SUMS ARE RIGHT" in result.output


@pytest.mark.timeout(60)
@pytest.mark.parametrize("silent_s", [0, 6])
def test_a_rank_that_is_gone_is_named_by_all_others(start_ranks: StartRanks, silent_s: int) -> None:
    """At once if it has died, long before the timeout, by those too that were not in touch with it."""
    victim = 2
    argv = [RANKS, "death", str(victim), str(silent_s)]
    results = start_ranks(5, argv, timeout_s=40, check=False, stop_on_failure=False)
    for result in results:
        if result.rank == victim:
            assert result.returncode == -9
            continue
        assert result.returncode == 0, result.output
        (line,) = (line for line in result.output.splitlines() if line.startswith("RESULT "))
        seconds, _, error = line.removeprefix("RESULT ").partition(" ")
        assert f"rank {victim} has died or did not answer" in error
        assert float(seconds) < 20.0


class Coalescing:
    """A backend that carries out what is between start and end as one operation, on a stream, as NCCL's does."""

    supports_coalescing = True

    def __init__(self, polls: int = 3) -> None:
        self.operations: list[str] = []
        self._polls = polls
        """How often an operation is looked at before it has ended."""

    def is_completed(self) -> bool:
        self._polls -= 1
        return self._polls <= 0

    def __getattr__(self, name: str) -> Any:
        def called(*given: Any) -> Any:
            self.operations.append(name)
            assert name != "wait" or not given, "the host would wait"
            return self

        return called


class Gone:
    """A store that is not there any more."""

    def set(self, *given: Any) -> None:
        raise RuntimeError("no store")

    check = set


def both_ways() -> tuple[PeerMessage, PeerMessage]:
    return PeerMessage(torch.ones(1), 0), PeerMessage(torch.ones(1), 2)


def test_both_ways_of_an_exchange_are_launched_as_one_where_the_backend_can() -> None:
    backend = Coalescing()
    peers = Peers(backend, None, [4, 6, 9], 6, 1.0)
    peers.exchange(*both_ways())
    assert backend.operations == ["_start_coalescing", "recv", "send", "_end_coalescing", "wait"]
    assert (peers.size, peers.index) == (3, 1)
    peers.settle()
    assert backend.is_completed()


def test_what_stands_on_a_stream_for_too_long_names_its_peers() -> None:
    """Also without the store, which has what others have seen."""
    peers = Peers(Coalescing(polls=1 << 60), Gone(), [4, 6, 9], 6, 0.05)
    peers.exchange(*both_ways())
    with pytest.raises(PeerError, match=r"^rank 6: .* rank 4 or rank 9 has died .*0.05 s \(Timed out\)"):
        peers.settle()
    with pytest.raises(PeerError, match="any more"):
        peers.all_reduce(torch.ones(1))


def test_the_end_of_a_chain_of_waits_is_named_by_the_one_that_times_out_first() -> None:
    store = dist.HashStore()
    late = threading.Timer(0.3, store.set, ("accused/9", "4"))
    late.start()
    peers = Peers(Coalescing(polls=1 << 60), store, [4, 6, 9], 6, 0.05)
    peers.exchange(None, PeerMessage(torch.ones(1), 2))
    with pytest.raises(PeerError, match=r"^rank 6: .* rank 4 has died .*, as rank 9 has seen \(Timed out\)"):
        peers.settle()
    late.join()


@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 11])
def test_no_step_receives_in_place_what_it_sends(ranks: int) -> None:
    for plan in (stragglar(ranks), hidden(ranks, 7), ring(ranks)):
        for phase in (plan.waiting, plan.together):
            for step in (step for rank in range(ranks) for step in phase.steps(rank)):
                if step.sends is not None and step.receives is not None and not step.receives.adds:
                    assert step.sends.chunk != step.receives.chunk
