# SPDX-License-Identifier: Apache-2.0
"""Two supervisors in this process, with real delegates, that join two ends of a link."""

from __future__ import annotations

import os
from collections.abc import Sequence

from adaptra_megatron.common.handshake import JOB_NBYTES, SECRET_NBYTES
from adaptra_megatron.transport.delegate.delegate_control import OpenLink, StartDelegate
from adaptra_megatron.transport.delegate.supervisor import LinkEnd, SupervisedLink, Supervisor
from adaptra_megatron.transport.setup.host_placement import listen_shm, listen_tcp


def supervised(
    ends: Sequence[LinkEnd], transport: str = "shm", slots: int = 4, slot_nbytes: int = 4096
) -> list[Supervisor]:
    """For the caller to close. `transport`: shm or tcp."""
    secret, job = os.urandom(SECRET_NBYTES).hex(), os.urandom(JOB_NBYTES).hex()
    listeners = [listen_shm() if transport == "shm" else listen_tcp("127.0.0.1") for _ in ends]
    running = []
    for stage, (end, peer) in enumerate(zip(ends, (1, 0), strict=True)):
        request = OpenLink(
            peer=peer,
            session=0,
            transport=transport,
            connects=stage == 0,
            address=listeners[peer][1],
            source="",
            lanes=1,
        )
        beginning = StartDelegate(
            rank=stage,
            job=job,
            secret=secret,
            listeners=[transport],
            handshake_s=5.0,
            stall_s=5.0,
            max_message_nbytes=1 << 20,
        )
        running.append(Supervisor(beginning, [listeners[stage][0]], [SupervisedLink(end, request, slots, slot_nbytes)]))
    return running
