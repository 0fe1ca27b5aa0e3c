# SPDX-License-Identifier: Apache-2.0
"""Throughput of the host path between two processes that share a GPU, from device memory to device memory, beside the
copies that it is made of: device to page-locked host memory, and back to the device."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from adaptra_megatron.transport.host_path import HostTransport
from adaptra_megatron.transport.host_settings import HostSettings
from adaptra_megatron.transport.messages import Direction, MessageKey

MEBIBYTE = 1 << 20
SIZES_MIB = (1, 16, 64)
BURST_NBYTES = 1024 * MEBIBYTE
SMALL_NBYTES = 4096
ROUND_TRIPS = 300
COPIES = 8
ROUNDS = 7
TIMEOUT_S = 60.0
COPY_NAMES = ("device to host", "host to device")


def soon() -> float:
    return time.monotonic() + TIMEOUT_S


class Pair:
    """This rank's half of the measurements; rank 0 sends and measures, rank 1 receives."""

    def __init__(self, transport: str, device: torch.device) -> None:
        settings = HostSettings(transport=transport, timeout_s=TIMEOUT_S)
        self._transport = HostTransport(dist.group.WORLD, 1, settings, None, device)
        self._device, self._rank, self._iteration = device, dist.get_rank(), 0

    def burst_gb_per_s(self, nbytes: int) -> float:
        """Of messages posted one after the other, until the last is in the receiver's device memory."""
        self._iteration += 1
        keys = [self._key(Direction.ACTIVATION, number) for number in range(max(4, BURST_NBYTES // nbytes))]
        if self._rank == 1:
            for key in keys:
                self._transport.post_receive(key, 0)
            dist.barrier()
            for key in keys:
                self._transport.wait(key, soon())
            torch.cuda.synchronize()
            dist.barrier()
            return 0.0
        message = torch.ones(nbytes, dtype=torch.uint8, device=self._device)
        torch.cuda.synchronize()
        dist.barrier()
        start_s = time.monotonic()
        for key in keys:
            self._transport.post_send(key, 1, message)
        self._transport.flush(soon())
        dist.barrier()
        return nbytes * len(keys) / (time.monotonic() - start_s) / 1e9

    def one_way_us(self) -> float:
        """Median of half a round trip of a small message, each computed on the device and read by it."""
        message, halves = torch.ones(SMALL_NBYTES, dtype=torch.uint8, device=self._device), []
        dist.barrier()
        for _ in range(ROUND_TRIPS):
            self._iteration += 1
            there, back = self._key(Direction.ACTIVATION, 0), self._key(Direction.GRADIENT, 0)
            if self._rank == 0:
                self._transport.post_receive(back, 1)
                start_s = time.monotonic()
                self._transport.post_send(there, 1, message)
                self._transport.wait(back, soon())
                torch.cuda.current_stream().synchronize()
                halves.append((time.monotonic() - start_s) / 2)
            else:
                self._transport.post_receive(there, 0)
                self._transport.post_send(back, 0, self._transport.wait(there, soon()))
        self._transport.flush(soon())
        return statistics.median(halves or [0.0]) * 1e6

    def close(self) -> None:
        dist.barrier()
        self._transport.close()

    def _key(self, direction: Direction, number: int) -> MessageKey:
        return MessageKey(self._iteration, direction, 0, number)


class Yardsticks:
    """The copies, one at a time, by rank 0 alone: GB/s for a message of so many bytes."""

    def __init__(self, device: torch.device) -> None:
        nbytes = max(SIZES_MIB) * MEBIBYTE
        self._on_device = torch.ones(nbytes, dtype=torch.uint8, device=device)
        self._pinned = torch.ones(nbytes, dtype=torch.uint8, pin_memory=True)

    def device_to_host(self, nbytes: int) -> float:
        """Into page-locked memory."""
        return self._device_copies(nbytes, self._pinned, self._on_device)

    def host_to_device(self, nbytes: int) -> float:
        """Out of page-locked memory."""
        return self._device_copies(nbytes, self._on_device, self._pinned)

    def _device_copies(self, nbytes: int, target: torch.Tensor, source: torch.Tensor) -> float:
        torch.cuda.synchronize()
        start_s = time.monotonic()
        for _ in range(COPIES):
            target[:nbytes].copy_(source[:nbytes], non_blocking=True)
        torch.cuda.synchronize()
        return nbytes * COPIES / (time.monotonic() - start_s) / 1e9


def measure(report: Path) -> None:
    """What a rank does; rank 0 writes the report."""
    torch.cuda.set_device(0)
    device = torch.device("cuda", 0)
    dist.init_process_group("gloo", timeout=timedelta(seconds=10 * TIMEOUT_S))
    yardsticks = Yardsticks(device)
    copies: Sequence[Callable[[int], float]] = (
        yardsticks.device_to_host,
        yardsticks.host_to_device,
    )
    found: dict[str, Any] = {"throughput": [], "one_way_us": {}}
    for transport in ("shm", "tcp"):
        pair = Pair(transport, device)
        for size in SIZES_MIB:
            nbytes = size * MEBIBYTE
            rounds = []
            for number in range(ROUNDS + 2):
                ours = pair.burst_gb_per_s(nbytes)
                its = [copy(nbytes) if dist.get_rank() == 0 else 1.0 for copy in copies]
                dist.barrier()
                if number >= 2:  # the first ones pay for fresh memory
                    rounds.append((ours, *its))
            found["throughput"].append((transport, size, rounds))
        found["one_way_us"][transport] = [pair.one_way_us() for _ in range(3)]
        pair.close()
    if dist.get_rank() == 0:
        report.write_text(json.dumps(found))
    dist.destroy_process_group()


def table(report: dict[str, Any]) -> str:
    """The report as markdown."""
    lines = [
        "## Device to host to device",
        "",
        "Messages from one process's device memory to another's, both on the same GPU, in GB/s, and the copies that",
        f"they are made of, each alone. Both overlap, so the slower is the limit. Medians of {ROUNDS} rounds; each",
        "ratio is of measurements right after one another.",
        "",
        f"| transport | message | host path | {' | '.join(COPY_NAMES)} | of the slower |",
        "|---" * (4 + len(COPY_NAMES)) + "|",
    ]
    for transport, size, rounds in report["throughput"]:
        medians = [statistics.median(values) for values in zip(*rounds, strict=True)]
        ratio = statistics.median(ours / min(its) for ours, *its in rounds)
        columns = " | ".join(f"{value:.2f}" for value in medians)
        lines.append(f"| {transport} | {size} MiB | {columns} | {ratio:.2f} |")
    lines += ["", "One way of a 4 KiB message, device to device (half a round trip):", ""]
    for transport, values in report["one_way_us"].items():
        lines.append(f"- {transport}: {statistics.median(values):.1f} us ({min(values):.1f}..{max(values):.1f})")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    measure(Path(sys.argv[1]))
