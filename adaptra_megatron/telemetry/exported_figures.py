# SPDX-License-Identifier: Apache-2.0
"""Export the metrics of one rank to Prometheus and OpenTelemetry.

The Prometheus endpoint is off unless a port is given. It needs prometheus_client (`pip install
'adaptra-megatron[metrics]'`), imported when it is opened. It serves no secret and takes no input, but anyone who can
reach the port can read it. By default it only listens on this host's loopback address.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from adaptra_megatron.telemetry.scalars import (
    ArrivalFigures,
    FailureMetrics,
    JobFigures,
    LeaderFigures,
    RankFigures,
)

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_Values = Mapping[tuple[str, ...], float]
"""By the values of a metric's own labels."""


class MetricSpec(NamedTuple):
    """Definition of one metric."""

    meaning: str
    labels: tuple[str, ...] = ()
    """Its own labels, without those of the rank or the job."""
    counter: bool = False
    """Counters are exported with `_total` appended to the name; all others are gauges."""
    of_job: bool = False
    """Exported only by the leader of a replica, and labelled with the replica instead of rank and stage."""


_LINK, _CELL, _STAGE = ("from", "to", "from_host", "to_host"), ("of_replica", "of_stage"), ("of_stage",)

METRICS: Mapping[str, MetricSpec] = {
    "adaptra_info": MetricSpec("1; its labels say what runs.", ("version", "run", "policy")),
    "adaptra_iterations": MetricSpec("Training iterations done.", counter=True),
    "adaptra_iteration_seconds": MetricSpec("Duration of the last iteration."),
    "adaptra_peak_in_flight": MetricSpec("Most activations held at once."),
    "adaptra_plan_number": MetricSpec("The plan that runs; 0 is stock's order."),
    "adaptra_failovers": MetricSpec("Links that changed path because one failed.", counter=True),
    "adaptra_messages": MetricSpec("Messages sent.", ("path",), counter=True),
    "adaptra_dead_cells": MetricSpec("Cells that have died so far."),
    "adaptra_ranks_lost": MetricSpec("Ranks that take no part any more."),
    "adaptra_cell_dead": MetricSpec("1 for a cell that has died.", _CELL),
    "adaptra_loss_seconds": MetricSpec(
        "From when a loss was seen until what was under way had been done again.", ("epoch",)
    ),
    "adaptra_arrival_lag_seconds": MetricSpec(
        "By how much a cell comes to gradient synchronisation after most others of its stage.", _CELL
    ),
    "adaptra_replica_late": MetricSpec("1 for a replica that persistently comes last.", ("of_replica",)),
    "adaptra_bubble_ratio": MetricSpec("Idle part of an iteration, 0..1, mean over the stages.", of_job=True),
    "adaptra_predicted_seconds": MetricSpec("An iteration as the plan in force predicts it.", of_job=True),
    "adaptra_lower_bound_seconds": MetricSpec("Proven least time of an iteration at the plan's costs.", of_job=True),
    "adaptra_saved_seconds": MetricSpec(
        "Saved by switches of plans, about: what both forecast and measurement promise.", counter=True, of_job=True
    ),
    "adaptra_stage_state": MetricSpec("1 for the state a stage is in.", (*_STAGE, "host", "state"), of_job=True),
    "adaptra_link_latency_seconds": MetricSpec("Estimated one-way latency.", _LINK, of_job=True),
    "adaptra_link_bandwidth_bytes_per_second": MetricSpec("Estimated bandwidth.", _LINK, of_job=True),
    "adaptra_link_state": MetricSpec("1 for the state a link is in.", (*_LINK, "state"), of_job=True),
    "adaptra_activation_bytes": MetricSpec("What one activation takes.", _STAGE, of_job=True),
    "adaptra_free_bytes": MetricSpec("Left when the stage held most.", _STAGE, of_job=True),
    "adaptra_activation_cap": MetricSpec("Activations a stage may hold.", _STAGE, of_job=True),
    "adaptra_cell_speed_ratio": MetricSpec(
        "Speed of a cell relative to the fastest of its stage, 0..1.", _CELL, of_job=True
    ),
    "adaptra_cell_micro_batches_given": MetricSpec("Computed by other replicas, in an iteration.", _CELL, of_job=True),
    "adaptra_cell_micro_batches_taken": MetricSpec("Computed for other replicas, in an iteration.", _CELL, of_job=True),
    "adaptra_routes_predicted_gain_seconds": MetricSpec("Saved of an iteration by the present routes.", of_job=True),
}
"""By name. Names and labels are an interface: add, never rename."""

