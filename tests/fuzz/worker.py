# SPDX-License-Identifier: Apache-2.0
"""One fuzzer in a process of its own: `python -m fuzz.worker NAME FIRST LAST SECONDS [EXTENSIONS]`.

Says the number of each case, before it begins, on standard output. EXTENSIONS is a directory with builds of the native
extensions to use in place of the installed ones.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import sys
import time
from pathlib import Path
from random import Random

FUZZERS = {
    "headers": "fuzz.inboxes:case_of_headers",
    "parts": "fuzz.inboxes:case_of_parts",
    "streams": "fuzz.streams:case",
    "live_rings": "fuzz.live_rings:case",
    "verbs_talk": "fuzz.verbs_talk:case",
    "control_talk": "fuzz.control_talk:case",
    "schedules": "fuzz.schedules:case",
    "routing": "fuzz.routing:case",
    "self_check": "fuzz.self_check:case",
}
EXTENSIONS = ("adaptra_megatron.transport._ring", "adaptra_megatron.schedule._native")
START_S = 30.0
"""Longest time until the first case begins."""
HANG_S = 120.0
"""No case takes nearly as long: some of `schedules` 3 s of a core with sanitizers, which may be a tenth of one."""
WARM_UP_S = 2.0
GROWTH_NBYTES = 192 << 20
"""How much more memory a process may come to use after that, whatever it is sent."""


def use_extensions(directory: Path) -> None:
    """Import the native extensions from `directory`."""
    for name in EXTENSIONS:
        file = directory / f"{name.rpartition('.')[2]}.so"
        specification = importlib.util.spec_from_file_location(name, file)
        assert specification is not None
        assert specification.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        parent, _, child = name.rpartition(".")
        setattr(importlib.import_module(parent), child, module)


def random_of(name: str, number: int) -> Random:
    """What a case is made of."""
    return Random(f"{name}:{number}")


def resident_nbytes() -> int:
    """Memory that this process has in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) << 12


def main(name: str, first: int, last: int, seconds: float) -> None:
    module, _, function = FUZZERS[name].partition(":")
    case = getattr(importlib.import_module(module), function)
    began_s = time.monotonic()
    tried, at_first = 0, 0
    for number in range(first, last + 1):
        now_s = time.monotonic()
        if now_s - began_s > seconds:
            break
        _say(f"case {number} {tried}")
        tried += case(random_of(name, number), now_s + HANG_S)
        if not at_first and now_s - began_s > WARM_UP_S:
            at_first = resident_nbytes()
        growth = resident_nbytes() - at_first if at_first else 0
        assert growth < GROWTH_NBYTES, f"{growth >> 20} MiB more in use than after {WARM_UP_S:g} s"
    _say(f"done {number} {tried}")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    faulthandler.enable()
    if len(sys.argv) > 5:
        use_extensions(Path(sys.argv[5]))
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
