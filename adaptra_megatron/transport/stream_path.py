# SPDX-License-Identifier: Apache-2.0
"""The device path on GPU tensors: torch.distributed with a backend that works on streams (NCCL).

NCCL has no tags and matches by order, so every directed link has a process group of its own and receives are posted
in the order in which the peer sends. A wait only makes the current stream wait: the CPU never sees an arrival. When it
was is told afterwards: by the moment at which computation came to the post, and by how long the receive stood in its
link's own stream from then on. (A stream that waits for each arrival could tell it directly, but streams share hardware
queues: with CUDA_DEVICE_MAX_CONNECTIONS=1 such a wait would stand in front of the computation that it waits for.)
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from adaptra_megatron.transport.device_clock import DeviceClock, Mark
from adaptra_megatron.transport.messages import MessageKey, MessageTimes, TensorSpecification, TransportError
from adaptra_megatron.transport.paths import Path
from adaptra_megatron.transport.shapes import HEADER_NUMBERS, decode_shape, encode_shape

logger = logging.getLogger("adaptra_megatron.transport.stream_path")

Link = tuple[int, int]


class _Marks(NamedTuple):
    """When computation came to parts of a receive."""

    posted: Mark
    """It was asked for,"""
    begun: Mark
    """and its body was: later where a header had to come first."""


class _Timed(NamedTuple):
    """A receive of this iteration."""

    key: MessageKey
    peer: int
    nbytes: int
    marks: _Marks
    work: Any
    """dist.Work; torch's own description of it leaves its duration out."""


class _Receive(NamedTuple):
    peer: int
    buffer: torch.Tensor | None
    """None until its size is known."""
    work: dist.Work | None


