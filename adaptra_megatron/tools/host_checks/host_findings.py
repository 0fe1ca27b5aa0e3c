# SPDX-License-Identifier: Apache-2.0
"""Define the findings of a check, and the directories that it reads."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


class HostLevel(str, enum.Enum):
    """Severity of a finding."""

    OK = "ok"
    NOTE = "note"
    """It works, but not optimally, or something optional is missing."""
    PROBLEM = "problem"
    """Something does not work that this host should support."""


@dataclass(frozen=True, kw_only=True)
class HostFinding:
    """One finding of a check."""

    subject: str
    """Subject, in a word or two."""
    level: HostLevel
    text: str
    """The finding, as text."""
    remedy: str = ""
    """Remedy in one line; empty if none is needed."""
    fatal: bool = False
    """Whether --adaptra cannot work at all until this is remedied."""
    details: Mapping[str, object] = field(default_factory=dict)
    """The finding for programs: numbers and names that JSON can hold."""


@dataclass(frozen=True)
class Roots:
    """Directories of sysfs, procfs and devices; tests give their own."""

    sys: Path = Path("/sys")
    proc: Path = Path("/proc")
    dev: Path = Path("/dev")


def read_text(path: Path) -> str:
    """Return the stripped content of a file of sysfs or procfs; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def read_number(path: Path) -> int | None:
    """Return the first number in such a file; None if there is none."""
    words = read_text(path).split()
    try:
        return int(words[0])
    except (IndexError, ValueError):
        return None


def spelled_nbytes(nbytes: int) -> str:
    """Format bytes, such as "64 KiB", "1.5 GiB"."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
