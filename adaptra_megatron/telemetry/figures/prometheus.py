# SPDX-License-Identifier: Apache-2.0
"""The figures of one rank for a Prometheus server to fetch. Off unless a port is given.

Needs prometheus_client (`pip install 'adaptra-megatron[metrics]'`), imported when an endpoint is opened. What is served
names no secret and takes no input, but all that reaches the port can read it: it is bound to this host alone
unless another address is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from adaptra_megatron.telemetry.figures.scalars import JobFigures, LossFigures, RankFigures, RouteFigures

if TYPE_CHECKING:
    from prometheus_client.core import Metric

LOOPBACK = "127.0.0.1"
_Values = Mapping[tuple[str, ...], float]
"""By the values of a metric's own labels."""


class PrometheusError(RuntimeError):
    """The endpoint cannot be opened; names the flag or the package and the remedy."""


@dataclass(frozen=True, kw_only=True)
class _Snapshot:
    iterations: int
    rank: RankFigures
    job: JobFigures


class PrometheusEndpoint:
    """Serves what `show` was last given at http://ADDRESS:PORT/metrics, from a thread of its own."""

    def __init__(self, port: int, address: str = LOOPBACK, *, labels: Mapping[str, str] | None = None) -> None:
        """`port` 0 takes any free one. `labels` are on every metric, such as rank and stage. Raises PrometheusError."""
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError as error:
            raise PrometheusError(
                "a Prometheus port needs the package prometheus-client: pip install 'adaptra-megatron[metrics]'"
            ) from error
        self._labels = dict(labels or {})
        self._snapshot: _Snapshot | None = None
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

    def show(self, iterations: int, rank: RankFigures, job: JobFigures | None = None) -> None:
        """Serve these from now on; `iterations`: how many are done. Keeps the job's figures where there are no new."""
        kept = self._snapshot.job if self._snapshot is not None else JobFigures()
        self._snapshot = _Snapshot(iterations=iterations, rank=rank, job=kept if job is None else job)

    def close(self) -> None:
        """Stop serving. May be called twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)

    def collect(self) -> Iterator[Metric]:
        """What prometheus_client asks for at each request. Names of metrics are an interface: add, never rename."""
        snapshot = self._snapshot
        if snapshot is None:
            return
        rank, job = snapshot.rank, snapshot.job
        counter, gauge = self._counter, self._gauge
        yield counter("adaptra_iterations", "Training iterations done.", {(): snapshot.iterations})
        yield gauge("adaptra_iteration_seconds", "Duration of the last iteration.", {(): rank.iteration_s})
        yield gauge("adaptra_peak_in_flight", "Most activations held at once.", {(): rank.peak_in_flight})
        yield gauge("adaptra_plan_number", "The plan that runs; 0 is stock's order.", {(): rank.plan_number})
        yield counter("adaptra_failovers", "Links that changed path because one failed.", {(): rank.failovers})
        sent: _Values = {(path,): count for path, count in rank.messages_by_path.items()}
        yield counter("adaptra_messages", "Messages sent.", sent, ("path",))
        if rank.lost is not None:
            yield from self._lost(rank.lost)
        if job.bubble_fraction is not None:
            yield gauge("adaptra_bubble_ratio", "Idle part of an iteration, 0..1.", {(): job.bubble_fraction})
        ends = {(str(source), str(target)): link for (source, target), link in job.links.items()}
        latencies: _Values = {pair: link.latency_s for pair, link in ends.items()}
        yield gauge("adaptra_link_latency_seconds", "Estimated one-way latency.", latencies, ("from", "to"))
        known: _Values = {
            pair: link.bandwidth_bytes_s for pair, link in ends.items() if link.bandwidth_bytes_s is not None
        }
        yield gauge("adaptra_link_bandwidth_bytes_per_second", "Estimated bandwidth.", known, ("from", "to"))
        states: _Values = {(*pair, link.state): 1.0 for pair, link in ends.items()}
        yield gauge("adaptra_link_state", "1 for the state a link is in.", states, ("from", "to", "state"))
        yield from self._memory(job)
        if job.routes is not None:
            yield from self._routes(job.routes)

    def _lost(self, lost: LossFigures) -> Iterator[Metric]:
        """Ranks and cells that have died, and what that cost."""
        yield self._gauge("adaptra_dead_cells", "Cells that have died so far.", {(): len(lost.dead_cells)})
        yield self._gauge("adaptra_ranks_lost", "Ranks that take no part any more.", {(): lost.ranks})
        dead: _Values = {tuple(map(str, cell)): 1.0 for cell in lost.dead_cells}
        yield self._gauge("adaptra_cell_dead", "1 for a cell that has died.", dead, ("of_replica", "of_stage"))
        seconds: _Values = {(str(epoch),): each for epoch, each in lost.seconds.items()}
        help_text = "From when a loss was seen until what was under way had been done again."
        yield self._gauge("adaptra_loss_seconds", help_text, seconds, ("epoch",))

    def _memory(self, job: JobFigures) -> Iterator[Metric]:
        """Memory of the stages where it is measured."""
        figures = (
            ("adaptra_activation_bytes", "What one activation takes.", "activation_nbytes"),
            ("adaptra_free_bytes", "Left when the stage held most.", "free_nbytes"),
            ("adaptra_activation_cap", "Activations a stage may hold.", "cap"),
        )
        for name, help_text, field in figures:
            values: _Values = {(str(stage),): getattr(memory, field) for stage, memory in sorted(job.memory.items())}
            yield self._gauge(name, help_text, values, ("of_stage",))

    def _routes(self, routes: RouteFigures) -> Iterator[Metric]:
        """Speeds of cells, and the micro-batches that pass a stage at another replica's."""
        figures = (
            ("adaptra_cell_speed_ratio", "Speed of a cell beside the fastest of its stage, 0..1.", "speed"),
            ("adaptra_cell_micro_batches_given", "Computed by other replicas, in an iteration.", "given"),
            ("adaptra_cell_micro_batches_taken", "Computed for other replicas, in an iteration.", "taken"),
        )
        for name, help_text, field in figures:
            values: _Values = {tuple(map(str, place)): getattr(cell, field) for place, cell in routes.cells.items()}
            yield self._gauge(name, help_text, values, ("of_replica", "of_stage"))
        if (gain_s := routes.predicted_gain_s) is not None:
            yield self._gauge("adaptra_routes_predicted_gain_seconds", "Saved of an iteration.", {(): gain_s})

    def _gauge(self, name: str, help_text: str, values: _Values, labels: tuple[str, ...] = ()) -> Metric:
        from prometheus_client.core import GaugeMetricFamily

        family = GaugeMetricFamily(name, help_text, labels=(*self._labels, *labels))
        for own, value in values.items():
            family.add_metric((*self._labels.values(), *own), value)
        return family

    def _counter(self, name: str, help_text: str, values: _Values, labels: tuple[str, ...] = ()) -> Metric:
        from prometheus_client.core import CounterMetricFamily

        family = CounterMetricFamily(name, help_text, labels=(*self._labels, *labels))
        for own, value in values.items():
            family.add_metric((*self._labels.values(), *own), value)
        return family
