# SPDX-License-Identifier: Apache-2.0
"""Named ranges around what a stage computes, sends, receives and waits for, for torch.profiler (Kineto, HTA) and, on
GPUs, Nsight Systems.

On a GPU the ranges of messages are those of the CPU that launches them; waits of the GPU itself are in its streams.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

import torch

from adaptra_megatron.runtime.megatron.computation import StageComputation, SurroundedComputation
from adaptra_megatron.transport.messages import MessageKey, Transport


def ranged_computation(computation: StageComputation) -> StageComputation:
    """`computation` whose actions are ranges such as "adaptra F 3", or "adaptra I 3, chunk 1"."""
    return SurroundedComputation(
        computation, lambda kind, chunk, micro_batch: _range(f"{kind} {micro_batch}{_of(chunk)}")
    )


class RangedTransport:
    """A Transport whose messages are ranges such as "adaptra send activation 3 to rank 1", "adaptra receive gradient 3
    from rank 1", which is when it is announced, and "adaptra wait for gradient 3, chunk 1"."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.describe, self.can_poll, self.ready = transport.describe, transport.can_poll, transport.ready
        self.last_receive_path, self.take_times, self.close = (
            transport.last_receive_path,
            transport.take_times,
            transport.close,
        )

    def post_send(self, key: MessageKey, peer: int, tensor: torch.Tensor) -> None:
        """See Transport."""
        with _range(f"send {_named(key)} to rank {peer}"):
            self._transport.post_send(key, peer, tensor)

    def post_receive(self, key: MessageKey, peer: int) -> None:
        """See Transport."""
        with _range(f"receive {_named(key)} from rank {peer}"):
            self._transport.post_receive(key, peer)

    def wait_any(self, keys: Collection[MessageKey], until_s: float) -> bool:
        """See Transport."""
        with _range(f"wait for {' or '.join(map(_named, keys))}"):
            return self._transport.wait_any(keys, until_s)

    def wait(self, key: MessageKey, deadline_s: float) -> torch.Tensor:
        """See Transport."""
        with _range(f"wait for {_named(key)}"):
            return self._transport.wait(key, deadline_s)

    def flush(self, deadline_s: float) -> None:
        """See Transport."""
        with _range("wait until all has been sent"):
            self._transport.flush(deadline_s)


def _of(chunk: int) -> str:
    return f", chunk {chunk}" if chunk else ""


def _named(key: MessageKey) -> str:
    return f"{key.direction.value} {key.micro_batch}{_of(key.chunk)}"


@contextlib.contextmanager
def _range(what: str) -> Iterator[None]:
    """A range that both kinds of profilers show. torch's own ranges reach Nsight within emit_nvtx() alone."""
    name = f"adaptra {what}"
    with contextlib.ExitStack() as ranges:
        ranges.enter_context(torch.profiler.record_function(name))
        if torch.cuda.is_available():
            ranges.enter_context(torch.cuda.nvtx.range(name))
        yield