_MEMORY = {
    "adaptra_activation_bytes": "activation_nbytes",
    "adaptra_free_bytes": "free_nbytes",
    "adaptra_activation_cap": "cap",
}
_CELLS = {
    "adaptra_cell_speed_ratio": "speed",
    "adaptra_cell_micro_batches_given": "given",
    "adaptra_cell_micro_batches_taken": "taken",
}


@dataclass(frozen=True, kw_only=True)
class _Snapshot:
    iterations: int
    rank: RankFigures
    job: JobFigures
    leader: LeaderFigures | None
    arrivals: ArrivalFigures | None


class Samples(NamedTuple):
    """All values of one metric."""

    name: str
    """Key in METRICS."""
    labels: tuple[str, ...]
    """Names of the labels, those of the rank or the job first."""
    values: Mapping[tuple[str, ...], float]
    """By the values of these labels."""


class ExportedFigures:
    """The latest figures. The training thread sets them, other threads export them."""

    def __init__(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        job_labels: Mapping[str, str] | None = None,
        info: Mapping[str, str] | None = None,
        stage_hosts: Sequence[str] = (),
    ) -> None:
        """`labels`: of the rank's metrics, such as rank and stage. `job_labels`: of the job's metrics. `info`:
        values of the labels of `adaptra_info`. `stage_hosts`: host of each stage."""
        self._labels, self._job_labels = dict(labels or {}), dict(job_labels or {})
        self._info = {name: (info or {}).get(name, "") for name in METRICS["adaptra_info"].labels}
        self._snapshot: _Snapshot | None = None
        self._stage_hosts = tuple(stage_hosts)

    def _host(self, stage: int) -> str:
        return self._stage_hosts[stage] if stage < len(self._stage_hosts) else ""

    def show(
        self,
        iterations: int,
        rank: RankFigures,
        job: JobFigures | None = None,
        leader: LeaderFigures | None = None,
        arrivals: ArrivalFigures | None = None,
    ) -> None:
        """Replace the exported figures. `iterations`: number of finished iterations. `job`: None keeps the last ones;
        only a leader, which passes `leader`, exports them. `arrivals`: of the rank that finds stragglers."""
        kept = self._snapshot.job if self._snapshot is not None else JobFigures()
        shown = kept if job is None else job
        self._snapshot = _Snapshot(iterations=iterations, rank=rank, job=shown, leader=leader, arrivals=arrivals)

    def samples(self) -> Iterator[Samples]:
        """Yield the present value of every metric; nothing before the end of the first iteration."""
        snapshot = self._snapshot
        if snapshot is None:
            return
        rank = snapshot.rank
        yield self._samples("adaptra_info", {tuple(self._info.values()): 1.0})
        yield self._samples("adaptra_iterations", {(): snapshot.iterations})
        yield self._samples("adaptra_iteration_seconds", {(): rank.iteration_s})
        yield self._samples("adaptra_peak_in_flight", {(): rank.peak_in_flight})
        yield self._samples("adaptra_plan_number", {(): rank.plan_number})
        yield self._samples("adaptra_failovers", {(): rank.failovers})
        yield self._samples("adaptra_messages", {(path,): count for path, count in rank.messages_by_path.items()})
        if rank.lost is not None:
            yield from self._lost(rank.lost)
        if snapshot.arrivals is not None:
            yield from self._of_arrivals(snapshot.arrivals)
        if snapshot.leader is not None:
            yield from self._of_job(snapshot.job)
            yield from self._of_leader(snapshot.leader)

    def _of_arrivals(self, arrivals: ArrivalFigures) -> Iterator[Samples]:
        """Yield which replicas come last to gradient synchronisation, and each cell's lag in seconds."""
        lags_s: _Values = {tuple(map(str, cell)): lag_s for cell, lag_s in arrivals.by_cell.items()}
        yield self._samples("adaptra_arrival_lag_seconds", lags_s)
        yield self._samples("adaptra_replica_late", {(str(replica),): 1.0 for replica in arrivals.late})

    def _of_job(self, job: JobFigures) -> Iterator[Samples]:
        """Yield the figures that the leader derives from all ranks' measurements: bubble, links, stages."""
        if job.bubble_fraction is not None:
            yield self._samples("adaptra_bubble_ratio", {(): job.bubble_fraction})
        ends = {
            (str(source), str(target), self._host(source), self._host(target)): link
            for (source, target), link in job.links.items()
        }
        yield self._samples("adaptra_link_latency_seconds", {pair: link.latency_s for pair, link in ends.items()})
        known: _Values = {
            pair: link.bandwidth_bytes_s for pair, link in ends.items() if link.bandwidth_bytes_s is not None
        }
        yield self._samples("adaptra_link_bandwidth_bytes_per_second", known)
        yield self._samples("adaptra_link_state", {(*pair, link.state): 1.0 for pair, link in ends.items()})
        for name, field in _MEMORY.items():
            values: _Values = {(str(stage),): getattr(memory, field) for stage, memory in sorted(job.memory.items())}
            yield self._samples(name, values)
        if job.routes is not None:
            for name, field in _CELLS.items():
                cells = job.routes.cells.items()
                yield self._samples(name, {tuple(map(str, place)): getattr(cell, field) for place, cell in cells})
            if (gain_s := job.routes.predicted_gain_s) is not None:
                yield self._samples("adaptra_routes_predicted_gain_seconds", {(): gain_s})

    def _of_leader(self, leader: LeaderFigures) -> Iterator[Samples]:
        """Yield the times that plans predict and have saved, and the states of stages."""
        if leader.predicted_s is not None:
            yield self._samples("adaptra_predicted_seconds", {(): leader.predicted_s})
        if leader.lower_bound_s is not None:
            yield self._samples("adaptra_lower_bound_seconds", {(): leader.lower_bound_s})
        yield self._samples("adaptra_saved_seconds", {(): leader.saved_s})
        states: _Values = {
            (str(stage), self._host(stage), state): 1.0 for stage, state in enumerate(leader.stage_states)
        }
        yield self._samples("adaptra_stage_state", states)

    def _lost(self, lost: FailureMetrics) -> Iterator[Samples]:
        """Yield the failed ranks and cells, and the seconds that each failure cost."""
        yield self._samples("adaptra_dead_cells", {(): len(lost.dead_cells)})
        yield self._samples("adaptra_ranks_lost", {(): lost.ranks})
        yield self._samples("adaptra_cell_dead", {tuple(map(str, cell)): 1.0 for cell in lost.dead_cells})
        yield self._samples("adaptra_loss_seconds", {(str(epoch),): each for epoch, each in lost.seconds.items()})

    def _samples(self, name: str, values: _Values) -> Samples:
        described = METRICS[name]
        own = self._job_labels if described.of_job else self._labels
        labelled = {(*own.values(), *labels): value for labels, value in values.items()}
        return Samples(name, (*own, *described.labels), labelled)


