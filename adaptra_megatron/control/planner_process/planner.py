# SPDX-License-Identifier: Apache-2.0
"""The planner process itself: takes in measurements, answers with decisions, and ends with its rank."""

from __future__ import annotations

import json
import logging
import os
import socket
import traceback
from collections.abc import Sequence
from pathlib import Path

from adaptra_megatron.authentication.seal import Seal, TamperedError
from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.control.leader import PlanLeader
from adaptra_megatron.control.order.plans import PlanBook
from adaptra_megatron.control.planner_process.messages import (
    Begin,
    ChannelEndedError,
    Decided,
    Line,
    Measured,
    receive,
    send,
)
from adaptra_megatron.control.rounds import SealedRound, read_round
from adaptra_megatron.schedule.costs_json import costs_to_json
from adaptra_megatron.telemetry.events.events import Event, Stamp, StampedEvent, encode
from adaptra_megatron.telemetry.tracing.trace_requests import Iterations
from adaptra_megatron.transport._ring import die_with_parent

_NO_STAMP = Stamp(run="", rank=0, sequence=0, iteration=0, wall_s=0.0, monotonic_s=0.0)


class Notes(logging.Handler):
    """What there is to be said along with a decision; the leader's telemetry, too."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Line] = []
        self.events: list[str] = []
        self.wanted: tuple[Iterations, ...] = ()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line of the package's loggers for the rank, which logs it under its own prefix."""
        text = record.getMessage().removeprefix("adaptra: ")
        self.lines.append(Line(module=record.name, level=record.levelno, text=text))

    def log(self, event: Event) -> None:
        """See RunTelemetry."""
        self.events.append(encode(StampedEvent(stamp=_NO_STAMP, event=event)))

    def requests(self) -> tuple[Iterations, ...]:
        """See RunTelemetry."""
        wanted, self.wanted = self.wanted, ()
        return wanted


class Planner:
    """Decides for one replica."""

    def __init__(self, begin: Begin, notes: Notes) -> None:
        """Raises what a given plan or costs are refused with."""
        config = AdaptraConfig(
            policy=begin.policy,
            max_in_flight=begin.max_in_flight,
            plan_csv=None if begin.plan_csv is None else Path(begin.plan_csv),
            costs_json=None if begin.costs_json is None else Path(begin.costs_json),
        )
        self._book = PlanBook(config, begin.layout, measures_memory=begin.measures_memory)
        self._leader = PlanLeader(self._book, notes, begin.paths, begin.running, begin.routes)
        self._seal, self._notes = Seal(bytes.fromhex(begin.secret), begin.place), notes

    def answer(self, measured: Measured, entries: bytes) -> Decided:
        """What was measured is joined, judged and decided on; a failure is said, and the next one may do."""
        notes, decision, failure = self._notes, None, ""
        notes.wanted = measured.requests
        self._book.number = measured.number
        try:
            rounds = [read_round(one, self._seal) for one in _rounds(measured, entries)]
            decision = self._leader.decide(rounds)
        except (TamperedError, ValueError) as cause:
            failure = f"what a rank measured in iteration {measured.iterations[-1]} cannot be taken in: {cause}"
        except Exception:  # a bug of ours: the training goes on, and the rank's log says what it was
            failure = traceback.format_exc()
        costs = self._leader.costs
        said = Decided(
            decision=decision,
            failure=failure,
            lines=tuple(notes.lines),
            events=tuple(notes.events),
            costs=None if costs is None else json.dumps(costs_to_json(costs)),
        )
        notes.lines.clear()
        notes.events.clear()
        return said


def _rounds(measured: Measured, entries: bytes) -> Sequence[SealedRound]:
    found, at = [], 0
    for iteration, nbytes in zip(measured.iterations, measured.nbytes, strict=True):
        found.append(SealedRound(iteration, entries[at : at + nbytes]))
        at += nbytes
    return found


def _run(channel: socket.socket) -> None:
    begin, _ = receive(channel)
    assert isinstance(begin, Begin), f"{begin} came first"
    notes = Notes()
    logger = logging.getLogger("adaptra_megatron")
    logger.setLevel(begin.log_level)
    logger.addHandler(notes)
    logger.propagate = False
    planner = Planner(begin, notes)
    while True:
        measured, entries = receive(channel)
        assert isinstance(measured, Measured), f"{measured} came instead of measurements"
        send(channel, planner.answer(measured, entries))


def main(arguments: list[str]) -> None:
    """The process, with the descriptor of its channel and its parent's process id as arguments."""
    descriptor, parent = map(int, arguments)
    die_with_parent(parent)
    try:
        _run(socket.socket(fileno=descriptor))
    except ChannelEndedError:
        os._exit(0)
    except Exception:
        traceback.print_exc()
        os._exit(1)
