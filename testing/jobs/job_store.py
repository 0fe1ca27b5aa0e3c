# SPDX-License-Identifier: Apache-2.0
"""Serve a job's store in a process of its own, as torchrun's agent does: it can be stopped, or fail, alone."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from adaptra_megatron.tools.local_ranks.launch_ranks import POLL_S, free_port, rank_environment
from testing.jobs.fork_server import ForkServer

_ENDED_S = 10.0
_STORE_S = 300.0


class JobStore:
    """A running store, from construction to `close()`. Also a context manager."""

    def __init__(self, server: ForkServer, log: Path) -> None:
        """Fork the store from `server`; its output goes to `log`. Raises ForkServerError."""
        port = str(free_port())
        (self.process_id,) = server.start(["-m", __name__, port], [rank_environment({})], [log.resolve()])
        # The last is torch's own: no rank serves the store, all are its clients.
        self.environment: Mapping[str, str] = {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        """Environment of the ranks, in addition to that of `launch`."""
        self._server = server

    def close(self) -> None:
        """Kill the process, stopped or not."""
        if self._server.poll(self.process_id) is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.process_id, signal.SIGKILL)
        deadline_s = time.monotonic() + _ENDED_S
        while self._server.poll(self.process_id) is None and time.monotonic() < deadline_s:
            time.sleep(POLL_S)

    def __enter__(self) -> JobStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _serve(port: int) -> None:
    from adaptra_megatron.elastic.launch.endpoint import serve_store

    served = serve_store("127.0.0.1", port, _STORE_S)
    signal.pause()
    del served


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
