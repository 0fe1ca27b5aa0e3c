# SPDX-License-Identifier: Apache-2.0
"""Measure what limits the host path between two processes of one host: bare copies through shared memory, and
iperf3."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import time
from typing import Any

import torch
import torch.distributed as dist

from adaptra_megatron.tools.local_ranks.launch_ranks import free_port

IPERF_S = 1.0
IPERF_TIMEOUT_S = 30.0
COPIES = 8


def iperf_installed() -> bool:
    return shutil.which("iperf3") is not None


class Yardsticks:
    """Both ranks make one and call each of its methods at the same time; rank 0 gets the result, in GB/s."""

    def __init__(self, most_nbytes: int, lanes: int) -> None:
        """`most_nbytes`: of the largest message; `lanes`: connections of iperf3."""
        self._lanes = lanes
        self._rank = dist.get_rank()
        self._shared = self._share(most_nbytes)
        self._private = torch.ones_like(self._shared)
        self._private_target = torch.zeros_like(self._shared)

    def _share(self, nbytes: int) -> torch.Tensor:
        """Memory that both ranks map."""
        descriptor = os.memfd_create("yardstick")
        os.truncate(descriptor, nbytes)
        place: list[Any] = [f"/proc/{os.getpid()}/fd/{descriptor}"]
        dist.broadcast_object_list(place, src=0)
        with open(place[0], "r+b") as file:
            memory = torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)
        dist.barrier()
        os.close(descriptor)
        return memory

    def two_processes(self, nbytes: int) -> float:
        """Rank 0 copies messages in, then rank 1 copies them out; the time of the copies alone."""
        shared, private, copying_s = self._shared[:nbytes], self._private[:nbytes], 0.0
        for _ in range(COPIES):
            for rank in range(2):
                if rank == self._rank:
                    start_s = time.monotonic()
                    shared.copy_(private) if rank == 0 else private.copy_(shared)
                    copying_s += time.monotonic() - start_s
                dist.barrier()
        total = torch.tensor([copying_s], dtype=torch.float64)
        dist.all_reduce(total)
        return nbytes * COPIES / float(total.item()) / 1e9

    def one_thread(self, nbytes: int) -> float:
        """Rank 0 copies in and out by itself, so that small messages never leave its cache."""
        shared, source, target = self._shared[:nbytes], self._private[:nbytes], self._private_target[:nbytes]
        start_s = time.monotonic()
        for _ in range(COPIES if self._rank == 0 else 0):
            shared.copy_(source)
            target.copy_(shared)
        took_s = time.monotonic() - start_s
        dist.barrier()
        return nbytes * COPIES / took_s / 1e9

    def iperf(self, nbytes: int) -> float:
        """iperf3 over loopback sends without end: the size of a message means nothing to it."""
        del nbytes
        rate = self._run_iperf() if self._rank == 0 else 0.0
        dist.barrier()
        return rate

    def _run_iperf(self) -> float:
        port = str(free_port())
        serve = ["iperf3", "-s", "-1", "-B", "127.0.0.1", "-p", port, "--forceflush"]
        with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                while "listening" not in (line := server.stdout.readline()):
                    if not line:
                        raise RuntimeError(f"iperf3 -s ended with status {server.wait(IPERF_TIMEOUT_S)}")
                client = ["iperf3", "-c", "127.0.0.1", "-p", port, "-P", str(self._lanes), "-t", str(IPERF_S), "-J"]
                run = subprocess.run(client, capture_output=True, text=True, timeout=IPERF_TIMEOUT_S, check=True)
                server.wait(IPERF_TIMEOUT_S)
            finally:
                server.kill()
        return float(json.loads(run.stdout)["end"]["sum_received"]["bits_per_second"]) / 8e9
