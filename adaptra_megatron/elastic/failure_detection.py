# SPDX-License-Identifier: Apache-2.0
"""Detect that ranks have failed: the launcher's membership is read in a thread, which interrupts training.

A liveness check finds stalled ranks: processes that are stopped, or hang in a driver, while their hosts report. The
first rank that has waited longer than the job's timeout, while the launcher knows of no failure, requests it. All
running ranks interrupt their waits and respond. The launcher ends the ranks that have not responded within the timeout,
and from then on they count as failed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping

from torch.distributed import DistError

from adaptra_megatron.common.control_store import ControlStore, SilentStoreError
from adaptra_megatron.common.layout import JobLayout
from adaptra_megatron.common.log import logger_of
from adaptra_megatron.common.membership import Membership, MembershipRecords, Stalled
from adaptra_megatron.common.sealed_store import MOST_NBYTES, SealedStore, TamperedError
from adaptra_megatron.common.typed_messages import packed, unpacked
from adaptra_megatron.elastic.generation import Generation, live_ranks
from adaptra_megatron.elastic.protocol_store import POLLS_PER_S

logger = logger_of(__name__)

_CONNECT_S, _STARTUP_POLL_S = 60.0, 0.5


class StartupFailureMonitor:
    """Ends this process if a rank fails before the first iteration, under a launcher that reports failures."""

    def __init__(self) -> None:
        self._closed = threading.Event()
        threading.Thread(target=self._work, name="adaptra-early-watch", daemon=True).start()

    def close(self) -> None:
        """End the thread; RecoveryManager handles failures from now on."""
        self._closed.set()

    def _work(self) -> None:
        try:
            records = MembershipRecords.of_rank(_CONNECT_S)
            while not self._closed.wait(_STARTUP_POLL_S):
                membership = records.newest()
                if membership is None or self._closed.is_set():
                    return
                if membership.left:
                    whys = "; ".join(f"rank {each.rank} on host {each.host}: {each.why}" for each in membership.left)
                    logger.error(
                        "%s, before the first iteration: the ranks do not know each other yet, so the job ends; "
                        "nothing has been trained, start it again",
                        whys,
                    )
                    os._exit(1)  # the training thread waits in the store or in a collective for minutes
        except (KeyError, RuntimeError):  # no launcher of ours, or its store is gone: training will say so
            return


_RESPONSE_POLL_S, _TURN_S = 0.1, 0.25
"""Poll interval, and time after the timeout that each rank leaves to the ranks before it."""


def is_requested(store: SealedStore) -> bool:
    """Return whether a rank has requested a liveness check in the generation of `store`."""
    return store.peek("called") is not None


def answer_liveness_check(
    store: SealedStore,
    layout: JobLayout,
    live: frozenset[int],
    admitted: Mapping[int, int],
    timeout_s: float,
    check: Callable[[], bool],
) -> Stalled | None:
    """Request a liveness check, or respond to one, and wait for the response of all `live` ranks.

    Returns the ranks that have not responded within `timeout_s`, for the launcher; the same on all ranks. Returns None
    if all have, if fewer than half have, or once `check` returns True: the live ranks have changed. `admitted`: see
    `Generation`. Raises TamperedError, and RuntimeError if the store cannot be reached.
    """

    def missing_ranks() -> tuple[int, ...]:
        return tuple(rank for rank in sorted(live) if store.peek(f"here/{rank}") is None)

    # Requesting and responding are one step, since several ranks may reach the timeout at once.
    store.set("called", b"called")
    store.set(f"here/{layout.rank}", b"here")
    # In turn: to look for all ranks takes a request for each, and if all did so at once, the store of a large job would
    # be busy for minutes. The first result counts for all: a stalled rank may wake up meanwhile.
    due_s = time.monotonic() + timeout_s + _TURN_S * sorted(live).index(layout.rank)
    # The counter is not sealed: it decides only which rank looks before the timeout, so that not all ranks do.
    if store.add("answers", 1) == len(live) and not missing_ranks():
        store.put_once("missing", packed(()))
    while (found := store.peek("missing")) is None:
        if check():
            return None
        if time.monotonic() > due_s:
            found = store.put_once("missing", packed(missing_ranks()))
            break
        time.sleep(_RESPONSE_POLL_S)
    missing: tuple[int, ...] = unpacked(found, tuple[int, ...], MOST_NBYTES)
    # If fewer than half respond, this rank is likely in the smaller part of a split network: it must not end the
    # others.
    if not missing or 2 * len(missing) > len(live):
        return None
    names = ", ".join(map(layout.name, missing))
    logger.warning(
        "%s: no answer for %.1f s, though no process has ended; the launcher ends stalled ranks, and the other %d "
        "ranks go on",
        names,
        2 * timeout_s,
        len(live) - len(missing),
    )
    why = f"stalled: {len(live) - len(missing)} other ranks waited for {2 * timeout_s:.1f} s"
    return Stalled(missing, why, admitted)


ABORT_POLL_S = 0.2
"""Interval at which a waiting rank checks for an error that ends the job."""
_LOOKED_S, _REACHED_S = 1.0, 5.0
_LOOKS_S = 0.05
"""Shortest interval at which the membership is read."""


class FailureDetector:
    """Interrupts the training thread as soon as the live ranks differ from those of its generation, and then finds out
    who lives.

    A thread reads the launcher's membership from the job's store, from construction to `close`. The other methods are
    for the training thread.
    """

    def __init__(
        self,
        layout: JobLayout,
        control: ControlStore,
        records: MembershipRecords,
        timeout_s: float,
        patience_s: float,
        generation: Callable[[], Generation],
        interrupt: Callable[[], None],
        check_abort: Callable[[], None],
    ) -> None:
        """Start the thread.

        `timeout_s`, `patience_s`: see RecoveryManager. `generation`: returns the present one. `interrupt`: ends the
        training thread's waits. `check_abort`: raises once another rank's error ends the job.
        """
        self._layout, self._control, self._records = layout, control, records
        self._timeout_s, self._patience_s = timeout_s, patience_s
        self._generation, self._interrupt, self._check_abort = generation, interrupt, check_abort
        self._liveness: tuple[Generation, SealedStore] | None = None
        """The present generation and its store of liveness checks, for the thread."""
        self._requested: Generation | None = None
        """The last generation with a liveness check."""
        self._reports: list[tuple[float, Stalled]] = []
        """Stalled ranks that are still to be reported, and when."""
        self._tampered: TamperedError | None = None
        """Ended the thread, and is to end the job."""
        self._latest = self._newest = records.newest()
        """`_latest` is set before the membership is compared, `_newest` after training has been interrupted."""
        self._interrupting = threading.Lock()
        """Held from a look at the present generation to the interruption that follows from it: it must not hit the next
        generation, whose ranks would wait in vain for a change."""
        self._news = threading.Condition()
        self._closed, self._look = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="adaptra-membership", daemon=True)
        self._thread.start()

    @property
    def newest(self) -> Membership | None:
        """The latest known membership. Raises TamperedError once the thread has found a tampered record."""
        with self._news:
            if self._tampered is not None:
                raise self._tampered
            return self._newest

    def enter(self, begin: Callable[[], None]) -> None:
        """Enter the groups of a new generation by `begin`, which forgets that the one before has ended.

        Interrupt the training thread at once if live ranks differ already: their membership may have come before.
        """
        with self._interrupting:
            begin()
            self._compare()

    def _compare(self) -> None:
        """Interrupt the training thread if live ranks differ from its generation's, or the job is to end. The caller
        holds the lock.
        """
        changed = self._latest is not None and self._live(self._latest) != self._generation().live
        if changed or self._tampered is not None:
            self._interrupt()

    def change(self, tried: frozenset[int]) -> Membership | None:
        """Wait for a membership whose live ranks differ from those `tried` last, and return it.

        If there is none within the patience, check the liveness of all ranks and wait again; None if there is none
        then. Raises the errors of `check_abort` and `newest`.
        """
        membership = self._await_change(tried)
        if membership is None and self._stalled_are_ended():
            membership = self._await_change(tried, checked=True)
        return membership

    def report(self, stalled: Stalled, after_s: float = 0.0) -> None:
        """Report stalled ranks to the launcher, which ends them, after `after_s` or as this detector is closed."""
        self._reports.append((time.monotonic() + after_s, stalled))
        self._look.set()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._look.set()
        self._thread.join(timeout=2.0)

    def _await_change(self, tried: frozenset[int], *, checked: bool = False) -> Membership | None:
        """Return the membership that `change` waits for; None if there is none within the patience.

        Returns None early once a liveness check begins, unless one had begun before (`checked`).
        """
        # A broken connection shows in milliseconds; the launcher needs longer to see a process end, or a host fall
        # silent.
        deadline_s, known = time.monotonic() + self._patience_s, -1
        while (left_s := deadline_s - time.monotonic()) > 0 and (checked or self._requested is not self._generation()):
            membership = self._beyond(known, min(left_s, ABORT_POLL_S))
            if membership is None:
                self._check_abort()
                continue
            if self._live(membership) != tried:
                return membership
            # The new epoch does not change who is live: a rank is ready again, or one of a dead cell has left.
            known = membership.epoch
        return None

    def _beyond(self, epoch: int, timeout_s: float) -> Membership | None:
        """Return the newest membership once its epoch is after `epoch`; None if there is none within `timeout_s`."""
        self._look.set()

        def is_beyond() -> bool:
            return (newest := self.newest) is not None and newest.epoch > epoch

        with self._news:
            return self._newest if self._news.wait_for(is_beyond, timeout_s) else None

    def _stalled_are_ended(self) -> bool:
        """Request a liveness check, or respond to it. Return whether live ranks are stalled; the launcher ends them."""
        generation, rank = self._generation(), self._layout.rank

        def known() -> bool:
            self._check_abort()
            newest = self.newest
            return newest is not None and self._live(newest) != generation.live

        with self._control.in_generation(generation.id).lent("liveness check", self._timeout_s) as store:
            stalled = answer_liveness_check(
                store, self._layout, generation.live, generation.admitted, self._timeout_s, known
            )
        if stalled is not None and rank == min(generation.live.difference(stalled.ranks)):
            self.report(stalled)
        return stalled is not None or known()

    def _live(self, membership: Membership) -> frozenset[int]:
        return live_ranks(self._layout, membership, self._generation().admitted)

    # In the thread.

    def _work(self) -> None:
        epoch = -1 if self._newest is None else self._newest.epoch
        every_s = _LOOKS_S + (0 if self._newest is None else self._newest.world_size) / POLLS_PER_S
        looked_s = time.monotonic()
        while True:
            self._look.wait(every_s)
            self._look.clear()
            closed = self._closed.is_set()
            try:
                for each in [each for each in self._reports if closed or each[0] < time.monotonic()]:
                    self._records.report(each[1])
                    self._reports.remove(each)
                if closed:
                    return
                if time.monotonic() - looked_s > _LOOKED_S:
                    try:
                        self._look_for_liveness_check()
                    except (DistError, SilentStoreError):  # of a connection that it makes in each generation
                        self._liveness = None
                    looked_s = time.monotonic()
                found = self._records.newest()
            except TamperedError as cause:
                self._tampered = cause  # the training thread raises it where it waits for a membership
                with self._interrupting:
                    self._compare()
                return
            except RuntimeError as cause:
                logger.warning("the launcher's store does not answer: failures are not detected any more: %s", cause)
                return
            if found is None or found.epoch <= epoch:
                continue
            epoch = found.epoch
            # First: the interruption must not hit training that has begun with the new set.
            self._latest = found
            with self._interrupting:
                self._compare()
            with self._news:
                self._newest = found
                self._news.notify_all()

    def _look_for_liveness_check(self) -> None:
        """Interrupt the training thread once another rank has requested a liveness check."""
        generation = self._generation()
        if self._liveness is None or self._liveness[0] is not generation:
            store = self._control.in_generation(generation.id).client("liveness check", _REACHED_S)
            self._liveness = generation, store
        if self._requested is not generation and is_requested(self._liveness[1]):
            with self._interrupting:
                if self._generation() is generation:
                    self._requested = generation
                    self._interrupt()
