# SPDX-License-Identifier: Apache-2.0
"""Throughput and latency of the host path between two processes of this host, each beside what limits it.

    python benchmarks/transport.py [--rounds 9] [--output benchmarks/results/transport.md]

Every round measures the host path and its yardstick one right after the other, and the ratio is taken per round:
medians of both and of the ratios are reported. Yardsticks: for shm the bare copies into and out of shared memory, for
tcp iperf3 over loopback with the same number of connections.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from adaptra_megatron.emulation.launch import run_ranks
from adaptra_megatron.transport.host_path import HostTransport
from adaptra_megatron.transport.host_settings import HostSettings
from adaptra_megatron.transport.messages import Direction, MessageKey

MEBIBYTE = 1 << 20
SIZES_MIB = (1, 16, 64)
BURST_NBYTES = 512 * MEBIBYTE
SMALL_NBYTES = 4096
ROUND_TRIPS = 500
IPERF_S = 1.0
COPIES = 8
TIMEOUT_S = 60.0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--lanes", type=int, default=HostSettings.lanes, help="TCP connections, and iperf3's")
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--rank-report", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--iperf", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def deadline() -> float:
    return time.monotonic() + TIMEOUT_S


class Pair:
    """This rank's half of the measurements; rank 0 sends and measures, rank 1 receives."""

    def __init__(self, path: str, lanes: int) -> None:
        settings = HostSettings(transport=path, lanes=lanes, timeout_s=TIMEOUT_S)
        self._transport = HostTransport(dist.group.WORLD, 1, settings)
        self._rank = dist.get_rank()
        self._iteration = 0

    def burst_gb_per_s(self, nbytes: int) -> float:
        """Throughput of messages posted one after the other, until the last is acknowledged."""
        self._iteration += 1
        keys = [self._key(Direction.ACTIVATION, number) for number in range(max(4, BURST_NBYTES // nbytes))]
        if self._rank == 1:
            for key in keys:
                self._transport.post_receive(key, 0)
            dist.barrier()
            for key in keys:
                self._transport.wait(key, deadline())
            dist.barrier()
            return 0.0
        message = torch.ones(nbytes, dtype=torch.uint8)
        dist.barrier()
        start_s = time.monotonic()
        for key in keys:
            self._transport.post_send(key, 1, message)
        self._transport.flush(deadline())
        took_s = time.monotonic() - start_s
        dist.barrier()
        return nbytes * len(keys) / took_s / 1e9

    def one_way_us(self) -> float:
        """Median of half a round trip of a small message: post, wake the peer's waiting thread, and back."""
        message, halves = torch.ones(SMALL_NBYTES, dtype=torch.uint8), []
        dist.barrier()
        for _ in range(ROUND_TRIPS):
            self._iteration += 1
            there, back = self._key(Direction.ACTIVATION, 0), self._key(Direction.GRADIENT, 0)
            if self._rank == 0:
                self._transport.post_receive(back, 1)
                start_s = time.monotonic()
                self._transport.post_send(there, 1, message)
                self._transport.wait(back, deadline())
                halves.append((time.monotonic() - start_s) / 2)
            else:
                self._transport.post_receive(there, 0)
                self._transport.wait(there, deadline())
                self._transport.post_send(back, 0, message)
        self._transport.flush(deadline())
        return statistics.median(halves or [0.0]) * 1e6

    def close(self) -> None:
        dist.barrier()
        self._transport.close()

    def _key(self, direction: Direction, number: int) -> MessageKey:
        return MessageKey(self._iteration, direction, 0, number)


class Yardsticks:
    """What limits the host path. Both ranks call each of them; rank 0 gets the result."""

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self._rank = dist.get_rank()
        self._shared = self._share(max(SIZES_MIB) * MEBIBYTE)
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

    def two_processes_gb_per_s(self, nbytes: int) -> float:
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
        return nbytes * COPIES / total.item() / 1e9

    def one_thread_gb_per_s(self, nbytes: int) -> float:
        """Rank 0 copies in and out by itself, so that small messages never leave its cache."""
        shared, source, target = self._shared[:nbytes], self._private[:nbytes], self._private_target[:nbytes]
        start_s = time.monotonic()
        for _ in range(COPIES if self._rank == 0 else 0):
            shared.copy_(source)
            target.copy_(shared)
        took_s = time.monotonic() - start_s
        dist.barrier()
        return nbytes * COPIES / took_s / 1e9

    def iperf_gb_per_s(self, nbytes: int) -> float:
        """iperf3 sends without end: the size of a message means nothing to it."""
        del nbytes
        rate = self._run_iperf() if self._rank == 0 else 0.0
        dist.barrier()
        return rate

    def _run_iperf(self) -> float:
        port = str(_free_port())
        serve = ["iperf3", "-s", "-1", "-B", "127.0.0.1", "-p", port, "--forceflush"]
        with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            while "listening" not in (line := server.stdout.readline()):
                assert line or server.poll() is None, "iperf3 does not start"
            client = ["iperf3", "-c", "127.0.0.1", "-p", port, "-P", str(self._lanes), "-t", str(IPERF_S), "-J"]
            report = subprocess.run(client, capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout
            server.wait(TIMEOUT_S)
        return float(json.loads(report)["end"]["sum_received"]["bits_per_second"]) / 8e9


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure(arguments: argparse.Namespace) -> None:
    """What a rank does; rank 0 writes the report: per path, size and yardstick the rounds of (ours, its) GB/s."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=10 * TIMEOUT_S))
    yardsticks = Yardsticks(arguments.lanes)
    compared = [
        ("shm", "memcpy in by one process, out by the other", yardsticks.two_processes_gb_per_s),
        ("shm", "memcpy in and out by one thread", yardsticks.one_thread_gb_per_s),
    ]
    if arguments.iperf:
        compared.append(("tcp", f"iperf3 -P {arguments.lanes}", yardsticks.iperf_gb_per_s))
    report: dict[str, Any] = {"throughput": [], "one_way_us": {}}
    for path in ("shm", "tcp"):
        pair = Pair(path, arguments.lanes)
        for name, yardstick in [(name, yardstick) for on, name, yardstick in compared if on == path]:
            for size in SIZES_MIB:
                nbytes = size * MEBIBYTE
                for _ in range(2):  # the first ones pay for fresh memory
                    pair.burst_gb_per_s(nbytes)
                    yardstick(nbytes)
                rounds = [(pair.burst_gb_per_s(nbytes), yardstick(nbytes)) for _ in range(arguments.rounds)]
                report["throughput"].append((path, size, name, rounds))
        report["one_way_us"][path] = [pair.one_way_us() for _ in range(arguments.rounds)]
        pair.close()
    if dist.get_rank() == 0:
        arguments.rank_report.write_text(json.dumps(report))
    dist.destroy_process_group()


def table(report: dict[str, Any], arguments: argparse.Namespace) -> str:
    """The report as markdown."""
    lines = [
        "# Host path between two processes",
        "",
        f"Written by `python benchmarks/transport.py` on {os.cpu_count()} cores. Medians of {arguments.rounds} rounds;",
        "each ratio is of two measurements right after one another. tcp goes over loopback: two training processes,",
        "two delegates and the kernel's network share the cores.",
        "",
        "| path | message | host path GB/s | yardstick | its GB/s | ratio | lowest..highest |",
        "|---|---|---|---|---|---|---|",
    ]
    for path, size, name, rounds in report["throughput"]:
        ours, limit = (statistics.median(values) for values in zip(*rounds, strict=True))
        ratios = sorted(mine / its for mine, its in rounds)
        lines.append(
            f"| {path} | {size} MiB | {ours:.2f} | {name} | {limit:.2f} | {statistics.median(ratios):.2f} | "
            f"{ratios[0]:.2f}..{ratios[-1]:.2f} |"
        )
    lines += ["", "One way of a 4 KiB message, until the thread that waits for it runs (half a round trip):", ""]
    for path, values in report["one_way_us"].items():
        lines.append(f"- {path}: {statistics.median(values):.1f} us ({min(values):.1f}..{max(values):.1f})")
    return "\n".join(lines) + "\n"


def main() -> None:
    arguments = parse_arguments()
    if arguments.rank_report is not None:
        measure(arguments)
        return
    iperf = shutil.which("iperf3") is not None
    if not iperf:
        print("iperf3 is not installed: tcp is left out (apt-get install iperf3)")
    with tempfile.TemporaryDirectory() as directory:
        found = Path(directory, "report.json")
        argv = [__file__, "--rank-report", str(found), "--rounds", str(arguments.rounds)]
        argv += ["--lanes", str(arguments.lanes), *["--iperf"] * iperf]
        run_ranks(2, argv, timeout_s=1200.0, log_directory=directory)
        text = table(json.loads(found.read_text()), arguments)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
