# SPDX-License-Identifier: Apache-2.0
"""Listen on TCP ports: in a range that firewalls let through (`FIRST-LAST`), and for as many connections as come."""

from __future__ import annotations

import errno
import re
import resource
import socket
from dataclasses import dataclass

from adaptra_megatron.common.log import logger_of

logger = logger_of(__name__)

BACKLOG = 128
_OTHER_FILES = 32
"""Descriptors besides those of ranks: a process's own files, and connections before their handshake."""


@dataclass(frozen=True)
class PortRange:
    """Ports from `first` to `last`, both included. Raises ValueError at construction."""

    first: int
    last: int

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.last <= 65535:
            raise ValueError(
                f"the ports {self.first}-{self.last} are no range: FIRST-LAST must be from 1 to 65535, and FIRST not "
                "above LAST, for example 20000-20127"
            )

    @classmethod
    def parsed(cls, text: str) -> PortRange:
        """Parse a range, FIRST-LAST. Raises ValueError."""
        found = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", text)
        if found is None:
            raise ValueError(f"{text!r} is no range of ports: give FIRST-LAST, for example 20000-20127")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"


def bound_within(host: str, ports: PortRange | None) -> socket.socket:
    """Return a TCP socket that listens on the address `host`, at the first free port of `ports`; None: at any port.

    Safe against other processes that search the same range at the same time. Raises OSError: EADDRINUSE if no port of
    the range is free.
    """
    if ports is None:
        return _listening(host, 0)
    for port in range(ports.first, ports.last + 1):
        try:
            return _listening(host, port)
        except OSError as cause:
            if cause.errno != errno.EADDRINUSE:
                raise
    raise OSError(
        errno.EADDRINUSE,
        f"no port of {ports} is free; a rank needs up to 6 of them, so give more by --adaptra-port-range",
    )


def _listening(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if port:
            # Connections of a job that has just ended keep its ports for a minute otherwise. Two sockets may then be
            # bound to one port, but only one of them can listen.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def allow_connections(ranks: int, what: str, each: int = 1) -> None:
    """Raise this process's limit of open files to the maximum; warn if `ranks` with `each` so many connections exceed
    it. `what`: the process, as text."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if most < ranks * each + _OTHER_FILES:
        logger.warning(
            "%d ranks connect to this %s, which may open %d files: raise the hard limit (ulimit -Hn)",
            *(ranks, what, most),
        )
