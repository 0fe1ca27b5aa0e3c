#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Throughput of a link over verbs between two processes, and of ib_write_bw on the same RDMA devices.

    python benchmarks/verbs.py DEVICE PEER_DEVICE PEER_ADDRESS [--rounds 5] [--output FILE]

Both ends are on this host: DEVICE sends to PEER_DEVICE, whose port has PEER_ADDRESS. Every round measures ours and
ib_write_bw one right after the other, and ratios are taken per round: medians of both and of the ratios are reported.
What is measured is the whole way: from the sending process into its ring, through its delegate and RNIC into the ring
of the other delegate, out of it into memory of the receiving process, and back as an acknowledgement. ib_write_bw only
has its RNIC write the same memory again and again, over one queue pair as here: at the size of our messages, and at the
size that suits it best.
`scripts/softroce_vm.py bench` runs this on Soft-RoCE.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import re
import secrets
import socket
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from adaptra_megatron.transport._ring import DATA_TYPES, Description, Event, Inbox, Ring, RingClosedError
from adaptra_megatron.transport.delegate.delegate_control import OpenLink, StartDelegate
from adaptra_megatron.transport.delegate.supervisor import SupervisedLink, Supervisor
from adaptra_megatron.transport.host_link.host_link_state import GiveUp
from adaptra_megatron.transport.host_settings import HostSettings
from adaptra_megatron.transport.wires.verbs.verbs_wire import SLOT_NBYTES

MEBIBYTE = 1 << 20
SIZES_MIB = (1, 16, 64)
SLOTS = HostSettings.slots
BURST_NBYTES = 64 * MEBIBYTE
BEST_OF_NBYTES = (1 << 16, 1 << 18, 1 << 20, 1 << 22)
"""Sizes that ib_write_bw may like best."""
LIMIT_S = 120.0
PATIENCE_S = 30.0
"""Emulated, a delegate needs a while for what takes no time elsewhere."""
JOB, SECRET = secrets.token_hex(16), secrets.token_hex(32)


class LinkEnd:
    """What a training process has of a link, without torch, which takes half a minute to import where this runs."""

    finished = False

    def __init__(self, stage: int, device: str, listener: socket.socket, address: tuple[str, int]) -> None:
        start = StartDelegate(
            rank=stage,
            job=JOB,
            secret=SECRET,
            listeners=["tcp"],
            handshake_s=20.0,
            stall_s=30.0,
            max_message_nbytes=1 << 30,
            rnics=[device],
        )
        request = OpenLink(
            peer=1 - stage,
            session=0,
            transport="verbs",
            connects=stage == 0,
            address=list(address),
            source="",
            lanes=1,
        )
        self.sessions = 0
        self._rings: tuple[Ring, Ring] | None = None
        self._cause = "it has not come up yet"
        self._inbox = Inbox(max_message_nbytes=1 << 30, pooled_nbytes=4 * SIZES_MIB[-1] * MEBIBYTE)
        link = SupervisedLink(self, request, SLOTS, SLOT_NBYTES)
        self.supervisor = Supervisor(start, [listener], [link], patience_s=PATIENCE_S)

    def connected(self, outbound: Ring, inbound: Ring, give_up: GiveUp) -> None:
        self._rings, self.sessions = (outbound, inbound), self.sessions + 1

    def disconnected(self, cause: str) -> None:
        self._rings, self._cause = None, cause

    def rings(self) -> tuple[Ring, Ring]:
        deadline_s = time.monotonic() + LIMIT_S
        while (rings := self._rings) is None:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the link does not come up: {self._cause}")
            time.sleep(0.01)
        return rings

    def send(self, sequence: int, content: numpy.ndarray) -> None:
        description = Description(
            sequence=sequence,
            iteration=0,
            direction=0,
            chunk=0,
            micro_batch=sequence,
            dtype=DATA_TYPES["uint8"],
            shape=[content.nbytes],
        )
        self.rings()[0].write(description, content.ctypes.data, content.nbytes, time.monotonic() + LIMIT_S)

    def acknowledge(self, sequence: int) -> None:
        self.rings()[0].write_ack(sequence, time.monotonic() + LIMIT_S)

    def next(self) -> Event:
        event = self._inbox.next(self.rings()[1], time.monotonic() + LIMIT_S)
        if event is None:
            raise TimeoutError(f"nothing came for {LIMIT_S:g} s")
        return event


