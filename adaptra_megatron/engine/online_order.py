# SPDX-License-Identifier: Apache-2.0
"""Choose the next action of one stage online, by which messages have arrived. Uses neither a clock nor torch.

The plan's next action runs if it can, so the order is the plan's while nothing is late. Otherwise the first of B > F >
W runs that is ready and within the cap; if none is, the stage waits for any message. The choice affects only how three
sequences are merged: the stage's forwards keep the plan's order, its backwards do, and its weight gradients run in the
plan's order among those that are due. Three properties follow.

- Numbers are stock's: F, B and W of a chunk each run in micro-batch order.
- Neighbours receive in the planned order, since over one directed link a stage sends the results either of its forwards
  or of its backwards. So paths that match messages by order need no change. (With two stages and several chunks both
  share a link. There, forwards and backwards are one sequence, and only weight gradients move.)
- Nothing deadlocks, whichever stages are online, if the plan keeps the same caps. Proof: suppose all stages wait for
  ever. Take an order of all stages' actions that the plan allows, and let X be its first action that has not run; all
  actions before X have run. At a stage that runs the plan, X is next and its message has been sent: a contradiction. At
  an online stage, X is next in its sequence and its message has been sent, so X must be a forward that the cap forbids.
  But then all weight gradients that were due have run, at least as many backwards as the plan has before X, and exactly
  as many forwards. So the stage holds no more than it does in the plan at X, which keeps the cap: a contradiction. If
  input gradients add to the activations held, X may also be an input gradient. A forward leaves room for what the next
  input gradient adds once all weight gradients have run, as it must in the plan; so X has room: a contradiction.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable

from adaptra_megatron.engine.execution.stage_program import Program, ProgramStep
from adaptra_megatron.schedule.ir import Kind
from adaptra_megatron.schedule.transfers.launch_order import OrderedMessage

_ROUNDING = 1e-9
"""Released fractions of an activation are not exact in binary."""


class OnlineOrder:
    """State of one stage's online order in one iteration."""

    def __init__(self, program: Program, cap: float | None, released_at_backward_input: float) -> None:
        """`program`: the stage's part of a plan that keeps `cap` (maximum activations held; None: no cap).

        The plan combines no actions: another backward might come next to a forward, even its own.
        """
        assert not any(step.action.combined for step in program.steps)
        self._program = program
        self._cap = cap
        self._released = released_at_backward_input
        self._added = max(0.0, -released_at_backward_input)
        forwards = deque(step for step in program.steps if step.action.kind is Kind.FORWARD)
        backwards = deque(step for step in program.steps if step.action.kind.sends_gradient)
        both = deque(step for step in program.steps if step.action.kind is not Kind.BACKWARD_WEIGHT)
        self._sequences = [both] if program.schedule.placement.shares_links else [backwards, forwards]
        self._splits = [place for place, step in enumerate(backwards) if step.action.kind is Kind.BACKWARD_INPUT]
        """Indices of the split backwards."""
        self._weight_steps = {
            (step.action.chunk, step.action.micro_batch): step
            for step in program.steps
            if step.action.kind is Kind.BACKWARD_WEIGHT
        }
        self._weights_due: list[ProgramStep] = []
        """Weight gradients that are due, in the plan's order."""
        self._done = [False] * len(program.steps)
        self._planned = 0
        """Position of the first action of the plan that has not run."""
        self._forwards = [0] * program.schedule.chunks
        self._begun = self._inputs = self._weights = 0

    @property
    def finished(self) -> bool:
        """Return whether all steps have run."""
        return self._planned == len(self._done)

    def candidates(self) -> list[ProgramStep]:
        """Return the steps that lack at most their message, the most urgent first; never weight gradients, which have
        no message.

        If there are none and steps are left, a weight gradient is due.
        """
        return [sequence[0] for sequence in self._sequences if sequence and self._may_run(sequence[0])]

    def next(self, ready: Callable[[OrderedMessage], bool]) -> ProgramStep | None:
        """Return the step to run now; None if the stage must wait for the message of any of the candidates.

        `ready`: whether a message has arrived.
        """
        due = self._weights_due[0] if self._weights_due else None
        if self.finished or due is self.planned():
            return due
        able = [step for step in self.candidates() if step.receive is None or ready(step.receive)]
        if self.planned() in able:
            return self.planned()
        # Gradients of a chunk are summed in micro-batch order: a whole backward may not overtake those that are due.
        return due if not able or self._overtakes(able[0]) else able[0]

    def planned(self) -> ProgramStep:
        """Return the first step of the plan that has not run: the one to wait for if arrivals cannot be seen."""
        return self._program.steps[self._planned]

    def take(self, step: ProgramStep) -> None:
        """Record that `step`, returned by one of the methods above, runs now."""
        action = step.action
        if action.kind is Kind.BACKWARD_WEIGHT:
            self._weights_due.remove(step)
            self._weights += 1
        else:
            self._take_from_sequence(step)
        self._done[step.position] = True
        while self._planned < len(self._done) and self._done[self._planned]:
            self._planned += 1

    def _take_from_sequence(self, step: ProgramStep) -> None:
        action = step.action
        (sequence,) = (sequence for sequence in self._sequences if sequence and sequence[0] is step)
        sequence.popleft()
        if action.kind is Kind.FORWARD:
            self._begun += 1
            self._forwards[action.chunk] += 1
            return
        self._inputs += 1
        if action.kind is Kind.BACKWARD:
            self._weights += 1
        else:
            due = self._weight_steps[action.chunk, action.micro_batch]
            bisect.insort(self._weights_due, due, key=lambda step: step.position)

    def _may_run(self, step: ProgramStep) -> bool:
        """Return whether `step` can run, except that its message may be missing."""
        action = step.action
        if action.kind is not Kind.FORWARD:
            there = self._forwards[action.chunk] > action.micro_batch
            return there and (
                self._added == 0.0 or action.kind is Kind.BACKWARD or self._fits(self._held() + self._added)
            )
        if not self._fits(self._held() + 1.0):
            return False
        next_split = next((place for place in self._splits if place >= self._inputs), None)
        return next_split is None or self._fits(self._begun + 1.0 - next_split + self._added)

    def _held(self) -> float:
        return self._begun - (self._released * self._inputs + (1.0 - self._released) * self._weights)

    def _fits(self, held: float) -> bool:
        return self._cap is None or held <= self._cap + _ROUNDING

    def _overtakes(self, step: ProgramStep) -> bool:
        due = (weight.action.chunk for weight in self._weights_due)
        return step.action.kind is Kind.BACKWARD and step.action.chunk in due
