# SPDX-License-Identifier: Apache-2.0
"""Measure how many activations this rank's device has room for, while it trains.

The bytes of an activation are the growth of the allocated bytes over its forward. A pending weight gradient holds what
is left of them after the input gradient. The peak of each action shows what it needs in addition, and the device
reports its free bytes. Only the allocator's counters on the host are read: nothing waits for the device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from adaptra_megatron.schedule.ir import Kind

SETTLED_ITERATIONS = 2
"""First training iterations, which are not measured: the first optimizer step allocates the optimizer's state."""
SETTLED_ITERATIONS_FP16 = 32
"""The same with dynamic loss scaling, where the first steps are skipped, and that allocation with them: each halves a
scale of 2^32, which is below 2^16 by then."""
SAMPLED_ITERATIONS = 2
"""Iterations of each new plan that are measured action by action; later, only one of `SAMPLED_EVERY`."""
SAMPLED_EVERY = 64
TYPICAL = 0.9
"""Quantile of the bytes of micro-batches. Not the maximum, so that one first-time allocation does not count."""


class DeviceBytes(NamedTuple):
    """Memory of the whole device, in bytes."""

    free: int
    """Bytes that no process has taken."""
    total: int


class MemorySource(Protocol):
    """The allocator of the activations' memory. No call waits for a device."""

    def allocated_nbytes(self) -> int:
        """Return the bytes in live tensors of this process."""

    def reserved_nbytes(self) -> int:
        """Return the bytes that this process has taken from the device for tensors, in use or not."""

    def begin_peak(self) -> None:
        """Reset the peak."""

    def peak_nbytes(self) -> int:
        """Return the peak since `begin_peak` of the bytes in live tensors, and in freed ones that another stream of
        the device may still use."""

    def device_nbytes(self) -> DeviceBytes: ...

    def shortages(self) -> int:
        """Return how often, so far, cached memory had to be given back because the device was full."""


def make_meter(source: MemorySource, fraction: float, *, fp16: bool, spans: int = 0) -> MemoryMeter:
    """Create a meter. `fp16`: whether the job trains with dynamic loss scaling. `fraction`, `spans`: see
    MemoryMeter."""
    return MemoryMeter(source, fraction, SETTLED_ITERATIONS_FP16 if fp16 else SETTLED_ITERATIONS, spans)


@dataclass(frozen=True)
class StageMemory:
    """One rank's memory in one iteration."""

    room: float
    """Activations that it has room for in total, not rounded. An activation is that of one micro-batch and chunk, of
    the largest chunk."""
    activation_nbytes: float
    """Bytes of one activation, its input included."""
    free_nbytes: float
    """Free bytes at the moment of highest use, within the allowed fraction of the device."""
    released_at_backward_input: float | None
    """Fraction of an activation that its input gradient releases, at most 1. Negative if a pending weight gradient
    holds more than the activation, as with sequence parallelism. None until a split backward has run."""
    guessed: bool = False
    """Whether that fraction is an upper bound of what is held, estimated from whole backwards of recomputed layers."""


class _Change(NamedTuple):
    kind: Kind
    chunk: int
    nbytes: int | None
    """Allocated bytes after the action minus those before; None if it was one of a combined action."""
    peak_nbytes: int
    """Peak of the bytes in use since the end of the action before."""


