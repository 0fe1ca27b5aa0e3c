# SPDX-License-Identifier: Apache-2.0
"""Name messages between ranks by keys, and define `Transport`, which moves them.

Rules that each transport keeps, and that the executor relies on:

1. A key names one message of the job, for good. Both ends derive it from the schedule; nothing negotiates it.
2. Keys of one peer are posted by the receiver in the order in which the sender sends them. Paths that carry no key
   (NCCL, gloo) match by order.
3. Each message is delivered once and whole, or its `wait` raises. No message of an earlier attempt is delivered.
4. Posting never waits for the peer. Exception: a message of unknown shape, whose header is read first.
5. `wait` and `flush` return, or raise TransportError, by their deadline. No method waits without one.
6. A failed peer or path raises TransportError in `wait`, `flush` and posting, on every message it concerns. The error
   names this rank, the link, the key, the cause and whom to look at first. `abort` raises AbortedError instead.
7. `close` returns in bounded time whatever has failed, and may be called twice.
8. One thread, the training thread, calls everything but `abort`.

Callers never learn which path carries a key: so a path may fail, or be changed, in the middle of an iteration.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from adaptra_megatron.transport.link_paths import LinkCounters, Path, ProbeTimes

if TYPE_CHECKING:  # processes without torch import this
    import torch

    from adaptra_megatron.common.job.control_store import ControlStore


class Direction(str, enum.Enum):
    """Direction in which, along the model, a message travels."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"

    # enum's own runs Python code, several times for each message.
    __hash__ = str.__hash__


class MessageKey(NamedTuple):
    """Names one message of the job for good. `chunk` is the consumer's model chunk."""

    iteration: int
    direction: Direction
    chunk: int
    micro_batch: int
    """Its number in the job: replica * (micro-batches of each replica) + number within the replica."""
    attempt: int = 0
    """Number of the try at the iteration, from 0: what an earlier one left under way is dropped."""

    @property
    def turn(self) -> tuple[int, int]:
        """Iteration and attempt, which only go up."""
        return self.iteration, self.attempt

    def __str__(self) -> str:
        return self.spelled()

    def spelled(self, micro_batches: int | None = None) -> str:
        """In words. `micro_batches`: of each replica, to tell which of them it is of; None: there is one alone."""
        replica, number = divmod(self.micro_batch, micro_batches) if micro_batches else (None, self.micro_batch)
        return (
            f"{self.direction.value} of micro-batch {number}{'' if replica is None else f' of replica {replica}'} "
            f"for chunk {self.chunk} in iteration {self.iteration}{self.attempt and f', attempt {self.attempt}' or ''}"
        )


class MessageTimes(NamedTuple):
    """Times at which the two ends of a message acted, in seconds of the local monotonic clock.

    A receive that was posted after the message had been sent says nothing of the device path, hence `posted_s`.
    """

    key: MessageKey
    peer: int
    posted_s: float
    done_s: float
    nbytes: int
    path: Path
    """Path that a sent message first took, or that a received one came by."""


class TransportError(RuntimeError):
    """A message could not be moved. Names this rank, the link, the key, the cause and the remedy."""


class AbortedError(TransportError):
    """A message was under way on a link that was ended on purpose; says why. Links can be opened again."""


@dataclass(frozen=True)
class TensorSpecification:
    """Shape and data type of every message of an iteration; `shape` is None when shapes vary (a header then goes
    first)."""

    shape: tuple[int, ...] | None
    dtype: torch.dtype
    device: torch.device
    micro_batches: int | None = None
    """Number of micro-batches of each replica, for errors to name them: see `MessageKey.spelled`."""


