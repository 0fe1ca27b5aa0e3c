# SPDX-License-Identifier: Apache-2.0
"""The device path for CPU tensors, without a host path: links over gloo, whose waits block the calling thread.

gloo reports completion only to a thread that waits, and a wait that times out closes the link permanently. So each
neighbour has one thread that waits for its receives and one that waits for its sends. Arrivals become visible (and
timed) when they happen, sent tensors are freed soon after they have left, and the training thread waits only on events.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from adaptra_megatron.transport.arrival_signal import ArrivalSignal
from adaptra_megatron.transport.device_session.pair_group import PairGroup, PairWork
from adaptra_megatron.transport.link_ends import LinkEnds
from adaptra_megatron.transport.link_paths import Path
from adaptra_megatron.transport.message_keys import (
    Direction,
    MessageKey,
    MessageTimes,
    TensorSpecification,
    TransportError,
)
from adaptra_megatron.transport.setup.link_setup import Link
from adaptra_megatron.transport.shapes import HEADER_NUMBERS, decode_shape, encode_shape


@dataclass
class _Pending:
    """One message in flight."""

    key: MessageKey
    peer: int
    tensor: torch.Tensor | None
    posted_s: float
    done: threading.Event = field(default_factory=threading.Event)
    done_s: float = 0.0
    cause: Exception | None = None


_Works = list[tuple[PairWork, torch.Tensor]]
_UNWATCHED_SENDS = 4


class WaitingThreadTransport:
    """Transport over gloo links, each with tags, for one direction, and with a waiting thread."""

    def __init__(
        self,
        rank: int,
        links: Mapping[Link, PairGroup],
        chunks: int,
        timeout_s: float,
        name: Callable[[int], str] = "rank {}".format,
    ) -> None:
        """`links`: connected ones of this rank. `chunks`: model chunks per stage. `timeout_s`: longest wait for a
        message. `name`: of a rank, in messages."""
        self._rank, self._links, self._name = rank, links, name
        self._chunks = chunks
        self._timeout_s = timeout_s
        self._specification = TensorSpecification((), torch.float32, torch.device("cpu"))
        self._receives: dict[MessageKey, _Pending] = {}
        self._sends: list[_Pending] = []
        self._unwatched: list[tuple[_Pending, _Works]] = []
        """Sends that no thread waits for yet: waking one costs several times as much as the send."""
        self._received: list[MessageTimes] = []
        self._sent: list[MessageTimes] = []
        self._waiters: dict[tuple[str, int], _Waiter] = {}
        self._arrival_signal = ArrivalSignal()

    def describe(self, specification: TensorSpecification) -> None:
        """Set shape and dtype of the messages to come (fixed within an iteration)."""
        self._specification = specification

    def post_send(self, key: MessageKey, peer: int, tensor: torch.Tensor) -> None:
        # A detached alias: Megatron's deallocate_output_tensor replaces the storage of the caller's tensor.
        outgoing = tensor.detach().contiguous()
        now = time.monotonic()
        pending = _Pending(key, peer, None, now)  # the bytes live in `works`, and no longer than the send
        works: _Works = []
        header = encode_shape(outgoing.shape, outgoing.device) if self._specification.shape is None else None
        try:
            group = self._links[self._rank, peer]
            if header is not None:
                works.append((group.send(header, self._tag(key, header=True)), header))
            works.append((group.send(outgoing, self._tag(key)), outgoing))
        except RuntimeError as cause:  # the link is known to be broken already
            raise self._error(pending, cause, receiving=False) from cause
        self._sends.append(pending)
        self._sent.append(MessageTimes(key, peer, now, now, outgoing.nbytes, Path.DEVICE))
        self._unwatched.append((pending, works))
        if len(self._unwatched) > _UNWATCHED_SENDS:
            self._watch_sends()

    def post_receive(self, key: MessageKey, peer: int) -> None:
        assert key not in self._receives, f"{key} was posted twice"
        specification = self._specification
        if specification.shape is None:
            buffer = torch.empty(HEADER_NUMBERS, dtype=torch.int64, device=specification.device)
        else:
            buffer = torch.empty(specification.shape, dtype=specification.dtype, device=specification.device)
        pending = _Pending(key, peer, buffer, time.monotonic())
        try:
            group = self._links[peer, self._rank]
            work = group.receive(buffer, self._tag(key, header=specification.shape is None))
        except RuntimeError as cause:  # the link is known to be broken already
            raise self._error(pending, cause, receiving=True) from cause
        self._receives[key] = pending

        def complete() -> None:
            group.wait(work, self._timeout_s)
            if specification.shape is None:
                # In the waiting thread: the training thread must not wait for the header.
                body = torch.empty(decode_shape(buffer), dtype=specification.dtype, device=specification.device)
                group.wait(group.receive(body, self._tag(key)), self._timeout_s)
                pending.tensor = body

        self._waiter("receive", peer).submit(pending, complete)

    def ready(self, key: MessageKey) -> bool:
        return self._receives[key].done.is_set()

    def can_poll(self, peer: int) -> bool:
        """Return True: a thread waits for arrivals."""
        return True

    def wait_any(self, keys: Collection[MessageKey], until_s: float) -> bool:
        if any(map(self.ready, keys)):
            return True
        self._watch_sends()
        return self._arrival_signal.wait_for(keys, until_s, self.ready, lambda: until_s)

    def last_receive_path(self, peer: int) -> Path:
        return Path.DEVICE

    def wait(self, key: MessageKey, deadline_s: float) -> torch.Tensor:
        pending = self._receives.pop(key)
        if not pending.done.is_set():
            self._watch_sends()
        self._settle(pending, deadline_s, receiving=True)
        tensor = pending.tensor
        assert tensor is not None
        times = MessageTimes(key, pending.peer, pending.posted_s, pending.done_s, tensor.nbytes, Path.DEVICE)
        self._received.append(times)
        return tensor

    def flush(self, deadline_s: float) -> None:
        self._watch_sends()
        for pending in self._sends:
            self._settle(pending, deadline_s, receiving=False)
        self._sends.clear()

    def take_times(self) -> tuple[Sequence[MessageTimes], Sequence[MessageTimes]]:
        sent, self._sent = self._sent, []
        received, self._received = self._received, []
        return sent, received

    def close(self, *, drained: bool = True) -> bool:
        if not drained:
            for group in self._links.values():
                group.abort()  # wakes the threads
        for waiter in self._waiters.values():
            waiter.stop()
        self._waiters.clear()
        for group in self._links.values():
            group.abort()
        return True

    def _watch_sends(self) -> None:
        """Pass all posted sends to the waiting threads, just before this thread waits itself."""
        for pending, works in self._unwatched:
            self._waiter("send", pending.peer).submit(pending, functools.partial(self._wait_all, pending.peer, works))
        self._unwatched.clear()

    def _settle(self, pending: _Pending, deadline_s: float, *, receiving: bool) -> None:
        arrived = pending.done.wait(max(0.0, deadline_s - time.monotonic()))
        if arrived and pending.cause is None:
            return
        raise self._error(pending, pending.cause, receiving=receiving) from pending.cause

    def _error(self, pending: _Pending, cause: Exception | None, *, receiving: bool) -> TransportError:
        """Return the error for a message that failed with `cause`, or missed its deadline."""
        ends = LinkEnds(self._rank, pending.peer, self._name)
        seen = "nothing happened until the deadline" if cause is None else f"torch.distributed reported: {cause}"
        return TransportError(
            f"{ends.here}, link {ends.direction(receiving=receiving)}: "
            f"{'waited for' if receiving else 'could not send'} the "
            f"{pending.key.spelled(self._specification.micro_batches)} "
            f"for {time.monotonic() - pending.posted_s:.3g} s of at most {self._timeout_s:g} s (--adaptra-timeout-s); "
            f"{seen}. Look at {ends.there} first: it died, hangs, or cannot be reached; restart from the last "
            "checkpoint once it is back"
        )

    def _waiter(self, name: str, peer: int) -> _Waiter:
        waiter = self._waiters.get((name, peer))
        if waiter is None:
            waiter = self._waiters[name, peer] = _Waiter(f"adaptra-{name}-{peer}", self._arrival_signal)
        return waiter

    def _wait_all(self, peer: int, works: _Works) -> None:
        for work, _held in works:
            self._links[self._rank, peer].wait(work, self._timeout_s)

    def _tag(self, key: MessageKey, *, header: bool = False) -> int:
        # Unique within an iteration. Later iterations may reuse tags, since gloo matches equal tags in order.
        number = 2 * (key.micro_batch * self._chunks + key.chunk) + (key.direction is Direction.GRADIENT)
        return 2 * number + header


class _Waiter:
    """Thread that completes messages in the order of submission."""

    def __init__(self, name: str, arrival_signal: ArrivalSignal) -> None:
        self._arrival_signal = arrival_signal
        self._work: queue.SimpleQueue[tuple[_Pending, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, pending: _Pending, complete: Callable[[], None]) -> None:
        self._work.put((pending, complete))

    def stop(self) -> None:
        self._work.put(None)
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            pending, complete = item
            try:
                complete()
            except Exception as cause:  # handed to the training thread, which raises it with the key's name
                pending.cause = cause
            pending.done_s = time.monotonic()
            pending.done.set()
            self._arrival_signal.arrived(pending.key)
            # Otherwise these names keep the tensors alive until the next item arrives.
            del item, pending, complete
