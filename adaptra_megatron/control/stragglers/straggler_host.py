# SPDX-License-Identifier: Apache-2.0
"""Read figures of this rank's host: CPUs, network, memory, GPUs. Each set is the difference of two reads of its
counters.

Needs psutil and, for GPUs, nvidia-ml-py (`pip install 'adaptra-megatron[monitor]'`). Figures that cannot be read are
None.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from adaptra_megatron.common.log import logger_of
from adaptra_megatron.control.detector.straggler_arrivals import HostFigures

logger = logger_of(__name__)


# If a host's CPUs make its rank late, the rank's helpers give up CPUs to its training threads. STAR's proactive part
# takes resources from any process that can spare them; here, only from processes that the rank has started: delegates,
# data-loader workers, the planner process.

NICENESS = 10
"""Niceness of helpers while their rank is late: they get about a tenth of a training thread's weight."""
HELPERS_PART = 4
"""One of this many CPUs is for helpers."""
_CAP_SYS_NICE = 23
_PROCESSOR, _USER_TICKS, _SYSTEM_TICKS = 36, 11, 12
"""Fields of /proc/PID/stat, counted after the name."""


class _Before(NamedTuple):
    """CPUs and niceness of a helper's thread before it was pinned."""

    helper: Any
    cpus: set[int]
    niceness: int


class HostPolicy:
    """Pins helpers of one rank while it is late. Not thread-safe. In mode `observe` it only logs what it would do."""

    def __init__(self, mode: str, rank: int) -> None:
        """`mode`: see --adaptra-host-policy."""
        self._pins, self._rank = mode == "pin", rank
        self._before: dict[int, _Before] = {}
        """By thread id."""
        self._on = False
        self._refused = False
        self._cpus: set[int] = set()

    def follow(self, cause: str) -> None:
        """Pin the helpers, or release them. `cause`: why the host's CPUs make this rank late, as text; "" if they do
        not.

        Call repeatedly: helpers that have started since are pinned, too.
        """
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
        """Restore CPUs and priority of all helpers that are pinned."""
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
        """Return the CPUs for helpers: those on which this process's threads have run least; none if there is only one
        CPU."""
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
    """Yield all processes that this one has started, and their descendants."""
    import psutil

    with contextlib.suppress(psutil.Error):
        yield from psutil.Process().children(recursive=True)


def _threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def _can_raise_priority() -> bool:
    """Return whether this process can raise a lowered priority again; if not, none is lowered."""
    if resource.getrlimit(resource.RLIMIT_NICE)[0] >= 20 - os.getpriority(os.PRIO_PROCESS, 0):
        return True
    with contextlib.suppress(OSError, ValueError, IndexError):
        status = Path("/proc/self/status").read_text()
        return bool(int(status.partition("CapEff:")[2].split()[0], 16) >> _CAP_SYS_NICE & 1)
    return False


FAMILY_FOR = 4
"""Samples for which the list of this job's processes on the host is kept: to make it reads all processes."""
_SERVICE_MANAGERS = ("systemd", "init")
_NOT_SLOWED = 0x1 | 0x2 | 0x10 | 0x100
"""NVML's reasons for a lower clock that are normal: idle, application clocks, sync boost, display."""
_REASONS = {
    0x4: "its power limit",
    0x8: "the board's protection (hardware slowdown)",
    0x20: "its temperature",
    0x40: "its temperature (hardware)",
    0x80: "the server's power supply (power brake)",
}


