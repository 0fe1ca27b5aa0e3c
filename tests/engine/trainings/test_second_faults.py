# SPDX-License-Identifier: Apache-2.0
"""Something else fails while ranks go on after a death: they come to the same numbers, or all end and say why."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from adaptra_megatron.tools.local_ranks.launch_ranks import RankResult
from campaigns.dying_trainings import BACK, EXPERTS, KILLED, LONGEST_S, TRAIN_GPT, Layout, problems, train
from testing.jobs.fault_tolerant_jobs import Host, run_with_failures
from testing.jobs.fork_server import ForkServer
from testing.jobs.job_store import JobStore
from testing.waiting import stop

STRUCK_RANKS = str(Path(__file__).with_name("struck_ranks.py"))
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
LAYOUT = Layout(3, 2, flags=f"{SHARDED} --calculate-per-token-loss --mock-data-padded")
DYING = 1
SHORT_S, TIMEOUT_S, END_S = 2.0, 8.0, 30.0


@pytest.fixture(scope="module")
def peace(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> Path:
    """Where the training without faults has put its state."""
    directory = tmp_path_factory.mktemp("peace")
    assert not any(result.returncode for result in train(LAYOUT, directory, fork_server))
    return directory


class StoppingHost(Host):
    """Its store's process is stopped as soon as the first death is known, and says nothing more after that."""

    def __init__(self, served: JobStore, lasts_s: float | None) -> None:
        """`lasts_s`: until it goes on; None: it does not."""
        self._served, self._lasts_s = served, lasts_s
        self.stopped_s: float | None = None
        client = TCPStore("127.0.0.1", int(served.environment["MASTER_PORT"]), is_master=False)
        super().__init__(LAYOUT.world_size, store=client)

    def ended(self, rank: int, status: int) -> None:
        if self.stopped_s is not None:
            return
        super().ended(rank, status)
        if status == KILLED:
            # By now ranks know of the death, or ask for it, and none has come as far as the groups.
            stop(self._served.process_id)
            self.stopped_s = time.monotonic()
            if self._lasts_s is not None:
                threading.Timer(self._lasts_s, os.kill, (self._served.process_id, signal.SIGCONT)).start()


def run(
    directory: Path,
    server: ForkServer,
    argv: list[str],
    flags: str = "",
    host: Host | None = None,
    deaths: tuple[str, ...] = (f"{DYING}:3:2",),
    layout: Layout = LAYOUT,
) -> list[RankResult]:
    """A training in which rank DYING dies in the fourth iteration, or ranks die as `deaths` say."""
    arguments = [*argv, *layout.arguments(directory, deaths), *flags.split()]
    logs = directory / "logs"
    return run_with_failures(
        layout.world_size, arguments, timeout_s=LONGEST_S, server=server, log_directory=logs, host=host
    )


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("fault", "dead"),
    [
        pytest.param("delegate:4", {DYING}, marks=pytest.mark.slow),
        pytest.param("path:2", {DYING}, marks=pytest.mark.slow),
        ("idle:0", {DYING}),
        ("rank:3", {DYING, 3}),
    ],
)
def test_a_fault_in_a_new_epoch_changes_no_number(
    fault: str, dead: set[int], peace: Path, tmp_path: Path, fork_server: ForkServer
) -> None:
    results = run(tmp_path, fork_server, [STRUCK_RANKS, fault])
    kind, _, struck = fault.partition(":")
    assert "struck: " in results[int(struck)].output, "the fault did not fire"
    assert {result.rank for result in results if result.returncode == KILLED} == dead
    assert not problems(LAYOUT, peace, tmp_path, results)


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("fault", "dying"), [("rank:1", 1), pytest.param("back:2", 2, marks=pytest.mark.slow)], ids=["back", "old"]
)
def test_an_iteration_that_is_interrupted_before_its_first_action_is_redone_from_its_own_buffers(
    fault: str, dying: int, tmp_path: Path, fork_server: ForkServer
) -> None:
    """Rank 1 comes back in the third iteration, and a rank dies as the others of its stage wait for it to gather
    parameters: they had routers' biases of the second iteration, or none."""
    layout = replace(LAYOUT, flags=f"{SHARDED} {EXPERTS}", micro_batches=2, iterations=6)
    assert not any(result.returncode for result in train(layout, tmp_path / "peace", fork_server))
    flags, host = "--emulate-wait-for-arrivals 2", Host(layout.world_size, restarts=1)
    results = run(tmp_path / "deaths", fork_server, [STRUCK_RANKS, fault], flags, host, ("1:1:2",), layout)
    assert "struck: " in results[dying].output, "the fault did not fire"
    assert results[1].output.count(BACK) == 1
    assert results[dying].returncode, "it is back for good"
    struck = {layout.cell(dying)}
    assert not problems(layout, tmp_path / "peace", tmp_path / "deaths", results, struck)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("fault", ["device:4", "late-device:4"])