class Transport(Protocol):
    """Moves tensors between ranks of the job that have a link: those of one pipeline, from the start.

    `peer` is always a global rank. Failure contract: when a peer dies or a path breaks, `wait` and `flush` raise
    TransportError no later than their deadline, posting raises it where the break is known already; `close` still
    returns. What failed is then unusable but where links can be opened again: see TwoPathTransport.
    """

    def describe(self, specification: TensorSpecification) -> None:
        """Set what the messages to come look like; called while none is under way."""

    def post_send(self, key: MessageKey, peer: int, tensor: torch.Tensor) -> None:
        """Send `tensor` (any shape and dtype). Returns at once; the bytes are held until they have left."""

    def post_receive(self, key: MessageKey, peer: int) -> None:
        """Announce that `key` will come from `peer`. Keys of one peer must be posted in the order it sends them.

        What this puts on a device it puts there before it returns: the order of all posts and sends is what keeps
        devices from waiting for each other for ever (transfers.launch_order). Where the size is not known beforehand,
        it may have to wait for a header first.
        """

    def can_poll(self, peer: int) -> bool:
        """Return whether the CPU sees what arrives from `peer`, which is what `ready` and `wait_any` live by, and
        nothing between the two ranks stands in a queue of a device meanwhile. May change at any time."""

    def ready(self, key: MessageKey) -> bool:
        """Return whether `wait(key)` would return, or raise, without waiting."""

    def wait_any(self, keys: Collection[MessageKey], until_s: float) -> bool:
        """True once one of `keys` (posted, at least one) is ready; False at `until_s` (time.monotonic).

        Returns False at once where arrivals cannot be seen. Raises TransportError for a message that is lost.
        """

    def last_receive_path(self, peer: int) -> Path:
        """The path by which the latest message from `peer` came, or would have come if there was none."""

    def wait(self, key: MessageKey, deadline_s: float) -> torch.Tensor:
        """The received tensor (fresh, no autograd history), waiting at most until `deadline_s` (time.monotonic)."""

    def flush(self, deadline_s: float) -> None:
        """Wait until every posted send has left."""

    def take_times(self) -> tuple[Sequence[MessageTimes], Sequence[MessageTimes]]:
        """Times of the messages sent and received since the last call; empty where they cannot be seen."""

    def close(self, *, drained: bool = True) -> bool:
        """Release links and threads, in bounded time. Safe to call twice.

        `drained`: whether all that was posted has been received; then what was sent last still leaves. Otherwise what
        is under way is aborted, at both ends. Returns False where that did not end what is on the device: then this
        process cannot be expected to end by itself.
        """


@runtime_checkable
class TwoPathTransport(Protocol):
    """Further interface of a transport whose links have a path through host memory, and mostly a second one.

    Links can be opened to any ranks of the job, and closed or aborted, while others carry messages. Of each pair of
    ranks both call `open_link`, in any order, and both `close_link` or `abort`; what was opened anew begins from
    nothing: no message of an earlier opening is delivered.
    """

    rank: int

    @property
    def peers(self) -> Sequence[int]:
        """Ranks that this one has links to."""

    @property
    def delegate_starts(self) -> int:
        """Return how often this rank's delegate was started: 1 unless it died."""

    def open_link(self, peer: int) -> None:
        """Begin to open a link, or to open one again that was aborted. Returns at once; messages may be posted, and
        leave once it is up. If it is not up within the time that the start of a job has, they raise TransportError.
        """

    def wait_for_link(self, peer: int, deadline_s: float) -> None:
        """Wait until a link is up. Raises TransportError at `deadline_s` (time.monotonic), and where it was ended."""

    def close_link(self, peer: int) -> None:
        """Give a link up over which nothing is under way. Returns at once; what it held is given back soon after."""

    def abort(self, cause: str, peers: Collection[int] | None = None) -> None:
        """End the links to `peers` (None: all) with what is under way on them. Returns at once; for any thread.

        Waits for their messages, here and at the other end, end with an AbortedError that has the cause, and so do
        posts, until the link is opened again. What they held is given back soon after.
        """

    def enter(self, control: ControlStore) -> None:
        """Open links, and make device sessions, in another epoch from now on."""

    def report_failure(self, cause: str) -> None:
        """Tell all peers, who tell theirs, that this rank ends with an error. Returns at once."""

    def link_counters(self) -> dict[int, LinkCounters]:
        """By peer. Never waits."""

    def prefer(self, peer: int, path: Path) -> None:
        """Send to `peer` by this path while it is healthy; a link with the host path only stays there."""

    def measure(self, peer: int) -> None:
        """Begin to probe the path that messages to `peer` do not take; `take_probes` has the result, some time later.

        A burst of messages of the usual size, one after the other. Nothing happens while that path is down, on a link
        with the host path only, and before the first message. Never waits.
        """

    def take_probes(self) -> list[ProbeTimes]:
        """The bursts that have ended since the last call, of all links."""