class HostSampler:
    """Samples the figures of one rank's host. Not thread-safe."""

    def __init__(
        self,
        system: Path = Path("/sys"),
        process: Path = Path("/proc"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._system, self._process, self._clock = system, process, clock
        self.missing: list[str] = []
        """Missing packages."""
        self._psutil = self._imported("psutil", "psutil")
        self._nvml = self._imported("pynvml", "nvidia-ml-py") if (process / "driver/nvidia").exists() else None
        if self._nvml is not None:
            self._nvml = _initialized(self._nvml)
        self._family: list[Any] = []
        self._looks = 0
        self._counters: dict[str, float] = {}
        self._at_s = 0.0

    def sample(self) -> HostFigures | None:
        """Return the figures since the last call; None at the first."""
        before, before_s = self._counters, self._at_s
        self._at_s, self._counters = self._clock(), dict(self._read())
        elapsed_s = self._at_s - before_s
        self._looks += 1
        if not before or elapsed_s <= 0.0:
            return None
        grown = {name: max(0.0, value - before[name]) for name, value in self._counters.items() if name in before}
        clock, slowed = self._gpus()
        return HostFigures(
            **_cpu_shares(grown),
            throttled=_rate(grown, "throttled_us", 1e6 * elapsed_s),
            queued=_rate(grown, "queued_us", 1e6 * elapsed_s),
            load=os.getloadavg()[0] / (os.cpu_count() or 1),
            network=self._network(grown, elapsed_s),
            network_errors_s=_sum_rate(grown, "error ", elapsed_s),
            memory_bytes_s=_sum_rate(grown, "memory ", elapsed_s),
            gpu_clock=clock,
            gpu_slowed=slowed,
        )

    def _imported(self, module: str, package: str) -> ModuleType | None:
        import importlib

        try:
            return importlib.import_module(module)
        except ImportError:
            self.missing.append(package)
            return None

    def _read(self) -> Iterator[tuple[str, float]]:
        """Yield all counters by name."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            yield "throttled_us", _entry(self._system / "fs/cgroup/cpu.stat", "throttled_usec")
        with contextlib.suppress(OSError, ValueError, IndexError):
            pressure = (self._process / "pressure/cpu").read_text().partition("\n")[0]
            yield "queued_us", float(pressure.rpartition("total=")[2])
        for counted in self._system.glob("fs/resctrl/mon_data/mon_L3_*/mbm_total_bytes"):
            with contextlib.suppress(OSError, ValueError):
                yield f"memory {counted.parent.name}", float(counted.read_text())
        for name in ("port_rcv_errors", "port_xmit_discards", "symbol_error"):
            for counted in self._system.glob(f"class/infiniband/*/ports/*/counters/{name}"):
                with contextlib.suppress(OSError, ValueError):
                    yield f"error {counted}", float(counted.read_text())
        if self._psutil is not None:
            yield from self._read_cpus(self._psutil)
            for name, nic in self._psutil.net_io_counters(pernic=True).items():
                if name != "lo":
                    yield f"in {name}", nic.bytes_recv
                    yield f"out {name}", nic.bytes_sent
                    yield f"error {name}", nic.errin + nic.errout + nic.dropin + nic.dropout

    def _read_cpus(self, psutil: ModuleType) -> Iterator[tuple[str, float]]:
        """Yield the seconds of the CPUs that this process may use, by name."""
        own = os.sched_getaffinity(0)
        times = [each for number, each in enumerate(psutil.cpu_times(percpu=True)) if number in own]
        for name in ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal"):
            yield f"cpu {name}", sum(getattr(each, name, 0.0) for each in times)
        if self._looks % FAMILY_FOR == 0:
            self._family = list(_family(psutil))
        for process in self._family:
            with contextlib.suppress(psutil.Error, OSError):
                used, shared = process.cpu_times(), _shared(process, own)
                yield f"own {process.pid}", shared * (used.user + used.system)

    def _network(self, grown: dict[str, float], elapsed_s: float) -> float | None:
        if self._psutil is None:
            return None
        speeds = {name: 1.25e5 * each.speed for name, each in self._psutil.net_if_stats().items() if each.speed > 0}
        used = [grown.get(f"{way} {name}", 0.0) / elapsed_s / speeds[name] for name in speeds for way in ("in", "out")]
        return max(used, default=None)

    def _gpus(self) -> tuple[float | None, str]:
        """Return the lowest clock of a busy GPU as a share of its maximum (None if none), and a text on one that is
        throttled."""
        nvml, clocks, slowed = self._nvml, [], ""
        if nvml is None:
            return None, ""
        with contextlib.suppress(nvml.NVMLError):
            for index in range(nvml.nvmlDeviceGetCount()):
                gpu = nvml.nvmlDeviceGetHandleByIndex(index)
                reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
                bits = (reasons or nvml.nvmlDeviceGetCurrentClocksThrottleReasons)(gpu)
                if bits & 0x1:  # idle GPUs have low clocks
                    continue
                now, most = nvml.nvmlDeviceGetClockInfo(gpu, 1), nvml.nvmlDeviceGetMaxClockInfo(gpu, 1)  # SM
                clocks.append(now / most)
                if bits & ~_NOT_SLOWED and not slowed:
                    why = " and ".join(text for bit, text in _REASONS.items() if bits & bit) or f"reasons {bits:#x}"
                    slowed = f"GPU {index} of its host is slowed down to {now} of {most} MHz by {why}"
        return min(clocks, default=None), slowed


def _initialized(nvml: ModuleType) -> ModuleType | None:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as cause:
        logger.debug("clocks of GPUs cannot be read: %s", cause)
        return None
    return nvml


def _family(psutil: ModuleType) -> Iterator[Any]:
    """Yield this job's processes on this host: all that were started by the process that started this one."""
    own = psutil.Process()
    with contextlib.suppress(psutil.Error):
        parent = own.parent()
        root = own if parent is None or parent.name() in _SERVICE_MANAGERS else parent
        yield root
        yield from root.children(recursive=True)


def _shared(process: Any, cpus: set[int]) -> float:
    """Return the share of the CPUs that a process may use which are in `cpus`."""
    allowed = process.cpu_affinity()
    return len(cpus.intersection(allowed)) / len(allowed)


def _cpu_shares(grown: dict[str, float]) -> dict[str, float]:
    spent = {name.removeprefix("cpu "): value for name, value in grown.items() if name.startswith("cpu ")}
    total_s = sum(spent.values())
    if total_s <= 0.0:
        return {}
    busy_s = total_s - spent["idle"] - spent["iowait"] - spent["steal"]
    own_s = min(busy_s, sum(value for name, value in grown.items() if name.startswith("own ")))
    return {
        "others_cpu": (busy_s - own_s) / total_s,
        "own_cpu": own_s / total_s,
        "stolen": spent["steal"] / total_s,
    }


def _entry(file: Path, name: str) -> float:
    """Return the number after `name` in `file`."""
    return float(file.read_text().partition(f"{name} ")[2].split()[0])


def _rate(grown: dict[str, float], name: str, elapsed: float) -> float | None:
    return min(1.0, grown[name] / elapsed) if name in grown else None


def _sum_rate(grown: dict[str, float], prefix: str, elapsed_s: float) -> float | None:
    values = [value for name, value in grown.items() if name.startswith(prefix)]
    return sum(values) / elapsed_s if values else None