class PrometheusError(RuntimeError):
    """The endpoint cannot be opened. Names the flag or the package, and the remedy."""


class PrometheusEndpoint:
    """Serves figures at http://ADDRESS:PORT/metrics, from a thread of its own."""

    def __init__(self, figures: ExportedFigures, port: int, address: str = "127.0.0.1") -> None:
        """Open the endpoint. `port`: 0 for any free one. Raises PrometheusError."""
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError as error:
            raise PrometheusError(
                "a Prometheus port needs the package prometheus-client: pip install 'adaptra-megatron[metrics]'"
            ) from error
        self._figures = figures
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, address, registry)
        except (OSError, OverflowError) as error:
            raise PrometheusError(
                f"cannot serve Prometheus metrics at {address}:{port}: {error}; name a free port, and an address of "
                "this host"
            ) from error

    @property
    def port(self) -> int:
        """Port that the server listens on."""
        return int(self._server.server_port)

    def close(self) -> None:
        """Stop serving. May be called twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, for prometheus_client at each request."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, labels, values in self._figures.samples():
            family_type = CounterMetricFamily if METRICS[name].counter else GaugeMetricFamily
            family = family_type(name, METRICS[name].meaning, labels=labels)
            for each, value in values.items():
                family.add_metric(each, value)
            yield family
