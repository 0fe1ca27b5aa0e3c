# SPDX-License-Identifier: Apache-2.0
"""Plan the faults of a fault campaign: a seeded list, the same for the driver outside and the ranks inside.

Faults are placed by training iteration, not by time: on a slow machine the campaign takes longer, with the same faults.
"""

from __future__ import annotations

import enum
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PLAN_FILE = "plan.json"
LONG_STOP_S = 30.0
LONGEST_RECOVERY_S = 2.0
FIRST_ITERATION = 5
QUIET_ITERATIONS = 40
"""Iterations after the last fault, in which pending faults begin and broken parts recover."""
LATEST_MESSAGE = 8
HASTY_PATHS: dict[str, Any] = {
    "first_rest_s": 0.1,
    "longest_rest_s": 0.5,
    "probe_pause_s": 0.005,
    "forgiven_after_s": 5.0,
}
"""`PathSettings` under which a failed device path is back before the next fault."""


class Kind(str, enum.Enum):
    """Kind of fault."""

    KILL_DELEGATE = "kill delegate"
    STOP_DELEGATE = "stop delegate"
    STOP_RANK = "stop rank"
    STOP_RANK_LONG = "stop rank for long"
    STOP_STORE = "stop store"
    KILL_STORE = "kill store"
    CORRUPT_RING = "spoil ring"
    UNAUTHENTICATED_PEERS = "unauthenticated peers"
    SIGNAL_DELEGATE = "signal delegate"
    SILENT_PATH = "silent device path"
    FAILING_SENDS = "device sends raise"
    FAILING_RECEIVES = "device receives raise"

    @property
    def inside(self) -> bool:
        """Return whether the rank injects the fault itself; otherwise the driver does, from outside."""
        return self in (Kind.SILENT_PATH, Kind.FAILING_SENDS, Kind.FAILING_RECEIVES)

    @property
    def needs_store(self) -> bool:
        """Return whether the fault needs the job's store to happen or heal, because device paths meet there."""
        return self.inside or self is Kind.STOP_STORE


