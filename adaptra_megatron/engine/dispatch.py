# SPDX-License-Identifier: Apache-2.0
"""Choose a stage's next action: from the plan, or online, by which messages have arrived.

A stage dispatches online (see online_order.py) only if it can see arrivals. With `auto` it does so only while messages
of some neighbour come by the host path and their arrival times vary between iterations (see ArrivalJitter); for steady
delays a plan is better. Each stage decides on its own, and some may be online while others run the plan. The ranks of
one stage that share collectives follow their leader (see StageTeam).

Messages on a GPU's device path wait in queues of the device, where only the plan's order is safe (see
transfers.launch_order). So a stage is online only while all of its links use the host path. If the host path of a link
fails in the middle of an iteration, the stage runs the rest as planned. Messages that it has sent out of the plan's
order may then have to be resent by the device path. If that makes a device wait for ever, the watchdog ends the process
with an error; this takes a second failure on top of the first.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch

from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.common.gathering import epoch_group
from adaptra_megatron.common.layout import JobLayout
from adaptra_megatron.common.log import RateLimitedLog, logger_of
from adaptra_megatron.config import AdaptraConfig, ConfigError
from adaptra_megatron.elastic.failure_errors import LateRankError
from adaptra_megatron.engine.execution.executor import Steps
from adaptra_megatron.engine.execution.inbox import Inbox
from adaptra_megatron.engine.execution.stage_program import Program, ProgramStep
from adaptra_megatron.engine.online_order import OnlineOrder
from adaptra_megatron.schedule.simulator import peak_in_flight
from adaptra_megatron.schedule.transfers.launch_order import OrderedMessage
from adaptra_megatron.telemetry.action_records import ActionRecord, ArrivalRecord
from adaptra_megatron.transport.gpu.training_device import current_device
from adaptra_megatron.transport.link_paths import Path
from adaptra_megatron.transport.message_keys import Transport

# Ranks that share collectives inside F, B and W run them in one order: one of them decides, the others follow.
# They are the tensor- and context-parallel peers of a stage and, where experts are spread over data-parallel replicas,
# the stage's ranks in those replicas too. The leader sends each decision, a small number, to each of the others over a
# gloo group of their own, and does not wait: what it decided is on its way before the leader itself begins to act.

_TAG, _LIFELINE_TAG = 1, 2
_EXPIRED = timedelta(milliseconds=1)
_AHEAD = 8
"""Number of receives that a follower has posted ahead: a message with a posted receive needs one way instead
of three.
"""
_PATIENCE_S = 10.0
"""Additional time that a follower waits for the leader: the leader's own timeout comes first, and knows the cause."""


class StageTeamError(LateRankError):
    """Another rank of the stage no longer takes part; names this rank, the stage, that rank and the remedy."""


class StageTeam:
    """Link of one rank to the leader of its cell, which decides the order of actions. For one thread, except for
    `abort`.
    """

    def __init__(self, control: ControlStore, layout: JobLayout, timeout_s: float) -> None:
        """Connect the ranks of the cell. All of them construct it at the same point.

        Raises StageTeamError if they do not come within `timeout_s`.
        """
        cell = layout.cell
        self._stage, self._ranks, self._rank, self._timeout_s = cell.stage, layout.cells[cell], layout.rank, timeout_s
        self.leads = self._rank == layout.reporter(cell)
        try:
            name = f"cell/{cell.replica}-{cell.stage}"
            self._group = epoch_group(control, name, self._ranks, self._rank, timeout_s)
            # Never answered: gloo closes connections, which ends all waits, where one such wait expires.
            self._lifeline: Any = self._group.recv([torch.empty(1)], int(self.leads), _LIFELINE_TAG)
        except RuntimeError as cause:
            raise self._error(f"did not meet {self._others()}", cause) from cause
        self._sent: list[tuple[int, Any, torch.Tensor]] = []
        self._expected: deque[tuple[Any, torch.Tensor]] = deque()

    def publish(self, number: int) -> None:
        """Send `number` from the leader to all followers. Returns without waiting. Raises StageTeamError if a follower
        has ended.
        """
        said = torch.tensor([number])
        for follower in range(1, len(self._ranks)):
            try:
                self._sent.append((follower, self._group.send([said], follower, _TAG), said))
            except RuntimeError as cause:
                raise self._error(f"cannot send rank {self._ranks[follower]} its next action", cause) from cause

    def follow(self) -> int:
        """Return the leader's next number. Raises StageTeamError if the leader has ended, or is silent for too long."""
        timeout_s = self._timeout_s + _PATIENCE_S
        try:
            while len(self._expected) < _AHEAD:
                said = torch.empty(1, dtype=torch.int64)
                self._expected.append((self._group.recv([said], 0, _TAG), said))
            work, said = self._expected.popleft()
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as cause:
            raise self._error(
                f"received nothing from rank {self._ranks[0]}, which decides, for {timeout_s:g} s", cause
            ) from cause
        return int(said.item())

    def settle(self) -> None:
        """Wait until all followers have received the leader's numbers. The leader calls this after each iteration.

        Raises StageTeamError if a follower has not received them within the timeout.
        """
        sent, self._sent = self._sent, []
        for follower, work, _said in sent:
            try:
                work.wait(timedelta(seconds=self._timeout_s))
            except RuntimeError as cause:
                raise self._error(f"rank {self._ranks[follower]} does not follow", cause) from cause

    def abort(self) -> None:
        """Abort the team: this rank's waits raise, and so do other ranks' waits for it. Safe to call twice, from any
        thread.
        """
        with contextlib.suppress(RuntimeError):
            self._lifeline.wait(_EXPIRED)

    def _others(self) -> str:
        return "ranks " + ", ".join(str(rank) for rank in self._ranks if rank != self._rank)

    def _error(self, what: str, cause: Exception) -> StageTeamError:
        return StageTeamError(
            f"rank {self._rank}, stage {self._stage}: {what}, with {self._timeout_s:g} s of patience "
            f"(--adaptra-timeout-s); torch.distributed reported: {cause}. Ranks "
            f"{', '.join(map(str, self._ranks))} run the stage in one order: look at the first whose log stops, and "
            "restart from the last checkpoint; --adaptra-dispatch planned runs without this"
        )


