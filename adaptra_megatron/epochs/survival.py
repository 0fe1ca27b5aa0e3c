# SPDX-License-Identifier: Apache-2.0
"""One rank's part in a job that outlives its ranks: attempts at calls, their commit, and the way to the next epoch.

A call of Megatron's schedules is attempted until it commits: once all live ranks have come to the end of their
attempts, and by a word that is written once. On the way to a new epoch the lowest live rank writes the other word for
every attempt whose fate some rank does not know, unless the first is there: so all ranks have done a call, or none.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from adaptra_megatron.authentication.sealed_store import SealedStore, peek
from adaptra_megatron.authentication.tagged_json import packed, unpacked
from adaptra_megatron.child_process import OwningProcess
from adaptra_megatron.epochs.admissions import Admissions, Return
from adaptra_megatron.epochs.awaiting import awaited
from adaptra_megatron.epochs.epoch import RESTART, Epoch, epoch_of, live_ranks
from adaptra_megatron.epochs.errors import (
    EpochEndedError,
    JobLostError,
    LateRankError,
    OtherRankError,
    SwallowedErrors,
    UnrecoverableError,
    is_communication,
    is_of_script,
)
from adaptra_megatron.epochs.joining import JobRecord, Joined
from adaptra_megatron.epochs.last_word import heed, say_end, say_error
from adaptra_megatron.epochs.live_groups import LiveGroups
from adaptra_megatron.epochs.meeting import (
    MOST_NBYTES,
    REDO,
    Agreement,
    RankState,
    agreed,
    attempt_name,
    committed_with,
    packed_results,
    read_fate,
    unpacked_results,
)
from adaptra_megatron.epochs.membership_watch import MembershipWatch
from adaptra_megatron.epochs.roll_call import answer_roll, is_called
from adaptra_megatron.job.control_store import ControlStore
from adaptra_megatron.job.layout import JobLayout
from adaptra_megatron.job.membership import Departure, Membership, MembershipRecords
from adaptra_megatron.job.punctual_store import SilentStoreError
from adaptra_megatron.log import logger_of
from adaptra_megatron.schedule.routing.costs import Cell

logger = logger_of(__name__)

Result = TypeVar("Result")

_HEED_S = 0.2
"""How often a rank that waits for others in a meeting looks for an error that ends the job."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0003, 0.01
"""Between two looks at the fate of an attempt: the last rank to come writes it."""


@dataclass(frozen=True)
class RankLoss:
    """Ranks that were lost, and how that was got over."""

    epoch: int
    ranks: Mapping[str, str]
    """Names of ranks, and why."""
    dead_cells: tuple[Cell, ...]
    """All so far."""
    live: int
    """Number of ranks that go on."""
    seconds: float
    """From when this rank saw it until what was under way had been done again."""


