# SPDX-License-Identifier: Apache-2.0
"""Measure the host path's transports in two ranks; rank 0 sends and rank 1 receives. Measure their limits, too: copies
through shared memory, and iperf3.

python -m adaptra_megatron.tools.local_ranks.bench_rank REQUEST.json REPORT.json
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from adaptra_megatron.common.layout import host_identity
from adaptra_megatron.tools.local_ranks.launch_ranks import free_port
from adaptra_megatron.tools.local_ranks.transport_bench import (
    MEBIBYTE,
    RANKS,
    BenchReport,
    BenchRequest,
    MeasuredTransport,
    request_from_json,
)
from adaptra_megatron.transport.dual_path.host_transport import HostTransport
from adaptra_megatron.transport.host_settings import HostSettings
from adaptra_megatron.transport.message_keys import Direction, MessageKey
from adaptra_megatron.transport.setup.rendezvous import Rendezvous
from adaptra_megatron.transport.wires.verbs.verbs_device import why_unavailable

IPERF_S = 1.0
IPERF_TIMEOUT_S = 30.0
COPIES = 8


def iperf_installed() -> bool:
    return shutil.which("iperf3") is not None


class Yardsticks:
    """Measurements of limits, in GB/s. Both ranks call each method at the same time; rank 0 gets the result."""

    def __init__(self, most_nbytes: int, lanes: int) -> None:
        """`most_nbytes`: bytes of the largest message. `lanes`: connections of iperf3."""
        self._lanes = lanes
        self._rank = dist.get_rank()
        self._shared = self._share(most_nbytes)
        self._private = torch.ones_like(self._shared)
        self._private_target = torch.zeros_like(self._shared)

    def _share(self, nbytes: int) -> torch.Tensor:
        """Return memory that both ranks map."""
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
        """Copy messages in by rank 0, then out by rank 1; return the rate of the copies alone."""
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
        """Copy messages in and out by rank 0 alone, so that small messages stay in its cache; return the rate."""
        shared, source, target = self._shared[:nbytes], self._private[:nbytes], self._private_target[:nbytes]
        start_s = time.monotonic()
        for _ in range(COPIES if self._rank == 0 else 0):
            shared.copy_(source)
            target.copy_(shared)
        took_s = time.monotonic() - start_s
        dist.barrier()
        return nbytes * COPIES / took_s / 1e9

    def iperf(self, nbytes: int) -> float:
        """Return iperf3's rate over loopback. It sends a stream, so the size of messages does not matter."""
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


TIMEOUT_S = 60.0
"""Time limit of any one message."""
WARM_UP_ROUNDS = 2
"""First rounds, which are not measured: they pay for fresh memory."""
BURST_NBYTES = 512 * MEBIBYTE
BURST_MESSAGES = 2000
"""Maximum number of bytes and messages that are sent for one value of throughput; at least four messages."""
ROUND_TRIPS, ROUND_TRIP_NBYTES = 300, 128 * MEBIBYTE
"""The same for one value of latency."""
YARDSTICK_NBYTES = MEBIBYTE
"""Smaller messages are limited by wake-ups, not by copies."""

Yardstick = Callable[[int], float]


