# SPDX-License-Identifier: Apache-2.0
"""Runs the fuzzers, each in a process of its own, on extensions built with sanitizers: see the Makefile.

    python -m fuzz.campaign --extensions=build/sanitized --seconds=60 --first=1     all, as long as that together
    python -m fuzz.campaign --extensions=build/sanitized --only=streams:4711        one case again

A crash, a report of a sanitizer, a wrong answer, a wait beyond its deadline and memory that grows without bound are
failures. Each is printed with the one line that makes it again.
"""

from __future__ import annotations

import argparse
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from fuzz.worker import FUZZERS, HANG_S, START_S

WORKER = ["-m", "fuzz.worker"]
SELF_CHECK = "self_check"
NO_END = 1 << 62
SHARES = {
    "headers": 2.0,
    "parts": 2.0,
    "streams": 2.0,
    "live_rings": 2.0,
    "verbs_talk": 0.5,
    "control_talk": 0.5,
    "schedules": 2.5,
    "routing": 1.0,
}
OPTIONS = {
    # Leaks are looked for by memory in use: at exit, Python itself has much that is not freed.
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:quarantine_size_mb=16:handle_segv=1:exitcode=99",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1:exitcode=99",
}


@dataclass(frozen=True)
class Result:
    """How one fuzzer ended."""

    name: str
    number: int
    """Number of the last case that began."""
    tried: int
    """Inputs before it."""
    took_s: float
    failure: str
    """Empty if there is none; else what was seen, and what the process said."""


def watch(name: str, first: int, last: int, seconds: float, extensions: Path | None) -> Result:
    """Run one fuzzer's cases from `first` to `last`, or for `seconds`."""
    command = [sys.executable, *WORKER, name, str(first), str(last), str(seconds)]
    command += [str(extensions)] if extensions is not None else []
    began_s = time.monotonic()
    with tempfile.TemporaryFile("w+") as complaints:
        process = subprocess.Popen(
            command, env=environment(sanitized=extensions is not None), stdout=subprocess.PIPE, stderr=complaints
        )
        assert process.stdout is not None
        with process, process.stdout:
            received, hung = _listen(process.stdout.fileno())
            if hung:
                process.send_signal(signal.SIGABRT)  # has faulthandler say where
                _kill_later(process)
        complaints.seek(0)
        said = complaints.read()
    word, number, tried = (received or "nothing 0 0").split()
    how = f"nothing for {HANG_S if received else START_S:g} s" if hung else f"exit status {process.returncode}"
    failure = "" if word == "done" and process.returncode == 0 else f"{how}\n{said}"
    return Result(name, int(number), int(tried), time.monotonic() - began_s, failure)


def _listen(pipe: int) -> tuple[str, bool]:
    """The last line that came, and whether lines stopped to come before the end."""
    last, rest = "", b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while selector.select(HANG_S if last else START_S):
            data = os.read(pipe, 1 << 16)
            if not data:
                return last, False
            *lines, rest = (rest + data).split(b"\n")
            last = lines[-1].decode() if lines else last
    return last, True


def _kill_later(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(5.0)
    except subprocess.TimeoutExpired:
        process.kill()


def environment(*, sanitized: bool) -> Mapping[str, str]:
    """Environment of a worker: the sanitizer's library before any other, and C++'s, whose exceptions it has to see."""
    found = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    if not sanitized:
        return found
    ask = [os.environ.get("CXX", "c++"), "-print-file-name=libasan.so", "-print-file-name=libstdc++.so"]
    asan, cxx = (
        subprocess.run([ask[0], option], check=True, capture_output=True, text=True).stdout.strip()
        for option in ask[1:]
    )
    return {**found, **OPTIONS, "LD_PRELOAD": f"{asan} {cxx}"}


def campaign(extensions: Path, seconds: float, first: int, only: str | None, out: IO[str]) -> int:
    """Everything, with a line for each fuzzer; returns how many failed."""
    check = watch(SELF_CHECK, 1, 1, HANG_S, extensions)
    if "AddressSanitizer: heap-buffer-overflow" not in check.failure:
        print(f"the sanitizer does not see what it must see:\n{check.failure or 'no report'}", file=out)
        return 1
    names, last = list(SHARES), NO_END
    if only is not None:
        chosen, _, number = only.partition(":")
        names, seconds = [chosen], seconds if not number else HANG_S
        first, last = (int(number), int(number)) if number else (first, last)
    failed = 0
    for name in names:
        share = SHARES[name] / sum(SHARES[each] for each in names)
        result = watch(name, first, last, share * seconds, extensions)
        print(f"{name:12} cases {first} to {result.number}, {result.tried} inputs, {result.took_s:.1f} s", file=out)
        if result.failure:
            failed += 1
            print(f"{result.failure}\nreproduce: make test-native-sanitized FUZZ={name}:{result.number}", file=out)
    # The form in which test runners are read.
    print(f"{len(names) - failed} passed, {failed} failed", file=out)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description="Fuzz the native extensions under sanitizers.")
    parser.add_argument("--extensions", type=Path, required=True, help="directory with _ring.so and _native.so")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all fuzzers together")
    parser.add_argument("--first", type=int, default=1, help="number of the first case; each number is another input")
    parser.add_argument("--only", metavar="NAME[:CASE]", help=f"one of {', '.join(FUZZERS)}")
    chosen = parser.parse_args()
    sys.exit(min(1, campaign(chosen.extensions, chosen.seconds, chosen.first, chosen.only or None, sys.stdout)))


if __name__ == "__main__":
    main()
