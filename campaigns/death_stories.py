# SPDX-License-Identifier: Apache-2.0
"""What strikes a training of the campaign of deaths: who dies when, who comes back, and what is late meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from campaigns.dying_trainings import SHARDED, Layout
from testing.faults.deaths import POINTS

FIRST_DEATH, LAST_DEATH = 1, 3
"""Iterations. While links are set up, in the first, no rank failure is survived."""
ADMISSION_MS, NEARLY_MS, IDLE_S, READY_S = 60, 8, 2, 10
LATE = 0.6
"""Share of runs in which more is late than what their story is about."""
A_LITTLE = ("collectives:0.2:10", "store:0.1:10", "threads:0.3:20", "messages:0.1:10", "interruptions:0.5:50")
LONG = ("collectives:0.01:400", "store:0.01:300", "threads:0.1:200", "messages:0.02:200", "interruptions:0.5:300")


@dataclass(frozen=True)
class Story:
    """Deaths of one run (see --emulate-death), the iterations that wait until all stand ready again, and what is late
    (see --emulate-late)."""

    deaths: tuple[str, ...]
    back: tuple[int, ...] = ()
    late: tuple[str, ...] = ()

    def struck(self, layout: Layout) -> set[tuple[int, int]]:
        """Cells that die at any time, of runs whose ranks are started again."""
        return self._dying(layout) if self.back else set()

    def loses(self, layout: Layout) -> bool:
        """Return whether something of the model may be lost."""
        return layout.is_lost(self._dying(layout))

    def _dying(self, layout: Layout) -> set[tuple[int, int]]:
        return {layout.cell(int(death.partition(":")[0])) for death in self.deaths}

    def __str__(self) -> str:
        return " ".join((*self.deaths, *(f"back:{each}" for each in self.back), *self.late))


class Chance:
    """Draws of one story."""

    def __init__(self, layout: Layout, chosen: random.Random) -> None:
        self.layout, self.random = layout, chosen

    def ranks(self, *counts: int) -> list[int]:
        """As many as one of `counts` says."""
        return self.random.sample(range(self.layout.world_size), self.random.choice(counts))

    def moment(self, rank: int, first: int = FIRST_DEATH, last: int = LAST_DEATH) -> str:
        """A death at any moment of an iteration."""
        return f"{rank}:{self.random.randint(first, last)}:+{self.random.randint(0, self.layout.iteration_ms)}"

    def back(self, first: int = FIRST_DEATH + 1, last: int = LAST_DEATH) -> tuple[int, ...]:
        """Iterations that wait for those that have died: all from one of these on."""
        return tuple(range(self.random.randint(first, last), self.layout.iterations))

    def perhaps_back(self) -> tuple[int, ...]:
        """The same in half of the stories, once all have died; in the others none comes back."""
        return self.back(LAST_DEATH + 1, LAST_DEATH + 1) if self.random.random() < 0.5 else ()


def random_deaths(chance: Chance) -> Story:
    """One to three, at any moment of the first iterations."""
    return Story(tuple(map(chance.moment, chance.ranks(1, 1, 2, 3))))


def random_returns(chance: Chance) -> Story:
    """Deaths of ranks that are started again, some of which die again."""
    ranks = chance.ranks(1, 1, 2, 3)
    deaths = [chance.moment(rank, last=FIRST_DEATH + 1) for rank in ranks]
    if chance.random.random() < 0.4:
        deaths.append(chance.moment(chance.random.choice(ranks), LAST_DEATH))
    return Story(tuple(deaths), chance.back())


def deaths_at_once(chance: Chance) -> Story:
    """Two or three at nearly the same moment."""
    iteration, ms = chance.random.randint(FIRST_DEATH, LAST_DEATH), chance.random.randint(0, chance.layout.iteration_ms)
    moments = (f"{rank}:{iteration}:+{ms + chance.random.randint(0, NEARLY_MS)}" for rank in chance.ranks(2, 3))
    return Story(tuple(moments), chance.perhaps_back())


def deaths_while_reducing(chance: Chance) -> Story:
    """One or two, as the reduction of gradients starts."""
    iteration = chance.random.randint(FIRST_DEATH, LAST_DEATH)
    moments = (
        f"{rank}:{iteration}:reducing+{chance.random.choice((0, 0, 1, NEARLY_MS))}" for rank in chance.ranks(1, 2)
    )
    return Story(tuple(moments), chance.perhaps_back())


def _late_operation(chance: Chance, where: str) -> Story:
    """A reduction is late, and a rank of another stage dies meanwhile, so that all live who take part in it."""
    layout = chance.layout
    (late,) = chance.ranks(1)
    others = [rank for rank in range(layout.world_size) if layout.cell(rank)[1] != layout.cell(late)[1]]
    iteration = chance.random.randint(FIRST_DEATH, LAST_DEATH)
    death = f"{chance.random.choice(others)}:late+{chance.random.choice((0, 0, 2, NEARLY_MS))}"
    return Story((death,), chance.perhaps_back(), (f"{late}:{iteration}:{where}:{IDLE_S}",))


def late_in_call(chance: Chance) -> Story:
    """A rank's reduction of gradients is late."""
    return _late_operation(chance, "in:DATA_PARALLEL")


