# SPDX-License-Identifier: Apache-2.0
"""One end of one device session: sends and receives by index, and a thread that sees arrivals the moment they happen.

Sends and receives start strictly in the order of their indices, from whichever threads they come: some backends match
by order alone.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections.abc import Callable

import torch

from adaptra_megatron.transport.cuda_device import Computed
from adaptra_megatron.transport.messages import TensorSpecification
from adaptra_megatron.transport.pair_group import LinkGroup, Work
from adaptra_megatron.transport.paths import PROBE_NBYTES
from adaptra_megatron.transport.shapes import HEADER_NUMBERS, decode_shape, encode_shape

logger = logging.getLogger("adaptra_megatron.transport.device_session")

END_S = 2.0


class _InOrder:
    """Starts things in the order of their indices."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0
        self._early: dict[int, Callable[[], None]] = {}

    def start(self, index: int, action: Callable[[], None]) -> None:
        """Run `action`, and what waited for it; or keep it until its turn. Raises what an action raises."""
        with self._lock:
            self._early[index] = action
            while (due := self._early.pop(self._next, None)) is not None:
                self._next += 1
                due()


class SendingSession:
    """The source's end. What was sent is held until the target has confirmed it."""

    def __init__(self, group: LinkGroup) -> None:
        self._group = group
        self._order = _InOrder()
        self._lock = threading.Lock()
        self._held: dict[int, list[tuple[Work, torch.Tensor]]] = {}

    def send(self, index: int, message: Computed, *, header: bool) -> None:
        """Returns at once. `header`: the target does not know the shape. Raises RuntimeError if the session failed."""

        def start() -> None:
            held, tensor = [], message.tensor
            if message.event is not None:
                self._group.send_after(message.event)
            if header:
                shape = self._group.bring(encode_shape(tensor.shape, torch.device("cpu")))
                held.append((self._group.send(shape, 2 * index), shape))
            held.append((self._group.send(tensor, 2 * index + 1), tensor))
            with self._lock:
                self._held[index] = held

        self._order.start(index, start)

    def probe(self, index: int, nbytes: int = PROBE_NBYTES) -> None:
        """As `send`, of what nobody needs."""
        self.send(index, Computed(self._group.empty((nbytes,), torch.uint8), None), header=False)

    def confirmed(self, received: int) -> None:
        """The target has the first `received`."""
        with self._lock:
            for index in [index for index in self._held if index < received]:
                del self._held[index]

    def abort(self) -> None:
        """Break the session; the other end sees it break too."""
        self._group.abort()

    def end(self) -> None:
        """Give the session up. The bytes are let go of only then: the backend may read them until it is."""
        self._group.abort()
        with self._lock:
            self._held.clear()


class ReceivingSession:
    """The target's end."""

    def __init__(
        self,
        group: LinkGroup,
        timeout_s: float,
        arrived: Callable[[torch.Tensor, float], None],
        failed: Callable[[str], None],
    ) -> None:
        """`arrived(tensor, time)` is called for each message in turn, `failed(cause)` at most once, by the thread."""
        self._group, self._timeout_s = group, timeout_s
        self._arrived, self._failed = arrived, failed
        self._order = _InOrder()
        self._under_way: queue.SimpleQueue[Callable[[], torch.Tensor] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, name=f"adaptra-device-receive-{group.ends.source}", daemon=True
        )
        self._thread.start()

    def receive(self, index: int, specification: TensorSpecification | None, probe_nbytes: int = PROBE_NBYTES) -> None:
        """Expect a message like this (without a shape, a header comes before it), or a probe (None)."""
        if specification is None:
            shape: tuple[int, ...] | None = (probe_nbytes,)
            dtype = torch.uint8
        else:
            shape, dtype = specification.shape, specification.dtype
        start = functools.partial(self._receive, index, shape, dtype)
        if self._group.one_at_a_time:
            self._order.start(index, lambda: self._under_way.put(lambda: start()()))
        else:
            self._order.start(index, lambda: self._start(start))

    def abort(self) -> None:
        """Break the session; the other end sees it break too."""
        self._group.abort()

    def end(self) -> None:
        """Give the session up and end the thread. Not to be called by that thread."""
        self._under_way.put(None)
        self._group.abort()
        self._thread.join(END_S)

    def _start(self, start: Callable[[], Callable[[], torch.Tensor]]) -> None:
        try:
            self._under_way.put(start())
        except RuntimeError as cause:  # the thread comes to it after what is still under way
            refusal = str(cause)
            self._under_way.put(lambda: _refuse(refusal))

    def _receive(self, index: int, shape: tuple[int, ...] | None, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        """Begin to receive; what is returned waits for the end of it. Without a shape, a header comes first."""
        group, header = self._group, shape is None
        buffer = group.empty((HEADER_NUMBERS,), torch.int64) if shape is None else group.empty(shape, dtype)
        tag = 2 * index + (not header)
        work = group.receive(buffer, tag)

        def complete() -> torch.Tensor:
            group.wait(work, self._timeout_s)
            if not header:
                return buffer
            body = group.empty(decode_shape(group.read(buffer)), dtype)
            group.wait(group.receive(body, tag + 1), self._timeout_s)
            return body

        return complete

    def _run(self) -> None:
        while (complete := self._under_way.get()) is not None:
            try:
                tensor = complete()
            except Exception as cause:  # whatever the backend raises: the link has another path
                self._failed(f"torch.distributed reported: {cause}")
                return
            self._arrived(tensor, time.monotonic())
            del complete, tensor


def _refuse(cause: str) -> torch.Tensor:
    raise RuntimeError(cause)
