# SPDX-License-Identifier: Apache-2.0
"""Delay collectives, requests to the job's store, starts of threads, messages, and interruptions of the training thread
after failures, as on a machine with too few cores.

A delayed collective begins late, in its group's order, after its launching thread has continued, so it also writes
late. Delays are random (seeded), or one selected operation is delayed. The selected operation is held back until the
rank launches its successor in a group of a later generation, which is the worst moment for a late write.
"""

from __future__ import annotations

import functools
import itertools
import os
import queue
import random
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.futures import Future

from adaptra_megatron.common.membership import START_VARIABLE
from adaptra_megatron.transport.link_paths import Path as LinkPath
from testing.faults.emulated_compute import EmulationError
from testing.faults.network.link_faults import LinkFault
from testing.faults.operation_board import KINDS, LATE, UNDER_WAY, WAITING, OperationBoard
from testing.replacing import Replaced, Replacement

if TYPE_CHECKING:
    from adaptra_megatron.megatron.computation import StageComputation

FORM = (
    f"{{{','.join(KINDS)}}}:PROBABILITY:LONGEST_MS[:SEED]|RANK:ITERATION:{{in,out}}:{{NUMBER,GROUP}}:SECONDS"
    "|RANK:START:ready:SECONDS"
)
MARK = "late-operation"
"""File in the run's directory that is created when the delayed operation is launched."""
SUCCESSOR, IDLE = "it begins as its successor is launched", "it begins as the rank is idle"
"""Contents of that file: what released the operation."""
_OPERATIONS = (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "alltoall_base",
    "barrier",
    "broadcast",
    "reduce",
    "scatter",
)
_ENDS_S, _LOOKS_S = 10.0, 0.001
"""Longest wait of a successor for the end of the delayed operation, and poll interval."""
_THREADS = "adaptra-"
"""Prefix of the names of the product's threads."""


@dataclass(frozen=True)
class Lateness:
    """Random delay: a fraction `probability` of the operations of `kind`, each by a uniform time up to `longest_s`."""

    kind: str
    probability: float
    longest_s: float
    seed: int = 0


@dataclass(frozen=True)
class LateOperation:
    """Delay of one reduction of `rank` in iteration `iteration` (from 0): until its successor is launched in another
    generation, or until the rank has been idle for `idle_s`, as when it waits for this very operation."""

    rank: int
    iteration: int
    inside: bool
    """True: an operation within a call of Megatron's schedules."""
    which: int | str
    """Number of the operation there (from 0), or a part of its group's name: the first such."""
    idle_s: float


@dataclass(frozen=True)
class LateArrival:
    """Delay of the process of `rank` that was restarted `start` times.

    It becomes ready once other ranks wait for it (`deaths.Arrivals`), and so after their commit; or after `longest_s`.
    """

    rank: int
    start: int
    longest_s: float


AnyLateness = Lateness | LateOperation | LateArrival


def parse_lateness(text: str) -> AnyLateness:
    """Parse --emulate-late. Raises EmulationError for anything else."""
    if (found := re.fullmatch(rf"({'|'.join(KINDS)}):([\d.]+):(\d+)(?::(\d+))?", text)) is not None:
        return Lateness(found[1], float(found[2]), int(found[3]) / 1e3, int(found[4] or 0))
    if (found := re.fullmatch(r"(\d+):(\d+):(in|out):(\w+):([\d.]+)", text)) is not None:
        which = int(found[4]) if found[4].isdecimal() else found[4]
        return LateOperation(int(found[1]), int(found[2]), found[3] == "in", which, float(found[5]))
    if (found := re.fullmatch(r"(\d+):(\d+):ready:([\d.]+)", text)) is not None:
        return LateArrival(int(found[1]), int(found[2]), float(found[3]))
    raise EmulationError(f"--emulate-late {text!r} is not {FORM}, as collectives:0.05:250 or 5:2:in:DATA_PARALLEL:0.45")


def late_messages(late: Sequence[AnyLateness], stages: int) -> list[LinkFault]:
    """Return those of `late` that delay messages, on all links of a pipeline and both paths."""
    ends = [(one, other) for one, other in itertools.permutations(range(stages), 2) if (one - other) % stages != 0]
    return [
        LinkFault(
            source=source,
            target=target,
            jitter_s=each.longest_s,
            share=each.probability,
            seed=each.seed,
            paths=frozenset(LinkPath),
        )
        for each in late
        if isinstance(each, Lateness) and each.kind == "messages"
        for source, target in ends
    ]


