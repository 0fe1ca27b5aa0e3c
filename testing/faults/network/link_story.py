# SPDX-License-Identifier: Apache-2.0
"""Generate a seeded random scenario of link faults over many iterations: links turn slow, faults move and heal.

Between these changes there are disturbances that only resemble faults (bursts of jitter, pauses). Pure: a scenario is a
description, which `SlowLinks` and `Pauses` carry out.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from adaptra_megatron.transport.link_paths import Path as LinkPath
from testing.faults.network.link_faults import LinkFault

FIRST_TURN = 9
"""First iteration with a change: by then the detector knows the healthy state, and the first plan runs."""
TURN_DISTANCE = (8, 12)
"""Least and most iterations between changes: enough to detect one, react and see the effect."""
DISTURBANCE_DISTANCE = 4
"""Iterations from a change to a disturbance, when the plan for the change runs."""
LATENCY_ACTIONS = (2.0, 6.0)
"""Least and largest latency of a slow link, in mean action times."""
OCCUPANCY_ACTIONS = (1.5, 3.0)
"""Least and largest occupancy of a link with less bandwidth, in mean action times: still less than the computation
per message."""
JITTER_ACTIONS = 4.0
"""Largest jitter of a burst, in mean action times."""
COLLECTION_ACTIONS = (5.0, 10.0)
"""Length of a pause of one stage within its work, as of a garbage collection, in mean action times."""
SAVE_ACTIONS = (20.0, 40.0)
"""Length of a pause of every stage before an iteration, as for a checkpoint, in mean action times."""


class Direction(NamedTuple):
    """A directed link of one pipeline, or of all pipelines alike."""

    source: int
    target: int
    pipeline: int | None = None
    """First global rank of the pipeline; None: all."""


class Turn(NamedTuple):
    """A lasting change of one directed link."""

    iteration: int
    direction: Direction
    fault: LinkFault | None
    """The fault that begins; None: the link heals."""

    def __str__(self) -> str:
        link = f"{self.direction.source}->{self.direction.target}"
        if self.direction.pipeline is not None:
            link += f" of pipeline {self.direction.pipeline}"
        if self.fault is None:
            return f"iteration {self.iteration}: link {link} heals"
        what = f"latency {self.fault.latency_s * 1e3:.1f} ms, occupancy {self.fault.occupancy_s * 1e3:.1f} ms"
        return f"iteration {self.iteration}: link {link} turns slow, {what}"


@dataclass(frozen=True, kw_only=True)
class Pause:
    """Pause of one stage, in all pipelines alike. No plan can avoid it."""

    iteration: int
    stage: int
    seconds: float
    micro_batch: int | None = None
    """The forward in which it happens; None: before the iteration."""


@dataclass(frozen=True, kw_only=True)
class LinkFaultScenario:
    """All faults of a run of `iterations`."""

    iterations: int
    spells: tuple[LinkFault, ...] = ()
    """Faults that last many iterations."""
    bursts: tuple[LinkFault, ...] = ()
    """Jitter on a healthy link for one iteration."""
    pauses: tuple[Pause, ...] = ()

    @property
    def faults(self) -> tuple[LinkFault, ...]:
        """All faults of links."""
        return (*self.spells, *self.bursts)

    def turns(self) -> tuple[Turn, ...]:
        """Return every lasting change of a link, in order. A fault that follows another on its link has no recovery
        before it.
        """
        begun = {(direction_of(spell), spell.from_iteration) for spell in self.spells}
        found = []
        for spell in self.spells:
            direction = direction_of(spell)
            found.append(Turn(spell.from_iteration, direction, spell))
            until = spell.until_iteration
            if until is not None and until < self.iterations and (direction, until) not in begun:
                found.append(Turn(until, direction, None))
        return tuple(sorted(found, key=lambda turn: (turn.iteration, str(turn))))

    def disturbed(self) -> frozenset[int]:
        """Return the iterations with disturbances that need no reaction."""
        return frozenset([*(burst.from_iteration for burst in self.bursts), *(p.iteration for p in self.pauses)])

    def write(self, path: Path) -> None:
        """Write JSON for `read_story`."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1, default=sorted))


def read_story(path: Path) -> LinkFaultScenario:
    """Read a scenario of `LinkFaultScenario.write`. Raises OSError, ValueError or TypeError."""
    document: dict[str, Any] = json.loads(path.read_text())
    return LinkFaultScenario(
        iterations=document["iterations"],
        spells=tuple(_fault(entry) for entry in document["spells"]),
        bursts=tuple(_fault(entry) for entry in document["bursts"]),
        pauses=tuple(Pause(**entry) for entry in document["pauses"]),
    )


def random_story(
    seed: int,
    *,
    iterations: int,
    stages: int,
    micro_batches: int,
    action_s: float,
    pipelines: Sequence[int] | None = None,
    host_share: float = 0.0,
) -> LinkFaultScenario:
    """Return a scenario of onsets, moves, recoveries and disturbances; the same for the same arguments.

    `stages`: at least 2; the links are those between neighbours, in both directions. `action_s`: mean duration of an
    action, the unit of all times. `pipelines`: first global ranks of pipelines with separate faults; None: all
    pipelines have the same. `host_share`: share of faults that affect the host path as well as the device path.
    """
    return _Author(random.Random(seed), iterations, stages, micro_batches, action_s, pipelines, host_share).write()


