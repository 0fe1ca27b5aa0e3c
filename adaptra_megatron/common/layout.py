# SPDX-License-Identifier: Apache-2.0
"""Describe the job as a grid of cells: each rank's stage, replica and host, and which ranks share clocks and memory."""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from adaptra_megatron.common.log import logger_of

logger = logger_of(__name__)


def boot_identity(proc: Path = Path("/proc")) -> str:
    """Return a value that is equal for two processes exactly if they share a monotonic clock: one boot of a kernel.

    If the kernel (or a sandbox in its place) does not identify its boot, no other process has the same value.
    """
    try:
        return (proc / "sys/kernel/random/boot_id").read_text().strip()
    except OSError as cause:
        logger.warning("this host cannot be identified (%s): no shared memory with other processes", cause)
        return f"unknown-{secrets.token_hex(16)}"


def host_identity(proc: Path = Path("/proc")) -> str:
    """Return a value that is equal for two processes exactly if they can share memory through abstract unix sockets.

    They can if both the boot of the kernel and the network namespace are the same; containers of one host may have
    their own namespaces. If either is unknown, the value is unique: tcp works between any two processes.
    """
    try:
        return f"{boot_identity(proc)}/{os.stat(proc / 'self/ns/net').st_ino}"
    except OSError as cause:
        logger.warning("the network of this process cannot be identified (%s): no shared memory with others", cause)
        return f"unknown-{secrets.token_hex(16)}/unknown"


class Cell(NamedTuple):
    """All ranks of a stage of one replica: they share collectives in F, B and W, compute, slow and fail together."""

    replica: int
    stage: int

    def __str__(self) -> str:
        return f"{self.replica}.{self.stage}"


class Introduction(NamedTuple):
    """Description of one rank, gathered once at the start."""

    rank: int
    pipeline: int
    """First global rank of its pipeline."""
    stage: int
    joined: list[int]
    """First global rank of each group whose collectives it joins inside F, B and W."""
    host: str
    """Name of its host, for messages."""
    identity: str
    """See `host_identity`."""
    token: str
    """Random, and new each time; the first rank's becomes the layout's."""
    rnics: str = ""
    """Names of the RDMA devices that it uses or would use, separated by commas."""


class WorkerRecord(NamedTuple):
    """One rank's entry in a `LayoutRecord`."""

    rank: int
    replica: int
    stage: int
    lane: int
    host: str
    identity: str
    rnics: str = ""


class LayoutRecord(NamedTuple):
    """A job's layout as stored for restarted ranks."""

    token: str
    together: bool
    workers: list[WorkerRecord]


@dataclass(frozen=True)
class Worker:
    """Position and host of one rank."""

    cell: Cell
    lane: int
    """Index of its pipeline among those of its replica; the same in all stages."""
    host: str
    identity: str
    """Equal for two ranks exactly if they can share memory."""
    rnics: str = ""
    """As in `Introduction`, for messages."""

    @property
    def boot(self) -> str:
        """Equal for two ranks exactly if they share a monotonic clock."""
        return self.identity.partition("/")[0]


