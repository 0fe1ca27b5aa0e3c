# SPDX-License-Identifier: Apache-2.0
"""One rank of benchmarks/gradient_sync.py: `gradient_sync_rank.py CASES.json OUTPUT`."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from adaptra_megatron.data_parallel.peers import Peers
from adaptra_megatron.data_parallel.straggler_all_reduce import StragglerAllReduce
from adaptra_megatron.job.control_store import ControlStore
from adaptra_megatron.schedule.all_reduce.costs import Wire, chain_chunks
from adaptra_megatron.schedule.all_reduce.rings import hidden, ring
from adaptra_megatron.schedule.all_reduce.rounds import AllReduce
from adaptra_megatron.schedule.all_reduce.stragglar import stragglar

TIMEOUT_S = 60.0


class EmulatedWire:
    """A group's backend whose messages each take the time of a wire: what is sent arrives that much later.

    Its library's all-reduce takes what the model has for the best one, from when all are there.
    """

    def __init__(self, backend: Any, wire: Wire, ranks: int) -> None:
        """`backend`: torch's ProcessGroupGloo of so many `ranks`."""
        self._backend, self._wire, self._ranks = backend, wire, ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Any:
        """As that of the backend, later."""
        time.sleep(self._wire.rounds_s(1, 1, tensors[0].nbytes))
        return self._backend.send(tensors, peer, tag)


def plan(algorithm: str, ranks: int, nbytes: int, wire: Wire) -> AllReduce:
    """The rounds of an algorithm."""
    if algorithm == "hidden":
        return hidden(ranks, chain_chunks(ranks, nbytes, wire))
    return {"ring": ring, "stragglar": stragglar}[algorithm](ranks)


def main(cases: Path, output: Path) -> None:
    """Run the cases, one behind the other, and write when each began here and ended."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    torch.set_num_threads(1)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    given = json.loads(cases.read_text())
    wire, straggler = Wire(*given["wire"]), ranks - 1
    control = ControlStore.of_job("benchmark")
    peers = Peers.meet(control, "wire", range(ranks), rank, TIMEOUT_S, torch.device("cpu"))
    peers._backend = EmulatedWire(peers._backend, wire, ranks)
    values = torch.ones(given["nbytes"] // 4)
    gc.disable()
    times = []
    for algorithm, delay_s in given["runs"]:
        all_reduce = StragglerAllReduce(peers, plan(algorithm, ranks, values.nbytes, wire), straggler)
        values.fill_(rank + 1)
        dist.barrier()
        if rank == straggler:
            time.sleep(delay_s)
        begun_s = time.monotonic()
        all_reduce(values)
        times.append((begun_s, time.monotonic()))
        assert torch.all(values == ranks * (ranks + 1) / 2), f"{algorithm} is wrong"
    (output / f"{rank}.json").write_text(json.dumps(times))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
