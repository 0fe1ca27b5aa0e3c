# SPDX-License-Identifier: Apache-2.0
"""Start the processes of a job on this machine, watch them, and clean up after them.

Ranks are plain Python processes, as torchrun's, or come from a `RankServer`, which starts a job in a fraction of the
time. The process of a rank ends with its launcher, shows stacks on SIGUSR1, and runs a script or a module:

python -m adaptra_megatron.tools.local_ranks.launch_ranks script.py ARGUMENTS...
python -m adaptra_megatron.tools.local_ranks.launch_ranks -m module ARGUMENTS...
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TextIO

from adaptra_megatron.common.child_process import blocked
from adaptra_megatron.elastic.launch.tied_process import die_with_parent

STACKS_SIGNAL = signal.SIGUSR1
PARENT_VARIABLE = "ADAPTRA_LAUNCHER_PID"


def run_script(argv: Sequence[str]) -> None:
    """Run `argv` ("script.py" or "-m", "module", then arguments) as the main program of this process."""
    die_with_parent(int(os.environ.get(PARENT_VARIABLE, os.getppid())))
    # The file descriptor, not sys.stderr: a test runner or the script may replace that.
    faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True, chain=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {STACKS_SIGNAL})
    faulthandler.enable(file=2)
    if argv[0] == "-m":
        sys.argv = list(argv[1:])
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(argv)
    sys.path.insert(0, str(Path(argv[0]).resolve().parent))
    runpy.run_path(argv[0], run_name="__main__")


POLL_S = 0.02
STORE_S = 60.0
GRACE_S = 1.0
"""Seconds that the other ranks get to write their logs after one has failed."""
_STACKS_S = 3.0
TAIL_LINES = 60
Poll = Callable[[int], "int | None"]
Echo = Callable[[str], object]
Ended = Callable[[int, int], "Mapping[str, str] | None"]


@dataclass(frozen=True)
class RankResult:
    """End of one rank."""

    rank: int
    returncode: int
    """0, the exit status, or minus the signal that killed it (also by us, after a failure elsewhere)."""
    log: Path
    """Log of all its output."""

    @property
    def output(self) -> str:
        """The rank's stdout and stderr together."""
        return self.log.read_text(errors="replace")


class RankServer(Protocol):
    """Server that starts ranks faster than plain Python does, and reports how they ended."""

    def start(self, argv: Sequence[str], environments: Sequence[Mapping[str, str]], logs: Sequence[Path]) -> list[int]:
        """Start one process per environment, with its output in its log. Return their process ids."""

    def poll(self, pid: int) -> int | None:
        """Return the exit status of a process, or minus a signal's number; None while it runs."""


class LaunchError(RuntimeError):
    """A job failed or hung. Shows the end of the logs, with all Python stacks of ranks that hung."""

    def __init__(self, message: str, results: list[RankResult]) -> None:
        super().__init__(message)
        self.results = results


def run_ranks(
    world_size: int,
    argv: Sequence[str],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    log_directory: str | Path | None = None,
    server: RankServer | None = None,
    check: bool = True,
    stop_on_failure: bool = True,
    echo: Echo | None = None,
    ended: Ended | None = None,
    stalled: Callable[[], Sequence[int]] = tuple,
) -> list[RankResult]:
    """Run `argv` in `world_size` processes with the environment that torchrun would give them.

    Args:
        argv: "script.py" or "-m", "module", then arguments.
        timeout_s: after this time all ranks that still run show their stacks and are killed.
        env: added to this process's environment.
        log_directory: gets `rank<N>.log`; default: a new temporary directory, which is left behind.
        server: fork the ranks from it; None starts plain Python processes.
        check: raise unless all ranks exit with 0; else return whatever happened.
        stop_on_failure: once a rank has failed, kill the others after a second, and once they have shown their stacks.
        echo: called with every line that the last rank writes, as it writes it.
        ended: called with each rank that has ended and its exit status. Where it returns environment variables, the
            rank is started again with them, and goes on with its log.
        stalled: asked again and again for ranks that are to be killed.

    Raises:
        LaunchError: with `check`, a rank failed; or one ran past `timeout_s`; or there is no torch that serves a store.
    """
    directory = Path(tempfile.mkdtemp(prefix="adaptra-ranks-") if log_directory is None else log_directory)
    directory.mkdir(parents=True, exist_ok=True)
    logs = [(directory / f"rank{rank}.log").resolve() for rank in range(world_size)]
    for log in logs:
        log.write_bytes(b"")
    with _store_of(env or {}) as common:
        environments = _environments(world_size, {**common, **(env or {})})
        job = _Job(argv, environments, logs, server, ended, stalled)
        hung = job.watch(timeout_s, stop_on_failure, echo)
    results = job.results()
    if hung or (check and any(result.returncode for result in results)):
        raise LaunchError(_failure(argv, results, hung, job.first_failed, timeout_s), results)
    return results


