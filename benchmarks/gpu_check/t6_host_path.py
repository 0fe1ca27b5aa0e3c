# SPDX-License-Identifier: Apache-2.0
"""T6: the host path between two processes: computation during stalled transfers, throughput, and copies into rings."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable

import torch

from adaptra_megatron.transport._ring import Ring
from adaptra_megatron.transport.dual_path.host_transport import HostTransport
from adaptra_megatron.transport.host_settings import HostSettings
from adaptra_megatron.transport.message_keys import Direction, MessageKey
from gpu_check.findings import Report
from gpu_check.stages import Stage

STALL_S = 0.3
ROUNDS = 5
TIMEOUT_S = 60.0
COMPUTATION_S = 0.02
MOST_LATE_S = STALL_S / 3
BURST = 16
LEAST_GB_PER_S = 1.0
"""Least throughput of messages between neighbouring stages: 25 MB per 25 ms."""
SMALL_NBYTES = 4096
MOST_ONE_WAY_S = 2e-3
ROUND_TRIPS = 200
RING_SLOTS, SLOT_NBYTES = 16, 1 << 19
LEAST_OF_LOCKED = 0.8


def run(stage: Stage, report: Report, part: str, *arguments: str) -> None:
    """`part`: a name in PARTS."""
    PARTS[part](stage, report, *arguments)


class _Link:
    """One end of the only link, with keys that are the same at both ends."""

    def __init__(self, stage: Stage, transport: str) -> None:
        settings = HostSettings(transport=transport, timeout_s=TIMEOUT_S)
        self.stage, self.peer = stage, 1 - stage.stage
        self.transport = HostTransport(stage.rendezvous, 1, settings, None, None, stage.device)
        self._iterations = {Direction.ACTIVATION: 0, Direction.GRADIENT: 0}
        self._meetings = 0

    def keys(self, count: int = 1, direction: Direction = Direction.ACTIVATION) -> list[MessageKey]:
        """Those of one more iteration."""
        self._iterations[direction] += 1
        return [MessageKey(self._iterations[direction], direction, 0, number) for number in range(count)]

    def meet(self) -> None:
        """Both ends, with nothing left to compute."""
        self.stage.synchronize()
        self._meetings += 1
        self.stage.rendezvous.gather(f"meeting {self._meetings}", None)

    def receive(self, key: MessageKey) -> torch.Tensor:
        """A message that was asked for."""
        return self.transport.wait(key, time.monotonic() + TIMEOUT_S)

    def flush(self) -> None:
        """All that was sent has been received."""
        self.transport.flush(time.monotonic() + TIMEOUT_S)


class Computation:
    """About COMPUTATION_S of matrix products on the current stream, which need no message."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._square = torch.eye(2048 if stage.device is not None else 256, device=stage.tensors)
        self._products = 1
        self.timed()
        self._products = max(1, round(COMPUTATION_S / self.timed()))

    def timed(self, first: Callable[[], object] = lambda: None) -> float:
        """Seconds until it is done, queued behind `first`."""
        begun_s = time.monotonic()
        first()
        for _ in range(self._products):
            torch.mm(self._square, self._square)
        self._stage.synchronize()
        return time.monotonic() - begun_s


def stalls(stage: Stage, report: Report) -> None:
    """The peer sends late, or is stopped (SIGSTOP) while it should receive; rank 0 computes meanwhile."""
    link, computation = _Link(stage, "shm"), Computation(stage)
    pids = stage.rendezvous.gather("pids", os.getpid())
    message = torch.ones(stage.largest_nbytes, dtype=torch.uint8, device=stage.tensors)
    cases = {
        "receive": lambda: _receive_stalls(link, computation, message),
        "send": lambda: _send_stalls(link, computation, message, pids[1]),
    }
    for name, case in cases.items():
        promise = f"a {name} by the host path that stalls for {1e3 * STALL_S:g} ms holds up no computation"
        report.begin(promise)
        alone, stalled = [], []
        for number in range(ROUNDS + 1):
            link.meet()
            seconds = (computation.timed(), case())
            if number:  # the first pays for memory
                alone.append(seconds[0])
                stalled.append(seconds[1])
        if stage.stage == 0:
            took_s, usual_s = statistics.median(stalled), statistics.median(alone)
            seen = f"computation of {1e3 * usual_s:.1f} ms took {1e3 * took_s:.1f} ms"
            report.show(promise, seen, took_s <= usual_s + MOST_LATE_S)
    link.meet()
    link.transport.close()


def _receive_stalls(link: _Link, computation: Computation, message: torch.Tensor) -> float:
    (key,) = link.keys()
    link.meet()
    if link.stage.stage == 1:
        time.sleep(STALL_S)
        link.transport.post_send(key, 0, message)
        link.flush()
        return 0.0
    link.transport.post_receive(key, 1)
    assert not link.transport.ready(key), "the transfer did not stall"
    seconds = computation.timed()
    link.receive(key)
    return seconds


