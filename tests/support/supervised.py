# SPDX-License-Identifier: Apache-2.0
"""Two supervisors in this process, with real delegates, that join two ends of a link."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from adaptra_megatron.transport.control import Open, Start
from adaptra_megatron.transport.handshake import PIPELINE_NBYTES, SECRET_NBYTES
from adaptra_megatron.transport.placement import listen_shm, listen_tcp
from adaptra_megatron.transport.supervisor import Link, LinkEnd, Supervisor


def supervised(
    ends: Sequence[LinkEnd], transport: str = "shm", slots: int = 4, slot_nbytes: int = 4096
) -> list[Supervisor]:
    """For the caller to close. `transport`: shm or tcp."""
    secret, pipeline = os.urandom(SECRET_NBYTES).hex(), os.urandom(PIPELINE_NBYTES).hex()
    listeners = [listen_shm() if transport == "shm" else listen_tcp("127.0.0.1") for _ in ends]
    running = []
    for stage, (end, peer) in enumerate(zip(ends, (1, 0), strict=True)):
        request = Open(
            peer=peer,
            session=0,
            transport=transport,
            connects=stage == 0,
            address=listeners[peer][1],
            source="",
            lanes=1,
        )
        beginning = Start(
            stage=stage,
            pipeline=pipeline,
            secret=secret,
            listeners=[transport],
            handshake_s=5.0,
            stall_s=5.0,
            max_message_nbytes=1 << 20,
        )
        running.append(Supervisor(beginning, [listeners[stage][0]], [Link(end, request, slots, slot_nbytes)]))
    return running


def until(condition: Callable[[], Any], otherwise: Callable[[], str], limit_s: float = 15.0) -> None:
    """Wait until `condition()`; an error with `otherwise()` after `limit_s`."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, otherwise()
        time.sleep(0.01)
