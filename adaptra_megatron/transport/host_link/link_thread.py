# SPDX-License-Identifier: Apache-2.0
"""Serve all links of a rank by two threads: one writes into their rings, the other reads out of them.

Links give them tasks. A task is asked for its next step with its link's lock held; work is done without it, a turn
at a time, so that no link waits long for another. Work never waits for a peer.

A link holds its lock while it serves a caller or calls its parts, unless a docstring says otherwise. Only this module
runs slow operations without the lock.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from adaptra_megatron.common.log import logger_of
from adaptra_megatron.transport._ring import Delivery, Inbox, Ring, RingWatch
from adaptra_megatron.transport.gpu.cuda_device import DeviceThread

logger = logger_of(__name__)

Result = TypeVar("Result")
Work = Callable[[], Callable[[], Result] | None]
"""Work to do without the lock. Returns what to call with the lock afterwards, or None."""
Awaited = TypeVar("Awaited")
"""What a task waits for: room in a Ring, or an event of an (Inbox, Ring)."""

_IDLE_S = 60.0
"""Longest sleep of a thread without a signal."""


def without(lock: threading.Lock, work: Work[Result]) -> Result | None:
    """Call `work` without the lock, then its result with the lock; return the latter's result."""
    lock.release()
    try:
        settle = work()
    finally:
        lock.acquire()
    return None if settle is None else settle()


class LinkTask(Generic[Awaited]):
    """One link's task for a LinkThread. Callers hold the link's lock, unless a method says otherwise."""

    def __init__(
        self,
        thread: LinkThread[Awaited],
        lock: threading.Lock,
        next_step: Callable[[], Work[object] | Awaited | float | None],
        take: Callable[[Delivery], Callable[[], object]] | None = None,
    ) -> None:
        """`next_step` returns work, what to wait for, the longest time to sleep in seconds, or None to end. `take` is
        called without the lock with what was waited for, and returns what to call with it.
        """
        self.lock, self.next_step, self.take = lock, next_step, take
        self.ended = threading.Event()
        self._thread = thread
        self._started = False

    def start(self) -> None:
        """Have the thread begin with this task. With or without the lock."""
        self._started = True
        self._thread.begin(self)

    def join(self, timeout_s: float) -> None:
        """Wait for its end, if it was started, and for the thread's if it was the last. Logs what goes on. Without the
        lock.
        """
        if self._started and self.ended.wait(timeout_s):
            self._thread.join_if_over(timeout_s)
        elif self._started:
            logger.warning("thread %s did not leave a closed link within %.1f s", self._thread.name, timeout_s)

    def wake(self) -> None:
        """Ask for the next step: there may be work, an earlier time to wake up, or the link closes."""
        if self._started:
            self._thread.wake(self)


class LinkThread(Generic[Awaited]):
    """Thread for the tasks of any number of links. It runs while it has tasks."""

    def __init__(self, name: str) -> None:
        self.watch = RingWatch()
        self.name = name
        self._lock = threading.Lock()
        """Guards the number of tasks, and so the thread's beginning and end."""
        self._thread: DeviceThread | None = None
        self._begun = 0
        self._woken: deque[LinkTask[Awaited]] = deque()
        self._due_s: dict[LinkTask[Awaited], float] = {}
        """Tasks and when to ask each for its next step. Of the thread, like `_waits`."""
        self._waits: dict[LinkTask[Awaited], Awaited] = {}
        self._waiting: list[LinkTask[Awaited]] = []
        self._awaited: list[Awaited] = []
        """Tasks that wait, and for what."""
        self._until_s = 0.0
        """Time at which the next task is due."""

    def begin(self, task: LinkTask[Awaited]) -> None:
        """Take on a task. For any thread, with or without the lock of the task's link."""
        with self._lock:
            self._begun += 1
            self.wake(task)
            if self._begun == 1:
                self._thread = DeviceThread(self._run, self.name)
                self._thread.start()

    def join_if_over(self, timeout_s: float) -> None:
        """Wait for the end of the thread, if the last task has ended. For any other thread."""
        with self._lock:
            thread = None if self._begun else self._thread
        if thread is not None:
            thread.join(timeout_s)

    def wake(self, task: LinkTask[Awaited]) -> None:
        """Ask the task for its next step. For any thread."""
        self._woken.append(task)
        self.watch.wake()

    def wait(self, awaited: Sequence[Awaited], until_s: float) -> tuple[int, Delivery | None] | None:
        """Wait until one of the awaited rings is ready; return its index. None at `until_s`, and after a wake-up."""
        raise NotImplementedError

    def _run(self) -> None:
        while (not self._woken and time.monotonic() < self._until_s) or self._serve_due():
            ready = self.wait(self._awaited, self._until_s)
            if ready is not None and not self._serve(self._waiting[ready[0]], ready[1]):
                return
            del ready  # or an idle thread would hold what came last

    def _serve_due(self) -> bool:
        """Serve woken tasks and those whose time has come; return False after the end of the last."""
        now_s = time.monotonic()
        while self._woken:
            task = self._woken.popleft()
            if not task.ended.is_set():  # others may wake it for as long as they have it
                self._due_s[task] = now_s
        due = [task for task, due_s in self._due_s.items() if due_s <= now_s]
        if not all(self._serve(task, None) for task in due):
            return False
        self._waiting, self._awaited = list(self._waits), list(self._waits.values())
        self._until_s = min(self._due_s.values(), default=now_s + _IDLE_S)
        return True

    def _serve(self, task: LinkTask[Awaited], delivery: Delivery | None) -> bool:
        """Take what the task's ring delivers, then ask for the next step. Returns False if that was the end of the
        last task.
        """
        try:
            settle = None if delivery is None or task.take is None else task.take(delivery)
            with task.lock:
                if settle is not None:
                    settle()
                step = task.next_step()
                if callable(step):
                    without(task.lock, step)
                    step = 0.0
        except Exception:
            logger.exception("internal error in %s; a link will not work from now on", self.name)
            step = None
        # Nearly always, and then the lists of `_serve_due` stay. A task that waits for nothing differs from any step.
        if step is self._waits.get(task, task):
            self._due_s[task] = math.inf
            return True
        self._until_s = 0.0  # what is waited for has changed
        self._waits.pop(task, None)
        if step is None:
            return not self._end(task)
        if isinstance(step, float):
            self._due_s[task] = time.monotonic() + step
        else:
            self._due_s[task] = math.inf
            self._waits[task] = step
        return True

    def _end(self, task: LinkTask[Awaited]) -> bool:
        """Forget a task; return whether it was the last."""
        del self._due_s[task]
        self._waiting, self._awaited = [], []  # the thread may end here, and would keep the last ring mapped
        with self._lock:
            self._begun -= 1
            task.ended.set()
            return self._begun == 0


class WritingThread(LinkThread[Ring]):
    """Thread that writes into rings, and waits for room in those that are full."""

    def wait(self, awaited: Sequence[Ring], until_s: float) -> tuple[int, Delivery | None] | None:
        index = self.watch.await_room(awaited, until_s)
        return None if index is None else (index, None)


class ReadingThread(LinkThread[tuple[Inbox, Ring]]):
    """Thread that reads the rings of all links."""

    def wait(self, awaited: Sequence[tuple[Inbox, Ring]], until_s: float) -> tuple[int, Delivery | None] | None:
        delivery = self.watch.next(awaited, until_s)
        return None if delivery is None else (delivery.index, delivery)


class LinkThreads:
    """The threads of all links of a rank."""

    def __init__(self) -> None:
        self.writing = WritingThread("adaptra-links-send")
        self.reading = ReadingThread("adaptra-links-receive")
