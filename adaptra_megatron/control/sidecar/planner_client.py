# SPDX-License-Identifier: Apache-2.0
"""Keep a planner process of this leader running, and exchange typed messages with it.

Reports and decisions are sent as raw bytes after a message. Before the first message, the process gets the socket on
which it listens to the other ranks. This module must not import torch, since the planner process imports it.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from msgspec import structs

from adaptra_megatron.common.backoff import Backoff
from adaptra_megatron.common.layout import Cell
from adaptra_megatron.common.typed_messages import Decoder, TaggedMessage
from adaptra_megatron.control.deciders.plan_state import Layout
from adaptra_megatron.control.decisions import (
    MAX_DECISION_NBYTES,
    Decision,
    MadeDecision,
    RoutingSection,
    TelemetrySection,
    decision_of,
)
from adaptra_megatron.control.sidecar.planner_connections import (
    Address,
    ChannelClosedError,
    ChannelEndedError,
    HostedChannels,
    Line,
    Outbox,
    Sidecar,
    SidecarMessages,
    log_events,
    log_lines,
)
from adaptra_megatron.schedule.costs import Costs, costs_to_json
from adaptra_megatron.telemetry.events import Event
from adaptra_megatron.transport.link_paths import Path


@dataclass(frozen=True, kw_only=True)
class PathPolicy:
    """Settings of the choice between the two paths of each link."""

    preferred: Path
    device_blocks: bool = False
    rendezvous: bool = False
    """See `path_decider.Setting` for both."""


@dataclass(frozen=True, kw_only=True)
class RoutePolicy:
    """Settings of routes between replicas."""

    pipelines: tuple[tuple[int, ...], ...]
    """By replica: first ranks of its pipelines, one per lane."""
    pinned: tuple[int, ...] = ()
    """Stages whose micro-batches cannot be routed."""
    dead: tuple[Cell, ...] = ()
    """Cells that take no work; all routes avoid them."""
    avoids_slow: bool = True
    """Whether routes also avoid slow cells."""


class Begin(TaggedMessage, tag="begin", frozen=True, kw_only=True):
    """First message to the planner process: the ranks it decides for, and AdaptraConfig's options."""

    secret: str
    """Hexadecimal."""
    place: str
    """Prefix of the decisions' keys in the job's store."""
    reporters: tuple[int, ...]
    """The ranks that it decides for; the first is the leader."""
    layout: Layout
    measures_memory: bool
    policy: str
    max_in_flight: float | None
    plan_csv: str | None
    costs_json: str | None
    paths: PathPolicy | None
    log_level: int
    waits_s: float = 15.0
    """Seconds between two `Waits` of a planner process that waits for reports."""
    routes: RoutePolicy | None = None
    running: Decision = Decision(0)
    """The current decision, including the order of its plan if that was planned."""
    hosts: bool = False
    """Whether the channel of the straggler service comes next."""


class Measured(TaggedMessage, tag="measured", frozen=True, kw_only=True):
    """Message to the planner process: iterations to decide on. The leader's own reports follow as raw bytes."""

    iterations: tuple[int, ...]
    nbytes: tuple[int, ...]
    """Bytes of each iteration's report."""
    number: int
    """Number of the current plan."""
    asked: TelemetrySection = TelemetrySection()
    """Users' requests since the message before."""


class Sealed(TaggedMessage, tag="sealed", frozen=True, kw_only=True):
    """Message to the planner process: the decision of an iteration, to send to the other ranks."""

    iteration: int
    made: int = 0
    """`Decided.made` of the decision; 0: it was made by the leader, and follows as raw bytes."""


class Waits(TaggedMessage, tag="waits", frozen=True, kw_only=True):
    """Message of the planner process every `Begin.waits_s` while it waits for reports: it is alive."""

    iteration: int
    missing: tuple[int, ...]
    """Ranks whose reports of this iteration have not come."""


class Decided(TaggedMessage, tag="decided", frozen=True, kw_only=True):
    """Message of the planner process: the decision made from iterations that all ranks have reported. It follows as raw
    bytes, as all ranks get it."""

    until: int
    """The latest of these iterations."""
    made: int
    """Number of the decision, counted by its process from 1; 0 if none could be made, and nothing follows."""
    orders: Mapping[str, str] = {}
    """Orders of new routes, by cell. See `RoutingSection`."""
    failure: str
    """Why no decision could be made; empty if one was."""
    lines: tuple[Line, ...]
    events: tuple[str, ...]
    """Events, encoded as in an event log; their stamps are not used."""
    costs: bytes | None
    """The latest costs, encoded: few leaders are asked for them."""


