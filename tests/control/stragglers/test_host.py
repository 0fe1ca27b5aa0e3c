# SPDX-License-Identifier: Apache-2.0
"""What a host shows, from counters of a made-up /proc and /sys, and from packages that may be missing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from adaptra_megatron.control.stragglers.straggler_host import HostSampler

Times = namedtuple("Times", "user nice system idle iowait irq softirq steal")
Used = namedtuple("Used", "user system")


class Psutil(ModuleType):
    """As psutil, on a host of CPUs that this test's process may use, all alike."""

    Error = OSError

    def __init__(self) -> None:
        super().__init__("psutil")
        self.times = Times(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        self.own_s = 0.0
        self.nics = {"lo": self._nic(0), "eth0": self._nic(0)}

    @staticmethod
    def _nic(nbytes: int, errors: int = 0) -> Any:
        return SimpleNamespace(bytes_recv=nbytes, bytes_sent=0, errin=errors, errout=0, dropin=0, dropout=0)

    def cpu_times(self, percpu: bool) -> list[Times]:
        return [self.times] * (1 + max(os.sched_getaffinity(0)))

    def net_io_counters(self, pernic: bool) -> dict[str, Any]:
        return self.nics

    def net_if_stats(self) -> dict[str, Any]:
        return {"lo": SimpleNamespace(speed=0), "eth0": SimpleNamespace(speed=1000)}

    def Process(self) -> Any:  # noqa: N802
        child = SimpleNamespace(
            pid=7, cpu_times=lambda: Used(self.own_s, 0.0), cpu_affinity=lambda: list(os.sched_getaffinity(0))
        )
        parent = SimpleNamespace(
            **{**vars(child), "pid": 6}, name=lambda: "torchrun", children=lambda recursive: [child]
        )
        parent.cpu_times = lambda: Used(0.0, 0.0)
        return SimpleNamespace(parent=lambda: parent)


class Nvml(ModuleType):
    """As pynvml, on a host whose second GPU is hot."""

    NVMLError = RuntimeError

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.nvmlInit = lambda: None
        self.nvmlDeviceGetCount = lambda: 3
        self.nvmlDeviceGetHandleByIndex = lambda index: index
        self.nvmlDeviceGetCurrentClocksEventReasons = lambda gpu: (0x1, 0x20, 0x0)[gpu]
        self.nvmlDeviceGetClockInfo = lambda gpu, kind: (210, 1100, 1900)[gpu]
        self.nvmlDeviceGetMaxClockInfo = lambda gpu, kind: 1980


@pytest.fixture
def psutil(monkeypatch: pytest.MonkeyPatch) -> Psutil:
    made = Psutil()
    monkeypatch.setitem(sys.modules, "psutil", made)
    return made


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_shares_are_of_what_has_been_since_the_last_look(tmp_path: Path, psutil: Psutil) -> None:
    system, process, clock = tmp_path / "sys", tmp_path / "proc", iter([100.0, 110.0])
    counted = system / "fs/resctrl/mon_data/mon_L3_00/mbm_total_bytes"
    port = system / "class/infiniband/mlx5_0/ports/1/counters/symbol_error"
    write(system / "fs/cgroup/cpu.stat", "usage_usec 9\nnr_throttled 3\nthrottled_usec 1000000\n")
    write(process / "pressure/cpu", "some avg10=0.00 avg60=0.00 avg300=0.00 total=500\nfull total=1\n")
    write(counted, "1000")
    write(port, "2")
    host = HostSampler(system, process, lambda: next(clock))
    assert host.sample() is None
    cpus = len(os.sched_getaffinity(0))
    psutil.times = Times(6.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0)
    psutil.own_s = 2.0 * cpus
    psutil.nics = {"lo": psutil._nic(10**12), "eth0": psutil._nic(10**9, errors=30)}
    write(system / "fs/cgroup/cpu.stat", "usage_usec 9\nnr_throttled 3\nthrottled_usec 3000000\n")
    write(process / "pressure/cpu", "some avg10=0.00 avg60=0.00 avg300=0.00 total=4000500\nfull total=1\n")
    write(counted, "201000")
    write(port, "22")
    figures = host.sample()
    assert figures.own_cpu == pytest.approx(0.2)
    assert figures.others_cpu == pytest.approx(0.5)
    assert figures.stolen == pytest.approx(0.1)
    assert figures.throttled == pytest.approx(0.2)
    assert figures.queued == pytest.approx(0.4)
    assert figures.network == pytest.approx(0.8)
    assert figures.network_errors_s == pytest.approx(5.0)
    assert figures.memory_bytes_s == pytest.approx(2e4)
    assert (figures.gpu_clock, figures.gpu_slowed) == (None, "")


def test_clocks_of_gpus_that_work(tmp_path: Path, psutil: Psutil, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    (tmp_path / "driver/nvidia").mkdir(parents=True)
    clock = iter([1.0, 2.0])
    host = HostSampler(tmp_path, tmp_path, lambda: next(clock))
    host.sample()
    psutil.times = psutil.times._replace(idle=1.0)
    figures = host.sample()
    assert figures.gpu_clock == pytest.approx(1100 / 1980)
    assert figures.gpu_slowed == "GPU 1 of its host is slowed down to 1100 of 1980 MHz by its temperature"


def test_what_is_not_installed_is_named_and_the_rest_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    (tmp_path / "driver/nvidia").mkdir(parents=True)
    write(tmp_path / "pressure/cpu", "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n")
    clock = iter([1.0, 2.0])
    host = HostSampler(tmp_path, tmp_path, lambda: next(clock))
    host.sample()
    write(tmp_path / "pressure/cpu", "some avg10=0.00 avg60=0.00 avg300=0.00 total=500000\n")
    figures = host.sample()
    assert host.missing == ["psutil", "nvidia-ml-py"]
    assert (figures.others_cpu, figures.network, figures.queued) == (None, None, 0.5)


def test_another_process_on_this_host_is_seen() -> None:
    pytest.importorskip("psutil")
    host = HostSampler()
    # Not one of this job's: its parent has ended.
    spin = "import os, time\nif os.fork() == 0:\n end = time.monotonic() + 1\n while time.monotonic() < end: pass"
    host.sample()
    subprocess.run(["setsid", sys.executable, "-c", spin], check=True, timeout=20)
    time.sleep(0.7)
    figures = host.sample()
    assert figures.others_cpu is not None
    assert figures.others_cpu > 0.05 / len(os.sched_getaffinity(0))