# Judges if a neighbour's messages keep coming at the same moments, iteration by iteration. No clock, no torch.
# A plan is best while they do: it was searched for, while a stage that decides as messages come sees one action ahead.
# What is compared are the gaps between messages, which neither a late start nor one late message shifts for long.

CHANGE = 0.25
"""Share of an action's duration: arrivals are irregular if half of the gaps change by more between iterations."""
UNSTEADY_AFTER = 2
"""Number of successive irregular iterations: a pause or a new plan changes gaps once, between two pairs at most."""
STEADY_AFTER = 3
TRIED_AFTER = 30
"""Iterations after which an unsteady neighbour counts as steady again, so that it is judged anew: leaving the plan
changes the neighbours' timing, which in turn changes the timing of their messages.
"""

_Message = tuple[str, int, int]


class ArrivalJitter:
    """Judges whether the arrival times of one neighbour's messages change from iteration to iteration."""

    def __init__(self) -> None:
        self.unsteady = False
        self._gaps_s: dict[_Message, float] = {}
        self._in_a_row = 0
        """Number of successive iterations that contradict `unsteady`."""
        self._since = 0
        """Iterations since `unsteady` last changed."""

    def observe(self, arrivals: Iterable[ArrivalRecord], action_s: float) -> None:
        """Update `unsteady` from one iteration's arrivals. `action_s`: mean duration of an action."""
        gaps_s = _gaps_s(arrivals)
        changes_s = [abs(gap_s - self._gaps_s[key]) for key, gap_s in gaps_s.items() if key in self._gaps_s]
        self._gaps_s = gaps_s
        if not changes_s:
            return
        unsteady = statistics.median(changes_s) > CHANGE * action_s
        self._in_a_row = self._in_a_row + 1 if unsteady != self.unsteady else 0
        self._since += 1
        if self.unsteady and (self._in_a_row >= STEADY_AFTER or self._since >= TRIED_AFTER):
            self._become(False)
        elif not self.unsteady and self._in_a_row >= UNSTEADY_AFTER:
            self._become(True)

    def _become(self, unsteady: bool) -> None:
        self.unsteady, self._in_a_row, self._since = unsteady, 0, 0


def _gaps_s(arrivals: Iterable[ArrivalRecord]) -> dict[_Message, float]:
    """Return the seconds between each message and that of the previous micro-batch of the same kind and chunk."""
    moments_s = {(record.kind, record.chunk, record.micro_batch): record.arrived_s for record in arrivals}
    return {
        (kind, chunk, micro_batch): arrived_s - moments_s[kind, chunk, micro_batch - 1]
        for (kind, chunk, micro_batch), arrived_s in moments_s.items()
        if (kind, chunk, micro_batch - 1) in moments_s
    }


logger = logger_of(__name__)

_PLANNED, _ONLINE = 0, 1
_PATIENCE = 0.05
"""How long to wait for the plan's next message before leaving the plan, in mean actions. Without a wait, a message that
is a microsecond late would let a whole other action go first.
"""
_LOOK_AGAIN_S = 100e-6
"""Interval between two queries of the GPU's progress: a wait for an event would have no deadline."""


