# SPDX-License-Identifier: Apache-2.0
"""What a rank does of a straggler's cause on its own host: its helpers make room for its training threads.

STAR's proactive part takes resources from what can spare them; here those are the processes that a rank has started:
delegates, data-loader workers, the planner process. Other processes are left alone.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from adaptra_megatron.log import logger_of

logger = logger_of(__name__)

NICENESS = 10
"""That of helpers while their rank is late: about a tenth of the weight of a training thread."""
HELPERS_PART = 4
"""One CPU in so many is for helpers."""
_CAP_SYS_NICE = 23
_PROCESSOR, _USER_TICKS, _SYSTEM_TICKS = 36, 11, 12
"""Fields of /proc/PID/stat, counted behind the name."""


class _Before(NamedTuple):
    """What a thread of a helper had."""

    helper: Any
    cpus: set[int]
    niceness: int


class HostPolicy:
    """One rank's, for one thread. Under `observe` nothing is changed, and the log says what would be."""

    def __init__(self, mode: str, rank: int) -> None:
        """`mode`: see --adaptra-host-policy."""
        self._pins, self._rank = mode == "pin", rank
        self._before: dict[int, _Before] = {}
        """By thread."""
        self._on = False
        self._refused = False
        self._cpus: set[int] = set()

    def follow(self, cause: str) -> None:
        """`cause`: what the host's CPUs do to this rank, which is late, in words; "": nothing, or nothing any more.
        To be called again and again: helpers that were started meanwhile are seen to as well."""
        if not cause:
            if self._on:
                what = "its helpers have their CPUs and priority back" if self._pins else "its helpers would be freed"
                logger.info("host policy: rank %d: %s: its host's CPUs are not the cause any more", self._rank, what)
            self.undo()
            return
        if not self._on:
            self._cpus = self._helpers_cpus()
            self._say(cause)
        self._on = True
        if self._pins:
            for helper in _helpers():
                for thread in _threads(helper.pid):
                    self._pin(helper, thread)

    def undo(self) -> None:
        """Give helpers back what they had; does nothing where they have it."""
        for thread, before in self._before.items():
            # That number may be another process's by now.
            if before.helper.is_running() and thread in _threads(before.helper.pid):
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(thread, before.cpus)
                    os.setpriority(os.PRIO_PROCESS, thread, before.niceness)
        self._before.clear()
        self._on = self._refused = False

    def _say(self, cause: str) -> None:
        count = len(list(_helpers()))
        cpus = f"CPU{'' if len(self._cpus) == 1 else 's'} {', '.join(map(str, sorted(self._cpus)))}"
        place = f"to {cpus}" if self._cpus else "nowhere, for it may use one CPU only,"
        nice = f"with priority {NICENESS} lower" if _can_raise_priority() else "with their priority as it is"
        logger.warning(
            "host policy: rank %d is late, for %s: its helpers (delegates, data-loader workers, planner; %d in all) %s "
            "%s, %s, until that is over%s",
            *(self._rank, cause, count, "are pinned" if self._pins else "would be pinned by --adaptra-host-policy pin"),
            *(place, nice, "" if _can_raise_priority() else _NO_PRIORITY),
        )

    def _pin(self, helper: Any, thread: int) -> None:
        if thread in self._before:
            return
        try:
            cpus, niceness = os.sched_getaffinity(thread), os.getpriority(os.PRIO_PROCESS, thread)
            if (cpus, niceness) == (self._cpus, NICENESS):  # one that a pinned helper has started
                cpus, niceness = os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)
            if self._cpus:
                os.sched_setaffinity(thread, self._cpus)
            if _can_raise_priority():
                os.setpriority(os.PRIO_PROCESS, thread, max(niceness, NICENESS))
        except ProcessLookupError:
            return
        except OSError as cause:  # such as seccomp in a container
            if not self._refused:
                logger.warning("host policy: helpers of rank %d stay as they are: %s", self._rank, cause)
            self._refused = True
            return
        self._before[thread] = _Before(helper, cpus, niceness)

    def _helpers_cpus(self) -> set[int]:
        """CPUs that helpers get: those on which this process's threads have done least; none of a single one."""
        allowed = os.sched_getaffinity(0)
        if len(allowed) < 2:
            return set()
        busy = dict.fromkeys(allowed, 0)
        for thread in _threads(os.getpid()):
            with contextlib.suppress(OSError, ValueError, IndexError):
                stat = Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()
                cpu = int(stat[_PROCESSOR])
                busy[cpu] = busy.get(cpu, 0) + int(stat[_USER_TICKS]) + int(stat[_SYSTEM_TICKS])
        return set(sorted(allowed, key=lambda cpu: (busy[cpu], -cpu))[: max(1, len(allowed) // HELPERS_PART)])


_NO_PRIORITY = " (it could not be raised again: that needs CAP_SYS_NICE, or ulimit -e 20)"


def _helpers() -> Iterator[Any]:
    """All processes that this one has started, and those that they have."""
    import psutil

    with contextlib.suppress(psutil.Error):
        yield from psutil.Process().children(recursive=True)


def _threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def _can_raise_priority() -> bool:
    """Return whether a priority that this process has lowered can be raised again: only then it is lowered."""
    if resource.getrlimit(resource.RLIMIT_NICE)[0] >= 20 - os.getpriority(os.PRIO_PROCESS, 0):
        return True
    with contextlib.suppress(OSError, ValueError, IndexError):
        status = Path("/proc/self/status").read_text()
        return bool(int(status.partition("CapEff:")[2].split()[0], 16) >> _CAP_SYS_NICE & 1)
    return False
