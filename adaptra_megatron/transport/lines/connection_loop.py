# SPDX-License-Identifier: Apache-2.0
"""Serve all connections of a rank, and its delegate, by one event loop in one thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from adaptra_megatron.common.log import logger_of
from adaptra_megatron.transport.gpu.cuda_device import DeviceThread

logger = logger_of(__name__)

Result = TypeVar("Result")

_ENDS_S = 5.0
"""Longest wait for the thread to end once nothing is left to serve."""


class ConnectionLoop:
    """Event loop and its thread. For any thread, unless a method says otherwise."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._thread: DeviceThread | None = None
        self._begun: list[Future[None]] = []

    def begin(self, serve: Coroutine[Any, Any, None]) -> Future[None]:
        """Run a coroutine in the loop, and start the thread with the first one."""
        with self._lock:
            if self._thread is None:
                self._thread = DeviceThread(self.loop.run_forever, "adaptra-connections")
                self._thread.start()
            self._begun.append(asyncio.run_coroutine_threadsafe(serve, self.loop))
            return self._begun[-1]

    def call(self, function: Callable[[], object]) -> None:
        """Call `function` in the loop; drop it once the loop is closed. Returns at once."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function)

    def end(self, served: Future[None] | None, within_s: float) -> None:
        """Wait for the end of a coroutine, and end the thread unless another that shares the loop has not ended yet.
        Logs what goes on. May be called twice.
        """
        if served is not None and wait([served], within_s).not_done:
            logger.warning("thread adaptra-connections did not finish within %.1f s, and goes on", within_s)
        with self._lock:
            if not all(future.done() for future in self._begun):
                return
            if self._thread is not None:
                self.call(self.loop.stop)
                self._thread.join(_ENDS_S)
            if not self.loop.is_running():
                self.loop.close()


async def in_thread(work: Callable[[], Result]) -> Result:
    """Run `work`, which may block, in a thread of its own, and return its result."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def run() -> None:
        try:
            result = work()
        except Exception as cause:
            loop.call_soon_threadsafe(done.set_exception, cause)
        else:
            loop.call_soon_threadsafe(done.set_result, result)

    thread = DeviceThread(run, "adaptra-blocking")
    thread.start()
    try:
        return await done
    finally:
        thread.join(_ENDS_S)  # it has only to return; otherwise nothing would wait for it
