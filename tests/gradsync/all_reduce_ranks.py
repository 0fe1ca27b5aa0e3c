# SPDX-License-Identifier: Apache-2.0
"""Ranks that sum tensors up with every algorithm around every straggler: `all_reduce_ranks.py sums`.

`all_reduce_ranks.py death RANK SECONDS`: a rank dies before its fourth exchange, after so many seconds of silence; all
others print the error that they get.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.gradsync.all_reduce_rounds import AllReduce, hidden, ring
from adaptra_megatron.gradsync.peer_messages import Begun, PeerError, PeerMessage, Peers
from adaptra_megatron.gradsync.stragglar import stragglar
from adaptra_megatron.gradsync.straggler_all_reduce import StragglerAllReduce

TIMEOUT_S = 30.0
SILENT_TIMEOUT_S = 3.0
"""Where a rank is silent for longer than that before it dies."""


class Mortal:
    """Peers of a rank that ends itself before an exchange."""

    def __init__(self, peers: Peers, at: int, silent_s: float) -> None:
        self._peers, self._left, self._silent_s = peers, at, silent_s
        self.size, self.index = peers.size, peers.index

    def begin(self, sends: PeerMessage | None, receives: PeerMessage | None) -> Begun:
        """As `Peers.begin`."""
        if self._left == 0:
            time.sleep(self._silent_s)
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1
        return self._peers.begin(sends, receives)


def meet(timeout_s: float) -> Peers:
    """All ranks."""
    ranks = range(dist.get_world_size())
    return Peers.meet(ControlStore.of_job("test"), "test", ranks, dist.get_rank(), timeout_s, torch.device("cpu"))


def plans(ranks: int) -> list[AllReduce]:
    """All algorithms."""
    return [stragglar(ranks), hidden(ranks, 5), ring(ranks)]


def check_sums(peers: Peers, group: dist.ProcessGroup, numel: int, straggler: int, plan: AllReduce) -> None:
    """Integers exactly; others close to the sum in double precision and the same everywhere, to the bit."""
    ranks, rank = peers.size, peers.index
    all_reduce = StragglerAllReduce(peers, plan, straggler)
    if rank == straggler:
        time.sleep(0.002)
    whole = torch.arange(numel, dtype=torch.float32).remainder(97)
    values = whole * (rank + 1)
    all_reduce(values)
    assert torch.equal(values, whole * (ranks * (ranks + 1) // 2)), f"{ranks} ranks, {numel} elements, {straggler}"
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 0.02)):
        each = [torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in range(ranks)]
        values, expected = each[rank].clone(), torch.stack(each).double().sum(0)
        all_reduce(values)
        torch.testing.assert_close(values.double(), expected, rtol=ranks * tolerance, atol=ranks * tolerance)
        others = [torch.empty_like(values) for _ in range(ranks)]
        dist.all_gather(others, values, group=group)
        assert all(torch.equal(values, other) for other in others), "replicas differ"


def sums() -> None:
    """All cases."""
    ranks = dist.get_world_size()
    peers = Peers.meet(
        ControlStore.of_job("test"), "sums", range(ranks), dist.get_rank(), TIMEOUT_S, torch.device("cpu")
    )
    for plan in plans(ranks):
        for straggler in range(ranks):
            for numel in (1, ranks - 1, 4 * ranks * (ranks - 1), 1003):
                check_sums(peers, dist.group.WORLD, numel, straggler, plan)  # type: ignore[arg-type]
    sys.stdout.write("SUMS ARE RIGHT\n")


def death(victim: int, silent_s: float) -> None:
    """A rank dies in an all-reduce of five ranks."""
    peers = meet(TIMEOUT_S)
    peers._timeout_s = SILENT_TIMEOUT_S if silent_s else TIMEOUT_S  # once all have met
    mortal = Mortal(peers, 3, silent_s) if peers.index == victim else peers
    all_reduce = StragglerAllReduce(mortal, stragglar(peers.size), 0)
    begun_s = time.monotonic()
    try:
        for _ in range(3):
            all_reduce(torch.ones(1 << 16))
    except PeerError as error:
        sys.stdout.write(f"RESULT {time.monotonic() - begun_s:.3f} {error}\n")
        with contextlib.suppress(PeerError):
            peers.exchange(None, PeerMessage(torch.zeros(1), 0))
            raise AssertionError("an exchange after the error") from error
        return
    raise AssertionError("the death of a rank went unseen")


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    torch.set_num_threads(1)
    if sys.argv[1] == "sums":
        sums()
    else:
        death(int(sys.argv[2]), float(sys.argv[3]))
