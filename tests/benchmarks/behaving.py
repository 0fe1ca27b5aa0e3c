# SPDX-License-Identifier: Apache-2.0
"""A check that behaves as it is asked to."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable

from gpu_check.findings import Report


def fine(report: Report) -> None:
    """Two lines."""
    report.show("it works", "it did", True)
    report.leave_out("it flies", "no wings")


def wrong(report: Report) -> None:
    """One that is not ok."""
    report.show("it works", "it did not", False)


def hang_somewhere(report: Report) -> None:
    """After a line, and naming the next."""
    report.show("it begins", "it did", True)
    report.begin("it ends")
    threading.Event().wait(60.0)


def hang_deaf(report: Report) -> None:
    """In a call that no interpreter can leave, as those of drivers."""
    report.begin("it returns")
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)


def crash(report: Report) -> None:
    """As code that is not Python's."""
    report.begin("it does not crash")
    ctypes.string_at(0)


def fail(report: Report) -> None:
    """With an error."""
    raise ValueError("made to fail")


def garbage(report: Report) -> None:
    """Between two lines."""
    report.show("it works", "it did", True)
    with report._path.open("ab") as file:
        file.write(b'{"promise": 3}\n\xff\xfe nonsense\n[1]\n')
    report.show("it still works", "it did", True)


def silent(report: Report) -> None:
    """Report nothing at all."""


def fail_slowly(report: Report) -> None:
    """Some time after it has said so."""
    report.begin("it fails")
    time.sleep(1.0)
    os._exit(3)


def run(machine: object, report: Report, name: str) -> None:
    """`name`: of a function here."""
    behaviour: Callable[[Report], None] = globals()[name]
    behaviour(report)
