# SPDX-License-Identifier: Apache-2.0
"""Figures of each iteration, for the TensorBoard and Weights & Biases writers that Megatron creates.

Megatron creates its writers only on the last rank, whereas only the leader knows links and bubbles. So the leader
sends `JobFigures` with its decisions, and a rank with a writer shows these and its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from adaptra_megatron.common.log import logger_of

logger = logger_of(__name__)

MEGATRON_VARIABLES = "megatron.training.global_vars"
LINKS_SHOWN = 16
"""Maximum number of links (or stages) for which each has a curve; the slowest link always has one."""


@dataclass(frozen=True, kw_only=True)
class LinkFigures:
    """The leader's estimates for one directed link."""

    latency_s: float
    bandwidth_bytes_s: float | None = None
    """None if unknown."""
    state: str = "healthy"


@dataclass(frozen=True, kw_only=True)
class MemoryFigures:
    """Memory of a stage, in the replica with the least room."""

    activation_nbytes: float
    """Bytes of the activations of one micro-batch of one chunk."""
    free_nbytes: float
    """Free bytes when the stage held most."""
    cap: float
    """Activations that plans allow it to hold."""


@dataclass(frozen=True, kw_only=True)
class CellFigures:
    """One stage of one replica, in a job that may route micro-batches between replicas."""

    speed: float
    """Speed relative to the fastest cell of its stage, 0..1."""
    given: int = 0
    """Micro-batches per iteration that other replicas' cells compute for it."""
    taken: int = 0
    """Micro-batches of other replicas that it computes per iteration."""


@dataclass(frozen=True, kw_only=True)
class RouteFigures:
    """The leader's routes of micro-batches between replicas."""

    cells: Mapping[tuple[int, int], CellFigures]
    """By replica and stage; in large jobs only those that straggle or are rerouted."""
    predicted_gain_s: float | None = None
    """Seconds of an iteration that the present routes save, as predicted; None if nothing is routed, or an earlier
    leader chose them."""


@dataclass(frozen=True, kw_only=True)
class ArrivalFigures:
    """Arrivals of data-parallel replicas at gradient synchronisation, found by the job's lowest rank."""

    lags_s: Sequence[Sequence[float]]
    """By stage and replica: seconds that it comes after most others, median of the latest iterations."""
    late: Collection[int] = ()
    """Replicas that persistently come last."""

    @property
    def by_cell(self) -> dict[tuple[int, int], float]:
        """Lags by replica and stage, in ascending order."""
        return {
            (replica, stage): lag_s
            for replica, column in enumerate(zip(*self.lags_s, strict=True))
            for stage, lag_s in enumerate(column)
        }


@dataclass(frozen=True, kw_only=True)
class JobFigures:
    """The leader's figures of one iteration, from the measurements of all ranks."""

    bubble_fraction: float | None = None
    """Mean over the stages, 0..1."""
    links: Mapping[tuple[int, int], LinkFigures] = field(default_factory=dict)
    memory: Mapping[int, MemoryFigures] = field(default_factory=dict)
    """By stage, if memory is measured."""
    routes: RouteFigures | None = None
    """None if micro-batches are never routed."""


@dataclass(frozen=True, kw_only=True)
class FailureMetrics:
    """Rank failures since the start of a job that recovers from them."""

    dead_cells: Collection[tuple[int, int]] = ()
    """By replica and stage."""
    ranks: int = 0
    """Number of ranks that no longer take part: those of all dead cells."""
    seconds: Mapping[int, float] = field(default_factory=dict)
    """By generation: seconds from the detection of a failure until the interrupted iteration was run again."""


@dataclass(frozen=True, kw_only=True)
class LeaderFigures:
    """A leader's figures of its plans and findings."""

    predicted_s: float | None = None
    """Predicted seconds of an iteration under the current plan; None before the first plan."""
    lower_bound_s: float | None = None
    """Proven lower bound at the same costs, in seconds."""
    saved_s: float = 0.0
    """Approximate seconds that switches of plans have saved since the start of the run."""
    stage_states: Sequence[str] = ()
    """By stage: "healthy" or "slow", the worst of its lanes."""


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """Figures of one rank's own iteration."""

    iteration_s: float
    peak_in_flight: float
    plan_number: int
    messages_by_path: Mapping[str, int] = field(default_factory=dict)
    """Messages sent since the start of the run."""
    failovers: int = 0
    """Number since the start of the run."""
    lost: FailureMetrics | None = None
    """None in a job that ends with the first failed rank."""


