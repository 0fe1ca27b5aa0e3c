# SPDX-License-Identifier: Apache-2.0
"""How many activations the memory of this rank's device has room for, measured while it trains.

What an activation takes is the growth of the allocated bytes over its forward, the peak says what else an iteration
needs while activations are held, and the device says how much is free. All of it is bookkeeping of the host: nothing
here waits for the device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from adaptra_megatron.schedule.actions import Kind

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
    """Whoever hands out the memory that activations are in. Nothing here waits for a device."""

    def allocated_nbytes(self) -> int:
        """In live tensors of this process."""

    def reserved_nbytes(self) -> int:
        """Taken from the device by this process for tensors, whether in use or not."""

    def begin_peak(self) -> None:
        """Forget the peak so far."""

    def peak_nbytes(self) -> int:
        """Most bytes in live tensors since `begin_peak`."""

    def device_nbytes(self) -> DeviceBytes: ...

    def shortages(self) -> int:
        """How often, so far, the device had nothing left and cached memory had to be given back to it first."""


class CudaMemory:
    """MemorySource on torch's caching allocator. The peak is torch's own: torch.cuda.max_memory_allocated."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocated_nbytes(self) -> int:
        return self._stat("allocated_bytes", "current")

    def reserved_nbytes(self) -> int:
        return self._stat("reserved_bytes", "current")

    def begin_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_nbytes(self) -> int:
        return self._stat("allocated_bytes", "peak")

    def device_nbytes(self) -> DeviceBytes:
        return DeviceBytes(*torch.cuda.mem_get_info(self._device))

    def shortages(self) -> int:
        return int(self._stats().get("num_alloc_retries", 0))

    def _stat(self, name: str, which: str) -> int:
        return int(self._stats()[name]["all"][which])

    def _stats(self) -> dict[str, Any]:
        # torch.cuda.memory_allocated() flattens and sorts the whole of this at each call.
        stats: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(self._device)
        return stats


def make_meter(source: MemorySource, fraction: float, *, fp16: bool) -> MemoryMeter:
    """A meter for a job that trains in fp16, with dynamic loss scaling, or not. `fraction`: as for MemoryMeter."""
    return MemoryMeter(source, fraction, SETTLED_ITERATIONS_FP16 if fp16 else SETTLED_ITERATIONS)


def memory_of(device: torch.device) -> MemorySource | None:
    """The source for tensors on `device`; None in host memory, whose free bytes belong to every process of the host."""
    return CudaMemory(device) if device.type == "cuda" else None


@dataclass(frozen=True)
class StageMemory:
    """One rank's memory in one iteration."""

    room: float
    """Activations (of one chunk's micro-batch, the largest of the rank's chunks) that it can hold, those that it held
    included; not rounded."""
    activation_nbytes: float
    """What one takes, its input included."""
    free_nbytes: float
    """Left at the moment of most use, within the allowed fraction of the device."""
    released_at_backward_input: float | None
    """The fraction of an activation that is free after its input gradient; None until a split backward was seen."""


class _Change(NamedTuple):
    kind: Kind
    chunk: int
    nbytes: int
    """Allocated bytes after the action less those before it."""


class MemoryMeter:
    """Measures one rank. Not safe for threads: it belongs to the one that runs the pipeline."""

    def __init__(self, source: MemorySource, fraction: float, settled_iterations: int = SETTLED_ITERATIONS) -> None:
        """`fraction`: of the device's memory, what may be in use; the rest is for fragmentation and surprises.

        `settled_iterations`: see SETTLED_ITERATIONS.
        """
        self._source = source
        self._fraction = fraction
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
        self._released: float | None = None
        self._shortages = source.shortages()

    @property
    def activation_nbytes(self) -> float | None:
        """What one activation takes; None until it is known."""
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
            self._changes.append(_Change(kind, chunk, self._source.allocated_nbytes() - self._before_nbytes))

    def finish(self, message_nbytes: int) -> StageMemory | None:
        """What the iteration showed, once its last action has run; None until anything is known.

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
        return StageMemory(
            room=for_activations / self._activation_nbytes,
            activation_nbytes=self._activation_nbytes,
            free_nbytes=for_activations - self._held_nbytes,
            released_at_backward_input=self._released,
        )

    def _take_in(self, message_nbytes: int) -> None:
        by_action: dict[tuple[Kind, int], list[int]] = defaultdict(list)
        for change in self._changes:
            by_action[change.kind, change.chunk].append(change.nbytes)
        takes = {
            chunk: max(1.0, float(np.quantile(nbytes, TYPICAL)) + message_nbytes)
            for (kind, chunk), nbytes in by_action.items()
            if kind is Kind.FORWARD
        }
        released = {
            chunk: float(np.clip(-np.median(nbytes) / takes[chunk], 0.0, 1.0))
            for (kind, chunk), nbytes in by_action.items()
            if kind is Kind.BACKWARD_INPUT
        }
        self._activation_nbytes = max(self._activation_nbytes or 0.0, *takes.values())
        if released:
            self._released = min(*released.values(), self._released if self._released is not None else 1.0)
        self._held_nbytes = _most_held_nbytes(self._changes, takes, released)
        beside_nbytes = self._source.peak_nbytes() - self._base_nbytes - self._held_nbytes
        self._beside_nbytes = max(self._beside_nbytes, beside_nbytes)


def _most_held_nbytes(changes: Sequence[_Change], takes: dict[int, float], released: dict[int, float]) -> float:
    """Most bytes in activations at once. By what each takes, for messages come and go between actions."""
    held = most = 0.0
    for kind, chunk, _ in changes:
        if kind is Kind.FORWARD:
            held += takes[chunk]
        elif kind is Kind.BACKWARD:
            held -= takes[chunk]
        elif kind is Kind.BACKWARD_INPUT:
            held -= released[chunk] * takes[chunk]
        else:
            held -= (1.0 - released[chunk]) * takes[chunk]
        most = max(most, held)
    return most
