# SPDX-License-Identifier: Apache-2.0
"""A fault campaign outside the ranks: strikes processes of the job at the planned points, and sees to it that each
fault has happened and that nothing else has."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from campaigns.soak_processes import Process, delegate_of, pending, sockets, wait_until
from testing.faults.network.corrupted_rings import WAYS, WORDS, corrupt_one_of, in_use
from testing.faults.network.unauthenticated_peers import flood
from testing.soak.soak_plan import Fault, Kind
from testing.soak.soak_progress import Progress

_POLL_S = 0.002
_TYPICAL_ITERATION_S = 0.05
_PROMPTLY_S = 5.0
"""How long Linux may take to stop or end a process, on a busy machine."""
_REPLACED_S = 15.0
"""How long there may be no delegate; what traffic makes of that is measured elsewhere, and judged more severely."""
_WOULD_ACT_S = 1.5
"""A supervisor that took offence at anything has acted by then."""


@dataclass
class Done:
    """One fault that has happened."""

    fault: Fault
    at_s: float
    """Moment on `time.monotonic()`."""
    over_s: float
    """When what was stopped went on, what was struck was replaced, or unauthenticated peers had left."""


@dataclass
class Footprint:
    """What the job's processes are, and where they listen."""

    ranks: list[int] = field(default_factory=list)
    delegates: set[int] = field(default_factory=set)
    ports: dict[str, int] = field(default_factory=dict)
    """By inode of the socket."""
    names: set[str] = field(default_factory=set)


