# SPDX-License-Identifier: Apache-2.0
"""What a user can set: one frozen dataclass, checked at birth and read once, and the flags it is made from."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

POLICIES = ("off", "observe", "adapt")
HOST_TRANSPORTS = ("off", "auto", "shm", "tcp", "verbs")
PATHS = ("device", "host")
TRACES = ("all", "asked")
DISPATCHES = ("planned", "auto", "online")


class ConfigError(ValueError):
    """A setting that cannot be; names the flag, the value and what would be accepted."""


@dataclass(frozen=True, kw_only=True)
class AdaptraConfig:
    """Settings of one run. Raises ConfigError at construction."""

    policy: str = "adapt"
    """off: Megatron untouched. observe: stock's order, measured. adapt: planned orders."""
    plan_csv: Path | None = None
    """A fixed schedule in torch.distributed.pipelining's format instead of a planned one."""
    costs_json: Path | None = None
    """Costs to plan from at once, instead of measuring the first iterations."""
    max_in_flight: float | None = None
    """Cap on activations (of one chunk's micro-batch) held by a stage; None: what measured memory has room for on GPUs,
    and on CPUs what stock's fullest stage holds."""
    memory_fraction: float = 0.8
    """Of a GPU's memory, what plans may let be in use."""
    trace_dir: Path | None = None
    """Where each rank writes what it did and when; None: nothing is recorded."""
    trace: str = "all"
    """Which iterations are written to trace_dir: all, or those that somebody asks for (asked)."""
    prometheus_port: int | None = None
    """Where the figures of the first rank of a host are served, the next rank's at the next port; None: nowhere."""
    prometheus_address: str = "127.0.0.1"
    timeout_s: float = 600.0
    """Longest wait for any message or decision of another rank."""
    host_transport: str = "off"
    """Transport of the host path; off: there is none, messages travel by torch.distributed and no other way."""
    interface: str | None = None
    """Network interface, by name, that the host path uses between hosts; None: that of GLOO_SOCKET_IFNAME, or else the
    one of the way to the master."""
    path: str = "device"
    """Which path messages take while it is healthy: device (torch.distributed) or host."""
    dispatch: str = "auto"
    """Who orders a stage's actions. planned: the plan. online: the stage, as messages arrive, where it sees that. auto:
    the stage, while messages of a neighbour come by the host path and at random."""
    rnics: tuple[str, ...] = ()
    """RDMA devices that verbs uses; none for those nearest to the rank's GPU, or else to its CPUs."""
    receive_lookahead: int = 8
    """Receives posted ahead per neighbour; each holds one activation-sized buffer."""

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"--adaptra-policy is {self.policy!r}; it must be one of {', '.join(POLICIES)}")
        if self.plan_csv is not None and self.costs_json is not None:
            raise ConfigError("--adaptra-plan-csv and --adaptra-costs exclude each other: a fixed plan needs no costs")
        if self.policy != "adapt" and (self.plan_csv or self.costs_json):
            raise ConfigError(
                f"--adaptra-plan-csv and --adaptra-costs set the order of actions, but --adaptra-policy "
                f"{self.policy} keeps stock's; use --adaptra-policy adapt"
            )
        for flag, path in (("--adaptra-plan-csv", self.plan_csv), ("--adaptra-costs", self.costs_json)):
            if path is not None and not path.is_file():
                raise ConfigError(f"{flag}: there is no file {path}")
        if self.max_in_flight is not None and not (math.isfinite(self.max_in_flight) and self.max_in_flight >= 1):
            raise ConfigError(
                f"--adaptra-max-in-flight is {self.max_in_flight}; a stage needs room for at least 1 activation"
            )
        if not 0.0 < self.memory_fraction <= 1.0:
            raise ConfigError(
                f"--adaptra-memory-fraction is {self.memory_fraction}; it must be above 0 and at most 1 (the whole GPU)"
            )
        if self.trace not in TRACES:
            raise ConfigError(f"--adaptra-trace is {self.trace!r}; it must be one of {', '.join(TRACES)}")
        if self.trace == "asked" and self.trace_dir is None:
            raise ConfigError(
                "--adaptra-trace asked needs a place for requests and traces; give --adaptra-trace-dir too"
            )
        if self.prometheus_port is not None and not 0 <= self.prometheus_port < 65536:
            raise ConfigError(
                f"--adaptra-prometheus-port is {self.prometheus_port}; it must be a port, or 0 for any free one"
            )
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise ConfigError(f"--adaptra-timeout-s is {self.timeout_s}; it must be above 0")
        if self.host_transport not in HOST_TRANSPORTS:
            raise ConfigError(
                f"--adaptra-host-transport is {self.host_transport!r}; it must be one of {', '.join(HOST_TRANSPORTS)}"
            )
        if self.interface is not None and not self.interface:
            raise ConfigError("--adaptra-interface is empty; it must be the name of a network interface, such as eth0")
        if self.interface is not None and self.host_transport == "off":
            raise ConfigError(
                f"--adaptra-interface {self.interface} is for the host path, but --adaptra-host-transport is off; "
                "use --adaptra-host-transport auto"
            )
        if self.path not in PATHS:
            raise ConfigError(f"--adaptra-path is {self.path!r}; it must be one of {', '.join(PATHS)}")
        if self.rnics and self.host_transport not in ("auto", "verbs"):
            raise ConfigError(
                f"--adaptra-rnics names RDMA devices, but --adaptra-host-transport {self.host_transport} uses none; "
                "use verbs or auto"
            )
        if not all(self.rnics) or len(set(self.rnics)) < len(self.rnics):
            raise ConfigError(
                f"--adaptra-rnics is {','.join(self.rnics)!r}; it must be different names of RDMA devices, "
                "for example mlx5_0,mlx5_1"
            )
        if self.dispatch not in DISPATCHES:
            raise ConfigError(f"--adaptra-dispatch is {self.dispatch!r}; it must be one of {', '.join(DISPATCHES)}")
        if self.dispatch == "online" and self.policy != "adapt":
            raise ConfigError(
                f"--adaptra-dispatch online changes the order of actions, but --adaptra-policy {self.policy} keeps "
                "stock's; use --adaptra-policy adapt"
            )
        if self.path == "host" and self.host_transport == "off":
            raise ConfigError(
                "--adaptra-path host needs a host path, but --adaptra-host-transport is off; "
                "use --adaptra-host-transport auto"
            )
        if self.receive_lookahead < 1:
            raise ConfigError(f"receive_lookahead is {self.receive_lookahead}; at least 1 receive must be posted")


