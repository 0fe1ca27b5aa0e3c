# SPDX-License-Identifier: Apache-2.0
"""Recover one rank's training from failures of other ranks, by carrying out the requests of `protocol`.

The way of a failure, on each live rank:

1. Detected: the launcher sees a process end (`Workers.poll`), decides who lives (`Roster.decide`) and publishes it
   (launch/launcher.py), which `FailureDetector` reads (`compare`); or a message, collective or wait of this rank fails.
   Both only end the attempt (`_interrupt`, `_attempt`).
2. Fenced: all operations of the attempt end, so that none can write any more (`FaultTolerantGroups.leave`).
3. Agreed: the launcher's membership says who lives (`_change`), and the ranks meet in the store and decide which
   attempts had committed (`Rank` of protocol.py, whose requests `ProtocolStore` carries out).
4. Regrouped: process groups of the live ranks replace the earlier ones (`_entered_after_failures`).
5. Redone: the attempt runs again (`_attempt`, which calls `Recovery._attempt` of engine/fault_tolerance.py to restore
   state and to rebuild links, routes and plan), or the next call if it had committed.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

from adaptra_megatron.common.child_process import OwningProcess
from adaptra_megatron.common.control_store import ControlStore, SilentStoreError
from adaptra_megatron.common.foreign_errors import is_of_device
from adaptra_megatron.common.layout import Cell, JobLayout
from adaptra_megatron.common.log import logger_of
from adaptra_megatron.common.membership import Departure, Membership, MembershipRecords, Stalled
from adaptra_megatron.common.typed_messages import packed
from adaptra_megatron.elastic.failure_detection import ABORT_POLL_S, FailureDetector
from adaptra_megatron.elastic.failure_errors import (
    EpochEndedError,
    JobLostError,
    LateRankError,
    OtherRankError,
    SwallowedErrors,
    UnrecoverableError,
    UnsoundAttemptError,
    is_communication,
    is_of_script,
)
from adaptra_megatron.elastic.fence import FENCE_S, OperationStillRunsError
from adaptra_megatron.elastic.generation import RESTART, Generation
from adaptra_megatron.elastic.job_abort import check_abort, end_rank, publish_error, publish_finished
from adaptra_megatron.elastic.process_group_manager import FaultTolerantGroups, interruptible
from adaptra_megatron.elastic.protocol import (
    Answer,
    Arrive,
    Arrived,
    Attempt,
    Await,
    AwaitAll,
    AwaitChange,
    AwaitFence,
    Changed,
    Done,
    Found,
    HandedIn,
    HandOver,
    Interrupted,
    LookUp,
    Phase,
    Put,
    PutOnce,
    Rank,
    Request,
    Unsound,
)
from adaptra_megatron.elastic.protocol_store import ALL_GENERATIONS, CommitDesk, ProtocolStore, Word
from adaptra_megatron.elastic.rejoin import (
    PATIENCE_S,
    JobRecord,
    JoinResult,
    RejoiningLateError,
    Return,
)

logger = logger_of(__name__)

Result = TypeVar("Result")

_WORDS = (Phase.ADMITS, Phase.AWAITING_WORD, Phase.CALLING_OFF)
"""Phases in which a rank learns whether the rejoining ranks take part."""


@dataclass(frozen=True)
class RankFailure:
    """A recovery: the ranks that failed, and how training continued."""

    epoch: int
    ranks: Mapping[str, str]
    """Cause of each failure, by name of the rank."""
    dead_cells: tuple[Cell, ...]
    """All cells that have failed so far."""
    live: int
    """Number of ranks that continue."""
    seconds: float
    """Time from the detection on this rank until the interrupted work had been run again."""


class RecoveryManager:
    """Runs each call of Megatron's schedules until all live ranks commit it. For the training thread.

    Constructed once all ranks have met.
    """

    def __init__(
        self,
        layout: JobLayout,
        control: ControlStore,
        groups: FaultTolerantGroups,
        records: MembershipRecords,
        timeout_s: float,
        patience_s: float,
        joined: JoinResult | None = None,
    ) -> None:
        """`timeout_s`: longest wait for another rank. `patience_s`: longest wait for the launcher to name the failed
        rank after an error of communication. `joined`: groups and generation of a rejoining rank.
        """
        self._layout, self._control, self._groups, self._records = layout, control, groups, records
        self._timeout_s = timeout_s
        self._store = control.punctual(ALL_GENERATIONS, timeout_s)
        self._steps = ProtocolStore(control, self._store, timeout_s, len(layout.workers))
        self._desk = CommitDesk(self._store, layout.rank, timeout_s)
        self._rank = Rank.first(layout) if joined is None else joined.rank
        self._callbacks: list[Callable[[], None]] = []
        self._run: Callable[[], object] = lambda: None
        """The attempt at the present call."""
        self._result: object = None
        """Return value of the last finished attempt."""
        self._cause: Exception = RuntimeError()
        """The last error that interrupted this rank."""
        self._late_s = self._expected_since_s = 0.0
        """Lateness of rejoining ranks as they received this rank's state, and the time from which they are late."""
        self._abort_checked_s = time.monotonic()
        self._begun_s = 0.0
        """When the last change of generation began for this rank."""
        self._struck_s: float | None = None
        """Time at which a failure was detected, until the interrupted work has been run again."""
        self._known: set[Departure] = set()
        """Departures that have been logged."""
        self._lost: dict[str, str] = {}
        """Ranks that failed since `_struck_s`: their names, and why."""
        self.rank_failures: list[RankFailure] = []
        """All recoveries so far."""
        self._returns: list[Return] = []
        self.epochs = 0
        """Number of generations after the first."""
        self.word: Callable[[Word], Word] = lambda word: word
        """Adds this rank's tokens, divisors and digests to its word at the end of an attempt."""
        self.hand_over: Callable[..., float] | None = None
        """Sends this rank's state to the rejoining ranks of a generation: see `enable_rejoin`. None: no rank can
        rejoin.
        """
        self.admitted: Callable[[], None] = lambda: None
        """Called on the ranks that trained before, once others have been admitted."""
        self._swallowed, self._owner = SwallowedErrors(), OwningProcess()
        # From here on its thread calls the given functions, which read the attributes above.
        self._detector = FailureDetector(
            layout,
            control,
            records,
            timeout_s,
            patience_s,
            generation=lambda: self.generation,
            interrupt=self._interrupt,
            check_abort=self._check_abort,
        )
        # The others wait for this rank for the timeout. Before, they must see it end, where an operation does not.
        groups.fence_s = min(FENCE_S, timeout_s / 2)
        self._uncaught = functools.partial(self.end_with, printed=True)
        groups.when_uncaught.append(self._uncaught)
        present = self._control.in_generation(self.generation.id)
        self._detector.enter(functools.partial(groups.begin, layout, present, self._go_on))
        if joined is not None:
            self._known.update(joined.left)
            groups.leave()
            self._detector.enter(functools.partial(groups.enter, self.generation, present))

    def enable_rejoin(self, hand_over: Callable[..., float], settings: Mapping[str, str]) -> None:
        """Let restarted ranks rejoin if they have the same `settings` (see `JobRecord`).

        `hand_over(generation, before, check=)` sends this rank's state to the ranks of a generation that are not in
        `before`. `check` raises when it has to stop. It returns how many seconds the rejoining ranks were late, and
        raises RejoiningLateError if they are too late.
        """
        self.hand_over = hand_over
        if self.epochs == 0 and self._layout.rank == min(self._layout.workers) and not self._rank.call:
            with self._records.lent(self._timeout_s) as records:
                records.publish_layout(packed(JobRecord(self._layout.record(), settings)))

    def take_returns(self) -> Sequence[Return]:
        """Return the readmissions since the last call. The list is empty except on the lowest rank that trained before
        them.
        """
        returns, self._returns = self._returns, []
        return returns

    @property
    def generation(self) -> Generation:
        """The present generation."""
        return self._rank.generation

    @property
    def turn(self) -> int:
        """Return the number of attempts that ended without a commit: messages of later attempts have a greater one."""
        return self._rank.turn

    @property
    def ranks_lost(self) -> int:
        """Number of ranks in failed cells."""
        return len(self._layout.workers) - len(self.generation.live)

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Register `callback`, which another thread calls as soon as the set of live cells has changed."""
        self._callbacks.append(callback)

    def check(self) -> None:
        """Raise EpochEndedError once the set of live cells has changed."""
        self._groups.check()

    def carry_out(self, attempt: Callable[[Generation, int], Result], *, trains: bool = False) -> Result:
        """Run `attempt(generation, number of the try)` until all live ranks commit one; return its result.

        `trains`: whether this is a training iteration: ranks may be admitted before one.

        Raises UnrecoverableError if the live ranks do not hold the whole model, OtherRankError if another rank ends
        with an error of its own, ReplicasDifferError or UnsoundAttemptError if state or gradients are wrong. Raises
        this rank's own errors, after publishing them to the other ranks.
        """
        tries = itertools.count()
        self._run = lambda: attempt(self.generation, next(tries))
        self._rank = self._rank.begin(trains=trains)
        self._step_until_between()
        self._got_over()
        result, self._result = self._result, None
        return result  # type: ignore[return-value]

    def close(self, *, well: bool = True) -> None:
        """End the thread. `well`: whether all calls of this rank have succeeded.

        Also publishes that training has finished, unless it ends by an error outside of calls: of an operation there,
        or of the script.
        """
        fails = self._rank.phase is not Phase.BETWEEN or isinstance(sys.exc_info()[1], Exception)
        if well and self._rank.call and not fails:
            publish_finished(self._store)
        if self._uncaught in self._groups.when_uncaught:
            self._groups.when_uncaught.remove(self._uncaught)
        self._detector.close()

    def end_with(self, error: BaseException, *, printed: bool = False) -> None:
        """Publish this rank's own error, so that the other ranks end; log it first unless Python has `printed` it.

        Where its device has failed or hangs, end this process instead: the other ranks go on without it. Does nothing
        in a forked child, whose connection to the store belongs to the parent.
        """
        if not self._owner.is_this:
            return
        if isinstance(error, OperationStillRunsError) or is_of_device(error, ended=self._groups.ended.is_set()):
            end_rank(self._layout.name(self._layout.rank), error, printed=printed)
        if isinstance(error, Exception) and not isinstance(
            error, (OtherRankError, UnrecoverableError, SilentStoreError)
        ):
            publish_error(self._store, self._layout.name(self._layout.rank), error, printed=printed)

    # The protocol's requests.

    def _go_on(self, error: Exception) -> None:
        """Enter the next generation after an operation outside of calls has failed."""
        self._cause = error
        self._rank = self._rank.interrupted()
        self._step_until_between()
        self._got_over()

    def _step_until_between(self) -> None:
        while self._rank.phase is not Phase.BETWEEN:
            before, answer = self._rank, self._answer(self._rank.request)
            self._rank = self._after(before, answer)
            self._note(before, answer)

    def _answer(self, request: Request) -> Answer:
        match request:
            case Attempt():
                return self._attempt()
            case AwaitFence():
                self._begun_s = time.monotonic()
                self._groups.leave()
                return Done()
            case AwaitChange():
                return Changed(self._change(request.tried))
            case LookUp():
                with self._records.lent(self._timeout_s) as records:
                    return Changed(records.of_epoch(request.epoch))
        try:
            return self._answer_from_store(request)
        except RejoiningLateError as late:
            logger.warning("%s: the others go on without them", late)
            assert self._rank.next is not None
            arrivals = self._rank.next.admitted
            # At once: what is pending with a stopped process would end as this one does, and disturb its exit.
            self._report_left_out({each: arrivals[each] for each in late.ranks if each not in self._rank.before})
            return Interrupted()
        except TimeoutError as cause:
            # Without a meeting there is no generation to continue in. Elsewhere a late rank is handled as a failed one.
            if self._rank.phase in (Phase.GATHERING, Phase.AWAITING_AGREEMENT):
                raise self._no_meeting(cause) from cause
            self._cause = LateRankError(f"timed out: not all ranks came to the end of call {self._rank.call}: {cause}")
            return Interrupted()
        except Exception as cause:
            if is_of_device(cause) or not is_communication(cause):
                raise
            self._cause = cause
            return Interrupted()

    def _answer_from_store(self, request: Request) -> Answer:
        match request:
            case Arrive():
                return self._arrive(request.name)
            case HandOver():
                self._hand_over(request.next)
                return Done()
            case Put(value=HandedIn() as state):
                # The protocol is pure: it leaves a blank for the number of operations outside of calls.
                request = replace(request, value=replace(state, operations=self._groups.operations()))
            case Put() if self._rank.phase is Phase.COMING:
                request = replace(request, value=str(self._late_s))
            case Await(generation=None, key=fate):
                self._await_fate(fate)
        assert isinstance(request, (Put, PutOnce, Await, AwaitAll))
        return self._steps.carry_out(request, self._check_wait)

    def _await_fate(self, key: str) -> None:
        """Wait for the fate of an attempt, as each iteration does. The store's server wakes this rank.

        Polls would be late by up to their interval, or would be many.
        """
        with self._control.lent(ALL_GENERATIONS, self._timeout_s, sealed=False) as client:
            wait = functools.partial(client.wait, [key], timedelta(seconds=self._timeout_s))
            # If interrupted, the thread ends with the next meeting at the latest, which writes all fates.
            interruptible(wait, self._check_wait, self._timeout_s, f"the commit of call {self._rank.call}")

    def _hand_over(self, to: Generation) -> None:
        """Send this rank's state to the rejoining ranks. Raises RejoiningLateError, and the errors of `_check_wait`."""
        abandoned = threading.Event()

        def check() -> None:
            if abandoned.is_set():
                raise EpochEndedError("the admission has been called off")

        assert self.hand_over is not None
        handed = functools.partial(self.hand_over, to, self._rank.before, check=check)
        try:
            self._late_s = interruptible(handed, self._check_wait, self._timeout_s, "the state of rejoining ranks")
        finally:
            # The thread cannot be interrupted: its next check ends it, before it writes to a later generation's store.
            abandoned.set()  # the thread is left to itself

    def _attempt(self) -> Answer:
        """Run an attempt. Raises this rank's own errors."""
        try:
            with self._groups.call():
                self._result = self._run()
                self._groups.synchronize()
            return Done()
        except Exception as cause:
            # Once the generation has ended, aborted operations may have left undefined outputs, and code that reads
            # them may raise anything. Such an error is no error of this rank.
            ended = self._groups.ended.is_set()
            if isinstance(cause, UnsoundAttemptError) and not ended:
                return self._repeat(cause)
            if is_of_device(cause, ended=ended) or (not is_communication(cause) and not ended):
                self.end_with(cause)
                raise
            # The traceback's frames hold handles of groups. Their connections must close, or peers that wait for this
            # rank do not wake.
            traceback.clear_frames(cause.__traceback__)
            self._cause = cause
            return Interrupted()

    def _repeat(self, cause: UnsoundAttemptError) -> Answer:
        """Repeat an attempt once. Raises `cause` if it has been repeated before."""
        if self._rank.repeated:
            self.end_with(cause)
            raise cause
        logger.error("%s; the attempt is repeated", cause)
        return Unsound()

    def _arrive(self, attempt: str) -> Answer:
        word = self._desk.arrive(self._rank.call, self.generation.live, self.word(Word(attempt)), self.check)
        if word is None:
            return Arrived(False, None)
        if not word.sound():
            return self._repeat(
                UnsoundAttemptError(
                    f"attempt {attempt}: gradients have been divided by {' and '.join(map(str, word.divisors))} "
                    f"tokens, but micro-batches had {word.tokens}"
                )
            )
        return Arrived(True, None if self.hand_over is None else self._detector.newest)

    def _check_wait(self) -> None:
        """Raise the error that ends the wait of the present phase, if any."""
        rank, newest = self._rank, self._detector.newest
        if rank.phase is Phase.AWAITING_FATE:
            self.check()
            return
        if time.monotonic() - self._abort_checked_s > ABORT_POLL_S:
            self._check_abort()
            self._abort_checked_s = time.monotonic()
        if newest is not None and rank.is_struck_by(newest):
            raise EpochEndedError("a rank has failed while others met")
        if rank.phase not in (Phase.HANDING_OVER, Phase.COUNTING, Phase.EXPECTING):
            return
        assert rank.next is not None
        if self._steps.look(rank.next.id, "admitted"):
            raise EpochEndedError("another rank has called the admission off")
        waited_s = time.monotonic() - self._expected_since_s
        if rank.phase is Phase.EXPECTING and waited_s > PATIENCE_S:
            missing = (each for each in sorted(rank.next.live) if not self._steps.look(rank.next.id, f"here/{each}"))
            raise RejoiningLateError(tuple(missing), waited_s)

    # What follows from answers.

    def _after(self, before: Rank, answer: Answer) -> Rank:
        """Return the state of the protocol after an answer.

        Raises the errors of `after_failures` and `_refuse_lost_shards`. Publishes one that no rank can recover from,
        for ranks that do not see it themselves and for restarted ones.
        """
        try:
            after = before.after(answer)
            if before.phase is Phase.CHANGING and after.next is not None:
                self._refuse_lost_shards(after.next)
        except JobLostError as lost:
            publish_error(self._store, self._layout.name(self._layout.rank), lost)
            raise
        return after

    def _note(self, before: Rank, answer: Answer) -> None:
        """Update this process after a step of the protocol."""
        after = self._rank
        if after.call > before.call:
            self._groups.kept.forget()
        if before.phase in (Phase.AGREEING, Phase.AWAITING_AGREEMENT) and after.next is None:
            self._entered_after_failures()
        elif before.phase is Phase.ADMITTING:
            assert isinstance(answer, Changed)
            assert after.next is not None
            self._admission_begins(answer.membership, after.next)
        elif after.phase is Phase.EXPECTING:
            assert isinstance(answer, Found)
            self._expected_since_s = time.monotonic() - max(map(float, answer.value))
        elif before.phase in _WORDS and before.next is not None and after.next is None:
            self._admission_ended(before, admitted=after.generation.id == before.next.id)

    def _entered_after_failures(self) -> None:
        rank, generation, membership = self._rank, self.generation, self._detector.newest
        self._swallowed.log(self._cause)
        self._steps.release()
        self._enter(generation)
        self._exchange_results(generation)
        left = () if membership is None else membership.left
        lost = [each for each in left if each not in self._known and each.rank not in generation.live]
        self._known.update(lost)
        self._lost |= {self._layout.name(each.rank): each.why for each in lost}
        names = ", ".join(f"{self._layout.name(each.rank)} ({each.why})" for each in lost)
        # One line for the whole job: all live ranks see the same.
        if rank.rank == min(generation.live):
            # Whom the rank that led has refused, which may have failed since.
            self._report_left_out(generation.refused, after_s=PATIENCE_S)
            logger.warning(
                "lost %s: going on with %d of %d ranks", names, len(generation.live), len(self._layout.workers)
            )
        self._struck_s = self._struck_s or self._begun_s

    def _enter(self, generation: Generation) -> None:
        self.epochs += 1
        control = self._control.in_generation(generation.id)
        self._detector.enter(functools.partial(self._groups.enter, generation, control))

    def _exchange_results(self, generation: Generation) -> None:
        """Publish those results of operations outside of calls that other ranks lack, and find those that this rank
        lacks.
        """
        assert self._rank.agreement is not None
        holders = self._rank.agreement.holders
        if not holders:
            self._groups.kept.look_nowhere()  # nor with holders of the generation before, which may have failed
            return
        store = self._control.in_generation(generation.id).punctual("kept", self._timeout_s)
        self._groups.kept.publish(store, [group for group, rank in holders.items() if rank == self._rank.rank])
        self._groups.kept.found_with(holders, store, self._timeout_s, self.check)

    def _admission_begins(self, membership: Membership, admitted: Generation) -> None:
        self._begun_s = time.monotonic()
        for each in membership.arrived:
            if admitted.admitted.get(each.rank) == each.epoch:
                self._layout.move(each.rank, each.ready.host, each.ready.identity)

    def _admission_ended(self, before: Rank, *, admitted: bool) -> None:
        self._steps.release()
        assert before.next is not None
        arrived = sorted(before.next.live - before.before)
        seconds = time.monotonic() - self._begun_s
        back = Return(before.next, tuple(map(self._layout.name, arrived)), seconds)
        leads = before.rank == min(before.before)
        if admitted:
            # An admission follows a commit, so every rank has the results.
            self._groups.kept.forget()
            # The admitted ranks join groups, so all torch groups must be made anew.
            self._groups.leave()
            self._enter(before.next)
            self.admitted()
            if leads:
                with self._records.lent(self._timeout_s) as records:
                    records.say_admitted(before.next.admitted)
                self._returns.append(back)
        names = ", ".join(back.ranks)
        if leads and admitted:
            text = "%s: back, after %.2f s in which the others waited; going on with %d of %d ranks"
            logger.warning(text, names, seconds, len(before.next.live), len(self._layout.workers))
        elif leads:
            text = "%s: not admitted after %.2f s, as a rank has died or was late meanwhile; going on without"
            logger.warning(text, names, seconds)
            self._report_left_out(self.generation.refused, after_s=PATIENCE_S)

    def _report_left_out(self, arrivals: Mapping[int, int], after_s: float = 0.0) -> None:
        """Have the launcher end processes that are not admitted, by rank. Those that run end by themselves; one that is
        stopped or hangs would keep its place.
        """
        if arrivals:
            stalled = Stalled(tuple(sorted(arrivals)), "was to rejoin, and has not been admitted", arrivals)
            self._detector.report(stalled, after_s=after_s)

    def _got_over(self) -> None:
        """Record and log the recovery, if a rank failed during the work that has just been run again."""
        if self._struck_s is None:
            return
        generation, seconds = self.generation, time.monotonic() - self._struck_s
        dead_cells = tuple(sorted(generation.dead_cells))
        failure = RankFailure(generation.id.membership, self._lost, dead_cells, len(generation.live), seconds)
        self.rank_failures.append(failure)
        if self._layout.rank == min(generation.live):
            logger.warning("recovered: interrupted work was run again %.2f s after the failure was detected", seconds)
        self._struck_s, self._lost = None, {}

    # Failures of others.

    def _change(self, tried: frozenset[int]) -> Membership:
        """Wait as `_await_change`. Raises this rank's own error in preference to another rank's."""
        own = is_of_script(self._cause)
        try:
            return self._await_change(tried)
        except OtherRankError as other:
            if not own:
                raise other from self._cause
        raise self._cause

    def _await_change(self, tried: frozenset[int]) -> Membership:
        """Return `FailureDetector.change`. If there is none, raise the error that interrupted this rank."""
        membership = self._detector.change(tried)
        self._check_abort()
        if membership is None:
            self.end_with(self._cause)
            raise self._cause
        return membership

    def _no_meeting(self, cause: TimeoutError) -> UnrecoverableError:
        assert self._rank.next is not None
        return UnrecoverableError(
            f"{self._layout.name(self._layout.rank)} has waited {self._timeout_s:g} s (--adaptra-timeout-s) in vain "
            f"for the ranks that live in generation {self._rank.next.id}: {cause}; look at the first whose log stops"
        )

    def _refuse_lost_shards(self, generation: Generation) -> None:
        """Raise JobLostError if no live rank holds some shard of the optimizer's state."""
        if lost := self._groups.lost_shards(generation.live):
            name = self._layout.name
            held = "; ".join(
                f"{name(owner)} and of its copy at {' and '.join(map(name, rest))}" for owner, *rest in lost
            )
            raise JobLostError(f"all ranks that held the optimizer's state of {held} have failed: {RESTART}")

    def _check_abort(self) -> None:
        check_abort(self._store, self._layout.name(self._layout.rank))

    def _interrupt(self) -> None:
        """End the waits of the training thread, in any thread."""
        self._groups.interrupt()
        for callback in self._callbacks:
            callback()
