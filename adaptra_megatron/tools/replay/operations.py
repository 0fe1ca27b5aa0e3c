# SPDX-License-Identifier: Apache-2.0
"""Define recorded operations of a job, with the names of OSDI '25's traces."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from adaptra_megatron.common.layout import Cell
from adaptra_megatron.schedule.ir import Placement, ScheduleError, interleaved


class OpType(str, enum.Enum):
    """Type of an operation. Values are names in traces."""

    FORWARD = "forward-compute"
    BACKWARD = "backward-compute"
    BACKWARD_INPUT = "backward-input-compute"
    BACKWARD_WEIGHT = "backward-weight-compute"
    FORWARD_SEND = "forward-send"
    FORWARD_RECV = "forward-recv"
    BACKWARD_SEND = "backward-send"
    BACKWARD_RECV = "backward-recv"
    PARAMS_ALL_GATHER = "params-all-gather"
    GRADS_REDUCE_SCATTER = "grads-reduce-scatter"
    LAYERNORM_ALL_REDUCE = "layernorm-grads-all-reduce"
    EMBEDDING_ALL_REDUCE = "embedding-grads-all-reduce"
    CLIP = "optimizer-clip-main-grad"
    OPTIMIZER = "optimizer"
    GARBAGE = "gc"

    def __str__(self) -> str:
        return self.value

    @property
    def computes(self) -> bool:
        """Whether it computes a micro-batch."""
        return self in COMPUTE

    @property
    def peer(self) -> tuple[int, OpType] | None:
        """(peer's stage minus this one, type of the peer's operation) of a send or receive; None for others."""
        return _PEERS.get(self)


COMPUTE = frozenset((OpType.FORWARD, OpType.BACKWARD, OpType.BACKWARD_INPUT, OpType.BACKWARD_WEIGHT))
SENDING = (OpType.FORWARD, OpType.BACKWARD, OpType.BACKWARD_INPUT)
"""Types that end with a message to the next or the previous stage."""
OVER_REPLICAS = frozenset((OpType.PARAMS_ALL_GATHER, OpType.GRADS_REDUCE_SCATTER))
"""Collectives of all cells of a stage."""
OVER_STAGES = frozenset((OpType.EMBEDDING_ALL_REDUCE,))
"""Collectives of those stages of a replica that record them: the ends of the model."""
OVER_JOB = frozenset((OpType.CLIP,))
"""Collectives of all workers: the norm of the gradients covers all parameters."""
_PEERS = {
    OpType.FORWARD_SEND: (1, OpType.FORWARD_RECV),
    OpType.FORWARD_RECV: (-1, OpType.FORWARD_SEND),
    OpType.BACKWARD_SEND: (-1, OpType.BACKWARD_RECV),
    OpType.BACKWARD_RECV: (1, OpType.BACKWARD_SEND),
}


class ReplayError(ScheduleError):
    """A recording that cannot be replayed. Names step, worker, operation and remedy."""


class Operation(NamedTuple):
    """One recorded operation. A send, receive or collective includes the wait for the other ends."""

    cell: Cell
    optype: OpType
    start_s: float
    """Seconds on a clock that all workers share, within a step or over the whole run."""
    duration_s: float
    sequence: int
    """Index among the worker's operations of this type in the step, by start."""
    chunk: int = 0
    micro_batch: int = -1
    """Micro-batch that is computed; -1 for other operations."""

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s

    def __str__(self) -> str:
        return f"{self.optype} {self.sequence} of cell {self.cell}"


class ReplayMessage(NamedTuple):
    """A message that was not recorded, between two recorded actions."""

    sender: Operation
    user: Operation
    seconds: float
    """Transfer time, from when both ends were ready."""

    @property
    def optype(self) -> OpType:
        return OpType.FORWARD_SEND if self.sender.optype is OpType.FORWARD else OpType.BACKWARD_SEND

    @property
    def link(self) -> tuple[int, int]:
        return self.sender.cell.stage, self.user.cell.stage


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """One step of all workers. Construction raises ReplayError without operations, or for invalid times."""

    number: int
    operations: tuple[Operation, ...]
    messages: tuple[ReplayMessage, ...] = ()
    """For recordings of computation alone: the messages that its actions must have sent (see `with_messages`)."""
    blocking: bool | None = None
    """Whether cells wait for the end of each exchange before they compute; None: as in the recorded messages."""
    custom_placement: Placement | None = None
    """None: Megatron's placement."""

    def __post_init__(self) -> None:
        if not self.operations:
            raise ReplayError(f"step {self.number} has no operation: leave it out")
        for each in self.operations:
            if not (math.isfinite(each.start_s) and math.isfinite(each.duration_s) and each.duration_s >= 0.0):
                raise ReplayError(
                    f"step {self.number}: {each} starts at {each.start_s} and takes {each.duration_s} s: times have "
                    "to be finite, durations at least 0; leave the step out"
                )

    @cached_property
    def start_s(self) -> float:
        return min(operation.start_s for operation in self.operations)

    @cached_property
    def seconds(self) -> float:
        """Seconds from the first start to the last end."""
        return max(operation.end_s for operation in self.operations) - self.start_s

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        return tuple(sorted({operation.cell for operation in self.operations}))

    @cached_property
    def stages(self) -> int:
        return 1 + max(cell.stage for cell in self.cells)

    @cached_property
    def placement(self) -> Placement:
        """Placement of the model's parts on stages."""
        return self.custom_placement or interleaved(self.stages, 1 + max(each.chunk for each in self.operations))

    def missing(self) -> str:
        """Describe an action that a cell lacks and others of its replica have; empty if there is none."""
        did: dict[Cell, dict[bool, set[tuple[int, int]]]] = {cell: {True: set(), False: set()} for cell in self.cells}
        for each in self.operations:
            if each.optype in SENDING:
                did[each.cell][each.optype is OpType.FORWARD].add((each.chunk, each.micro_batch))
        every: dict[int, set[tuple[int, int]]] = {}
        for cell, done in did.items():
            every.setdefault(cell.replica, set()).update(done[True], done[False])
        for cell, done in did.items():
            for forward, name in ((True, "forward"), (False, "backward")):
                if lacks := sorted(every[cell.replica] - done[forward]):
                    return (
                        f"step {self.number}: stage {cell.stage} of replica {cell.replica} has no {name} of "
                        f"micro-batch {lacks[0][1]}: routed to another replica, or not recorded"
                    )
        return ""

    def by_cell(self) -> dict[Cell, list[Operation]]:
        """Return the operations of each cell, by start."""
        found: dict[Cell, list[Operation]] = {cell: [] for cell in self.cells}
        for operation in sorted(self.operations, key=lambda each: (each.start_s, each.end_s, each.optype)):
            found[operation.cell].append(operation)
        return found


def with_sequence_numbers(operations: Iterable[Operation]) -> tuple[Operation, ...]:
    """Return the operations with `sequence` counted per cell and type, by start."""
    counts: dict[tuple[Cell, OpType], int] = {}
    found = []
    for operation in sorted(operations, key=lambda each: (each.start_s, each.end_s)):
        key = (operation.cell, operation.optype)
        found.append(operation._replace(sequence=counts.get(key, 0)))
        counts[key] = counts.get(key, 0) + 1
    return tuple(found)