_costs_of: Decoder[Costs] = Decoder(Costs, MAX_DECISION_NBYTES)
Message = Begin | Measured | Sealed | Waits | Decided
_MESSAGES: SidecarMessages[Message] = SidecarMessages(Message)
receive, receive_async = _MESSAGES.receive, _MESSAGES.receive_async

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 60.0
"""Seconds from the end of a planner process to the start of the next: the first pause and the longest. Each is twice
the one before, until a process has decided."""
PATIENCE_S = 60.0
"""Seconds of silence after which a process is killed. A decision takes less than one, a start on a busy host more."""
LATE_S = 30.0
"""Longest wait for the report of another rank; then the current plan stays."""
MOST_UNSEALED = 8
"""Maximum number of decisions that a planner process keeps until they are sealed. Ranks find a dropped one in the
store."""
_MOST_NAMED = 8
"""Maximum number of ranks named in a line of the log."""


class NoDecisionError(RuntimeError):
    """The planner process has made no decision. Says why and what happens next; empty if that is normal."""

    def __init__(self, message: str, until: int | None) -> None:
        """`until`: the latest iteration that all ranks have reported; None if unknown."""
        super().__init__(message)
        self.until = until


class EventSink(Protocol):
    """Recipient of events."""

    def log(self, event: Event) -> None:
        """Record an event of the current iteration."""


