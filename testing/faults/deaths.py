# SPDX-License-Identifier: Apache-2.0
"""Make ranks fail at a given point of a training or of a rejoin: by SIGKILL, or stopped by SIGSTOP."""

from __future__ import annotations

import functools
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from adaptra_megatron.common.membership import START_VARIABLE, MembershipRecords
from testing.faults.emulated_compute import EmulationError
from testing.faults.operation_board import WAITING, OperationBoard

if TYPE_CHECKING:
    from adaptra_megatron.megatron.computation import StageComputation
    from testing.faults.late_operations import LateRank

ARRIVES_S, _LOOKS_S = 60.0, 0.05
POINTS = ("ready", "receiving", "joining", "meeting", "admitting", "sending")
"""Stages of a rejoin: the restarted process is ready, receives the job's state, joins its cell's groups, and meets
the others, who admit it and one of whom sends the state."""
FORM = (
    f"RANK:ITERATION:ACTION[:stop]|RANK:ITERATION:+MS[:stop]|RANK:ITERATION:reducing+MS|RANK:late+MS"
    f"|RANK:START:{{{','.join(POINTS)}}}+MS[:stop]"
)


@dataclass(frozen=True)
class Death:
    """Failure of `rank` in iteration `iteration` (from 0).

    It happens at the beginning of action number `action` (from 0, of all F, B and W), `after_s` seconds into the
    iteration, or once the rank has launched its first gradient reduction.
    """

    rank: int
    iteration: int
    action: int | None = None
    after_s: float = 0.0
    stops: bool = False
    """True: the process is stopped, not killed."""
    reducing: bool = False


@dataclass(frozen=True)
class DeathOnceLate:
    """Failure of `rank`, `after_s` seconds after another rank has launched the delayed operation (`LateOperation`)."""

    rank: int
    after_s: float


@dataclass(frozen=True)
class DeathAtAdmission:
    """Failure of a restarted process of `rank`, `after_s` seconds after it reaches `point` (of `POINTS`).

    `start`: number of restarts of the rank up to that process.
    """

    rank: int
    start: int
    point: str
    after_s: float
    stops: bool = False
    """True: the process is stopped; its launcher kills it once the others find that it does not run."""


AnyDeath = Death | DeathOnceLate | DeathAtAdmission


def parse_death(text: str) -> AnyDeath:
    """Parse --emulate-death. Raises EmulationError for anything else."""
    if (found := re.fullmatch(r"(\d+):late\+(\d+)", text)) is not None:
        return DeathOnceLate(int(found[1]), int(found[2]) / 1e3)
    if (found := re.fullmatch(r"(\d+):(\d+):reducing\+(\d+)", text)) is not None:
        return Death(int(found[1]), int(found[2]), after_s=int(found[3]) / 1e3, reducing=True)
    if (found := re.fullmatch(rf"(\d+):(\d+):({'|'.join(POINTS)})\+(\d+)(:stop)?", text)) is not None:
        return DeathAtAdmission(int(found[1]), int(found[2]), found[3], int(found[4]) / 1e3, stops=bool(found[5]))
    if (found := re.fullmatch(r"(\d+):(\d+):(\+)?(\d+)(:stop)?", text)) is None:
        raise EmulationError(f"--emulate-death {text!r} is not {FORM}, as 3:2:5, 3:2:+120 or 3:1:receiving+0")
    rank, iteration, number = int(found[1]), int(found[2]), int(found[4])
    action, after_s = (None, number / 1e3) if found[3] else (number, 0.0)
    return Death(rank, iteration, action, after_s, stops=bool(found[5]))


