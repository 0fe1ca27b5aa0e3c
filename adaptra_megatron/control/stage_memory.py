# SPDX-License-Identifier: Apache-2.0
"""Measure how many activations this rank's device has room for, while it trains.

What an activation takes is the growth of the allocated bytes over its forward, what a weight gradient that waits holds
is what is left of that after the input gradient (or more), the peak of each action says what it needs beside them, and
the device says how much is free. All of it is bookkeeping of the host: nothing here waits for the device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from adaptra_megatron.schedule.ir import Kind

SETTLED_ITERATIONS = 2
"""Training iterations that are not looked at: the first optimizer step allocates the optimizer's state."""
SETTLED_ITERATIONS_FP16 = 32
"""With dynamic loss scaling the first steps are skipped, and with them that allocation: a scale of 2^32 is halved in
each, and is below 2^16 by then."""
SAMPLED_ITERATIONS = 2
"""How many iterations of each plan are looked at action by action; then only every so many."""
SAMPLED_EVERY = 64
TYPICAL = 0.9
"""Quantile of what micro-batches take: not the most, so that one that meets a first-time allocation does not count."""


class DeviceBytes(NamedTuple):
    """The device as a whole."""

    free: int
    """In no process's hands."""
    total: int


class MemorySource(Protocol):
    """The allocator of the memory that activations are in. Nothing here waits for a device."""

    def allocated_nbytes(self) -> int:
        """In live tensors of this process."""

    def reserved_nbytes(self) -> int:
        """Taken from the device by this process for tensors, whether in use or not."""

    def begin_peak(self) -> None:
        """Forget the peak so far."""

    def peak_nbytes(self) -> int:
        """Most bytes since `begin_peak` that could not be handed out: those in live tensors, and those of freed ones
        that another stream of the device may still use."""

    def device_nbytes(self) -> DeviceBytes: ...

    def shortages(self) -> int:
        """Return how often, so far, the device had nothing left and cached memory had to be given back to it first."""


def make_meter(source: MemorySource, fraction: float, *, fp16: bool, spans: int = 0) -> MemoryMeter:
    """A meter for a job that trains in fp16, with dynamic loss scaling, or not. `fraction`, `spans`: as for
    MemoryMeter."""
    return MemoryMeter(source, fraction, SETTLED_ITERATIONS_FP16 if fp16 else SETTLED_ITERATIONS, spans)


@dataclass(frozen=True)
class StageMemory:
    """One rank's memory in one iteration."""

    room: float
    """Activations (of one chunk's micro-batch, the largest of the rank's chunks) that it can hold, those that it held
    included; not rounded."""
    activation_nbytes: float
    """Bytes of one activation, its input included."""
    free_nbytes: float
    """Left at the moment of most use, within the allowed fraction of the device."""
    released_at_backward_input: float | None
    """The fraction of an activation that is free after its input gradient, at most 1; negative where a weight gradient
    that waits holds more than an activation, as with sequence parallelism. None until a split backward was seen."""
    guessed: bool = False
    """True while that fraction comes from whole backwards of recomputed layers: at most so much will be held."""


class _Change(NamedTuple):
    kind: Kind
    chunk: int
    nbytes: int
    """Allocated bytes after the action less those before it."""
    peak_nbytes: int
    """Most bytes in use since the action before it ended."""


class MemoryMeter:
    """Measures one rank. Not safe for threads: it belongs to the one that runs the pipeline."""

    def __init__(
        self, source: MemorySource, fraction: float, settled_iterations: int = SETTLED_ITERATIONS, spans: int = 0
    ) -> None:
        """`fraction`: of the device's memory, what may be in use; the rest is for fragmentation and surprises.

        `settled_iterations`: see SETTLED_ITERATIONS. `spans`: of layers that a backward recomputes one after the other.
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
        self._beside_nbytes = 0.0
        self._waiting_nbytes: float | None = None
        """What a weight gradient holds that waits: the most of any chunk. None until one was seen."""
        self._recomputed_nbytes = 0.0
        """What whole backwards need beside activations at most: one recomputed span and its gradients."""
        self._shortages = source.shortages()

    @property
    def activation_nbytes(self) -> float | None:
        """Bytes of one activation; None until it is known."""
        return self._activation_nbytes

    def begin(self, plan: int) -> None:
        """Start of a training iteration that runs plan number `plan`, while no activations are held."""
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
        """An action has its message and is about to compute."""
        if self._sampling:
            self._before_nbytes = self._source.allocated_nbytes()

    def after(self, kind: Kind, chunk: int) -> None:
        """It has been computed (on a GPU: launched; memory is accounted at launch)."""
        if self._sampling:
            nbytes = self._source.allocated_nbytes() - self._before_nbytes
            self._changes.append(_Change(kind, chunk, nbytes, self._source.peak_nbytes()))
            self._source.begin_peak()

    def finish(self, message_nbytes: int) -> StageMemory | None:
        """Return what the iteration showed, once its last action has run; None until anything is known.

        `message_nbytes`: of the largest activation received in it. It is part of what is held until the backward, but
        was allocated before the forward began.
        """
        if self._sampling:
            self._take_in(message_nbytes)
            self._sampling = False
        if self._activation_nbytes is None:
            return None
        shortages = self._source.shortages()
        if shortages > self._shortages:
            # The device is full although there should be room: fragments, most likely. Count on one less each time.
            self._beside_nbytes += self._activation_nbytes
            self._shortages = shortages
        free, total = self._source.device_nbytes()
        of_others = total - free - self._source.reserved_nbytes()
        for_activations = self._fraction * total - of_others - self._base_nbytes - self._beside_nbytes
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
            beside_nbytes = peak_nbytes - self._base_nbytes - max(before, held)
            self._beside_nbytes = max(self._beside_nbytes, beside_nbytes)
            if kind is Kind.BACKWARD:
                self._recomputed_nbytes = max(self._recomputed_nbytes, beside_nbytes)
            self._held_nbytes = max(self._held_nbytes, held)


def _typical_nbytes(changes: Sequence[_Change], message_nbytes: int) -> tuple[dict[int, float], dict[int, float]]:
    """By chunk, what an activation takes, and what its weight gradient holds while it waits.

    The second is what the first has grown to by the end of the input gradient of the same micro-batch: those of a chunk
    run in one order. The message sent is part of both.
    """
    taken: dict[int, list[int]] = defaultdict(list)
    waiting: dict[int, list[int]] = defaultdict(list)
    backwards: dict[int, int] = defaultdict(int)
    for kind, chunk, nbytes, _ in changes:
        if kind is Kind.FORWARD:
            taken[chunk].append(nbytes + message_nbytes)
        elif kind.sends_gradient:
            if kind is Kind.BACKWARD_INPUT:
                waiting[chunk].append(taken[chunk][backwards[chunk]] + nbytes)
            backwards[chunk] += 1
    return (
        {chunk: max(1.0, float(np.quantile(nbytes, TYPICAL))) for chunk, nbytes in taken.items()},
        {chunk: max(0.0, float(np.quantile(nbytes, TYPICAL))) for chunk, nbytes in waiting.items()},
    )
