# SPDX-License-Identifier: Apache-2.0
"""A device whose work happens late, in any order that its streams and events allow, on memory that is poisoned
whenever it is not in use: what reads or writes without having waited, or after letting go, shows as wrong content."""

from __future__ import annotations

import ctypes
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from adaptra_megatron.transport.gpu.cuda_device import DeviceThread

POISON = 0xA5
PATIENCE_S = 5.0
LOOK_S = 1e-3


class SimulatedEvent:
    """A point in a simulated stream."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.done = False
        self.done_s = 0.0
        self._device = device

    def set(self) -> None:
        """The device has reached it."""
        self.done, self.done_s = True, self._device.clock_s()

    def record(self) -> None:
        """On the current stream, as a mark of a DeviceClock."""
        stream = self._device.current_stream()
        self._device.timed_on.add(stream.name)
        self.done = False
        self._device.put_event(stream, self)

    def elapsed_time(self, later: SimulatedEvent) -> float:
        """Milliseconds."""
        assert self.done, "an event that has not been reached tells nothing"
        assert later.done, "an event that has not been reached tells nothing"
        return 1e3 * (later.done_s - self.done_s)

    def query(self) -> bool:
        """Return whether the device has reached it."""
        self._device.check()
        return self.done

    def synchronize(self) -> None:
        """Let the device work until it has reached it."""
        self._device.run_until(lambda: self.done)


class SimulatedStream:
    """Operations in order: events to wait for, events to set and functions to call."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.held = False
        """True if it stands still, as one that waits for a peer."""
        self.operations: deque[SimulatedEvent | tuple[SimulatedEvent] | Callable[[], None]] = deque()

    def runnable(self) -> bool:
        """Return whether its next operation could happen now. An event alone is waited for; in a tuple, it is set."""
        if self.held or not self.operations:
            return False
        first = self.operations[0]
        return first.done if isinstance(first, SimulatedEvent) else True


