# SPDX-License-Identifier: Apache-2.0
"""The judge's process as the job's lowest rank has it."""

from __future__ import annotations

import logging
import select
import socket
import time
from collections.abc import Callable

from adaptra_megatron.control.beside.channel import Sidecar, send
from adaptra_megatron.control.beside.process import log_events, log_lines
from adaptra_megatron.control.rounds import Address
from adaptra_megatron.control.stragglers.reports import (
    FROM_JUDGE,
    Finish,
    JudgeBegin,
    Pace,
    StragglerServiceReply,
    Verdict,
)
from adaptra_megatron.job.control_store import ControlStore
from adaptra_megatron.job.layout import JobLayout
from adaptra_megatron.telemetry.events.events import Event

_PATIENCE_S = 10.0
"""For the rest of a message that has begun to come."""


class StragglerServiceClient:
    """For one thread, which must live as long as the process. Raises OSError if this host has no room for one."""

    def __init__(
        self,
        control: ControlStore,
        place: str,
        layout: JobLayout,
        pace: Pace,
        listener: socket.socket,
        log: Callable[[Event], None],
    ) -> None:
        """`place`: of the reports, as their seal has it. `listener`: bound to where cells connect; belongs to the
        keeper from now on. `log`: takes findings."""
        cells = layout.cells
        begin = JudgeBegin(
            secret=control.secret.hex(),
            place=place,
            cells=tuple((cell, ranks[0], layout.workers[ranks[0]].host) for cell, ranks in cells.items()),
            pace=pace,
            log_level=logging.getLogger("adaptra_megatron").getEffectiveLevel(),
        )
        self._log = log
        with listener:
            listener.listen(len(cells))  # all of them connect at once
            host, port = listener.getsockname()[:2]
            self.address = Address(str(host), int(port))
            module = "adaptra_megatron.control.stragglers.judge_process"
            self._process = Sidecar(module, listener, begin, _PATIENCE_S)

    def latest(self) -> Verdict | None:
        """What has been found since the last call, whose lines and events are logged; None if it has not looked.

        Never waits for a look. Raises ChannelEndedError if the process has ended.
        """
        judged = None
        while self._readable(0.0):
            judged = self._take()
        return None if judged is None else judged.verdict

    def finish(self, patience_s: float) -> None:
        """Have it look once more and end; what it says until then is logged. Raises ChannelEndedError if it has ended
        already."""
        send(self._process.channel, Finish())
        until_s = time.monotonic() + patience_s
        while self._readable(max(0.0, until_s - time.monotonic())):
            if self._take().last:
                return

    def close(self) -> str:
        """End the process. Returns how it ended."""
        return self._process.close()

    def _readable(self, timeout_s: float) -> bool:
        return bool(select.select([self._process.channel], [], [], timeout_s)[0])

    def _take(self) -> StragglerServiceReply:
        judged = FROM_JUDGE.receive(self._process.channel)
        log_lines(judged.lines)
        log_events(judged.events, self._log)
        return judged
