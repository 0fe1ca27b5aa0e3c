# SPDX-License-Identifier: Apache-2.0
"""What a stalled transfer does to computation that does not need it: on the device path, and on the host path.

Two ranks share one GPU, which NCCL does not allow; rank 0 measures. Its device path is a transfer as NCCL makes one: a
kernel on a communication stream, for which the current stream is made to wait. The stalled one spins for STALL_S. On
the host path the stall is real: the peer sends late, or is stopped (SIGSTOP) while it should receive.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from adaptra_megatron.transport.host_path import HostTransport
from adaptra_megatron.transport.host_settings import HostSettings
from adaptra_megatron.transport.messages import Direction, MessageKey

STALL_S = 0.3
ROUNDS = 5
MESSAGE_NBYTES = 64 << 20
TIMEOUT_S = 60.0


class Computation:
    """About 20 ms of matrix products on the current stream, which need no message."""

    def __init__(self, device: torch.device) -> None:
        self._a = torch.randn(4096, 4096, device=device)
        self._b = torch.randn(4096, 4096, device=device)
        self._products = 1
        self.run()
        torch.cuda.synchronize()
        start_s = time.monotonic()
        self.run()
        torch.cuda.synchronize()
        self._products = max(1, round(0.02 / (time.monotonic() - start_s)))

    def run(self) -> None:
        """Queue it."""
        for _ in range(self._products):
            torch.mm(self._a, self._b)


class StalledTransfer:
    """A transfer on a communication stream that takes STALL_S, waited for as NCCL's are."""

    def __init__(self, stream: torch.cuda.Stream, cycles: int) -> None:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
        self._done = stream.record_event()

    def wait(self) -> None:
        """Make the current stream wait."""
        torch.cuda.current_stream().wait_event(self._done)


def cycles_per_s() -> float:
    """Of the spinning kernel."""
    torch.cuda._sleep(1_000_000)
    torch.cuda.synchronize()
    cycles = 200_000_000
    start_s = time.monotonic()
    torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    return cycles / (time.monotonic() - start_s)


def timed(queue: Callable[[], None]) -> tuple[float, float]:
    """Seconds until everything queued on the current stream by `queue` is done, and until `queue` returned."""
    start_s = time.monotonic()
    queue()
    returned_s = time.monotonic() - start_s
    torch.cuda.current_stream().synchronize()
    return time.monotonic() - start_s, returned_s