class _Job:
    """Running ranks. Each leads a session of its own, so that its children can be killed with it."""

    def __init__(
        self,
        argv: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        logs: Sequence[Path],
        server: RankServer | None,
        ended: Ended | None,
        stalled: Callable[[], Sequence[int]],
    ) -> None:
        self._logs, self._on_end, self._stalled = logs, ended, stalled
        self._environments = environments
        self._ended: set[int] = set()
        self.first_failed: int | None = None
        self._poll: Poll
        self._start: Callable[[Sequence[Mapping[str, str]], Sequence[Path]], list[int]]
        if server is not None:
            self._start = functools.partial(server.start, argv)
            self._poll = server.poll
        else:
            processes: dict[int, subprocess.Popen[bytes]] = {}

            def start(environments: Sequence[Mapping[str, str]], logs: Sequence[Path]) -> list[int]:
                started = [_start(argv, environment, log) for environment, log in zip(environments, logs, strict=True)]
                processes.update({process.pid: process for process in started})
                return [process.pid for process in started]

            self._start = start
            self._poll = lambda pid: processes[pid].poll()
        self._pids = self._start(environments, logs)

    def watch(self, timeout_s: float, stop_on_failure: bool, echo: Echo | None) -> list[int]:
        """Wait until all ranks have ended, and end them if the rules say so. Return the ranks that hung."""
        deadline = time.monotonic() + timeout_s
        failed_at: float | None = None
        hung: list[int] = []
        with self._logs[-1].open(errors="replace") as log:
            lines = _Lines(log, echo)
            try:
                while running := self._running():
                    lines.follow()
                    now = time.monotonic()
                    if failed_at is None and stop_on_failure and self.first_failed is not None:
                        failed_at = now
                    if now >= deadline:
                        hung = running
                    if hung or (failed_at is not None and now >= failed_at + GRACE_S):
                        self._show_stacks(running)
                        break
                    time.sleep(POLL_S)
            finally:
                self.kill()
                lines.follow(ended=True)
        return hung

    def results(self) -> list[RankResult]:
        """Return how the ranks ended, once all have."""
        codes = [self._poll(pid) for pid in self._pids]
        return [
            RankResult(rank, -signal.SIGKILL if code is None else code, log)
            for rank, (code, log) in enumerate(zip(codes, self._logs, strict=True))
        ]

    def _running(self) -> list[int]:
        running = []
        for rank in self._stalled():
            _signal_group(self._pids[rank], signal.SIGKILL)
        for rank, pid in enumerate(self._pids):
            code = self._poll(pid)
            if code is None:
                running.append(rank)
                continue
            if code and self.first_failed is None:
                self.first_failed = rank
            if self._on_end is not None and rank not in self._ended:
                _signal_group(pid, signal.SIGKILL)  # as launchers do, before they report the end
                again = self._on_end(rank, code)
                if again is not None:
                    self._pids[rank] = self._start([{**self._environments[rank], **again}], [self._logs[rank]])[0]
                    running.append(rank)
                    continue
            self._ended.add(rank)
        return running

    def _show_stacks(self, ranks: Sequence[int]) -> None:
        """Have `ranks` write their stacks: begin within _STACKS_S, which one that is stopped does not, and end."""
        nbytes = {rank: self._logs[rank].stat().st_size for rank in ranks}
        for rank in ranks:
            _signal_process(self._pids[rank], STACKS_SIGNAL)
        until_s = time.monotonic() + _STACKS_S
        while time.monotonic() < until_s and any(
            self._poll(self._pids[rank]) is None and self._logs[rank].stat().st_size == nbytes[rank] for rank in ranks
        ):
            time.sleep(POLL_S)
        time.sleep(GRACE_S / 2)

    def kill(self) -> None:
        """Kill running ranks and their children, and wait up to 10 s for their end."""
        for pid in self._pids:
            if not _signal_group(pid, signal.SIGKILL) and self._poll(pid) is None:
                _signal_process(pid, signal.SIGKILL)  # forked a moment ago, and not yet the leader of its group
        deadline = time.monotonic() + 10.0
        while any(self._poll(pid) is None for pid in self._pids) and time.monotonic() < deadline:
            time.sleep(POLL_S)


