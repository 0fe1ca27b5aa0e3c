# SPDX-License-Identifier: Apache-2.0
"""The planner process of a replica's leading rank, as the job is set."""

from __future__ import annotations

from pathlib import Path

from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.control.control_loop import exchange_place
from adaptra_megatron.control.order.plans import PlanBook
from adaptra_megatron.control.path_decider import PathPolicy
from adaptra_megatron.control.planner_process.keeper import PlannerKeeper
from adaptra_megatron.control.planner_process.messages import Begin
from adaptra_megatron.control.routes.route_decider import RoutePolicy
from adaptra_megatron.control.trace_sharing import SharedRequests
from adaptra_megatron.runtime.job import Job
from adaptra_megatron.telemetry.run_telemetry import RunTelemetry
from adaptra_megatron.transport.setup.placement import listen_tcp, listening_host


def make_planner(
    job: Job, book: PlanBook, config: AdaptraConfig, paths: PathPolicy | None, telemetry: RunTelemetry
) -> PlannerKeeper:
    """It starts with the first decision. `paths`: None where links have one path only.

    Raises TransportError if there is no address at which the other ranks could reach it.
    """
    layout, control = job.layout, job.control
    replica = layout.cell.replica
    seal = control.seal(exchange_place(layout))
    begin = Begin(
        secret=control.secret.hex(),
        place=seal.place,
        reporters=tuple(layout.reporters),
        layout=book.layout,
        measures_memory=book.measures_memory,
        policy=config.policy,
        max_in_flight=config.max_in_flight,
        plan_csv=_text(config.plan_csv),
        costs_json=_text(config.costs_json),
        paths=paths,
        routes=RoutePolicy(pipelines=layout.first_ranks) if config.avoids_stragglers else None,
        log_level=0,
    )
    requests = telemetry.requests
    if layout.decides_apart:
        requests = SharedRequests(control.client("requests"), None if replica else telemetry.requests).new
    word = f"replica {replica}: " if layout.decides_apart else ""
    one_host = layout.share_clock(layout.reporters)
    listener, _address = listen_tcp(listening_host(config.interface, one_host=one_host))
    return PlannerKeeper(begin, listener, telemetry, lambda: book.number, requests, word=word)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
