# SPDX-License-Identifier: Apache-2.0
"""Create the planner process of a replica's leader."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from adaptra_megatron.common.layout import Cell, JobLayout
from adaptra_megatron.common.log import logger_of
from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.control.deciders.plan_state import PlanState
from adaptra_megatron.control.decisions import TelemetrySection
from adaptra_megatron.control.exchange import exchange_place
from adaptra_megatron.control.finding_sharing import NamedFindings, SharedFindings, SharedRequests
from adaptra_megatron.control.sidecar.planner_client import Begin, PathPolicy, PlannerClient, RoutePolicy
from adaptra_megatron.engine.training_job import Job, listen_for
from adaptra_megatron.telemetry.run_telemetry import RunTelemetry

logger = logger_of(__name__)


def make_planner(
    job: Job,
    book: PlanState,
    config: AdaptraConfig,
    paths: PathPolicy | None,
    telemetry: RunTelemetry,
    dead: Collection[Cell] = (),
    number: int = 0,
) -> PlannerClient:
    """Return the client of a new planner process, whose first decision starts from the plan in `book`.

    `paths`: None if links have one path only. `dead`: cells that get no work. `number`: of this rank's latest plan.
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
        policy=book.policy,
        max_in_flight=config.max_in_flight,
        plan_csv=_text(config.plan_csv),
        costs_json=_text(config.costs_json),
        paths=paths,
        routes=_routes(layout, config, dead),
        log_level=0,
        running=replace(book.in_force, number=max(number, book.number)),
    )

    def take() -> TelemetrySection:
        return TelemetrySection(telemetry.requests(), policy=accepted(telemetry.policy_asked(), config))

    requests = take
    if layout.decides_apart:
        shared = SharedRequests(control.client("requests"), None if replica else take)
        findings = SharedFindings(control.client("findings"), layout, None if replica else telemetry.take_of)
        telemetry.share = findings.post if replica else None

        def requests() -> TelemetrySection:
            findings.exchange()
            return shared.new()

    word = f"replica {replica}: " if layout.decides_apart else ""
    return PlannerClient(
        begin,
        listen_for(layout, layout.reporters, config, "so plans stay"),
        NamedFindings(layout, telemetry),
        lambda: book.number,
        requests,
        word=word,
    )


def accepted(policy: str, config: AdaptraConfig) -> str:
    """Return the policy that a user requests for the running job; "", with a log line, if it cannot be applied."""
    why = ""
    if policy == "adapt" and config.policy != "adapt":
        why = f"the job was started with --adaptra-policy {config.policy}, so that nothing is ready for other orders"
    elif policy and config.staggered_optimizer:
        why = "--adaptra-staggered-optimizer steps by the plan that runs"
    elif policy and (config.avoids_stragglers or (policy == "off" and config.reroute != "off")):
        why = f"--adaptra-reroute {config.reroute} needs what ranks measure to route micro-batches"
    if why:
        logger.warning(
            "policy %s was asked for and cannot be had while the job runs: %s; restart it for that", policy, why
        )
    return "" if why else policy


def _routes(layout: JobLayout, config: AdaptraConfig, dead: Collection[Cell]) -> RoutePolicy | None:
    if not (config.avoids_stragglers or dead):
        return None
    return RoutePolicy(pipelines=layout.first_ranks, dead=tuple(sorted(dead)), avoids_slow=config.avoids_stragglers)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
