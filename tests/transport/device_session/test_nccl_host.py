# SPDX-License-Identifier: Apache-2.0
"""Links over NCCL's own host code, built from its sources, on made-up CUDA: `make test-nccl-host`.

Two processes each. `network`: each on a host of its own as NCCL sees it, connected by sockets; else by shared memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RANKS = Path(__file__).parents[1] / "ranks/nccl_host_ranks.py"
TESTS = Path(__file__).parents[2]
# The memory that NCCL would share by its virtual addresses has no counterpart here.
SETTINGS = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_CUMEM_ENABLE": "0", "NCCL_CUMEM_HOST_ENABLE": "0", "NCCL_DEBUG": "WARN"}
TIMEOUT_S = 150.0

pytestmark = pytest.mark.nccl_host


@pytest.mark.parametrize("network", [False, True], ids=["memory", "network"])
@pytest.mark.parametrize(
    ("case", "killed"),
    [
        ("bytes_arrive", None),
        ("sent_before_it_is_asked_for", None),
        ("large_sends_wait", None),
        ("sessions_carry_messages", None),
        ("works_of_a_transfer", None),
        ("abort_while_a_receive_stands", None),
        ("abort_while_it_connects", None),
        ("killed_before_it_comes_0", 0),
        ("killed_before_it_comes_1", 1),
        ("killed_while_a_receive_stands", 0),
        ("full_launch_queue", None),
        ("end_next_to_a_stalled_link", None),
    ],
)
def test_nccl_does_what_links_expect(case: str, killed: int | None, network: bool, tmp_path: Path) -> None:
    ranks = []
    for rank in range(2):
        environment = os.environ | SETTINGS | {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
        environment |= {"NCCL_HOSTID": f"host {rank}"} if network else {}
        environment |= {"MADE_UP_CUDA_QUEUE_DEPTH": "12"} if case == "full_launch_queue" else {}
        command = [sys.executable, str(RANKS), case, str(rank), str(tmp_path)]
        with (tmp_path / f"{rank}.log").open("wb") as log:
            ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    try:
        ends = [rank.wait(TIMEOUT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    logs = "\n".join((tmp_path / f"{rank}.log").read_text() for rank in range(2))
    assert ends == [-9 if rank == killed else 0 for rank in range(2)], logs