def add_adaptra_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the --adaptra flags in a group of their own, in Megatron's style; a parser that has them keeps them."""
    if "--adaptra" in parser._option_string_actions:
        return parser
    group = parser.add_argument_group(title="adaptra")
    group.add_argument(
        "--adaptra", action="store_true", help="Keep pipeline-parallel training at full speed when links turn slow."
    )
    group.add_argument(
        "--adaptra-policy",
        choices=POLICIES,
        default="adapt",
        help="off: leave Megatron untouched; observe: keep the stock order and measure; adapt: re-plan the order of "
        "forward, input-gradient and weight-gradient actions from what was measured.",
    )
    group.add_argument(
        "--adaptra-plan-csv",
        type=Path,
        default=None,
        metavar="FILE",
        help="Run this fixed schedule (the CSV of torch.distributed.pipelining) instead of a planned one.",
    )
    group.add_argument(
        "--adaptra-costs",
        type=Path,
        default=None,
        metavar="FILE",
        help="Plan from these costs (JSON, as for `adaptra plan`) instead of measuring the first iterations.",
    )
    group.add_argument(
        "--adaptra-max-in-flight",
        type=float,
        default=None,
        metavar="N",
        help="Cap on the activations (of one model chunk and micro-batch) that a stage may hold at once. "
        "Default: what measured memory has room for on GPUs, and on CPUs as many as the fullest stage of the stock "
        "schedule holds.",
    )
    group.add_argument(
        "--adaptra-memory-fraction",
        type=float,
        default=AdaptraConfig.memory_fraction,
        metavar="FRACTION",
        help="Of a GPU's memory, what plans may let be in use (all processes counted) before activations are capped.",
    )
    group.add_argument(
        "--adaptra-trace-dir",
        type=Path,
        default=None,
        metavar="DIR",
        help="Write what every rank did, and when, into this directory.",
    )
    group.add_argument(
        "--adaptra-trace",
        choices=TRACES,
        default="all",
        help="Write every iteration (all), or those that `adaptra trace DIR --request next-5` asks for (asked).",
    )
    group.add_argument(
        "--adaptra-prometheus-port",
        type=int,
        default=None,
        metavar="PORT",
        help="Serve the figures of each rank to Prometheus, from this port on.",
    )
    group.add_argument(
        "--adaptra-prometheus-address",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="The address that --adaptra-prometheus-port is opened on.",
    )
    group.add_argument(
        "--adaptra-timeout-s",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="Longest wait for a message or a decision of another rank before the run stops with an error.",
    )
    group.add_argument(
        "--adaptra-host-transport",
        choices=HOST_TRANSPORTS,
        default="off",
        help="Give every link between stages a second path, through host memory and a delegate process, which takes "
        "over when torch.distributed fails: over shared memory (shm), TCP (tcp), RDMA (verbs; auto's choice where a "
        "stage has none), or shared memory within a host, and RDMA or else TCP between hosts (auto).",
    )
    group.add_argument(
        "--adaptra-rnics",
        type=lambda text: tuple(text.split(",")),
        default=(),
        metavar="NAME[,NAME...]",
        help="RDMA devices to use (as in /sys/class/infiniband), in the order in which those of the other hosts match "
        "them. Default: the active ones nearest to this rank's GPU, or else to its CPUs.",
    )
    group.add_argument(
        "--adaptra-interface",
        default=None,
        metavar="NAME",
        help="Network interface (such as eth0) on whose address the host path listens and from which it connects, "
        "over TCP and for RDMA. Default: 127.0.0.1 if all stages are on one host, otherwise what GLOO_SOCKET_IFNAME "
        "names, or else the interface that leads to MASTER_ADDR.",
    )
    group.add_argument(
        "--adaptra-path",
        choices=PATHS,
        default="device",
        help="The path that activations and gradients take while it is healthy: torch.distributed (device), or the "
        "host path. The other takes over when it fails, and, unless the plan is fixed, while it is much better.",
    )
    group.add_argument(
        "--adaptra-dispatch",
        choices=DISPATCHES,
        default="auto",
        help="Who orders the actions of a stage: the plan (planned); the stage itself, which leaves the plan when its "
        "next message is late and another is here (online); or the stage while a neighbour's messages come by the "
        "host path and at random (auto).",
    )
    return parser


def config_from_arguments(arguments: argparse.Namespace) -> AdaptraConfig:
    """The settings in parsed arguments. Raises ConfigError."""
    return AdaptraConfig(
        policy=arguments.adaptra_policy,
        plan_csv=arguments.adaptra_plan_csv,
        costs_json=arguments.adaptra_costs,
        max_in_flight=arguments.adaptra_max_in_flight,
        memory_fraction=arguments.adaptra_memory_fraction,
        trace_dir=arguments.adaptra_trace_dir,
        trace=arguments.adaptra_trace,
        prometheus_port=arguments.adaptra_prometheus_port,
        prometheus_address=arguments.adaptra_prometheus_address,
        timeout_s=arguments.adaptra_timeout_s,
        host_transport=arguments.adaptra_host_transport,
        interface=arguments.adaptra_interface,
        rnics=arguments.adaptra_rnics,
        path=arguments.adaptra_path,
        dispatch=arguments.adaptra_dispatch,
    )
