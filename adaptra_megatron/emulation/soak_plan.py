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
LONGEST_STOP_S = 1.5
LONGEST_PATH_FAULT_S = 0.6
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
    SILENT_PATH = "silent device path"
    FAILING_SENDS = "device sends raise"
    FAILING_RECEIVES = "device receives raise"

    @property
    def inside(self) -> bool:
        """Whether the rank itself injects it, and not the driver from outside."""
        return self in (Kind.SILENT_PATH, Kind.FAILING_SENDS, Kind.FAILING_RECEIVES)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault of one stage."""

    number: int
    kind: Kind
    iteration: int
    """Of the stage that it strikes."""
    stage: int
    peer: int
    """Neighbour at the other end of the directed link; means something only to faults of paths."""
    duration_s: float
    """How long a process is stopped, or a path broken; 0 for what is killed."""
    messages: int
    """Faults of paths: how many messages the stage sends in that iteration before."""
    delay: float
    """Faults of processes: how far into the iteration they strike, as a fraction of a typical one."""

    @property
    def link(self) -> tuple[int, int]:
        """Source and target of the directed link whose path breaks."""
        return (self.peer, self.stage) if self.kind is Kind.FAILING_RECEIVES else (self.stage, self.peer)


def make_plan(seed: str, stages: int, counts: Mapping[Kind, int], spacing: int) -> tuple[Fault, ...]:
    """As many faults of each kind as asked for, in random order, at random stages of a pipeline without wrap-around.

    `spacing`: iterations between two faults, on average.
    """
    randomness = random.Random(seed)
    kinds = [kind for kind in Kind for _ in range(counts.get(kind, 0))]
    randomness.shuffle(kinds)
    plan, iteration = [], FIRST_ITERATION
    for number, kind in enumerate(kinds):
        stage = randomness.randrange(stages)
        longest_s = {Kind.KILL_DELEGATE: 0.0}.get(kind, LONGEST_PATH_FAULT_S if kind.inside else LONGEST_STOP_S)
        plan.append(
            Fault(
                number=number,
                kind=kind,
                iteration=iteration,
                stage=stage,
                peer=randomness.choice([peer for peer in (stage - 1, stage + 1) if 0 <= peer < stages]),
                duration_s=randomness.uniform(0.05, longest_s) if longest_s else 0.0,
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
