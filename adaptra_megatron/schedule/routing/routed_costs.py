# SPDX-License-Identifier: Apache-2.0
"""Define the costs of an iteration of a job whose micro-batches may pass each stage at any replica's cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from adaptra_megatron.common.layout import Cell
from adaptra_megatron.schedule.costs import CostError, Costs, LinkCost
from adaptra_megatron.schedule.jobs.job_costs import JobCosts


class RoutingError(CostError):
    """A job cannot be routed: the message names the rule, the cell or count, and the remedy."""


@dataclass(frozen=True, kw_only=True)
class RoutedCosts:
    """Costs of one iteration of a job whose cells of one stage hold the same weights.

    The seconds of a replica belong to its cells; its `Costs.micro_batch_factors` belong to its micro-batches, wherever
    these run. `links` joins cells of neighbouring stages; an unlisted link between two replicas costs the worse of the
    two replicas' own links. A rendezvous link is busy until its message has arrived.

    Raises RoutingError for a stage without a live cell, and for jobs that cannot be routed: shared queues, placements
    other than Megatron's, and several chunks. With several chunks, a cell's cap would have to keep room for later
    chunks of micro-batches from any replica; `interleaved` does that around dead cells, with few activations in flight.
    """

    job: JobCosts
    dead: frozenset[Cell] = frozenset()
    """Cells that run nothing."""
    links: Mapping[tuple[Cell, Cell], LinkCost] = field(default_factory=dict)
    staggered: bool = False
    """True: a stage starts its next iteration after its own synchronisation, without waiting for others (ReCycle's
    staggered optimizer). The period is then the longest busy time of a stage.
    """
    pinned: frozenset[int] = frozenset()
    """Stages at which each replica runs its own micro-batches."""

    def __post_init__(self) -> None:
        base = self.job.base
        if base.chunks != 1:
            raise RoutingError(
                f"replica 0 runs {base.chunks} chunks per stage: micro-batches are routed by "
                "speed with one only, for with several a cap on what a cell holds may deadlock; set chunks to 1"
            )
        if base.shared_queue or base.custom_placement is not None:
            what = "a shared queue" if base.shared_queue else "a placement of its own"
            raise RoutingError(f"replica 0 has {what}: micro-batches are routed without one")
        self._check_cells()

    def _check_cells(self) -> None:
        replicas, stages = self.job.replicas, range(self.stages)
        named = {*self.dead, *(cell for ends in self.links for cell in ends)}
        if unknown := sorted(each for each in named if each.replica not in range(replicas) or each.stage not in stages):
            raise RoutingError(
                f"cell {unknown[0]} is none of the {replicas} replicas x {self.stages} stages of the job"
            )
        for source, target in self.links:
            if abs(source.stage - target.stage) != 1:
                raise RoutingError(f"link {source}->{target} does not join cells of neighbouring stages")
        if kept := sorted(cell for cell in self.dead if cell.stage in self.pinned):
            raise RoutingError(
                f"cell {kept[0]} is dead, and its stage is pinned: its micro-batches cannot go elsewhere"
            )
        for stage in stages:
            if all(Cell(replica, stage) in self.dead for replica in range(replicas)):
                raise RoutingError(
                    f"all {replicas} cells of stage {stage} take no work: no replica has its weights, "
                    "restart from a checkpoint"
                )

    @cached_property
    def replicas(self) -> tuple[Costs, ...]:
        """Costs of each replica's own pipeline."""
        found = {replica: group.costs for group in self.job.groups for replica in group.replicas}
        return tuple(found[replica] for replica in range(self.job.replicas))

    @property
    def stages(self) -> int:
        return self.job.base.stages

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of one replica."""
        return self.job.base.micro_batches

    @property
    def job_micro_batches(self) -> int:
        """Number of micro-batches of all replicas: number m of replica d is `d * micro_batches + m`."""
        return self.job.replicas * self.micro_batches

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """All cells, dead ones included, in the order of plans: replica by replica."""
        return tuple(Cell(replica, stage) for replica in range(self.job.replicas) for stage in range(self.stages))


def seconds_of_cells(costs: Sequence[Costs], name: str) -> list[list[float]]:
    """Return seconds [replica][stage] of the table `name`; "backward_s": of whole backwards."""
    tables = (each.whole_backward_s if name == "backward_s" else getattr(each, name) for each in costs)
    return [[row[0] for row in table] for table in tables]
