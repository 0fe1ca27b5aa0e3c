# SPDX-License-Identifier: Apache-2.0
"""Collect the measurements of one rank's iterations, for later plans, traces and telemetry."""

from __future__ import annotations

import os
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from adaptra_megatron import __version__
from adaptra_megatron.common.layout import JobLayout
from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.control.exchange import PlanExchange
from adaptra_megatron.control.measurements import stage_measurement
from adaptra_megatron.control.stage_memory import StageMemory
from adaptra_megatron.engine.dispatch import Dispatcher
from adaptra_megatron.engine.execution.executor import IterationReport
from adaptra_megatron.engine.iteration_hooks import IterationHooks
from adaptra_megatron.engine.link_steering import FixedPaths
from adaptra_megatron.engine.training_job import Job
from adaptra_megatron.megatron.compat import megatron_version
from adaptra_megatron.megatron.megatron_call import PipelineCall
from adaptra_megatron.schedule.ir import Kind
from adaptra_megatron.telemetry.action_records import ArrivalRecord
from adaptra_megatron.telemetry.changes import PathState
from adaptra_megatron.telemetry.events import RunStarted
from adaptra_megatron.telemetry.run_telemetry import RankPlace, RunTelemetry, TelemetrySettings
from adaptra_megatron.telemetry.scalars import RankFigures
from adaptra_megatron.transport.gpu.training_device import current_device
from adaptra_megatron.transport.link_paths import PathCounters
from adaptra_megatron.transport.message_keys import Direction, MessageTimes, Transport, TwoPathTransport

MOST_HOSTS = 4
"""Maximum number of a stage's hosts in a label."""
_KINDS = {Direction.ACTIVATION: "F", Direction.GRADIENT: "B"}


def running_versions() -> dict[str, str]:
    """Return the versions of the imported packages, which may differ from the installed ones: Megatron often runs from
    source.
    """
    return {
        "adaptra-megatron": __version__,
        "megatron-core": megatron_version(),
        "torch": torch.__version__,
    }


def make_telemetry(job: Job, chunks: int, config: AdaptraConfig, *, goes_on: bool) -> RunTelemetry:
    """Return this rank's telemetry. `goes_on`: whether this process replaces a failed rank.

    Raises prometheus.PrometheusError if a requested endpoint cannot be opened, and open_telemetry.OpenTelemetryError if
    a requested export is not possible.
    """
    layout = job.layout
    settings = TelemetrySettings(
        trace_dir=config.trace_dir,
        every_iteration=config.trace == "all",
        prometheus_port=config.prometheus_port,
        prometheus_address=config.prometheus_address,
        otel=config.otel,
        goes_on=goes_on,
    )
    place = RankPlace(
        run=layout.token,
        rank=layout.rank,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        stage=layout.cell.stage,
        replica=layout.cell.replica,
        leads=layout.rank == layout.leader,
        decides_apart=layout.decides_apart,
        clock_offset_s=job.clock.first_offset_s,
        stage_hosts=tuple(_hosts_of(layout, stage) for stage in range(len(layout.pipeline))),
    )
    start = RunStarted(
        layout={
            "stages": len(layout.pipeline),
            "chunks": chunks,
            "world_size": len(layout.workers),
            "replica": layout.cell.replica,
        },
        versions=running_versions(),
        config={name: str(value) if isinstance(value, Path) else value for name, value in asdict(config).items()},
        host=platform.node(),
    )
    return RunTelemetry(settings, place, start)


def _hosts_of(layout: JobLayout, stage: int) -> str:
    """Return the hosts of a stage in this rank's replica; if there are many, the first ones and the number of
    others.
    """
    cell = layout.cells[layout.cell._replace(stage=stage)]
    hosts = list(dict.fromkeys(layout.workers[rank].host for rank in cell))
    more = f" +{len(hosts) - MOST_HOSTS}" if len(hosts) > MOST_HOSTS else ""
    return ",".join(hosts[:MOST_HOSTS]) + more


def arrival_records(stage: int, received: Sequence[MessageTimes]) -> list[ArrivalRecord]:
    """Return the arrival times of messages at `stage`, for its trace."""
    return [
        ArrivalRecord(
            entry.key.iteration,
            entry.peer,
            stage,
            _KINDS[entry.key.direction],
            entry.key.chunk,
            entry.key.micro_batch,
            entry.done_s,
        )
        for entry in received
    ]


def rank_figures(transport: Transport, report: IterationReport, plan_number: int, seconds: float) -> RankFigures:
    """Return the figures of a training iteration that took `seconds`, for TensorBoard and Prometheus."""
    links = _paths(transport).values()
    by_path = {
        "device": sum(link.sent_by_device for link in links),
        "host": sum(link.sent_by_host for link in links),
    }
    return RankFigures(
        iteration_s=seconds,
        peak_in_flight=report.peak_in_flight,
        plan_number=plan_number,
        messages_by_path=by_path if links else {},
    )


def path_states(transport: Transport, ranks: Sequence[int]) -> tuple[dict[int, PathState], int | None]:
    """Return the state of links with two paths, by the peer's stage, and how often the delegate was started, if any.

    `ranks`: of the pipeline.
    """
    states = {
        ranks.index(peer): PathState(link.path.value, link.switches, link.sessions_lost)
        for peer, link in _paths(transport).items()
        if peer in ranks
    }
    return states, transport.delegate_starts if isinstance(transport, TwoPathTransport) else None


