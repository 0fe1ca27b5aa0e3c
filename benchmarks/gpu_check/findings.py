# SPDX-License-Identifier: Apache-2.0
"""Record the findings of checks. A check's process writes them line by line, so that none is lost if it dies."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

OK, NOT_OK, NOT_RUN = "ok", "not ok", "not run"


class Finding(NamedTuple):
    """One line of the table."""

    check: str
    promise: str
    seen: str
    verdict: str
    """OK, NOT_OK or NOT_RUN; the last has the reason in `seen`."""


class Record(NamedTuple):
    """What a check's processes have written."""

    findings: list[Finding]
    begun: str | None
    """The promise that was being looked at when the last of them ended; None: none was."""
    last_s: float
    """When anything was written last (time.monotonic); 0 if nothing was."""


class Report:
    """Where the processes of one check write to, all to one file."""

    def __init__(self, path: Path, check: str) -> None:
        self._path, self._check = path, check

    def begin(self, promise: str) -> None:
        """Name what is looked at from now on: the table says so should the process hang or die over it."""
        self._write({"begun": promise})

    def show(self, promise: str, seen: str, shown: bool) -> None:
        """What was seen, and whether that is what was promised."""
        self._write({"promise": promise, "seen": seen, "verdict": OK if shown else NOT_OK})

    def leave_out(self, promise: str, reason: str) -> None:
        """Not run, and why."""
        self._write({"promise": promise, "seen": reason, "verdict": NOT_RUN})

    def read(self) -> Record:
        """Whatever is legible of it."""
        findings: list[Finding] = []
        begun, last_s = None, 0.0
        for text in self._path.read_bytes().splitlines() if self._path.exists() else ():
            try:
                line = json.loads(text)
                last_s = line["at_s"]
                begun = line.get("begun")
                if begun is None:
                    findings.append(Finding(self._check, line["promise"], line["seen"], line["verdict"]))
            except (ValueError, KeyError, TypeError, AttributeError):
                findings.append(Finding(self._check, "reports are legible", repr(text[:80]), NOT_OK))
        return Record(findings, begun, last_s)

    def _write(self, line: dict[str, str]) -> None:
        text = json.dumps({**line, "at_s": time.monotonic()}) + "\n"
        # One write for the whole line: other processes of the check append to the same file.
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)


def exit_status(findings: Sequence[Finding]) -> int:
    """0: all was shown; 1: something was not; 2: nothing failed, and something could not be run here."""
    verdicts = {finding.verdict for finding in findings}
    return 1 if NOT_OK in verdicts else 2 if NOT_RUN in verdicts or not findings else 0