def test_a_rank_whose_device_fails_ends_alone(fault: str, peace: Path, tmp_path: Path, fork_server: ForkServer) -> None:
    """In a call, and between two."""
    results = run(tmp_path, fork_server, [STRUCK_RANKS, fault], deaths=())
    check_ends_alone(results, 4, "AcceleratorError: CUDA error: uncorrectable ECC error", peace, tmp_path)


def check_ends_alone(results: list[RankResult], rank: int, why: str, peace: Path, directory: Path) -> None:
    """A rank must have ended with that error of its device, and the others as without it."""
    failed = results[rank]
    assert failed.returncode == 1
    assert re.search(why, failed.output)
    assert "the device of this rank has failed or hangs, so it ends" in failed.output
    # For the others a death like any other.
    dead = [replace(result, returncode=KILLED) if result is failed else result for result in results]
    assert not problems(LAYOUT, peace, directory, dead)


@pytest.mark.timeout(150)
def test_a_rank_whose_operation_does_not_end_ends_alone(peace: Path, tmp_path: Path, fork_server: ForkServer) -> None:
    """Before the others, which wait for it in the store, have waited for the timeout."""
    results = run(tmp_path, fork_server, [STRUCK_RANKS, "stuck:4"], "--adaptra-timeout-s 8")
    why = r"an all-reduce over a GPU that hangs has not ended [4-7]\.[0-9] s after"
    check_ends_alone(results, 4, why, peace, tmp_path)


@pytest.mark.timeout(150)
def test_a_rank_that_stands_still_for_less_than_the_timeout_is_no_death(
    peace: Path, tmp_path: Path, fork_server: ForkServer
) -> None:
    results = run(tmp_path, fork_server, [STRUCK_RANKS, "pause:4"], "--adaptra-timeout-s 30", deaths=())
    (paused_s,) = re.findall(r"struck: stood still for ([0-9.]+) s", results[4].output)
    assert float(paused_s) > SHORT_S / 2, "the fault did not fire"
    assert not any(result.returncode or "lost rank" in result.output for result in results)
    assert not problems(LAYOUT, peace, tmp_path, results)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_caps_of_activations_hold_without_ranks_that_have_died(
    peace: Path, tmp_path: Path, fork_server: ForkServer
) -> None:
    """A cell of the first stage may hold three of six micro-batches."""
    results = run(tmp_path, fork_server, [STRUCK_RANKS, "cap:0"], "--adaptra-max-in-flight 3")
    assert "struck: held 3 at most, of {3.0}" in results[0].output, results[0].output
    assert "recovered: interrupted work was run again" in results[0].output
    assert not problems(LAYOUT, peace, tmp_path, results)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_store_that_stands_still_for_less_than_the_timeout_is_waited_for(
    peace: Path, tmp_path: Path, fork_server: ForkServer
) -> None:
    with JobStore(fork_server, tmp_path / "store.log") as served:
        host = StoppingHost(served, SHORT_S)
        results = run(tmp_path, fork_server, [TRAIN_GPT], host=host)
    assert host.stopped_s is not None, "the fault did not fire"
    assert not problems(LAYOUT, peace, tmp_path, results)