class SimulatedDevice:
    """Implements `cuda_device.Device` on host memory. Copies are by address: nothing keeps memory alive but its user.

    An operation happens only when a thread synchronizes. Which of several then comes first is drawn by lot, unless
    one kind always goes `first`: "compute" or "copies".
    """

    device = torch.device("cpu")

    def __init__(self, seed: int = 0, *, first: str | None = None, ignores_waits: bool = False) -> None:
        self.failure: Exception | None = None
        """Raised by whatever asks the device from now on."""
        self.refuses_page_locks = False
        self.patience_s = PATIENCE_S
        self.clock_s: Callable[[], float] = time.monotonic
        """Times of its events."""
        self.compute = SimulatedStream("compute")
        self.default = SimulatedStream("default")
        """Stream of threads that have chosen none."""
        self.memory_stream = SimulatedStream("memory")
        self.streams = [self.compute, self.default, self.memory_stream]
        self.locked: dict[int, int] = {}
        self.page_locks_made = 0
        self.copies = 0
        self.pageable_copies = 0
        self.timed_on: set[str] = set()
        """Streams with events that tell the time."""
        self.kept: list[tuple[int, str]] = []
        """Addresses of tensors that were kept until done, and on which stream."""
        self.allocated_pinned: list[int] = []
        self.freed: set[int] = set()
        self._first, self._ignores_waits = first, ignores_waits
        self._random = random.Random(seed)
        self._using, self._training = threading.local(), threading.get_ident()
        self._changed = threading.Condition(threading.RLock())
        self._memories: list[np.ndarray] = []

    # Device

    def current_stream(self) -> SimulatedStream:
        """Within `use`, that one; else the compute stream for the thread that made the device, as the training's."""
        training = threading.get_ident() == self._training
        return getattr(self._using, "stream", self.compute if training else self.default)

    @contextmanager
    def use(self, stream: SimulatedStream) -> Iterator[None]:
        """As torch.cuda.stream: of the calling thread alone."""
        before = self.current_stream()
        self._using.stream = stream
        try:
            yield
        finally:
            self._using.stream = before

    def new_stream(self) -> SimulatedStream:
        """One more."""
        self.streams.append(SimulatedStream(f"copy {len(self.streams)}"))
        return self.streams[-1]

    def handle(self, stream: SimulatedStream) -> int:
        """Its number among all streams."""
        return self.streams.index(stream)

    def current_handle(self) -> int:
        """That of the current stream."""
        return self.handle(self.current_stream())

    def record(self, stream: SimulatedStream, unused: SimulatedEvent | None = None) -> SimulatedEvent:
        """Put an event on `stream`, one that is done if it is to be used again."""
        event = SimulatedEvent(self) if unused is None else unused
        assert unused is None or unused.done, "what waits for its first use would wait for the second"
        event.done = False
        return self.put_event(stream, event)

    def make_wait(self, stream: SimulatedStream, event: SimulatedEvent) -> None:
        """Put a wait on `stream`."""
        if not self._ignores_waits:
            self._put(stream, event)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: SimulatedStream) -> None:
        """Put a copy of raw memory on `stream`; if a side is neither the device's nor page-locked, wait for its end."""
        assert target.nbytes == source.nbytes
        to, from_, nbytes = target.data_ptr(), source.data_ptr(), target.nbytes
        by_itself = self._is_known(to, nbytes) and self._is_known(from_, nbytes)
        over: list[bool] = []

        def move() -> None:
            assert by_itself == (self._is_known(to, nbytes) and self._is_known(from_, nbytes)), "unlocked meanwhile"
            ctypes.memmove(to, from_, nbytes)
            over.append(True)

        self._put(stream, move)
        self.copies += 1
        if not by_itself:
            self.pageable_copies += 1
            self.run_until(lambda: bool(over))

    def empty(self, shape: Sequence[int], dtype: torch.dtype, stream: SimulatedStream | None = None) -> torch.Tensor:
        """Poisoned memory."""
        self.check()
        stream = stream or self.current_stream()
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        memory = self._allocate(nbytes, stream).view(dtype).view(tuple(shape))
        if stream is not self.memory_stream:
            # What is on the stream already may still use memory that was freed there.
            address = memory.data_ptr()
            self._put(stream, lambda: ctypes.memset(address, POISON, nbytes))
        return memory

    def keep_until_done_on(self, tensor: torch.Tensor, stream: SimulatedStream) -> None:
        """Memory that is freed is poisoned on that stream then."""
        self.kept.append((tensor.data_ptr(), stream.name))

    def idle(self, stream: SimulatedStream) -> bool:
        """Return whether nothing is left on `stream`; the device works on meanwhile."""
        self.check()
        self.run()
        return not stream.operations

    def page_locked(self, nbytes: int) -> torch.Tensor:
        """Poisoned memory."""
        self.check()
        self.allocated_pinned.append(nbytes)
        return self._allocate(nbytes)

    def lock_pages(self, address: int, nbytes: int) -> None:
        """Note it; overlapping ranges are an error, as they are to CUDA."""
        if self.refuses_page_locks:
            raise RuntimeError("operation not permitted")
        assert address % 4096 == 0
        assert all(address + nbytes <= other or address >= other + size for other, size in self.locked.items())
        self.locked[address] = nbytes
        self.page_locks_made += 1

    def unlock_pages(self, address: int) -> None:
        """What is not locked cannot be unlocked."""
        del self.locked[address]

    # What tests do.

    def train_here(self) -> None:
        """From now on, the compute stream is the calling thread's."""
        self._training = threading.get_ident()

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        """`values` computed on the compute stream: poison until that has run."""
        made = self.empty(values.shape, values.dtype, self.compute)
        to, nbytes = made.data_ptr(), made.nbytes
        self._put(self.compute, lambda: ctypes.memmove(to, values.data_ptr(), nbytes))
        return made

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a kernel that is queued now on the compute stream will have read of `tensor`, once it has run."""
        seen = torch.full_like(tensor, 0)
        from_, to, nbytes = tensor.data_ptr(), seen.data_ptr(), seen.nbytes
        self._put(self.compute, lambda: ctypes.memmove(to, from_, nbytes))
        return seen

    def fail(self, cause: Exception) -> None:
        """An error: of what is under way, and of everything after it."""
        with self._changed:
            self.failure = cause
            self._changed.notify_all()

    def put(self, stream: SimulatedStream, operation: Callable[[], None]) -> None:
        """Call a function in the order of a stream, as a kernel."""
        self._put(stream, operation)

    def put_event(self, stream: SimulatedStream, event: SimulatedEvent) -> SimulatedEvent:
        """Have `stream` set an event when it comes there."""
        self._put(stream, (event,))
        return event

    def let_go(self, stream: SimulatedStream) -> None:
        """It stands still no more."""
        with self._changed:
            stream.held = False
            self._changed.notify_all()

    def run_one(self, stream: SimulatedStream, count: int = 1) -> None:
        """Do the next operations of a stream, though it stands still."""
        with self._changed:
            for _ in range(count):
                self._perform(stream)

    def run(self) -> bool:
        """Work until nothing can go on; returns whether anything could."""
        with self._changed:
            worked = self._step()
            while self._step():
                pass
            return worked

    def run_until(self, done: Callable[[], bool]) -> None:
        """Work until `done`, waiting for streams that stand still. Raises the device's error."""
        until_s = time.monotonic() + self.patience_s
        with self._changed:
            while not done():
                self.check()
                if self._step():
                    until_s = time.monotonic() + self.patience_s
                elif time.monotonic() >= until_s:
                    raise AssertionError("a stream stands still for ever")
                else:
                    self._changed.wait(LOOK_S)  # what it waits for may happen on another device
            self.check()

    def check(self) -> None:
        """Raise the device's error, if it has one."""
        thread = threading.current_thread()
        assert not thread.name.startswith("adaptra") or isinstance(thread, DeviceThread), "it may spoil a capture"
        if self.failure is not None:
            raise self.failure

    def _step(self) -> bool:
        runnable = [stream for stream in self.streams if stream.runnable()]
        if not runnable:
            return False
        preferred = {"compute": runnable[0], "copies": runnable[-1]}
        self._perform(preferred[self._first] if self._first else self._random.choice(runnable))
        return True

    def _perform(self, stream: SimulatedStream) -> None:
        first = stream.operations.popleft()
        if isinstance(first, tuple):
            first[0].set()
            self._changed.notify_all()
        elif not isinstance(first, SimulatedEvent):
            first()

    def _put(
        self, stream: SimulatedStream, operation: SimulatedEvent | tuple[SimulatedEvent] | Callable[[], None]
    ) -> None:
        self.check()
        with self._changed:
            stream.operations.append(operation)
            self._changed.notify_all()

    def _allocate(self, nbytes: int, stream: SimulatedStream | None = None) -> torch.Tensor:
        memory = np.full(nbytes, POISON, dtype=np.uint8)
        self._memories.append(memory)  # for ever, so that what writes too late spoils nothing of ours
        lent = memory[:]
        weakref.finalize(lent, self._free, memory, stream)
        return torch.from_numpy(lent)

    def _free(self, memory: np.ndarray, stream: SimulatedStream | None) -> None:
        """Others may use it: at once if it is the host's, else what is put on its own stream from now on."""
        address = memory.ctypes.data
        self.freed.add(address)
        for kept, name in self.kept:
            if kept == address:
                stream = next(each for each in self.streams if each.name == name)
        if stream is None:
            memory.fill(POISON)
        elif self.failure is None:
            with self._changed:  # by whichever thread collects garbage
                stream.operations.append(lambda: memory.fill(POISON))

    def _is_known(self, address: int, nbytes: int) -> bool:
        ranges = [(memory.ctypes.data, memory.nbytes) for memory in self._memories] + list(self.locked.items())
        return any(first <= address and address + nbytes <= first + size for first, size in ranges)
