# SPDX-License-Identifier: Apache-2.0
"""Name messages between ranks by keys, and define `Transport`, which moves them.

Rules that each transport keeps, and that the executor relies on:

1. A key names one message of the job and is never reused. Both ends derive it from the schedule, without negotiation.
2. A receiver posts the keys of one peer in the order in which the peer sends them. Paths that carry no key (NCCL, gloo)
   match by order.
3. Each message is delivered once and whole, or its `wait` raises. No message of an earlier attempt is delivered.
4. Posting never waits for the peer. Exception: a message of unknown shape, whose header is read first.
5. `wait` and `flush` return, or raise TransportError, by their deadline. No method waits without one.
6. If a peer or path fails, `wait`, `flush` and posting raise TransportError for every affected message. The error names
   this rank, the link, the key, the cause and the rank to examine first. After `abort` it is AbortedError instead.
7. `close` returns in bounded time whatever has failed, and may be called twice.
8. One thread, the training thread, calls everything but `abort`.

Callers never learn which path carries a key, so a path may fail or be changed in the middle of an iteration.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from adaptra_megatron.transport.link_paths import LinkCounters, Path, ProbeTimes

if TYPE_CHECKING:  # processes without torch import this
    import torch

    from adaptra_megatron.common.control_store import ControlStore
    from adaptra_megatron.transport.lines.connection_loop import ConnectionLoop


class Direction(str, enum.Enum):
    """Direction of a message along the model."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"

    # enum's own runs Python code, several times for each message.
    __hash__ = str.__hash__


class MessageKey(NamedTuple):
    """Name of one message of the job. `chunk`: the consumer's model chunk."""

    iteration: int
    direction: Direction
    chunk: int
    micro_batch: int
    """Number in the job: replica * (micro-batches of each replica) + number within the replica."""
    attempt: int = 0
    """Number of the attempt at the iteration, from 0; messages of earlier attempts are dropped."""

    @property
    def turn(self) -> tuple[int, int]:
        """(iteration, attempt), which only increases."""
        return self.iteration, self.attempt

    def __str__(self) -> str:
        return self.spelled()

    def spelled(self, micro_batches: int | None = None) -> str:
        """Return the key in words. `micro_batches`: number per replica, which gives the replica's name; None: there is
        one replica.
        """
        replica, number = divmod(self.micro_batch, micro_batches) if micro_batches else (None, self.micro_batch)
        return (
            f"{self.direction.value} of micro-batch {number}{'' if replica is None else f' of replica {replica}'} "
            f"for chunk {self.chunk} in iteration {self.iteration}{self.attempt and f', attempt {self.attempt}' or ''}"
        )


class MessageTimes(NamedTuple):
    """Times of one message at this end, in seconds of the local monotonic clock.

    If a receive was posted after the message was sent, its `posted_s` is no measure of the device path.
    """

    key: MessageKey
    peer: int
    posted_s: float
    done_s: float
    nbytes: int
    path: Path
    """First path of a sent message; path by which a received one arrived."""


class TransportError(RuntimeError):
    """A message could not be delivered. Names this rank, the link, the key, the cause and the remedy."""


class AbortedError(TransportError):
    """A message was in flight on a link that was aborted on purpose; states the reason. The link can be opened
    again.
    """


@dataclass(frozen=True)
class TensorSpecification:
    """Shape, data type and device of every message of an iteration.

    `shape` is None if shapes vary: then a header precedes each message on the device path.
    """

    shape: tuple[int, ...] | None
    dtype: torch.dtype
    device: torch.device
    micro_batches: int | None = None
    """Number of micro-batches of each replica, for errors: see `MessageKey.spelled`."""


