# SPDX-License-Identifier: Apache-2.0
"""Check that a schedule can run: it is complete and ordered, keeps the cap, and cannot deadlock."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NoReturn

from adaptra_megatron.schedule.costs import Released, released_per_stage
from adaptra_megatron.schedule.ir import Action, Kind, Order, Schedule, ScheduleError


def check_progress(schedule: Schedule) -> None:
    """Raise ScheduleError, naming the cycle of waits, if the orders deadlock. Needs no costs.

    The orders must be complete, with ascending micro-batches per chunk: `check_schedule` checks that first.
    """
    stages, placement, last = schedule.stages, schedule.placement, schedule.virtual_stages - 1
    chunks = range(schedule.chunks)
    virtual_stages = [[placement.virtual_stage(stage, chunk) for chunk in chunks] for stage in range(stages)]
    peers = [placement.peers(stage) for stage in range(stages)]
    forwards = [0] * (last + 1)
    backwards = [0] * (last + 1)
    positions = [0] * stages
    runnable = list(range(stages))

    def lacks_gradient(stage: int, chunk: int, micro_batch: int) -> bool:
        virtual = virtual_stages[stage][chunk]
        return virtual < last and backwards[virtual + 1] <= micro_batch

    while runnable:
        stage = runnable.pop()
        order = schedule.orders[stage]
        start = position = positions[stage]
        while position < len(order):
            _, kind, chunk, micro_batch, combined = order[position]
            virtual = virtual_stages[stage][chunk]
            if kind is Kind.FORWARD:
                if virtual > 0 and forwards[virtual - 1] <= micro_batch:
                    break
                if combined and lacks_gradient(stage, *order[position + 1][2:4]):
                    break
                forwards[virtual] += 1
            elif kind is not Kind.BACKWARD_WEIGHT:
                if virtual < last and backwards[virtual + 1] <= micro_batch:
                    break
                backwards[virtual] += 1
            position += 1
        positions[stage] = position
        if position > start:
            runnable += peers[stage]
    blocked = {}
    for stage, order in enumerate(schedule.orders):
        if (position := positions[stage]) < len(order):
            _, _, chunk, micro_batch, combined = order[position]
            virtual = virtual_stages[stage][chunk]
            backward_waits = combined and (virtual == 0 or forwards[virtual - 1] > micro_batch)
            blocked[stage] = order[position + backward_waits]
    if blocked:
        _fail(schedule, blocked)


def _fail(schedule: Schedule, blocked: dict[int, Action]) -> None:
    """Raise ScheduleError for a cycle of waits, found by following each blocked stage to the stage that it
    waits for.
    """
    stage = next(iter(blocked))
    path: list[int] = []
    while stage not in path:
        path.append(stage)
        stage = _needed(schedule, blocked[stage]).stage
    cycle = path[path.index(stage) :]
    waits = "; ".join(f"{blocked[stage]} waits for {_needed(schedule, blocked[stage])}" for stage in cycle)
    remedy = _needed(schedule, blocked[cycle[-1]])
    raise ScheduleError(
        f"deadlock, each of these comes, in its stage's order, before what the next one waits for: {waits}. "
        f"{'Separate combined actions of these stages, or move' if schedule.combines else 'Move'} {remedy} in front of "
        f"{blocked[remedy.stage]}",
        stage=cycle[0],
        action=blocked[cycle[0]],
    )


def _needed(schedule: Schedule, action: Action) -> Action:
    """Return the action of another virtual stage that sends the message for `action`. If that is a backward, it may be
    whole or split.
    """
    placement, forward = schedule.placement, action.kind is Kind.FORWARD
    place = (placement.previous_place if forward else placement.next_place)(action.stage, action.chunk)
    assert place is not None, "what needs no message is never blocked"
    stage, chunk = place
    if forward:
        return Action(stage, Kind.FORWARD, chunk, action.micro_batch)
    return next(
        other
        for other in schedule.orders[stage]
        if other.kind.sends_gradient and (other.chunk, other.micro_batch) == (chunk, action.micro_batch)
    )


__all__ = ["ScheduleError", "check_schedule"]

_INPUT_GRADIENTS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
_ROUNDING = 1e-9
"""Tolerance of caps: released fractions add up with rounding errors."""


def check_schedule(
    schedule: Schedule,
    *,
    max_in_flight: Sequence[float | None] | None = None,
    released_at_backward_input: Released = 0.0,
) -> None:
    """Return if the schedule can run; else raise ScheduleError for the first fault.

    Checked in this order. Every stage runs each of its forwards and backwards exactly once, in the right order and, per
    chunk, by ascending micro-batch (which keeps gradient sums bitwise equal to stock's). No stage holds more than
    `max_in_flight[stage]` activations (None: no cap): a forward takes 1, an input gradient gives
    `released_at_backward_input` back (below 0: takes more) and the weight gradient the rest. The stages' orders do not
    deadlock, with the halves of combined actions started at once. Linear in the number of actions.
    """
    for name in ("stages", "chunks", "micro_batches"):
        if getattr(schedule, name) < 1:
            raise ScheduleError(f"{name} of the schedule must be at least 1, got {getattr(schedule, name)}")
    if len(schedule.orders) != schedule.stages:
        raise ScheduleError(
            f"the schedule has {len(schedule.orders)} orders for {schedule.stages} stages: give each one"
        )
    placement = schedule.placement
    if (placement.stages, placement.chunks) != (schedule.stages, schedule.chunks):
        raise ScheduleError(
            f"the schedule has {schedule.stages} stages of {schedule.chunks} chunks, its placement has "
            f"{placement.stages} of {placement.chunks}"
        )
    for stage in range(schedule.stages):
        _StageCheck(schedule, stage).run()
    if max_in_flight is not None:
        if len(max_in_flight) != schedule.stages:
            raise ScheduleError(f"max_in_flight has {len(max_in_flight)} entries for {schedule.stages} stages")
        released = released_per_stage(released_at_backward_input, schedule.stages)
        for stage, cap in enumerate(max_in_flight):
            if cap is not None:
                _check_cap(schedule, stage, cap, released[stage])
    check_progress(schedule)


class _StageCheck:
    """Walks one stage's order. Keeps only counts per chunk, since each kind must come in ascending order."""

    def __init__(self, schedule: Schedule, stage: int) -> None:
        self.schedule = schedule
        self.stage = stage
        self.order = schedule.orders[stage]
        self.forwards = [0] * schedule.chunks
        self.backwards = [0] * schedule.chunks
        self.weights_due: list[deque[int]] = [deque() for _ in range(schedule.chunks)]

    def run(self) -> None:
        stage, chunks, micro_batches = self.stage, self.schedule.chunks, self.schedule.micro_batches
        for position, action in enumerate(self.order):
            owner, kind, chunk, micro_batch, combined = action
            if owner != stage:
                self._fail(position, action, f"does not belong in stage {stage}'s order: move it to stage {owner}'s")
            if not 0 <= chunk < chunks:
                self._fail(position, action, f"names chunk {chunk}, known are 0..{chunks - 1}")
            if not 0 <= micro_batch < micro_batches:
                self._fail(position, action, f"names micro-batch {micro_batch}, known are 0..{micro_batches - 1}")
            if combined:
                self._check_combined(position, action)
            if kind is Kind.FORWARD:
                if micro_batch != self.forwards[chunk]:
                    self._fail_sequence(position, action, self.forwards[chunk])
                self.forwards[chunk] += 1
            elif kind is Kind.BACKWARD_WEIGHT:
                due = self.weights_due[chunk]
                if not due or due[0] != micro_batch:
                    self._fail_weight(position, action)
                due.popleft()
            else:
                if micro_batch != self.backwards[chunk]:
                    self._fail_sequence(position, action, self.backwards[chunk])
                if micro_batch >= self.forwards[chunk]:
                    self._fail_before(position, action, action._replace(kind=Kind.FORWARD))
                if kind is Kind.BACKWARD and self.weights_due[chunk]:
                    self._fail_overtaking(position, action, self.weights_due[chunk][0])
                self.backwards[chunk] += 1
                if kind is Kind.BACKWARD_INPUT:
                    self.weights_due[chunk].append(micro_batch)
        self._check_complete()

    def _check_combined(self, position: int, action: Action) -> None:
        behind = self.order[position + 1] if position + 1 < len(self.order) else None
        if action.kind is not Kind.FORWARD or behind is None or not behind.kind.sends_gradient:
            self._fail(position, action, "is marked as combined: only a forward can be, with a B or I right behind it")
        if (behind.chunk, behind.micro_batch) == (action.chunk, action.micro_batch):
            self._fail(position, action, "is combined with its own backward, which needs its result: separate the two")

    def _check_complete(self) -> None:
        for chunk in range(self.schedule.chunks):
            for kind, done in ((Kind.FORWARD, self.forwards[chunk]), (Kind.BACKWARD, self.backwards[chunk])):
                if done < self.schedule.micro_batches:
                    self._fail_missing(Action(self.stage, kind, chunk, done))
            if self.weights_due[chunk]:
                self._fail_without_weight(Action(self.stage, Kind.BACKWARD_WEIGHT, chunk, self.weights_due[chunk][0]))

    def _fail_sequence(self, position: int, action: Action, expected: int) -> NoReturn:
        """Raise ScheduleError: `action` is not its chunk's next micro-batch."""
        if action.micro_batch < expected:
            self._fail_doubled(position, action)
        kinds = (Kind.FORWARD,) if action.kind is Kind.FORWARD else _INPUT_GRADIENTS
        self._fail_ascending(position, action, kinds, expected)

    def _fail_weight(self, position: int, action: Action) -> NoReturn:
        """Raise ScheduleError: `action` is not its chunk's next weight gradient."""
        before = self._first(self.order[:position], _INPUT_GRADIENTS, action)
        if before is None:
            self._fail_before(position, action, action._replace(kind=Kind.BACKWARD_INPUT))
        if before.kind is Kind.BACKWARD:
            self._fail(
                position,
                action,
                "has no input gradient (I) of its own: its micro-batch runs as a whole backward (B), which computes "
                "the weight gradient too; remove the W, or replace the B with an I",
            )
        if self._first(self.order[:position], (Kind.BACKWARD_WEIGHT,), action) is not None:
            self._fail_doubled(position, action)
        self._fail_ascending(position, action, (Kind.BACKWARD_WEIGHT,), self.weights_due[action.chunk][0])

    def _fail_before(self, position: int, action: Action, needed: Action) -> NoReturn:
        """Raise ScheduleError: `needed`, an action of this stage, does not come before `action`."""
        kinds = (Kind.FORWARD,) if needed.kind is Kind.FORWARD else _INPUT_GRADIENTS
        later = self._first(self.order[position:], kinds, needed)
        if later is None:
            self._fail_missing(needed)
        self._fail(position, action, f"comes before {later}, which it needs: move it behind")

    def _fail_ascending(self, position: int, action: Action, kinds: tuple[Kind, ...], expected: int) -> NoReturn:
        """Raise ScheduleError: one of `kinds` for micro-batch `expected` was due in the place of `action`."""
        due = action._replace(micro_batch=expected)
        later = self._first(self.order[position:], kinds, due)
        if later is None:
            self._fail_missing(due)
        self._fail(
            position,
            action,
            f"comes before {later}: each kind of action of a chunk must run in ascending micro-batch order, or "
            "gradient sums would differ from stock's; swap the two",
        )

    def _fail_overtaking(self, position: int, action: Action, due: int) -> NoReturn:
        """Raise ScheduleError: a whole backward would add its weight gradient before micro-batch `due`."""
        late = action._replace(kind=Kind.BACKWARD_WEIGHT, micro_batch=due)
        if self._first(self.order[position:], (Kind.BACKWARD_WEIGHT,), late) is None:
            self._fail_without_weight(late)
        self._fail(
            position,
            action,
            f"overtakes {late}: a whole backward computes a weight gradient too, and those of a chunk must run in "
            "ascending micro-batch order, or gradient sums would differ from stock's; move that W in front of it, "
            "or split the B",
        )

    def _fail_doubled(self, position: int, action: Action) -> NoReturn:
        self._fail(position, action, "runs a second time: remove one of the two")

    def _fail_without_weight(self, missing: Action) -> NoReturn:
        self._raise(
            missing,
            f"{missing} is missing: its input gradient (I) runs, so add its weight gradient (W), or replace "
            "the I with a whole backward (B)",
        )

    def _fail_missing(self, action: Action) -> NoReturn:
        self._raise(action, f"{action} is missing: every micro-batch needs it in every chunk; add it")

    def _fail(self, position: int, action: Action, what: str) -> NoReturn:
        self._raise(action, f"{action}, at position {position} of stage {self.stage}'s order, {what}")

    def _raise(self, action: Action, message: str) -> NoReturn:
        raise ScheduleError(message, stage=self.stage, action=action)

    @staticmethod
    def _first(order: Order, kinds: tuple[Kind, ...], like: Action) -> Action | None:
        """Return the first action of one of `kinds` with the chunk and micro-batch of `like`."""
        for action in order:
            if action.kind in kinds and action.chunk == like.chunk and action.micro_batch == like.micro_batch:
                return action
        return None


def _check_cap(schedule: Schedule, stage: int, cap: float, released_at_backward_input: float) -> None:
    forwards = backward_inputs = ended = 0
    for position, action in enumerate(schedule.orders[stage]):
        kind = action.kind
        if kind is Kind.FORWARD:
            forwards += 1
        elif kind is Kind.BACKWARD_INPUT:
            backward_inputs += 1
        else:
            ended += 1
            if kind is Kind.BACKWARD_WEIGHT:
                backward_inputs -= 1
        held = forwards - ended - released_at_backward_input * backward_inputs
        if held > cap + _ROUNDING:
            raise ScheduleError(
                f"{action}, at position {position} of stage {stage}'s order, makes the stage hold {held:g} "
                f"activations, its cap is {cap:g}: move a backward or a weight gradient "
                "in front of it, or raise the cap",
                stage=stage,
                action=action,
            )
