# SPDX-License-Identifier: Apache-2.0
"""Read the command line of `adaptra launch`: torchrun's own parser, further flags, Slurm's variables, and refusals."""

from __future__ import annotations

import argparse
import re
import signal
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, get_args_parser, parse_min_max_nnodes

from adaptra_megatron.elastic.launch.endpoint import Endpoint
from adaptra_megatron.elastic.launch.launch_messages import beat_s
from adaptra_megatron.elastic.launch.roster import Policy

_PORTS = range(15000, 32000)
"""Ports below those that Linux assigns to outgoing connections."""


class SlurmError(ValueError):
    """The Slurm step does not run one launcher per node; names the variable and the remedy."""


def slurm_defaults(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of torchrun's flags that a Slurm step's environment implies; none outside of a step.

    The port is derived from the numbers of job and step, so that jobs that share a node have different ones. Raises
    SlurmError.
    """
    node_list = environment.get("SLURM_STEP_NODELIST")
    if not node_list or "SLURM_NODEID" not in environment:
        return {}
    nodes = int(environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES") or 1)
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS") or nodes)
    if tasks != nodes:
        raise SlurmError(
            f"SLURM_STEP_NUM_TASKS is {tasks} on {nodes} nodes: start one launcher per node, which starts its ranks "
            f"itself (srun --nodes {nodes} --ntasks-per-node 1 adaptra launch --nproc-per-node ...)"
        )
    job, step = environment.get("SLURM_JOB_ID", "0"), environment.get("SLURM_STEP_ID", "0")
    return {
        "nnodes": str(nodes),
        "node_rank": int(environment["SLURM_NODEID"]),
        "master_addr": first_host(node_list),
        "master_port": _PORTS[(int(job) * 31 + int(step)) % len(_PORTS)],
        "rdzv_id": f"{job}.{step}",
    }


def first_host(node_list: str) -> str:
    """Return the first host of a list in Slurm's notation, such as `gpu[07-09,12],login1`. Raises SlurmError."""
    found = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", node_list)
    host = re.sub(r"\[(\d+)[^\]]*\]", r"\1", found[0]) if found else ""
    if not re.fullmatch(r"[\w.-]+", host):
        raise SlurmError(f"SLURM_STEP_NODELIST is {node_list!r}, which has no first host: give --master-addr")
    return host


HEARTBEAT_TIMEOUT_S = 15.0
LEAST_BEATS = 10
"""Minimum number of missing reports of a host that counts as dead."""
_DEFAULT_PORT = 29500
_SHUTDOWN_TIMEOUT_S = 30
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
"""These two: for releases of torch whose torchrun has no flags for them."""
_WHERE = ("nnodes", "node_rank", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "standalone", "master_addr", "master_port")
"""Flags that Slurm's environment stands in for, if none of them is given."""
_REFUSED = {
    "start_method": "ranks are programs, started by exec",
    "run_path": "ranks are programs, started by exec: leave the flag out",
    "event_log_handler": "events are lines of the log",
    "logs_specs": "logs are where torchrun puts them by default: see --log-dir, --redirects and --tee",
    "virtual_local_rank": "LOCAL_RANK is the number on the host: set CUDA_VISIBLE_DEVICES in a --no-python script",
}
"""Flags of torchrun that are not supported here, unless they have their default value."""

_DESCRIPTION = """\
Start the ranks of a job on this host, as torchrun does, with the same flags and environment. The launcher of node rank
0 serves the job's store and is its coordinator. Under Slurm, one launcher per node needs no more than:

  srun --no-kill --kill-on-bad-exit=0 --ntasks-per-node=1 adaptra launch --nproc-per-node 8 --no-kill train.py ...
"""


class LaunchArgumentError(ValueError):
    """A flag is invalid or not supported; names it, its value and the remedy."""


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """Settings of one launcher."""

    nodes: int
    node_rank: int | None
    """None: assigned when the store is served or reached."""
    endpoint: Endpoint
    policy: Policy
    config: LaunchConfig
    """torchrun's settings, from the same flags: run id, role, ranks of this host, logs."""
    name: str
    """Name of the script or program, as given."""
    command: str
    arguments: tuple[str, ...]
    """Arguments of the command; `${local_rank}` in them is replaced."""

    @property
    def shutdown_timeout_s(self) -> float:
        """Return how long ranks may take to end before they are killed, in seconds."""
        return float(getattr(self.config, "shutdown_timeout", _SHUTDOWN_TIMEOUT_S))

    @property
    def signals(self) -> list[signal.Signals]:
        """Return the signals that end this launcher and are passed on to its ranks."""
        return [signal.Signals[name.strip()] for name in _signal_names(self.config).split(",")]


def launch_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line: torchrun's flags and ours."""
    parser = get_args_parser()
    parser.prog, parser.description = "adaptra launch", _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    ours = parser.add_argument_group("jobs that survive rank failures (not in torchrun)")
    ours.add_argument(
        "--no-kill",
        "--no_kill",
        action="store_true",
        help="keep live ranks running when others fail, and record them in the job's store (default: the "
        "first failure ends the job, as with torchrun)",
    )
    ours.add_argument(
        "--min-ranks",
        "--min_ranks",
        type=int,
        default=1,
        metavar="N",
        help="with --no-kill: end the job when fewer ranks are live (default: 1)",
    )
    ours.add_argument(
        "--heartbeat-timeout",
        "--heartbeat_timeout",
        type=float,
        metavar="SECONDS",
        help="a host whose launcher is silent for longer counts as dead, and a launcher that does not reach the "
        f"coordinator for longer ends its ranks (default: {HEARTBEAT_TIMEOUT_S:g}, and more from 1,500 hosts on)",
    )
    return parser


def read_arguments(arguments: Sequence[str], environment: Mapping[str, str]) -> LaunchSettings:
    """Return the settings of a command line. Raises LaunchArgumentError and SlurmError; SystemExit as argparse does.

    As torchrun does, sets OMP_NUM_THREADS in `os.environ` if there are several ranks and it is not set.
    """
    parser = launch_parser()
    args = parser.parse_args(arguments)
    if all(getattr(args, name) == parser.get_default(name) for name in _WHERE):
        vars(args).update(slurm_defaults(environment))
    _refuse(args, parser)
    try:
        least, nodes = parse_min_max_nnodes(args.nnodes)
    except (ValueError, RuntimeError) as cause:
        raise LaunchArgumentError(f"--nnodes {args.nnodes}: {cause}") from cause
    if least != nodes or nodes < 1:
        raise LaunchArgumentError(
            f"--nnodes {args.nnodes}: the number of hosts is fixed when the job starts; give one number, and --no-kill "
            "with --min-ranks for a job that goes on without some of its ranks"
        )
    # A job of one host needs no port that others know, and with any free one it meets no other job of the host.
    alone = args.standalone or (nodes == 1 and not args.rdzv_endpoint and args.master_port is None)
    if alone:
        args.rdzv_id, args.rdzv_backend, args.rdzv_endpoint, nodes = str(uuid.uuid4()), "c10d", "localhost:0", 1
    if args.master_port is None:
        args.master_port = _DEFAULT_PORT
    try:
        config, command, rest = config_from_args(args)
        join_timeout_s = float(config.rdzv_configs.get("join_timeout", config.rdzv_configs["timeout"]))
    except (ValueError, AssertionError, OSError) as cause:
        raise LaunchArgumentError(str(cause)) from cause
    _check(args, config, nodes)
    assert isinstance(command, str)
    return LaunchSettings(
        nodes=nodes,
        # torchrun, too, ignores --node-rank with c10d, and numbers hosts as they arrive (run.py, config_from_args).
        node_rank=args.node_rank if args.rdzv_backend == "static" else None,
        endpoint=_endpoint(config.rdzv_endpoint),
        policy=Policy(
            no_kill=args.no_kill,
            min_ranks=args.min_ranks if args.no_kill else 1,
            heartbeat_timeout_s=args.heartbeat_timeout or max(HEARTBEAT_TIMEOUT_S, LEAST_BEATS * beat_s(nodes)),
            join_timeout_s=join_timeout_s,
        ),
        config=config,
        name=args.training_script,
        command=command,
        arguments=tuple(rest),
    )


def _refuse(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    for name, reason in _REFUSED.items():
        if getattr(args, name, None) != parser.get_default(name):
            raise LaunchArgumentError(f"--{name.replace('_', '-')} {getattr(args, name)}: {reason}")
    if args.rdzv_backend not in ("static", "c10d"):
        raise LaunchArgumentError(
            f"--rdzv-backend {args.rdzv_backend}: the launcher of node rank 0 serves the job's store itself; leave the "
            "flag out, or give c10d and --rdzv-endpoint HOST:PORT of that launcher"
        )


def _check(args: argparse.Namespace, config: LaunchConfig, nodes: int) -> None:
    if config.nproc_per_node < 1:
        raise LaunchArgumentError(f"--nproc-per-node {args.nproc_per_node}: at least 1")
    if args.rdzv_backend == "static" and not 0 <= args.node_rank < nodes:
        raise LaunchArgumentError(f"--node-rank {args.node_rank}: from 0 to {nodes - 1}, for --nnodes is {nodes}")
    least_s = LEAST_BEATS * beat_s(nodes)
    if args.heartbeat_timeout is not None and args.heartbeat_timeout < least_s:
        raise LaunchArgumentError(
            f"--heartbeat-timeout {args.heartbeat_timeout:g}: at least {least_s:g} s, for {LEAST_BEATS} reports of the "
            f"launchers of {nodes} hosts"
        )
    for name in _signal_names(config).split(","):
        if name.strip() not in signal.Signals.__members__:
            raise LaunchArgumentError(f"--signals-to-handle {_signal_names(config)}: {name!r} is no signal's name")
    if args.max_restarts < 0 or (args.max_restarts and not args.no_kill):
        raise LaunchArgumentError(
            f"--max-restarts {args.max_restarts}: at least 0, and more only together with --no-kill, where ranks that "
            "have died are started again while the others go on; else resume from a checkpoint with a new job"
        )
    if args.min_ranks < 1 or (args.min_ranks > 1 and not args.no_kill):
        raise LaunchArgumentError(f"--min-ranks {args.min_ranks}: at least 1, and more only together with --no-kill")


def _signal_names(config: LaunchConfig) -> str:
    return getattr(config, "signals_to_handle", _SIGNALS)


def _endpoint(text: str) -> Endpoint:
    host, _, port = text.rpartition(":")
    if not host:
        host, port = text, str(_DEFAULT_PORT)
    if not port.isdecimal() or int(port) > 65535:
        raise LaunchArgumentError(f"{text!r} is no HOST:PORT: give --rdzv-endpoint, or --master-addr and --master-port")
    return Endpoint(host.strip("[]"), int(port))
