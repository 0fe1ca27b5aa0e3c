# SPDX-License-Identifier: Apache-2.0
"""Routed plans as data: which cell runs each micro-batch of a stage, in which order, and where its messages go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from adaptra_megatron.common.layout import Cell
from adaptra_megatron.schedule.ir import Kind


class RoutedAction(NamedTuple):
    """An action of one cell. `micro_batch`: number within its own `replica`, wherever it runs."""

    kind: Kind
    replica: int
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value}(replica {self.replica}, micro-batch {self.micro_batch})"


class RoutedMessage(NamedTuple):
    """An activation (`gradient` False) or a gradient of one micro-batch, from cell to cell."""

    source: Cell
    target: Cell
    gradient: bool
    replica: int
    micro_batch: int
    chunk: int = 0
    """Chunk of the receiving cell."""


class Move(NamedTuple):
    """Micro-batches, numbered within their replica, that run at cell `target` instead of `source` at `stage`."""

    source: Cell
    target: Cell
    micro_batches: tuple[int, ...]


@dataclass(frozen=True)
class Routing:
    """`hosts[stage][d * micro_batches + m]`: the replica whose cell runs micro-batch m of replica d at that stage."""

    replicas: int
    micro_batches: int
    hosts: tuple[tuple[int, ...], ...]

    def cell(self, stage: int, replica: int, micro_batch: int) -> Cell:
        """Return the cell that runs a micro-batch at `stage`."""
        return Cell(self.hosts[stage][replica * self.micro_batches + micro_batch], stage)

    def moves(self) -> list[Move]:
        """Return the micro-batches that do not run at their own replica's cell, by stage and cells."""
        found: dict[tuple[int, int, int], list[int]] = {}
        for stage, row in enumerate(self.hosts):
            for job, host in enumerate(row):
                replica, micro_batch = divmod(job, self.micro_batches)
                if host != replica:
                    found.setdefault((stage, replica, host), []).append(micro_batch)
        return [
            Move(Cell(replica, stage), Cell(host, stage), tuple(numbers))
            for (stage, replica, host), numbers in sorted(found.items())
        ]

    def counts(self) -> Counter[Cell]:
        """Return the number of micro-batches of each cell."""
        return Counter(Cell(host, stage) for stage, row in enumerate(self.hosts) for host in row)


def unrouted(replicas: int, stages: int, micro_batches: int) -> Routing:
    """Return the routing with every micro-batch at its own replica."""
    row = tuple(replica for replica in range(replicas) for _ in range(micro_batches))
    return Routing(replicas, micro_batches, (row,) * stages)


@dataclass(frozen=True, kw_only=True)
class RoutedSchedule:
    """One order per cell, `orders[replica * stages + stage]`. Unchecked: see `check_routed`."""

    routing: Routing
    orders: tuple[tuple[RoutedAction, ...], ...]
    chunks: int = 1
    """Chunks of each stage, in Megatron's placement."""

    @property
    def stages(self) -> int:
        return len(self.routing.hosts)

    def order(self, cell: Cell) -> tuple[RoutedAction, ...]:
        """Return the order of `cell`."""
        return self.orders[cell.replica * self.stages + cell.stage]

    def needed(self, stage: int, action: RoutedAction) -> RoutedMessage | None:
        """Return the message that must arrive before `action` starts at `stage`; None if it needs none."""
        return self._message(stage, action, sent=False)

    def produced(self, stage: int, action: RoutedAction) -> RoutedMessage | None:
        """Return the message that `action` makes at `stage`; None for weight gradients and at the model's ends."""
        return self._message(stage, action, sent=True)

    def messages(self) -> Iterator[RoutedMessage]:
        """Return all messages by sending cell, in sending order."""
        for number, order in enumerate(self.orders):
            for action in order:
                if (message := self.produced(number % self.stages, action)) is not None:
                    yield message

    def _message(self, stage: int, action: RoutedAction, *, sent: bool) -> RoutedMessage | None:
        if action.kind is Kind.BACKWARD_WEIGHT:
            return None
        gradient = action.kind is not Kind.FORWARD
        virtual = action.chunk * self.stages + stage + (1 if gradient != sent else -1)
        if not 0 <= virtual < self.chunks * self.stages:
            return None
        chunk, other = divmod(virtual, self.stages)
        place = (action.replica, action.micro_batch)
        here, there = self.routing.cell(stage, *place), self.routing.cell(other, *place)
        ends = (here, there) if sent else (there, here)
        return RoutedMessage(*ends, gradient, *place, chunk if sent else action.chunk)

    @cached_property
    def splits_backward(self) -> bool:
        """Return whether any backward is split into input and weight gradient."""
        return any(action.kind is Kind.BACKWARD_INPUT for order in self.orders for action in order)
