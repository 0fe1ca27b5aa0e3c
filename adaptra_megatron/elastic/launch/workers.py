# SPDX-License-Identifier: Apache-2.0
"""Ranks of one host: environment, processes, logs and endings, all as torchrun's."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from string import Template
from typing import Any

from torch.distributed.elastic.multiprocessing import start_processes
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import get_subprocess_handler
from torch.distributed.elastic.utils.api import macros
from torch.distributed.launcher.api import LaunchConfig

from adaptra_megatron.common.log import logger_of
from adaptra_megatron.common.membership import START_VARIABLE
from adaptra_megatron.common.typed_messages import plain_text
from adaptra_megatron.elastic.launch import tied_process
from adaptra_megatron.elastic.launch.endpoint import Endpoint
from adaptra_megatron.elastic.launch.guard import Guard, kill_group
from adaptra_megatron.elastic.launch.launch_messages import DETAILS_NCHARS, KILLED_S, RankEnding, Start

logger = logger_of(__name__)

POLL_S = 0.05
_TAIL_LINES = 20
_MOST_ERROR_NBYTES = 1 << 20
"""Maximum size of a file of torch's `record` that is read."""


class Workers:
    """Processes of the ranks of one host, each in a session of its own.

    The main thread must create it: Linux ends the ranks with the thread that started them.
    """

    def __init__(
        self,
        config: LaunchConfig,
        command: str,
        arguments: tuple[str, ...],
        start: Start,
        node_rank: int,
        endpoint: Endpoint,
        first_start: int = 0,
    ) -> None:
        """Start the ranks. `endpoint`: address of the job's store for the ranks.

        `first_start`: number of earlier starts of these ranks, if this host replaces another. Raises OSError, and
        torch's SignalException if a signal arrives meanwhile.
        """
        prefix = config.log_line_prefix_template
        self._environments = environments = environments_of(config, start, node_rank, endpoint)
        locals_ = range(config.nproc_per_node)
        if first_start:
            environments = {local: {**each, START_VARIABLE: str(first_start)} for local, each in environments.items()}
        self._first_start = first_start
        optional = {
            name: value
            for name in ("numa_options", "duplicate_stdout_filters", "duplicate_stderr_filters")
            if (value := getattr(config, name, None))
        }
        tied = ("-I", "-S", tied_process.__file__, str(os.getpid()), command, *arguments)
        self._arguments = {local: tuple(macros.substitute(list(tied), str(local))) for local in locals_}
        assert config.logs_specs is not None
        self._guard = Guard()
        # torch's context starts the ranks and has their logs. Its `wait` is never called: it would end all ranks when
        # one fails (multiprocessing/api.py, SubprocessContext._poll).
        context: Any = start_processes(
            name=config.role,
            entrypoint=sys.executable,
            args=self._arguments,
            envs=environments,
            logs_specs=config.logs_specs,
            log_line_prefixes={local: _prefix(prefix, environments[local]) for local in locals_} if prefix else None,
            **optional,
        )
        self._context = context
        self._handlers = dict(self._context.subprocess_handlers)
        """Handler of each local rank's latest process."""
        self._starts = dict.fromkeys(locals_, first_start)
        """Number of earlier starts of each local rank."""
        self._numa = optional.get("numa_options")
        self._running = self._context.pids()
        for process_id in self._running.values():
            self._guard.watch(process_id)

    @property
    def running(self) -> list[int]:
        """Local ranks whose processes run."""
        return list(self._running)

    def poll(self) -> list[RankEnding]:
        """Return the ranks that have ended since the last call. Kills the rest of their process groups."""
        endings = []
        for local_rank, process_id in list(self._running.items()):
            # WNOWAIT leaves the zombie: its process id, which is also the group's, cannot be reused before the group is
            # killed.
            if os.waitid(os.P_PID, process_id, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            kill_group(process_id)  # before the number is free for another
            exit_code = self._handlers[local_rank].proc.wait()
            self._guard.forget(process_id)
            del self._running[local_rank]
            details = self._details(local_rank, process_id, exit_code) if exit_code else ""
            start = self._starts[local_rank]
            endings.append(RankEnding(local_rank, process_id, exit_code, time.time(), details, start=start))
        return endings

    def start_again(self, local_rank: int) -> None:
        """Restart a rank that has ended. Raises OSError.

        If the first process wrote to log files, this one writes to its own, whose names end with ".again-<number>".
        With --tee it writes only to the file.
        """
        self._starts[local_rank] += 1
        environment = {
            **self._environments[local_rank],
            START_VARIABLE: str(self._starts[local_rank]),
            "TORCHELASTIC_ERROR_FILE": self._file(self._context.error_files, local_rank),
        }
        # By hand, as the context starts all ranks of the host or none (SubprocessContext._start).
        handler = get_subprocess_handler(
            sys.executable,
            self._arguments[local_rank],
            environment,
            self._file(self._context.stdouts, local_rank),
            self._file(self._context.stderrs, local_rank),
            local_rank,
            self._numa,
        )
        self._handlers[local_rank] = handler
        self._running[local_rank] = handler.proc.pid
        self._guard.watch(handler.proc.pid)

    def end(self, number: signal.Signals, patience_s: float, hurry: Callable[[], bool]) -> list[RankEnding]:
        """Send a signal to all running ranks; kill those that run after `patience_s`, or once `hurry` returns True.

        Returns their endings. Logs a process that the kernel does not end, and leaves it out.
        """
        self._signal(number)
        endings = self._await(patience_s, hurry)
        if self._running:
            logger.warning("local ranks %s have not ended within %g s: they are killed", self.running, patience_s)
            self._signal(signal.SIGKILL)
            endings += self._await(KILLED_S, lambda: False)
        for local_rank, process_id in self._running.items():
            logger.error(
                "the kernel keeps process %d (local rank %d), which was killed: it waits for a device or disk; see its "
                "/proc/%d/wchan, this host may have to be restarted",
                process_id,
                local_rank,
                process_id,
            )
        return endings

    def kill(self, starts: Mapping[int, int]) -> None:
        """Kill processes of ranks; `poll` returns their endings. `starts`: number of earlier starts, by local rank.

        Processes with another number of earlier starts are left alone.
        """
        for local_rank, process_id in self._running.items():
            if starts.get(local_rank) == self._starts[local_rank]:
                kill_group(process_id)

    def close(self) -> None:
        """Print the rest of the logs that go to the terminal, and end all processes."""
        self._context.close(signal.SIGKILL, 0)
        self._guard.close()

    def _signal(self, number: signal.Signals) -> None:
        for process_id in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                # To the group, so that a shell script's children get it, too.
                os.killpg(process_id, number)

    def _await(self, patience_s: float, hurry: Callable[[], bool]) -> list[RankEnding]:
        deadline_s = time.monotonic() + patience_s
        endings = self.poll()
        while self._running and time.monotonic() < deadline_s and not hurry():
            time.sleep(POLL_S)
            endings += self.poll()
        return endings

    def _file(self, files: Mapping[int, str], local_rank: int) -> str:
        """Return the log file in `files` of a rank's latest process; "" if it has none."""
        file, start = files[local_rank], self._starts[local_rank]
        # A new file: SubprocessHandler opens logs with "w", which would empty that of the process before.
        return f"{file}.again-{start}" if file and start > self._first_start else file

    def _details(self, local_rank: int, process_id: int, exit_code: int) -> str:
        """Return the path of a rank's log, and its error: from torch's `record`, or else the end of its log."""
        files = (self._file(files, local_rank) for files in (self._context.stderrs, self._context.stdouts))
        logs = [log for log in files if log]
        where = " ".join(logs) or "none but this launcher's output (--redirects 3 or --tee 3 writes files to --log-dir)"
        error_file = self._file(self._context.error_files, local_rank)
        try:
            if os.path.getsize(error_file) > _MOST_ERROR_NBYTES:
                raise ValueError(f"{error_file} is too large")
            message: Any = ProcessFailure(local_rank, process_id, exit_code, error_file).error_file_data["message"]
        except (ValueError, KeyError, TypeError, OSError, OverflowError, RecursionError):  # none, or half of one
            message = "<NONE>"
        if isinstance(message, dict):
            message = message.get("extraInfo", {}).get("py_callstack") or message.get("message")
        tail = _tail(Path(logs[0])) if logs else ""
        text = tail if message == "<NONE>" else _end_of(str(message))
        return plain_text("\n".join([f"  log: {where}", *(f"  | {line}" for line in text.splitlines())]))


def environments_of(
    config: LaunchConfig, start: Start, node_rank: int, endpoint: Endpoint
) -> dict[int, dict[str, str]]:
    """Return torchrun's environment variables of each local rank
    (torch/distributed/elastic/agent/server/local_elastic_agent.py, LocalElasticAgent._start_workers).
    """
    inherited = {name: os.environ[name] for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES") if name in os.environ}
    common = {
        "GROUP_RANK": str(node_rank),
        "GROUP_WORLD_SIZE": str(len(start.first_ranks)),
        "ROLE_NAME": config.role,
        "LOCAL_WORLD_SIZE": str(config.nproc_per_node),
        "WORLD_SIZE": str(start.world_size),
        "ROLE_WORLD_SIZE": str(start.world_size),
        "MASTER_ADDR": endpoint.host,
        "MASTER_PORT": str(endpoint.port),
        # torchrun counts restarts of all ranks together, and here ranks are started again one by one (START_VARIABLE).
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": config.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        **inherited,
    }
    first = start.first_ranks[node_rank]
    return {
        local: {**common, "RANK": str(first + local), "ROLE_RANK": str(first + local), "LOCAL_RANK": str(local)}
        for local in range(config.nproc_per_node)
    }


def _prefix(template: str, environment: dict[str, str]) -> str:
    return Template(template).safe_substitute(
        role_name=environment["ROLE_NAME"], rank=environment["RANK"], local_rank=environment["LOCAL_RANK"]
    )


def _tail(log: Path) -> str:
    """Return the last lines of a log, which may be of any size, or a single line."""
    try:
        with log.open("rb") as file:
            begin = max(0, file.seek(0, os.SEEK_END) - DETAILS_NCHARS)
            file.seek(begin)
            text = _end_of(file.read(DETAILS_NCHARS).decode(errors="replace"), cut=begin > 0)
    except OSError as cause:
        return f"{log} cannot be read: {cause.strerror}"
    return "".join(text.splitlines(keepends=True)[-_TAIL_LINES:])


def _end_of(text: str, *, cut: bool = False) -> str:
    """Return the end of a text, at most DETAILS_NCHARS: whole lines, or the end of a line that is longer.

    `cut`: `text` itself is the end of a longer text.
    """
    if len(text) <= DETAILS_NCHARS and not cut:
        return text
    part, _, lines = text[-DETAILS_NCHARS:].partition("\n")
    return f"... (cut)\n{lines or part}"