def burst(nbytes: int) -> int:
    """Messages of this size that are measured together."""
    return max(2, BURST_NBYTES // nbytes)


def receive_bursts(ready: Any, device: str, listener: socket.socket, address: tuple[str, int]) -> None:
    """The receiving process: acknowledges each message, until the sender goes."""
    end = LinkEnd(1, device, listener, address)
    end.rings()
    ready.send(os.getpid())
    with contextlib.suppress(RingClosedError):
        while True:
            event = end.next()
            end.acknowledge(event.sequence)
            del event
    end.supervisor.close()


class Sender:
    def __init__(self, device: str, listener: socket.socket, address: tuple[str, int]) -> None:
        self.end = LinkEnd(0, device, listener, address)
        self._sequence = 0
        self._acknowledged = threading.Semaphore(0)
        self.end.rings()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def close(self) -> None:
        self.end.supervisor.close()
        self._reader.join(10.0)

    def mb_per_s(self, nbytes: int) -> float:
        """Throughput of messages sent one after the other, until the last is acknowledged."""
        content = numpy.random.default_rng(nbytes).integers(0, 256, nbytes, numpy.uint8)
        count = burst(nbytes)
        begun_s = time.monotonic()
        for _ in range(count):
            self.end.send(self._sequence, content)
            self._sequence += 1
        for _ in range(count):
            if not self._acknowledged.acquire(timeout=LIMIT_S):
                raise TimeoutError(f"no acknowledgement for {LIMIT_S:g} s")
        took_s = time.monotonic() - begun_s
        assert self.end.sessions == 1, "the link broke meanwhile"
        return nbytes * count / took_s / 1e6

    def _read(self) -> None:
        with contextlib.suppress(RingClosedError):
            while self.end.next().kind == Event.Kind.ACK:
                self._acknowledged.release()


@contextlib.contextmanager
def our_link(device: str, peer_device: str) -> Iterator[Sender]:
    """Two processes with a delegate each, in this process's and another's hands."""
    context = multiprocessing.get_context("fork")
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    addresses = [listener.getsockname()[:2] for listener in listeners]
    ready, theirs = context.Pipe()
    process = context.Process(
        target=receive_bursts, args=(theirs, peer_device, listeners[1], addresses[0]), daemon=True
    )
    process.start()
    listeners[1].close()
    sender = Sender(device, listeners[0], addresses[1])
    try:
        if not ready.poll(LIMIT_S):
            raise TimeoutError("the receiving process does not come up")
        yield sender
    finally:
        sender.close()
        process.join(10.0)
        process.kill()


def write_bw_mb_per_s(device: str, peer_device: str, peer_address: str, nbytes: int) -> float:
    """ib_write_bw's average over as many bytes as ours, with one queue pair."""
    for _ in range(3):
        found = _write_bw(device, peer_device, peer_address, nbytes)
        if found > 0.0:
            return found * MEBIBYTE / 1e6  # its "MB" are MiB
    raise RuntimeError("ib_write_bw reports a throughput of 0, as it does where the clock rate of the CPU is unclear")


def _write_bw(device: str, peer_device: str, peer_address: str, nbytes: int) -> float:
    options = ["-F", "-s", str(nbytes), "-n", str(max(5, BURST_NBYTES // nbytes))]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(["ib_write_bw", "-d", peer_device, *options], **quiet) as server:
        try:
            for _ in range(50):
                time.sleep(0.2)  # until the server listens
                client = subprocess.run(
                    ["ib_write_bw", "-d", device, *options, peer_address], capture_output=True, text=True
                )
                found = re.search(rf"^ *{nbytes} +\d+ +[\d.]+ +([\d.]+)", client.stdout, re.MULTILINE)
                if found is not None:
                    return float(found[1])
            raise RuntimeError(f"ib_write_bw says {client.stdout} {client.stderr}")
        finally:
            server.kill()


@dataclass(frozen=True)
class Round:
    """MB/s of one size, one right after the other."""

    ours: float
    same_size: float
    best_size: float


def measure(devices: tuple[str, str, str], rounds: int) -> tuple[dict[int, float], dict[int, list[Round]]]:
    """What ib_write_bw does at each of its sizes, and the rounds of each of ours."""
    scanned = {nbytes: write_bw_mb_per_s(*devices, nbytes) for nbytes in BEST_OF_NBYTES}
    best = max(scanned, key=lambda nbytes: scanned[nbytes])
    measured: dict[int, list[Round]] = {size: [] for size in SIZES_MIB}
    with our_link(*devices[:2]) as sender:
        sender.mb_per_s(MEBIBYTE)  # memory is touched for the first time
        for _ in range(rounds):
            for size, done in measured.items():
                ours = sender.mb_per_s(size * MEBIBYTE)
                yardsticks = [write_bw_mb_per_s(*devices, nbytes) for nbytes in (size * MEBIBYTE, best)]
                done.append(Round(ours, *yardsticks))
    return scanned, measured


def report(devices: tuple[str, str, str], scanned: dict[int, float], measured: dict[int, list[Round]]) -> str:
    rounds = len(measured[SIZES_MIB[0]])
    best = max(scanned, key=lambda nbytes: scanned[nbytes])
    sizes = ", ".join(f"{nbytes >> 10} KiB {mb_per_s:.0f} MB/s" for nbytes, mb_per_s in scanned.items())
    lines = [
        "# Throughput over verbs",
        "",
        f"{devices[0]} to {devices[1]}, Linux {os.uname().release}, {os.cpu_count()} CPUs: {_hardware()}. "
        f"Medians of {rounds} rounds; in each, ours and ib_write_bw ran one right after the other.",
        "",
        "Ours: from one process through two delegates into memory of another, acknowledged; one queue pair, chunks of "
        f"{SLOT_NBYTES >> 10} KiB. ib_write_bw: one queue pair, polling, the same memory again and again. By its own "
        f"size: {sizes}.",
        "",
        f"| message | ours, MB/s | ib_write_bw, same size | ratio | ib_write_bw, {best >> 10} KiB | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for size, done in measured.items():
        same = _paired(done, lambda one: one.same_size)
        other = _paired(done, lambda one: one.best_size)
        lines.append(f"| {size} MiB | {statistics.median(one.ours for one in done):.1f} | {same} | {other} |")
    return "\n".join(lines) + "\n"


def _paired(done: list[Round], yardstick: Callable[[Round], float]) -> str:
    median = statistics.median(yardstick(one) for one in done)
    return f"{median:.1f} | {statistics.median(one.ours / yardstick(one) for one in done):.2f}"


def _hardware() -> str:
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return cpu[1] if cpu is not None else os.uname().machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device")
    parser.add_argument("peer_device")
    parser.add_argument("peer_address")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    devices = arguments.device, arguments.peer_device, arguments.peer_address
    text = report(devices, *measure(devices, arguments.rounds))
    print(text, end="")
    if arguments.output is not None:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