class Transport(Protocol):
    """Interface that moves tensors between linked ranks; initially these are the ranks of one pipeline.

    The module's docstring has the rules. `peer` is always a global rank. After a failure a link is unusable, unless the
    transport can open it again (TwoPathTransport).
    """

    def describe(self, specification: TensorSpecification) -> None:
        """Set shape, dtype and device of the messages to come. Called while none is in flight."""

    def post_send(self, key: MessageKey, peer: int, tensor: torch.Tensor) -> None:
        """Send `tensor` (any shape and dtype). Returns at once. The tensor's memory is held until it has been sent."""

    def post_receive(self, key: MessageKey, peer: int) -> None:
        """Post the receive of `key` from `peer`, in the order in which the peer sends.

        Device work is enqueued before this returns: the global order of sends and receives prevents deadlocks
        (transfers.launch_order). If sizes vary, it may wait for a header.
        """

    def can_poll(self, peer: int) -> bool:
        """Return whether the CPU sees arrivals from `peer`. May change at any time.

        If so, `ready` and `wait_any` work, and no device queue holds a pending transfer.
        """

    def ready(self, key: MessageKey) -> bool:
        """Return whether `wait(key)` would return or raise at once."""

    def wait_any(self, keys: Collection[MessageKey], until_s: float) -> bool:
        """Return True once one of `keys` (posted, at least one) is ready, False at `until_s` (time.monotonic).

        Returns False at once if arrivals cannot be polled. Raises TransportError for a message that can no longer
        arrive.
        """

    def last_receive_path(self, peer: int) -> Path:
        """Return the path of the latest message from `peer`; before the first, the path it would take."""

    def wait(self, key: MessageKey, deadline_s: float) -> torch.Tensor:
        """Return the received tensor (fresh, no autograd history). Raises TransportError at `deadline_s`
        (time.monotonic)."""

    def flush(self, deadline_s: float) -> None:
        """Wait until every posted send has left. Raises TransportError at `deadline_s` (time.monotonic)."""

    def take_times(self) -> tuple[Sequence[MessageTimes], Sequence[MessageTimes]]:
        """Return the times of messages sent and received since the last call; empty if they cannot be measured."""

    def close(self, *, drained: bool = True) -> bool:
        """Release links and threads, in bounded time. May be called twice.

        `drained`: all posted messages have been received; the last sends still leave. Otherwise messages in flight
        are aborted at both ends. Returns False if device work did not end: then this process may not exit by itself.
        """


@runtime_checkable
class TwoPathTransport(Protocol):
    """Interface of a transport whose links have a host path and usually a device path, and can be opened at any time.

    The two ranks of a link each call `open_link`, in any order, and each `close_link` or `abort`, while other links
    carry messages. A link that is opened again starts empty: no message of an earlier opening is delivered.
    """

    rank: int
    loop: ConnectionLoop
    """Event loop of this rank's connections. Other features may run coroutines in it."""

    @property
    def peers(self) -> Sequence[int]:
        """Ranks to which this rank has links."""

    @property
    def delegate_starts(self) -> int:
        """Number of times this rank's delegate was started: 1 unless it failed."""

    def open_link(self, peer: int) -> None:
        """Begin to open a link, or reopen an aborted one. Returns at once; messages may be posted at once.

        If the link is not up within the initial links' time limit, those messages raise TransportError.
        """

    def wait_for_link(self, peer: int, deadline_s: float) -> None:
        """Wait until a link is up. Raises TransportError at `deadline_s` (time.monotonic), and if it was aborted."""

    def close_link(self, peer: int) -> None:
        """Close an idle link. Returns at once; its resources are released soon after."""

    def abort(self, cause: str, peers: Collection[int] | None = None) -> None:
        """Abort the links to `peers` (None: all). Returns at once; for any thread.

        At both ends, waits for messages of these links, and later posts, raise AbortedError with `cause` until the link
        is opened again. Resources are released soon after.
        """

    def enter(self, control: ControlStore) -> None:
        """Enter another generation, in which links are opened and device sessions made from now on."""

    def report_failure(self, cause: str) -> None:
        """Report to all peers that this rank ends with an error; they pass it on. Returns at once."""

    def link_counters(self) -> dict[int, LinkCounters]:
        """Return the counters of each link, by peer. Never waits."""

    def prefer(self, peer: int, path: Path) -> None:
        """Prefer `path` for messages to `peer` while it is healthy; without a device path nothing changes."""

    def measure(self, peer: int) -> None:
        """Begin to probe the unused path to `peer` by a burst of messages of the usual size.

        `take_probes` returns the times later. Nothing happens while that path is down, on a link without a device path,
        and before the first message. Never waits.
        """

    def take_probes(self) -> list[ProbeTimes]:
        """Return the probe bursts of all links that have ended since the last call."""
