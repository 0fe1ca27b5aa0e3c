# SPDX-License-Identifier: Apache-2.0
"""`adaptra launch` on one host: exit status, errors, signals, logs, and nothing that outlives it."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from launches import Launches, until

from adaptra_megatron.emulation.jobs.launch import free_port
from adaptra_megatron.job.membership import MembershipRecords


def test_ranks_that_end_well_end_the_job_well(launches: Launches) -> None:
    launched = launches.launch("--nproc-per-node", 2, launches.script("mark('done', sys.argv[1])"), "--an-argument")
    assert launched.wait() == 0, launched.output
    assert {launches.until(f"done-{rank}", launched) for rank in range(2)} == {"--an-argument"}
    assert "adaptra launch:" not in launched.output


def test_the_first_failure_ends_all_and_is_told_with_its_log_and_error(launches: Launches) -> None:
    script = launches.script(
        """
        if rank == 1:
            until("ready-0")
            print("what is wrong", file=sys.stderr)
            sys.exit(3)
        signal.signal(signal.SIGTERM, lambda *_: (mark("asked"), sys.exit(0)))
        mark("ready")
        time.sleep(60)
        """
    )
    launched = launches.launch(
        "--nproc-per-node", 2, "--redirects", 3, "--log-dir", launches.directory / "logs", script
    )
    assert launched.wait() == 1
    assert "rank 1 on host" in launched.output
    assert "ended with exit status 3" in launched.output
    (log,) = (launches.directory / "logs").glob("*/attempt_0/1/stderr.log")
    assert f"log: {log}" in launched.output
    assert "| what is wrong" in launched.output
    assert (launches.directory / "asked-0").exists()


def test_a_rank_of_a_job_that_lets_none_in_is_not_started_again(launches: Launches) -> None:
    script = launches.script("sys.exit(3) if rank else (mark('up'), until('go-on'))")
    launched = launches.launch("--nproc-per-node", 2, "--no-kill", "--max-restarts", 2, script)
    launches.until("up-0", launched)
    said = "local rank 1 ended with exit status 3 and is not started again (--max-restarts 2): ranks that are started "
    until(lambda: said in launched.output, lambda: launched.output)
    assert "--adaptra-reroute failures" in launched.output
    (launches.directory / "go-on").touch()
    assert launched.wait() == 0


def test_the_error_that_torch_records_is_shown(launches: Launches) -> None:
    message = {"message": "no", "extraInfo": {"py_callstack": "Traceback:\n  NoDataError: no data", "timestamp": "1"}}
    text = json.dumps({"message": message})
    script = launches.script(f"Path(os.environ['TORCHELASTIC_ERROR_FILE']).write_text({text!r}); sys.exit(1)")
    launched = launches.launch(script)
    assert launched.wait() == 1
    assert "|   NoDataError: no data" in launched.output


def test_a_program_that_is_not_there_is_named(launches: Launches) -> None:
    launched = launches.launch("--no-python", "no-such-program")
    assert launched.wait() == 1
    assert "cannot run no-such-program: No such file" in launched.output


@pytest.mark.parametrize("deaf", [False, True])
def test_a_signal_reaches_the_ranks_and_those_that_ignore_it_are_killed(launches: Launches, deaf: bool) -> None:
    script = launches.script(
        f"""
        heard = lambda number, _: (mark("heard", str(number)), {deaf} or sys.exit(0))
        signal.signal(signal.SIGINT, heard)
        mark("ready")
        while True:
            time.sleep(0.05)
        """
    )
    launched = launches.launch("--nproc-per-node", 2, "--shutdown-timeout", 1, script)
    for rank in range(2):
        launches.until(f"ready-{rank}", launched)
    began_s = time.monotonic()
    launched.signal(signal.SIGINT)
    assert launched.wait() == 128 + signal.SIGINT
    assert {launches.until(f"heard-{rank}", launched) for rank in range(2)} == {str(int(signal.SIGINT))}
    assert ("they are killed" in launched.output) == deaf
    assert not deaf or time.monotonic() - began_s >= 1.0


def test_ranks_that_live_are_left_alone_with_no_kill(launches: Launches) -> None:
    """The death is on record while they live, and the job ends well when they do."""
    script = launches.script("mark('pid', str(os.getpid())); until('go-on'); mark('done')")
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": "tested"}
    where = ("--master-port", environment["MASTER_PORT"], "--rdzv-id", "tested")
    launched = launches.launch("--nproc-per-node", 3, *where, "--no-kill", script)
    pids = [int(launches.until(f"pid-{rank}", launched)) for rank in range(3)]
    records = MembershipRecords.of_rank(10.0, environment)  # as a rank does
    before = records.newest()
    assert before is not None
    assert (before.epoch, before.live, records.wait_beyond(0, 0.1)) == (0, (0, 1, 2), None)
    os.kill(pids[1], signal.SIGKILL)
    after = records.wait_beyond(0, 10.0)
    assert after is not None
    assert (after.epoch, after.live) == (1, (0, 2))
    assert [(each.rank, each.epoch, each.why) for each in after.left] == [(1, 1, "was killed by SIGKILL")]
    (launches.directory / "go-on").touch()
    assert launched.wait() == 0, launched.output
    assert (launches.directory / "done-0").exists()
    assert (launches.directory / "done-2").exists()
    assert "epoch 1: rank 1" in launched.output


@pytest.mark.parametrize("options", [[], ["--no-kill", "--min-ranks", 3]], ids=["default", "min-ranks"])
def test_a_killed_rank_ends_the_job_where_it_is_to(launches: Launches, options: list[object]) -> None:
    script = launches.script("mark('pid', str(os.getpid())); time.sleep(60)")
    launched = launches.launch("--nproc-per-node", 3, *options, script)
    pids = [int(launches.until(f"pid-{rank}", launched)) for rank in range(3)]
    os.kill(pids[2], signal.SIGKILL)
    assert launched.wait() == 1
    assert "rank 2 on host" in launched.output
    assert "was killed by SIGKILL" in launched.output
    assert ("2 ranks are left, fewer than the 3" in launched.output) == bool(options)


def test_a_job_whose_ranks_have_all_died_has_failed(launches: Launches) -> None:
    launched = launches.launch("--nproc-per-node", 2, "--no-kill", launches.script("sys.exit(5 + rank)"))
    assert launched.wait() == 1
    assert "0 ranks are left" in launched.output


def test_a_killed_launcher_leaves_no_orphans(launches: Launches) -> None:
    """Nor what a rank has started, in its group."""
    script = launches.script(
        """
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        mark("ready", str(child.pid))
        time.sleep(60)
        """
    )
    shell = Path(launches.directory / "rank.sh")
    shell.write_text(f"python3 {script}\ntrue\n")
    launched = launches.launch("--nproc-per-node", 2, "--no-python", "sh", shell)
    for rank in range(2):
        launches.until(f"ready-{rank}", launched)
    assert len(launches.processes()) >= 1 + 2 * 3
    launched.signal(signal.SIGKILL)
    launches.gone()


def test_ranks_of_a_killed_launcher_end_without_its_guard_too(launches: Launches) -> None:
    launched = launches.launch("--nproc-per-node", 2, launches.script("mark('ready'); time.sleep(60)"))
    for rank in range(2):
        launches.until(f"ready-{rank}", launched)
    (guard,) = (pid for pid, command in launches.processes().items() if "launch.guard" in command)
    os.kill(guard, signal.SIGKILL)
    launched.signal(signal.SIGKILL)
    launches.gone()


def test_what_a_rank_has_started_ends_with_it(launches: Launches) -> None:
    script = launches.script(
        """
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        mark("child", str(child.pid))
        """
    )
    launched = launches.launch(script)
    assert launched.wait() == 0
    child = int(launches.until("child-0", launched))
    until(lambda: not Path(f"/proc/{child}/cmdline").exists(), lambda: "it outlives its rank", 5.0)


def test_ranks_meet_in_the_launchers_store(launches: Launches) -> None:
    script = launches.script(
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        mark("total", str(total.item()))
        dist.destroy_process_group()
        """
    )
    launched = launches.launch("--nproc-per-node", 2, script)
    assert launched.wait(60.0) == 0, launched.output
    assert {launches.until(f"total-{rank}", launched) for rank in range(2)} == {"3.0"}
