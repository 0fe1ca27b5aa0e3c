# SPDX-License-Identifier: Apache-2.0
"""`adaptra launch` on one host: exit status, errors, signals, logs, and nothing that still runs after it."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from launches import Launches

from adaptra_megatron.common.membership import MembershipRecords, Readiness, Stalled
from adaptra_megatron.tools.local_ranks.launch_ranks import free_port
from testing.waiting import until


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


@pytest.mark.parametrize("where", ["log", "error file", "large error file"])
def test_whatever_a_rank_writes_about_its_error_the_others_go_on(launches: Launches, where: str) -> None:
    """Its end is shown, or of what it wrote to its log where the file is too large to be read."""
    script = launches.script(
        f"""
        if rank == 0:
            mark("ready")
            until("go-on")
            sys.exit(0)
        long = "x" * (20 << 20)
        if {where!r} == "log":
            sys.stderr.write(long)
        else:
            import json
            nchars = 100_000 if {where!r} == "error file" else 20 << 20
            text = long[:nchars] + "\\nerror of the file \\udcff"  # as of a file's name that cannot be decoded
            Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({{"message": text, "timestamp": 1}}))
        print("\\nerror of the log", file=sys.stderr)
        sys.exit(1)
        """
    )
    logs = ("--redirects", 3, "--log-dir", launches.directory / "logs")
    launched = launches.launch("--nproc-per-node", 2, "--no-kill", *logs, script)
    launches.until("ready-0", launched)
    until(lambda: "epoch 1: rank 1" in launched.output, lambda: launched.output)
    (launches.directory / "go-on").touch()
    assert launched.wait() == 0, launched.output
    assert f"  | error of the {'file' if where == 'error file' else 'log'}" in launched.output
    assert ("  | ... (cut)" in launched.output) == (where != "large error file")
    assert len(launched.output) < 10_000


def test_a_rank_is_started_again_after_pauses_and_killed_only_where_it_is_meant(launches: Launches) -> None:
    """The test stands for the other ranks; the job ends with them, though the last process still waits to be
    admitted."""
    script = launches.script(
        """
        start = os.environ.get("ADAPTRA_STARTED_AGAIN", "0")
        mark("pid-" + start, str(os.getpid()))
        if start == "1":
            sys.exit(3)
        until("never" if rank else "go-on")
        """
    )
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": "tested"}
    where = ("--master-port", environment["MASTER_PORT"], "--rdzv-id", "tested")
    launched = launches.launch("--nproc-per-node", 2, *where, "--no-kill", "--max-restarts", 4, script)
    first = int(launches.until("pid-0-1", launched))
    records = MembershipRecords.of_rank(10.0, environment)
    records.publish_layout(b"layout")
    # As the first iteration begins: the launcher may not know yet that the job admits restarted ranks.
    os.kill(first, signal.SIGKILL)
    assert records.wait_beyond(0, 10.0) is not None
    records.report(Stalled((1,), "stalled", {}))  # late: of the process that is dead
    second = launches.until("pid-2-1", launched)
    assert "local rank 1 was killed by SIGKILL and is started again in 1 s (1 of 4 times" in launched.output
    assert "local rank 1 ended with exit status 3 and is started again in 2 s (2 of 4 times" in launched.output
    for epoch, start in ((2, 2), (4, 3)):
        records.say_ready(1, Readiness(epoch - 1, start, "host", "boot/net"))
        assert records.wait_beyond(epoch - 1, 10.0) is not None
        if start == 3:
            break
        records.say_admitted({1: epoch})
        time.sleep(1.0)
        assert Path(f"/proc/{second}").exists()
        records.report(Stalled((1,), "stalled", {1: epoch}))
        launches.until("pid-3-1", launched)
        assert "local rank 1 was killed by SIGKILL and is started again in 1 s (3 of 4 times" in launched.output
    (launches.directory / "go-on").touch()
    assert launched.wait() == 0, launched.output
    assert "ended well, but without 1 ranks: rank 1 on host" in launched.output


def test_why_the_only_rank_is_not_started_again_is_said_though_the_job_ends(launches: Launches) -> None:
    launched = launches.launch("--no-kill", "--max-restarts", 2, launches.script("sys.exit(3)"))
    assert launched.wait() == 1
    assert "ended with exit status 3 and is not started again (--max-restarts 2)" in launched.output


def test_a_job_fails_where_ranks_fail_after_another_has_ended_with_status_0(launches: Launches) -> None:
    script = launches.script(
        """
        mark("up", str(os.getpid()))
        if rank != 1:
            until("up-1")
            first = (here / "up-1").read_text()
            while os.path.exists(f"/proc/{first}"):  # until the launcher has seen its end
                time.sleep(0.01)
            sys.exit(1)
        """
    )
    launched = launches.launch("--nproc-per-node", 3, "--no-kill", script)
    assert launched.wait() == 1, launched.output
    assert "ranks 1 ended with status 0, but others failed after the first of them had: rank " in launched.output


def test_a_program_that_is_not_there_is_named(launches: Launches) -> None:
    launched = launches.launch("--no-python", "no-such-program")
    assert launched.wait() == 1
    assert "cannot run no-such-program: No such file" in launched.output


@pytest.mark.parametrize("deaf", [False, True])
def test_a_signal_reaches_the_ranks_and_those_that_ignore_it_are_killed(launches: Launches, deaf: bool) -> None:
    script = launches.script(
        f"""
        received = lambda number, _: (mark("received", str(number)), {deaf} or sys.exit(0))
        signal.signal(signal.SIGINT, received)
        mark("ready")
        while True:
            time.sleep(0.05)
        """
    )
    timeout = ("--shutdown-timeout", 3) if deaf else ()
    launched = launches.launch("--nproc-per-node", 2, *timeout, script)
    for rank in range(2):
        launches.until(f"ready-{rank}", launched)
    began_s = time.monotonic()
    launched.signal(signal.SIGINT)
    assert launched.wait() == 128 + signal.SIGINT
    assert {launches.until(f"received-{rank}", launched) for rank in range(2)} == {str(int(signal.SIGINT))}
    assert ("they are killed" in launched.output) == deaf
    assert not deaf or time.monotonic() - began_s >= 3.0


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
    # A process has its environment, by which it is found, a moment after what started it goes on.
    until(lambda: len(launches.processes()) >= 1 + 2 * 3, lambda: f"only these run: {launches.processes()}", 5.0)
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
    until(lambda: not Path(f"/proc/{child}/cmdline").exists(), lambda: "it still runs without its rank", 5.0)


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


def test_the_store_accepts_more_connections_than_open_files_are_usual(launches: Launches) -> None:
    limited = launches.directory / "limited.py"
    limited.write_text(
        "import resource, runpy\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (128, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "runpy.run_module('adaptra_megatron.tools.cli', run_name='__main__', alter_sys=True)\n"
    )
    script = launches.script(
        """
        import resource
        from datetime import timedelta
        from torch.distributed import TCPStore
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        stores = [TCPStore(*where, is_master=False, timeout=timedelta(seconds=5)) for _ in range(200)]
        for store in stores:
            store.set("key", "value")
        """
    )
    launched = launches.launch(script, before=str(limited))
    assert launched.wait(60.0) == 0, launched.output
