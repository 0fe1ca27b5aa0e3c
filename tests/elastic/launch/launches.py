# SPDX-License-Identifier: Apache-2.0
"""Launchers as processes, forked from one that has torch imported; all that they leave behind is found."""

from __future__ import annotations

import os
import signal
import textwrap
import uuid
from itertools import pairwise
from pathlib import Path

from support.namespaces import Host

from adaptra_megatron.tools.local_ranks.launch_ranks import rank_environment
from testing.jobs.fork_server import ForkServer
from testing.waiting import until

ENDED_S = 20.0
_ENTERING = """
    import ctypes, os, runpy, sys
    with open(f"/proc/{os.environ['NETWORK_OF']}/ns/net") as network:
        assert ctypes.CDLL(None).setns(network.fileno(), 0) == 0
    runpy.run_module("adaptra_megatron.tools.cli", run_name="__main__", alter_sys=True)
    """
_MARK = "ADAPTRA_TEST_OF_LAUNCH"


class Launched:
    """One launcher."""

    def __init__(self, server: ForkServer, pid: int, log: Path) -> None:
        self.pid, self._server, self._log = pid, server, log

    @property
    def output(self) -> str:
        """What it and its ranks have written to the terminal."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def wait(self, timeout_s: float = ENDED_S) -> int:
        """Exit status."""
        until(lambda: self._server.poll(self.pid) is not None, lambda: f"it still runs:\n{self.output}", timeout_s)
        status = self._server.poll(self.pid)
        assert status is not None
        return status

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


class Launches:
    """All launchers of a test, and a directory for what its ranks leave there."""

    def __init__(self, server: ForkServer, directory: Path) -> None:
        self.directory = directory
        self._server, self._mark = server, str(uuid.uuid4())
        self._started: list[tuple[tuple[object, ...], dict[str, str], str]] = []

    def script(self, text: str) -> str:
        """A script for ranks: `rank` is the rank, `mark(name)` leaves a file NAME-RANK, `until(NAME)` waits for one."""
        head = f"""\
            import os, signal, subprocess, sys, time
            from pathlib import Path
            rank, here = int(os.environ["RANK"]), Path({str(self.directory)!r})
            def mark(name, text=""):
                (here / f".{{name}}-{{rank}}").write_text(text)
                (here / f".{{name}}-{{rank}}").rename(here / f"{{name}}-{{rank}}")
            def until(name):
                while not (here / name).exists():
                    time.sleep(0.02)
            """
        path = self.directory / "ranks.py"
        path.write_text(textwrap.dedent(head) + textwrap.dedent(text))
        return str(path)

    def launch_in(self, host: Host, *arguments: object, environment: dict[str, str] | None = None) -> Launched:
        """As `launch`, in the network of a host."""
        entering = self.directory / "enter.py"
        entering.write_text(textwrap.dedent(_ENTERING))
        return self.launch(
            *arguments, environment={"NETWORK_OF": str(host.pid), **(environment or {})}, before=str(entering)
        )

    def launch(self, *arguments: object, environment: dict[str, str] | None = None, before: str = "") -> Launched:
        """Start `adaptra launch ARGUMENTS`. `before`: a script that runs it itself, and gets the same arguments."""
        self._started.append((arguments, environment or {}, before))
        log = self.directory / f"launcher{len(self._started)}.log"
        program = [before] if before else ["-m", "adaptra_megatron.tools.cli"]
        variables = rank_environment({_MARK: self._mark, **(environment or {})})
        argv = [*program, "launch", *map(str, arguments)]
        (pid,) = self._server.start(argv, [variables], [log])
        return Launched(self._server, pid, log)

    def again(self, node_rank: int) -> Launched:
        """Start the launcher of a `--node-rank` once more."""
        (found,) = (each for each in self._started if ("--node-rank", node_rank) in pairwise(each[0]))
        arguments, environment, before = found
        return self.launch(*arguments, environment=environment, before=before)

    def until(self, name: str, launched: Launched, timeout_s: float = ENDED_S) -> str:
        """What a rank has left."""
        path = self.directory / name
        until(path.exists, lambda: f"no {name}:\n{launched.output}", timeout_s)
        return path.read_text()

    def processes(self) -> dict[int, str]:
        """All that descend from the test's launchers, and the launchers, with their command lines."""
        return {
            pid: command for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if (command := self._of(pid))
        }

    def gone(self) -> None:
        """Wait for all processes to have ended."""
        until(lambda: not self.processes(), lambda: f"these still run without their launcher: {self.processes()}", 5.0)

    def kill(self) -> None:
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def _of(self, pid: int) -> str:
        try:
            ours = f"{_MARK}={self._mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode() if ours else ""
        except OSError:
            return ""
