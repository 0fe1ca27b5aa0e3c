# SPDX-License-Identifier: Apache-2.0
"""Replicas that follow one list of arrivals: `update_log_ranks.py leaves|dies|goes-on`.

`leaves`: one ends after its first update; `dies`: it is killed; all others print the error that they get. `goes-on`: a
replica says that gradients take it three times as long, all meet in the end and print what they made.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import torch.distributed as dist

from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.gradsync.mode_decider import Gradient
from adaptra_megatron.gradsync.peer_messages import PeerError
from adaptra_megatron.gradsync.sync_modes import ModeKind
from adaptra_megatron.gradsync.update_log import UpdateLog
from adaptra_megatron.gradsync.update_order import CatchUp, Handover, Met, Update

TIMEOUT_S = 60.0
VICTIM, UPDATES = 1, 24


def follow(log: UpdateLog, own: int) -> list[tuple[int, ...]]:
    """Hand gradients in up to the last update, as a training does; members of the updates that this one was in."""
    version, made = 0, []
    opens = False
    while version < UPDATES:
        if opens:
            log.begin()
        log.hand_in(Gradient(3.0 if own == VICTIM else 1.0, 1.0, None))
        found = log.next()
        assert isinstance(found, Update | CatchUp)
        version = found.version
        if isinstance(found, CatchUp):
            continue
        made.append(found.members)
        version += 1
        log.reached(version)
        opens = not found.whole and found.begins == own
    assert version == UPDATES
    log.meet()
    assert log.next() == Met(UPDATES)
    return made


def main(what: str) -> None:
    """One rank."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    rank, carried = dist.get_rank(), []

    def carry(handover: Handover, version: int, gives: bool) -> None:
        carried.append((version, *handover, gives))

    log = UpdateLog(
        ControlStore.of_job("test"),
        range(dist.get_world_size()),
        rank,
        rank,
        leads=True,
        kinds=(ModeKind.X_ORDER,),
        max_staleness=3,
        timeout_s=TIMEOUT_S,
        carry=carry,
    )
    if what == "goes-on":
        made = follow(log, rank)
        log.close()
        sys.stdout.write(f"RESULT {made} {carried}\n")
        return
    log.hand_in(Gradient(1.0, 1.0, None))
    assert log.next() == Update(0, (0, 1, 2), (), (), True, 3)
    log.reached(1)
    dist.barrier()
    if rank == VICTIM and what == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == VICTIM:
        log.close()
        return
    begun_s = time.monotonic()
    log.hand_in(Gradient(1.0, 1.0, None))
    try:
        log.next()
    except PeerError as error:
        sys.stdout.write(f"RESULT {time.monotonic() - begun_s:.3f} {error}\n")


if __name__ == "__main__":
    main(sys.argv[1])
