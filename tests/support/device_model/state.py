# SPDX-License-Identifier: Apache-2.0
"""What the model of the device consists of, and how far each part of it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from support.device_model.calls import Communicator, Program, Rank


@dataclass(frozen=True, kw_only=True)
class Device:
    """What all devices of a job are like."""

    queues: int = 8
    serial: bool = False
    connected: bool = True
    """False: every communicator connects at its first use."""
    launch_order: str | None = None
    """What NCCL_LAUNCH_ORDER_IMPLICIT demands: `started` or `ended`; None: not set."""
    blocks: int | None = None
    """Multiprocessors; None: more than are needed."""
    blocks_per_transfer: int = 1
    blocks_per_collective: int = 1
    trailing_waits: bool = False
    """True if the wait that NCCL puts on a stream of each communicator behind each kernel holds up its queue."""
    timed_records: bool = False
    """True if an event that tells the time holds up its queue until the device has come to it."""
    launches: int | None = None
    """How much of what has not started a queue takes, before a host that launches more is kept; None: any number."""
    noise: float = 0.0
    """How much shorter or longer than said an action's kernels may run, relative."""


@dataclass
class Outcome:
    """What became of a job."""

    makespan_s: float = 0.0
    deadlock: str | None = None
    """Who waits for whom; None: all programs have ended, and all their work."""
    times_s: dict[tuple[Rank, Hashable], tuple[float, float]] = field(default_factory=dict)
    """Start and end of all that has a label, the latest of its name."""
    racing: tuple[Rank, ...] = ()
    """Ranks where several threads launched kernels of NCCL under an implicit launch order."""


class Work:
    """Something on a stream of a device."""

    __slots__ = (
        "after",
        "blocks",
        "call",
        "device",
        "ended",
        "ends",
        "hosts",
        "missing",
        "on_start",
        "open",
        "ordered",
        "previous",
        "queue",
        "started",
        "started_s",
        "then",
    )

    def __init__(self, device: DeviceState, call: Any, queue: int, after: list[Work]) -> None:
        self.device, self.call, self.queue, self.after = device, call, queue, after
        self.previous: Work | None = None
        """On its stream."""
        self.ordered: Work | None = None
        """The kernel of NCCL before it, under an implicit launch order."""
        self.missing = 0
        """How much of these it still waits for."""
        self.started = self.ended = False
        self.started_s = 0.0
        self.then: list[Work] = []
        self.on_start: list[Work] = []
        self.hosts: list[Thread] = []
        """Threads that wait for its end."""
        self.ends: list[Hashable] = []
        """What its transfers are called at this rank."""
        self.open = 0
        """Transfers that have not ended."""
        self.blocks = 0


class Thread:
    """A host thread of a rank."""

    def __init__(self, device: DeviceState, name: str, program: Program) -> None:
        self.device, self.name, self.program = device, name, program
        self.position = 0
        self.works: list[Work] = []
        self.waits = 0
        """For how many works."""
        self.connecting = False
        self.ended = False


class DeviceState:
    """One rank's device and what its hosts share."""

    def __init__(self, rank: Rank, queues: int, blocks: int | None) -> None:
        self.rank = rank
        self.queues: list[deque[Work]] = [deque() for _ in range(queues)]
        self.running: list[Work | None] = [None] * queues
        """What, on a serial device, has started last on each queue."""
        self.queue_of: dict[str, int] = {}
        self.latest: dict[str, Work] = {}
        """By stream."""
        self.ordered: Work | None = None
        """The latest kernel of NCCL."""
        self.unfinished: dict[Work, None] = {}
        self.resident: dict[Work, None] = {}
        self.locked_by: Thread | None = None
        self.parked: list[Thread] = []
        """Threads that want to launch meanwhile."""
        self.free_blocks = blocks
        self.short_of_blocks: set[int] = set()
        """Queues whose first work waits for room."""
        self.kept: list[Thread] = []
        """Threads that find a queue full."""
        self.stalled: list[Work] = []
        """Computation that could end if there were room."""
        self.aborted: set[Communicator] = set()
        self.launching: set[str] = set()
        """Threads that have launched kernels of NCCL."""
        self.threads: list[Thread] = []
