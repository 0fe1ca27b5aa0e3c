# SPDX-License-Identifier: Apache-2.0
"""Log of the order in which replicas arrive: a list in the job's store, to which each replica appends.

No rank decides for others: each reads the list in a thread, and computes the same updates (`update_order`) and
the same modes from it.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed import DistStoreError

from adaptra_megatron.common.control_store import ControlStore, DeadlineStore
from adaptra_megatron.common.foreign_errors import is_store_timeout
from adaptra_megatron.common.gathering import epoch_group
from adaptra_megatron.common.log import logger_of
from adaptra_megatron.gradsync.mode_decider import Gradient, ModeDecider
from adaptra_megatron.gradsync.peer_messages import PeerError
from adaptra_megatron.gradsync.sync_modes import ModeKind
from adaptra_megatron.gradsync.update_order import CatchUp, Event, Handover, Update, Updates

_CLOSE_S = 2.0
"""Longest wait of closing for a thread to end."""
logger = logger_of(__name__)


# A watch under --adaptra-sync-mode: replicas see at once when one of them is killed, and stop.
# They see it also while they wait for something else. Jobs that survive rank failures learn it from the launcher:
# `elastic.failure_detection`.

_FAREWELL_TAG = 0
_AGES = timedelta(days=3650)
"""Time limit of a wait for another rank's end, in a thread of its own: longer than any training."""


