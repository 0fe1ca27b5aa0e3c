# SPDX-License-Identifier: Apache-2.0
"""`adaptra launch` on several hosts: launchers next to each other, and in network namespaces of their own."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator

import pytest
from launches import ENDED_S, Launched, Launches
from support.namespaces import ADDRESSES, Host, cut, joined_hosts

from adaptra_megatron.tools.local_ranks.launch_ranks import free_port
from testing.waiting import until

SILENT = ("--heartbeat-timeout", 3)
"""Options of jobs in which a launcher stops reporting. Others keep the default: a busy machine delays reports, too."""
WAITING = "mark('pid', str(os.getpid())); until('go-on'); mark('done', os.environ['GROUP_RANK'])"
"""What ranks do in most tests."""


def start(launches: Launches, *options: object, script: str = WAITING, address: str = "127.0.0.1") -> list[Launched]:
    """Two launchers, of one and of two ranks."""
    port, path = free_port(), launches.script(script)
    where = ("--nnodes", 2, "--master-addr", address, "--master-port", port)
    return [
        launches.launch(
            *where, "--shutdown-timeout", 1, *options, "--node-rank", node, "--nproc-per-node", 1 + node, path
        )
        for node in (1, 0)
    ][::-1]


def all_wait(launches: Launches, launched: list[Launched]) -> list[int]:
    """Process ids of the three ranks, once all run."""
    return [int(launches.until(f"pid-{rank}", launched[rank > 0])) for rank in range(3)]


def test_ranks_are_numbered_by_host_and_end_together(launches: Launches) -> None:
    both = start(launches)
    all_wait(launches, both)
    (launches.directory / "go-on").touch()
    assert [each.wait() for each in both] == [0, 0], both[0].output + both[1].output
    assert [launches.until(f"done-{rank}", both[0]) for rank in range(3)] == ["0", "1", "1"]


def test_a_failure_on_one_host_ends_all_and_each_launcher_says_whose_it_was(launches: Launches) -> None:
    both = start(launches)
    pids = all_wait(launches, both)
    os.kill(pids[2], signal.SIGKILL)
    assert [each.wait() for each in both] == [1, 1]
    assert all("rank 2 on host" in each.output and "was killed by SIGKILL" in each.output for each in both)


@pytest.mark.parametrize("no_kill", [False, True])
def test_a_silent_host_counts_as_dead(launches: Launches, no_kill: bool) -> None:
    """Until then nothing happens; should it come back, its ranks end."""
    both = start(launches, *SILENT, *["--no-kill"] * no_kill)
    all_wait(launches, both)
    both[1].signal(signal.SIGSTOP)
    if no_kill:
        launches_says(both[0], "epoch 1: rank 2 of host")
        both[1].signal(signal.SIGCONT)
        assert both[1].wait() == 1
        assert "counts its ranks as dead" in both[1].output
        (launches.directory / "go-on").touch()
    assert both[0].wait() == (0 if no_kill else 1), both[0].output
    assert "(node rank 1) has been silent for" in both[0].output
    assert (launches.directory / "done-0").exists() == no_kill
    if not no_kill:
        both[1].signal(signal.SIGCONT)
        assert both[1].wait() == 1


TAKING_PLACES = """
    from adaptra_megatron.elastic.process_group_manager import departure_to_replace
    from adaptra_megatron.common.membership import MembershipRecords, Readiness
    records, place = MembershipRecords.of_rank(10.0), departure_to_replace()
    if place is not None:
        records.say_ready(rank, Readiness(place.epoch, int(os.environ["ADAPTRA_STARTED_AGAIN"]), "spare", "boot/net"))
        mark("again")
    elif rank == 0:
        records.publish_layout(b"layout")
    mark("pid")
    until("go-on")
    if rank == 0:
        records.say_admitted({each.rank: each.epoch for each in records.newest().arrived})
    """
IMPORTED_S = 60.0
"""For ranks that import torch."""


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_another_launcher_takes_the_place_of_a_host_that_is_gone_and_the_first_is_sent_away(
    launches: Launches,
) -> None:
    both = start(launches, *SILENT, "--no-kill", "--max-restarts", 1, script=TAKING_PLACES)
    for rank in range(3):
        launches.until(f"pid-{rank}", both[rank > 0], IMPORTED_S)
    both[1].signal(signal.SIGSTOP)
    spare = launches.again(1)
    for rank in (1, 2):
        launches.until(f"again-{rank}", spare, IMPORTED_S)
        launches_says(both[0], f"rank {rank} stands ready again on host spare")
    assert "takes the place of host" in both[0].output
    both[1].signal(signal.SIGCONT)
    assert both[1].wait() == 1
    assert "counted as dead, and another has taken its place meanwhile" in both[1].output
    (launches.directory / "go-on").touch()
    assert [both[0].wait(), spare.wait()] == [0, 0], both[0].output + spare.output
    assert "without" not in both[0].output


def launches_says(launched: Launched, text: str) -> None:
    until(lambda: text in launched.output, lambda: launched.output, ENDED_S)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_without_the_coordinator_the_others_end_with_an_error_that_says_so(
    launches: Launches, number: signal.Signals
) -> None:
    both = start(launches, *SILENT, "--no-kill")
    all_wait(launches, both)
    both[0].signal(number)
    assert both[1].wait() == 1
    assert "(launcher of node rank 0) is gone" in both[1].output
    assert ("it has been silent for" in both[1].output) == (number == signal.SIGSTOP)
    assert "start the job again from its last checkpoint" in both[1].output
    if number == signal.SIGSTOP:
        both[0].signal(signal.SIGCONT)
        (launches.directory / "go-on").touch()
        both[0].wait()


def test_a_host_that_is_sent_away_leaves_at_once_and_the_others_go_on(launches: Launches) -> None:
    """Its ranks have left even if they end with status 0, as those do that save their state on a signal."""
    patience = ("--no-kill", "--shutdown-timeout", 30)
    both = start(launches, *patience, script=f"signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n{WAITING}")
    all_wait(launches, both)
    both[1].signal(signal.SIGTERM)
    assert both[1].wait() == 128 + signal.SIGTERM
    launches_says(both[0], "epoch 1: rank 2 of host")
    (launches.directory / "go-on").touch()
    assert both[0].wait() == 0, both[0].output
    assert "ended with exit status 0, after its launcher received SIGTERM" in both[0].output


def test_hosts_of_torchruns_c10d_backend_find_their_numbers(launches: Launches) -> None:
    path, port = launches.script(WAITING), free_port()
    where = ("--nnodes", 2, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "tested")
    both = [launches.launch(*where, path) for _ in range(2)]
    (launches.directory / "go-on").touch()
    assert [each.wait() for each in both] == [0, 0], both[0].output + both[1].output
    assert {launches.until(f"done-{rank}", both[0]) for rank in range(2)} == {"0", "1"}


def test_a_slurm_step_says_where_the_hosts_are(launches: Launches) -> None:
    path = launches.script(WAITING)
    step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NNODES": "2"}
    step |= {"SLURM_STEP_NODELIST": "localhost,gpu[02-03]"}
    both = [launches.launch(path, environment={**step, "SLURM_NODEID": str(node)}) for node in range(2)]
    (launches.directory / "go-on").touch()
    assert [each.wait() for each in both] == [0, 0], both[0].output + both[1].output
    assert [launches.until(f"done-{rank}", both[0]) for rank in range(2)] == ["0", "1"]


def test_hosts_that_do_not_come_are_told_apart_from_those_that_do(launches: Launches) -> None:
    where = ("--nnodes", 3, "--master-port", free_port(), "--rdzv-conf", "timeout=10")
    path = launches.script(WAITING)
    first, second, third = (launches.launch(*where, "--node-rank", node, path) for node in (0, 1, 1))
    assert {first.wait(), second.wait(), third.wait()} == {1}
    assert "1 of 3 hosts (node ranks 2) have not come within" in first.output
    twins = [second.output, third.output]
    assert any("node rank 1 of the job at 127.0.0.1" in each and "is taken by a launcher" in each for each in twins)
    assert any("1 of 3 hosts" in each for each in twins)


def test_a_port_that_is_taken_is_said(launches: Launches) -> None:
    port, path = free_port(), launches.script(WAITING)
    first = launches.launch("--master-port", port, path)
    launches.until("pid-0", first)
    second = launches.launch("--master-port", port, path)
    assert second.wait() == 1
    assert f"cannot be served at 127.0.0.1:{port}: another process listens there" in second.output
    (launches.directory / "go-on").touch()
    assert first.wait() == 0


def test_a_store_that_accepts_and_does_not_answer_is_given_up(launches: Launches) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        patience = (*SILENT, "--rdzv-conf", "timeout=1")
        where = ("--nnodes", 2, "--master-port", port, "--node-rank", 1)
        launched = launches.launch(*where, *patience, launches.script(WAITING))
        assert launched.wait(40.0) == 1
    assert f"store at 127.0.0.1:{port} accepts connections, but has not answered for" in launched.output


@pytest.fixture
def hosts() -> Iterator[tuple[Host, ...]]:
    with joined_hosts(2) as both:
        yield both


def start_in(hosts: tuple[Host, ...], launches: Launches, *options: object) -> list[Launched]:
    """As `start`, each launcher in the network of its host."""
    port, path = free_port(), launches.script(WAITING)
    where = ("--nnodes", 2, "--master-addr", ADDRESSES[0], "--master-port", port)
    patience = (*SILENT, "--shutdown-timeout", 1)
    return [
        launches.launch_in(host, *where, *patience, *options, "--node-rank", node, "--nproc-per-node", 1 + node, path)
        for node, host in enumerate(hosts)
    ]


def test_a_network_that_is_cut_ends_the_far_side_and_not_the_coordinators(
    hosts: tuple[Host, ...], launches: Launches
) -> None:
    both = start_in(hosts, launches, "--no-kill")
    all_wait(launches, both)
    cut(hosts)
    assert both[1].wait() == 1
    assert f"the coordinator at {ADDRESSES[0]}" in both[1].output
    assert "is gone: it has been silent for" in both[1].output
    launches_says(both[0], "(node rank 1) has been silent for")
    (launches.directory / "go-on").touch()
    assert both[0].wait() == 0, both[0].output
    assert not (launches.directory / "done-1").exists()