class Dispatcher:
    """Chooses the order of one rank's actions, for the life of the job."""

    def __init__(
        self,
        mode: str,
        transport: Transport,
        team: StageTeam | None,
        device: torch.device,
        timeout_s: float,
        ranks: Sequence[int],
    ) -> None:
        """`mode`: planned, auto or online. `team`: of this rank's cell; None if the cell has one rank. `ranks`: of the
        pipeline, by stage.
        """
        self.online_iterations = 0
        """Number of iterations dispatched online on this rank."""
        self.moved_actions = 0
        """Number of actions that ran before one that precedes them in the plan."""
        self.all_by_host_path = True
        """True if all links of the job should take the host path: ranks of a stage do not know the paths of each
        other's links.
        """
        self.keeps_plan = False
        """True if a policy makes all stages run the plan."""
        self.fixed = False
        """True if layers are captured in the plan's order, for the whole job."""
        self._asked, self._aborted = mode, False
        self._mode, self._transport, self._team = mode, transport, team
        self._timeout_s, self._ranks = timeout_s, ranks
        self._on_gpu = device.type == "cuda"
        self._pace = _GpuPace() if self._on_gpu else _Pace()
        self._patience_s = 0.0
        self._said = RateLimitedLog(logger, most_in_a_row=2)
        self._online_for: str | None = None
        """Reason for which the latest iteration was dispatched online; None if it was not."""
        self._jitter: dict[int, ArrivalJitter] = defaultdict(ArrivalJitter)
        """Arrival jitter by neighbour."""

    def steps(self, program: Program, cap: float | None, released_at_backward_input: float) -> Steps:
        """Return the steps of the next training iteration.

        `cap`: maximum number of activations that the stage may hold; None: as many as the plan's order does.
        """
        team = self._team
        if self._mode == "planned":
            return lambda inbox: iter(program.steps)
        if team is not None and not team.leads:
            return lambda inbox: self._follow(program, team)
        reason = self._reason_to_leave_the_plan(program)
        self._tell(program.stage, reason)
        if reason is None:
            return lambda inbox: self._lead(_PLANNED, iter(program.steps), team)
        if cap is None:
            cap = peak_in_flight(program.schedule, released_at_backward_input)[program.stage]
        self.online_iterations += 1
        order = OnlineOrder(program, cap, released_at_backward_input)
        return lambda inbox: self._lead(_ONLINE, self._decide(order, _peers(program), inbox), team)

    def ran(
        self, steps: Sequence[ProgramStep], records: Sequence[ActionRecord], arrivals: Sequence[ArrivalRecord]
    ) -> None:
        """Record a training iteration: its steps, their times, and the arrivals of messages. Call it after each one."""
        if self._mode == "planned" or not records:  # a cell that others relieve of all its work has none
            return
        action_s = statistics.fmean(record.compute_s for record in records)
        self._patience_s = _PATIENCE * action_s
        for source in {arrival.source for arrival in arrivals}:
            self._jitter[source].observe((each for each in arrivals if each.source == source), action_s)
        self.moved_actions += count_moved(steps)
        if self._team is not None and self._team.leads:
            self._team.settle()

    def abort(self) -> None:
        """Wake this rank from a wait for its cell's leader, and run the plan from now on. For any thread."""
        self._mode, self._aborted = "planned", True
        if self._team is not None:
            self._team.abort()

    def resume(self, control: ControlStore, layout: JobLayout) -> None:
        """Dispatch as before `abort`; do nothing if that was not called. Collective over the ranks of the cell.

        Raises StageTeamError if they do not meet.
        """
        if not self._aborted:
            return
        if self._team is not None:
            self._team = StageTeam(control, layout, self._timeout_s)
        self._mode, self._aborted = self._asked, False

    def _reason_to_leave_the_plan(self, program: Program) -> str | None:
        """Return why the next iteration is dispatched online, in words; None if it is not."""
        peers = _peers(program)
        if (
            self.keeps_plan
            or self.fixed
            or not self._sees(peers)
            or (self._on_gpu and self._team is not None and not self.all_by_host_path)
        ):
            return None
        if self._mode == "online":
            return "--adaptra-dispatch online"
        unsteady = [
            str(peer)
            for peer in peers
            if self._transport.last_receive_path(self._ranks[peer]) is Path.HOST and self._jitter[peer].unsteady
        ]
        return f"messages of stage {' and '.join(unsteady)} arrive at irregular times" if unsteady else None

    def _tell(self, stage: int, reason: str | None) -> None:
        level = logging.INFO if self._ranks[0] == 0 else logging.DEBUG  # one pipeline speaks for all that are alike
        if reason is not None and self._online_for is None:
            self._said.log(level, "stage %d: switching to online dispatch: %s", stage, reason)
        elif reason is None and self._online_for is not None:
            self._said.log(level, "stage %d runs its plan again", stage)
        self._online_for = reason

    def _sees(self, peers: Sequence[int]) -> bool:
        return all(self._transport.can_poll(self._ranks[peer]) for peer in peers)

    def _decide(self, order: OnlineOrder, peers: Sequence[int], inbox: Inbox) -> Iterator[ProgramStep]:
        while not order.finished:
            self._pace.catch_up(time.monotonic() + self._timeout_s)
            step = self._next(order, inbox) if self._sees(peers) else order.planned()
            order.take(step)
            if self._sees(peers):
                # It may have been sent long ago: to be seen when the next decision is due, it must be asked for now.
                inbox.ask_for([each.receive for each in order.candidates() if each.receive is not None])
            yield step
            self._pace.launched()

    def _next(self, order: OnlineOrder, inbox: Inbox) -> ProgramStep:
        """Return the next step that can run, waiting for a message if none can."""
        planned = order.planned()
        if planned.receive is not None and planned in order.candidates():
            self._wait_a_little(planned.receive, inbox)
        while (step := order.next(inbox.has)) is None:
            inbox.wait_any([candidate.receive for candidate in order.candidates() if candidate.receive is not None])
        return step

    def _wait_a_little(self, message: OrderedMessage, inbox: Inbox) -> None:
        """Wait for the plan's next message: as long as the device is busy, and then for the patience."""
        deadline_s = time.monotonic() + self._timeout_s
        while self._pace.busy and time.monotonic() < deadline_s:
            if inbox.wait_any([message], _LOOK_AGAIN_S):
                return
        inbox.wait_any([message], self._patience_s)

    def _lead(self, mode: int, steps: Iterator[ProgramStep], team: StageTeam | None) -> Iterator[ProgramStep]:
        if team is None:
            yield from steps
            return
        team.publish(mode)
        for step in steps:
            if mode == _ONLINE:
                team.publish(step.position)
            yield step

    def _follow(self, program: Program, team: StageTeam) -> Iterator[ProgramStep]:
        if team.follow() == _PLANNED:
            yield from program.steps
            return
        self.online_iterations += 1
        for _ in program.steps:
            yield program.steps[team.follow()]


