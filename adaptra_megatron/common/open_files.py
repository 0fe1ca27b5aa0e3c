# SPDX-License-Identifier: Apache-2.0
"""Allow a process as many open files as the ranks that connect to it need."""

from __future__ import annotations

import contextlib
import resource

from adaptra_megatron.common.log import logger_of

logger = logger_of(__name__)

_OTHER_FILES = 32
"""Descriptors besides those of ranks: a process's own files, and connections before their handshake."""


def allow_connections(ranks: int, what: str, each: int = 1) -> None:
    """Raise this process's limit of open files to the maximum; warn if `ranks` with `each` so many connections exceed
    it. `what`: the process, as text."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # the system's own maximum is lower
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < ranks * each + _OTHER_FILES:
        logger.warning(
            "%d ranks connect to this %s, which may open %d files: raise the hard limit (ulimit -Hn)",
            *(ranks, what, most),
        )