def late_outside(chance: Chance) -> Story:
    """A sum of squares of gradients is late; without the distributed optimizer, of losses on the last stage."""
    return _late_operation(chance, "out:INTRA_DISTRIBUTED" if SHARDED in chance.layout.flags else "out:0")


def deaths_at_admissions(chance: Chance) -> Story:
    """Of ranks that come back, of those that admit them, or of the one that sends the state; one or two such."""
    ranks = chance.ranks(1, 2)
    deaths = [chance.moment(rank, last=FIRST_DEATH + 1) for rank in ranks]
    others = sorted(set(range(chance.layout.world_size)) - set(ranks))
    for point in chance.random.sample(POINTS, chance.random.choice((1, 1, 2))):
        sends = point in ("admitting", "sending")
        after_ms = chance.random.choice((0, chance.random.randint(0, ADMISSION_MS)))
        deaths.append(f"{chance.random.choice(others if sends else ranks)}:{int(not sends)}:{point}+{after_ms}")
    return Story(tuple(dict.fromkeys(deaths)), chance.back())


def deaths_before_admissions(chance: Chance) -> Story:
    """One stands ready, and before the commit that says so another one dies."""
    first, second = chance.random.sample(range(chance.layout.world_size), 2)
    back = chance.back(FIRST_DEATH + 1, FIRST_DEATH + 1)
    deaths = (
        f"{first}:{FIRST_DEATH}:{chance.random.randint(0, 2)}",
        f"{second}:{back[0]}:{chance.random.randint(0, 2)}",
    )
    return Story(deaths, back, tuple(f"{rank}:1:ready:{READY_S}" for rank in (first, second)))


KINDS: Sequence[Callable[[Chance], Story]] = (
    late_in_call,
    random_returns,
    deaths_before_admissions,
    deaths_while_reducing,
    late_outside,
    deaths_at_admissions,
    random_deaths,
    late_in_call,
    late_outside,
    deaths_at_once,
    deaths_at_admissions,
)
"""In the order in which stories run. Their number and that of layouts have no common divisor, so each layout meets each
story."""


def story(number: int, layout: Layout, chosen: random.Random) -> Story:
    """That of run `number`. One in ten may lose something of the model."""
    while True:
        found = KINDS[number % len(KINDS)](Chance(layout, chosen))
        if not found.loses(layout) or chosen.random() < 0.1:
            break
    if chosen.random() < LATE:
        kinds = chosen.choice((A_LITTLE, LONG))
        more = chosen.sample(kinds, chosen.choice((1, 2, len(kinds))))
        found = replace(found, late=(*found.late, *(f"{each}:{chosen.randint(1, 10**6)}" for each in more)))
    return found