def scalars(
    rank: RankFigures, job: JobFigures | None = None, arrivals: ArrivalFigures | None = None
) -> dict[str, float]:
    """Return the values by tag. Tags are an interface: add, never rename."""
    values = {
        "adaptra/iteration_time_s": rank.iteration_s,
        "adaptra/peak_in_flight": rank.peak_in_flight,
        "adaptra/plan_number": rank.plan_number,
        "adaptra/failovers": rank.failovers,
    }
    values |= {f"adaptra/messages_by_{path}_path": count for path, count in rank.messages_by_path.items()}
    if rank.lost is not None:
        values["adaptra/dead_cells"] = len(rank.lost.dead_cells)
        values["adaptra/ranks_lost"] = rank.lost.ranks
        values["adaptra/seconds_lost"] = sum(rank.lost.seconds.values())
    if arrivals is not None:
        values["adaptra/longest_arrival_lag_s"] = max(0.0, *map(max, arrivals.lags_s))
        values["adaptra/late_replicas"] = len(arrivals.late)
        if sum(map(len, arrivals.lags_s)) <= LINKS_SHOWN:
            for (replica, stage), lag_s in arrivals.by_cell.items():
                values[f"adaptra/replica_{replica}_stage_{stage}/arrival_lag_s"] = lag_s
    if job is None:
        return values
    if job.bubble_fraction is not None:
        values["adaptra/bubble_fraction"] = job.bubble_fraction
    if len(job.memory) <= LINKS_SHOWN:
        for stage, memory in sorted(job.memory.items()):
            values[f"adaptra/stage_{stage}/activation_bytes"] = memory.activation_nbytes
            values[f"adaptra/stage_{stage}/free_bytes"] = memory.free_nbytes
            values[f"adaptra/stage_{stage}/activation_cap"] = memory.cap
    if job.routes is not None and (cells := job.routes.cells.values()):
        values["adaptra/slowest_cell_speed"] = min(cell.speed for cell in cells)
        values["adaptra/micro_batches_routed"] = sum(cell.given for cell in cells)
    if job.links:
        values["adaptra/slowest_link_latency_s"] = max(link.latency_s for link in job.links.values())
        values["adaptra/links_not_healthy"] = sum(link.state != "healthy" for link in job.links.values())
    if len(job.links) <= LINKS_SHOWN:
        for (source, target), link in sorted(job.links.items()):
            values[f"adaptra/link_{source}_to_{target}/latency_s"] = link.latency_s
            if link.bandwidth_bytes_s is not None:
                values[f"adaptra/link_{source}_to_{target}/bandwidth_bytes_s"] = link.bandwidth_bytes_s
    return values


class ScalarWriters:
    """Writes values to the given writers.

    Never raises: a writer that fails is left out from then on, after one warning.
    """

    def __init__(
        self,
        *,
        tensorboard: Any = None,
        wandb: Any = None,
        interval: int = 1,
    ) -> None:
        """`tensorboard`: torch's SummaryWriter. `wandb`: that module, which is Megatron's writer.

        `interval`: iterations between two sets of values (Megatron's --tensorboard-log-interval).
        """
        self._writers: list[tuple[str, Callable[[dict[str, float], int], Any]]] = []
        if tensorboard is not None:
            self._writers.append(("TensorBoard", _each_by(tensorboard)))
        if wandb is not None:
            self._writers.append(("Weights & Biases", wandb.log))
        self._interval = max(1, interval)

    def __bool__(self) -> bool:
        """Return whether there is a writer; if not, figures need not be gathered."""
        return bool(self._writers)

    def due(self, step: int) -> bool:
        """Return whether values of `step` would be written."""
        return bool(self._writers) and step % self._interval == 0

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write `values` at `step`, Megatron's number of the iteration (from 1). Steps must not decrease."""
        if not self.due(step):
            return
        for name, write in list(self._writers):
            try:
                write(dict(values), step)
            except Exception as error:  # of a third party; whatever it is, training matters more
                self._writers.remove((name, write))
                logger.warning("no more scalars to %s (%s); training goes on", name, error)


def megatron_writers(modules: Mapping[str, Any] | None = None) -> ScalarWriters:
    """Return writers that use this process's Megatron writers; none if the script has none or is not Megatron's.

    Imports nothing: Megatron's own scripts have loaded `megatron.training`, other scripts have no such writers.
    """
    variables = (sys.modules if modules is None else modules).get(MEGATRON_VARIABLES)
    if variables is None:
        return ScalarWriters()
    arguments = getattr(variables, "_GLOBAL_ARGS", None)
    return ScalarWriters(
        tensorboard=variables.get_tensorboard_writer(),
        wandb=variables.get_wandb_writer(),
        interval=getattr(arguments, "tensorboard_log_interval", 1),
    )


def megatron_step(fallback: int, modules: Mapping[str, Any] | None = None) -> int:
    """Return the number under which Megatron logs the current iteration: from 1, continued after restarts.

    `fallback`: returned if the script is not Megatron's.
    """
    variables = (sys.modules if modules is None else modules).get(MEGATRON_VARIABLES)
    iteration = getattr(getattr(variables, "_GLOBAL_ARGS", None), "curr_iteration", None)
    return fallback if iteration is None else iteration + 1


def _each_by(tensorboard: Any) -> Callable[[dict[str, float], int], None]:
    def write(values: dict[str, float], step: int) -> None:
        for tag, value in values.items():
            tensorboard.add_scalar(tag, value, step)

    return write