class Deaths:
    """Failures of one rank. The training reports each iteration and decorates its computation."""

    def __init__(
        self,
        deaths: Collection[AnyDeath],
        rank: int,
        settled: Collection[int] = (),
        late: LateRank | None = None,
    ) -> None:
        """`settled`: iterations that begin once all failures of this rank have happened. `late`: the delayed operation
        of this rank. Raises EmulationError if a failure depends on a delayed operation and there is none.
        """
        ours = [death for death in deaths if death.rank == rank]
        self._ours = [death for death in ours if isinstance(death, Death)]
        start = int(os.environ.get(START_VARIABLE) or 0)
        self._at_admission = [each for each in ours if isinstance(each, DeathAtAdmission) and each.start == start]
        self._iteration = self._actions = 0
        self._settled, self._timers = settled, list[threading.Timer]()
        self._late = late
        once_late = [death for death in ours if isinstance(death, DeathOnceLate)]
        if late is None:
            if once_late or any(death.reducing for death in self._ours):
                raise EmulationError("deaths as operations begin need --adaptra-reroute failures and --dump-state")
            return
        late.reduction_begins = self._reduction_begins
        for death in [] if start else once_late:
            late.when_marked(functools.partial(self._set_off, death.after_s))

    def set_iteration(self, iteration: int) -> None:
        """Begin `iteration` (from 0)."""
        if iteration in self._settled:
            for timer in self._timers:
                timer.join()
        self._iteration, self._actions = iteration, 0
        for death in self._ours:
            if (death.iteration, death.action, death.reducing) == (iteration, None, False):
                self._set_off(death.after_s, stops=death.stops)

    def action(self) -> None:
        """Fail now if an action is due; called as each action begins."""
        for death in self._ours:
            if (death.iteration, death.action) == (self._iteration, self._actions):
                self._die(stops=death.stops)
        self._actions += 1

    def _reduction_begins(self) -> None:
        for death in [each for each in self._ours if each.reducing and each.iteration == self._iteration]:
            self._ours.remove(death)
            self._set_off(death.after_s)

    def decorate(self, computation: StageComputation) -> StageComputation:
        """Return `computation`, during which this rank fails as asked for."""
        from adaptra_megatron.megatron.computation import SurroundedComputation

        def begins(*_action: object) -> AbstractContextManager[None]:
            self.action()
            return nullcontext()

        return SurroundedComputation(computation, begins) if self._ours else computation

    @contextmanager
    def at_admissions(self) -> Iterator[None]:
        """Fail at stages of a rejoin within the context."""
        undo: list[Callable[[], None]] = []
        for death in self._at_admission:
            owner, name = _functions()[death.point]
            before = getattr(owner, name)
            setattr(owner, name, self._before(before, death))
            undo.append(functools.partial(setattr, owner, name, before))
        try:
            yield
        finally:
            for each in reversed(undo):
                each()

    def _before(self, function: Callable[..., Any], death: DeathAtAdmission) -> Callable[..., Any]:
        @functools.wraps(function)
        def called(*given: Any, **keywords: Any) -> Any:
            self._set_off(death.after_s, stops=death.stops)
            return function(*given, **keywords)

        return called

    def _set_off(self, after_s: float, *, stops: bool = False) -> None:
        if not after_s:
            self._die(stops=stops)
            return
        timer = threading.Timer(after_s, self._die, kwargs={"stops": stops})
        timer.start()
        self._timers.append(timer)

    def _die(self, *, stops: bool = False) -> None:
        if self._late is not None and not stops:
            self._late.board.note_death()
        # This thread itself: others may take another one's signal a moment later.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP if stops else signal.SIGKILL)


def _functions() -> dict[str, tuple[Any, str]]:
    """Return owner and name of the function that runs at each of `POINTS`."""
    from adaptra_megatron.elastic.recovery import RecoveryManager
    from adaptra_megatron.elastic.rejoin import RejoiningRank
    from adaptra_megatron.engine import rejoining

    return {
        "ready": (RejoiningRank, "stand_ready"),
        "receiving": (rejoining, "_receive_whole"),
        "joining": (rejoining, "joined_job"),
        "meeting": (RejoiningRank, "meet"),
        "admitting": (RecoveryManager, "_admission_begins"),
        "sending": (rejoining, "_send"),
    }


class Arrivals:
    """Makes iterations wait until all failed ranks are ready again, however long that takes on this machine."""

    def __init__(self, iterations: Collection[int], board: OperationBoard | None = None) -> None:
        """`board`: on which this rank shows that it waits."""
        self._iterations, self._board = iterations, board
        self._joins = bool(os.environ.get(START_VARIABLE))
        """True in a restarted process until its first iteration, for which the others wait."""

    def set_iteration(self, iteration: int) -> None:
        """Begin `iteration` (from 0). Raises EmulationError if no rank fails within ARRIVES_S.

        If a rank has failed but the membership does not change for that long, the job may have ended. Training then
        continues and notices the end.
        """
        joins, self._joins = self._joins, False
        if joins or iteration not in self._iterations:
            return
        if self._board is not None:
            self._board.add(WAITING)
        try:
            self._wait(iteration)
        finally:
            if self._board is not None:
                self._board.add(WAITING, -1)

    def _wait(self, iteration: int) -> None:
        records, since_s, found = MembershipRecords.of_rank(ARRIVES_S), time.monotonic(), None
        while found is None or len(found.live) < found.world_size or not found.left:
            time.sleep(_LOOKS_S)
            before, found = found, records.newest()
            if found != before:
                since_s = time.monotonic()
            elif time.monotonic() > since_s + ARRIVES_S:
                if found is None or not found.left:
                    raise EmulationError(f"iteration {iteration}: no rank has failed for {ARRIVES_S:g} s")
                return
