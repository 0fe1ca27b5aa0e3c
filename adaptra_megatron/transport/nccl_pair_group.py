# SPDX-License-Identifier: Apache-2.0
"""The device path's wire between GPUs: an NCCL communicator of two ranks for one directed link and one session.

A message counts as arrived only when the CPU has seen it complete, which a thread of the session looks for: so one that
never comes can still come the other way. The price, beside waiting on a stream as stock does, is that a message is
noticed up to a millisecond after its arrival, and that a receive begins when the one before it is over.

The thread asks the event of the work itself, from time to time. A stream that waits for it, and an event behind that to
sleep on, would need no asking. But streams share hardware queues (all of them where CUDA_DEVICE_MAX_CONNECTIONS is 1,
as Megatron's tensor parallelism wants it), and there a wait holds up computation that the peer may be waiting for.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from adaptra_megatron.transport.cuda_device import Device, Event
from adaptra_megatron.transport.pair_group import PairEnds

SHORTEST_PAUSE_S = 50e-6
LONGEST_PAUSE_S = 1e-3
_CAUSE_LENGTH = 300
_environment_lock = threading.Lock()
UNWATCHED: Mapping[str, str] = {
    # No watchdog thread: that ends the process, or has another group's end it, when a communicator fails. What it does
    # beside, asking for errors and keeping deadlines, `wait` does.
    "TORCH_NCCL_BLOCKING_WAIT": "1",
}


class NcclPairGroup:
    """One end of a directed link over NCCL. Both ends construct it at about the same time, with the same store."""

    one_at_a_time = True  # NCCL has no tags, and a kernel behind one that waits for the peer may hold up computation

    def __init__(
        self, store: Any, ends: PairEnds, device: Device, identity: str, *, sends: bool, timeout_s: float
    ) -> None:
        """`store`: torch.distributed's, used by this session alone. `identity`: of this end's GPU, unique in the job.
        `sends`: whether this is the source's end. For a thread that may be kept waiting: NCCL connects on the first
        message of a communicator, which blocks at both ends.

        Raises RuntimeError when the other end does not come within `timeout_s`, or is on the same GPU.
        """
        self.ends = ends
        self._device = device
        self._peer = 1 if sends else 0
        self._ended = threading.Event()
        self._calls = threading.Lock()
        """NCCL's calls on one communicator must not overlap, abort included."""
        self._brought: deque[tuple[torch.Tensor, Event]] = deque()
        """Page-locked memory that the device reads."""
        deadline_s = time.monotonic() + timeout_s
        # NCCL would wait for a peer that does not come for as long as it takes, and cannot be called off.
        _meet(store, 1 - self._peer, identity, timeout_s)
        self._stream = device.new_stream()
        self._group = _make_group(store, 1 - self._peer, timeout_s)
        try:
            greeting = self.empty((1,), torch.uint8)
            work = self.send(greeting, 0) if sends else self.receive(greeting, 0)
            self.wait(work, max(0.0, deadline_s - time.monotonic()))
        except RuntimeError as cause:
            self.abort()
            raise RuntimeError(_in_one_line(cause)) from cause

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._device.empty(shape, dtype, self._stream)

    def bring(self, host: torch.Tensor) -> torch.Tensor:
        while self._brought and self._brought[0][1].query():
            self._brought.popleft()
        locked = self._device.page_locked(host.nbytes)
        locked.copy_(host.view(torch.uint8))
        tensor = self.empty(host.shape, host.dtype)
        self._device.copy(tensor.view(torch.uint8), locked, self._stream)
        self._brought.append((locked, self._device.record(self._stream)))
        return tensor

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        locked = self._device.page_locked(tensor.nbytes)
        self._device.copy(locked, tensor.view(torch.uint8), self._stream)
        self._device.record(self._stream).synchronize()  # nothing is on this stream that is not done
        return locked.view(tensor.dtype).clone()

    def send_after(self, event: Event) -> None:
        self._device.make_wait(self._stream, event)

    # As in PairGroup, looked up on the class at each call. NCCL's stream waits for the one that is current.
    def send(self, tensor: torch.Tensor, tag: int) -> Any:
        with self._calling(), self._device.use(self._stream):
            return self._group.send([tensor], self._peer, tag)

    def receive(self, buffer: torch.Tensor, tag: int) -> Any:
        with self._calling(), self._device.use(self._stream):
            return self._group.recv([buffer], self._peer, tag)

    def wait(self, work: Any, timeout_s: float) -> None:
        began_s = time.monotonic()
        while not work.is_completed():  # which is true of a failed one, too
            waited_s = time.monotonic() - began_s
            if waited_s >= timeout_s:
                self.abort()
                raise RuntimeError(f"it did not arrive in {timeout_s:g} s")
            # Seldom enough to cost little, often enough to be late by a twentieth of the wait.
            if self._ended.wait(min(LONGEST_PAUSE_S, max(SHORTEST_PAUSE_S, waited_s / 20))):
                break
        if self._ended.is_set():  # an aborted transfer is completed, too
            raise RuntimeError("the session was ended")
        with self._device.use(self._stream):
            work.wait()  # raises what NCCL reports; lets go of what torch holds for the work

    def abort(self) -> None:
        self._ended.set()
        with self._calls, contextlib.suppress(RuntimeError):
            self._group.abort()

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        # Only abort() can hold it, and may take long: the training thread does not wait for that.
        if self._ended.is_set() or not self._calls.acquire(blocking=False):
            raise RuntimeError("the session was ended")
        try:
            yield
        finally:
            self._calls.release()


def gpu_identity(device: torch.device) -> str:
    """Of a GPU, the same in all processes and in no other host."""
    properties: Any = torch.cuda.get_device_properties(device)
    return str(properties.uuid)


def _meet(store: Any, rank: int, identity: str, timeout_s: float) -> None:
    store.set(f"gpu/{rank}", identity)
    store.wait([f"gpu/{1 - rank}"], timedelta(seconds=timeout_s))
    if store.get(f"gpu/{1 - rank}").decode() == identity:
        raise RuntimeError("both stages are on one GPU, and NCCL connects different GPUs only")


def _make_group(store: Any, rank: int, timeout_s: float) -> Any:
    if not dist.is_nccl_available():
        raise RuntimeError("this torch was built without NCCL")
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=timeout_s)
    store.set_timeout(timedelta(seconds=timeout_s))  # the communicator's identity comes through it
    with _environment(UNWATCHED):
        return nccl(store, rank, 2, options)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """What a process group can be told by the environment alone, as it is constructed."""
    with _environment_lock:
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _in_one_line(cause: Exception) -> str:
    return " ".join(str(cause).split())[:_CAUSE_LENGTH]
