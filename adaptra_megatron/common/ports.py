# SPDX-License-Identifier: Apache-2.0
"""Ranges of TCP ports that a job may listen on, for firewalls that let some through: `FIRST-LAST`."""

from __future__ import annotations

import errno
import re
import socket
from dataclasses import dataclass

BACKLOG = 128


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
