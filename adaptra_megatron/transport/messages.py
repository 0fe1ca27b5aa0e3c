# SPDX-License-Identifier: Apache-2.0
"""What travels between stages, named by key, and the interface that moves it.

Callers never learn which path carries a key: they post, ask whether a key has arrived, and wait with a deadline.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from adaptra_megatron.transport.paths import LinkCounters, Path, ProbeTimes


class Direction(str, enum.Enum):
    """Which way along the model a message travels."""

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

    def __str__(self) -> str:
        return (
            f"{self.direction.value} of micro-batch {self.micro_batch} for chunk {self.chunk} "
            f"in iteration {self.iteration}"
        )


class MessageTimes(NamedTuple):
    """When the two ends of a message acted, in seconds of the local monotonic clock.

    A receive that was posted after the message had been sent says nothing of the device path, hence `posted_s`.
    """

    key: MessageKey
    peer: int
    posted_s: float
    done_s: float
    nbytes: int
    path: Path
    """Of a sent message: the one it was first sent on; of a received one: the one it came by."""


class TransportError(RuntimeError):
    """A message could not be moved. Names this rank, the link, the key, the cause and the remedy."""


@dataclass(frozen=True)
class TensorSpecification:
    """What every message of an iteration looks like; `shape` is None when shapes vary (a header then goes first)."""

    shape: tuple[int, ...] | None
    dtype: torch.dtype
    device: torch.device


class Transport(Protocol):
    """Moves tensors between the stages of one pipeline.

    `peer` is always the rank of the other stage in the pipeline's process group. Failure contract: when a peer
    dies or a path breaks, `wait` and `flush` raise TransportError no later than their deadline, posting raises it where
    the break is known already; the transport is then unusable and `close` still returns.
    """

    def describe(self, specification: TensorSpecification) -> None:
        """Set what the messages to come look like; called while none is under way."""

    def post_send(self, key: MessageKey, peer: int, tensor: torch.Tensor) -> None:
        """Send `tensor` (any shape and dtype). Returns at once; the bytes are held until they have left."""

    def post_receive(self, key: MessageKey, peer: int) -> None:
        """Announce that `key` will come from `peer`. Keys of one peer must be posted in the order it sends them.

        What this puts on a device it puts there before it returns: the order of all posts and sends is what keeps
        devices from waiting for each other for ever (schedule.launch_order). Where the size is not known beforehand,
        it may have to wait for a header first.
        """

    def sees_arrivals(self, peer: int) -> bool:
        """Whether the CPU sees what arrives from `peer`, which is what `ready` and `wait_any` live by, and nothing
        between the two stages stands in a queue of a device meanwhile. May change at any time."""

    def ready(self, key: MessageKey) -> bool:
        """Whether `wait(key)` would return, or raise, without waiting."""

    def wait_any(self, keys: Collection[MessageKey], until_s: float) -> bool:
        """True once one of `keys` (posted, at least one) is ready; False at `until_s` (time.monotonic).

        Returns False at once where arrivals cannot be seen. Raises TransportError for a message that is lost.
        """

    def came_by(self, peer: int) -> Path:
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
    """What a transport can do besides whose links have a path through host memory, and mostly a second one."""

    stage: int

    @property
    def peers(self) -> Sequence[int]:
        """Stages that this one has links to."""

    @property
    def delegate_starts(self) -> int:
        """How often this stage's delegate was started: 1 unless it died."""

    def say_failed(self, cause: str) -> None:
        """Tell all stages of the pipeline that this one ends with an error. Returns at once."""

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
