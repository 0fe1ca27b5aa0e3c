# SPDX-License-Identifier: Apache-2.0
"""Share the progress of a fault campaign's training: ranks write it, the driver outside reads it. No torch here."""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

_ENTRY = struct.Struct("<qq")


class Progress:
    """Process id and iteration of each stage, in a file that ranks and driver map."""

    def __init__(self, directory: Path, stages: int) -> None:
        """Map the file, creating it if needed; zeros until a stage writes."""
        descriptor = os.open(directory / "progress", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            os.ftruncate(descriptor, stages * _ENTRY.size)
            self._map = mmap.mmap(descriptor, stages * _ENTRY.size)
        finally:
            os.close(descriptor)

    def set(self, stage: int, iteration: int) -> None:
        """Record that `stage`, which is this process, begins `iteration` (from 0)."""
        _ENTRY.pack_into(self._map, stage * _ENTRY.size, os.getpid(), iteration)

    def process_id(self, stage: int) -> int:
        """Return the process id of `stage`; 0 until it has begun its first iteration."""
        pid: int = _ENTRY.unpack_from(self._map, stage * _ENTRY.size)[0]
        return pid

    def iteration(self, stage: int) -> int:
        """Return the iteration that `stage` has begun last."""
        number: int = _ENTRY.unpack_from(self._map, stage * _ENTRY.size)[1]
        return number

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()
