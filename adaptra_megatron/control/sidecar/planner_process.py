# SPDX-License-Identifier: Apache-2.0
"""Run the planner process: collect the reports of all ranks and decide, or find stragglers, until its rank ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from adaptra_megatron.common.handshake import receive_descriptor
from adaptra_megatron.common.layout import Cell
from adaptra_megatron.common.log import logger_of
from adaptra_megatron.common.open_files import allow_connections
from adaptra_megatron.common.typed_messages import encoded
from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.control.deciders.decision_engine import DecisionEngine
from adaptra_megatron.control.deciders.plan_state import PlanState
from adaptra_megatron.control.decisions import TelemetrySection
from adaptra_megatron.control.sidecar.planner_client import (
    MOST_UNSEALED,
    Begin,
    Decided,
    Measured,
    Sealed,
    Waits,
    receive_async,
)
from adaptra_megatron.control.sidecar.planner_connections import (
    ChannelEndedError,
    Gathering,
    Line,
    Reported,
    ReportServer,
    SidecarMessages,
    packed,
    round_of,
)
from adaptra_megatron.control.stragglers.straggler_judge import StragglerDetector
from adaptra_megatron.control.stragglers.straggler_reports import (
    TO_JUDGE,
    CellReport,
    Finish,
    JudgeBegin,
    StragglerServiceReply,
    StragglerVerdict,
    report_of,
)
from adaptra_megatron.telemetry.action_records import Iterations
from adaptra_megatron.telemetry.events import (
    Event,
    Stamp,
    StampedEvent,
    encode,
)
from adaptra_megatron.transport._ring import die_with_parent

logger = logger_of(__name__)

_NO_STAMP = Stamp(run="", rank=0, sequence=0, iteration=0, wall_s=0.0, monotonic_s=0.0)


class Notes(logging.Handler):
    """Log lines and events that have not been sent to the rank yet."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[Line] = []
        self._events: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line of the package's loggers for the rank, which logs it under its own prefix."""
        text = record.getMessage().removeprefix("adaptra: ")
        self._lines.append(Line(module=record.name, level=record.levelno, text=text))

    def log(self, event: Event) -> None:
        """Record an event."""
        self._events.append(encode(StampedEvent(stamp=_NO_STAMP, event=event)))

    def take_all(self) -> tuple[tuple[Line, ...], tuple[str, ...]]:
        """Return all kept lines and events, and drop them. Events are encoded as in an event log; their stamps are not
        used."""
        lines, events = tuple(self._lines), tuple(self._events)
        self._lines.clear()
        self._events.clear()
        return lines, events

    def collect(self, level: int) -> None:
        """Take in all lines of the package's loggers from now on, at `level` or above."""
        logger = logging.getLogger("adaptra_megatron")
        logger.setLevel(level)
        logger.addHandler(self)
        logger.propagate = False


def serve(arguments: list[str], work: Callable[[socket.socket, socket.socket], Awaitable[None]]) -> None:
    """Run a sidecar process until its channel ends, with its rank.

    `arguments`: descriptor of its channel, and the rank's process id. `work(channel, listener)`: called with the
    non-blocking channel and the rank's listener, which the rank sends first.
    """
    descriptor, parent = map(int, arguments)
    die_with_parent(parent)
    try:
        asyncio.run(_served(socket.socket(fileno=descriptor), work))
    except OSError:  # the channel has ended
        os._exit(0)
    except Exception:
        traceback.print_exc()
        os._exit(1)


async def _served(channel: socket.socket, work: Callable[[socket.socket, socket.socket], Awaitable[None]]) -> None:
    channel.setblocking(False)
    await work(channel, socket.socket(fileno=await receive_descriptor(channel)))


