# SPDX-License-Identifier: Apache-2.0
"""What the runtime knows, in the terms of telemetry."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import megatron.core
import torch
import torch.distributed as dist

from adaptra_megatron import __version__
from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.runtime.exchange import PlanExchange
from adaptra_megatron.runtime.executor import IterationReport
from adaptra_megatron.runtime.megatron_call import PipelineCall
from adaptra_megatron.runtime.membership import Membership
from adaptra_megatron.telemetry.changes import PathState
from adaptra_megatron.telemetry.events import RunStarted
from adaptra_megatron.telemetry.records import ArrivalRecord
from adaptra_megatron.telemetry.run_telemetry import Place, RunTelemetry, TelemetrySettings
from adaptra_megatron.telemetry.scalars import RankFigures
from adaptra_megatron.transport.messages import Direction, MessageTimes, Transport, TwoPathTransport
from adaptra_megatron.transport.paths import PathCounters

_KINDS = {Direction.ACTIVATION: "F", Direction.GRADIENT: "B"}


def running_versions() -> dict[str, str]:
    """What runs, which need not be what is installed: Megatron is often used from its sources."""
    return {
        "adaptra-megatron": __version__,
        "megatron-core": megatron.core.__version__,
        "torch": torch.__version__,
    }


def make_telemetry(call: PipelineCall, config: AdaptraConfig, membership: Membership | None) -> RunTelemetry:
    """This rank's. Raises prometheus.PrometheusError if an endpoint is wanted and cannot be opened."""
    settings = TelemetrySettings(
        trace_dir=config.trace_dir,
        every_iteration=config.trace == "all",
        prometheus_port=config.prometheus_port,
        prometheus_address=config.prometheus_address,
    )
    place = Place(
        run=membership.token if membership is not None else "",
        rank=dist.get_rank(),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        stage=call.stage,
        leads=dist.get_rank() == PlanExchange.LEADER,
        clock_offset_s=membership.clock_offset_s if membership is not None else 0.0,
    )
    start = RunStarted(
        layout={"stages": call.stages, "chunks": call.chunks, "world_size": dist.get_world_size()},
        versions=running_versions(),
        config={name: str(value) if isinstance(value, Path) else value for name, value in asdict(config).items()},
        host=platform.node(),
    )
    return RunTelemetry(settings, place, start)


def arrival_records(stage: int, received: Sequence[MessageTimes]) -> list[ArrivalRecord]:
    """When messages reached `stage`, for its trace."""
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
    """Of a training iteration that took `seconds`, for whoever watches."""
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


def path_states(transport: Transport) -> tuple[dict[int, PathState], int | None]:
    """What links with two paths do, by peer, and how often the delegate was started, where there is one."""
    states = {
        peer: PathState(link.path.value, link.switches, link.sessions_lost) for peer, link in _paths(transport).items()
    }
    return states, transport.delegate_starts if isinstance(transport, TwoPathTransport) else None


def _paths(transport: Transport) -> Mapping[int, PathCounters]:
    if not isinstance(transport, TwoPathTransport):
        return {}
    return {peer: counters.paths for peer, counters in transport.link_counters().items() if counters.paths is not None}
