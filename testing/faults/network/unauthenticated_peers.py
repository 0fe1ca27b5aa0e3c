# SPDX-License-Identifier: Apache-2.0
"""Connect to a job's listeners without its secret: some peers are silent, others send invalid data."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from collections import deque
from collections.abc import Collection

from adaptra_megatron.common.handshake import CHALLENGE_NBYTES

_MOST_OPEN = 200
"""Connections at once: three times as many as a acceptor lets wait unproven."""
_PAUSE_S = 0.002
_CONNECT_S = 0.5
_RUBBISH_NBYTES = 4096


def flood(ports: Collection[int], names: Collection[str], seconds: float) -> int:
    """Connect to each TCP port of this host and each abstract unix name ("@...") in turn, for `seconds`.

    Returns the number of connections that were answered with a challenge.
    """
    places: list[tuple[int, tuple[str, int] | str]] = [(socket.AF_INET, ("127.0.0.1", port)) for port in ports]
    places += [(socket.AF_UNIX, "\0" + name[1:]) for name in names]
    answered, until_s = 0, time.monotonic() + seconds
    waiting: deque[socket.socket] = deque()
    for number, (family, address) in enumerate(itertools.cycle(places)):
        if time.monotonic() >= until_s:
            break
        waiting.append(_knock(family, address, rubbish=bool(number // len(places) % 2)))
        if len(waiting) > _MOST_OPEN:
            answered += _leave(waiting.popleft())
        time.sleep(_PAUSE_S)
    return answered + sum(_leave(peer) for peer in waiting)


def _knock(family: int, address: tuple[str, int] | str, *, rubbish: bool) -> socket.socket:
    peer = socket.socket(family)
    peer.settimeout(_CONNECT_S)
    with contextlib.suppress(OSError):  # nothing listens, or the backlog is full
        peer.connect(address)
        if rubbish:
            peer.send(os.urandom(_RUBBISH_NBYTES))
    peer.setblocking(False)
    return peer


def _leave(peer: socket.socket) -> bool:
    """Return whether the connection got a challenge."""
    with peer, contextlib.suppress(OSError):
        return len(peer.recv(CHALLENGE_NBYTES)) == CHALLENGE_NBYTES
    return False
