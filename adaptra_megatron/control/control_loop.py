# SPDX-License-Identifier: Apache-2.0
"""Brings measurements of a replica's ranks to one of them, and its decisions back to all, concurrently with training.

Measurements go to the leader's planner process, over connections of their own; decisions go into the job's own store,
and back over these connections, so that few ranks need to look there. All of it is done in background threads. What was
measured in iteration k is decided on during k + 1 and takes effect in k + 2. Planning that takes longer holds up no
rank: the leader's own training thread, when it comes to an iteration that nothing was decided for, writes that what
runs is kept, and what is decided later takes effect later. There is one writer, and it writes each iteration's decision
once: no two ranks can run different plans.
"""

from __future__ import annotations

import threading

from adaptra_megatron.common.job.control_store import ControlStore
from adaptra_megatron.common.job.layout import JobLayout
from adaptra_megatron.common.log import logger_of
from adaptra_megatron.control.decision_reader import DELAY, DecisionReader, DecisionWriter
from adaptra_megatron.control.decisions import Decision
from adaptra_megatron.control.leading import DecidingPlanner, DecisionPublisher
from adaptra_megatron.control.measurements import StageMeasurement


def exchange_place(layout: JobLayout) -> str:
    """Part of the job's store in which those who are decided for together exchange measurements and decisions."""
    return "exchange/all" if layout.together else f"exchange/{layout.cell.replica}"


logger = logger_of(__name__)


class ExchangeError(RuntimeError):
    """The ranks could not agree on a plan; names this rank, what it waited for, and the remedy."""


def exchange_error(rank: int, what: str, timeout_s: float | None, cause: Exception) -> ExchangeError:
    """The error of `rank`, which could not do `what`; `timeout_s`: None where torch.distributed's limit counts."""
    within = "" if timeout_s is None else f" within {timeout_s:g} s (--adaptra-timeout-s)"
    return ExchangeError(
        f"rank {rank} could not {what}{within}: {cause}. "
        "Another rank died, hangs, or cannot be reached; look at the first rank whose log stops"
    )


class PlanExchange:
    """One rank's end of the exchange within its replica, whose leader has a planner decide, in a thread of its own.

    When the leader dies or the store cannot be reached, `decision` raises ExchangeError, after the timeout at the
    latest: no rank can know what the others run then. Where the order is fixed, what runs is kept for good instead:
    ends of links need no store to agree on their paths. When another rank is late with what it measured, or the planner
    is late or fails, what runs is kept, and the log says so.
    """

    def __init__(
        self,
        control: ControlStore,
        layout: JobLayout,
        planner: DecidingPlanner | None,
        timeout_s: float,
        *,
        fixed_order: bool = False,
        first: int = 0,
    ) -> None:
        """`planner`: of the leader, closed with this; None on all other ranks. `fixed_order`: whether the order of
        actions is given, or stock's, so that all ranks know it without decisions. `first`: the first iteration that is
        measured."""
        self._layout, self._timeout_s, self._fixed_order = layout, timeout_s, fixed_order
        self.decides_from = first + DELAY
        """The first iteration that can be decided on."""
        self._latest, self._lost = Decision(0), False
        place = exchange_place(layout)
        self._role: DecisionPublisher | DecisionReader
        self._decisions: DecisionWriter | DecisionReader
        if planner is not None:
            self._role = DecisionPublisher(layout, planner, control, place, first)
            self._decisions = self._role.decisions
        else:
            self._role = self._decisions = DecisionReader(control, place, layout, timeout_s)

    def post(self, iteration: int, measurement: StageMeasurement) -> None:
        """Hand in what was measured; returns at once. Every rank must do so for every iteration from the first."""
        if not self._lost:
            self._role.post(iteration, measurement)

    def decision(self, iteration: int) -> Decision:
        """Return what `iteration` (`decides_from` or later) runs: the same on every rank of the replica.

        To be asked for in ascending order, each after what was measured DELAY iterations before has been handed in.
        """
        assert iteration >= self.decides_from, "nothing has been measured that the first iterations could follow from"
        if self._lost:
            return self._latest.kept()
        try:
            self._latest = self._decisions.needed(iteration)
        except (RuntimeError, TimeoutError) as cause:
            what = f"learn the plan of iteration {iteration}"
            if not self._fixed_order:
                raise exchange_error(self._layout.rank, what, self._timeout_s, cause) from cause
            self._lost = True
            logger.warning(
                "rank %d could not %s: %s. The order is fixed and stays; no path is chosen any more, and a link "
                "changes its path only when one fails",
                *(self._layout.rank, what, cause),
            )
            return self._latest.kept()
        return self._latest

    def early_decision(self, iteration: int) -> Decision | None:
        """The same if it has been made already; never waits. None, too, while the store does not answer."""
        return None if self._lost else self._decisions.published(iteration)

    def interrupt(self, cause: str) -> None:
        """End a wait for a decision, from any thread: it raises ExchangeError."""
        if isinstance(self._role, DecisionReader):
            self._role.fail(RuntimeError(cause))

    def leave(self) -> None:
        """Exchange nothing any more: what was decided last is kept for good."""
        self._lost = True
        # Not in this thread: the planner's process may need half a second to end.
        threading.Thread(target=self._role.close, name="adaptra-exchange", daemon=True).start()

    def close(self) -> None:
        """End the threads; what is under way is dropped. A planner that hangs is left to itself."""
        self._role.close()