class JobLayout:
    """The whole job as one of its ranks sees it. It is constant, except for the hosts of restarted ranks."""

    def __init__(
        self,
        rank: int,
        workers: Mapping[int, Worker],
        token: str = "",
        *,
        together: bool = False,
        live: Collection[int] | None = None,
    ) -> None:
        """`workers`: by global rank. `token`: the same on all ranks, and new each time they gather. `live`: ranks that
        report and take part in decisions; None: all.

        `together`: whether one rank decides for all replicas, as when micro-batches may be routed between them.
        """
        self.rank, self.workers, self.token, self.together = rank, dict(workers), token, together
        self._live = frozenset(workers if live is None else live)

    @classmethod
    def recorded(cls, record: LayoutRecord, rank: int) -> JobLayout:
        """Return the layout that `rank` sees, from its stored record."""
        workers = {each.rank: Worker(Cell(each.replica, each.stage), *each[3:]) for each in record.workers}
        return cls(rank, workers, record.token, together=record.together)

    def alive(self, live: Collection[int]) -> JobLayout:
        """Return the same job, in which only `live` ranks report and decide."""
        return JobLayout(self.rank, self.workers, self.token, together=self.together, live=live)

    def record(self) -> LayoutRecord:
        """Return the layout as a record to store."""
        workers = [
            WorkerRecord(rank, each.cell.replica, each.cell.stage, each.lane, each.host, each.identity, each.rnics)
            for rank, each in self.workers.items()
        ]
        return LayoutRecord(self.token, self.together, workers)

    def move(self, rank: int, host: str, identity: str) -> None:
        """Record that a rank now runs on this host."""
        self.workers[rank] = replace(self.workers[rank], host=host, identity=identity)

    @property
    def cell(self) -> Cell:
        """Cell of this rank."""
        return self.workers[self.rank].cell

    @property
    def leader(self) -> int:
        """Rank that decides for this rank's replica, or for all replicas."""
        return min(self.reporters)

    @cached_property
    def reporters(self) -> Sequence[int]:
        """Ranks that are planned for together: an iteration is complete once all of their measurements are there.

        These are the ranks of this rank's replica if it shares no collective inside F, B and W with another, else of
        the job. All lanes report, since each has links and NICs of its own: from one lane alone, a slow link would pass
        for a slow cell.
        """
        own = self.cell.replica
        planned_for = (rank for rank in self._live if self.together or self.workers[rank].cell.replica == own)
        return sorted(planned_for)

    @cached_property
    def replicas(self) -> int:
        """Number of replicas."""
        return len({worker.cell.replica for worker in self.workers.values()})

    @property
    def decides_apart(self) -> bool:
        """Return whether there are several replicas, each with its own leader and plans."""
        return self.replicas > 1 and not self.together

    @cached_property
    def cells(self) -> Mapping[Cell, Sequence[int]]:
        """Ranks of each cell, by lane."""
        found: dict[Cell, list[int]] = {}
        for rank, worker in sorted(self.workers.items(), key=lambda item: (item[1].cell, item[1].lane)):
            found.setdefault(worker.cell, []).append(rank)
        return found

    @cached_property
    def pipeline(self) -> Sequence[int]:
        """Ranks of this rank's pipeline, by stage."""
        return self.pipeline_of(self.rank)

    def pipeline_of(self, rank: int) -> Sequence[int]:
        """Return the ranks of the pipeline of `rank`, by stage."""
        worker, found = self.workers[rank], list[int]()
        while (cell := Cell(worker.cell.replica, len(found))) in self.cells:
            found.append(self.cells[cell][worker.lane])
        return found

    @property
    def first_ranks(self) -> tuple[tuple[int, ...], ...]:
        """First ranks of the pipelines of each replica."""
        return tuple(tuple(self.cells[cell]) for cell in self.cells_of(0))

    def cells_of(self, stage: int) -> Sequence[Cell]:
        """Return the cells of one stage, by replica: they hold the same weights."""
        return [cell for cell in self.cells if cell.stage == stage]

    def reporter(self, cell: Cell) -> int:
        """Return the rank that reports for a cell."""
        return self.cells[cell][0]

    def share_clock(self, ranks: Iterable[int]) -> bool:
        """Return whether all of `ranks` run on one host, whose monotonic clock they share."""
        return len({self.workers[rank].boot for rank in ranks}) == 1

    def share_network(self, ranks: Iterable[int]) -> bool:
        """Return whether all of `ranks` reach each other by loopback. Containers of one host may be unable to."""
        return len({self.workers[rank].identity for rank in ranks}) == 1

    def name(self, rank: int) -> str:
        """Return the name of a rank in messages."""
        worker = self.workers[rank]
        return f"rank {rank} (stage {worker.cell.stage} on {worker.host})"


def layout_of(introductions: Sequence[Introduction], rank: int, *, together: bool = False) -> JobLayout:
    """Return the layout that `rank` sees, from the introductions of all ranks. `together`: see `JobLayout`.

    A replica consists of pipelines that share groups: if experts are spread over data-parallel ranks, of all of these.
    Replicas are numbered by their first ranks.
    """
    root = {each.rank: each.rank for each in introductions}

    def first_of(member: int) -> int:
        while root[member] != member:
            root[member] = root[root[member]]
            member = root[member]
        return member

    for each in introductions:
        for other in (each.pipeline, *each.joined):
            low, high = sorted((first_of(each.rank), first_of(other)))
            root[high] = low
    replicas = {first: number for number, first in enumerate(sorted({first_of(member) for member in root}))}
    pipelines: dict[int, set[int]] = {}
    for each in introductions:
        pipelines.setdefault(replicas[first_of(each.rank)], set()).add(each.pipeline)
    lanes = {first: lane for firsts in pipelines.values() for lane, first in enumerate(sorted(firsts))}
    workers = {}
    for each in introductions:
        cell = Cell(replicas[first_of(each.rank)], each.stage)
        workers[each.rank] = Worker(cell, lanes[each.pipeline], each.host, each.identity, each.rnics)
    return JobLayout(rank, workers, introductions[0].token, together=together)
