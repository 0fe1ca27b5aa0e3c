# SPDX-License-Identifier: Apache-2.0
"""Rings of the host path whose memory is changed by something else, in this process or any other of this user."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from pathlib import Path

PAGE = 4096
WORDS = {
    "magic": (0, "<Q"),
    "version": (8, "<I"),
    "slots": (12, "<I"),
    "slot_nbytes": (16, "<Q"),
    "closed": (24, "<I"),
    "published": (64, "<Q"),
    "waiting for filled": (76, "<I"),
    "urgent for filled": (80, "<I"),
    "released": (128, "<Q"),
    "waiting for emptied": (140, "<I"),
    "urgent for emptied": (144, "<I"),
}
"""Offsets in the first page, as in Ring::Shared of csrc/ring. Counts of an arrival signal may have any value."""
WAYS = 4


def corrupt(descriptor: int, word: str, way: int) -> None:
    """Change a word of the ring behind `descriptor`: to 0, to all ones, or by one up or down (`way` 0 to 3)."""
    offset, form = WORDS[word]
    with mmap.mmap(descriptor, PAGE) as memory:
        (value,) = struct.unpack_from(form, memory, offset)
        ones = (1 << 8 * struct.calcsize(form)) - 1
        new = (0, ones, (value + 1) & ones, (value - 1) & ones)[way]
        struct.pack_into(form, memory, offset, new if new != value else ones)


def corrupt_one_of(pid: int, number: int, word: str, way: int) -> int | None:
    """Corrupt one of the rings that a process uses, chosen by `number`, and return which; None if it uses none now."""
    rings = sorted(rings_of(pid).items())
    first = number % max(len(rings), 1)
    for ring, path in rings[first:] + rings[:first]:
        if in_use(path):
            with contextlib.suppress(FileNotFoundError), path.open("r+b", buffering=0) as file:
                corrupt(file.fileno(), word, way)
                return ring
    return None


def in_use(path: Path | None) -> bool:
    """Return whether the ring at a path of `rings_of` is there and has not been closed."""
    offset, form = WORDS["closed"]
    with contextlib.suppress(FileNotFoundError):
        if path is not None:
            with path.open("rb", buffering=0) as file:
                return not any(os.pread(file.fileno(), struct.calcsize(form), offset))
    return False


def rings_of(pid: int) -> dict[int, Path]:
    """The rings that a process holds: by inode, which names a ring, the path under which it can be opened."""
    rings = {}
    with contextlib.suppress(FileNotFoundError):  # the process has ended
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if "memfd:adaptra-ring" in os.readlink(entry):
                    rings[entry.stat().st_ino] = entry
    return rings