class _Author:
    def __init__(
        self,
        chance: random.Random,
        iterations: int,
        stages: int,
        micro_batches: int,
        action_s: float,
        pipelines: Sequence[int] | None,
        host_share: float,
    ) -> None:
        self._host_share = host_share
        self._random, self._iterations, self._action_s = chance, iterations, action_s
        self._stages, self._micro_batches = stages, micro_batches
        self._pipelines: Sequence[int | None] = [None] if pipelines is None else pipelines
        self._slow: dict[Direction, LinkFault] = {}
        """Active faults, as they began."""
        self._spells: list[LinkFault] = []
        self._bursts: list[LinkFault] = []
        self._pauses: list[Pause] = []

    def write(self) -> LinkFaultScenario:
        iteration = FIRST_TURN
        while iteration < self._iterations - DISTURBANCE_DISTANCE:
            self._turn(iteration)
            following = iteration + self._random.randint(*TURN_DISTANCE)
            self._disturb(iteration + DISTURBANCE_DISTANCE)
            iteration = following
        return LinkFaultScenario(
            iterations=self._iterations,
            spells=(*self._spells, *self._slow.values()),
            bursts=tuple(self._bursts),
            pauses=tuple(self._pauses),
        )

    def _turn(self, iteration: int) -> None:
        """Heal or move all active faults, or add one."""
        chance = self._random.random()
        heals = bool(self._slow) and (chance < 0.7 or len(self._slow) > self._stages - 2)
        moves = heals and chance < 0.35
        healed = list(self._slow) if heals else []
        for direction in healed:
            fault = self._slow.pop(direction)
            self._spells.append(dataclasses.replace(fault, until_iteration=iteration))
        if not heals or moves:
            choice = [direction for direction in self._directions() if direction not in (*self._slow, *healed)]
            self._fall(iteration, choice)

    def _fall(self, iteration: int, choice: list[Direction]) -> None:
        """Slow down one link, in one or both directions, and sometimes a second one."""
        for _ in range(1 if self._random.random() < 0.75 else 2):
            if not choice:
                return
            first = self._random.choice(choice)
            back = Direction(first.target, first.source, first.pipeline)
            both_ways = self._random.random() < 0.5 and back in choice
            settings = self._trouble()
            for direction in (first, back) if both_ways else (first,):
                self._slow[direction] = LinkFault(
                    source=direction.source,
                    target=direction.target,
                    pipeline=direction.pipeline,
                    from_iteration=iteration,
                    **settings,
                )
                choice.remove(direction)

    def _trouble(self) -> dict[str, Any]:
        host_too = self._random.random() < self._host_share
        paths = frozenset(LinkPath) if host_too else frozenset({LinkPath.DEVICE})
        if self._random.random() < 0.7:
            return {"latency_s": self._action_s * self._random.uniform(*LATENCY_ACTIONS), "paths": paths}
        return {"occupancy_s": self._action_s * self._random.uniform(*OCCUPANCY_ACTIONS), "paths": paths}

    def _disturb(self, iteration: int) -> None:
        kind = self._random.choice(["nothing", "burst", "collection", "save"])
        healthy = [direction for direction in self._directions() if direction not in self._slow]
        if kind == "burst" and healthy:
            direction = self._random.choice(healthy)
            burst = LinkFault(
                source=direction.source,
                target=direction.target,
                pipeline=direction.pipeline,
                jitter_s=self._action_s * self._random.uniform(1.0, JITTER_ACTIONS),
                from_iteration=iteration,
                until_iteration=iteration + 1,
                seed=self._random.randrange(1 << 16),
            )
            self._bursts.append(burst)
        elif kind == "collection":
            stage, micro_batch = self._random.randrange(self._stages), self._random.randrange(self._micro_batches)
            seconds = self._action_s * self._random.uniform(*COLLECTION_ACTIONS)
            self._pauses.append(Pause(iteration=iteration, stage=stage, seconds=seconds, micro_batch=micro_batch))
        elif kind == "save":
            for stage in range(self._stages):
                seconds = self._action_s * self._random.uniform(*SAVE_ACTIONS)
                self._pauses.append(Pause(iteration=iteration, stage=stage, seconds=seconds))

    def _directions(self) -> Iterator[Direction]:
        for pipeline in self._pipelines:
            for stage in range(self._stages - 1):
                yield Direction(stage, stage + 1, pipeline)
                yield Direction(stage + 1, stage, pipeline)


def _fault(entry: Mapping[str, Any]) -> LinkFault:
    return LinkFault(**{**entry, "paths": frozenset(LinkPath(path) for path in entry["paths"])})


def direction_of(fault: LinkFault) -> Direction:
    """Return the direction of a fault."""
    return Direction(fault.source, fault.target, fault.pipeline)
