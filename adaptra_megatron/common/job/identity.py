# SPDX-License-Identifier: Apache-2.0
"""Find which processes share a clock, which share memory, and which see each other."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from adaptra_megatron.common.log import logger_of

logger = logger_of(__name__)


def boot_identity(proc: Path = Path("/proc")) -> str:
    """Equal for two processes exactly if they share a monotonic clock: the same boot of the same kernel.

    Where the kernel (or a sandbox in its place) does not say so, no other process has the same.
    """
    try:
        return (proc / "sys/kernel/random/boot_id").read_text().strip()
    except OSError as cause:
        logger.warning("this host does not say which one it is (%s): no shared memory with other processes", cause)
        return f"unknown-{secrets.token_hex(16)}"


def host_identity(proc: Path = Path("/proc")) -> str:
    """Equal for two processes exactly if they can share memory through abstract unix sockets.

    The same boot of the same kernel, and the same network namespace: containers of one host may have their own. Where
    that is not said, no other process has the same: tcp works between any two.
    """
    try:
        return f"{boot_identity(proc)}/{os.stat(proc / 'self/ns/net').st_ino}"
    except OSError as cause:
        logger.warning("this process does not say which network it is in (%s): no shared memory with others", cause)
        return f"unknown-{secrets.token_hex(16)}/unknown"


def process_identity(proc: Path = Path("/proc")) -> str:
    """Equal for two processes exactly if they see each other by their process ids. Where that is not said, no other
    process has the same."""
    try:
        return f"{boot_identity(proc)}/{os.stat(proc / 'self/ns/pid').st_ino}"
    except OSError:
        return f"unknown-{secrets.token_hex(16)}"
