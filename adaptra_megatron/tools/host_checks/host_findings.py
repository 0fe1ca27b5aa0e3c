# SPDX-License-Identifier: Apache-2.0
"""Define the findings of a check, and where on a host it looks."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


class HostLevel(str, enum.Enum):
    """Severity of a finding."""

    OK = "ok"
    NOTE = "note"
    """It works, but not as well as it could, or something optional is missing."""
    PROBLEM = "problem"
    """Something that this host should be able to do, it cannot."""


@dataclass(frozen=True, kw_only=True)
class HostFinding:
    """One thing seen."""

    subject: str
    """Subject, in a word or two."""
    level: HostLevel
    text: str
    """In plain words."""
    remedy: str = ""
    """One line; empty where nothing is to be done."""
    fatal: bool = False
    """Set if --adaptra cannot work at all before this is remedied."""
    details: Mapping[str, object] = field(default_factory=dict)
    """The same for programs: numbers and names that JSON can carry."""


@dataclass(frozen=True)
class Roots:
    """Directories of sysfs and procfs; tests give their own."""

    sys: Path = Path("/sys")
    proc: Path = Path("/proc")
    dev: Path = Path("/dev")


def read_text(path: Path) -> str:
    """Content of a file of sysfs or procfs, without white space around it; empty where there is nothing to read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def read_number(path: Path) -> int | None:
    """The first number in such a file; None where there is none."""
    words = read_text(path).split()
    try:
        return int(words[0])
    except (IndexError, ValueError):
        return None


def spelled_nbytes(nbytes: int) -> str:
    """For people: "64 KiB", "1.5 GiB"."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