def make_dispatcher(
    control: ControlStore, layout: JobLayout, config: AdaptraConfig, transport: Transport, timeout_s: float
) -> Dispatcher:
    """Return this rank's dispatcher. Collective over the ranks of its cell if it may dispatch online.

    Raises StageTeamError if ranks of the cell do not meet, ConfigError if `online` was asked for but is impossible.
    """
    mode = config.dispatch
    if mode == "online" and config.host_transport == "off" and current_device().type == "cuda":
        raise ConfigError(
            "--adaptra-dispatch online needs to see messages arrive, which NCCL does not show; give "
            "--adaptra-host-transport auto too, or use --adaptra-dispatch planned"
        )
    if mode == "auto" and (config.policy != "adapt" or config.plan_csv is not None or config.host_transport == "off"):
        mode = "planned"  # an order that was asked for, or no host path
    alone = mode == "planned" or len(layout.cells[layout.cell]) == 1
    team = None if alone else StageTeam(control, layout, timeout_s)
    return Dispatcher(mode, transport, team, current_device(), timeout_s, layout.pipeline)


def _peers(program: Program) -> Sequence[int]:
    """Return the stages that messages come from; messages go to the same stages."""
    return sorted({message.source for message in program.receives})


def count_moved(steps: Sequence[ProgramStep]) -> int:
    """Return the number of steps that ran before a step that precedes them in the plan."""
    moved, least = 0, len(steps)
    for step in reversed(steps):
        moved += step.position > least
        least = min(least, step.position)
    return moved


class _Pace:
    """Timing of decisions on a CPU: computation blocks the thread, so all earlier actions are complete."""

    busy = False
    """True while the device has work left."""

    def catch_up(self, deadline_s: float) -> None:
        """Wait until the next decision is due."""

    def launched(self) -> None:
        """Record that the last chosen action has been launched."""


class _GpuPace(_Pace):
    """Timing of decisions on a GPU, which runs behind the CPU.

    A decision waits until the GPU begins the last launched action. If the plan's next message has arrived by then, the
    GPU stays busy; if not, the message still has the duration of that action to arrive.
    """

    def __init__(self) -> None:
        self._ends: deque[Any] = deque()
        """Events at the end of actions that may still run."""

    @property
    def busy(self) -> bool:  # type: ignore[override]
        return bool(self._ends) and not self._ends[-1].query()

    def catch_up(self, deadline_s: float) -> None:
        while len(self._ends) > 1:
            # Not synchronize(), which has no deadline. What hangs on a GPU ends with the watchdog's error.
            while not self._ends[0].query() and time.monotonic() < deadline_s:
                time.sleep(_LOOK_AGAIN_S)
            self._ends.popleft()

    def launched(self) -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._ends.append(event)