class StreamTransport:
    """Transport over one two-rank group per directed link of the pipeline."""

    def __init__(self, group: dist.ProcessGroup, timeout_s: float, clock: DeviceClock | None = None) -> None:
        """`group`: the pipeline's. Called by all ranks of the job, each with its own pipeline, at the same point.

        `clock`: of the device, to tell when messages were asked for and arrived; related to the host's clock, by its
        owner, between the use of the last message and `take_times`. None: nobody is told.
        """
        self._rank = group.rank()
        self._ranks = [dist.get_global_rank(group, stage) for stage in range(group.size())]
        self._links = self._make_groups(dist.get_backend(group), timeout_s, times_receives=clock is not None)
        self._specification = TensorSpecification((), torch.float32, torch.device("cpu"))
        self._receives: dict[MessageKey, _Receive] = {}
        self._announced: dict[int, deque[MessageKey]] = defaultdict(deque)
        self._sends: list[tuple[MessageKey, int, torch.Tensor, dist.Work | None]] = []
        self._clock = clock
        self._sent: list[MessageTimes] = []
        self._received: list[_Timed] = []

    def _make_groups(self, backend: str, timeout_s: float, *, times_receives: bool) -> dict[Link, dist.ProcessGroup]:
        # Groups of all pipelines are made by all ranks in one order. Local synchronisation would need fewer calls, but
        # it names a group by how many groups its caller is in, which differs between first, middle and last stages.
        pipelines: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(pipelines, tuple(self._ranks))
        groups: dict[Link, dist.ProcessGroup] = {}
        for ranks in sorted(set(pipelines)):
            for source, target in _links(len(ranks)):
                group = dist.new_group(
                    [ranks[source], ranks[target]],
                    timeout=timedelta(seconds=timeout_s),
                    backend=backend,
                    group_desc=f"ADAPTRA_LINK_{source}_{target}",
                )
                if list(ranks) == self._ranks and self._rank in (source, target):
                    groups[source, target] = group
                    if times_receives and self._rank == target:
                        group._enable_collectives_timing()
        return groups

    def describe(self, specification: TensorSpecification) -> None:
        """Set shape, dtype and device of the messages to come (fixed within an iteration)."""
        self._specification = specification

    def post_send(self, key: MessageKey, peer: int, tensor: torch.Tensor) -> None:
        outgoing = tensor.detach().contiguous()
        if self._specification.shape is None:
            header = encode_shape(outgoing.shape, outgoing.device)
            self._sends.append((key, peer, header, self._isend(header, peer, key)))
        now_s = time.monotonic()
        self._sends.append((key, peer, outgoing, self._isend(outgoing, peer, key)))
        if self._clock is not None:
            self._sent.append(MessageTimes(key, peer, now_s, now_s, outgoing.nbytes, Path.DEVICE))
        self._let_go_of_completed_sends()

    def post_receive(self, key: MessageKey, peer: int) -> None:
        assert key not in self._receives, f"{key} was posted twice"
        specification = self._specification
        if specification.shape is None:
            # Nothing can be received ahead: a body's size is in its header, and order is all that matches messages.
            self._receives[key] = _Receive(peer, None, None)
            self._announced[peer].append(key)
            return
        buffer = torch.empty(specification.shape, dtype=specification.dtype, device=specification.device)
        self._receives[key] = self._begin_receive(key, peer, buffer)

    def ready(self, key: MessageKey) -> bool:
        work = self._receives[key].work
        return work is not None and work.is_completed()

    def sees_arrivals(self, peer: int) -> bool:
        """Never: a receive that is over says so only when it is asked, and one whose size is unknown has not begun."""
        return False

    def wait_any(self, keys: Collection[MessageKey], until_s: float) -> bool:
        return False

    def came_by(self, peer: int) -> Path:
        return Path.DEVICE

    def wait(self, key: MessageKey, deadline_s: float) -> torch.Tensor:
        if self._receives[key].buffer is None:
            self._receive_through(key, deadline_s)
        peer, buffer, work = self._receives.pop(key)
        assert buffer is not None
        self._settle(work, buffer, key, f"{peer}->{self._rank}", deadline_s)
        return buffer

    def _receive_through(self, key: MessageKey, deadline_s: float) -> None:
        """Receive what the sender of `key` sent before it, and `key`: none of its messages can be skipped."""
        peer = self._receives[key].peer
        specification = self._specification
        first = None
        while first != key:
            first = self._announced[peer].popleft()
            posted = None if self._clock is None else self._clock.mark()
            header = torch.empty(HEADER_NUMBERS, dtype=torch.int64, device=specification.device)
            self._settle(self._irecv(header, peer, first), header, first, f"{peer}->{self._rank}", deadline_s)
            body = torch.empty(decode_shape(header.cpu()), dtype=specification.dtype, device=specification.device)
            self._receives[first] = self._begin_receive(first, peer, body, posted)

    def _begin_receive(self, key: MessageKey, peer: int, buffer: torch.Tensor, posted: Mark | None = None) -> _Receive:
        """`posted`: when it was asked for; None: now."""
        begun = None if self._clock is None else self._clock.mark()
        work = self._irecv(buffer, peer, key)
        if begun is not None and work is not None:
            marks = _Marks(begun if posted is None else posted, begun)
            self._received.append(_Timed(key, peer, buffer.nbytes, marks, work))
        return _Receive(peer, buffer, work)

    def flush(self, deadline_s: float) -> None:
        sends, self._sends = self._sends, []
        for key, peer, tensor, work in sends:
            self._settle(work, tensor, key, f"{self._rank}->{peer}", deadline_s)

    def _let_go_of_completed_sends(self) -> None:
        """A send that failed is completed too: to wait for it is to hear of that."""
        sends, self._sends = self._sends, []
        completed: list[tuple[MessageKey, int, torch.Tensor, dist.Work | None]] = []
        for entry in sends:
            (completed if entry[3] is None or entry[3].is_completed() else self._sends).append(entry)
        for key, peer, tensor, work in completed:
            self._settle(work, tensor, key, f"{self._rank}->{peer}", time.monotonic())

    def take_times(self) -> tuple[Sequence[MessageTimes], Sequence[MessageTimes]]:
        if self._clock is None:
            return (), ()
        sent, self._sent = self._sent, []
        received, self._received = self._received, []
        try:
            return sent, self._times_of(self._clock, received)
        except RuntimeError as cause:
            self._clock = None
            logger.warning("stage %d: arrivals from other GPUs are not timed any more: %s", self._rank, cause)
            return (), ()

    def _times_of(self, clock: DeviceClock, received: Sequence[_Timed]) -> list[MessageTimes]:
        """In the order in which they were posted: a receive stands in its link's stream after the one before it."""
        marks = {id(mark): mark for entry in received for mark in entry.marks}
        seconds = dict(zip(marks, clock.seconds(marks.values()), strict=True))
        clock.use_again(list(marks.values()))
        arrived_s: dict[int, float] = {}
        times = []
        for key, peer, nbytes, (posted, begun), work in received:
            begun_s = max(seconds[id(begun)], arrived_s.get(peer, -math.inf))
            arrived_s[peer] = begun_s + work._get_duration() / 1e3
            times.append(MessageTimes(key, peer, seconds[id(posted)], arrived_s[peer], nbytes, Path.DEVICE))
        return times

    def close(self) -> None:
        for group in self._links.values():
            dist.destroy_process_group(group)
        self._links.clear()

    def _settle(
        self, work: dist.Work | None, tensor: torch.Tensor, key: MessageKey, link: str, deadline_s: float
    ) -> None:
        """On a device, the current stream waits and the backend's watchdog keeps the deadline; else the thread waits.

        A timeout would make NCCL's wait block the thread too, until the transfer is over.
        """
        if work is None:
            return
        try:
            if tensor.device.type == "cpu":
                work.wait(timedelta(seconds=max(0.001, deadline_s - time.monotonic())))
            else:
                work.wait()
        except RuntimeError as cause:
            raise self._error(key, link, cause) from cause

    def _error(self, key: MessageKey, link: str, cause: Exception) -> TransportError:
        return TransportError(
            f"stage {self._rank}, link {link}: the {key} did not get through; torch.distributed reported: {cause}. "
            "Look at the stage at the other end first: it died, hangs, cannot be reached, or took longer than "
            "--adaptra-timeout-s"
        )

    # The functions are looked up at each call: fault injection and instrumentation replace them there.
    def _isend(self, tensor: torch.Tensor, peer: int, key: MessageKey) -> dist.Work | None:
        try:
            return dist.isend(tensor, self._ranks[peer], group=self._links[self._rank, peer])
        except RuntimeError as cause:
            raise self._error(key, f"{self._rank}->{peer}", cause) from cause

    def _irecv(self, tensor: torch.Tensor, peer: int, key: MessageKey) -> dist.Work | None:
        try:
            return dist.irecv(tensor, self._ranks[peer], group=self._links[peer, self._rank])
        except RuntimeError as cause:
            raise self._error(key, f"{peer}->{self._rank}", cause) from cause


def _links(stages: int) -> list[Link]:
    """Both directions between neighbours, the first and the last stage included."""
    ring = [(stage, (stage + 1) % stages) for stage in range(stages)]
    return sorted({link for a, b in ring for link in ((a, b), (b, a))})
