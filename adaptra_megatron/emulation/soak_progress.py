# SPDX-License-Identifier: Apache-2.0
"""Where the training of a fault campaign is: ranks write it, the driver beside the job reads it. No torch here."""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

_NUMBER = struct.Struct("<q")


class Progress:
    """The iteration that each stage is in, in a file that ranks and driver map."""

    def __init__(self, directory: Path, stages: int) -> None:
        """Made by whoever comes first; -1 until a stage has begun."""
        descriptor = os.open(directory / "progress", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            os.ftruncate(descriptor, stages * _NUMBER.size)
            self._map = mmap.mmap(descriptor, stages * _NUMBER.size)
        finally:
            os.close(descriptor)

    def set(self, stage: int, iteration: int) -> None:
        """`stage` begins `iteration`."""
        _NUMBER.pack_into(self._map, stage * _NUMBER.size, iteration + 1)

    def get(self, stage: int) -> int:
        """The iteration that `stage` is in."""
        number: int = _NUMBER.unpack_from(self._map, stage * _NUMBER.size)[0]
        return number - 1

    def close(self) -> None:
        """Unmap."""
        self._map.close()
