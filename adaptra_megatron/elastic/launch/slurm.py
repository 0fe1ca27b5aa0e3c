# SPDX-License-Identifier: Apache-2.0
"""Read what Slurm says about a step with one launcher per node: `srun --no-kill --kill-on-bad-exit=0 adaptra launch
...`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_PORTS = range(15000, 32000)
"""Below those that Linux takes for outgoing connections."""


class SlurmError(ValueError):
    """The step is no set of launchers, one per node; names the variable and the remedy."""


def defaults(environment: Mapping[str, str]) -> dict[str, Any]:
    """Values of torchrun's flags that a step's environment implies; none outside of a step.

    The port comes from the numbers of job and step, so that jobs that share a node have different ones. Raises
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
    """The first host of a list in Slurm's notation, such as `gpu[07-09,12],login1`. Raises SlurmError."""
    found = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", node_list)
    host = re.sub(r"\[(\d+)[^\]]*\]", r"\1", found[0]) if found else ""
    if not re.fullmatch(r"[\w.-]+", host):
        raise SlurmError(f"SLURM_STEP_NODELIST is {node_list!r}, which has no first host: give --master-addr")
    return host