@pytest.mark.timeout(150)
def test_a_store_that_stands_still_for_longer_ends_all_with_its_name(tmp_path: Path, fork_server: ForkServer) -> None:
    with JobStore(fork_server, tmp_path / "store.log") as served:
        host = StoppingHost(served, None)
        results = run(tmp_path, fork_server, [TRAIN_GPT], f"--adaptra-timeout-s {TIMEOUT_S:g}", host=host)
        ended_s = time.monotonic()
    assert host.stopped_s is not None, "the fault did not fire"
    assert ended_s - host.stopped_s < END_S
    for result in results:
        if result.rank != DYING:
            assert result.returncode == 1, result.output
            assert f"the job's store has not answered for {TIMEOUT_S:g} s" in result.output, result.output


@pytest.mark.timeout(150)
def test_gradients_that_lack_a_micro_batch_are_not_committed(tmp_path: Path, fork_server: ForkServer) -> None:
    """All replicas would go on with the same wrong sum."""
    results = run(tmp_path, fork_server, [STRUCK_RANKS, "zero:4"], deaths=())
    assert all(result.returncode == 1 for result in results)
    assert "struck: zero" in results[4].output
    expected = LAYOUT.replicas * LAYOUT.micro_batches
    # Lost are micro-batch 0 and the mark of micro-batch 1, which is counted as its backward begins.
    said = rf"stage 1, chunk 0, bucket \d: gradients hold {expected - 2} of {expected} micro-batches"
    assert all(re.search(said, results[rank].output) for rank in (3, 4, 5)), results[4].output
    assert not list(tmp_path.glob("rank*.pt"))


@pytest.mark.timeout(150)
def test_an_attempt_that_is_wrong_once_is_repeated_and_changes_no_number(
    peace: Path, tmp_path: Path, fork_server: ForkServer
) -> None:
    results = run(tmp_path, fork_server, [STRUCK_RANKS, "lose:4,miscount:5"], deaths=())
    assert [results[rank].output.count("struck: ") for rank in (4, 5)] == [1, 1]
    lost = "not those of the global batch; the attempt is repeated"
    assert [result.output.count(lost) for result in results] == [0, 0, 0, 1, 1, 1]
    said = r"gradients have been divided by (\d+) tokens, but micro-batches had (\d+); the attempt is repeated"
    ((divisor, tokens),) = re.findall(said, "".join(result.output for result in results))  # by the last to come
    assert int(divisor) == int(tokens) + 1
    assert not problems(LAYOUT, peace, tmp_path, results)


@pytest.mark.timeout(150)
def test_an_attempt_is_repeated_by_a_rank_that_has_just_come_back(
    peace: Path, tmp_path: Path, fork_server: ForkServer
) -> None:
    """Its forwards gather no parameters in its first iteration, as in Megatron's train(), and those of others do."""
    argv = [STRUCK_RANKS, "lose-back:0"]
    flags, host = "--emulate-wait-for-arrivals 2", Host(LAYOUT.world_size, restarts=1)
    results = run(tmp_path, fork_server, argv, flags, host, deaths=("1:1:2",))
    assert [result.returncode for result in results] == [0] * LAYOUT.world_size
    assert results[0].output.count("struck: zero") == 1
    assert ["the attempt is repeated" in result.output for result in results] == [True] * 3 + [False] * 3
    assert not problems(LAYOUT, peace, tmp_path, results)


@pytest.mark.timeout(150)
def test_replicas_that_differ_in_one_bit_after_a_death_end_the_job(tmp_path: Path, fork_server: ForkServer) -> None:
    results = run(tmp_path, fork_server, [STRUCK_RANKS, "flip:5"])
    assert results[5].output.count("struck: flip") == 1
    said = r"replicas of stage 1, lane 0 do not hold the same state after ranks have failed"
    for result in results:
        if result.rank != DYING:
            assert result.returncode == 1, result.output
            assert re.search(said, result.output.strip().splitlines()[-1]), result.output
    assert not list(tmp_path.glob("rank*.pt"))
