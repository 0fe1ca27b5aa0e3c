# SPDX-License-Identifier: Apache-2.0
"""Define all settings in one frozen dataclass, which is checked at construction, and the flags derived from it."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from adaptra_megatron.common.ports import PortRange
from adaptra_megatron.gradsync import ALGORITHM_HELP
from adaptra_megatron.schedule.costs import CostError, Costs
from adaptra_megatron.schedule.csv_format import schedule_from_csv
from adaptra_megatron.schedule.ir import Placement, Schedule, ScheduleError
from adaptra_megatron.schedule.schedule_checks import check_schedule
from adaptra_megatron.transport.device_session.communicator_config import CommunicatorConfig
from adaptra_megatron.transport.gpu.hardware_queues import QUEUE_MODELS
from adaptra_megatron.transport.setup.interfaces import InterfaceError, interface_address
from adaptra_megatron.transport.wires.wire_registry import WIRES

POLICIES = ("off", "observe", "adapt")
HOST_TRANSPORTS = ("off", "auto", *WIRES)
PATHS = ("auto", "device", "host")
TRACES = ("all", "asked")
DISPATCHES = ("planned", "auto", "online")
REROUTES = ("off", "stragglers", "failures", "all")
GRADIENT_SYNCS = ("stock", "auto", *ALGORITHM_HELP)
SYNC_MODES = ("ssgd", "x-order", "dynamic", "auto")
MONITORS = ("on", "off")
HOST_POLICIES = ("off", "observe", "pin")


class ConfigError(ValueError):
    """An invalid setting; names the flag, the value and what would be accepted."""


def _option(
    default: Any,
    help: str,
    *,
    accepts: Callable[[Any], bool] = lambda value: True,
    expects: str = "",
    flag: str | None = None,
    **keywords: Any,
) -> Any:
    """Return a field with a flag. `keywords`: for argparse. `expects`: describes the values that `accepts` lets
    through.
    """
    if "choices" in keywords:
        accepts, expects = keywords["choices"].__contains__, f"it must be one of {', '.join(keywords['choices'])}"
    argument = {"default": default, "help": help, **keywords}
    return field(default=default, metadata={"argument": argument, "accepts": accepts, "expects": expects, "flag": flag})


def _port_range(text: str) -> PortRange:
    try:
        return PortRange.parsed(text)
    except ValueError as cause:
        raise argparse.ArgumentTypeError(str(cause)) from cause  # argparse drops what other errors say


@dataclass(frozen=True, kw_only=True)
class AdaptraConfig:
    """Settings of one run; each flag's help describes its option. Raises ConfigError at construction."""

    policy: str = _option(
        "adapt",
        "off: leave Megatron untouched; observe: keep the stock order and measure; adapt: re-plan the order of "
        "forward, input-gradient and weight-gradient actions from what was measured.",
        choices=POLICIES,
    )
    plan_csv: Path | None = _option(
        None,
        "Run this fixed schedule (the CSV of torch.distributed.pipelining) instead of a planned one.",
        type=Path,
        metavar="FILE",
    )
    costs_json: Path | None = _option(
        None,
        "Plan from these costs (JSON, as for `adaptra plan`) instead of measuring the first iterations.",
        flag="--adaptra-costs",
        type=Path,
        metavar="FILE",
    )
    max_in_flight: float | None = _option(
        None,
        "Cap on the activations (of one model chunk and micro-batch) that a stage may hold at once. "
        "Default: what measured memory has room for on GPUs, and on CPUs as many as the fullest stage of the stock "
        "schedule holds.",
        accepts=lambda cap: cap is None or (math.isfinite(cap) and cap >= 1),
        expects="a stage needs room for at least 1 activation",
        type=float,
        metavar="N",
    )
    memory_fraction: float = _option(
        0.8,
        "Fraction of a GPU's memory (all processes) that plans may use; beyond it, in-flight activations are capped.",
        accepts=lambda fraction: 0.0 < fraction <= 1.0,
        expects="it must be above 0 and at most 1 (the whole GPU)",
        type=float,
        metavar="FRACTION",
    )
    trace_dir: Path | None = _option(
        None, "Directory for the traces and event logs of all ranks.", type=Path, metavar="DIR"
    )
    trace: str = _option(
        "all",
        "Write every iteration (all), or those that `adaptra trace DIR --request next-5` asks for (asked).",
        choices=TRACES,
    )
    prometheus_port: int | None = _option(
        None,
        "Serve the figures of each rank to Prometheus: those of a host's first rank at this port, the next rank's at "
        "the next.",
        accepts=lambda port: port is None or 0 <= port < 65536,
        expects="it must be a port, or 0 for any free one",
        type=int,
        metavar="PORT",
    )
    prometheus_address: str = _option("127.0.0.1", "Address that the Prometheus port listens on.", metavar="ADDRESS")
    otel: bool = _option(
        False,
        "Send the figures and events of each rank to a collector by OpenTelemetry (OTLP), which its own environment "
        "variables set up, as OTEL_EXPORTER_OTLP_ENDPOINT.",
        action="store_true",
    )
    profile_ranges: bool = _option(
        False,
        "Name every forward, backward and weight gradient, and every send, receive and wait, in torch.profiler's "
        "traces and in Nsight Systems.",
        action="store_true",
    )
    timeout_s: float | None = _option(
        None,
        "Longest wait for a message or a decision of another rank before the run stops with an error. Default: "
        "that of torch.distributed's default group, which is Megatron's --distributed-timeout-minutes.",
        accepts=lambda timeout_s: timeout_s is None or (math.isfinite(timeout_s) and timeout_s > 0),
        expects="it must be above 0",
        type=float,
        metavar="SECONDS",
    )
    host_transport: str = _option(
        "auto",
        "Give every link between stages a second path, through host memory and a delegate process, which takes over "
        "when torch.distributed fails: over shared memory (shm), TCP (tcp), RDMA (verbs; as auto where either stage "
        "has no RDMA device), or shared memory within a host, and RDMA or else TCP between hosts (auto). With auto, a"
        " run goes on without it, and says so, where it cannot be set up; with the others that is an error. off: "
        "links have one path, torch.distributed's.",
        choices=HOST_TRANSPORTS,
    )
    rnics: tuple[str, ...] = _option(
        (),
        "RDMA devices to use (as in /sys/class/infiniband), in the order in which those of the other hosts match "
        "them. Default: the active ones nearest to this rank's GPU, or else to its CPUs.",
        accepts=lambda names: all(names) and len(set(names)) == len(names),
        expects="it must be different names of RDMA devices, for example mlx5_0,mlx5_1",
        type=lambda text: tuple(text.split(",")),
        metavar="NAME[,NAME...]",
    )
    interface: str | None = _option(
        None,
        "Network interface (such as eth0) on whose address the host path listens and from which it connects, "
        "over TCP and for RDMA, and on which clocks of hosts are compared. Default: 127.0.0.1 if all stages are on one "
        "host, otherwise what GLOO_SOCKET_IFNAME names, or else the interface that leads to MASTER_ADDR.",
        accepts=lambda name: name != "",
        expects="it must be the name of a network interface, such as eth0",
        metavar="NAME",
    )
    port_range: PortRange | None = _option(
        None,
        "TCP ports that this job's delegates, lines, clocks and planner processes listen on, for firewalls; a rank "
        "needs up to 6, so 20000-20127 is plenty for a host of 8. Default: any that are free.",
        type=_port_range,
        metavar="FIRST-LAST",
    )
    path: str = _option(
        "auto",
        "The path that activations and gradients take while it is healthy: torch.distributed (device), or the "
        "host path. The other takes over when it fails, and, unless the plan is fixed, while it is much better. auto: "
        "device, but host where plans take a GPU's only queue for a serial one (--adaptra-queue-model).",
        choices=PATHS,
    )
    queue_model: str = _option(
        QUEUE_MODELS[0],
        "What plans take the hardware queue of a GPU for that has one alone (CUDA_DEVICE_MAX_CONNECTIONS=1). serial: "
        "nothing starts before the end of what is in front; shared: transfers that have started hold up nothing, as "
        "T1 of scripts/gpu_check.sh is to show first.",
        choices=QUEUE_MODELS,
    )
    dispatch: str = _option(
        "auto",
        "Dispatch policy. planned: follow the plan; online: reorder a stage's actions by the arrival of messages; "
        "auto: online while messages of a neighbour come by the host path and at irregular times.",
        choices=DISPATCHES,
    )
    reroute: str = _option(
        "off",
        "Which cells (stages of data-parallel replicas) give micro-batches to other replicas' cells of their stage. "
        "off: none; stragglers: those that compute more slowly than others; and where a data source says how long "
        "micro-batches are, whole ones are swapped between replicas; failures: those that have died: the iteration is "
        "redone without them and training goes on, under `adaptra launch --no-kill`; all: both. Gradients are then "
        "added up in another order: results equal stock's up to rounding, not to the bit.",
        choices=REROUTES,
    )
    gradient_sync: str = _option(
        "stock",
        "How data-parallel replicas sum up gradients, where optimizers are not distributed. stock: as Megatron does; "
        + "".join(f"{name}: {what}; " for name, what in ALGORITHM_HELP.items())
        + "auto: whichever of these a model of measured latency, bandwidth and delay says is fastest. Sums are then "
        "added up in another order: results equal stock's up to rounding, not to the bit.",
        choices=GRADIENT_SYNCS,
    )
    sync_mode: str = _option(
        "ssgd",
        "Which data-parallel replicas make an update while some are predicted to take more than 1.2 times as long as "
        "the fastest. ssgd: all, as in Megatron; x-order: as many as are about equally fast, and late gradients are "
        "part of a later update; dynamic: groups of equal speed in turn; auto: whichever a model says learns fastest. "
        "All but ssgd change what is computed then, as docs/sync_modes.md says; without stragglers results are stock's "
        "to the bit.",
        choices=SYNC_MODES,
    )
    max_staleness: int = _option(
        4,
        "Most updates that may be made between the beginning of a gradient and the update that it is part of, under "
        "--adaptra-sync-mode; then the others wait for it.",
        accepts=lambda updates: updates >= 1,
        expects="it must be at least 1: a late gradient has missed one update",
        type=int,
        metavar="N",
    )
    straggler_monitor: str = _option(
        "on",
        "on: find data-parallel replicas that persistently come last to gradient synchronisation, and why, by how long "
        "each waits there; nothing is added to what training communicates. off: measure none of it.",
        choices=MONITORS,
    )
    host_policy: str = _option(
        "off",
        "What a rank does that comes last because its host's CPUs are busy. off: nothing; pin: delegates, data-loader "
        "workers and other processes that it has started are pinned to a few CPUs, away from its training threads, at "
        "lower priority, until the cause is over; observe: only say so.",
        choices=HOST_POLICIES,
    )
    staggered_optimizer: bool = _option(
        False,
        "Have each stage step its optimizer and begin the next iteration as soon as its own gradients are ready, "
        "before the norm of all stages' gradients is known. A step that should have been clipped is taken back, and "
        "what was computed since is computed again: results are stock's to the bit.",
        action="store_true",
    )
    communicators: CommunicatorConfig = CommunicatorConfig()
    """Settings of links between GPUs. Has no flag: Megatron's --nccl-communicator-config-path sets it."""

    @property
    def needs_host_path(self) -> bool:
        """Return whether a flag was given that has no effect without a host path."""
        named = self.host_transport not in ("off", "auto")
        return named or self.path == "host" or self.interface is not None or bool(self.rnics)

    @property
    def avoids_stragglers(self) -> bool:
        """Return whether micro-batches are moved away from slow cells."""
        return self.reroute in ("stragglers", "all")

    @property
    def common(self) -> Mapping[str, str]:
        """Return the flags that must be the same on all ranks, with their values."""
        options = (option for option in OPTIONS if option.name not in _OF_HOSTS)
        return {_flag(option): str(_shown(getattr(self, option.name))) for option in options}

    @property
    def watches_stragglers(self) -> bool:
        """Return whether arrivals at gradient synchronisation are measured. They are if each replica waits there for
        all others.
        """
        return self.straggler_monitor == "on" and self.sync_mode == "ssgd" and not self.is_fault_tolerant

    @property
    def has_features(self) -> bool:
        """Return whether routes or updates differ from stock's: such features have refusals of their own."""
        updates = self.gradient_sync != "stock" or self.sync_mode != "ssgd" or self.staggered_optimizer
        return updates or self.reroute != "off"

    @property
    def is_fault_tolerant(self) -> bool:
        """Return whether training survives rank failures."""
        return self.reroute in ("failures", "all")

    def __post_init__(self) -> None:
        for option in OPTIONS:
            value = getattr(self, option.name)
            if not option.metadata["accepts"](value):
                raise ConfigError(f"{_flag(option)} is {_shown(value)!r}; {option.metadata['expects']}")
        for rule in RULES:
            for option in (option for option in OPTIONS if option.name in rule.settings):
                value = getattr(self, option.name)
                given = value != option.default if rule.values is None else value in rule.values
                if given and not rule.needs(self):
                    raise ConfigError(f"{_flag(option)} {_shown(value)} {rule.says.format_map(vars(self))}")
        validate_files(self)


