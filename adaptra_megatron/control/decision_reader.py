# SPDX-License-Identifier: Apache-2.0
"""What a rank that follows does beside its training, which never asks the job's store for anything itself."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from adaptra_megatron.authentication.sealed_store import SealedStore
from adaptra_megatron.control.decision_writer import DELAY
from adaptra_megatron.control.decisions import Decision, decision_of
from adaptra_megatron.control.measurements import StageMeasurement
from adaptra_megatron.control.rounds import hand_in

Found = TypeVar("Found")

LOOK_UP_S = 1.0
"""How long a thread that asks the store, and is to end, is waited for, and how often it looks at what else there is."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.25
"""Between two looks into the store, which all ranks share; each is half as long again as the one before."""
_SOONER = 0.97
"""Share of the usual time after which to look next time, if it was there at the first look: it may be there sooner."""
_LATER = 1.25
"""Multiple of the usual time for what the training, an iteration behind, does not wait for yet."""
_LONGEST_USUAL_S = 2.0


def decision_key(iteration: int) -> str:
    """Under which the decision of an iteration is in the store."""
    return f"decision/{iteration}"


def order_key(number: int, cell: str) -> str:
    """Under which the order of a cell ("replica.stage") under the routes of this number is."""
    return f"routed/{number}/{cell}"


class Watch:
    """Waits for what gets into the store again and again, with few looks: at about the time when it was there before.

    A wait of the store's own that expires writes warnings of a broken network into the log.
    """

    def __init__(
        self, closed: threading.Event, pause: Callable[[float], bool] | None = None, later: float = 1.0
    ) -> None:
        """`closed`: ends each wait. `pause`: waits for so many seconds at most, or until the next look is urgent, which
        it says, and pauses begin anew; None: for `closed` alone. `later`: multiple of the time when it was there, for
        the first look next time: fewer looks where nothing waits for it."""
        self._closed, self._pause, self._later = closed, pause or closed.wait, later
        self._usual_s = 0.0

    def wait(self, look: Callable[[], Found | None], limit_s: float = math.inf, *, late: bool = False) -> Found | None:
        """What `look` finds, or None if that is nothing within `limit_s`, or before the end. Raises what it raises.
        `late`: whether to look at once, for it is to be there already."""
        begun_s, looks = time.monotonic(), 0
        pause_s = first_pause_s = max(_FIRST_PAUSE_S, self._usual_s / 8)
        if not late:
            self._pause(self._usual_s)
        while not self._closed.is_set():
            found = look()
            looks += 1
            took_s = time.monotonic() - begun_s
            if found is not None:
                usual_s = _SOONER * self._usual_s if looks == 1 else self._later * took_s
                self._usual_s = min(usual_s, _LONGEST_USUAL_S)
                return found
            if took_s >= limit_s:
                return None
            pause_s = first_pause_s if self._pause(pause_s) else min(1.5 * pause_s, _LONGEST_PAUSE_S)
        return None


class DecisionReader:
    """A following rank's thread: hands in what was measured, and reads each decision as soon as there can be one."""

    def __init__(self, store: SealedStore, timeout_s: float, cell: str) -> None:
        """`store`: a client of its own, because it answers one request at a time. `timeout_s`: how long a decision may
        be waited for. `cell`: this rank's, "replica.stage"."""
        self._store, self._timeout_s, self._cell = store, timeout_s, cell
        self._inbox: queue.SimpleQueue[tuple[int, StageMeasurement | None] | None] = queue.SimpleQueue()
        """Iterations with what was measured in them; or, without, whose decision the training waits for; None ends."""
        self._measured: deque[int] = deque()
        """Iterations that have been handed in, and whose decisions are to be read."""
        self._closed = threading.Event()
        self._news = threading.Condition()
        self._decisions: dict[int, Decision] = {}
        self._failure: RuntimeError | None = None
        self._thread = threading.Thread(target=self._work, name="adaptra-decisions", daemon=True)
        self._thread.start()

    def post(self, iteration: int, measurement: StageMeasurement) -> None:
        """Hand in what was measured, and read the decision that follows from it next; returns at once."""
        self._inbox.put((iteration, measurement))

    def published(self, iteration: int) -> Decision | None:
        """The decision of an expected iteration, if it is here; never waits."""
        with self._news:
            return self._decisions.get(iteration)

    def needed(self, iteration: int) -> Decision:
        """The decision of an expected iteration; earlier ones are forgotten.

        Raises RuntimeError if the store has failed, TimeoutError if it holds no decision until the timeout.
        """
        with self._news:
            if iteration not in self._decisions:
                self._inbox.put((iteration, None))
            self._news.wait_for(lambda: iteration in self._decisions or self._failure is not None, self._timeout_s)
            for earlier in [known for known in self._decisions if known < iteration]:
                del self._decisions[earlier]
            if iteration in self._decisions:
                return self._decisions[iteration]
            if self._failure is not None:
                raise self._failure
        raise TimeoutError("nothing was decided")

    def fail(self, cause: RuntimeError) -> None:
        """Let no decision be waited for any more: `needed` raises `cause`. For any thread."""
        with self._news:
            self._failure = cause
            self._news.notify_all()

    def close(self) -> None:
        """End the thread; after a decision that never came, within `LOOK_UP_S`."""
        self._closed.set()
        self._inbox.put(None)
        self._thread.join(timeout=2 * LOOK_UP_S)

    def _work(self) -> None:
        watch = Watch(self._closed, self._pause, _LATER)
        try:
            while not self._closed.is_set():
                if not self._measured:
                    self._pause(None)
                elif (decision := self._read(iteration := self._measured[0] + DELAY, watch)) is not None:
                    self._measured.popleft()
                    with self._news:
                        self._decisions[iteration] = decision
                        self._news.notify_all()
        except RuntimeError as error:
            self.fail(error)

    def _pause(self, pause_s: float | None) -> bool:
        """Until something comes, or for `pause_s`; whether the training now waits for the decision that is read."""
        try:
            item = self._inbox.get(timeout=pause_s)
        except queue.Empty:
            return False
        if item is None:
            return False
        iteration, measurement = item
        if measurement is None:
            return bool(self._measured) and iteration == self._measured[0] + DELAY
        hand_in(self._store, iteration, measurement)
        self._measured.append(iteration)
        return False

    def _read(self, iteration: int, watch: Watch) -> Decision | None:
        """None if told to end while there is none."""
        key = decision_key(iteration)
        found = watch.wait(lambda: self._store.peek(key))
        if found is None:
            return None
        try:
            decision = decision_of(found)
        except ValueError as cause:
            raise RuntimeError(f"the decision of iteration {iteration} cannot be read: {cause}") from cause
        routing = decision.routing
        if routing is None or not routing.number:
            return decision
        order = self._store.peek(order_key(routing.number, self._cell))  # put there before the decision
        if order is None:
            raise RuntimeError(f"the decision of iteration {iteration} has routes without an order for {self._cell}")
        return replace(decision, routing=replace(routing, orders={self._cell: order.decode()}))
