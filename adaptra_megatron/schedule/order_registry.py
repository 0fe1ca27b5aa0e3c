# SPDX-License-Identifier: Apache-2.0
"""List all named orders of actions. A new one is a function in `classic`, `v_shaped` or a new module, and a row here.

`adaptra simulate --schedule NAME` times one and writes it as CSV, which `--adaptra-plan-csv` trains. The tests of all
orders, the bitwise trainings (orders of Megatron's placement only) and docs/schedules.md read this table.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from adaptra_megatron.schedule import classic, v_shaped
from adaptra_megatron.schedule.ir import Schedule, ScheduleError


@dataclass(frozen=True)
class NamedSchedule:
    """One row: the order's generator, and its numbers of chunks per stage."""

    generator: Callable[..., Schedule]
    """Takes stages, micro-batches and `options`. The docs quote the first line of its docstring."""
    chunks: range
    options: tuple[str, ...] = ()
    """"chunks", "group_size": further parameters of the generator."""

    @property
    def chunks_text(self) -> str:
        """Describe the possible numbers of chunks per stage."""
        first, last = self.chunks[0], self.chunks[-1]
        few = "1 chunk" if first == 1 else f"{first} chunks"
        return few if first == last else f"{few} or more"


_ONE, _TWO, _SEVERAL, _ANY = range(1, 2), range(2, 3), range(2, sys.maxsize), range(1, sys.maxsize)

SCHEDULES: Mapping[str, NamedSchedule] = {
    "gpipe": NamedSchedule(classic.gpipe, _ANY, ("chunks",)),
    "1f1b": NamedSchedule(classic.one_f_one_b, _ONE),
    "zb-h1": NamedSchedule(classic.zb_h1, _ONE),
    "zb-h2": NamedSchedule(classic.zb_h2, _ONE),
    "interleaved": NamedSchedule(classic.interleaved, _SEVERAL, ("chunks", "group_size")),
    "interleaved-combined": NamedSchedule(classic.interleaved_combined, _SEVERAL, ("chunks", "group_size")),
    "interleaved-split": NamedSchedule(classic.interleaved_split, _SEVERAL, ("chunks", "group_size")),
    "zb-v": NamedSchedule(v_shaped.zb_v, _TWO),
    "v-half": NamedSchedule(v_shaped.v_half, _TWO),
    "v-min": NamedSchedule(v_shaped.v_min, _TWO),
    "dualpipe-v": NamedSchedule(v_shaped.dualpipe_v, _TWO),
}


def names_for(chunks: int) -> list[str]:
    """Return the names of the orders that run `chunks` chunks per stage."""
    return [name for name, named in SCHEDULES.items() if chunks in named.chunks]


def make_schedule(
    name: str, stages: int, micro_batches: int, chunks: int = 1, group_size: int | None = None
) -> Schedule:
    """Make the order `name` for one pipeline; `group_size`: Megatron's `microbatch_group_size_per_vp_stage`.

    Raises ScheduleError for counts that the order cannot have.
    """
    named = SCHEDULES[name]
    if chunks not in named.chunks:
        remedy = f'take {", ".join(names_for(chunks))}, or set "chunks" to {named.chunks[0]}'
        raise ScheduleError(f"{name} runs {named.chunks_text} per stage, not {chunks}: {remedy}")
    given = {"chunks": chunks, "group_size": group_size}
    return named.generator(stages, micro_batches, **{option: given[option] for option in named.options})
