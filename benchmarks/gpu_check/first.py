# SPDX-License-Identifier: Apache-2.0
"""What decides the device path, to be asked before all else: events and NCCL's trailing wait behind a transfer, a full
launch queue, captures, costs. Needs torch alone; see torch_gpu.py."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from gpu_check.findings import Report
from gpu_check.gpu import Point, Standing, Stream
from gpu_check.t1_queues import HELD_S, reached

STREAMS = 8
"""Fresh ones for each question: some of them may share computation's queue."""
BLOCKED_S = 1.0


class FirstGpu(Protocol):
    """The GPU, as far as it takes."""

    compute: Stream

    def link_streams(self, count: int) -> list[Stream]:
        """As links have them."""

    def default_streams(self, count: int) -> list[Stream]:
        """As NCCL's own."""

    def stand(self, stream: Stream) -> Standing:
        """Put a kernel on a stream that stays for a while, or until it is released."""

    def kernel(self, stream: Stream) -> None:
        """Put a short kernel on a stream."""

    def record(self, stream: Stream, *, timed: bool = False, blocking: bool = False) -> Point:
        """The present end of a stream."""

    def make_wait(self, stream: Stream, point: Point) -> None:
        """What is put on `stream` from now on comes after `point`."""

    def synchronize(self) -> None:
        """Until nothing is left on the GPU."""

    def fill(self) -> int:
        """Launch behind what stands until the host is kept; returns how often that went."""

    def calls_when_full(self) -> Mapping[str, Callable[[], Any]]:
        """What threads of ours ask meanwhile, by name."""

    def captured_with_thread(self, ours: bool) -> str | None:
        """Why a CUDA graph could not be captured while a thread queries the device; None where it could."""

    def costs_us(self) -> Mapping[str, float]:
        """What calls take on the host, by name."""


def run(gpu: FirstGpu, report: Report, part: str) -> None:
    """One part of PARTS."""
    PARTS[part](gpu, report)


def events(gpu: FirstGpu, report: Report) -> None:
    """Which kinds of events behind a kernel that stands keep computation from going on."""
    for name, timed, blocking, waits, needed in (
        ("an event without time (links have them)", False, False, False, True),
        ("an event that a thread can sleep on", False, True, False, False),
        ("an event with time", True, False, False, False),
        ("an event with time that a thread can sleep on", True, True, False, False),
        ("an event that an idle stream waits for (NCCL's trailing wait)", False, False, True, False),
        ("an event with time that an idle stream waits for", True, False, True, False),
    ):
        known = "" if needed else ", or plans and links do without"
        promise = f"behind a transfer, {name} lets computation go on{known}"
        report.begin(promise)
        held = sum(
            _holds(gpu, link, idle if waits else None, timed, blocking)
            for link, idle in zip(gpu.link_streams(STREAMS), gpu.default_streams(STREAMS), strict=True)
        )
        report.show(promise, f"computation stood still on {held} of {STREAMS} streams", not (needed and held))


def full(gpu: FirstGpu, report: Report) -> None:
    """Which calls are kept, with threads of ours in them, while a launch queue is full."""
    calls = gpu.calls_when_full()
    report.begin("a launch queue that is full keeps the thread that launches alone")
    launched = gpu.fill()
    report.show("a launch queue takes some hundred launches", f"{launched} before the host was kept", launched > 100)
    for name, call in calls.items():
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(BLOCKED_S)
        seen = f"it did not return within {BLOCKED_S:g} s" if thread.is_alive() else "it returned"
        report.show(f"{name} returns meanwhile, or no deadline depends on it", seen, True)
        if thread.is_alive():
            break  # by now the queue may be empty: the rest would say nothing
    gpu.synchronize()


def capture(gpu: FirstGpu, report: Report) -> None:
    """Whether threads break the capture of a CUDA graph by another."""
    for ours in (False, True):
        whose = "of ours" if ours else "in the mode it began with"
        promise = f"a capture survives queries by a thread {whose}" + ("" if ours else ", or not")
        report.begin(promise)
        cause = gpu.captured_with_thread(ours)
        report.show(promise, cause or "it did", cause is None or not ours)


def costs(gpu: FirstGpu, report: Report) -> None:
    """For the table: what a message costs the host."""
    report.begin("calls are timed")
    for name, us in gpu.costs_us().items():
        report.show(f"{name} is timed", f"{us:.1f} us", us > 0.0)


def _holds(gpu: FirstGpu, link: Stream, idle: Stream | None, timed: bool, blocking: bool) -> bool:
    standing = gpu.stand(link)
    try:
        point = gpu.record(link, timed=timed, blocking=blocking)
        if idle is not None:
            gpu.make_wait(idle, point)
        gpu.kernel(gpu.compute)
        return not reached(gpu.record(gpu.compute), HELD_S)
    finally:
        standing.release()
        gpu.synchronize()


PARTS = {each.__name__: each for each in (events, full, capture, costs)}