class Pair:
    """This rank's half of the measurements of one transport."""

    def __init__(self, transport: str, lanes: int) -> None:
        """Open the link. Raises TransportError if it does not connect."""
        settings = HostSettings(transport=transport, lanes=lanes, timeout_s=TIMEOUT_S)
        world = dist.group.WORLD
        assert world is not None, "torch.distributed has been initialised"
        self._transport = HostTransport(Rendezvous.of(world, TIMEOUT_S), 1, settings)
        self._rank = dist.get_rank()
        self._iteration = 0

    @property
    def chosen(self) -> str:
        """The transport that the link uses."""
        return self._transport.counters().links[1 - self._rank].transport

    def burst_gb_per_s(self, nbytes: int) -> float:
        """Return the throughput of messages posted one after the other, until the last is acknowledged. Rank 1 gets
        0."""
        self._iteration += 1
        count = max(4, min(BURST_MESSAGES, BURST_NBYTES // nbytes))
        keys = [self._key(Direction.ACTIVATION, number) for number in range(count)]
        if self._rank == 1:
            for key in keys:
                self._transport.post_receive(key, 0)
            dist.barrier()
            for key in keys:
                self._transport.wait(key, _deadline())
            dist.barrier()
            return 0.0
        message = torch.ones(nbytes, dtype=torch.uint8)
        dist.barrier()
        start_s = time.monotonic()
        for key in keys:
            self._transport.post_send(key, 1, message)
        self._transport.flush(_deadline())
        took_s = time.monotonic() - start_s
        dist.barrier()
        return nbytes * count / took_s / 1e9

    def one_way_us(self, nbytes: int) -> float:
        """Return the median of half a round trip: post, wake the peer's waiting thread, and back. Rank 1 gets 0."""
        message, halves = torch.ones(nbytes, dtype=torch.uint8), []
        dist.barrier()
        for _ in range(max(4, min(ROUND_TRIPS, ROUND_TRIP_NBYTES // nbytes))):
            self._iteration += 1
            there, back = self._key(Direction.ACTIVATION, 0), self._key(Direction.GRADIENT, 0)
            if self._rank == 0:
                self._transport.post_receive(back, 1)
                start_s = time.monotonic()
                self._transport.post_send(there, 1, message)
                self._transport.wait(back, _deadline())
                halves.append((time.monotonic() - start_s) / 2)
            else:
                self._transport.post_receive(there, 0)
                self._transport.wait(there, _deadline())
                self._transport.post_send(back, 0, message)
        self._transport.flush(_deadline())
        return statistics.median(halves or [0.0]) * 1e6

    def close(self) -> None:
        dist.barrier()
        self._transport.close()

    def _key(self, direction: Direction, number: int) -> MessageKey:
        return MessageKey(self._iteration, direction, 0, number)


def measure(request: BenchRequest) -> BenchReport | None:
    """Measure in both ranks of a job, with torchrun's environment. Rank 0 gets the report.

    Raises TransportError if a link does not connect, or breaks.
    """
    dist.init_process_group("gloo", timeout=timedelta(seconds=10 * TIMEOUT_S))
    hosts: list[Any] = [None] * RANKS
    dist.all_gather_object(hosts, (host_identity(), why_unavailable([])))
    one_host = hosts[0][0] == hosts[1][0]
    report = BenchReport()
    yardsticks = _yardsticks(request, one_host, report)
    for transport in request.transports:
        cause = _cannot_be_measured(transport, one_host, [host[1] for host in hosts])
        if cause is not None:
            report.left_out.append(f"{transport} is left out: {cause}")
            continue
        pair = Pair(transport, request.lanes)
        assert pair.chosen == transport, f"{transport} was asked for, and the link came up over {pair.chosen}"
        for nbytes in request.sizes:
            report.measured.append(_measure_size(pair, transport, nbytes, request.rounds, yardsticks.get(transport)))
        pair.close()
    sends = dist.get_rank() == 0
    dist.destroy_process_group()
    return report if sends else None


def _cannot_be_measured(transport: str, one_host: bool, lacks_verbs: list[str | None]) -> str | None:
    if transport == "shm" and not one_host:
        return "the two ranks share no memory"
    if transport == "verbs":
        return next((cause for cause in lacks_verbs if cause is not None), None)
    return None


def _yardsticks(request: BenchRequest, one_host: bool, report: BenchReport) -> dict[str, dict[str, Yardstick]]:
    """Return the limits by transport and name; empty across hosts, where a pair of ranks cannot measure the
    network's."""
    if not one_host or max(request.sizes) < YARDSTICK_NBYTES:
        return {}
    made = Yardsticks(max(request.sizes), request.lanes)
    found: dict[str, dict[str, Yardstick]] = {
        "shm": {
            "memcpy in by one process, out by the other": made.two_processes,
            "memcpy in and out by one thread": made.one_thread,
        }
    }
    if iperf_installed():
        found["tcp"] = {f"iperf3 -P {request.lanes}": made.iperf}
    elif "tcp" in request.transports:
        report.left_out.append("iperf3 is not installed: tcp has no yardstick (apt-get install iperf3)")
    return found


def _measure_size(
    pair: Pair, transport: str, nbytes: int, rounds: int, yardsticks: dict[str, Yardstick] | None
) -> MeasuredTransport:
    row = MeasuredTransport(transport, nbytes, [], [])
    used = yardsticks if yardsticks is not None and nbytes >= YARDSTICK_NBYTES else {}
    row.yardsticks.update({name: [] for name in used})
    for round_number in range(-WARM_UP_ROUNDS, rounds):
        ours = pair.burst_gb_per_s(nbytes)
        limits = {name: yardstick(nbytes) for name, yardstick in used.items()}
        one_way_us = pair.one_way_us(nbytes)
        if round_number >= 0:
            row.gb_per_s.append(ours)
            row.one_way_us.append(one_way_us)
            for name, limit in limits.items():
                row.yardsticks[name].append(limit)
    return row


def _deadline() -> float:
    return time.monotonic() + TIMEOUT_S


def main(arguments: list[str]) -> None:
    """Measure in a rank started by `transport_bench.run_on_this_host`."""
    wanted, found = map(Path, arguments)
    report = measure(request_from_json(wanted.read_text()))
    if report is not None:
        found.write_text(report.to_json())


if __name__ == "__main__":
    main(sys.argv[1:])
