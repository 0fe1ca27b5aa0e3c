# SPDX-License-Identifier: Apache-2.0
"""The native calls of the device path on functions that do nothing: what is called, in which order, at what cost."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

from adaptra_megatron.transport.device_session.nccl_library import NcclLibrary

LINK, COMPUTE = 7, 8
"""Streams, as numbers."""


class DeviceCalls:
    """device_calls.c as a library, with what it has noted."""

    def __init__(self, directory: Path) -> None:
        target = directory / "device_calls.so"
        source = Path(__file__).with_suffix(".c")
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", str(source), "-o", str(target)], check=True)
        self.library = ctypes.CDLL(str(target))
        self.library.calls.restype = ctypes.c_char_p
        self.library.events_made.restype = ctypes.c_ulong

    def nccl(self) -> NcclLibrary:
        """NCCL, and CUDA for its transfers."""
        return NcclLibrary(self.library, self.library)

    def set(self, name: str, value: int) -> None:
        """How the functions behave."""
        ctypes.c_int.in_dll(self.library, name).value = value

    def get(self, name: str) -> int:
        """What they say of themselves."""
        return ctypes.c_int.in_dll(self.library, name).value

    def noted(self) -> str:
        """Records on a link's stream (L) and another (C), waits of them (l, c), sends and receives (S, R); once."""
        found: str = self.library.calls().decode()
        self.library.forget_calls()
        return found
