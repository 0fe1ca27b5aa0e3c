# SPDX-License-Identifier: Apache-2.0
"""`adaptra launch --no-kill` and a training that goes on when one of its ranks is killed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from launches import Launched, Launches
from support.namespaces import ADDRESSES, WIRE, Host, cut, joined_hosts

from adaptra_megatron.tools.local_ranks.launch_ranks import free_port
from campaigns.dying_trainings import BACK, TRAIN_GPT, WITHIN, Layout, dumped
from testing.results import fingerprint, relative_distances
from testing.waiting import until

WAITING_FOR_ALL = ("--emulate-wait-for-arrivals", "3")


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_rank_that_stands_still_is_ended_and_survived(launches: Launches, tmp_path: Path) -> None:
    """It is stopped: its process lives, and its host reports."""
    layout = Layout(2, 2, adaptra=f"{Layout.adaptra} --adaptra-timeout-s 5")
    arguments = layout.arguments(tmp_path / "stopped", ["1:3:1:stop"])
    launched = launches.launch("--nproc-per-node", 4, "--no-kill", TRAIN_GPT, *arguments)
    assert launched.wait(120) == 0, launched.output
    assert "rank 1 (stage 0 on" in launched.output
    assert "no answer for 10.0 s" in launched.output
    assert "stalled: 3 other ranks waited for 10.0 s, and was killed by SIGKILL" in launched.output
    assert "recovered: interrupted work was run again" in launched.output
    assert {path.name for path in (tmp_path / "stopped").glob("rank*.pt")} == {"rank0.pt", "rank2.pt", "rank3.pt"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_rank_is_started_again_and_trains_with_the_others(launches: Launches, tmp_path: Path) -> None:
    layout, logs = Layout(2, 2), tmp_path / "logs"
    arguments = layout.arguments(tmp_path / "death", ["1:2:1"])
    again = ("--no-kill", "--max-restarts", 1, "--redirects", 3, "--log-dir", logs)
    launched = launches.launch("--nproc-per-node", 4, *again, TRAIN_GPT, *arguments, *WAITING_FOR_ALL)
    assert launched.wait(200) == 0, launched.output
    assert "local rank 1 was killed by SIGKILL and is started again in 1 s (1 of 1 times" in launched.output
    assert "rank 1 stands ready again" in launched.output
    assert "but without" not in launched.output
    (log,) = logs.glob("**/1/stdout.log.again-1")
    assert BACK in log.read_text()
    prints = [fingerprint(parameters(dumped(tmp_path / "death", rank))) for rank in range(4)]
    assert prints[0] == prints[1]
    assert prints[2] == prints[3]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_host_that_is_gone_is_replaced_and_its_rank_trains_with_the_others(
    launches: Launches, tmp_path: Path
) -> None:
    """The fourth iteration waits until a rank has died and all are back."""
    layout = Layout(2, 2)
    arguments = layout.arguments(tmp_path / "death", [])
    where = ("--nnodes", 2, "--master-port", free_port(), "--heartbeat-timeout", 4)
    again = ("--no-kill", "--max-restarts", 1)
    hosts = [
        launches.launch(
            *where, *again, "--node-rank", node, "--nproc-per-node", ranks, TRAIN_GPT, *arguments, *WAITING_FOR_ALL
        )
        for node, ranks in enumerate((3, 1))
    ]
    until(lambda: "iteration        3/" in hosts[1].output, lambda: hosts[1].output, 120)
    hosts[1].signal(signal.SIGKILL)
    spare = launches.again(1)
    assert [hosts[0].wait(200), spare.wait()] == [0, 0], hosts[0].output + spare.output
    assert "has been silent for" in hosts[0].output
    assert "rank 3 stands ready again" in hosts[0].output
    assert BACK in spare.output
    assert "but without" not in hosts[0].output
    prints = [fingerprint(parameters(dumped(tmp_path / "death", rank))) for rank in range(4)]
    assert prints[0] == prints[1]
    assert prints[2] == prints[3]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_host_that_is_cut_off_is_replaced_by_one_with_another_address(launches: Launches, tmp_path: Path) -> None:
    """Three networks. The one that is cut off learns that the coordinator is gone, and ends by itself."""
    layout = Layout(2, 2, adaptra="--adaptra --adaptra-reroute failures --adaptra-host-transport tcp")
    arguments = layout.arguments(tmp_path / "death", [])
    where = ("--nnodes", 2, "--master-addr", ADDRESSES[0], "--master-port", free_port(), "--heartbeat-timeout", 6)
    again = ("--no-kill", "--max-restarts", 1)

    def start(host: Host, node: int) -> Launched:
        ranks = ("--node-rank", node, "--nproc-per-node", 3 - 2 * node)
        words = (*where, *again, *ranks, TRAIN_GPT, *arguments, "--adaptra-interface", WIRE, *WAITING_FOR_ALL)
        return launches.launch_in(host, *words, environment={"GLOO_SOCKET_IFNAME": WIRE})

    with joined_hosts(3) as (first, second, third):
        both = [start(host, node) for node, host in enumerate((first, second))]
        until(lambda: "iteration        3/" in both[1].output, lambda: both[0].output + both[1].output, 120)
        cut((first, second))
        spare = start(third, 1)
        assert [both[0].wait(200), spare.wait(), both[1].wait()] == [0, 0, 1], both[0].output + spare.output
    assert "has been silent for" in both[0].output
    assert "takes the place of host" in both[0].output
    assert "rank 3 stands ready again" in both[0].output
    assert BACK in spare.output
    prints = [fingerprint(parameters(dumped(tmp_path / "death", rank))) for rank in range(4)]
    assert prints[0] == prints[1]
    assert prints[2] == prints[3]


def parameters(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name.startswith("parameter ")}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_rank_is_survived(launches: Launches, tmp_path: Path) -> None:
    layout, launched = Layout(2, 2), []
    for name, deaths in (("peace", []), ("death", ["1:3:+20"])):
        arguments = layout.arguments(tmp_path / name, deaths)
        launched.append(launches.launch("--nproc-per-node", 4, "--no-kill", TRAIN_GPT, *arguments))
        assert launched[-1].wait(120) == 0, launched[-1].output
    assert "recovered: interrupted work was run again" in launched[1].output
    assert not (tmp_path / "death" / "rank1.pt").exists()
    for rank in (0, 2, 3):
        distances = relative_distances(dumped(tmp_path / "peace", rank), dumped(tmp_path / "death", rank))
        assert all(far <= WITHIN[each] for each, far in distances.items()), distances
