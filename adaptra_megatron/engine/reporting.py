# SPDX-License-Identifier: Apache-2.0
"""Convert the runtime's state to the records of telemetry."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from adaptra_megatron import __version__
from adaptra_megatron.common.layout import JobLayout
from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.engine.execution.executor import IterationReport
from adaptra_megatron.engine.training_job import Job
from adaptra_megatron.megatron.compat import megatron_version
from adaptra_megatron.telemetry.action_records import ArrivalRecord
from adaptra_megatron.telemetry.changes import PathState
from adaptra_megatron.telemetry.events import RunStarted
from adaptra_megatron.telemetry.run_telemetry import RankPlace, RunTelemetry, TelemetrySettings
from adaptra_megatron.telemetry.scalars import RankFigures
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
