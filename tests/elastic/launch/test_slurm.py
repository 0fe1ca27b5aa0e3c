# SPDX-License-Identifier: Apache-2.0
"""What a Slurm step's environment implies."""

from __future__ import annotations

import pytest

from adaptra_megatron.elastic.launch.endpoint import Endpoint
from adaptra_megatron.elastic.launch.launch_arguments import SlurmError, first_host, read_arguments, slurm_defaults

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_NNODES": "3",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "gpu[07-08],login1",
    "SLURM_NODEID": "1",
}


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[07-09,12],login1", "gpu07"),
        ("rack[1-2]n[003,5].cluster", "rack1n003.cluster"),
        ("a-b.example.org,c", "a-b.example.org"),
    ],
)
def test_the_first_host_of_a_list(node_list: str, host: str) -> None:
    assert first_host(node_list) == host


@pytest.mark.parametrize("node_list", ["[1-2", ",a", "$(x)"])
def test_a_list_without_a_first_host_is_refused(node_list: str) -> None:
    with pytest.raises(SlurmError, match="give --master-addr"):
        first_host(node_list)


def test_launchers_of_a_step_need_no_flags() -> None:
    settings = read_arguments(["--nproc-per-node", "1", "--no-kill", "train.py"], STEP)
    assert (settings.nodes, settings.node_rank, settings.endpoint.host) == (3, 1, "gpu07")
    assert settings.config.run_id == "4711.2"
    assert settings.endpoint == read_arguments(["train.py"], {**STEP, "SLURM_NODEID": "2"}).endpoint


def test_steps_have_ports_of_their_own() -> None:
    ports = {slurm_defaults({**STEP, "SLURM_JOB_ID": str(job)})["master_port"] for job in range(4711, 4731)}
    assert len(ports) == 20
    assert all(15000 <= port < 32000 for port in ports)


def test_what_is_given_stands() -> None:
    settings = read_arguments(["--nnodes", "1", "--master-port", "7777", "train.py"], STEP)
    assert (settings.nodes, settings.endpoint) == (1, Endpoint("127.0.0.1", 7777))


def test_outside_of_a_step_slurm_says_nothing() -> None:
    assert slurm_defaults({"SLURM_JOB_ID": "4711", "SLURM_NNODES": "3"}) == {}


def test_several_launchers_per_node_are_refused() -> None:
    with pytest.raises(SlurmError, match="one launcher per node"):
        slurm_defaults({**STEP, "SLURM_STEP_NUM_TASKS": "24"})
