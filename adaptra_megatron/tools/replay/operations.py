# SPDX-License-Identifier: Apache-2.0
"""Recorded operations of a job: what each worker did in a step, and when. Named as in OSDI '25's traces."""

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
    """Type of an operation. The values are the names in traces."""

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
        """Return whether it is work on a micro-batch."""
        return self in COMPUTE

    @property
    def peer(self) -> tuple[int, OpType] | None:
        """Return, for a send or receive, the step to the other end's stage, and what that end records."""
        return _PEERS.get(self)


COMPUTE = frozenset((OpType.FORWARD, OpType.BACKWARD, OpType.BACKWARD_INPUT, OpType.BACKWARD_WEIGHT))
SENDING = (OpType.FORWARD, OpType.BACKWARD, OpType.BACKWARD_INPUT)
"""What ends with a message to the next stage, or the one before."""
OVER_REPLICAS = frozenset((OpType.PARAMS_ALL_GATHER, OpType.GRADS_REDUCE_SCATTER))
"""Collectives of all cells of a stage."""
OVER_STAGES = frozenset((OpType.EMBEDDING_ALL_REDUCE,))
"""Collectives of the stages of a replica that record them: those at the ends of the model."""
OVER_JOB = frozenset((OpType.CLIP,))
"""The norm of the gradients is of all parameters: every worker takes part."""
_PEERS = {
    OpType.FORWARD_SEND: (1, OpType.FORWARD_RECV),
    OpType.FORWARD_RECV: (-1, OpType.FORWARD_SEND),
    OpType.BACKWARD_SEND: (-1, OpType.BACKWARD_RECV),
    OpType.BACKWARD_RECV: (1, OpType.BACKWARD_SEND),
}


class ReplayError(ScheduleError):
    """A recording that cannot be replayed: the message names the step, the worker, the operation and the remedy."""


class Operation(NamedTuple):
    """One operation as it was recorded. A send or receive, and a collective, last until the other ends have come."""

    cell: Cell
    optype: OpType
    start_s: float
    """Seconds on a clock that all workers share; of a step's own, or of the whole run."""
    duration_s: float
    sequence: int
    """Number among the worker's operations of this type in the step, by start."""
    chunk: int = 0
    micro_batch: int = -1
    """Number of the micro-batch that is computed; -1 where there is none."""

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s

    def __str__(self) -> str:
        return f"{self.optype} {self.sequence} of cell {self.cell}"


class ReplayMessage(NamedTuple):
    """A message that was not recorded itself: between two actions that were."""

    sender: Operation
    user: Operation
    seconds: float
    """How long it was under way once both ends had come to it."""

    @property
    def optype(self) -> OpType:
        return OpType.FORWARD_SEND if self.sender.optype is OpType.FORWARD else OpType.BACKWARD_SEND

    @property
    def link(self) -> tuple[int, int]:
        return self.sender.cell.stage, self.user.cell.stage


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """One step of all workers. Raises ReplayError at construction for no operation, or times that cannot be."""

    number: int
    operations: tuple[Operation, ...]
    messages: tuple[ReplayMessage, ...] = ()
    """Where computation alone was recorded: what its actions must have sent (see `replayed_messages.with_messages`)."""
    blocking: bool | None = None
    """Whether cells wait for the end of each exchange before they compute on; None: recorded messages tell."""
    custom_placement: Placement | None = None
    """None: Megatron's."""

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
        """From the first operation's start to the last one's end."""
        return max(operation.end_s for operation in self.operations) - self.start_s

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        return tuple(sorted({operation.cell for operation in self.operations}))

    @cached_property
    def stages(self) -> int:
        return 1 + max(cell.stage for cell in self.cells)

    @cached_property
    def placement(self) -> Placement:
        """Return which stage holds which part of the model."""
        return self.custom_placement or interleaved(self.stages, 1 + max(each.chunk for each in self.operations))

    def missing(self) -> str:
        """Return what a cell did not do of what others of its replica did, in words; empty if nothing is missing."""
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
        """The operations of each cell, by start."""
        found: dict[Cell, list[Operation]] = {cell: [] for cell in self.cells}
        for operation in sorted(self.operations, key=lambda each: (each.start_s, each.end_s, each.optype)):
            found[operation.cell].append(operation)
        return found


def with_sequence_numbers(operations: Iterable[Operation]) -> tuple[Operation, ...]:
    """The same operations with `sequence` counted per cell and type, by start."""
    counts: dict[tuple[Cell, OpType], int] = {}
    found = []
    for operation in sorted(operations, key=lambda each: (each.start_s, each.end_s)):
        key = (operation.cell, operation.optype)
        found.append(operation._replace(sequence=counts.get(key, 0)))
        counts[key] = counts.get(key, 0) + 1
    return tuple(found)