_OF_HOSTS = ("rnics", "interface", "port_range", "prometheus_port", "prometheus_address", "trace_dir")
OPTIONS: tuple[Field[Any], ...] = tuple(option for option in fields(AdaptraConfig) if option.metadata)
"""Fields with flags, in the order of the help."""


@dataclass(frozen=True)
class FlagRule:
    """Rule for a flag that contradicts another, or has no effect without it."""

    settings: tuple[str, ...]
    needs: Callable[[AdaptraConfig], bool]
    says: str
    """Continues the error after the flag and its value; names the other flag and the remedy."""
    values: tuple[Any, ...] | None = None
    """Values to which the rule applies; None: all but the default."""


def _measures(config: AdaptraConfig) -> bool:
    return config.plan_csv is None and config.costs_json is None


_ORDER = "shapes the order of actions, but --adaptra-policy {policy} keeps stock's; use --adaptra-policy adapt"
_FIXED = "with --adaptra-plan-csv or --adaptra-costs nothing is measured for plans; drop one of the two"
RULES = (
    FlagRule(("plan_csv", "costs_json", "max_in_flight"), lambda config: config.policy == "adapt", _ORDER),
    FlagRule(("reroute",), lambda config: config.policy == "adapt", _ORDER),
    FlagRule(("reroute",), _measures, f"is decided by measured speeds, but {_FIXED}"),
    FlagRule(
        ("reroute",),
        lambda config: config.host_transport != "off",
        "opens links between replicas while the job runs, by the host path, but --adaptra-host-transport is off; use "
        "--adaptra-host-transport auto",
    ),
    FlagRule(
        ("gradient_sync",),
        lambda config: not config.is_fault_tolerant,
        "sums up over groups that do not survive rank failures, but --adaptra-reroute {reroute} is for jobs that do; "
        "drop one of the two",
    ),
    FlagRule(
        ("gradient_sync",),
        lambda config: not config.staggered_optimizer,
        "has not been tried with steps that are taken back, as --adaptra-staggered-optimizer may; drop one of the two",
    ),
    FlagRule(
        ("sync_mode",),
        lambda config: config.reroute == "off",
        "lets replicas go on without each other, but --adaptra-reroute {reroute} spreads one iteration's micro-batches "
        "over all of them; drop one of the two",
    ),
    FlagRule(
        ("sync_mode",),
        lambda config: config.gradient_sync == "stock",
        "says whose gradients are summed up, but --adaptra-gradient-sync {gradient_sync} sums up those of all "
        "replicas; drop one of the two",
    ),
    FlagRule(
        ("sync_mode",),
        lambda config: not config.staggered_optimizer,
        "has not been tried with steps that are taken back, as --adaptra-staggered-optimizer may; drop one of the two",
    ),
    FlagRule(
        ("staggered_optimizer",),
        lambda config: config.policy == "adapt",
        "gains nothing in stock's order, which --adaptra-policy {policy} keeps; use --adaptra-policy adapt",
    ),
    FlagRule(
        ("reroute",),
        lambda config: not config.staggered_optimizer,
        "has not been tried with steps that are taken back, and where training survives rank failures all agree on "
        "each iteration's end, which --adaptra-staggered-optimizer would not wait for; drop one of the two",
    ),
    FlagRule(("dispatch",), lambda config: config.policy == "adapt", _ORDER, values=("online",)),
    FlagRule(
        tuple(option.name for option in OPTIONS if option.name != "policy"),
        lambda config: config.policy != "off",
        "changes nothing with --adaptra-policy off; use observe or adapt, or leave it out",
    ),
    FlagRule(
        ("plan_csv",),
        lambda config: config.costs_json is None,
        "and --adaptra-costs exclude each other: a fixed plan needs no costs",
    ),
    FlagRule(("memory_fraction",), _measures, f"is for plans within measured memory, but {_FIXED}"),
    FlagRule(
        ("host_policy",),
        lambda config: config.watches_stragglers,
        "follows the straggler monitor, which needs replicas that wait for all others: not with "
        "--adaptra-straggler-monitor off, another --adaptra-sync-mode than ssgd, or --adaptra-reroute failures or all",
    ),
    FlagRule(
        ("max_staleness",),
        lambda config: config.sync_mode != "ssgd",
        "bounds how late gradients may be, but with --adaptra-sync-mode ssgd none is; drop it, or choose another mode",
    ),
    FlagRule(("trace",), lambda config: config.trace_dir is not None, "needs a place: give --adaptra-trace-dir too"),
    FlagRule(
        ("prometheus_address",),
        lambda config: config.prometheus_port is not None,
        "is where figures are served; give --adaptra-prometheus-port too",
    ),
    FlagRule(
        ("rnics",),
        lambda config: config.host_transport in ("auto", "verbs"),
        "are RDMA devices, but --adaptra-host-transport {host_transport} uses none; use verbs or auto",
    ),
    FlagRule(
        ("path",),
        lambda config: config.host_transport != "off",
        "needs a host path, but --adaptra-host-transport is off; use --adaptra-host-transport auto",
        values=("host",),
    ),
)


