# SPDX-License-Identifier: Apache-2.0
"""Places of ranks that had left, which processes that the launcher has started again take."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from adaptra_megatron.epochs.errors import UnrecoverableError
from adaptra_megatron.job.membership import START_VARIABLE, Departure, MembershipRecords

_CONNECT_S, _SEEN_S, _LOOKS_S = 60.0, 60.0, 0.1


def refuse_newcomer(reroute: str, environment: Mapping[str, str] = os.environ) -> None:
    """Raise UnrecoverableError in a process that has been started again by itself, where `reroute`
    (--adaptra-reroute) lets none take part in a job that runs."""
    if environment.get(START_VARIABLE):
        raise UnrecoverableError(
            f"rank {environment['RANK']} has been started again (--max-restarts), but with --adaptra-reroute {reroute} "
            "it cannot join a job that runs: give all ranks --adaptra-reroute failures or all, or drop --max-restarts"
        )


def place_to_take(environment: Mapping[str, str] = os.environ) -> Departure | None:
    """The departure of this process's rank where it has been started again; None where it is the first of its rank.

    Raises UnrecoverableError where the job has not lost that rank, RuntimeError where the store cannot be reached.
    """
    if not environment.get(START_VARIABLE):
        return None
    rank, records = int(environment["RANK"]), MembershipRecords.of_rank(_CONNECT_S, environment)
    deadline_s = time.monotonic() + _SEEN_S
    while time.monotonic() < deadline_s:
        membership = records.newest()
        if membership is not None and rank not in membership.live:
            return membership.departure(rank)
        time.sleep(_LOOKS_S)
    raise UnrecoverableError(
        f"rank {rank} has been started again, but its launcher's coordinator has not seen the end of the one before "
        f"within {_SEEN_S:g} s; look at the launcher of node rank 0"
    )