class PlannerClient:
    """The leader's handle of the planner process. For one thread, which must live as long as the process.

    `close`, `spread` and `interject` are thread-safe. The latter two never wait.
    """

    def __init__(
        self,
        begin: Begin,
        listener: socket.socket,
        telemetry: EventSink,
        number: Callable[[], int],
        requests: Callable[[], TelemetrySection],
        *,
        word: str = "",
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`listener`: bound to the address that the other ranks connect to; all planner processes of this
        leader use it, and this owns it from now on. `number`: returns the number of the current plan. `requests`:
        returns users' requests since the last call. `word`: prefix of the process's log lines."""
        self._begin, self._telemetry, self._word, self._patience_s = begin, telemetry, word, patience_s
        listener.listen(len(begin.reporters))  # all of them connect at once
        self._listener, self._latest = listener, begin.running
        self._order, self._routing = self._latest.order, self._latest.routing
        """The latest order and the latest routes that a decision contained."""
        self._number, self._requests = number, requests
        self._wanted_policy = ""
        """Policy asked for by a user, until it has been decided on."""
        self._process: Sidecar | None = None
        self._outbox: Outbox | None = None
        """Messages to that process, once it has its first one."""
        self._backoff, self._restart_s = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S), 0.0
        self._closed = threading.Event()
        self._costs: bytes | None = None
        self._made: deque[tuple[int, bytes]] = deque(maxlen=MOST_UNSEALED)
        """Decisions of the running process: numbers and bytes."""
        self._hosted: HostedChannels | None = None

    @property
    def costs(self) -> dict[str, Any] | None:
        """The latest costs, as in `costs_to_json`; None if there are none."""
        return None if self._costs is None else costs_to_json(_costs_of(self._costs))

    @property
    def process_id(self) -> int | None:
        """Id of the running process; None if there is none."""
        process = self._process
        return None if process is None else process.process.pid

    @property
    def number(self) -> int:
        """Number of the latest decided plan."""
        return self._latest.number

    def pin(self, stages: Sequence[int]) -> None:
        """Declare that micro-batches of these stages cannot be routed. Call before the first decision."""
        if self._begin.routes is not None:
            self._begin = structs.replace(self._begin, routes=replace(self._begin.routes, pinned=tuple(stages)))

    def host(self) -> HostedChannels:
        """Have planner processes find stragglers, too; return the channels to that service. Call before the first
        decision."""
        self._hosted = HostedChannels()
        return self._hosted

    def run(self, routing: RoutingSection) -> None:
        """Set the routes that run before the first decision. Call before that."""
        self._routing = routing

    @property
    def address(self) -> Address:
        """Address that the other ranks connect to."""
        host, port = self._listener.getsockname()[:2]
        return Address(str(host), int(port))

    def decide(self, own: Sequence[tuple[int, bytes]]) -> MadeDecision:
        """Return the decision made from all iterations that all ranks have reported. `own`: this rank's reports since
        the last call, with their iterations.

        Raises NoDecisionError if reports of other ranks are missing after `LATE_S` (a later call continues to wait),
        or if the process has ended (the next call starts another, which only gets the reports of that call).
        """
        try:
            process, outbox = self._running()
            if own:
                outbox.put(self._measured(own), [report for _, report in own])
            decided, packet = self._answer(process.channel, outbox)
            decision = decision_of(packet) if decided.made else None
        except (OSError, ValueError, ChannelEndedError) as cause:
            raise NoDecisionError(self._end_failed(cause), None) from cause
        self._backoff.reset()
        self._costs = decided.costs
        log_lines(decided.lines, self._word)
        log_events(decided.events, self._telemetry.log)
        if decision is None:
            raise NoDecisionError(decided.failure and f"{self._word}{decided.failure}", decided.until)
        self._made.append((decided.made, packet))
        if decision.routing is not None:
            decision = replace(decision, routing=replace(decision.routing, orders=decided.orders))
        self._latest = decision
        if decision.telemetry is not None and decision.telemetry.policy:
            self._begin, self._order = structs.replace(self._begin, policy=decision.telemetry.policy), None
            self._wanted_policy = ""
        self._order, self._routing = decision.order or self._order, decision.routing or self._routing
        return MadeDecision(decided.until, decision, packet)

    def spread(self, iteration: int, packet: bytes) -> None:
        """Have a sealed decision sent to the other ranks, so that they need not poll the job's store. Its bytes go to
        the process only if that has not made them. Dropped if the process does not read: ranks find it in the store.
        """
        # Before `_made`, which only holds decisions of this process or of a later one.
        if (outbox := self._outbox) is not None:
            made = next((number for number, made in self._made.copy() if made is packet), 0)
            with contextlib.suppress(ChannelEndedError):  # the next call of `decide` tells
                if outbox.has_room():
                    outbox.put(Sealed(iteration=iteration, made=made), [] if made else [packet])

    def interject(self, work: Callable[[], object]) -> bool:
        """Have the thread that waits in `decide` call `work` now, and return True; return False if none does."""
        return (outbox := self._outbox) is not None and outbox.interject(work)

    def _measured(self, own: Sequence[tuple[int, bytes]]) -> Measured:
        asked = self._requests()
        self._wanted_policy = asked.policy or self._wanted_policy
        return Measured(
            iterations=tuple(iteration for iteration, _ in own),
            nbytes=tuple(len(report) for _, report in own),
            number=max(self._number(), self._latest.number),
            asked=replace(asked, policy=self._wanted_policy),
        )

    def _answer(self, channel: socket.socket, outbox: Outbox) -> tuple[Decided, bytes]:
        begun_s = time.monotonic()
        while True:
            outbox.wait_readable()
            answer, packet = receive(channel)
            if isinstance(answer, Decided):
                return answer, packet
            assert isinstance(answer, Waits), f"{answer} came instead of a decision"
            if time.monotonic() - begun_s >= LATE_S:
                host, port = self.address
                raise NoDecisionError(
                    f"{self._word}no measurements of ranks {_listed(answer.missing)} for iteration {answer.iteration} "
                    f"within {LATE_S:g} s; these ranks are late, hang, or cannot connect to {host}:{port}",
                    None,
                )

    def close(self) -> None:
        """End the process. May be called twice."""
        self._closed.set()
        if self._hosted is not None:
            self._hosted.closed = True
        if (process := self._process) is not None:
            process.close()
        if (outbox := self._outbox) is not None:
            outbox.close()
        self._listener.close()

    def _running(self) -> tuple[Sidecar, Outbox]:
        """Return the running process; start one if need be. Raises OSError, or ChannelEndedError once closed."""
        if self._process is None or self._outbox is None:
            self._closed.wait(max(0.0, self._restart_s - time.monotonic()))
            if self._closed.is_set():
                raise ChannelEndedError("is not needed any more")
            level = logging.getLogger("adaptra_megatron").getEffectiveLevel()
            running = replace(self._latest, order=self._order, routing=self._routing, forecast=None, telemetry=None)
            hosts = self._hosted is not None
            begin = structs.replace(self._begin, log_level=level, running=running, hosts=hosts)
            self._made.clear()
            module = "adaptra_megatron.control.sidecar.planner_process"
            self._process = Sidecar(module, self._listener, begin, self._patience_s)
            if self._hosted is not None:
                self._hosted.connect(self._process)
            if self._closed.is_set():  # `close` did not see this process
                raise ChannelEndedError("is not needed any more")
            self._outbox = Outbox(self._process.channel)
        return self._process, self._outbox

    def _end_failed(self, cause: Exception) -> str:
        process, self._process = self._process, None
        outbox, self._outbox = self._outbox, None
        if outbox is not None:
            outbox.close()
        how = f"could not be started ({cause})"
        if process is not None:
            ended = process.process.poll() is not None or isinstance(cause, ChannelClosedError)
            how = f"{'ended' if ended else f'{cause} and was ended'}, by {process.end(1.0 if ended else 0.0)}"
        pause_s = self._backoff.next_s()
        self._restart_s = time.monotonic() + pause_s
        again = f"another one is started in {pause_s:g} s, and measures the usual times again"
        return f"{self._word}the planner process {how}; {again}"


def _listed(ranks: Sequence[int]) -> str:
    """Return ranks as text for the log, the first `_MOST_NAMED` of them."""
    rest = len(ranks) - _MOST_NAMED
    return ", ".join(map(str, ranks[:_MOST_NAMED])) + (f" and {rest} more" if rest > 0 else "")