def _paths(transport: Transport) -> Mapping[int, PathCounters]:
    if not isinstance(transport, TwoPathTransport):
        return {}
    return {peer: counters.paths for peer, counters in transport.link_counters().items() if counters.paths is not None}


# Megatron's own timers of compute and communication (`--timing-log-level 2`), while actions run in our order.
# Its forward_step and backward_step start 'forward-compute' and 'backward-compute' here as in stock. What stock
# times in other functions is added from what was measured anyway: waiting for messages as 'forward-recv' and
# 'backward-recv', weight gradients as part of 'backward-compute'. No rank waits for sends, so there are no times of
# them.

_LEVEL = 2
"""Log level of timers of single actions; those of whole iterations have level 1."""


def add_times(timers: Any, report: IterationReport) -> None:
    """Add the times of one iteration to `timers` (megatron.core.timers.Timers), if their log level includes them."""
    if timers._log_level < _LEVEL:
        return  # what it would hand out stands for all that are not logged
    spent_s: dict[str, float] = defaultdict(float)
    for step, record in zip(report.steps, report.records, strict=True):
        kind = step.action.kind
        if step.receive is not None:
            spent_s["forward-recv" if kind is Kind.FORWARD else "backward-recv"] += record.wait_s
        if kind is Kind.BACKWARD_WEIGHT:
            spent_s["backward-compute"] += record.compute_s
    for name, seconds in spent_s.items():
        timer = timers(name, log_level=_LEVEL)
        timer._elapsed += seconds
        timer._active_time += seconds


def _wait_for_current_stream(device: Any = None) -> None:
    torch.cuda.current_stream(device).synchronize()


@contextmanager
def waiting_for_computation_alone(wait: Callable[..., None] = _wait_for_current_stream) -> Iterator[None]:
    """Make torch.cuda.synchronize() `wait` for the current stream alone within this context, not for the whole device.

    Receives are posted before their messages are sent. In the middle of an iteration, waiting for the whole device
    would include messages that peers have yet to compute, and Megatron's timers would count that as computation.
    """
    whole_device, torch.cuda.synchronize = torch.cuda.synchronize, wait
    try:
        yield
    finally:
        torch.cuda.synchronize = whole_device


SentAndReceived = tuple[Sequence[MessageTimes], Sequence[MessageTimes]]


class EndedIteration(NamedTuple):
    """A launched iteration; on the CPU it has also run."""

    call: PipelineCall
    report: IterationReport
    iteration: int
    training_iteration: int
    begun_s: float
    disturbance: str | None
    memory: StageMemory | None
    seconds: float = 0.0


class Measuring:
    """Passes on the measurements of iterations: at once on the CPU, on a GPU when the next iteration begins."""

    def __init__(
        self,
        job: Job,
        transport: Transport,
        dispatcher: Dispatcher,
        telemetry: RunTelemetry,
        hooks: Sequence[IterationHooks] = (),
        work: tuple[str, ...] = (),
    ) -> None:
        """All arguments are this rank's. `work`: see StageMeasurement."""
        self._work = work
        self._job, self._transport, self._dispatcher, self._telemetry = job, transport, dispatcher, telemetry
        self._hooks = hooks
        self.unsettled: EndedIteration | None = None
        """Latest iteration, until its measurements are passed on."""
        self.switch_s = 0.0
        """See StageMeasurement."""

    def settle(self, exchange: PlanExchange, steering: FixedPaths) -> None:
        """Pass on and trace the measurements of the latest iteration; wait for the device if it is still busy with it.

        `steering`: of this rank's links.
        """
        ended, self.unsettled = self.unsettled, None
        if ended is None:
            return
        call, records = ended.call, ended.report.records  # which relates the clocks that the transport tells by
        addresses, (sent, received) = ended.report.addresses, self._transport.take_times()
        nbytes = addresses.nbytes((*sent, *received))
        times = addresses.in_pipeline(sent), addresses.in_pipeline(received)
        arrivals = arrival_records(call.stage, times[1])
        if not call.forward_only:
            self.hand_in(exchange, steering, ended, times, nbytes)
            self._dispatcher.ran(ended.report.steps, records, arrivals)
            for each in self._hooks:
                each.measured(ended)
        offset_s = self._job.clock.drifted(time.monotonic())
        self._telemetry.traced(ended.iteration, records, arrivals, offset_s)
        if call.config.timers is not None:
            add_times(call.config.timers, ended.report)

    def hand_in(
        self,
        exchange: PlanExchange,
        steering: FixedPaths,
        ended: EndedIteration,
        times: SentAndReceived,
        nbytes: Mapping[int, int],
    ) -> None:
        """Send the measurements of an iteration to the planner.

        `nbytes`: size of each micro-batch's messages, including those to and from other replicas' cells.
        """
        report = ended.report
        measurement = stage_measurement(
            self._job.layout.pipeline[0],
            ended.call.stage,
            ended.call.micro_batches,
            report.records,
            times,
            self._job.clock.offset_at(time.monotonic()),
            report.computed_s() if current_device().type == "cuda" else None,
            ended.memory,
            probes=steering.take_probes(),
            broken=steering.broken(),
            disturbance=ended.disturbance,
            nbytes=nbytes,
            idle=(ended.iteration, ended.begun_s),
            work=self._work,
            switch_s=self.switch_s,
        )
        exchange.post(ended.training_iteration, measurement)
