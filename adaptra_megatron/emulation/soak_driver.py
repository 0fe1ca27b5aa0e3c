# SPDX-License-Identifier: Apache-2.0
"""A fault campaign outside the ranks: kills and stops processes of the job at the planned points, and sees to it that
each fault has happened and that nothing else has."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from adaptra_megatron.emulation.soak_plan import Fault, Kind
from adaptra_megatron.emulation.soak_processes import Process, delegate_of, sockets, wait_until
from adaptra_megatron.emulation.soak_progress import Progress

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
    """Of `time.monotonic()`."""
    over_s: float
    """When what was stopped went on, or was gone; when what was killed was gone."""
    replaced: bool
    """Whether another delegate took over."""


@dataclass
class Footprint:
    """What the job's processes are, and where they listen."""

    ranks: list[int] = field(default_factory=list)
    ports: set[int] = field(default_factory=set)
    names: set[str] = field(default_factory=set)


class SoakDriver:
    """Carries out the faults of processes of one training."""

    def __init__(self, directory: Path, plan: Sequence[Fault], stages: int, over: Callable[[], bool]) -> None:
        """`over`: whether the job has ended, in which case `run` returns."""
        self.done: list[Done] = []
        self.problems: list[str] = []
        self.footprint = Footprint()
        self._directory, self._stages, self._over = directory, stages, over
        self._plan = [fault for fault in plan if not fault.kind.inside]
        self._delegates: dict[int, int] = {}

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
                self._look_around()
                time.sleep(fault.delay * _TYPICAL_ITERATION_S)
                self._strike(fault)
            time.sleep(_WOULD_ACT_S)
            self._look_around()
        finally:
            progress.close()

    @property
    def missing(self) -> int:
        """Planned faults that have not happened."""
        return len(self._plan) - len(self.done)

    def _until(self, condition: Callable[[], bool]) -> bool:
        """Wait for `condition`; False if the job is over before."""
        while not condition():
            if self._over():
                return False
            time.sleep(_POLL_S)
        return True

    def _look_around(self) -> None:
        """Every delegate that nobody struck must be the one that was there before."""
        for stage, rank in enumerate(self.footprint.ranks):
            ports, names = sockets(rank)
            self.footprint.ports |= ports
            self.footprint.names |= names
            delegate = delegate_of(rank)
            if delegate is None:
                continue
            known = self._delegates.setdefault(stage, delegate)
            if delegate != known:
                self.problems.append(
                    f"stage {stage}: delegate {known} was replaced by {delegate}, and no fault says why"
                )
                self._delegates[stage] = delegate

    def _strike(self, fault: Fault) -> None:
        try:
            if fault.kind is Kind.STOP_RANK:
                self._stop_rank(fault)
            else:
                self._strike_delegate(fault)
        except ProcessLookupError:
            if not self._over():
                self.problems.append(
                    f"fault {fault.number} ({fault.kind.value}): stage {fault.stage}'s process is gone"
                )

    def _stop_rank(self, fault: Fault) -> None:
        with Process(self.footprint.ranks[fault.stage]) as rank:
            at_s = self._hold(rank, fault)
            self.done.append(Done(fault, at_s, time.monotonic(), replaced=False))

    def _strike_delegate(self, fault: Fault) -> None:
        rank = self.footprint.ranks[fault.stage]
        pid = self._delegate(rank)
        if pid is None:
            self.problems.append(f"stage {fault.stage} has had no delegate for {_REPLACED_S:g} s: nothing to strike")
            return
        with Process(pid) as delegate:
            if fault.kind is Kind.STOP_DELEGATE:
                at_s = self._hold(delegate, fault)
                over_s = time.monotonic()
            else:
                at_s = time.monotonic()
                delegate.send(signal.SIGKILL)
                if not delegate.ended(_PROMPTLY_S):
                    self.problems.append(f"fault {fault.number}: delegate {pid} outlived SIGKILL")
                over_s = time.monotonic()
                wait_until(lambda: delegate_of(rank) not in (None, pid) or self._over(), _REPLACED_S)
            replaced = delegate.ended(0.0)
        self.done.append(Done(fault, at_s, over_s, replaced))
        self._delegates.pop(fault.stage, None)

    def _delegate(self, rank: int) -> int | None:
        wait_until(lambda: delegate_of(rank) is not None or self._over(), _REPLACED_S)
        return delegate_of(rank)

    def _hold(self, process: Process, fault: Fault) -> float:
        """Stop it for a while, or until somebody ends it. Returns when it was stopped."""
        at_s = time.monotonic()
        process.send(signal.SIGSTOP)
        try:
            if not process.stopped(_PROMPTLY_S):
                self.problems.append(f"fault {fault.number}: process {process.pid} did not stop")
            process.ended(max(0.0, at_s + fault.duration_s - time.monotonic()))
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.send(signal.SIGCONT)
        return at_s
