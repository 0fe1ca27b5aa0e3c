# SPDX-License-Identifier: Apache-2.0
"""Run gradient synchronisations behind the computation, in a thread, in the order in which they begin."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from adaptra_megatron.transport.gpu.cuda_device import DeviceThread


class Handle:
    """Handle of a task in the background, with the methods that Megatron uses of torch's."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def wait(self) -> None:
        """Wait until the task is complete, and make later GPU work wait for it. Raises the task's error.

        Needs no deadline: each exchange in it has one.
        """
        done = self._future.result()
        if done is not None:
            torch.cuda.current_stream().wait_event(done)


class Background:
    """Daemon thread that runs tasks in order. It starts with the first task."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._streams: dict[torch.device, Any] = {}

    def begin(self, task: Callable[[], None], device: torch.device) -> Handle:
        """Run `task` in the thread. On `device`, its work runs after everything launched so far."""
        if device.type == "cpu":
            return self._submit(task)
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        ready: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(torch.cuda.current_stream(device))
        return self._submit(functools.partial(self._run_on_gpu, task, ready, self._streams[device]))

    def _submit(self, task: Callable[[], Any]) -> Handle:
        if self._thread is None:
            self._thread = DeviceThread(self._run, "adaptra-gradients")
            self._thread.start()
        future: Future[Any] = Future()
        self._tasks.put((task, future))
        return Handle(future)

    def _run(self) -> None:
        while (item := self._tasks.get()) is not None:
            task, future = item
            try:
                future.set_result(task())
            except BaseException as error:  # raised by the handle's wait
                future.set_exception(error)

    @staticmethod
    def _run_on_gpu(task: Callable[[], None], ready: Any, stream: Any) -> Any:
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            stream.wait_event(ready)
            task()
            done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(stream)
        return done

    def close(self) -> None:
        """End the thread after the tasks that have begun. Does not wait for it."""
        self._tasks.put(None)
