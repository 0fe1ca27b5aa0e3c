# SPDX-License-Identifier: Apache-2.0
"""The sidecar process of the job's lowest rank that takes in what all cells report and judges it, for no training
process has the time: at thousands of cells, decoding their reports alone takes tens of milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time

from adaptra_megatron.common.job.layout import Cell
from adaptra_megatron.common.log import logger_of
from adaptra_megatron.control.beside.beside_process import Notes, allow_connections, packed, serve
from adaptra_megatron.control.beside.report_server import ReportServer
from adaptra_megatron.control.stragglers.judge import StragglerDetector
from adaptra_megatron.control.stragglers.straggler_reports import (
    TO_JUDGE,
    CellReport,
    Finish,
    JudgeBegin,
    StragglerServiceReply,
    StragglerVerdict,
    report_of,
)

logger = logger_of(__name__)


class JudgeProcess:
    """Work of the straggler process, as tasks of one event loop."""

    def __init__(self, channel: socket.socket, listener: socket.socket, begin: JudgeBegin, notes: Notes) -> None:
        self._channel, self._pace, self._notes = channel, begin.pace, notes
        self._cells = {rank: cell for cell, rank, _ in begin.cells}
        self._judge = StragglerDetector({cell: (rank, host) for cell, rank, host in begin.cells}, notes.log)
        self._reports: dict[Cell, CellReport] = {}
        self._finished = asyncio.Event()
        self._server = ReportServer(bytes.fromhex(begin.secret), begin.place, self._cells, self._add)
        self._server.listen(listener)

    async def work(self) -> None:
        """Until the rank has it finish. Raises ChannelEndedError where the channel ends before."""
        await asyncio.gather(self._listen(), self._look())

    async def _listen(self) -> None:
        message, _ = await TO_JUDGE.hear(self._channel)
        assert isinstance(message, Finish), f"{message} came instead of the end"
        self._finished.set()

    async def _look(self) -> None:
        backoff, verdict = self._pace.backoff(), StragglerVerdict()
        while not self._finished.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                pause_s = self._pace.pause_s(backoff.next_s(), self._iteration_s(), verdict.late)
                await asyncio.wait_for(self._finished.wait(), pause_s)
            before, verdict = verdict, self._judge.look(self._reports, time.monotonic())
            last = self._finished.is_set()
            if last:
                self._judge.finish()
            lines, events = self._notes.take_all()
            if last or lines or events or verdict != before:
                judged = StragglerServiceReply(verdict=verdict, lines=lines, events=events, last=last)
                await asyncio.get_running_loop().sock_sendall(self._channel, packed(judged))

    def _iteration_s(self) -> float:
        """Seconds of an iteration that has been reported lately; 0 before any has."""
        rows = next((report.rows for report in self._reports.values() if report.rows), ())
        return rows[-1].seconds if rows else 0.0

    def _add(self, rank: int, number: int, report: bytes) -> None:
        try:
            self._reports[self._cells[rank]] = report_of(report)
        except ValueError as cause:
            logger.warning("what rank %d reports of its arrivals cannot be taken in: %s", rank, cause)


async def _work(channel: socket.socket, listener: socket.socket) -> None:
    begin, _ = await TO_JUDGE.hear(channel)
    assert isinstance(begin, JudgeBegin), f"{begin} came first"
    notes = Notes()
    notes.collect(begin.log_level)
    allow_connections(len(begin.cells), "judge of stragglers")
    await JudgeProcess(channel, listener, begin, notes).work()


def main(arguments: list[str]) -> None:
    """The process, with the descriptor of its channel and its parent's process id as arguments."""
    serve(arguments, _work)