def _send_stalls(link: _Link, computation: Computation, message: torch.Tensor, peer_pid: int) -> float:
    (key,) = link.keys()
    if link.stage.stage == 1:
        link.transport.post_receive(key, 0)
        link.meet()
        link.receive(key)
        return 0.0
    link.meet()
    os.kill(peer_pid, signal.SIGSTOP)
    stopped_s = time.monotonic()
    try:
        seconds = computation.timed(lambda: link.transport.post_send(key, 1, message))
        time.sleep(max(0.0, stopped_s + STALL_S - time.monotonic()))
    finally:
        os.kill(peer_pid, signal.SIGCONT)
    link.flush()
    assert time.monotonic() > stopped_s + STALL_S, "the transfer did not stall"
    return seconds


def throughput(stage: Stage, report: Report, transport: str) -> None:
    """From one process's device memory to the other's."""
    link = _Link(stage, transport)
    copies = _copies_gb_per_s(stage) if stage.device is not None else {}
    copied = "".join(f"; {name} alone {rate:.1f} GB/s" for name, rate in copies.items())
    promise = f"the host path over {transport} carries {LEAST_GB_PER_S:g} GB/s"
    report.begin(promise)
    rates = [_burst_gb_per_s(link, stage.largest_nbytes) for _ in range(ROUNDS)][1:]
    if stage.stage == 0:
        rate = statistics.median(rates)
        report.show(promise, f"{rate:.2f} GB/s{copied}", rate >= LEAST_GB_PER_S)
    promise = f"a message of {SMALL_NBYTES} bytes over {transport} takes {1e3 * MOST_ONE_WAY_S:g} ms at most"
    report.begin(promise)
    seconds = _one_way_s(link)
    if stage.stage == 0:
        report.show(promise, f"{1e6 * seconds:.0f} us (half a round trip)", seconds <= MOST_ONE_WAY_S)
    link.meet()
    link.transport.close()


def _burst_gb_per_s(link: _Link, nbytes: int) -> float:
    keys = link.keys(BURST)
    if link.stage.stage == 1:
        for key in keys:
            link.transport.post_receive(key, 0)
        link.meet()
        for key in keys:
            link.receive(key)
        link.meet()
        return 0.0
    message = torch.ones(nbytes, dtype=torch.uint8, device=link.stage.tensors)
    link.meet()
    begun_s = time.monotonic()
    for key in keys:
        link.transport.post_send(key, 1, message)
    link.flush()
    link.meet()
    return nbytes * BURST / (time.monotonic() - begun_s) / 1e9


def _one_way_s(link: _Link) -> float:
    message = torch.ones(SMALL_NBYTES, dtype=torch.uint8, device=link.stage.tensors)
    halves = []
    link.meet()
    for _ in range(ROUND_TRIPS):
        (there,), (back,) = link.keys(), link.keys(direction=Direction.GRADIENT)
        if link.stage.stage == 0:
            link.transport.post_receive(back, 1)
            begun_s = time.monotonic()
            link.transport.post_send(there, 1, message)
            link.receive(back)
            link.stage.synchronize()
            halves.append((time.monotonic() - begun_s) / 2)
        else:
            link.transport.post_receive(there, 0)
            link.transport.post_send(back, 0, link.receive(there))
    link.flush()
    return statistics.median(halves or [0.0])


def _copies_gb_per_s(stage: Stage) -> dict[str, float]:
    """Each alone, by page-locked memory of as many bytes as a ring has."""
    assert stage.device is not None
    on_device = torch.ones(RING_SLOTS * SLOT_NBYTES, dtype=torch.uint8, device=stage.tensors)
    locked = stage.device.page_locked(on_device.nbytes)
    return {
        "device to host": _copy_gb_per_s(stage, locked, on_device),
        "host to device": _copy_gb_per_s(stage, on_device, locked),
    }


def _copy_gb_per_s(stage: Stage, target: torch.Tensor, source: torch.Tensor) -> float:
    assert stage.device is not None
    stream = stage.device.current_stream()
    for _ in range(2):  # the first pays for mappings
        stage.synchronize()
        begun_s = time.monotonic()
        for _ in range(BURST):
            stage.device.copy(target, source, stream)
        stage.synchronize()
    return target.nbytes * BURST / (time.monotonic() - begun_s) / 1e9


def ring(stage: Stage, report: Report) -> None:
    """What copies into a ring's own memory cost, page-locked where it is shared."""
    assert stage.device is not None
    promise = f"copies into a page-locked ring go at {LEAST_OF_LOCKED:g} of the rate into page-locked memory"
    report.begin(promise)
    ring = Ring.create(RING_SLOTS, SLOT_NBYTES)
    memory = torch.frombuffer(ring, dtype=torch.uint8)
    address = memory.data_ptr()
    begun_s = time.monotonic()
    stage.device.lock_pages(address, memory.nbytes)
    locked_s = time.monotonic() - begun_s
    source = torch.ones(memory.nbytes, dtype=torch.uint8, device=stage.tensors)
    into_locked = _copies_gb_per_s(stage)["device to host"]
    into_ring = _copy_gb_per_s(stage, memory, source)
    stage.synchronize()
    stage.device.unlock_pages(address)
    seen = f"{into_ring:.1f} of {into_locked:.1f} GB/s; {memory.nbytes} bytes were locked in {1e3 * locked_s:.1f} ms"
    report.show(promise, seen, into_ring >= LEAST_OF_LOCKED * into_locked)


PARTS: dict[str, Callable[..., None]] = {each.__name__: each for each in (stalls, throughput, ring)}