def _flag(option: Field[Any]) -> str:
    return option.metadata["flag"] or f"--adaptra-{option.name.replace('_', '-')}"


def _shown(value: Any) -> Any:
    return ",".join(value) if isinstance(value, tuple) else value


def add_adaptra_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the --adaptra flags in a group of their own, in Megatron's style; a parser that has them keeps them."""
    if "--adaptra" in parser._option_string_actions:
        return parser
    group = parser.add_argument_group(title="adaptra")
    group.add_argument(
        "--adaptra", action="store_true", help="Keep pipeline-parallel training at full speed when links turn slow."
    )
    for option in OPTIONS:
        group.add_argument(_flag(option), **option.metadata["argument"])
    return parser


def config_from_arguments(arguments: argparse.Namespace) -> AdaptraConfig:
    """Return the settings in parsed arguments. Raises ConfigError."""
    destinations = {option.name: _flag(option)[2:].replace("-", "_") for option in OPTIONS}
    given = {name: getattr(arguments, destination) for name, destination in destinations.items()}
    path = getattr(arguments, "nccl_communicator_config_path", None)
    return AdaptraConfig(**given, communicators=CommunicatorConfig() if path is None else communicators_from(path))


# What settings name: files of plans, costs and communicators; an interface. Judged before training, without torch.

_MOST_NBYTES = 256 << 20
"""Maximum size of an input file: plans of the largest jobs have a few MiB."""
_COMMUNICATOR_RANGES = {"min_ctas": (1, 2**31 - 1), "max_ctas": (1, 2**31 - 1), "cga_cluster_size": (0, 8)}
"""Ranges that NCCL accepts."""


def validate_files(config: AdaptraConfig, stages: int | None = None) -> None:
    """Raise ConfigError unless the files that `config` names are usable, by a pipeline of `stages` or by any (None)."""
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
    """Read the plan in a CSV file, for a pipeline of `stages` with `chunks` each (None: any).

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
    """Read the costs in a JSON file, for a pipeline of `stages` with `chunks` each (None: any).

    Raises ConfigError if it cannot be read, has impossible values, or is for another pipeline.
    """
    from adaptra_megatron.schedule.jobs.job_costs import job_costs_from_json, worst_costs

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
    """Read the entry "pp" of Megatron's --nccl-communicator-config-path, which Megatron's own pipeline group would use.

    Raises ConfigError if it cannot be read, or has impossible values.
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
