# SPDX-License-Identifier: Apache-2.0
"""Define the costs of an iteration of a job whose micro-batches may pass each stage at any replica's cell."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from adaptra_megatron.common.layout import Cell
from adaptra_megatron.schedule.costs import CostError, Costs, LinkCost, is_number
from adaptra_megatron.schedule.jobs.job_costs import JobCosts


class RoutingError(CostError):
    """A job cannot be routed: the message names the rule, the cell or count, and the remedy."""


@dataclass(frozen=True, kw_only=True)
class RoutedCosts:
    """Costs of one iteration of a job whose cells of one stage hold the same weights.

    `replicas[d]` are the costs of replica d's own pipeline: its seconds are those of its cells, and its
    `Costs.micro_batch_factors` are those of its micro-batches, wherever they run. `links` joins cells of neighbouring
    stages; an unlisted link between two replicas costs the worse of the two replicas' own links. A rendezvous link is
    busy until its message has arrived. `sync_s[stage]` are seconds after the last action of a stage (gradient
    synchronisation and optimizer step).

    Raises RoutingError for a stage without a live cell, and for jobs that cannot be routed: shared queues, placements
    other than Megatron's, and several chunks. With several chunks, a cell's cap would have to keep room for later
    chunks of micro-batches from any replica; `interleaved` does so around dead cells, with few activations in flight.
    """

    replicas: tuple[Costs, ...]
    dead: frozenset[Cell] = frozenset()
    """Cells that run nothing."""
    links: Mapping[tuple[Cell, Cell], LinkCost] = field(default_factory=dict)
    sync_s: tuple[float, ...] = ()
    staggered: bool = False
    """True: a stage starts its next iteration after its own synchronisation, without waiting for others (ReCycle's
    staggered optimizer). The period is then the longest busy time of a stage.
    """
    pinned: frozenset[int] = frozenset()
    """Stages at which each replica runs its own micro-batches."""

    def __post_init__(self) -> None:
        if not self.replicas:
            raise RoutingError("a job needs at least one replica")
        first = self.replicas[0]
        for replica, costs in enumerate(self.replicas):
            if (costs.stages, costs.micro_batches) != (first.stages, first.micro_batches):
                raise RoutingError(
                    f"replica {replica} has {costs.stages} stages and {costs.micro_batches} micro-batches, replica 0 "
                    f"has {first.stages} and {first.micro_batches}: cells can only help each other where these agree"
                )
            if costs.chunks != 1:
                raise RoutingError(
                    f"replica {replica} runs {costs.chunks} chunks per stage: micro-batches are routed by "
                    "speed with one only, for with several a cap on what a cell holds may deadlock; set chunks to 1"
                )
            if costs.shared_queue or costs.custom_placement is not None:
                what = "a shared queue" if costs.shared_queue else "a placement of its own"
                raise RoutingError(f"replica {replica} has {what}: micro-batches are routed without one")
            if (costs.backward_s is None) != (first.backward_s is None):
                raise RoutingError(f"backward_s of replica {replica} and of replica 0 must both be given, or neither")
        self._check_cells()
        if not self.sync_s:
            object.__setattr__(self, "sync_s", (0.0,) * self.stages)
        if len(self.sync_s) != self.stages or not all(is_number(each) and each >= 0 for each in self.sync_s):
            raise RoutingError(f"sync_s must have seconds >= 0 for each of {self.stages} stages, got {self.sync_s!r}")

    def _check_cells(self) -> None:
        known = {Cell(replica, stage) for replica in range(len(self.replicas)) for stage in range(self.stages)}
        named = {*self.dead, *(cell for ends in self.links for cell in ends)}
        if unknown := sorted(named - known):
            raise RoutingError(
                f"cell {unknown[0]} is none of the {len(self.replicas)} replicas x {self.stages} stages of the job"
            )
        for source, target in self.links:
            if abs(source.stage - target.stage) != 1:
                raise RoutingError(f"link {source}->{target} does not join cells of neighbouring stages")
        if kept := sorted(cell for cell in self.dead if cell.stage in self.pinned):
            raise RoutingError(
                f"cell {kept[0]} is dead, and its stage is pinned: its micro-batches cannot go elsewhere"
            )
        for stage in range(self.stages):
            if all(Cell(replica, stage) in self.dead for replica in range(len(self.replicas))):
                raise RoutingError(
                    f"all {len(self.replicas)} cells of stage {stage} take no work: no replica has its weights, "
                    "restart from a checkpoint"
                )

    @property
    def stages(self) -> int:
        return self.replicas[0].stages

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of one replica."""
        return self.replicas[0].micro_batches

    @property
    def job_micro_batches(self) -> int:
        """Number of micro-batches of all replicas: number m of replica d is `d * micro_batches + m`."""
        return len(self.replicas) * self.micro_batches

    @property
    def cells(self) -> tuple[Cell, ...]:
        """All cells, dead ones included, in the order of plans: replica by replica."""
        return tuple(Cell(replica, stage) for replica in range(len(self.replicas)) for stage in range(self.stages))


def routed_costs(
    job: JobCosts,
    *,
    dead: Collection[Cell] = (),
    links: Mapping[tuple[Cell, Cell], LinkCost] | None = None,
    staggered: bool = False,
) -> RoutedCosts:
    """Return the costs of `job`'s replicas with dead cells. Raises RoutingError as `RoutedCosts`."""
    return RoutedCosts(
        replicas=replica_costs(job),
        dead=frozenset(dead),
        links=links or {},
        sync_s=job.gradient_sync_s,
        staggered=staggered,
    )


def replica_costs(job: JobCosts) -> tuple[Costs, ...]:
    """Return the costs of each replica of `job`."""
    found: dict[int, Costs] = {replica: group.costs for group in job.groups for replica in group.replicas}
    return tuple(found[replica] for replica in range(job.replicas))


def seconds_of_cells(costs: Sequence[Costs], name: str) -> list[list[float]]:
    """Return seconds [replica][stage] of the table `name`; "backward_s": of whole backwards."""
    tables = (each.whole_backward_s if name == "backward_s" else getattr(each, name) for each in costs)
    return [[row[0] for row in table] for table in tables]
