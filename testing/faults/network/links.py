# SPDX-License-Identifier: Apache-2.0
"""Slow links: decorators that make chosen messages arrive late.

On the device path they delay everything that is sent through `torch.distributed.isend`, also as a P2POp of
`batch_isend_irecv`, and by device sessions of links: Megatron's own point-to-point communication and ours alike. On the
host path (slow_host_paths.py) they delay everything that a stage sends to another. Collectives are not affected.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from adaptra_megatron.transport.device_session.pair_group import PairGroup
from adaptra_megatron.transport.link_paths import Path
from testing.faults.network.link_faults import LinkClock, LinkFault
from testing.faults.network.slow_host_paths import SlowHostPaths
from testing.faults.precise_sleep import sleep_until
from testing.replacing import Replaced, Replacement

DEFAULT_TIMEOUT_S = 600.0


class SlowLinkTimeoutError(RuntimeError):
    """A delayed message was not received in time; the message names ranks, link and time. A RuntimeError as gloo's."""


class DelayedWork:
    """Handle of a delayed isend; complete when the real send is."""

    def __init__(self, description: str, timeout_s: float) -> None:
        self._description, self._timeout_s = description, timeout_s
        self._done = threading.Event()
        self._error: BaseException | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message has been received. `timeout`: as in torch; None: the timeout of the SlowLinks.

        Raises SlowLinkTimeoutError if it was not received in time, and the RuntimeErrors of the real send.
        """
        timeout_s = timeout.total_seconds() if timeout else self._timeout_s
        if not self._done.wait(timeout_s):
            raise SlowLinkTimeoutError(f"{self._description} was not received within {timeout_s:g} s")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Return whether the real send has ended, successfully or not."""
        return self._done.is_set()

    def is_success(self) -> bool:
        """Return whether the real send has succeeded."""
        return self._done.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the exception of the real send."""
        return self._error

    def finish(self, error: BaseException | None) -> None:
        """Record the end of the real send."""
        self._error = error
        self._done.set()


def _global_rank(dst: int | None, group: dist.ProcessGroup | None, group_dst: int | None) -> int:
    if dst is not None:
        return dst
    if group_dst is None:
        raise ValueError("isend needs dst or group_dst")
    return group_dst if group is None else dist.get_global_rank(group, group_dst)


@dataclass
class _Message:
    arrival_s: float
    send: Callable[[], Any]
    work: DelayedWork


class _Pair:
    """Queue to one peer: one thread sends each message at its arrival time, another waits for the sends in order.

    An expired or dropped wait would break gloo's pair for good.
    """

    def __init__(self, name: str, seed: str, timeout_s: float) -> None:
        self.clock = LinkClock(seed)
        self.lock = threading.Lock()
        self.unsent = 0
        self._timeout_s = timeout_s
        self._to_send: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        self._to_finish: queue.SimpleQueue[tuple[DelayedWork, Any] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._send, name=f"slow-link-{name}-send", daemon=True),
            threading.Thread(target=self._finish, name=f"slow-link-{name}-finish", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def put(self, message: _Message) -> None:
        """Queue a message; the caller holds the lock."""
        self.unsent += 1
        self._to_send.put(message)

    def close(self, deadline_s: float) -> bool:
        """Send the queued messages, then end the threads. Returns whether they ended by `deadline_s` (monotonic)."""
        self._to_send.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _send(self) -> None:
        while (message := self._to_send.get()) is not None:
            sleep_until(message.arrival_s)
            with self.lock:
                try:
                    inner = message.send()
                except BaseException as error:
                    message.work.finish(error)
                else:
                    self._to_finish.put((message.work, inner))
                self.unsent -= 1
        self._to_finish.put(None)

    def _finish(self) -> None:
        while (item := self._to_finish.get()) is not None:
            work, inner = item
            try:
                inner.wait(timedelta(seconds=self._timeout_s))
            except BaseException as error:
                work.finish(error)
            else:
                work.finish(None)


@dataclass
class SlowLinks:
    """Slow links between pipeline stages, from `install()` to `close()`. Also a context manager, installed on entry.

    Each rank delays its own messages. If a peer fails, the real send fails, and so does the wait for it.
    """

    faults: Sequence[LinkFault]
    stage_of_rank: Callable[[int], int] = lambda rank: rank
    """The pipeline stage of a global rank; the identity to name ranks in the faults instead of stages."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    """Longest wait for a message if the caller of wait() gives none."""
    struck: dict[tuple[int, int], int] = field(default_factory=dict)
    """Number of messages that this rank has delayed on the device path, by (source stage, target stage)."""

    def __post_init__(self) -> None:
        self._iteration = 0
        self._host = SlowHostPaths(self.faults, self.stage_of_rank)
        self._pairs: dict[int, _Pair] = {}
        self._replaced: Replaced | None = None
        self._isend: Callable[..., Any] = dist.isend

    def set_iteration(self, iteration: int) -> None:
        """Begin `iteration` (from 0): later messages of this rank belong to it."""
        self._iteration = iteration
        self._host.set_iteration(iteration)

    @property
    def struck_on_host(self) -> dict[tuple[int, int], int]:
        """Number of messages delayed on the host path, as `struck`."""
        return self._host.struck

    @property
    def struck_on_either(self) -> dict[tuple[int, int], int]:
        """Number of messages delayed on either path, as `struck`."""
        return dict(Counter(self.struck) + Counter(self.struck_on_host))

    @property
    def late(self) -> int:
        """Number of this rank's messages that were delayed, on either path."""
        return sum(pair.clock.late for pair in self._pairs.values()) + self._host.late

    def install(self) -> SlowLinks:
        """Install the decorators. torch.distributed must be initialised. Earlier host paths are not delayed."""
        if self._replaced is None:
            self._isend = dist.isend
            isend = self.decorate(self._isend)
            reason = "emulated slow link"
            replacements = [Replacement(owner, "isend", isend, reason) for owner in (dist, c10d)]
            pair_send = self.decorate_pair(PairGroup.send)
            self._replaced = Replaced([*replacements, Replacement(PairGroup, "send", pair_send, reason)])
            self._host.install()
        return self

    def close(self, timeout_s: float = 30.0) -> None:
        """Remove the decorators, send the delayed messages and end the threads.

        Raises SlowLinkTimeoutError if a message was not received within `timeout_s`.
        """
        if self._replaced is not None:
            self._replaced.undo()
            self._replaced = None
            self._host.close()
        deadline_s = time.monotonic() + timeout_s
        pairs, self._pairs = self._pairs, {}
        late = [target for target, pair in pairs.items() if not pair.close(deadline_s)]
        if late:
            raise SlowLinkTimeoutError(
                f"rank {dist.get_rank()}: ranks {late} did not receive what was sent over slow links within "
                f"{timeout_s:g} s"
            )

    def decorate(self, isend: Callable[..., Any]) -> Callable[..., Any]:
        """Return `isend` with delays on slow links: same arguments, and a handle of the same interface."""

        @functools.wraps(isend)
        def delayed(
            tensor: torch.Tensor,
            dst: int | None = None,
            group: dist.ProcessGroup | None = None,
            tag: int = 0,
            group_dst: int | None = None,
        ) -> Any:
            # An alias: the caller may free the tensor (`tensor.data = ...`) while its bytes still have to travel.
            send = functools.partial(isend, tensor.detach(), dst, group, tag, group_dst)
            return self._send(_global_rank(dst, group, group_dst), tensor.nbytes, send)

        return delayed

    def decorate_pair(self, pair_send: Callable[..., Any]) -> Callable[..., Any]:
        """Return `PairGroup.send` with delays, as `decorate`."""

        @functools.wraps(pair_send)
        def delayed(pair: PairGroup, tensor: torch.Tensor, tag: int) -> Any:
            return self._send(pair.ends.target, tensor.nbytes, functools.partial(pair_send, pair, tensor, tag))

        return delayed

    def _send(self, target: int, nbytes: int, send: Callable[[], Any]) -> Any:
        source = dist.get_rank()
        link = (self.stage_of_rank(source), self.stage_of_rank(target))
        known = [each for each in self.faults if (each.source, each.target) == link and Path.DEVICE in each.paths]
        if not known:
            return send()
        pair = self._pairs.get(target)
        if pair is None:
            name = f"{source}>{target}"
            pair = self._pairs[target] = _Pair(name, f"{known[0].seed}:{name}", self.timeout_s)
        fault = next((fault for fault in known if fault.strikes(self._iteration)), None)
        with pair.lock:
            if fault is None and not pair.unsent:
                return send()  # nothing is before it on the link
            work = DelayedWork(
                f"rank {source}: a message of {nbytes} bytes to rank {target} over slow link {link[0]}>{link[1]}",
                self.timeout_s,
            )
            pair.put(_Message(pair.clock.arrival_s(time.monotonic(), nbytes, fault), send, work))
        if fault is not None:
            self.struck[link] = self.struck.get(link, 0) + 1
        return work

    def __enter__(self) -> SlowLinks:
        return self.install()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # After an error peers may never receive what is still under way: that error matters, not the wait for them.
        try:
            self.close(timeout_s=30.0 if error is None else 1.0)
        except SlowLinkTimeoutError:
            if error is None:
                raise