_LASTS_S = {
    Kind.STOP_DELEGATE: (0.05, 1.5),
    Kind.STOP_RANK: (0.05, 1.5),
    Kind.STOP_STORE: (0.5, 3.0),
    Kind.UNAUTHENTICATED_PEERS: (1.0, 3.0),
    Kind.SILENT_PATH: (0.05, 0.6),
    Kind.FAILING_SENDS: (0.05, 0.6),
    Kind.FAILING_RECEIVES: (0.05, 0.6),
}
"""Shortest and longest duration in seconds; kinds that are not listed are instantaneous."""


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """Numbers of faults over all trainings of a round; `rounds` multiplies them."""

    seed: str = "1"
    rounds: int = 1
    transports: tuple[str, ...] = ("tcp", "shm")
    """Transports of the host path: one training each per round, and one more, without a store, over one of them."""
    kills: int = 100
    stops: int = 50
    """SIGSTOPs: half of delegates, half of ranks."""
    long_stops: int = 1
    """Long SIGSTOPs of ranks."""
    long_stop_s: float = LONG_STOP_S
    store_stops: int = 6
    corrupted_rings: int = 12
    unauthenticated_peers: int = 8
    signals: int = 12
    """SIGTERM and SIGHUP to delegates."""
    path_faults: int = 60
    """Device-path failures: a third each silence, failing sends, failing receives."""
    flaps: int = 1000
    """Minimum number of path changes of a directed link."""
    spacing: int = 6
    """Mean number of iterations between two faults."""
    longest_recovery_s: float = LONGEST_RECOVERY_S
    """Longest time from a fault until traffic flows again."""

    def trainings(self, number: int) -> dict[str, str]:
        """Return name and transport of each training of round `number`; the last one has no store."""
        storeless = self.transports[number % len(self.transports)]
        return {name: name for name in self.transports} | {f"{storeless}-without-store": storeless}

    def counts(self, training: int) -> dict[Kind, int]:
        """Return the number of faults of each kind in one training of a round."""
        last = len(self.transports)
        totals = {
            Kind.KILL_DELEGATE: self.kills,
            Kind.STOP_DELEGATE: self.stops - self.stops // 2,
            Kind.STOP_RANK: self.stops // 2,
            Kind.STOP_RANK_LONG: self.long_stops,
            Kind.STOP_STORE: self.store_stops,
            Kind.CORRUPT_RING: self.corrupted_rings,
            Kind.UNAUTHENTICATED_PEERS: self.unauthenticated_peers,
            Kind.SIGNAL_DELEGATE: self.signals,
            Kind.SILENT_PATH: self.path_faults - 2 * (self.path_faults // 3),
            Kind.FAILING_SENDS: self.path_faults // 3,
            Kind.FAILING_RECEIVES: self.path_faults // 3,
        }
        shares = {}
        for kind, total in totals.items():
            parts = last if kind.needs_store else last + 1
            share = total * (training + 1) // parts - total * training // parts
            shares[kind] = share if training < parts else 0
        return shares | {Kind.KILL_STORE: int(training == last)}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault of a stage, or of the job's store when the stage is in `iteration`."""

    number: int
    kind: Kind
    iteration: int
    """Iteration of the stage in which it happens."""
    stage: int
    peer: int
    """Stage at the other end of the directed link, for path faults."""
    duration_s: float
    """Duration of a stop, a broken path or a flood of connections; 0: instantaneous."""
    messages: int
    """For path faults: number of messages that the stage sends in the iteration before it."""
    delay: float
    """For process faults: time into the iteration, as a fraction of a typical one."""

    @property
    def link(self) -> tuple[int, int]:
        """Source and target stage of the directed link that fails."""
        return (self.peer, self.stage) if self.kind is Kind.FAILING_RECEIVES else (self.stage, self.peer)


def make_plan(
    seed: str, stages: int, counts: Mapping[Kind, int], spacing: int, long_stop_s: float = LONG_STOP_S
) -> tuple[Fault, ...]:
    """Return a plan with the given number of faults of each kind, in random order, at random stages of a pipeline.

    The pipeline has no wrap-around. If the store is to be killed, that is the first fault: all others happen without
    it. `spacing`: mean number of iterations between faults. `long_stop_s`: duration of STOP_RANK_LONG.
    """
    randomness = random.Random(seed)
    lasts_s = {**_LASTS_S, Kind.STOP_RANK_LONG: (long_stop_s, long_stop_s)}
    kinds = [kind for kind in Kind for _ in range(counts.get(kind, 0))]
    randomness.shuffle(kinds)
    kinds.sort(key=lambda kind: kind is not Kind.KILL_STORE)
    plan, iteration = [], FIRST_ITERATION
    for number, kind in enumerate(kinds):
        stage = randomness.randrange(stages)
        plan.append(
            Fault(
                number=number,
                kind=kind,
                iteration=iteration,
                stage=stage,
                peer=randomness.choice([peer for peer in (stage - 1, stage + 1) if 0 <= peer < stages]),
                duration_s=randomness.uniform(*lasts_s.get(kind, (0.0, 0.0))),
                messages=randomness.randrange(LATEST_MESSAGE),
                delay=randomness.random(),
            )
        )
        iteration += randomness.randint(max(1, spacing // 2), spacing + (spacing + 1) // 2)
    return tuple(plan)


def iterations(plan: Sequence[Fault]) -> int:
    """Return the number of iterations that a training needs for the plan."""
    return max((fault.iteration for fault in plan), default=FIRST_ITERATION) + QUIET_ITERATIONS


def write_plan(path: Path, plan: Sequence[Fault]) -> None:
    """Write a plan for `read_plan`."""
    path.write_text(json.dumps([asdict(fault) for fault in plan], indent=1))


def read_plan(path: Path) -> tuple[Fault, ...]:
    """Read a plan of `write_plan`."""
    return tuple(Fault(**{**entry, "kind": Kind(entry["kind"])}) for entry in json.loads(path.read_text()))