class PlannerNotes(Notes):
    """Log lines and events to send with a decision. Serves as the deciders' telemetry."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted: tuple[Iterations, ...] = ()

    def requests(self) -> tuple[Iterations, ...]:
        """Return the iterations that every rank is asked to trace, new since the last call."""
        wanted, self.wanted = self.wanted, ()
        return wanted


FIRST_REPORTS_S = 60.0
"""Seconds in which ranks may connect before missing reports are logged: short iterations are over earlier."""


class Planner:
    """Decides for one replica."""

    def __init__(self, begin: Begin, notes: PlannerNotes) -> None:
        """Raises an error if a given plan or costs are invalid."""
        config = AdaptraConfig(
            policy=begin.policy,
            max_in_flight=begin.max_in_flight,
            plan_csv=None if begin.plan_csv is None else Path(begin.plan_csv),
            costs_json=None if begin.costs_json is None else Path(begin.costs_json),
        )
        self._book = PlanState(config, begin.layout, measures_memory=begin.measures_memory)
        self._leader = DecisionEngine(self._book, notes, begin.paths, begin.running, begin.routes)
        self._notes, self._policy, self._made = notes, "", 0
        self._patient_until_s = time.monotonic() + FIRST_REPORTS_S
        """Missing reports are not logged until then: ranks connect once they have something to report."""

    def answer(self, over: Sequence[Reported]) -> tuple[Decided, bytes]:
        """Decide from the reported iterations. Return the answer, and the decision in bytes; none if there is none.

        A failure is part of the answer, and the next call may succeed.
        """
        decision, failure = None, ""
        whole = [reported for reported in over if not reported.lost]
        try:
            if whole:
                self._patient_until_s = 0.0
                decision = self._leader.decide([round_of(reported) for reported in whole], self._policy)
                self._policy = ""
            elif time.monotonic() >= self._patient_until_s:
                failure = _missing(over[-1])
        except ValueError as cause:
            failure = f"the measurements of iteration {over[-1].iteration} cannot be decoded: {cause}"
        except Exception:  # a bug of ours: the training goes on, and the rank's log says what it was
            failure = traceback.format_exc()
        costs = self._leader.costs
        lines, events = self._notes.take_all()
        self._made += decision is not None
        decided = Decided(
            until=over[-1].iteration,
            made=0 if decision is None else self._made,
            orders={} if decision is None or decision.routing is None else decision.routing.orders,
            failure=failure,
            lines=lines,
            events=events,
            costs=None if costs is None else encoded(costs),
        )
        return decided, b"" if decision is None else encoded(decision.without_orders())

    def runs(self, number: int, asked: TelemetrySection) -> None:
        """Take in the number of the current plan, and users' new requests."""
        self._book.number = number
        self._notes.wanted += asked.requests
        self._policy = asked.policy  # said again until a decision carries it


def _missing(reported: Reported) -> str:
    ranks = ", ".join(map(str, reported.lost))
    return (
        f"reports of ranks {ranks} for iteration {reported.iteration} have not come, or were lost with their "
        "connections or with an earlier planner process"
    )


class PlannerProcess:
    """Tasks of the planner process, in one event loop."""

    def __init__(self, channel: socket.socket, listener: socket.socket, begin: Begin, planner: Planner) -> None:
        self._channel, self._planner, self._gathering = channel, planner, Gathering(begin.reporters)
        self._leader, self._waits_s = min(begin.reporters), begin.waits_s
        self._unsealed: deque[tuple[int, bytes]] = deque(maxlen=MOST_UNSEALED)
        """Decisions made here that may still be sealed: numbers and bytes."""
        self._over = asyncio.Event()
        """Set when an iteration can be decided on."""
        self._server = ReportServer(bytes.fromhex(begin.secret), begin.place, begin.reporters, self._add)
        self._server.listen(listener)

    async def work(self) -> None:
        """Serve until the channel ends. Raises ChannelEndedError then."""
        await asyncio.gather(self._listen(), self._decide())

    def _add(self, rank: int, iteration: int, report: bytes) -> None:
        if self._gathering.add(rank, iteration, report):
            self._over.set()

    async def _listen(self) -> None:
        while True:
            message, along = await receive_async(self._channel)
            if isinstance(message, Sealed):
                self._spread(message, along)
                continue
            assert isinstance(message, Measured), f"{message} came instead of measurements"
            self._planner.runs(message.number, message.asked)
            at = 0
            for iteration, nbytes in zip(message.iterations, message.nbytes, strict=True):
                self._gathering.expect(iteration)
                self._add(self._leader, iteration, along[at : at + nbytes])
                at += nbytes

    def _spread(self, sealed: Sealed, packet: bytes) -> None:
        if sealed.made:
            packet = next((made for number, made in self._unsealed if number == sealed.made), b"")
        if packet:
            self._server.send_all(sealed.iteration, packet)

    async def _decide(self) -> None:
        """Decide as soon as an iteration can be decided on; until then, send `Waits` every `_waits_s`."""
        loop, gathering = asyncio.get_running_loop(), self._gathering
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._over.wait(), self._waits_s)
            self._over.clear()
            if over := gathering.take():
                decided, packet = self._planner.answer(over)
                if decided.made:
                    self._unsealed.append((decided.made, packet))
                await loop.sock_sendall(self._channel, packed(decided, [packet]))
            elif gathering.awaited is not None:
                waits = Waits(iteration=gathering.awaited, missing=tuple(gathering.missing))
                await loop.sock_sendall(self._channel, packed(waits))


