# SPDX-License-Identifier: Apache-2.0
"""What breaks when in a fault campaign: a seeded list, the same for the driver outside and the ranks inside.

Faults are placed by training iteration, not by time: on a slow machine the campaign takes longer, and strikes the same.
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
"""After the last fault: all that is armed begins, and all that broke heals."""
LATEST_MESSAGE = 8
HASTY_PATHS: dict[str, Any] = {
    "first_rest_s": 0.1,
    "longest_rest_s": 0.5,
    "probe_pause_s": 0.005,
    "forgiven_after_s": 5.0,
}
"""Settings of links (`transport.paths.PathSettings`) under which a device path that failed is back before the next
fault."""


class Kind(str, enum.Enum):
    """What a fault does."""

    KILL_DELEGATE = "kill delegate"
    STOP_DELEGATE = "stop delegate"
    STOP_RANK = "stop rank"
    STOP_RANK_LONG = "stop rank for long"
    STOP_STORE = "stop store"
    KILL_STORE = "kill store"
    CORRUPT_RING = "spoil ring"
    UNAUTHENTICATED_PEERS = "strangers"
    SIGNAL_DELEGATE = "signal delegate"
    SILENT_PATH = "silent device path"
    FAILING_SENDS = "device sends raise"
    FAILING_RECEIVES = "device receives raise"

    @property
    def inside(self) -> bool:
        """Return whether the rank itself injects it, and not the driver from outside."""
        return self in (Kind.SILENT_PATH, Kind.FAILING_SENDS, Kind.FAILING_RECEIVES)

    @property
    def needs_store(self) -> bool:
        """Return whether it cannot happen, or not heal, once the job's store is dead: device paths meet there."""
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
"""At least and at most; what is not here is over at once."""


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """How much is broken, over all trainings together. Numbers are multiplied by `rounds`."""

    seed: str = "1"
    rounds: int = 1
    transports: tuple[str, ...] = ("tcp", "shm")
    """Transports of the host path; one training each and per round, and one without a store over one of them."""
    kills: int = 100
    stops: int = 50
    """Half of them of delegates, half of ranks."""
    long_stops: int = 1
    """Ranks that are stopped for long."""
    long_stop_s: float = LONG_STOP_S
    store_stops: int = 6
    corrupted_rings: int = 12
    unauthenticated_peers: int = 8
    signals: int = 12
    """SIGTERM and SIGHUP to delegates."""
    path_faults: int = 60
    """A third each: silence, sends that raise, receives that raise."""
    flaps: int = 1000
    """Switches of a directed link from one path to the other, at least; there are far more than that."""
    spacing: int = 6
    """Iterations between two faults, on average."""
    longest_recovery_s: float = LONGEST_RECOVERY_S
    """How soon after each fault traffic must flow again."""

    def trainings(self, number: int) -> dict[str, str]:
        """The transport of each training of round `number`, by name. The last one is without a store."""
        storeless = self.transports[number % len(self.transports)]
        return {name: name for name in self.transports} | {f"{storeless}-without-store": storeless}

    def counts(self, training: int) -> dict[Kind, int]:
        """How many faults of each kind one of the trainings of a round gets."""
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
    """One fault of one stage; the job's store has none, and is struck when the stage is there."""

    number: int
    kind: Kind
    iteration: int
    """Iteration of the stage that it strikes."""
    stage: int
    peer: int
    """Neighbour at the other end of the directed link; means something only to faults of paths."""
    duration_s: float
    """How long a process is stopped, a path broken, or unauthenticated peers connect; 0 for what is over at once."""
    messages: int
    """Faults of paths: how many messages the stage sends in that iteration before."""
    delay: float
    """Faults of processes: how far into the iteration they strike, as a fraction of a typical one."""

    @property
    def link(self) -> tuple[int, int]:
        """Source and target of the directed link whose path breaks."""
        return (self.peer, self.stage) if self.kind is Kind.FAILING_RECEIVES else (self.stage, self.peer)


def make_plan(
    seed: str, stages: int, counts: Mapping[Kind, int], spacing: int, long_stop_s: float = LONG_STOP_S
) -> tuple[Fault, ...]:
    """As many faults of each kind as asked for, in random order, at random stages of a pipeline without wrap-around.

    A store that is to be killed is so first: all the others happen without it. `spacing`: iterations between two
    faults, on average. `long_stop_s`: how long STOP_RANK_LONG is.
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
    """How many iterations a training must have for all of the plan."""
    return max((fault.iteration for fault in plan), default=FIRST_ITERATION) + QUIET_ITERATIONS


def write_plan(path: Path, plan: Sequence[Fault]) -> None:
    """For `read_plan`."""
    path.write_text(json.dumps([asdict(fault) for fault in plan], indent=1))


def read_plan(path: Path) -> tuple[Fault, ...]:
    """What `write_plan` wrote."""
    return tuple(Fault(**{**entry, "kind": Kind(entry["kind"])}) for entry in json.loads(path.read_text()))
