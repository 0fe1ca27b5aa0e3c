# SPDX-License-Identifier: Apache-2.0
"""T2: which calls of the host wait for a kernel that stands on the GPU, as a receive does whose message is late."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from gpu_check.findings import Report
from gpu_check.gpu import Gpu, HostCall, Stream

RETURNS_S = 5.0
"""After the kernel has ended."""


def run(gpu: Gpu, report: Report) -> None:
    """All calls that the GPU has, one after the other."""
    stream = gpu.link_streams(1)[0]
    for name, call in gpu.host_calls().items():
        if not look(gpu, report, stream, name, call):
            return  # whatever is asked of the GPU now may never return either


def look(gpu: Gpu, report: Report, stream: Stream, name: str, call: HostCall) -> bool:
    """Return whether a call waits for a kernel that stands on a stream. Returns False where it never returned."""
    when = "once a kernel that stands has ended" if call.may_wait else "while a kernel stands"
    promise = f"{name} returns {when}"
    report.begin(promise)
    try:
        ready = call.prepare(stream)
    except (ImportError, RuntimeError) as cause:
        report.leave_out(promise, str(cause))
        return True
    gpu.synchronize()
    standing = gpu.stand(stream)
    thread = _Call(ready)
    waited = not thread.returned_within(call.at_once_s)
    standing.release()
    if not thread.returned_within(RETURNS_S):
        report.show(promise, f"it had not returned {RETURNS_S:g} s after the kernel had ended", False)
        return False
    gpu.synchronize()
    if thread.failure is not None:
        report.show(promise, f"it failed: {thread.failure}", False)
    else:
        seen = "it waited for the kernel" if waited else f"it returned after {1e3 * thread.seconds:.1f} ms"
        report.show(promise, seen, call.may_wait or not waited)
    return True


class _Call(threading.Thread):
    """A call in a thread of its own, which may be kept there for ever."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.failure: Exception | None = None
        self.seconds = 0.0
        self._call = call
        self.start()

    def run(self) -> None:
        begun_s = time.monotonic()
        try:
            self._call()
        except Exception as cause:  # of whatever library: it is shown
            self.failure = cause
        self.seconds = time.monotonic() - begun_s

    def returned_within(self, seconds: float) -> bool:
        """Return whether it has, `seconds` from now."""
        self.join(seconds)
        return not self.is_alive()
