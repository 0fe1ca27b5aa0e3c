# SPDX-License-Identifier: Apache-2.0
"""Run the planner process: collect the reports of all ranks and decide, until the leader ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.control.deciders.decision_engine import DecisionEngine
from adaptra_megatron.control.deciders.plan_state import PlanState
from adaptra_megatron.control.decisions import TelemetrySection
from adaptra_megatron.control.sidecar.planner_client import (
    Begin,
    Decided,
    Measured,
    Published,
    Waits,
    receive_async,
)
from adaptra_megatron.control.sidecar.report_connections import Gathering, Reported, ReportServer, round_of
from adaptra_megatron.control.sidecar.sidecar_process import Notes, allow_connections, packed, serve
from adaptra_megatron.schedule.costs import costs_to_json
from adaptra_megatron.telemetry.action_records import Iterations


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
        """Set up. Raises an error if a given plan or costs are invalid."""
        config = AdaptraConfig(
            policy=begin.policy,
            max_in_flight=begin.max_in_flight,
            plan_csv=None if begin.plan_csv is None else Path(begin.plan_csv),
            costs_json=None if begin.costs_json is None else Path(begin.costs_json),
        )
        self._book = PlanState(config, begin.layout, measures_memory=begin.measures_memory)
        self._leader = DecisionEngine(self._book, notes, begin.paths, begin.running, begin.routes)
        self._notes, self._policy = notes, ""
        self._patient_until_s = time.monotonic() + FIRST_REPORTS_S
        """Missing reports are not logged until then: ranks connect once they have something to report."""

    def answer(self, over: Sequence[Reported]) -> Decided:
        """Decide from the reported iterations. A failure is part of the answer, and the next call may succeed."""
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
        return Decided(
            until=over[-1].iteration,
            decision=decision,
            failure=failure,
            lines=lines,
            events=events,
            costs=None if costs is None else json.dumps(costs_to_json(costs)),
        )

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
            if isinstance(message, Published):
                self._server.pass_on(message.iteration, along)
                continue
            assert isinstance(message, Measured), f"{message} came instead of measurements"
            self._planner.runs(message.number, message.asked)
            at = 0
            for iteration, nbytes in zip(message.iterations, message.nbytes, strict=True):
                self._gathering.expect(iteration)
                self._add(self._leader, iteration, along[at : at + nbytes])
                at += nbytes

    async def _decide(self) -> None:
        """Decide as soon as an iteration can be decided on; until then, send `Waits` every `_waits_s`."""
        loop, gathering = asyncio.get_running_loop(), self._gathering
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._over.wait(), self._waits_s)
            self._over.clear()
            if over := gathering.take():
                await loop.sock_sendall(self._channel, packed(self._planner.answer(over)))
            elif gathering.awaited is not None:
                waits = Waits(iteration=gathering.awaited, missing=tuple(gathering.missing))
                await loop.sock_sendall(self._channel, packed(waits))


async def _work(channel: socket.socket, listener: socket.socket) -> None:
    begin, _ = await receive_async(channel)
    assert isinstance(begin, Begin), f"{begin} came first"
    notes = PlannerNotes()
    notes.collect(begin.log_level)
    allow_connections(len(begin.reporters), "planner process")
    await PlannerProcess(channel, listener, begin, Planner(begin, notes)).work()


def main(arguments: list[str]) -> None:
    """Run the process. `arguments`: descriptor of its channel, and process id of its parent."""
    serve(arguments, _work)