class Survival:
    """For the training thread; made when all ranks have met."""

    def __init__(
        self,
        layout: JobLayout,
        control: ControlStore,
        groups: LiveGroups,
        records: MembershipRecords,
        timeout_s: float,
        patience_s: float,
        joined: Joined | None = None,
    ) -> None:
        """`timeout_s`: longest wait for another rank. `patience_s`: for the launcher to say who has died, after an
        error that may come of it. `joined`: of a process that takes the place of a rank that had left."""
        self._layout, self._control, self._groups, self._records = layout, control, groups, records
        self._timeout_s, self._patience_s = timeout_s, patience_s
        self._store = control.punctual("survival", timeout_s)
        self._callbacks: list[Callable[[], None]] = []
        self._call = 0
        self._attempted: str | None = None
        self._heeded_s = time.monotonic()
        self._struck_s: float | None = None
        """When the loss of a rank was seen, until what it struck has been redone."""
        self._told: set[Departure] = set()
        """Those that have been logged."""
        self._lost: dict[str, str] = {}
        """What was lost since then: names of ranks, and why."""
        self.rank_losses: list[RankLoss] = []
        """All that have been got over."""
        self._latest: Membership | None = None
        self.epochs = 0
        """How many sets of live cells there have been after the first."""
        self.epoch = Epoch(0, frozenset(layout.workers), frozenset(), control)
        if joined is not None:
            self.epoch, self._call = joined.epoch, joined.call
        self._roll: tuple[Epoch, SealedStore] | None = None
        """For the watch's thread: the present epoch's roll call."""
        self._swallowed = SwallowedErrors()
        self._called: Epoch | None = None
        """The last epoch whose roll has been called."""
        self.admissions = Admissions(layout, control, self._store, records, timeout_s)
        self._watch = MembershipWatch(records, self._changed, self._look_for_roll_call)
        self._owner = OwningProcess()
        self._hooked, sys.excepthook = sys.excepthook, self._uncaught
        groups.begin(layout, control, self._go_on)
        if joined is not None:
            self._told.update(joined.left)
            groups.enter(self.epoch.number, self.epoch.control, self.epoch.live, {})
        if (newest := self._watch.newest) is not None:
            self._changed(newest)

    def let_in(self, hand_over: Callable[[Epoch, frozenset[int]], None], settings: Mapping[str, str]) -> None:
        """Have ranks that are started again take part, with the same `settings` (see `JobRecord`). `hand_over`: see
        `Admissions`."""
        self.admissions.hand_over = hand_over
        if self.epoch.number == 0 and self._layout.rank == min(self._layout.workers):
            self._records.clone().publish_layout(packed(JobRecord(self._layout.record(), settings)))

    def take_returns(self) -> Sequence[Return]:
        """Ranks that were admitted again since the last call; none but on the lowest of the ranks that did so."""
        returns, self.admissions.returns = self.admissions.returns, []
        return returns

    @property
    def ranks_lost(self) -> int:
        """Number of ranks that take no part any more: those of all dead cells."""
        return len(self._layout.workers) - len(self.epoch.live)

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Have `callback` called, in another thread, as soon as the set of live cells has changed."""
        self._callbacks.append(callback)

    def check(self) -> None:
        """Raise EpochEndedError once the set of live cells has changed."""
        self._groups.check()

    def carry_out(self, attempt: Callable[[Epoch, int], Result], *, trains: bool = False) -> Result:
        """Run `attempt(epoch, number of the try)` until one commits; what that has returned. `trains`: whether this is
        a training iteration, before which newcomers may be admitted.

        Raises UnrecoverableError where what lives is not the whole model, OtherRankError where another rank ends with
        an error of its own, and this rank's own errors, after having them known to the others.
        """
        tries = 0
        if trains and self.admissions.due is not None:
            self._admit()
        while True:
            try:
                with self._groups.call():
                    result = attempt(self.epoch, tries)
                    self._groups.synchronize()
                    self._commit()
                return self._done(result)
            except Exception as cause:
                error = cause
                # Once the epoch has ended, what was aborted may have left garbage, and that may raise anything.
                if not is_communication(cause) and not self._groups.ended.is_set():
                    self.end_with(cause)
                    raise
                # What is left behind holds handles of groups, whose connections are to close for peers to wake.
                traceback.clear_frames(cause.__traceback__)
            attempted, agreement = self._attempted, None
            try:
                agreement = self._next_epoch(error)
            except OtherRankError as other:
                if not is_of_script(error):
                    raise other from error
            if agreement is None:
                raise error  # this rank's own, which another rank's does not hide
            self._swallowed.log(error)
            if attempted in agreement.committed:
                return self._done(result)
            tries += 1

    def close(self, *, well: bool = True) -> None:
        """End the thread. `well`: whether this rank has come to the end of the training."""
        if well and self._call:
            say_end(self._store)
        if sys.excepthook == self._uncaught:
            sys.excepthook = self._hooked
        self._watch.close()

    # Commits.

    def _done(self, result: Result) -> Result:
        self._got_over()
        self._call += 1
        self._attempted = None
        self._groups.committed()
        return result

    def _got_over(self) -> None:
        """What was under way has been done again, if anything was lost."""
        if self._struck_s is None:
            return
        epoch, seconds = self.epoch, time.monotonic() - self._struck_s
        dead_cells = tuple(sorted(epoch.dead_cells))
        self.rank_losses.append(RankLoss(epoch.number, self._lost, dead_cells, len(epoch.live), seconds))
        if self._layout.rank == min(epoch.live):
            logger.warning("what was under way has been redone %.2f s after the loss was seen", seconds)
        self._struck_s, self._lost = None, {}

    def _commit(self) -> None:
        """Come to the end of an attempt with all live ranks. Raises EpochEndedError where one has died before."""
        name = self._attempted = attempt_name(self._call, self.epoch.number)
        if self._store.add(f"ready/{name}", 1) == len(self.epoch.live):
            self._store.compare_set(
                f"fate/{name}", "", committed_with(self.admissions.ready(self.epoch, self._watch.newest))
            )
        begun_s, pause_s = time.monotonic(), _FIRST_PAUSE_S
        while (fate := peek(self._store, f"fate/{name}")) is None:
            self.check()
            if time.monotonic() - begun_s > self._timeout_s:
                raise LateRankError(f"timed out: not all ranks came to the end of call {self._call}")
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
        committed, due = read_fate(fate.decode())
        if not committed:
            raise EpochEndedError(f"the attempt at call {self._call} in epoch {self.epoch.number} is redone")
        self.admissions.due = self.admissions.due if due is None else due

    def _admit(self) -> None:
        """Have newcomers take part from the next call on, unless any that is needed dies meanwhile."""
        epoch = self.admissions.admit(self.epoch, self._call, lambda: self._watch.newest, self._heed_now_and_then)
        if epoch is None:
            return
        self.epoch = epoch
        self.epochs += 1
        self._groups.number_anew()
        self._groups.enter(epoch.number, epoch.control, epoch.live, {})
        if self._latest is not None:
            self._changed(self._latest)

    # Meetings.

    def _go_on(self, error: Exception) -> None:
        """After an operation outside of calls has failed: the next epoch."""
        self._next_epoch(error)
        self._swallowed.log(error)
        self._got_over()

    def _next_epoch(self, error: Exception) -> Agreement:
        """Meet the other live ranks. Raises `error` where the launcher has lost none within the patience."""
        begun_s, known, tried = time.monotonic(), self.epoch.number, self.epoch.live
        self.admissions.due = None
        self._groups.leave()
        while True:
            membership = self._wait_for_change(known, tried)
            if membership is None and self._stalled_are_ended():
                membership = self._wait_for_change(known, tried, roll_called=True)
            if membership is None:
                self._heed_last_word()
                self.end_with(error)
                raise error
            self._heed_last_word()
            epoch = self._epoch_of(membership)
            try:
                agreement = self._meet(epoch)
                break
            except EpochEndedError:
                known, tried = membership.epoch, epoch.live
        self.epoch = epoch
        self.epochs += 1
        self._groups.enter(epoch.number, epoch.control, epoch.live, unpacked_results(agreement.kept))
        if self._latest is not None:  # which may have come while the end of the epoch before was still marked
            self._changed(self._latest)
        lost = [each for each in membership.left if each not in self._told]
        self._told.update(lost)
        self._lost |= {self._layout.name(each.rank): each.why for each in lost}
        names = ", ".join(f"{self._layout.name(each.rank)} ({each.why})" for each in lost)
        if self._layout.rank == min(epoch.live):
            logger.warning("lost %s: going on with %d of %d ranks", names, len(epoch.live), len(self._layout.workers))
        self._struck_s = self._struck_s or begun_s
        return agreement

    def _wait_for_change(self, known: int, tried: frozenset[int], *, roll_called: bool = False) -> Membership | None:
        """The newest membership with other live ranks than those `tried` last; None if there is none within the
        patience, or once the roll has been called, unless it had been before: `roll_called`."""
        deadline_s = time.monotonic() + self._patience_s
        while (left_s := deadline_s - time.monotonic()) > 0 and (roll_called or self._called is not self.epoch):
            membership = self._watch.wait_beyond(known, min(left_s, _HEED_S))
            if membership is None:
                self._heed_last_word()
                continue
            if self._live(membership) != tried:
                return membership
            known = membership.epoch
        return None

    def _look_for_roll_call(self) -> None:
        """In the watch's thread: a rank that has waited too long wakes all others."""
        epoch = self.epoch
        if self._roll is None or self._roll[0] is not epoch:
            self._roll = epoch, epoch.control.client("roll call")
        if self._called is not epoch and is_called(self._roll[1]):
            self._called = epoch
            self._interrupt()

    def _stalled_are_ended(self) -> bool:
        """Call the roll, or answer to it. Return whether live ranks stand still, which the launcher ends."""
        epoch, rank = self.epoch, self._layout.rank

        def known() -> bool:
            self._heed_last_word()
            newest = self._watch.newest
            return newest is not None and self._live(newest) != epoch.live

        with epoch.control.lent("roll call", self._timeout_s) as store:
            stalled = answer_roll(store, self._layout, epoch.live, self._timeout_s, known)
        if stalled is not None and rank == min(epoch.live.difference(stalled.ranks)):
            self._watch.report(stalled)
        return stalled is not None or known()

    def _meet(self, epoch: Epoch) -> Agreement:
        """Hand in this rank's state; what all begin with. Raises EpochEndedError if there is yet another membership."""
        with epoch.control.lent("meeting", self._timeout_s) as store:
            return self._meet_at(store, epoch)

    def _meet_at(self, store: SealedStore, epoch: Epoch) -> Agreement:
        rank = self._layout.rank
        kept = packed_results(dict(self._groups.kept()))
        state = RankState(self._attempted, kept)
        store.set(f"state/{rank}", packed(state))
        if rank == min(epoch.live):
            found = [
                unpacked(self._read(store, f"state/{each}", epoch), RankState, MOST_NBYTES)
                for each in sorted(epoch.live)
            ]
            store.set("agreement", packed(agreed(found, self._forced)))
        agreement: Agreement = unpacked(self._read(store, "agreement", epoch), Agreement, MOST_NBYTES)
        return agreement

    def _read(self, store: SealedStore, key: str, epoch: Epoch) -> bytes:
        def check() -> None:
            self._heed_now_and_then()
            newest = self._watch.newest
            if newest is not None and newest.epoch > epoch.number and self._live(newest) != epoch.live:
                raise EpochEndedError(f"epoch {epoch.number} ended while its ranks met")

        try:
            return awaited(lambda: store.peek(key), self._timeout_s, check)
        except TimeoutError as cause:
            raise UnrecoverableError(
                f"{self._layout.name(self._layout.rank)} has waited {self._timeout_s:g} s (--adaptra-timeout-s) in "
                f"vain for {key} of the ranks that live in epoch {epoch.number}; look at the first whose log stops"
            ) from cause

    def _live(self, membership: Membership) -> frozenset[int]:
        return live_ranks(self._layout, membership, self.epoch.admitted)

    def _epoch_of(self, membership: Membership) -> Epoch:
        """The next epoch. What the job does not outlive is made known to all others: to those that do not see it
        themselves, and those that are started again. Raises as `epoch_of` and `_refuse_lost_shards`."""
        try:
            epoch = epoch_of(self._layout, self._control, membership, self.epoch)
            self._refuse_lost_shards(epoch)
        except JobLostError as lost:
            say_error(self._store, self._layout.name(self._layout.rank), lost)
            raise
        return epoch

    def _refuse_lost_shards(self, epoch: Epoch) -> None:
        """Raise JobLostError where a shard of the optimizer's state is gone."""
        if lost := self._groups.lost_shards(epoch.live):
            name = self._layout.name
            held = "; ".join(
                f"{name(owner)} and of its copy at {' and '.join(map(name, rest))}" for owner, *rest in lost
            )
            raise JobLostError(f"all are dead that held the optimizer's state of {held}: {RESTART}")

    def _forced(self, attempt: str) -> str:
        return str(self._store.compare_set(f"fate/{attempt}", "", REDO).decode())

    def _heed_now_and_then(self) -> None:
        if time.monotonic() - self._heeded_s > _HEED_S:
            self._heed_last_word()
            self._heeded_s = time.monotonic()

    def _heed_last_word(self) -> None:
        heed(self._store, self._layout.name(self._layout.rank))

    def end_with(self, error: BaseException, *, printed: bool = False) -> None:
        """Have the other ranks end with this rank's own error, which is logged first unless Python has `printed` it.
        In a forked child nothing: the connection to the store is its parent's."""
        if not self._owner.is_this:
            return
        if isinstance(error, Exception) and not isinstance(
            error, (OtherRankError, UnrecoverableError, SilentStoreError)
        ):
            say_error(self._store, self._layout.name(self._layout.rank), error, printed=printed)

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """As `sys.excepthook`: what ends this process outside of calls is an error of its own, too."""
        self._hooked(kind, error, trace)
        self.end_with(error, printed=True)

    # Who lives.

    def _changed(self, membership: Membership) -> None:
        """In the watch's thread: a new membership."""
        self._latest = membership
        if self._live(membership) == self.epoch.live:
            return
        self._interrupt()

    def _interrupt(self) -> None:
        self._groups.ended.set()
        for callback in self._callbacks:
            callback()