def _start(argv: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    # A rank that is to show its stacks before it can would end by that signal.
    with log.open("ab") as output, blocked({STACKS_SIGNAL}):
        return subprocess.Popen(
            [sys.executable, "-u", "-m", "adaptra_megatron.tools.local_ranks.launch_ranks", *argv],
            env={**environment, PARENT_VARIABLE: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


BRIEF_LOOKUPS = {"RES_OPTIONS": "timeout:1 attempts:5"}
"""Environment of processes that serve a store. It looks up each client's name while all others wait: 5 s each, if a
name server loses requests."""


@contextlib.contextmanager
def _store_of(env: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
    """Serve the job's store meanwhile, as torchrun's agent does, unless `env` names one. Yields its environment."""
    if "MASTER_PORT" in env:
        yield {}
        return
    try:
        # Imports torch, which a rank that starts in this module does not need yet.
        from adaptra_megatron.elastic.launch.endpoint import serve_store

        store = serve_store("127.0.0.1", 0, STORE_S)
    except (ImportError, OSError, RuntimeError) as cause:
        raise LaunchError(f"the job's store cannot be served at 127.0.0.1: {cause}", []) from cause
    yield {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


def _environments(world_size: int, more: Mapping[str, str]) -> list[dict[str, str]]:
    common = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"}
    common |= BRIEF_LOOKUPS
    return [
        rank_environment({**common, "RANK": str(rank), "LOCAL_RANK": str(rank), **more}) for rank in range(world_size)
    ]


def free_port() -> int:
    """Return a TCP port without a listener. It is below the range of Linux's outgoing connections, so only another
    launcher could take it, which is unlikely to choose the same."""
    chooser = random.SystemRandom()
    while True:
        port = chooser.randrange(15000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def _signal_process(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _signal_group(pid: int, number: int) -> bool:
    """Signal a process group; return whether it existed. A rank's group exists as long as any process that it
    started."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return False
    return True


class _Lines:
    """Lines of a log, of which the last may be half written."""

    def __init__(self, log: TextIO, echo: Echo | None) -> None:
        self._log, self._echo, self._begun = log, echo, ""

    def follow(self, ended: bool = False) -> None:
        """Echo the lines that are whole by now; those that are left too, if their writer has `ended`."""
        if self._echo is None:
            return
        *lines, self._begun = (self._begun + self._log.read()).split("\n")
        for line in [*lines, self._begun] if ended and self._begun else lines:
            self._echo(line)


def _failure(
    argv: Sequence[str], results: list[RankResult], hung: list[int], first_failed: int | None, timeout_s: float
) -> str:
    codes = ", ".join(f"rank {result.rank}: {result.returncode}" for result in results)
    what = f"ranks {hung} still ran after {timeout_s:g} s" if hung else f"rank {first_failed} failed first"
    shown = [results[rank] for rank in hung] if hung else [results[first_failed or 0]]
    shown += [result for result in results if result not in shown]
    tails = [
        f"--- rank {result.rank} ({result.log}) ---\n" + "\n".join(result.output.splitlines()[-TAIL_LINES:])
        for result in shown
    ]
    return "\n".join([f"{' '.join(argv)}: {what} (exit status of {codes})", *tails])


def rank_environment(more: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment for a rank on a shared machine, with `more`."""
    environment = dict(os.environ)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        environment.setdefault(name, "1")
    # All ranks are here: no name of this machine has to resolve.
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    here = str(Path(__file__).parents[3])
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    environment["PYTHONPATH"] = os.pathsep.join([here, *(path for path in paths if path and path != here)])
    environment.update(more)
    return environment


if __name__ == "__main__":
    run_script(sys.argv[1:])