class Ranks:
    """Both ranks' half of each measurement; rank 0's results count."""

    def __init__(self) -> None:
        torch.cuda.set_device(0)
        self._device = torch.device("cuda", 0)
        dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
        self._rank = dist.get_rank()
        pids: list[Any] = [None, None]
        dist.all_gather_object(pids, os.getpid())
        self._peer_pid = pids[1 - self._rank]
        settings = HostSettings(transport="shm", timeout_s=TIMEOUT_S)
        self._host = HostTransport(dist.group.WORLD, 1, settings, None, self._device)
        self._computation = Computation(self._device)
        self._message = torch.ones(MESSAGE_NBYTES, dtype=torch.uint8, device=self._device)
        self._communication = torch.cuda.Stream()
        self._cycles = int(STALL_S * cycles_per_s())
        self._number = 0

    def alone(self) -> tuple[float, float]:
        """The computation with no transfer under way."""
        self._meet()
        return timed(self._computation.run) if self._rank == 0 else (0.0, 0.0)

    def device_path(self) -> tuple[float, float]:
        """A transfer is waited for, as a planned order has it; the computation is behind it in the stream."""
        self._meet()
        if self._rank == 1:
            return 0.0, 0.0
        transfer = StalledTransfer(self._communication, self._cycles)

        def queue() -> None:
            transfer.wait()
            self._computation.run()

        return timed(queue)

    def host_path_receiving(self) -> tuple[float, float]:
        """The message comes STALL_S late. It is seen not to be there, so what needs no message runs first."""
        key = self._next_key()
        self._meet()
        if self._rank == 1:
            time.sleep(STALL_S)
            self._host.post_send(key, 0, self._message)
            self._host.flush(time.monotonic() + TIMEOUT_S)
            return 0.0, 0.0
        self._host.post_receive(key, 1)
        assert not self._host.ready(key), "the transfer did not stall"
        result = timed(self._computation.run)
        self._host.wait(key, time.monotonic() + TIMEOUT_S)
        torch.cuda.synchronize()
        return result

    def host_path_sending(self) -> tuple[float, float]:
        """The peer takes nothing for STALL_S; what is computed after the send was posted goes on."""
        key = self._next_key()
        if self._rank == 1:
            self._host.post_receive(key, 0)
        self._meet()
        if self._rank == 1:
            self._host.wait(key, time.monotonic() + TIMEOUT_S)
            torch.cuda.synchronize()
            return 0.0, 0.0
        os.kill(self._peer_pid, signal.SIGSTOP)
        stopped_s = time.monotonic()
        try:

            def queue() -> None:
                self._host.post_send(key, 1, self._message)
                self._computation.run()

            result = timed(queue)
            time.sleep(max(0.0, stopped_s + STALL_S - time.monotonic()))
        finally:
            os.kill(self._peer_pid, signal.SIGCONT)
        self._host.flush(time.monotonic() + TIMEOUT_S)
        assert time.monotonic() > stopped_s + STALL_S, "the transfer did not stall"
        return result

    def close(self) -> None:
        self._meet()
        self._host.close()
        dist.destroy_process_group()

    def _meet(self) -> None:
        torch.cuda.synchronize()
        dist.barrier()

    def _next_key(self) -> MessageKey:
        self._number += 1
        return MessageKey(self._number, Direction.ACTIVATION, 0, 0)


def measure(report: Path) -> None:
    """What a rank does; rank 0 writes the report: per case the medians in seconds."""
    ranks = Ranks()
    cases = {
        "no transfer": ranks.alone,
        "device path, transfer stalls": ranks.device_path,
        "host path, receive stalls": ranks.host_path_receiving,
        "host path, send stalls": ranks.host_path_sending,
    }
    results = {}
    for name, case in cases.items():
        case()  # the first pays for memory
        rounds = [case() for _ in range(ROUNDS)]
        results[name] = [statistics.median(values) for values in zip(*rounds, strict=True)]
    ranks.close()
    if int(os.environ["RANK"]) == 0:
        report.write_text(json.dumps(results))


def table(report: dict[str, Any]) -> str:
    """The report as markdown."""
    lines = [
        "## Head-of-line blocking",
        "",
        f"Computation that needs no message, while a transfer stalls for {1000 * STALL_S:.0f} ms. Two ranks share the",
        "GPU, which NCCL refuses: the device path's transfer is emulated by a kernel that spins on a communication",
        f"stream for which the current stream waits, as it does for NCCL's. Medians of {ROUNDS} rounds.",
        "",
        "| case | computation done after, ms | training thread free after, ms |",
        "|---|---|---|",
    ]
    lines += [f"| {name} | {1000 * done:.1f} | {1000 * free:.1f} |" for name, (done, free) in report.items()]
    return "\n".join(lines) + "\n"


def failures(report: dict[str, Any]) -> list[str]:
    """Where the figures contradict what the host path is for."""
    alone = report["no transfer"][0]
    blocked = report["device path, transfer stalls"][0]
    found = [] if blocked > 0.9 * STALL_S else [f"the stalled transfer did not hold computation ({blocked:.3f} s)"]
    for name in ("host path, receive stalls", "host path, send stalls"):
        done = report[name][0]
        if done > alone + STALL_S / 3:
            found.append(f"{name}: computation took {done:.3f} s instead of {alone:.3f} s")
    return found


if __name__ == "__main__":
    measure(Path(sys.argv[1]))
