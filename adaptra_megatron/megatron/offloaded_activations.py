# SPDX-License-Identifier: Apache-2.0
"""Have activations offloaded in our order (--fine-grained-activation-offloading), recorded anew when the order changes.

Source: megatron/core/pipeline_parallel/fine_grained_activation_offload.py (0.16 to 0.20). Its manager has a handler per
forward. In a first iteration it keeps them in the order of forwards, and in the one in which stock's schedule will run
their backwards; later the n-th forward gets the n-th handler. Backwards have to come in the recorded order: the manager
reloads what the next one needs, and asserts that it is that handler's. So:

- The backwards' order is the one that the rank runs. An attempt in another order is recorded while it runs; so is one
  after an attempt that was given up, which leaves tensors in handlers. Its backwards wait for the copies to the CPU, as
  the manager does not before it has a record.
- This holds for routed iterations, too: they need the memory.
- Evaluations save nothing for backwards. Stock has them take handlers, and offloads nothing in the next iteration; here
  they get a manager without handlers.
- From 0.19 on, with chunks of one layer, stock's manager fails in its second iteration ("Chunk mismatch"), with and
  without adaptra: it takes a handler that keeps all its tensors on the GPU for one that has ended.
- Stock has all ranks of the job meet after a record, to print a table. Replicas may switch plans apart from each other,
  so that is left out.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.pipeline_parallel import fine_grained_activation_offload as stock

from adaptra_megatron.schedule.ir import Action, Kind


class OffloadedActivations:
    """The manager of a process's offloading in training, and the order that it has recorded."""

    def __init__(self) -> None:
        self._records = 0
        self._idle = stock.PipelineOffloadManager()
        self._idle._is_warmup = False  # it makes no handlers, so it offloads nothing
        self._manager = _OrderedManager()
        self._running: _Order = []
        """Order of the latest attempt."""
        self._order: _Order | None = None
        """Recorded order; None if it has to be recorded anew."""
        self.suspend()

    def summary(self) -> dict[str, int]:
        """Return the number of records, and the bytes that are offloaded at once, as Megatron counts them."""
        nbytes = getattr(self._manager, "offload_summary_total_bytes", 0)  # after a first record
        return {"offload_records": self._records, "offloaded_bytes": nbytes}

    def begin(self, actions: Sequence[Action]) -> bool:
        """Prepare for an attempt at a training iteration that runs `actions`. Return whether it is recorded."""
        order = _numbered(actions)
        anew = self._order != order
        if anew:
            self._manager.record(order)
            self._records += 1
        self._running, self._order = order, None
        stock.PipelineOffloadManager.OFFLOAD_MGR = self._manager
        return anew

    def end(self) -> None:
        """End an attempt that has succeeded: what stock's schedules do after their last action."""
        with _without_table():
            self._manager.reset()
        self._order = self._running

    def suspend(self) -> None:
        """Offload nothing until the next attempt begins."""
        stock.PipelineOffloadManager.OFFLOAD_MGR = self._idle

    def close(self) -> None:
        """Leave offloading to stock, which will record its own order."""
        stock.PipelineOffloadManager.OFFLOAD_MGR = None


_Order = list[tuple[bool, int, int]]
"""Forwards and backwards: whether it is a forward, its chunk, and the forward's number among those of the chunk."""


def _numbered(actions: Sequence[Action]) -> _Order:
    counts, numbers = Counter[int](), dict[tuple[int, int], int]()
    for each in actions:
        if each.kind is Kind.FORWARD:
            numbers[each.chunk, each.micro_batch] = counts[each.chunk]
            counts[each.chunk] += 1
    return [
        (each.kind is Kind.FORWARD, each.chunk, numbers[each.chunk, each.micro_batch])
        for each in actions
        if each.kind is not Kind.BACKWARD_WEIGHT
    ]


class _OrderedManager(stock.PipelineOffloadManager):  # type: ignore[misc]
    """Megatron's manager, whose backwards come in a given order."""

    def record(self, order: _Order) -> None:
        """Record an iteration of this order. Streams and pinned memory stay."""
        self._is_warmup = True
        self._stages = None
        self._cached_chunks_forward: list[Any] = []
        self._cached_chunks_backward: list[Any] = []
        self._made: defaultdict[int, list[Any]] = defaultdict(list)
        """Handlers by chunk, in the order of forwards."""
        self._left = deque((chunk, number) for is_forward, chunk, number in order if not is_forward)
        """Backwards that are not listed yet."""
        self.reset()

    def init_model_chunk_offload_handler(self, *given: Any, **keywords: Any) -> None:
        """Make the handler of a forward, while recording, and list those of the next backwards that are known."""
        super().init_model_chunk_offload_handler(*given, **keywords)
        if self._is_warmup:
            made = self._cached_chunks_forward[-1]
            self._made[made.vpp_rank].append(made)
            while self._left and self._left[0][1] < len(self._made[self._left[0][0]]):
                chunk, number = self._left.popleft()
                self._cached_chunks_backward.append(self._made[chunk][number])

    def push(self, handler: Any) -> None:
        """Do nothing: stock lists a handler where its own schedule would have the backward."""

    def flush(self) -> None:
        """Do nothing: see `push`."""

    def pop_backward_chunk(self, name: str | None = None) -> None:
        """Begin the next backward. While recording, it may read copies that nothing has reloaded ahead."""
        super().pop_backward_chunk(name)
        if self._is_warmup:
            torch.cuda.current_stream().wait_stream(self._d2h_stream)


@contextmanager
def _without_table() -> Iterator[None]:
    table, stock.print_offload_summary_table = stock.print_offload_summary_table, lambda *_, **__: None
    try:
        yield
    finally:
        stock.print_offload_summary_table = table