class MemoryMeter:
    """Measures one rank's memory. Not thread-safe: for the thread that runs the pipeline."""

    def __init__(
        self, source: MemorySource, fraction: float, settled_iterations: int = SETTLED_ITERATIONS, spans: int = 0
    ) -> None:
        """`fraction`: share of the device's memory that may be in use; the rest allows for fragmentation.

        `settled_iterations`: see SETTLED_ITERATIONS. `spans`: spans of layers that a backward recomputes one by one.
        """
        self._source = source
        self._fraction = fraction
        self._spans = spans
        self._settled_iterations = settled_iterations
        self._iterations = 0
        self._plan = -1
        self._samples_of_plan = 0
        self._since_sample = 0
        self._sampling = False
        self._base_nbytes = 0
        self._before_nbytes = 0
        self._changes: list[_Change] = []
        self._activation_nbytes: float | None = None
        self._held_nbytes = 0.0
        self._backward_nbytes = 0.0
        self._waiting_nbytes: float | None = None
        """Bytes that a pending weight gradient holds: the most of any chunk. None until one has been measured."""
        self._recomputed_nbytes = 0.0
        """Largest number of bytes that a whole backward needs besides activations: one recomputed span and its
        gradients."""
        self._shortages = source.shortages()

    @property
    def activation_nbytes(self) -> float | None:
        """Bytes of one activation; None until measured."""
        return self._activation_nbytes

    def begin(self, plan: int) -> None:
        """Start a training iteration that runs plan number `plan`, while no activations are held."""
        if plan != self._plan:
            self._plan, self._samples_of_plan = plan, 0
        self._since_sample += 1
        due = self._samples_of_plan < SAMPLED_ITERATIONS or self._since_sample >= SAMPLED_EVERY
        self._sampling = due and self._iterations >= self._settled_iterations
        self._iterations += 1
        self._base_nbytes = self._source.allocated_nbytes()
        if self._sampling:
            self._samples_of_plan += 1
            self._since_sample = 0
            self._source.begin_peak()
            self._changes.clear()

    def before(self) -> None:
        """Note that an action has its input and is about to compute."""
        if self._sampling:
            self._before_nbytes = self._source.allocated_nbytes()

    def after(self, kind: Kind, chunk: int, *, alone: bool = True) -> None:
        """Note that the action has been computed (on a GPU: launched; the allocator counts at launch).

        `alone`: False for the two of a combined action, which grow and shrink the memory at once.
        """
        if self._sampling:
            nbytes = self._source.allocated_nbytes() - self._before_nbytes if alone else None
            self._changes.append(_Change(kind, chunk, nbytes, self._source.peak_nbytes()))
            self._source.begin_peak()

    def finish(self, message_nbytes: int) -> StageMemory | None:
        """Return the memory measured so far, after the last action of an iteration; None until anything is known.

        `message_nbytes`: bytes of the largest activation received. It is held until the backward, but it was allocated
        before the forward began.
        """
        if self._sampling:
            self._take_in(message_nbytes)
            self._sampling = False
        if self._activation_nbytes is None:
            return None
        shortages = self._source.shortages()
        if shortages > self._shortages:
            # The device is full although there should be room, probably fragmented: allow one activation less.
            self._backward_nbytes += self._activation_nbytes
            self._shortages = shortages
        free, total = self._source.device_nbytes()
        of_others = total - free - self._source.reserved_nbytes()
        for_activations = self._fraction * total - of_others - self._base_nbytes - self._backward_nbytes
        waiting_nbytes, guessed = self._waiting_nbytes, False
        if waiting_nbytes is None and self._spans:
            waiting_nbytes, guessed = self._activation_nbytes + self._spans * self._recomputed_nbytes, True
        waiting = None if waiting_nbytes is None else waiting_nbytes / self._activation_nbytes
        return StageMemory(
            room=for_activations / self._activation_nbytes,
            activation_nbytes=self._activation_nbytes,
            free_nbytes=for_activations - self._held_nbytes,
            released_at_backward_input=None if waiting is None else 1.0 - waiting,
            guessed=guessed,
        )

    def _take_in(self, message_nbytes: int) -> None:
        takes, waiting = _typical_nbytes(self._changes, message_nbytes)
        self._activation_nbytes = max(self._activation_nbytes or 0.0, *takes.values())
        if waiting:
            self._waiting_nbytes = max(self._waiting_nbytes or 0.0, *waiting.values())
        held = self._held_nbytes = 0.0
        for kind, chunk, _, peak_nbytes in self._changes:
            before, taken, left = held, takes[chunk], waiting.get(chunk, 0.0)
            # By what each takes, for messages come and go between actions.
            held += {
                Kind.FORWARD: taken,
                Kind.BACKWARD: -taken,
                Kind.BACKWARD_INPUT: left - taken,
                Kind.BACKWARD_WEIGHT: -left,
            }[kind]
            backward_nbytes = peak_nbytes - self._base_nbytes - max(before, held)
            self._backward_nbytes = max(self._backward_nbytes, backward_nbytes)
            if kind is Kind.BACKWARD:
                self._recomputed_nbytes = max(self._recomputed_nbytes, backward_nbytes)
            self._held_nbytes = max(self._held_nbytes, held)


def _typical_nbytes(changes: Sequence[_Change], message_nbytes: int) -> tuple[dict[int, float], dict[int, float]]:
    """Return by chunk the bytes of an activation, and the bytes that its pending weight gradient holds. Both include
    the sent message.

    The latter is the growth over the forward plus that over the input gradient of the same micro-batch: the
    micro-batches of a chunk run in one order.
    """
    taken: dict[int, list[int | None]] = defaultdict(list)
    waiting: dict[int, list[int]] = defaultdict(list)
    backwards: dict[int, int] = defaultdict(int)
    for kind, chunk, nbytes, _ in changes:
        if kind is Kind.FORWARD:
            taken[chunk].append(None if nbytes is None else nbytes + message_nbytes)
        elif kind.sends_gradient:
            before = taken[chunk][backwards[chunk]]
            if kind is Kind.BACKWARD_INPUT and nbytes is not None and before is not None:
                waiting[chunk].append(before + nbytes)
            backwards[chunk] += 1
    # No forward of the first micro-batch is combined: the first backward of the stage comes after all of them.
    alone = {chunk: [each for each in nbytes if each is not None] for chunk, nbytes in taken.items()}
    return (
        {chunk: max(1.0, float(np.quantile(nbytes, TYPICAL))) for chunk, nbytes in alone.items()},
        {chunk: max(0.0, float(np.quantile(nbytes, TYPICAL))) for chunk, nbytes in waiting.items()},
    )
