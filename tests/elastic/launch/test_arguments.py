# SPDX-License-Identifier: Apache-2.0
"""Command lines: torchrun's, and those that are refused with the reason."""

from __future__ import annotations

import pytest

from adaptra_megatron.elastic.launch.endpoint import Endpoint
from adaptra_megatron.elastic.launch.launch_arguments import LaunchArgumentError, read_arguments
from adaptra_megatron.tools.cli.main import main


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--max-restarts 2", "resume from a checkpoint"),
        ("--rdzv-backend etcd --rdzv-endpoint a:1", "serves the job's store itself"),
        ("--nnodes 2:4", "the number of hosts is fixed"),
        ("--nnodes two", "--nnodes two"),
        ("--nnodes 2 --node-rank 2", "from 0 to 1"),
        ("--nproc-per-node 0", "at least 1"),
        ("--nproc-per-node many", "many"),
        ("--min-ranks 2", "only together with --no-kill"),
        ("--no-kill --heartbeat-timeout 0.5", "at least 2 s"),
        ("--nnodes 2 --rdzv-endpoint host:port", "is no HOST:PORT"),
        ("--run-path", "ranks are programs"),
        ("--nnodes 2 --rdzv-conf timeout=soon", "'soon'"),
        ("--signals-to-handle SIGTERM,SIGFOO", "no signal's name"),
        ("--start-method fork", "ranks are programs"),
        ("--no-python --module", "--no-python"),
        ("--local-ranks-filter a", "integers"),
    ],
)
def test_what_is_refused_and_why(options: str, reason: str) -> None:
    with pytest.raises(LaunchArgumentError, match=reason):
        read_arguments([*options.split(), "train.py"], {})


@pytest.mark.parametrize(
    ("options", "endpoint", "node_rank"),
    [
        ("--nnodes 2 --node-rank 1 --master-addr a", Endpoint("a", 29500), 1),
        ("--nnodes 2 --node-rank 1 --rdzv-endpoint b:1234", Endpoint("b", 1234), 1),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint c", Endpoint("c", 29500), None),
        ("--nnodes 2 --rdzv-endpoint [::1]:1234", Endpoint("::1", 1234), 0),
        ("--standalone --nnodes 2 --master-port 1", Endpoint("localhost", 0), None),
        ("", Endpoint("localhost", 0), None),
        ("--master-port 1234", Endpoint("127.0.0.1", 1234), 0),
    ],
)
def test_where_the_store_is(options: str, endpoint: Endpoint, node_rank: int | None) -> None:
    settings = read_arguments([*options.split(), "train.py"], {})
    assert (settings.endpoint, settings.node_rank) == (endpoint, node_rank)


def test_the_scripts_own_flags_are_left_to_it() -> None:
    settings = read_arguments(["-m", "pretrain", "--nnodes", "7", "--no-kill"], {})
    assert settings.arguments == ("-u", "-m", "pretrain", "--nnodes", "7", "--no-kill")
    assert (settings.nodes, settings.policy.no_kill) == (1, False)


def test_the_command_says_it_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--max-restarts", "2", "train.py"]) == 2
    assert capsys.readouterr().err.startswith("adaptra: launch: --max-restarts 2: at least 0, and more only together")
