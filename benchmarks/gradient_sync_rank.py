# SPDX-License-Identifier: Apache-2.0
"""One rank of benchmarks/gradient_sync.py: `gradient_sync_rank.py CASES.json OUTPUT`.

`gradient_sync_rank.py train WIRE.json OUTPUT ARGUMENTS...`: of a training whose gradients go over an emulated wire.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.gradsync import peer_messages as peers
from adaptra_megatron.gradsync.all_reduce_algorithms import AllReduceWire, chain_chunks, stock_s
from adaptra_megatron.gradsync.all_reduce_rounds import AllReduce, hidden, ring
from adaptra_megatron.gradsync.stragglar import stragglar
from adaptra_megatron.gradsync.straggler_all_reduce import StragglerAllReduce
from testing.replacing import Replaced, Replacement

TIMEOUT_S = 60.0


class EmulatedWire:
    """A group's backend over one link per member: each message takes its time on it, one behind the other.

    A library's all-reduce takes what the model has for the best one, from when all are there.
    """

    def __init__(self, backend: Any, wire: AllReduceWire) -> None:
        """`backend`: torch's ProcessGroupGloo."""
        self._backend, self._wire = backend, wire
        self._link = ThreadPoolExecutor(1)
        self._free_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Any:
        """As that of the backend, once the link has carried it."""
        self._free_s = max(self._free_s, time.monotonic()) + self._wire.rounds_s(1, 1, tensors[0].nbytes)
        return SentCount(self._link.submit(self._arrive, self._free_s, tensors, peer, tag))

    def _arrive(self, arrival_s: float, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> None:
        time.sleep(max(0.0, arrival_s - time.monotonic()))
        self._backend.send(tensors, peer, tag).wait(timedelta(seconds=TIMEOUT_S))

    def allreduce(self, tensors: Sequence[torch.Tensor]) -> Any:
        """As that of the backend, and the link's time."""
        work = self._backend.allreduce(tensors)
        work.wait(timedelta(seconds=TIMEOUT_S))
        time.sleep(stock_s(self._backend.size(), tensors[0].nbytes, self._wire))
        return work

    def allgather(self, found: Sequence[Sequence[torch.Tensor]], own: Sequence[torch.Tensor]) -> Any:
        """As that of the backend, and the messages of a ring."""
        time.sleep(self._wire.rounds_s(self._backend.size() - 1, 1, own[0].nbytes))
        return self._backend.allgather(found, own)


class SentCount(NamedTuple):
    """What is waited for."""

    future: Future[None]

    def wait(self, limit: timedelta) -> None:
        """Wait for it."""
        self.future.result(limit.total_seconds())


def plan(algorithm: str, ranks: int, nbytes: int, wire: AllReduceWire) -> AllReduce:
    """The rounds of an algorithm."""
    if algorithm == "hidden":
        return hidden(ranks, chain_chunks(ranks, nbytes, wire))
    return {"ring": ring, "stragglar": stragglar}[algorithm](ranks)


def all_reduces(cases: Path, output: Path) -> None:
    """Run the cases, one behind the other, and write when each began here and ended."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    torch.set_num_threads(1)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    given = json.loads(cases.read_text())
    wire, straggler = AllReduceWire(*given["wire"]), ranks - 1
    control = ControlStore.of_job("benchmark")
    group = peers.Peers.meet(control, "wire", range(ranks), rank, TIMEOUT_S, torch.device("cpu"))
    group._backend = EmulatedWire(group._backend, wire)
    values = torch.ones(given["nbytes"] // 4)
    gc.disable()
    times = []
    for algorithm, delay_s in given["runs"]:
        all_reduce = StragglerAllReduce(group, plan(algorithm, ranks, values.nbytes, wire), straggler)
        values.fill_(rank + 1)
        dist.barrier()
        if rank == straggler:
            time.sleep(delay_s)
        begun_s = time.monotonic()
        all_reduce(values)
        times.append((begun_s, time.monotonic()))
        assert torch.all(values == ranks * (ranks + 1) / 2), f"{algorithm} is wrong"
    (output / f"{rank}.json").write_text(json.dumps(times))


def train(given: Path, output: Path, argv: Sequence[str]) -> None:
    """Train, and write what each iteration has taken and which algorithms have summed gradients up."""
    from testing.megatron.megatron_on_cpu import install

    install()
    from testing.training import train as training
    from testing.training.process_groups import leave_job
    from testing.training.training_arguments import parse_arguments

    torch.set_num_threads(1)
    nbytes, wire = (lambda found: (found["nbytes"], AllReduceWire(*found["wire"])))(json.loads(given.read_text()))
    all_reduce, group_of = dist.all_reduce, peers.epoch_group

    def delayed(tensor: torch.Tensor, *values: Any, **keywords: Any) -> Any:
        """As torch's, which ends when all that have come have waited for so long."""
        ranks = dist.get_world_size(keywords.get("group"))
        time.sleep(stock_s(ranks, tensor.nbytes, wire) if ranks > 1 else 0.0)
        return all_reduce(tensor, *values, **keywords)

    with Replaced(
        [
            Replacement(dist, "all_reduce", delayed, "gradients by Megatron go over the wire"),
            Replacement(peers, "epoch_group", lambda *values: EmulatedWire(group_of(*values), wire), "and ours, too"),
        ]
    ):
        result = training.train(parse_arguments(argv))
    trained = sum(each.numel() * each.element_size() for each in result.parameters.values())
    assert trained == nbytes, f"the model has {trained} bytes of gradients"
    used = (result.adaptra or {}).get("gradient_sync", {})
    output.joinpath(f"{dist.get_rank()}.json").write_text(json.dumps([result.iteration_seconds, used]))
    leave_job()


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
    else:
        all_reduces(Path(sys.argv[1]), Path(sys.argv[2]))