class LateRank:
    """Delays of one rank, active within its context.

    Enter it before process groups are created. The training reports each iteration and each call of Megatron's
    schedules.
    """

    def __init__(self, late: Sequence[AnyLateness], directory: Path, rank: int, world_size: int) -> None:
        """`directory`: of this run, with the counters; the same on all ranks."""
        self.board = OperationBoard(directory, rank, world_size)
        self.reduction_begins: Callable[[], None] = lambda: None
        """Called when a reduction over data-parallel ranks has been launched in a call."""
        self._mark = directory / MARK
        start = os.environ.get(START_VARIABLE, "")
        self._chances = {
            kind: [
                (each, random.Random(f"{each.seed}/{kind}/{rank}/{start}"))
                for each in late
                if isinstance(each, Lateness) and each.kind == kind
            ]
            for kind in KINDS
        }
        self._ours = [each for each in late if isinstance(each, LateOperation) and each.rank == rank and not start]
        arrivals = [each for each in late if isinstance(each, LateArrival)]
        self._arrival = next((each for each in arrivals if (each.rank, str(each.start)) == (rank, start)), None)
        self._iteration, self._inside, self._reductions = -1, False, 0
        self._gone_on_s = time.monotonic()
        self._held: dict[str, tuple[int, HeldOnPurpose]] = {}
        """Delayed operation and torch's group number, by group name."""
        self._numbers = itertools.count()
        self._installed = ExitStack()

    def set_iteration(self, iteration: int) -> None:
        """Begin `iteration` (from 0)."""
        self._iteration, self._reductions = iteration, 0
        self.go_on()

    def go_on(self) -> None:
        """Record activity of the training thread, if this is that thread."""
        if threading.current_thread() is threading.main_thread():
            self._gone_on_s = time.monotonic()

    def decorate(self, computation: StageComputation) -> StageComputation:
        """Return `computation`, each action of which counts as activity."""
        from adaptra_megatron.megatron.computation import SurroundedComputation

        def begins(*_action: object) -> AbstractContextManager[None]:
            self.go_on()
            return nullcontext()

        return SurroundedComputation(computation, begins) if self._ours or self._held else computation

    @contextmanager
    def call(self) -> Iterator[None]:
        """Mark a call of Megatron's schedules, within which operations do not repeat by themselves."""
        self._inside, self._reductions = True, 0
        try:
            yield
        finally:
            self._inside, self._reductions = False, 0

    def __enter__(self) -> LateRank:
        from adaptra_megatron.common.control_store import ControlStore
        from adaptra_megatron.elastic.process_group_manager import FaultTolerantGroups
        from adaptra_megatron.elastic.recovery import RecoveryManager
        from adaptra_megatron.elastic.rejoin import RejoiningRank

        reason = "what is emulated is late"
        replaced = [
            Replacement(
                FaultTolerantGroups, "_make_native", self._late_groups(FaultTolerantGroups._make_native), reason
            )
        ]
        lent = contextmanager(self._late_lent(ControlStore.lent))
        replaced.append(Replacement(ControlStore, "lent", lent, reason))
        if self._chances["store"]:
            for name in ("client", "punctual"):
                value = self._late_store(getattr(ControlStore, name))
                replaced.append(Replacement(ControlStore, name, value, reason))
        if self._chances["threads"]:
            value = self._late_start(threading.Thread.start)
            replaced.append(Replacement(threading.Thread, "start", value, reason))
        if self._chances["interruptions"]:
            value = _delayed(RecoveryManager._interrupt, functools.partial(self._delay_s, "interruptions"))
            replaced.append(Replacement(RecoveryManager, "_interrupt", value, reason))
        if self._arrival is not None:
            value = self._late_arrival(RejoiningRank.stand_ready, self._arrival.longest_s)
            replaced.append(Replacement(RejoiningRank, "stand_ready", value, reason))
        self._installed.enter_context(Replaced(replaced))
        return self

    def __exit__(self, *_: object) -> None:
        self._installed.close()

    def when_marked(self, act: Callable[[], object]) -> None:
        """Register `act`, which another thread calls once any rank has launched the delayed operation."""

        def watch() -> None:
            while not self._mark.exists():
                time.sleep(_LOOKS_S)
            act()

        threading.Thread(target=watch, name="late-mark", daemon=True).start()

    # Collectives.

    def _late_groups(self, make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def made(groups: Any, description: str, members: tuple[int, ...], device: str, control: Any) -> Any:
            native, sockets = make(groups, description, members, device, control)
            if device != "cpu":
                return native, sockets
            others = [rank for rank in members if rank != groups.rank]
            return LateGroup(native, description, next(self._numbers), self, others), sockets

        return made

    def hold(self, group: str, number: int, operation: str, others: Collection[int] = ()) -> Held | None:
        """Return the delay of an operation that is being launched; None to begin at once.

        `number`: of torch's group; each generation has another. `others`: the other ranks of the operation.
        """
        self.go_on()
        reduces, count = operation.startswith("allreduce"), self._reductions
        if reduces and group in self._held and self._held[group][0] != number:
            self._held.pop(group)[1].write_now()
        self._reductions += reduces
        name = f"{group} in iteration {self._iteration}, {'inside' if self._inside else 'outside'}"
        if reduces:
            self.board.note_launch(name)
        for each in [each for each in self._ours if reduces]:
            chosen = each.which == count if isinstance(each.which, int) else each.which in group
            if chosen and (each.iteration, each.inside) == (self._iteration, self._inside):
                self._ours.remove(each)
                launched = functools.partial(self.board.have_launched, name, others)
                held = HeldOnPurpose(
                    name, each.idle_s, launched, lambda: time.monotonic() - self._gone_on_s, self._mark
                )
                self._held[group] = number, held
                self.board.add("collectives")
                return held
        delay_s = self._delay_s("collectives")
        return Held(delay_s) if delay_s else None

    def launched(self, group: str, operation: str) -> None:
        """Record that an operation has been launched."""
        if self._inside and operation.startswith("allreduce") and "DATA_PARALLEL" in group:
            self.reduction_begins()

    # What else is late.

    def _delay_s(self, kind: str) -> float:
        """Draw the delay of the next operation of `kind`, in seconds, and count it."""
        delay_s = sum(
            chance.random() * each.longest_s
            for each, chance in self._chances[kind]
            if chance.random() < each.probability
        )
        if delay_s:
            self.board.add(kind)
        return delay_s

    def _late_store(self, make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def made(*given: Any, **keywords: Any) -> Any:
            return LateStore(make(*given, **keywords), self._delay_s)

        return made

    def _late_lent(self, lend: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
        @functools.wraps(lend)
        def lent(control: Any, place: str, timeout_s: float, *, sealed: bool = True) -> Iterator[Any]:
            self.go_on()
            with lend(control, place, timeout_s, sealed=sealed) as store:
                # torch's C++ wants torch's own
                yield LateStore(store, self._delay_s) if sealed and self._chances["store"] else store

        return lent

    def _late_start(self, start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
        @functools.wraps(start)
        def begun(thread: threading.Thread) -> None:
            if thread.name.startswith(_THREADS) and (delay_s := self._delay_s("threads")):
                run = thread.run

                def late() -> None:
                    time.sleep(delay_s)
                    run()

                thread.run = late  # type: ignore[method-assign]
            start(thread)

        return begun

    def _late_arrival(self, stand_ready: Callable[..., Any], longest_s: float) -> Callable[..., Any]:
        @functools.wraps(stand_ready)
        def late(*given: Any, **keywords: Any) -> Any:
            deadline_s = time.monotonic() + longest_s
            while not self.board.count(WAITING) and time.monotonic() < deadline_s:
                time.sleep(_LOOKS_S)
            return stand_ready(*given, **keywords)

        return late


class LateStore:
    """A sealed store whose requests are delayed."""

    def __init__(self, store: Any, delay_s: Callable[[str], float]) -> None:
        self._store, self._delay_s = store, delay_s

    def __getattr__(self, name: str) -> Any:
        """Return the store's method, delayed."""
        return _delayed(getattr(self._store, name), functools.partial(self._delay_s, "store"))


def _delayed(function: Callable[..., Any], delay_s: Callable[[], float]) -> Callable[..., Any]:
    """Return `function`, each call of which waits for `delay_s()` first."""

    @functools.wraps(function)
    def late(*given: Any, **keywords: Any) -> Any:
        if pause_s := delay_s():
            time.sleep(pause_s)
        return function(*given, **keywords)

    return late


class Held:
    """An operation that begins late."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._now = threading.Event()

    def wait(self) -> None:
        """Wait until it is to begin."""
        self._now.wait(self._longest_s)

    def end(self, failure: str) -> None:
        """Record its end; `failure`: None if it succeeded."""


class HeldOnPurpose(Held):
    """An operation that begins just before its successor, or once the rank is idle."""

    def __init__(
        self,
        what: str,
        longest_s: float,
        others_launched: Callable[[], bool],
        idle_s: Callable[[], float],
        mark: Path,
    ) -> None:
        """`longest_s`: limit of the idle time. `others_launched`: whether all other ranks have launched the operation.
        `idle_s`: how long this rank has been idle. `mark`: file for the outcome.
        """
        super().__init__(longest_s)
        self._what, self._others_launched, self._idle_s, self._mark = what, others_launched, idle_s, mark
        self._ended = threading.Event()

    def wait(self) -> None:
        """Wait as `Held.wait`. The operation counts as late once all others wait for this rank alone."""
        while not self._others_launched() and self._idle_s() < self._longest_s:
            time.sleep(_LOOKS_S)
        self._mark.write_text(f"{self._what}, is late\n")
        while (left_s := self._longest_s - self._idle_s()) > 0.0 and not self._now.wait(left_s):
            pass
        self._add(SUCCESSOR if self._now.is_set() else IDLE)

    def end(self, failure: str) -> None:
        """Record its end as `Held.end`."""
        self._add(failure or "it has ended well")
        self._ended.set()

    def write_now(self) -> None:
        """Begin the operation now and wait for its end."""
        self._now.set()
        self._ended.wait(_ENDS_S)

    def _add(self, line: str) -> None:
        with self._mark.open("a") as file:
            file.write(f"{line}\n")


class LateWork:
    """Handle of a delayed operation, with the interface of torch's."""

    def __init__(self) -> None:
        self._begun = threading.Event()
        self._work: Any = None
        self._failure: Exception | None = None

    def begin(self, launch: Callable[[], Any]) -> Any:
        """Launch the operation; return torch's handle, None if that failed."""
        try:
            self._work = launch()
        except Exception as cause:
            # Without frames, for these hold torch's group, whose connections are to close once it is dropped.
            self._failure = cause.with_traceback(None)
        self._begun.set()
        return self._work

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait as torch's handle. Raises RuntimeError at the timeout, and if it failed."""
        begun_s = time.monotonic()
        if not self._begun.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("timed out: the operation has not begun")
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)
        if timeout is None:
            return bool(self._work.wait())
        left = timeout - timedelta(seconds=time.monotonic() - begun_s)
        return bool(self._work.wait(max(left, timedelta(milliseconds=1))))

    def is_completed(self) -> bool:
        """Return whether it has ended, successfully or not."""
        return self._begun.is_set() and (self._work is None or bool(self._work.is_completed()))

    def is_success(self) -> bool:
        """Return whether it has ended successfully."""
        return self._begun.is_set() and self._work is not None and bool(self._work.is_success())


class LateGroup:
    """A gloo group that delays some operations, and all later ones with them, since peers match operations by order.

    It counts operations in progress.
    """

    def __init__(self, native: Any, name: str, number: int, rank: LateRank, others: Collection[int]) -> None:
        """`name`: the same in all generations; `number`: unique to this group. `others`: its members except
        this rank.
        """
        self._native, self._name, self._number, self._rank, self._others = native, name, number, rank, others
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._launching, self._waiting = threading.Lock(), _Count()
        self._worker: threading.Thread | None = None

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Return torch's class, for isinstance checks."""
        return type(self._native)

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of torch's group; operations are delayed."""
        found = getattr(self._native, name)
        return functools.partial(self._launch, name, found) if name in _OPERATIONS else found

    def __del__(self) -> None:
        """End the thread, which refers to this group only through pending operations."""
        self._queue.put(None)

    def _launch(self, operation: str, launch: Callable[..., Any], *given: Any, **keywords: Any) -> Any:
        held = self._rank.hold(self._name, self._number, operation, self._others)
        board, begin = self._rank.board, functools.partial(launch, *given, **keywords)
        with self._launching:
            if held is None and not self._waiting.count:
                work = _counted(begin(), board, None)
            else:
                work = LateWork()
                board.add(LATE)
                self._waiting.count += 1
                late = functools.partial(_begin_late, work, begin, held, board, self._launching, self._waiting)
                self._queue.put(late)
                if self._worker is None:
                    self._worker = threading.Thread(target=_work, args=(self._queue,), name="late-group", daemon=True)
                    self._worker.start()
        del begin, launch
        self._rank.launched(self._name, operation)
        return work


@dataclass
class _Count:
    """Number of waiting operations."""

    count: int = 0


def _begin_late(
    work: LateWork,
    begin: Callable[[], Any],
    held: Held | None,
    board: OperationBoard,
    launching: threading.Lock,
    waiting: _Count,
) -> None:
    if held is not None:
        held.wait()
    with launching:
        begun = work.begin(begin)
        waiting.count -= 1
    board.add(LATE, -1)
    if begun is not None:
        _counted(begun, board, held)
    elif held is not None:
        held.end("it could not be launched")


def _counted(work: Any, board: OperationBoard, held: Held | None) -> Any:
    """Return torch's handle of an operation, which counts as in progress until the handle is complete."""

    def ended(future: Future[Any]) -> None:
        board.add(UNDER_WAY, -1)
        if held is not None:
            failure = ""
            try:
                future.value()
            except RuntimeError as cause:
                failure = f"it has failed: {cause}"
            held.end(failure)

    board.add(UNDER_WAY)
    work.get_future().add_done_callback(ended)
    return work


def _work(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # or it would keep torch's group while this waits for another
