# SPDX-License-Identifier: Apache-2.0
"""One rank of benchmarks/gradient_sync.py: `gradient_sync_rank.py CASES.json OUTPUT`."""

from __future__ import annotations

import gc
import json
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from adaptra_megatron.data_parallel.peers import Exchange, Message, Peers
from adaptra_megatron.data_parallel.straggler_all_reduce import StragglerAllReduce
from adaptra_megatron.job.control_store import ControlStore
from adaptra_megatron.schedule.all_reduce.costs import Wire, chain_chunks
from adaptra_megatron.schedule.all_reduce.rings import hidden, ring
from adaptra_megatron.schedule.all_reduce.rounds import AllReduce
from adaptra_megatron.schedule.all_reduce.stragglar import stragglar

TIMEOUT_S = 60.0


@dataclass
class EmulatedWire:
    """Peers whose messages each take the time of a wire: what is sent arrives that much later."""

    peers: Exchange
    wire: Wire

    @property
    def size(self) -> int:
        """Number of members."""
        return self.peers.size

    @property
    def index(self) -> int:
        """This process's."""
        return self.peers.index

    def exchange(self, sends: Message | None, receives: Message | None) -> None:
        """As that of `peers`, later."""
        if sends is not None:
            time.sleep(self.wire.rounds_s(1, 1, sends.tensor.nbytes))
        self.peers.exchange(sends, receives)


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
    peers = EmulatedWire(Peers.meet(control, "wire", range(ranks), rank, TIMEOUT_S, torch.device("cpu")), wire)
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