class StragglerService:
    """Tasks that find stragglers, in the event loop of a planner process."""

    def __init__(self, channel: socket.socket, listener: socket.socket, begin: JudgeBegin, notes: Notes) -> None:
        self._channel, self._pace, self._notes = channel, begin.pace, notes
        self._cells = {rank: cell for cell, rank, _ in begin.cells}
        self._judge = StragglerDetector({cell: (rank, host) for cell, rank, host in begin.cells}, notes.log)
        self._reports: dict[Cell, CellReport] = {}
        self._finished = asyncio.Event()
        self._server = ReportServer(bytes.fromhex(begin.secret), begin.place, self._cells, self._add)
        self._server.listen(listener)

    async def work(self) -> None:
        """Judge reports until the rank sends Finish or `finish` is called, and once more then. Raises OSError if its
        channel has ended."""
        listening = asyncio.create_task(self._listen())
        try:
            await self._look()
        finally:
            listening.cancel()

    def finish(self) -> None:
        """Have `work` judge once more, and end."""
        self._finished.set()

    async def _listen(self) -> None:
        with contextlib.suppress(ChannelEndedError):  # seen where the last verdict is sent
            message, _ = await TO_JUDGE.receive_async(self._channel)
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
        """Return the seconds of a recently reported iteration; 0 before the first."""
        rows = next((report.rows for report in self._reports.values() if report.rows), ())
        return rows[-1].seconds if rows else 0.0

    def _add(self, rank: int, number: int, report: bytes) -> None:
        try:
            cell, found = self._cells[rank], report_of(report)
        except ValueError as cause:
            logger.warning("the report of rank %d on its arrivals cannot be decoded: %s", rank, cause)
            return
        self._reports[cell] = found
        self._judge.take(cell, found)


_FIRST: SidecarMessages[Begin | JudgeBegin] = SidecarMessages(Begin | JudgeBegin)


async def _work(channel: socket.socket, listener: socket.socket) -> None:
    begin, _ = await _FIRST.receive_async(channel)
    assert isinstance(begin, Begin | JudgeBegin), f"{begin} came first"
    notes = PlannerNotes()
    notes.collect(begin.log_level)
    if isinstance(begin, JudgeBegin):
        allow_connections(len(begin.cells), "judge of stragglers")
        await StragglerService(channel, listener, begin, notes).work()
        return
    allow_connections(len(begin.reporters), "planner process")
    hosted = socket.socket(fileno=await receive_descriptor(channel)) if begin.hosts else None
    planning = PlannerProcess(channel, listener, begin, Planner(begin, notes)).work()
    await (planning if hosted is None else _hosting(planning, hosted))


HOSTED_END_S = 0.7
"""Longest wait for the last verdict on stragglers once the planner process is to end."""


async def _hosting(planning: Coroutine[Any, Any, None], channel: socket.socket) -> None:
    """Plan, and find stragglers for the rank's thread at the other end of `channel` once that asks for it."""
    channel.setblocking(False)
    services: list[StragglerService] = []

    async def find_stragglers() -> None:
        with contextlib.suppress(OSError):  # the thread has ended: the planning goes on
            listener = socket.socket(fileno=await receive_descriptor(channel))
            begin, _ = await TO_JUDGE.receive_async(channel)
            assert isinstance(begin, JudgeBegin), f"{begin} came first"
            allow_connections(len(begin.cells), "planner process")
            services.append(StragglerService(channel, listener, begin, Notes()))
            await services[0].work()

    finding = asyncio.create_task(find_stragglers())
    try:
        await planning
    finally:
        # The last verdict stays in the channel, where the thread reads it when it ends.
        for service in services:
            service.finish()
            await asyncio.wait([finding], timeout=HOSTED_END_S)


def main(arguments: list[str]) -> None:
    """Run the process. `arguments`: descriptor of its channel, and process id of its parent."""
    serve(arguments, _work)
