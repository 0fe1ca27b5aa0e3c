# SPDX-License-Identifier: Apache-2.0
"""What settings name: files of plans, costs and communicators; an interface. Judged before training, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from adaptra_megatron.config import AdaptraConfig, ConfigError
from adaptra_megatron.schedule.actions import Schedule
from adaptra_megatron.schedule.checks import check_schedule
from adaptra_megatron.schedule.costs import CostError, Costs
from adaptra_megatron.schedule.csv_format import schedule_from_csv
from adaptra_megatron.schedule.errors import ScheduleError
from adaptra_megatron.schedule.jobs.costs import worst_costs
from adaptra_megatron.schedule.jobs.json_format import job_costs_from_json
from adaptra_megatron.schedule.placement import Placement
from adaptra_megatron.transport.device_session.nccl_library import CommunicatorConfig
from adaptra_megatron.transport.setup.interfaces import InterfaceError, interface_address

_MOST_NBYTES = 256 << 20
"""Of a file: plans of the largest jobs have some MiB."""
_COMMUNICATOR_RANGES = {"min_ctas": (1, 2**31 - 1), "max_ctas": (1, 2**31 - 1), "cga_cluster_size": (0, 8)}
"""As NCCL takes them."""


def validate_files(config: AdaptraConfig, stages: int | None = None) -> None:
    """Raise ConfigError unless `config` names what can be used: by a pipeline of `stages`, or by any (None)."""
    if config.plan_csv is not None:
        read_plan(config.plan_csv, stages=stages, max_in_flight=config.max_in_flight)
    if config.costs_json is not None:
        read_costs(config.costs_json, stages=stages)
    if config.interface is not None:
        try:
            interface_address(config.interface)
        except InterfaceError as error:
            raise ConfigError(f"--adaptra-interface: {error}") from error


def read_plan(
    path: Path, *, stages: int | None = None, chunks: int | None = None, max_in_flight: float | None = None
) -> Schedule:
    """The plan in a CSV file, for a pipeline of `stages` with `chunks` each (None: any).

    Raises ConfigError if it cannot be read, cannot run, is for another pipeline, or holds more than `max_in_flight`
    activations (None: no cap).
    """
    try:
        schedule = schedule_from_csv(_read_text("--adaptra-plan-csv", path), chunks=chunks)
        check_schedule(schedule, max_in_flight=(max_in_flight,) * schedule.stages)
    except ScheduleError as error:
        raise ConfigError(f"--adaptra-plan-csv {path}: {error}") from error
    if stages not in (None, schedule.stages):
        raise ConfigError(
            f"--adaptra-plan-csv {path} is a plan for {schedule.stages} stages, but this pipeline has {stages}; write "
            "one row of actions per stage"
        )
    _refuse_placement(f"--adaptra-plan-csv {path}", schedule.custom_placement)
    return schedule


def read_costs(path: Path, *, stages: int | None = None, chunks: int | None = None) -> Costs:
    """The costs in a JSON file, for a pipeline of `stages` with `chunks` each (None: any).

    Raises ConfigError if it cannot be read, says something impossible, or is for another pipeline.
    """
    try:
        document = json.loads(_read_text("--adaptra-costs", path))
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits are no JSONDecodeError
        raise ConfigError(f"--adaptra-costs {path} is not valid JSON: {error}") from error
    try:
        # All replicas run one plan here: the one for the slowest of every stage and link.
        costs = worst_costs(job_costs_from_json(document).groups)
    except CostError as error:
        raise ConfigError(f"--adaptra-costs {path}: {error}") from error
    _refuse_placement(f"--adaptra-costs {path}", costs.custom_placement)
    wanted = {"stages": stages, "chunks per stage": chunks}
    found = {"stages": costs.stages, "chunks per stage": costs.chunks}
    for what, number in wanted.items():
        if number not in (None, found[what]):
            raise ConfigError(f"--adaptra-costs {path} is for {found[what]} {what}, but this pipeline has {number}")
    return costs


def _refuse_placement(given: str, placement: Placement | None) -> None:
    if placement is not None:
        raise ConfigError(
            f"{given}: it places virtual stages on stages {list(placement.stage_of)}, but Megatron builds its model "
            f"chunks with virtual stage v on stage v modulo {placement.stages}, and a plan moves no layers: write it "
            "for that. Other placements, as the V of ZB-V and DualPipe-V, can be simulated (adaptra simulate), not run"
        )


def communicators_from(path: str) -> CommunicatorConfig:
    """The entry "pp" of Megatron's --nccl-communicator-config-path, which its own pipeline group would have.

    Raises ConfigError if it cannot be read, or says something impossible.
    """
    given = f"--nccl-communicator-config-path {path}"
    text = _read_text("--nccl-communicator-config-path", Path(path))
    try:
        import yaml  # as Megatron does for the same file

        document = yaml.safe_load(text)
    except Exception as cause:  # PyYAML's errors have no name where it is not installed
        raise ConfigError(f"{given} cannot be read: {cause}") from cause
    settings: Any = document.get("pp", {}) if isinstance(document, dict) else None
    if not isinstance(settings, dict):
        raise ConfigError(f"{given}: settings by name are expected under pp, as max_ctas: 4, got {settings!r}")
    for name, (least, most) in _COMMUNICATOR_RANGES.items():
        value = settings.get(name)
        if value is not None and not (type(value) is int and least <= value <= most):
            raise ConfigError(f"{given}: {name} of pp must be a whole number from {least} to {most}, got {value!r}")
    network = settings.get("net_name")
    if not isinstance(network, (str, type(None))):
        raise ConfigError(f"{given}: net_name of pp must be a name, as IB or Socket, got {network!r}")
    low, high = settings.get("min_ctas"), settings.get("max_ctas")
    if low is not None and high is not None and low > high:
        raise ConfigError(f"{given}: pp has min_ctas {low} and max_ctas {high}")
    return CommunicatorConfig(
        max_ctas=high, min_ctas=low, cga_cluster_size=settings.get("cga_cluster_size"), net_name=network
    )


def _read_text(flag: str, path: Path) -> str:
    if not path.is_file():
        raise ConfigError(f"{flag}: there is no file {path}")
    try:
        if path.stat().st_size > _MOST_NBYTES:
            raise ConfigError(f"{flag} {path} is larger than {_MOST_NBYTES >> 20} MiB: that is another file")
        return path.read_text(encoding="utf-8-sig")  # a byte order mark, which spreadsheets write, is no text
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path} cannot be read as text: {error}") from error
