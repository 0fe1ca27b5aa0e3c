# SPDX-License-Identifier: Apache-2.0
"""What processes and threads of this machine use, as /proc has it."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_SLEEPER = """
import asyncio

async def main():
    while True:
        await asyncio.sleep(INTERVAL_S)

asyncio.run(main())
"""
_WAKES = re.compile(r"^voluntary_ctxt_switches:\s*(\d+)$", re.MULTILINE)


@contextlib.contextmanager
def sleeper(interval_s: float) -> Iterator[Path]:
    """A process with an event loop that wakes at this interval for nothing; its directory in /proc."""
    process = subprocess.Popen([sys.executable, "-c", _SLEEPER.replace("INTERVAL_S", repr(interval_s))])
    try:
        yield Path(f"/proc/{process.pid}")
    finally:
        process.kill()
        process.wait(10.0)


def usage(seconds: float, process: Path, other: Path) -> tuple[float, float, float]:
    """Share of a core that `process` uses meanwhile, how often it wakes per second, and what `other` uses."""
    before_s, other_before_s, woken, start_s = _cpu_s(process), _cpu_s(other), _wakes(process), time.monotonic()
    time.sleep(seconds)
    took_s = time.monotonic() - start_s
    wakes = _wakes(process) - woken
    return (_cpu_s(process) - before_s) / took_s, wakes / took_s, (_cpu_s(other) - other_before_s) / took_s


def wakes_of(task: Path) -> int:
    """How often a thread has given up its core to wait. `task`: its directory in /proc."""
    return int(_WAKES.findall((task / "status").read_text())[0])


def _cpu_s(process: Path) -> float:
    tasks = (process / "task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def _wakes(process: Path) -> int:
    return sum(map(wakes_of, (process / "task").iterdir()))
