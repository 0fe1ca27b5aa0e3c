# SPDX-License-Identifier: Apache-2.0
"""Files of examples/ start what they say, with flags that exist, and agree with each other and docs/environment.md.

Launchers and schedulers are stand-ins on PATH that write down how they were called.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.processes import REPOSITORY

from adaptra_megatron.common.ports import PortRange
from adaptra_megatron.config import AdaptraConfig, add_adaptra_arguments, config_from_arguments
from adaptra_megatron.elastic.launch.launch_arguments import launch_parser

EXAMPLES = REPOSITORY / "examples"
PORTS = PortRange(20000, 20127)
STAND_IN = """#!/bin/sh
[ "$(basename "$0")" = scontrol ] && echo node7 && exit
for word in "$(basename "$0")" "$@"; do printf '%s\\0' "$word"; done >>"$CALLS"
printf '%s\\0' "secret=$(stat -c %a "$ADAPTRA_SECRET_FILE" 2>/dev/null)" >>"$CALLS"
"""
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "node[7-9]",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_SUBMIT_DIR": str(REPOSITORY),
}


def called(tmp_path: Path, script: str, **environment: str) -> list[str]:
    """Words of the one command that a script runs, the program first, and behind them the mode of the secret's file."""
    for name in ("torchrun", "adaptra", "ft_launcher", "srun", "scontrol"):
        (tmp_path / name).write_text(STAND_IN)
        (tmp_path / name).chmod(0o755)
    calls = tmp_path / "calls"
    around = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path), "CALLS": str(calls), **environment}
    done = subprocess.run(["bash", str(EXAMPLES / script)], env=around, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
    return calls.read_text().split("\0")[:-1]


def config_in(words: list[str]) -> AdaptraConfig:
    """Settings that our flags among `words` stand for; all others are Megatron's."""
    parser = add_adaptra_arguments(argparse.ArgumentParser(allow_abbrev=False))
    arguments, others = parser.parse_known_args(words)
    assert arguments.adaptra
    assert not [word for word in others if word.startswith("--adaptra")]
    return config_from_arguments(arguments)


@pytest.mark.parametrize("launcher", ["torchrun", "adaptra launch", "ft_launcher"])
def test_two_hosts_start_a_launcher_each(launcher: str, tmp_path: Path) -> None:
    given = {"NODE_RANK": "1", "MASTER_ADDR": "host0", "LAUNCHER": launcher, "MEGATRON_LM": "/megatron"}
    words = called(tmp_path, "two_hosts.sh", **given)
    program = launcher.split()
    assert words[: len(program)] == program
    args = launch_parser().parse_args(words[len(program) : -1])  # torchrun's own, and ft_launcher has these too
    assert (args.nnodes, args.node_rank, args.nproc_per_node) == ("2", 1, "8")
    assert (args.master_addr, args.master_port) == ("host0", 29400)
    assert args.training_script == "/megatron/pretrain_gpt.py"
    assert config_in(args.training_script_args).port_range == PORTS


def test_a_host_without_a_number_is_told_what_lacks(tmp_path: Path) -> None:
    command = ["bash", str(EXAMPLES / "two_hosts.sh")]
    done = subprocess.run(command, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=20)
    assert done.returncode != 0
    assert "NODE_RANK: the number of this host: 0 or 1" in done.stderr


@pytest.mark.parametrize(
    ("given", "starts"),
    [
        ({}, ["torchrun", "--nnodes", "3"]),
        ({"LAUNCHER": "adaptra launch"}, ["adaptra", "launch", "--nproc-per-node"]),
        ({"LAUNCHER": "adaptra launch", "NO_KILL": "1"}, ["adaptra", "launch", "--nproc-per-node"]),
        ({"CONTAINER": "/images/gpt.sqsh"}, ["torchrun", "--nnodes", "3"]),
    ],
)
def test_slurm_starts_one_launcher_per_node(given: dict[str, str], starts: list[str], tmp_path: Path) -> None:
    words = called(tmp_path, "slurm.sbatch", **SLURM, **given)
    first = words.index(starts[0])
    step, command = words[:first], words[first:-1]
    fault_tolerant = "NO_KILL" in given
    assert step[:3] == ["srun", "--nodes=3", "--ntasks-per-node=1"]
    assert ("--container-image=/images/gpt.sqsh" in step) == ("CONTAINER" in given)
    assert ("--no-kill" in step and "--kill-on-bad-exit=0" in step) == fault_tolerant
    assert command[:3] == starts
    args = launch_parser().parse_args(command[2 if starts[0] == "adaptra" else 1 :])
    assert args.no_kill == fault_tolerant
    assert config_in(args.training_script_args).is_fault_tolerant == fault_tolerant
    if starts[0] == "torchrun":
        assert args.rdzv_endpoint == "node7:29400"
    assert words[-1] == "secret=600"
    assert not list(tmp_path.glob(".adaptra-secret*")), "it is to go with the job"


@pytest.fixture(scope="module")
def manifest() -> dict[str, dict[str, Any]]:
    """Objects of the manifest by kind."""
    return {each["kind"]: each for each in yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())}


