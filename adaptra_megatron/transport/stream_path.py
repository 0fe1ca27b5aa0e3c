# SPDX-License-Identifier: Apache-2.0
"""The device path on GPU tensors: torch.distributed with a backend that works on streams (NCCL).

NCCL has no tags and matches by order, so every directed link has a process group of its own and receives are posted
in the order in which the peer sends. A wait only makes the current stream wait: the CPU never sees an arrival.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from adaptra_megatron.transport.messages import MessageKey, MessageTimes, TensorSpecification, TransportError
from adaptra_megatron.transport.shapes import HEADER_NUMBERS, decode_shape, encode_shape

Link = tuple[int, int]


class StreamTransport:
    """Transport over one two-rank group per directed link of the pipeline."""

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        """Called by all ranks of `group` at the same point: it makes process groups between neighbours."""
        self._rank = group.rank()
        self._ranks = [dist.get_global_rank(group, stage) for stage in range(group.size())]
        self._links = self._make_groups(group.size(), dist.get_backend(group), timeout_s)
        self._specification = TensorSpecification((), torch.float32, torch.device("cpu"))
        self._receives: dict[MessageKey, tuple[int, torch.Tensor, dist.Work | None]] = {}
        self._sends: list[tuple[MessageKey, int, torch.Tensor, dist.Work | None]] = []

    def _make_groups(self, stages: int, backend: str, timeout_s: float) -> dict[Link, dist.ProcessGroup]:
        links = sorted({(a, b) for i in range(stages) for a, b in ((i, (i + 1) % stages), ((i + 1) % stages, i))})
        # Every rank walks the links in the same order, so the pairwise rendezvous of new_group cannot form a cycle.
        return {
            link: dist.new_group(
                [self._ranks[stage] for stage in link],
                timeout=timedelta(seconds=timeout_s),
                backend=backend,
                use_local_synchronization=True,
                group_desc=f"ADAPTRA_LINK_{link[0]}_{link[1]}",
            )
            for link in links
            if self._rank in link
        }

    def describe(self, specification: TensorSpecification) -> None:
        """Set shape, dtype and device of the messages to come (fixed within an iteration)."""
        self._specification = specification

    def post_send(self, key: MessageKey, peer: int, tensor: torch.Tensor) -> None:
        outgoing = tensor.detach().contiguous()
        if self._specification.shape is None:
            header = encode_shape(outgoing.shape, outgoing.device)
            self._sends.append((key, peer, header, self._isend(header, peer)))
        self._sends.append((key, peer, outgoing, self._isend(outgoing, peer)))
        self._sends = [entry for entry in self._sends if entry[3] is not None and not entry[3].is_completed()]

    def post_receive(self, key: MessageKey, peer: int) -> None:
        assert key not in self._receives, f"{key} was posted twice"
        specification = self._specification
        if specification.shape is None:
            # Only a header can be awaited ahead: the body's size is in it, and order is all that matches messages.
            self._receives[key] = (peer, torch.empty(0), None)
            return
        buffer = torch.empty(specification.shape, dtype=specification.dtype, device=specification.device)
        self._receives[key] = (peer, buffer, self._irecv(buffer, peer))

    def ready(self, key: MessageKey) -> bool:
        _peer, _buffer, work = self._receives[key]
        return work is not None and work.is_completed()

    def wait(self, key: MessageKey, deadline_s: float) -> torch.Tensor:
        peer, buffer, work = self._receives.pop(key)
        if self._specification.shape is None:
            header = torch.empty(HEADER_NUMBERS, dtype=torch.int64, device=self._specification.device)
            self._settle(self._irecv(header, peer), key, f"{peer}->{self._rank}", deadline_s)
            buffer = torch.empty(
                decode_shape(header.cpu()), dtype=self._specification.dtype, device=self._specification.device
            )
            work = self._irecv(buffer, peer)
        self._settle(work, key, f"{peer}->{self._rank}", deadline_s)
        return buffer

    def flush(self, deadline_s: float) -> None:
        for key, peer, _tensor, work in self._sends:
            self._settle(work, key, f"{self._rank}->{peer}", deadline_s)
        self._sends.clear()

    def take_times(self) -> tuple[Sequence[MessageTimes], Sequence[MessageTimes]]:
        return (), ()

    def close(self) -> None:
        for group in self._links.values():
            dist.destroy_process_group(group)
        self._links.clear()

    def _settle(self, work: dist.Work | None, key: MessageKey, link: str, deadline_s: float) -> None:
        if work is None:
            return
        try:
            # On a stream backend this blocks the stream, not the thread; the backend's watchdog keeps the deadline.
            work.wait(timedelta(seconds=max(0.001, deadline_s - time.monotonic())))
        except RuntimeError as cause:
            raise TransportError(
                f"stage {self._rank}, link {link}: the {key} did not get through; torch.distributed reported: {cause}. "
                "Look at the stage at the other end first: it died, hangs, or cannot be reached"
            ) from cause

    # The functions are looked up at each call: fault injection and instrumentation replace them there.
    def _isend(self, tensor: torch.Tensor, peer: int) -> dist.Work | None:
        return dist.isend(tensor, self._ranks[peer], group=self._links[self._rank, peer])

    def _irecv(self, tensor: torch.Tensor, peer: int) -> dist.Work | None:
        return dist.irecv(tensor, self._ranks[peer], group=self._links[peer, self._rank])
