# SPDX-License-Identifier: Apache-2.0
"""The two ends of a session of the device path: one sends over its group, the other receives.

Only `confirmed` is called with the link's lock held. Only the receiving end's thread waits for the peer.

Sends and receives start strictly in the order of their indices, from whatever thread, since NCCL matches them only by
order. A message starts immediately, in the calling thread, so that later work of the training is behind it on the
device, too. Probes, and messages preceded by a header, wait for their turn, so that none of them waits on the device.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from adaptra_megatron.transport.device_session.pair_group import LinkGroup
from adaptra_megatron.transport.gpu.cuda_device import Computed, DeviceThread, OutOfMemory, out_of_memory
from adaptra_megatron.transport.link_paths import PROBE_NBYTES
from adaptra_megatron.transport.message_keys import TensorSpecification, TransportError
from adaptra_megatron.transport.shapes import HEADER_NUMBERS, decode_shape, encode_shape

END_S = 2.0


class SendingSession:
    """Sending end of a device session. Sent tensors are held until the receiver has confirmed them."""

    def __init__(self, group: LinkGroup) -> None:
        self._group = group
        self._turn = threading.Lock()
        self._next = 0
        self._early: dict[int, tuple[Computed, bool]] = {}
        self._lock = threading.Lock()
        """Guards the held tensors, so that a confirmation does not wait for a send."""
        self._held: dict[int, list[tuple[Any, torch.Tensor]]] = {}

    def send(self, index: int, message: Computed, *, header: bool) -> None:
        """Send a message. Returns at once. `header`: send its shape first. Raises RuntimeError if the session
        failed."""
        with self._turn:
            # Effects leave the link's lock before they are performed, so two threads may come here in the wrong order.
            self._early[index] = message, header
            while (due := self._early.pop(self._next, None)) is not None:
                index, (message, header), held = self._next, due, []
                self._next += 1
                if message.event is not None:
                    self._group.begin_after(message.event)
                if header:
                    shape = self._group.bring(encode_shape(message.tensor.shape, torch.device("cpu")))
                    held.append((self._group.send(shape, 2 * index), shape))
                held.append((self._group.send(message.tensor, 2 * index + 1), message.tensor))
                with self._lock:
                    self._held[index] = held

    def probe(self, index: int, nbytes: int = PROBE_NBYTES) -> None:
        """Send a probe of `nbytes`, as `send`."""
        self.send(index, Computed(self._group.empty((nbytes,), torch.uint8), None), header=False)

    def confirmed(self, received: int) -> None:
        """Release the first `received` messages, which the receiver has."""
        with self._lock:
            for index in [index for index in self._held if index < received]:
                del self._held[index]

    def abort(self) -> None:
        """Abort the session. Over NCCL the peer notices only by the network, and only for pending messages."""
        self._group.abort()

    def end(self) -> None:
        """End the session and release its group."""
        self._group.abort()
        with self._lock:
            self._held.clear()


class _Receive(NamedTuple):
    """A receive to launch."""

    place: int
    """Index in the session."""
    shape: tuple[int, ...] | None
    """Shape of the message; None: a header with the shape comes first."""
    dtype: torch.dtype
    probe: bool


class _UnderWay(NamedTuple):
    """A receive that has been launched."""

    receive: _Receive
    work: Any
    buffer: torch.Tensor
    """Memory being filled: of the header where the shape is unknown."""


class ReceivingSession:
    """Receiving end of a device session: launches receives in order, and waits for them in a thread."""

    def __init__(
        self,
        group: LinkGroup,
        timeout_s: float,
        arrived: Callable[[torch.Tensor, float], None],
        failed: Callable[[str], None],
    ) -> None:
        """The thread calls `arrived(tensor, time)` for each message in order, and `failed(cause)` at most once."""
        self._group, self._timeout_s = group, timeout_s
        self._arrived, self._failed = arrived, failed
        self._lock = threading.Lock()
        self._early: dict[int, _Receive] = {}
        self._asked = 0
        self._waiting: deque[_Receive] = deque()
        """Receives that have not been launched, in order."""
        self._standing = 0
        """Number of receives launched and not finished."""
        self._awaits_body = False
        """True between the launches of a header and of its message: no other receive may be launched then."""
        self._under_way: queue.SimpleQueue[_UnderWay | Exception | None] = queue.SimpleQueue()
        """Launched receives for the thread; an exception tells why a launch failed."""
        name = f"adaptra-device-receive-{group.ends.source}"
        self._thread = DeviceThread(self._run, name)
        self._thread.start()

    def receive(self, index: int, specification: TensorSpecification | None, probe_nbytes: int = PROBE_NBYTES) -> None:
        """Post a receive of this specification, or of a probe (None). Without a shape, a header is received first.
        Never waits.
        """
        if specification is None:
            receive = _Receive(index, (probe_nbytes,), torch.uint8, probe=True)
        else:
            receive = _Receive(index, specification.shape, specification.dtype, probe=False)
        with self._lock:
            self._early[index] = receive
            while (due := self._early.pop(self._asked, None)) is not None:
                self._asked += 1
                self._waiting.append(due)
            self._launch_due()

    def abort(self) -> None:
        """Abort the session. Over NCCL the peer notices only by the network, and only for pending messages."""
        self._group.abort()

    def end(self) -> None:
        """End the session and its thread. Not to be called from that thread."""
        self._under_way.put(None)
        # The thread may wait in the group: the abort wakes it.
        self._group.abort()
        self._thread.join(END_S)

    def _launch_due(self) -> None:
        """Launch the receives that may be launched now. The caller holds the lock."""
        while self._waiting and not self._awaits_body:
            first = self._waiting[0]
            # If a message follows, the sender sends all probes before it at once, so that none of them is pending for
            # long.
            behind = any(not each.probe and each.shape is not None for each in self._waiting)
            takes_turns = first.shape is None or (first.probe and not behind)
            # A pending NCCL receive occupies multiprocessors until its message comes. Of messages that may come late,
            # post one at a time.
            if takes_turns and self._standing and not self._group.tagged:
                return
            self._waiting.popleft()
            self._awaits_body = first.shape is None and not self._group.tagged
            self._standing += 1
            self._under_way.put(self._launched(first))

    def _launched(self, receive: _Receive) -> _UnderWay | Exception:
        header = receive.shape is None
        try:
            if receive.shape is None:
                buffer = self._group.empty((HEADER_NUMBERS,), torch.int64)
            else:
                buffer = self._group.empty(receive.shape, receive.dtype)
            return _UnderWay(receive, self._group.receive(buffer, 2 * receive.place + (not header)), buffer)
        except OutOfMemory as cause:
            return out_of_memory("{}->{}".format(*self._group.ends), cause)
        except RuntimeError as cause:  # the thread comes to it after what is still under way
            return cause

    def _run(self) -> None:
        while (launched := self._under_way.get()) is not None:
            try:
                tensor = self._completed(launched)
            except Exception as cause:  # whatever the backend raises: the link has another path
                self._failed(
                    str(cause) if isinstance(cause, TransportError) else f"torch.distributed reported: {cause}"
                )
                return
            arrived_s = time.monotonic()
            with self._lock:
                self._standing -= 1
                self._launch_due()
            self._arrived(tensor, arrived_s)
            # Otherwise these names keep the tensor's device memory until the next message arrives.
            del launched, tensor

    def _completed(self, launched: _UnderWay | Exception) -> torch.Tensor:
        if isinstance(launched, Exception):
            raise launched
        receive, work, buffer = launched
        self._group.wait(work, self._timeout_s)
        if receive.shape is not None:
            return buffer
        shape = decode_shape(self._group.read(buffer))
        with self._lock:
            body = self._launched(receive._replace(shape=shape))
            self._awaits_body = False
        return self._completed(body)
