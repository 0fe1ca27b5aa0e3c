# SPDX-License-Identifier: Apache-2.0
"""T1: which streams share a hardware queue with computation, which then stands behind what waits there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from gpu_check.findings import Report
from gpu_check.gpu import Gpu, Point, Standing, Stream

HELD_S = 0.05
"""What has not run by then is held up: it takes microseconds."""
LINKS = 8
"""Links of a stage with neighbours on both sides, around a ring and in both directions."""


def run(gpu: Gpu, report: Report, queues: str) -> None:
    """`queues`: of CUDA_DEVICE_MAX_CONNECTIONS; "8" is CUDA's default."""
    count = int(queues)
    pooled, links = gpu.pooled_streams(), gpu.link_streams(LINKS)
    _look(gpu, report, "computation goes on while a kernel waits alone on its stream", [0], pooled, _stands)
    waits: list[tuple[str, Wait]] = [("a kernel", _kernel_waits)]
    if free := [stream for stream in links if not _holds_computation(gpu, stream, _kernel_waits)]:
        waits.append(("an event", _event_of(free.pop())))
    elif count > 1:
        report.leave_out("behind a wait for an event, computation goes on", "no stream is free of computation's queue")
    else:
        waits.append(("an event", _event_of(gpu.link_streams(1)[0])))
    for name, wait in waits:
        behind = f"behind a wait for {name}"
        if count == 1:
            promise = f"{behind}, on whatever stream, computation stands still: plans reckon with one queue"
            _look(gpu, report, promise, [len(pooled + links)], pooled + links, wait)
            continue
        _look(gpu, report, f"{behind} on streams of links, computation goes on", [0], links, wait)
        most = max(1, 2 * len(pooled) // count)
        promise = f"{behind} on torch's pooled streams, computation stands still on {most} of them at most"
        _look(gpu, report, promise, range(most + 1), pooled, wait)


Wait = Callable[[Gpu, Stream], Standing]
"""Puts on a stream what stands or waits there until the kernel that it returns is released."""


def _look(
    gpu: Gpu, report: Report, promise: str, expected: Sequence[int], streams: Sequence[Stream], wait: Wait
) -> None:
    report.begin(promise)
    held = sum(_holds_computation(gpu, stream, wait) for stream in streams)
    report.show(promise, f"computation stood still on {held} of {len(streams)} streams", held in expected)


def _holds_computation(gpu: Gpu, stream: Stream, wait: Wait) -> bool:
    standing = wait(gpu, stream)
    try:
        gpu.kernel(gpu.compute)
        return not reached(gpu.record(gpu.compute), HELD_S)
    finally:
        standing.release()
        gpu.synchronize()


def _stands(gpu: Gpu, stream: Stream) -> Standing:
    return gpu.stand(stream)


def _kernel_waits(gpu: Gpu, stream: Stream) -> Standing:
    standing = gpu.stand(stream)
    gpu.kernel(stream)
    return standing


def _event_of(other: Stream) -> Wait:
    """`other` is to share no queue with computation: an event behind what stands there waits in its queue, too."""

    def wait(gpu: Gpu, stream: Stream) -> Standing:
        standing = gpu.stand(other)
        gpu.make_wait(stream, gpu.record(other))
        gpu.kernel(stream)
        return standing

    return wait


def reached(point: Point, within_s: float) -> bool:
    """Return whether the GPU comes to a point in time."""
    until_s = time.monotonic() + within_s
    while not point.query():
        if time.monotonic() >= until_s:
            return False
        time.sleep(1e-3)
    return True
