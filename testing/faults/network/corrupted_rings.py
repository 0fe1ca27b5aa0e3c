# SPDX-License-Identifier: Apache-2.0
"""Corrupt the memory of host-path rings, in this process or any other of this user."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Iterator
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
    "together for filled": (88, "<I"),
    "together for emptied": (152, "<I"),
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
    """Corrupt one of a process's rings, selected by `number`, and return it; None if the process uses no ring now."""
    rings = sorted(rings_of(pid).items())
    first = number % max(len(rings), 1)
    for ring, path in rings[first:] + rings[:first]:
        with _opened(ring, path, os.O_RDWR) as descriptor:
            if descriptor is not None and not is_set(descriptor, "closed"):
                corrupt(descriptor, word, way)
                return ring
    return None


def in_use(pid: int, ring: int) -> bool:
    """Return whether a process holds a ring (see `rings_of`) that has not been closed."""
    path = rings_of(pid).get(ring)
    if path is None:
        return False
    with _opened(ring, path, os.O_RDONLY) as descriptor:
        return descriptor is not None and not is_set(descriptor, "closed")


def rings_of(pid: int) -> dict[int, Path]:
    """Return the rings that a process holds: path to open each, by inode, which identifies it."""
    rings = {}
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process has ended
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # closed meanwhile
                if "memfd:adaptra-ring" in os.readlink(entry):
                    rings[entry.stat().st_ino] = entry
    return rings


@contextlib.contextmanager
def _opened(ring: int, path: Path, flags: int) -> Iterator[int | None]:
    """Open a ring by its path; None if the process has closed the ring, even if its descriptor's number was reused."""
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK)  # a pipe would wait for its other end
    except OSError:  # nothing has the number now, or a socket, which cannot be opened
        yield None
        return
    try:
        yield descriptor if os.fstat(descriptor).st_ino == ring else None
    finally:
        os.close(descriptor)


def is_set(descriptor: int, word: str) -> bool:
    """Return whether a word of the ring behind `descriptor` is not 0."""
    offset, form = WORDS[word]
    return any(os.pread(descriptor, struct.calcsize(form), offset))
