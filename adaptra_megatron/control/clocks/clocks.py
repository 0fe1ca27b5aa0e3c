# SPDX-License-Identifier: Apache-2.0
"""Relates the monotonic clocks of the job's hosts when it begins, so that one-way times make sense.

Ranks meet in pairs, and only those whose clocks differ: each with the first stage of its pipeline, and one first stage
of each host with the job's. How clocks stay related while the job runs: clock_service.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from adaptra_megatron.common.job.control_store import ControlStore
from adaptra_megatron.common.job.gathering import epoch_group
from adaptra_megatron.common.job.layout import JobLayout
from adaptra_megatron.common.log import logger_of
from adaptra_megatron.common.ports import PortRange
from adaptra_megatron.common.typed_messages import packed, unpacked
from adaptra_megatron.control.clocks.clock_service import (
    INTERVAL_S,
    MAX_DRIFT,
    Address,
    ClockFollower,
    ClockLine,
    ClockServer,
    RelatedClock,
)
from adaptra_megatron.transport.message_keys import TransportError
from adaptra_megatron.transport.setup.host_placement import listen_tcp, listening_host

logger = logger_of(__name__)

ROUNDS = 8
_MOST_NBYTES = 1 << 10


@dataclass(frozen=True)
class ClockSettings:
    """Settings of the clock servers, which relate the clocks of different hosts."""

    interface: str | None = None
    """Network interface that the server listens on; None: torch.distributed's, or the one that leads to the master."""
    bind: str | None = None
    """Address that the server listens on; overrides `interface`."""
    port_range: PortRange | None = None
    """TCP ports that the server may listen on; None: any that is free."""
    interval_s: float = INTERVAL_S


class _FirstStage(NamedTuple):
    """Entry of a pipeline's first stage in the job's store: its clock, and where its server listens."""

    to_job_s: float
    """Seconds from this stage's clock to the job's: add it."""
    address: Address | None
    """Address of the clock server; None where there is no server."""


def now_s() -> float:
    """This rank's monotonic clock, in seconds: the one that is related to other hosts'."""
    return time.monotonic()


def relate_clocks(
    control: ControlStore, layout: JobLayout, timeout_s: float, settings: ClockSettings | None = None
) -> RelatedClock:
    """This rank's clock as related to that of its pipeline's first stage, by which links are timed, and to the job's:
    that of the first of all first stages. Called by all ranks of the job; each waits for those alone that it needs.

    Raises RuntimeError when one of these does not come within the timeout.
    """
    if layout.share_clock(layout.workers):
        return RelatedClock(0.0)
    return _Relating(control, layout, timeout_s, settings or ClockSettings()).relate()


class _Relating:
    def __init__(self, control: ControlStore, layout: JobLayout, timeout_s: float, settings: ClockSettings) -> None:
        self._control, self._layout, self._timeout_s, self._settings = control, layout, timeout_s, settings
        self._store = control.client("clocks")
        self._store.set_timeout(timedelta(seconds=timeout_s))

    def relate(self) -> RelatedClock:
        layout, first = self._layout, self._layout.pipeline[0]
        if layout.rank == first:
            return self._relate_first()
        near = layout.share_clock((layout.rank, first))
        offset_s = 0.0 if near else self._ask(first)
        to_job_s, address = self._read(first)
        if near or address is None:
            return RelatedClock(offset_s, to_job_s)
        follower = ClockFollower(
            address,
            self._control.secret,
            ClockLine(now_s(), offset_s, 0.0, float("inf"), MAX_DRIFT),
            name=f"rank {layout.rank}",
            clock=now_s,
            interval_s=self._settings.interval_s,
        )
        return RelatedClock(offset_s, to_job_s, follower=follower)

    def _relate_first(self) -> RelatedClock:
        layout, rank = self._layout, self._layout.rank
        to_job_s = self._to_job_s()
        remote = [other for other in layout.pipeline if not layout.share_clock((rank, other))]
        server, address = self._serve() if remote else (None, None)
        self._store.set(str(rank), packed(_FirstStage(to_job_s, address)))
        for other in remote:
            self._answer(other)
        return RelatedClock(0.0, to_job_s, server=server)

    def _to_job_s(self) -> float:
        """Seconds to add to the clock of this first stage to get the job's. One of each host asks for all of them."""
        layout, rank = self._layout, self._layout.rank
        hosts: dict[str, int] = {}
        for cell in layout.cells_of(0):
            for first in layout.cells[cell]:
                hosts.setdefault(layout.workers[first].boot, first)
        reference, *others = hosts.values()
        asks = hosts[layout.workers[rank].boot]
        if rank == reference:
            for other in others:
                self._answer(other)
        if asks == reference:
            return 0.0
        return self._ask(reference) if asks == rank else self._read(asks).to_job_s

    def _read(self, first: int) -> _FirstStage:
        try:
            said: _FirstStage = unpacked(self._store.get(str(first)), _FirstStage, _MOST_NBYTES)
        except ValueError as cause:
            raise RuntimeError(f"the clock entry of rank {first} in the job's store is invalid: {cause}") from cause
        return said

    def _ask(self, other: int) -> float:
        return offset_to(self._pair(other, self._layout.rank), 0)

    def _answer(self, other: int) -> None:
        serve_clock(self._pair(self._layout.rank, other), 1)

    def _pair(self, answers: int, asks: int) -> Any:
        ranks: Sequence[int] = (answers, asks)
        return epoch_group(self._control, f"clocks/{answers}-{asks}", ranks, self._layout.rank, self._timeout_s)

    def _serve(self) -> tuple[ClockServer | None, Address | None]:
        """This rank's clock, for those on other hosts; nothing where they could not reach it."""
        try:
            host = self._settings.bind or listening_host(self._settings.interface, one_host=False)
            listener, (address, port) = listen_tcp(host, self._settings.port_range)
        except TransportError as cause:
            logger.warning("host clock offsets are measured at start-up only and will drift: %s", cause)
            return None, None
        return ClockServer(listener, self._control.secret, now_s), (str(address), int(port))


def serve_clock(group: Any, peer: int) -> None:
    """Answer `offset_to` of `peer` in an `epoch_group`. Raises RuntimeError when the group's timeout expires."""
    for _ in range(ROUNDS):
        group.recv([torch.zeros(1, dtype=torch.float64)], peer, 0).wait()
        group.send([torch.tensor([now_s()], dtype=torch.float64)], peer, 0).wait()


def offset_to(group: Any, peer: int) -> float:
    """Seconds to add to this rank's monotonic clock to get `peer`'s; the error is below half the best round trip.

    `peer` of this `epoch_group` must run `serve_clock` at the same time. Raises RuntimeError when the group's timeout
    expires.
    """
    best_round_trip, best_offset = float("inf"), 0.0
    answer = torch.zeros(1, dtype=torch.float64)
    for _ in range(ROUNDS):
        start = now_s()
        group.send([torch.zeros(1, dtype=torch.float64)], peer, 0).wait()
        group.recv([answer], peer, 0).wait()
        end = now_s()
        if end - start < best_round_trip:
            best_round_trip, best_offset = end - start, answer.item() - (start + end) / 2
    return best_offset