class DeathWatch:
    """Detects the failure of one other rank: ranks form a ring, and each watches the next by a connection.

    The kernel closes the connection when the process ends. The connection stays open if the process is stopped
    (SIGSTOP) or slow, or its host is cut off; timeouts elsewhere detect those cases.
    """

    def __init__(
        self,
        control: ControlStore,
        name: str,
        ranks: Sequence[int],
        rank: int,
        timeout_s: float,
        died: Callable[[int], None],
    ) -> None:
        """Connect the ring. All of `ranks` (2 or more global ranks) call this at about the same time.

        `died`: called in a thread, with the rank that ended without a farewell. Raises RuntimeError if one does not
        come within `timeout_s`.
        """
        own = ranks.index(rank)
        self._before = (own - 1) % len(ranks)
        self._watched, behind = ranks[(own + 1) % len(ranks)], (own + 1) % len(ranks)
        self._died, self._timeout_s = died, timeout_s
        self._closed = False
        self._group: Any = epoch_group(control, name, ranks, rank, timeout_s)
        self._farewell = self._group.recv([torch.zeros(1)], behind, _FAREWELL_TAG)
        self._thread = threading.Thread(target=self._watch, name="adaptra-deaths", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send a farewell to the rank that watches this one."""
        self._closed = True
        try:
            self._group.send([torch.zeros(1)], self._before, _FAREWELL_TAG).wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as cause:  # it is gone
            logger.debug("says no farewell: %s", cause)
        self._thread.join(_CLOSE_S)

    def _watch(self) -> None:
        try:
            self._farewell.wait(_AGES)
        except RuntimeError as cause:
            logger.debug("rank %d has gone: %s", self._watched, cause)
            if not self._closed:
                self._died(self._watched)


_PLACE = "updates"
_BEGUN, _ARRIVED, _MET, _LEFT, _DIED = "begun", "arrived", "met", "left", "died"
"""Kinds of records."""
_EXPLAINED_S = 3.0
"""Time limit for the list to name the failed rank after a sum has failed."""


Carry = Callable[[Handover, int, bool], None]
"""Sends or receives parameters and optimizer state of a version, as one end of a handover.

If the last argument is True, the target's gradient goes to the source in exchange, which uses it in its next update.
"""


class UpdateLog:
    """One rank's access to the log. One thread calls `begin`, `hand_in`, `meet`, `reached` and `close`.

    If a rank fails or is killed, the others stop with an error that names it. A rank that is stalled, or whose host is
    cut off, is named once its replica has been silent for the timeout.
    """

    def __init__(
        self,
        control: ControlStore,
        replicas: Sequence[int],
        own: int,
        rank: int,
        *,
        leads: bool,
        kinds: Iterable[ModeKind],
        max_staleness: int,
        timeout_s: float,
        carry: Carry,
    ) -> None:
        """`replicas`: a global rank of each, for messages. `own`: index of this rank's replica. `timeout_s`: longest
        wait for other replicas, including stragglers. `carry`: called in the thread.

        `leads`: True on the one rank of the replica that appends to the list, which is the last one to have complete
        gradients.
        """
        self._replicas, self._own, self._rank, self._leads = tuple(replicas), own, rank, leads
        self._timeout_s, self._carry = timeout_s, carry
        self._updates = Updates(len(replicas), max_staleness)
        self._decider = ModeDecider(len(replicas), kinds, max_staleness)
        self._reader, self._seal = control.unsealed(_PLACE), control.seal(_PLACE)
        self._writer = DeadlineStore(lambda: control.unsealed(_PLACE), timeout_s)
        self._read = 0
        self._reached = self._handed_in = self._own_arrivals = 0
        self._changed = threading.Condition()
        self._closing = False
        self._found: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._follow, name="adaptra-updates", daemon=True)
        self._thread.start()
        place = f"{_PLACE}/deaths/{self._replicas[0]}"
        self._watch = DeathWatch(control, place, self._replicas, rank, timeout_s, self._has_died)

    def begin(self) -> None:
        """Report that this replica computes with the parameters of its last update. Raises SilentStoreError.

        The first member of each update without all replicas must report this.
        """
        if self._leads:
            self._add([_BEGUN, self._own])

    def hand_in(self, gradient: Gradient) -> None:
        """Report that this replica has a gradient; `next` returns the event that follows. Raises SilentStoreError."""
        with self._changed:
            self._handed_in += 1
            self._changed.notify_all()
        if self._leads:
            self._add([_ARRIVED, self._own, *gradient])

    def meet(self) -> None:
        """Report that this replica is at a meeting; `next` returns once all are. Raises SilentStoreError."""
        if self._leads:
            self._add([_MET, self._own])

    def next(self) -> Event:
        """Return the next event that concerns this replica. Raises PeerError if other replicas are silent for the
        timeout.
        """
        try:
            found = self._found.get(timeout=self._timeout_s)
        except queue.Empty:
            raise PeerError(
                f"rank {self._rank}: no update was made for {self._timeout_s:g} s: replicas of "
                f"{self._ranks(self._updates.absent or self._updates.missing)} have died or do not answer; look into "
                "their logs and restart from the last checkpoint"
            ) from None
        if isinstance(found, BaseException):
            self._found.put(found)  # for the next call, too
            raise found
        return found

    def failure(self) -> BaseException | None:
        """Return why a sum has failed, waiting a moment for the list to show it; `next` raises it, too."""
        try:
            found = self._found.get(timeout=_EXPLAINED_S)
        except queue.Empty:
            return None
        self._found.put(found)
        return found if isinstance(found, BaseException) else None

    def reached(self, version: int) -> None:
        """Record that this rank's parameters are those of `version`, until its next update."""
        with self._changed:
            self._reached = version
            self._changed.notify_all()

    def close(self) -> None:
        """Leave the log, and end the thread."""
        if self._closing:
            return
        self._closing = True
        self._watch.close()
        try:
            self._add([_LEFT, self._own, self._rank])
        except RuntimeError as cause:  # the store has ended before this rank: then the thread has, too
            logger.debug("leaves without a word: %s", cause)
        self._thread.join(_CLOSE_S)
        self._writer.close()

    def _add(self, record: list[Any]) -> None:
        """Append a record, even if other replicas append at the same time."""
        value, place = json.dumps(record).encode(), self._read
        while True:
            key = str(place)
            closed = self._seal.closed(key, value)
            if self._writer.compare_set(key, b"", closed) == closed:
                return
            place += 1

    def _follow(self) -> None:
        try:
            while self._take(self._next_record()):
                pass
        except BaseException as error:  # raised by `next`
            self._found.put(error)

    def _next_record(self) -> list[Any]:
        key = str(self._read)
        while True:
            try:
                self._reader.wait([key], timedelta(seconds=self._timeout_s))
                break
            except DistStoreError as silence:
                if not is_store_timeout(silence):
                    raise
                # `next` has a deadline of its own, and a replica may compute for longer.
        record: list[Any] = json.loads(self._seal.opened(key, self._reader.get(key)))
        self._read += 1
        return record

    def _take(self, record: list[Any]) -> bool:
        """Process one record; return False if it is this rank's last."""
        what, replica, *rest = record
        if what in (_LEFT, _DIED):
            return self._gone(int(rest[0]), died=what == _DIED)
        if what == _BEGUN:
            self._updates.begins(replica)
        elif what == _ARRIVED:
            self._own_arrivals += replica == self._own
            self._decider.arrived(replica, Gradient(*rest))
            self._deliver(self._updates.arrives(replica))
        else:
            self._deliver(self._updates.meets(replica))
        while (update := self._updates.next_update()) is not None:
            self._deliver([update])
            self._decide(update)
        return True

    def _has_died(self, rank: int) -> None:
        self._add([_DIED, self._own, rank])

    def _gone(self, rank: int, *, died: bool) -> bool:
        if rank == self._rank:
            return False
        how = (
            "its process has ended without a farewell, as if killed"
            if died
            else "it has left the training; if that was not its end"
        )
        self._found.put(
            PeerError(
                f"rank {self._rank}: no further updates are made without rank {rank}: {how}, look into its log and "
                "restart from the last checkpoint"
            )
        )
        return True

    def _decide(self, update: Update) -> None:
        chosen = self._decider.decide(update)
        if chosen is None or chosen.mode == self._updates.mode:
            return
        self._updates.mode = chosen.mode
        if self._leads and self._own == 0:
            logger.info(
                "updates are made by %s from update %d on: predicted %.1f ms per update, %.2f gradients in each; "
                "replicas take %s ms, noise scale %.3g batches of a replica",
                chosen.mode,
                self._updates.version,
                1e3 * chosen.pace.update_s,
                chosen.pace.gradients,
                " ".join(f"{1e3 * time_s:.0f}" for time_s in self._decider.times_s or ()),
                self._decider.noise,
            )

    def _deliver(self, events: Iterable[Event]) -> None:
        for event in events:
            gives = isinstance(event, CatchUp)
            for handover in getattr(event, "handovers", ()):
                if self._own == handover.source:
                    self._wait(partial(self._has_reached, event.version), f"parameters of update {event.version}")
                if self._own == handover.target and gives:
                    # Where it comes from several ranks, this one may have to finish its part.
                    self._wait(lambda: self._handed_in >= self._own_arrivals, "gradient")
                if self._own in handover:
                    self._carry(handover, event.version, gives)
                if self._own == handover.target:
                    self.reached(event.version)
            if isinstance(event, Update):
                concerned = self._own in event.members
            else:
                concerned = not isinstance(event, CatchUp) or event.replica == self._own
            if concerned:
                self._found.put(event)

    def _has_reached(self, version: int) -> bool:
        return self._reached == version

    def _wait(self, come: Callable[[], bool], what: str) -> None:
        with self._changed:
            if not self._changed.wait_for(come, self._timeout_s):
                raise PeerError(
                    f"rank {self._rank}: others wait for its {what}, which it has not made within "
                    f"{self._timeout_s:g} s: it has the parameters of update {self._reached}"
                )

    def _ranks(self, replicas: Sequence[int]) -> str:
        return " and ".join(f"rank {self._replicas[each]}" for each in replicas) or "no rank"
