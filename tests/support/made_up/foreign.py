# SPDX-License-Identifier: Apache-2.0
"""Recordings as other tools write them, of exact pipelines by hand, so that the right answer is known.

Times are microseconds. `overlapped` begins an action when its cell is free and its message has come; `blocking` and
`interleaved_blocking` are stock Megatron-core's schedules, played by support.made_up.recordings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from support.made_up.recordings import interleaved, one_f_one_b, played

from adaptra_megatron.common.layout import Cell
from adaptra_megatron.tools.replay.operations import OpType

Event = dict[str, Any]
F, B = OpType.FORWARD, OpType.BACKWARD
NAMES = {F: "forward", B: "backward"}
Cost = Callable[[int, int], float]
"""Of stage and micro-batch."""


class Ran(NamedTuple):
    """An action as it ran."""

    stage: int
    kind: OpType
    micro_batch: int
    start: float
    duration: float
    chunk: int = 0
    replica: int = 0

    @property
    def end(self) -> float:
        return self.start + self.duration


def stock_order(stage: int, stages: int, micro_batches: int) -> list[tuple[OpType, int]]:
    ahead = min(stages - stage - 1, micro_batches)
    steady = [pair for n in range(micro_batches - ahead) for pair in ((F, n + ahead), (B, n))]
    return [(F, n) for n in range(ahead)] + steady + [(B, n) for n in range(micro_batches - ahead, micro_batches)]


def overlapped(
    stages: int,
    micro_batches: int,
    *,
    forward: Cost | float = 10_000.0,
    backward: Cost | float = 20_000.0,
    delay: Callable[[int, int], float] | float = 1_000.0,
    orders: Sequence[Sequence[tuple[OpType, int]]] | None = None,
    replica: int = 0,
) -> list[Ran]:
    orders = orders or [stock_order(stage, stages, micro_batches) for stage in range(stages)]
    ended: dict[tuple[OpType, int, int], float] = {}
    found: list[Ran] = []
    at, free = [0] * stages, [0.0] * stages
    while len(found) < sum(map(len, orders)):
        before = len(found)
        for stage in range(stages):
            while at[stage] < len(orders[stage]):
                kind, number = orders[stage][at[stage]]
                source = stage - 1 if kind is F else stage + 1
                come = 0.0
                if 0 <= source < stages:
                    if (kind, source, number) not in ended:
                        break
                    come = ended[kind, source, number] + (delay(source, stage) if callable(delay) else delay)
                cost = forward if kind is F else backward
                duration = cost(stage, number) if callable(cost) else cost
                ran = Ran(stage, kind, number, max(free[stage], come), duration, 0, replica)
                ended[kind, stage, number] = free[stage] = ran.end
                found.append(ran)
                at[stage] += 1
        assert len(found) > before, "the orders wait for each other"
    return found


def blocking(
    stages: int, micro_batches: int, transfer: Callable[[int, int], float], *, chunks: int = 1, long_last: float = 1.0
) -> list[Ran]:
    """Stock's 1F1B, or interleaved where there are several chunks; `long_last`: factor of the last virtual stage."""
    program = one_f_one_b if chunks == 1 else interleaved(chunks)
    cells = [Cell(0, stage) for stage in range(stages)]

    transfers: dict[tuple[int, int, int], float] = {}

    def seconds(optype: OpType, cell: Cell, place: int) -> float:
        if optype.peer is not None:
            other = (cell.stage + (1 if optype.value.startswith("forward") else -1)) % stages
            return transfers.setdefault((cell.stage, other, place), transfer(cell.stage, other))
        last = (place // 1000, cell.stage) == (chunks - 1, stages - 1)
        return (10_000.0 if optype is F else 20_000.0) * (long_last if last else 1.0)

    ops = played({cell: program(cell, stages, micro_batches) for cell in cells}, seconds)
    return [
        Ran(
            each.cell.stage,
            each.optype,
            each.micro_batch % 1000,
            each.start_s,
            each.duration_s,
            each.micro_batch // 1000,
        )
        for each in ops
        if each.optype.computes
    ]


def makespan(ran: Iterable[Ran]) -> float:
    ran = list(ran)
    return max(each.end for each in ran) - min(each.start for each in ran)


def with_args(ran: Iterable[Ran], *, iteration: int = 0, **more: Any) -> list[Event]:
    """Complete events that say everything."""
    return [
        {
            "name": NAMES[each.kind],
            "ph": "X",
            "ts": each.start,
            "dur": each.duration,
            "pid": each.stage,
            "tid": 0,
            "args": {
                "iteration": iteration,
                "pp_rank": each.stage,
                "dp_rank": each.replica,
                "microbatch": each.micro_batch,
                "model_chunk": each.chunk,
                **more,
            },
        }
        for each in ran
    ]


def without(events: Iterable[Event], *names: str) -> list[Event]:
    """The events without some of their arguments."""
    return [
        {**each, "args": {key: value for key, value in each["args"].items() if key not in names}} for each in events
    ]


def named(ran: Iterable[Ran]) -> list[Event]:
    """Ranges of record_function, one process per stage: the name alone says something."""
    return [
        {
            "name": f"{NAMES[each.kind]} {each.micro_batch}",
            "cat": "user_annotation",
            "ph": "X",
            "ts": each.start,
            "dur": each.duration,
            "pid": 4000 + each.stage,
            "tid": 4000 + each.stage,
        }
        for each in ran
    ]


def in_step(events: Sequence[Event], number: int = 2) -> list[Event]:
    """With a range of torch.profiler around them."""
    first, last = min(e["ts"] for e in events), max(e["ts"] + e["dur"] for e in events)
    around = {**events[0], "name": f"ProfilerStep#{number}", "ts": first - 500.0, "dur": last - first + 1000.0}
    return [around, *events]


def kineto(
    directory: Path,
    ran: Sequence[Ran],
    make: Callable[[list[Ran]], list[Event]] = lambda ran: in_step(named(ran)),
    *,
    name: str = "rank{}.json",
    said: Callable[[int], dict[str, Any]] | None = None,
) -> Path:
    """A file per rank, as torch.profiler leaves them; `said`: what a file says besides its events."""
    directory.mkdir(parents=True, exist_ok=True)
    stages = 1 + max(each.stage for each in ran)
    for stage in range(stages):
        document = {"distributedInfo": {"rank": stage, "world_size": stages}} if said is None else said(stage)
        document["traceEvents"] = make([each for each in ran if each.stage == stage])
        (directory / name.format(stage)).write_text(json.dumps(document))
    return directory