class SoakDriver:
    """Carries out the faults of processes of one training."""

    def __init__(
        self, directory: Path, plan: Sequence[Fault], stages: int, length: int, store: int, over: Callable[[], bool]
    ) -> None:
        """`length`: iterations of the training. `store`: process id of the job's store. `over`: whether the job has
        ended, in which case `run` returns."""
        self.done: list[Done] = []
        self.problems: list[str] = []
        self.footprint = Footprint()
        self._directory, self._stages, self._store, self._over = directory, stages, store, over
        self._last_iteration = length - 1
        self._plan = [fault for fault in plan if not fault.kind.inside]
        self._delegates: dict[int, int] = {}
        self._stopped: dict[int, float] = {}
        """Times at which stopped delegates were continued. Each may still be replaced shortly afterwards."""

    def run(self) -> None:
        """Returns when all faults are done, or the job is over; what went wrong is in `problems`."""
        progress = Progress(self._directory, self._stages)
        try:
            stages = range(self._stages)
            if not self._until(lambda: all(progress.process_id(stage) for stage in stages)):
                return
            self.footprint.ranks = [progress.process_id(stage) for stage in stages]
            for fault in self._plan:
                if not self._until(lambda fault=fault: progress.iteration(fault.stage) >= fault.iteration):  # type: ignore[misc]
                    return
                self._look_around(progress)
                time.sleep(fault.delay * _TYPICAL_ITERATION_S)
                self._strike(fault)
            time.sleep(_WOULD_ACT_S)
            self._look_around(progress)
        finally:
            progress.close()

    def _until(self, condition: Callable[[], bool]) -> bool:
        """Wait for `condition`; False if the job is over before."""
        while not condition():
            if self._over():
                return False
            time.sleep(_POLL_S)
        return True

    def _look_around(self, progress: Progress) -> None:
        """Every delegate that was not struck must be the one that was there before, as long as the training lasts: the
        ranks have others in the next one."""
        replaced = []
        for stage, rank in enumerate(self.footprint.ranks):
            ports, names = sockets(rank)
            self.footprint.ports |= ports
            self.footprint.names |= names
            delegate = delegate_of(rank)
            if delegate is None:
                continue
            self.footprint.delegates.add(delegate)
            known = self._delegates.setdefault(stage, delegate)
            if self._stopped.get(delegate, inf) < time.monotonic() - _WOULD_ACT_S:
                del self._stopped[delegate]  # it stays
            if delegate != known and known not in self._stopped:
                replaced.append(f"stage {stage}: delegate {known} was replaced by {delegate}, and no fault says why")
            self._delegates[stage] = delegate
        if all(progress.iteration(stage) < self._last_iteration for stage in range(self._stages)):
            self.problems += replaced

    def _strike(self, fault: Fault) -> None:
        strike = {
            Kind.KILL_DELEGATE: self._kill_delegate,
            Kind.STOP_DELEGATE: self._stop_delegate,
            Kind.STOP_RANK: lambda fault: self._hold(self._rank(fault), fault),
            Kind.STOP_RANK_LONG: lambda fault: self._hold(self._rank(fault), fault),
            Kind.STOP_STORE: lambda fault: self._hold(self._store, fault),
            Kind.KILL_STORE: lambda fault: self._kill(self._store, fault),
            Kind.CORRUPT_RING: self._corrupt_ring,
            Kind.UNAUTHENTICATED_PEERS: self._flood_listeners,
            Kind.SIGNAL_DELEGATE: self._signal_delegate,
        }[fault.kind]
        try:
            at_s = strike(fault)
            self.done.append(Done(fault, at_s, time.monotonic()))
        except ProcessLookupError as error:
            if not self._over():
                self._complain(fault, str(error))

    def _complain(self, fault: Fault, problem: str) -> None:
        self.problems.append(f"fault {fault.number} ({fault.kind.value}), stage {fault.stage}: {problem}")

    def _rank(self, fault: Fault) -> int:
        return self.footprint.ranks[fault.stage]

    def _delegate(self, fault: Fault) -> int:
        """Raises ProcessLookupError if there is none for long."""
        rank = self._rank(fault)
        wait_until(lambda: delegate_of(rank) is not None or self._over(), _REPLACED_S)
        if (delegate := delegate_of(rank)) is None:
            raise ProcessLookupError(f"no delegate for {_REPLACED_S:g} s")
        return delegate

    def _kill_delegate(self, fault: Fault) -> float:
        killed, rank = self._delegate(fault), self._rank(fault)
        at_s = self._kill(killed, fault)
        wait_until(lambda: delegate_of(rank) not in (None, killed) or self._over(), _REPLACED_S)
        self._delegates.pop(fault.stage, None)
        return at_s

    def _stop_delegate(self, fault: Fault) -> float:
        delegate = self._delegate(fault)
        at_s = self._hold(delegate, fault)
        self._stopped[delegate] = time.monotonic()
        return at_s

    def _signal_delegate(self, fault: Fault) -> float:
        """As a scheduler does to all processes of a job: the delegate must still be there at the next look around."""
        delegate, number = self._delegate(fault), (signal.SIGTERM, signal.SIGHUP)[fault.number % 2]
        at_s = time.monotonic()
        os.kill(delegate, number)
        if not wait_until(lambda: pending(delegate, number), _PROMPTLY_S):
            self._complain(fault, f"{number.name} does not wait at delegate {delegate}")
        return at_s

    def _flood_listeners(self, fault: Fault) -> float:
        delegate = self._delegate(fault)
        wait_until(lambda: any(sockets(delegate)) or self._over(), _PROMPTLY_S)  # it is lent what it listens on
        at_s = time.monotonic()
        ports, names = sockets(delegate)
        if not flood(ports.values(), names, fault.duration_s):
            self._complain(fault, "no unauthenticated peer was answered")
        return at_s

    def _corrupt_ring(self, fault: Fault) -> float:
        """One word of a ring that the rank uses, which it must then give up."""
        rank, word, way = self._rank(fault), list(WORDS)[fault.number % len(WORDS)], fault.number % WAYS
        until_s = time.monotonic() + _REPLACED_S
        while (ring := corrupt_one_of(rank, fault.messages, word, way)) is None:
            if time.monotonic() >= until_s or self._over():
                raise ProcessLookupError(f"no ring for {_REPLACED_S:g} s")
            time.sleep(_POLL_S)
        at_s = time.monotonic()
        if not wait_until(lambda: not in_use(rank, ring) or self._over(), _REPLACED_S):
            self._complain(fault, f"it still uses the ring whose word {word!r} is corrupted")
        return at_s

    def _kill(self, pid: int, fault: Fault) -> float:
        """Returns when."""
        with Process(pid) as process:
            at_s = time.monotonic()
            process.send(signal.SIGKILL)
            if not process.ended(_PROMPTLY_S):
                self._complain(fault, f"process {pid} still runs after SIGKILL")
            return at_s

    def _hold(self, pid: int, fault: Fault) -> float:
        """Stop it for a while, or until it is ended. Returns when it was stopped."""
        with Process(pid) as process:
            at_s = time.monotonic()
            process.send(signal.SIGSTOP)
            try:
                if not process.stopped(_PROMPTLY_S):
                    self._complain(fault, f"process {pid} did not stop")
                process.ended(max(0.0, at_s + fault.duration_s - time.monotonic()))
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.send(signal.SIGCONT)
            return at_s