def test_pods_find_each_other(manifest: dict[str, dict[str, Any]]) -> None:
    service, job = manifest["Service"], manifest["Job"]
    name, template = job["metadata"]["name"], job["spec"]["template"]
    pod = template["spec"]
    environment = {each["name"]: each["value"] for each in pod["containers"][0]["env"]}
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert environment["MASTER_ADDR"] == f"{name}-0.{pod['subdomain']}"
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    labels = template["metadata"]["labels"]
    policy = manifest["NetworkPolicy"]["spec"]
    apart = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0]
    selectors = (policy["podSelector"], policy["ingress"][0]["from"][0]["podSelector"], apart["labelSelector"])
    assert service["spec"]["selector"] == labels
    assert all(selector["matchLabels"] == labels for selector in selectors)


def test_what_pods_listen_on_is_let_through(manifest: dict[str, dict[str, Any]]) -> None:
    container = manifest["Job"]["spec"]["template"]["spec"]["containers"][0]
    environment = {each["name"]: each["value"] for each in container["env"]}
    (rule,) = manifest["NetworkPolicy"]["spec"]["ingress"]
    opened = {(each["protocol"], each["port"], each.get("endPort")) for each in rule["ports"]}
    assert ("TCP", int(environment["MASTER_PORT"]), None) in opened
    assert ("TCP", PORTS.first, PORTS.last) in opened
    assert ("UDP", 4791, None) in opened
    (service_port,) = manifest["Service"]["spec"]["ports"]
    assert service_port["port"] == int(environment["MASTER_PORT"])


def test_pods_may_lock_memory_and_have_what_they_mount(manifest: dict[str, dict[str, Any]]) -> None:
    pod = manifest["Job"]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    volumes = {each["name"]: each for each in pod["volumes"]}
    environment = {each["name"]: each["value"] for each in container["env"]}
    assert "IPC_LOCK" in container["securityContext"]["capabilities"]["add"]
    assert mounts.keys() == volumes.keys()
    assert mounts["shared-memory"] == "/dev/shm"
    assert volumes["shared-memory"]["emptyDir"]["medium"] == "Memory"
    assert volumes["secret"]["secret"]["defaultMode"] == 0o400
    assert environment["ADAPTRA_SECRET_FILE"] == f"{mounts['secret']}/secret"
    assert environment["RUN_DIRECTORY"] == mounts["run"]
    script = re.search(r"exec (\S+)", container["args"][0])
    assert script is not None
    assert (REPOSITORY / script[1]).stat().st_mode & 0o111


NO_VARIABLE = re.compile(r".*_(PATCHES|ERR|FATAL)|M_[SW]|SLICE_(BEGIN|END)|WORTH_SAYING")
"""Constants of the package that are spelled like environment variables."""


def spelled_like_variables() -> set[str]:
    spelled = re.compile(r"""["']((?:[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)|RANK)["']""")
    return {
        name
        for folder in ("adaptra_megatron", "patches")
        for source in (REPOSITORY / folder).rglob("*.py")
        if not {"local_ranks", "transport_bench"} & set(source.parts)
        for name in spelled.findall(source.read_text())
    }


def test_every_variable_that_the_package_reads_or_sets_is_in_the_table() -> None:
    ours = {name for name in spelled_like_variables() if not NO_VARIABLE.fullmatch(name)}
    table = (REPOSITORY / "docs" / "environment.md").read_text()
    rows = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `")]
    listed = {name for row in rows for name in re.findall(r"`(\w+)", row)}
    assert len(ours) > 30
    assert ours - listed == set()
    exported = re.findall(r"export ((?:\w+=\S+ ?)+)", "".join(each.read_text() for each in EXAMPLES.glob("*.s*")))
    assert {name for line in exported for name in re.findall(r"(\w+)=", line)} <= listed


def test_each_example_is_explained() -> None:
    names = ("cluster.md", "api.md", "questions.md", "hooks.md")
    pages = "".join((REPOSITORY / "docs" / name).read_text() for name in names)
    assert {f"examples/{each.name}" for each in EXAMPLES.iterdir()} <= set(re.findall(r"examples/[\w.]+\w", pages))
