# SPDX-License-Identifier: Apache-2.0
"""A process that imports torch and Megatron once and forks the ranks of job after job.

Importing them takes seconds of CPU per rank, forking takes milliseconds. The server never starts a thread nor joins a
process group, so forked processes are clean; it refuses to fork once it has threads.

Messages are JSON lines over a unix socket. Launcher to server: `{"argv", "environments", "logs", "directory"}`, one
environment and log file per rank. Server to launcher: `{"ready": true}`, `{"pids": [...]}` and, as ranks end, `{"pid",
"returncode"}`. The end of the socket ends the server, its ranks and their child processes.

`multiprocessing`'s fork server does the same in 120 lines instead of 240 and as fast (0.23 s per job of 2 ranks). But
it kills no process groups: child processes of ranks survive a launcher that is killed. It also ignores modules that it
fails to preload, and runs the launcher's main module in every rank unless that is hidden from it.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from adaptra_megatron.common.child_process import blocked
from adaptra_megatron.tools.local_ranks.launch_ranks import (
    PARENT_VARIABLE,
    STACKS_SIGNAL,
    rank_environment,
    run_script,
)

START_TIMEOUT_S = 120.0
PRELOADED = (
    "testing.training.train",
    "testing.training.conditions",
    "adaptra_megatron.patches.application",
    "adaptra_megatron.engine.runtime",
    "megatron.core.dist_checkpointing",
)
"""Modules imported before forking, with Megatron on the CPU: each rank would need a third of a second for them."""


class ForkServerError(RuntimeError):
    """The server could not be started, or it ended; the message describes the end."""


class ForkServer:
    """Launcher's side of the fork server: starts it at construction, ends it at `close()`. Also a context manager."""

    def __init__(self) -> None:
        """Start the server. It is ready to fork when the first job has been sent to it.

        Raises OSError if no process or socket can be created.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=rank_environment({}),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's Ctrl-C is the launcher's to handle
            )
        self._socket, self._buffer, self._ready = ours, b"", False
        self._returncodes: dict[int, int] = {}

    def start(self, argv: Sequence[str], environments: Sequence[Mapping[str, str]], logs: Sequence[Path]) -> list[int]:
        """Fork one rank per environment, with its output in its log. Returns the process ids.

        Raises ForkServerError if the server has ended, or is not ready within 120 s.
        """
        if not self._ready:
            self._receive()
            self._ready = True
        request = {
            "argv": list(argv),
            "environments": [dict(environment) for environment in environments],
            "logs": [str(path) for path in logs],
            "directory": os.getcwd(),
        }
        self._socket.settimeout(START_TIMEOUT_S)
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        while True:
            message = self._receive()
            if "pids" in message:
                for pid in message["pids"]:
                    self._returncodes.pop(pid, None)  # of an earlier process that had this number
                return list(message["pids"])
            self._returncodes[message["pid"]] = message["returncode"]

    def poll(self, pid: int) -> int | None:
        """Return the exit status of a rank (negative: the signal that killed it); None while it runs."""
        while pid not in self._returncodes and self._readable():
            message = self._receive()
            self._returncodes[message["pid"]] = message["returncode"]
        return self._returncodes.get(pid)

    def close(self) -> None:
        """End the server and its running ranks. A second call does nothing."""
        self._socket.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=10)

    def _readable(self) -> bool:
        if b"\n" in self._buffer:
            return True
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            return bool(selector.select(0))

    def _receive(self) -> dict[str, Any]:
        self._socket.settimeout(START_TIMEOUT_S)
        while b"\n" not in self._buffer:
            try:
                received = self._socket.recv(1 << 16)
            except TimeoutError:
                raise ForkServerError(f"the fork server did not answer within {START_TIMEOUT_S:g} s") from None
            if not received:
                raise ForkServerError(f"the fork server ended with status {self._process.poll()}: see its stderr above")
            self._buffer += received
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serve(control: socket.socket) -> None:
    """Run the server: import, then fork on request until the socket ends."""
    _preload()
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        _send(control, {"ready": True})
        running: dict[int, int] = {}
        buffer = b""
        while True:
            for key, _ in selector.select():
                if key.fileobj is not control:
                    selector.unregister(key.fileobj)
                    _report_end(control, running, key.data)
                    continue
                received = control.recv(1 << 20)
                if not received:
                    for pid in running:
                        with suppress(ProcessLookupError):  # not yet the leader of a group: dies with this process
                            os.killpg(pid, signal.SIGKILL)
                    return
                buffer += received
                while b"\n" in buffer:
                    line, _, buffer = buffer.partition(b"\n")
                    pids = _fork_ranks(json.loads(line), control)
                    for pid in pids:
                        running[pid] = os.pidfd_open(pid)
                        selector.register(running[pid], selectors.EVENT_READ, pid)
                    _send(control, {"pids": pids})


def _preload() -> None:
    from testing.megatron.megatron_on_cpu import install

    gc.disable()  # else a fifth of the time of the imports
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        install(with_fused_weight_gradient=True)
        for module in PRELOADED:
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # collections in the ranks would copy the shared pages
    gc.enable()


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    control.sendall(json.dumps(message).encode() + b"\n")


def _report_end(control: socket.socket, running: dict[int, int], pid: int) -> None:
    os.close(running.pop(pid))
    _, status = os.waitpid(pid, 0)
    _send(control, {"pid": pid, "returncode": os.waitstatus_to_exitcode(status)})


def _fork_ranks(request: dict[str, Any], control: socket.socket) -> list[int]:
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise ForkServerError(f"the fork server has {threads} threads: what it forks would not be sound")
    pids = []
    for environment, log in zip(request["environments"], request["logs"], strict=True):
        # A rank that is to show its stacks before it can would end by that signal.
        with blocked({STACKS_SIGNAL}):
            pid = os.fork()
            if pid == 0:
                control.close()
                _become_rank(request, environment, log)
        pids.append(pid)
    return pids


def _become_rank(request: dict[str, Any], environment: dict[str, str], log: str) -> NoReturn:
    status = 1
    try:
        os.setsid()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        os.chdir(request["directory"])
        disabled = os.environ["TORCHDYNAMO_DISABLE"]
        os.environ.clear()
        os.environ.update(environment, TORCHDYNAMO_DISABLE=disabled)
        os.environ[PARENT_VARIABLE] = str(os.getppid())
        # torch makes its thread pool anew after a fork, and two threads that ask first at once may find none
        # (caffe2/utils/threadpool/pthreadpool-cpp.cc): here there is one.
        import torch

        torch.set_num_threads(torch.get_num_threads())
        run_script(request["argv"])
        status = 0
    except SystemExit as exit_request:
        if exit_request.code is None:
            status = 0
        elif isinstance(exit_request.code, int):
            status = exit_request.code
        else:
            sys.stderr.write(f"{exit_request.code}\n")
    except BaseException:
        sys.excepthook(*sys.exc_info())  # as the interpreter would
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        serve(connection)
