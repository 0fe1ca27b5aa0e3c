# SPDX-License-Identifier: Apache-2.0
"""Find stragglers and their cost by replaying recorded steps with some durations idealised.

The questions and their names are those of "Understanding Stragglers in Large Model Training Using What-if Analysis"
(Lin et al., OSDI '25). The *ideal* of an operation is the same for all of its type, over all steps, stages and
replicas: the mean for computation, the median for everything else, which has few and long outliers. Launch delays are
left out of these replays, so that slow hosts are not confused with slow workers.

- The slowdown S is the time as it was over the time with every operation ideal (their equation 1).
- S of an operation type, stage, replica or worker is the time with all others ideal over that with all ideal (2 and
  4).
- M_W is the share of the slowdown that disappears if the slowest 3% of the workers are ideal (5), M_S if the last
  stage is. Both may exceed 1: a stage longer than the mean leaves the others shorter than the mean.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from adaptra_megatron.common.layout import Cell
from adaptra_megatron.tools.replay.operations import OpType, RecordedStep, ReplayError
from adaptra_megatron.tools.replay.replay_engine import ReplayBatch, Times, Work, slowness_of, step_seconds
from adaptra_megatron.tools.replay.replay_graph import ReplayEvent

SLOWEST_WORKERS = 0.03
"""Share of all workers that M_W idealises, at least one; as in the paper."""
_MOST_TIMES = 1 << 24
"""Maximum number of times (floats) held at once, which limits the questions replayed together."""

Kept = Collection[tuple[object, ...]]
"""Names of events that a question does not idealise: ("type", ...), ("cell", ...) and ("link", ...). An event matches
by any of its names, a message or a collective by any of its takers."""


@dataclass(frozen=True)
class ReplayedStragglers:
    """Slowdowns of the steps, by cause."""

    numbers: tuple[int, ...]
    recorded_s: tuple[float, ...]
    replayed_s: tuple[float, ...]
    """Seconds by step with launch delays: the faithful replay of the recording."""
    prompt_s: tuple[float, ...]
    """Seconds by step without launch delays, which the ideal is compared with."""
    ideal_s: float
    """Mean seconds over the steps."""
    by_optype: Mapping[OpType, float]
    """Slowdown by operation type: 1.05 is 5%. Largest first, as in all of these."""
    by_stage: Mapping[int, float]
    by_replica: Mapping[int, float]
    by_worker: Mapping[Cell, float]
    by_link: Mapping[tuple[int, int], float]
    """The same for messages, by source and target stage."""
    workers_share: float
    """M_W."""
    last_stage_share: float
    """M_S."""
    lengths_share: float
    """Share of the slowdown that disappears if all micro-batches of a stage and step take equally long: the paper's
    third root cause, long and short sequences. Slow cells stay slow."""
    slowest_workers: tuple[Cell, ...]
    """The workers that M_W idealises."""
    messages_slowdown: float
    """Time as it was over the time with messages that take none: shows links that are all equally slow."""

    @cached_property
    def slowdown(self) -> float:
        """S: mean over the steps."""
        return _mean(self.prompt_s) / self.ideal_s

    @cached_property
    def launch_slowdown(self) -> float:
        """Cost of hosts that launch late: time with launch delays over time without."""
        return _mean(self.replayed_s) / _mean(self.prompt_s)

    @cached_property
    def replay_errors(self) -> tuple[float, ...]:
        """By step: replayed over recorded time, minus 1."""
        return tuple(
            replayed / recorded - 1.0 for replayed, recorded in zip(self.replayed_s, self.recorded_s, strict=True)
        )


def stragglers_of(
    steps: Sequence[RecordedStep], batches: Sequence[ReplayBatch], ideal_by_optype: Mapping[OpType, float] | None = None
) -> ReplayedStragglers:
    """Return what slowed `steps`, at least one, which `batches` contain. `ideal_by_optype`: ideals of the whole
    recording, if `steps` are a part of it. Raises ReplayError if nothing takes any time."""
    job = _Questions(batches, ideal_by_optype or ideal_seconds(steps, batches))
    cells = sorted({cell for batch in batches for event in batch.graph.events for cell in event.cells})
    stages, replicas = sorted({cell.stage for cell in cells}), sorted({cell.replica for cell in cells})
    links = sorted({link for batch in batches for event in batch.graph.events if (link := event.link) is not None})
    optypes = sorted({event.optype for batch in batches for event in batch.graph.events})
    asked: list[Kept] = [
        (),
        *([("type", optype)] for optype in optypes),
        *([("cell", cell) for cell in cells if cell.stage == stage] for stage in stages),
        *([("cell", cell) for cell in cells if cell.replica == replica] for replica in replicas),
        *([("cell", cell)] for cell in cells),
        *([("link", link)] for link in links),
    ]
    found = list(map(_mean, job.seconds(asked)))
    ideal_s, rest = found[0], iter(found[1:])
    if ideal_s <= 0.0:
        raise ReplayError("all operations take 0 s: is the unit of the recording's times the one that is expected?")
    by_optype = _largest_first(optypes, rest, ideal_s)
    by_stage = _largest_first(stages, rest, ideal_s)
    by_replica = _largest_first(replicas, rest, ideal_s)
    by_worker = _largest_first(cells, rest, ideal_s)
    by_link = _largest_first(links, rest, ideal_s)
    slowest = tuple(by_worker)[: math.ceil(SLOWEST_WORKERS * len(cells))]
    prompt_s, without_workers, without_stage = job.seconds(
        [
            [("cell", cell) for cell in cells],
            [("cell", cell) for cell in cells if cell not in slowest],
            [("cell", cell) for cell in cells if cell.stage != stages[-1]],
        ]
    )
    lost_s = _mean(prompt_s) - ideal_s
    recorded = {step.number: step.seconds for step in sorted(steps, key=lambda step: step.number)}
    return ReplayedStragglers(
        numbers=tuple(recorded),
        recorded_s=tuple(recorded.values()),
        replayed_s=job.as_recorded(recorded),
        prompt_s=tuple(prompt_s),
        ideal_s=ideal_s,
        by_optype=by_optype,
        by_stage=by_stage,
        by_replica=by_replica,
        by_worker=by_worker,
        by_link=by_link,
        workers_share=(_mean(prompt_s) - _mean(without_workers)) / lost_s if lost_s > 0.0 else 0.0,
        last_stage_share=(_mean(prompt_s) - _mean(without_stage)) / lost_s if lost_s > 0.0 else 0.0,
        lengths_share=(_mean(prompt_s) - _mean(job.even_micro_batches())) / lost_s if lost_s > 0.0 else 0.0,
        slowest_workers=slowest,
        messages_slowdown=_mean(prompt_s) / bare_s if (bare_s := _mean(job.without_messages())) > 0.0 else 1.0,
    )


_Each = TypeVar("_Each")


def _largest_first(names: Sequence[_Each], seconds: Iterator[float], ideal_s: float) -> dict[_Each, float]:
    """Return the slowdown of each name, largest first. `seconds`: yields its seconds next."""
    found = [(name, next(seconds) / ideal_s) for name in names]
    return dict(sorted(found, key=lambda entry: -entry[1]))


def ideal_seconds(steps: Sequence[RecordedStep], batches: Sequence[ReplayBatch]) -> dict[OpType, float]:
    """Return the ideal seconds of each type, over all steps (which `batches` contain), stages and replicas."""
    found: dict[OpType, list[Times]] = {}
    links: dict[OpType, set[tuple[int, int] | None]] = {}
    for batch in batches:
        for index, event in enumerate(batch.graph.events):
            found.setdefault(event.optype, []).append(batch.work_s[index])
            links.setdefault(event.optype, set()).add(event.link)
    ideals = {optype: _ideal_s(optype, np.concatenate(rows), len(links[optype])) for optype, rows in found.items()}
    if steps[0].messages:
        # Two stages have one link in each direction. Gradients are as large as activations, so the quicker direction is
        # the ideal of both. Recorded messages keep the paper's ideals.
        ways = [optype for optype in (OpType.FORWARD_SEND, OpType.BACKWARD_SEND) if optype in ideals]
        ideals |= dict.fromkeys(ways, min(ideals[optype] for optype in ways))
    return ideals


def _ideal_s(optype: OpType, seconds: Times, links: int) -> float:
    if optype.computes:
        return float(np.mean(seconds))
    # For an even number of links, half may be slow: the ideal is that of one of the others, not a mean of both.
    return float(np.percentile(seconds, 50, method="lower") if links % 2 == 0 else np.median(seconds))


class _Questions:
    """Replays of all steps for many questions, without launch delays."""

    def __init__(self, batches: Sequence[ReplayBatch], ideal_s: Mapping[OpType, float]) -> None:
        self._batches = batches
        self.ideal_s = ideal_s

    def seconds(self, kept: Sequence[Kept]) -> list[list[float]]:
        """Return by question the seconds of each step, in order of step numbers."""
        largest = max(len(batch.graph.events) * len(batch.numbers) for batch in self._batches)
        at_once = max(1, _MOST_TIMES // largest)
        found: list[list[float]] = []
        for first in range(0, len(kept), at_once):
            some = kept[first : first + at_once]
            by_step: dict[int, Times] = {}
            for batch in self._batches:
                ends_s = step_seconds(batch, self._work_of(batch, some), launch_delays=False)
                columns = np.broadcast_to(ends_s, (len(some), len(batch.numbers))).T
                by_step |= dict(zip(batch.numbers, columns, strict=True))
            found += [[float(by_step[number][question]) for number in sorted(by_step)] for question in range(len(some))]
        return found

    def as_recorded(self, numbers: Iterable[int]) -> tuple[float, ...]:
        """Return the seconds of each step, with launch delays."""
        by_step: dict[int, float] = {}
        for batch in self._batches:
            by_step |= dict(zip(batch.numbers, map(float, step_seconds(batch)[0]), strict=True))
        return tuple(by_step[number] for number in numbers)

    def even_micro_batches(self) -> list[float]:
        """Return the seconds of each step if all micro-batches of a stage took their mean."""
        slowness = slowness_of(self._batches)
        found: list[float] = []
        for batch in self._batches:
            rows: dict[tuple[OpType, int, int], list[Times]] = {}
            for index, event in enumerate(batch.graph.events):
                if event.optype.computes:
                    rows.setdefault(_kind(event), []).append(batch.work_s[index] / slowness[event.takers[0].cell])
            mean_s = {kind: np.mean(row, axis=0) for kind, row in rows.items()}
            found += map(float, step_seconds(batch, _even(batch, mean_s, slowness), launch_delays=False)[0])
        return found

    def without_messages(self) -> list[float]:
        """Return the seconds of each step if messages took no time."""
        found: list[float] = []
        for batch in self._batches:

            def work_s(index: int, event: ReplayEvent, batch: ReplayBatch = batch) -> Times:
                here: Times = batch.work_s[index][None, :] * (event.link is None)
                return here

            found += map(float, step_seconds(batch, work_s, launch_delays=False)[0])
        return found

    def _work_of(self, batch: ReplayBatch, kept: Sequence[Kept]) -> Work:
        asking: dict[tuple[object, ...], list[int]] = {}
        for question, names in enumerate(kept):
            for name in names:
                asking.setdefault(name, []).append(question)
        keeps: dict[object, Times] = {}
        """By everything that a question can ask of an event; its micro-batch is no part of it."""

        def work_s(index: int, event: ReplayEvent) -> Times:
            asked = event.optype, event.takers[0].cell, event.takers[-1].cell, len(event.takers), event.source
            if (kept_here := keeps.get(asked)) is None:
                kept_here = keeps[asked] = np.zeros((len(kept), 1), dtype=bool)
                for name in (("type", event.optype), ("link", event.link), *(("cell", cell) for cell in event.cells)):
                    kept_here[asking.get(name, [])] = True
            return np.where(kept_here, batch.work_s[index], self.ideal_s[event.optype])

        return work_s


def _kind(event: ReplayEvent) -> tuple[OpType, int, int]:
    """Return what equal actions share: type, stage and chunk."""
    return event.optype, event.takers[0].cell.stage, event.chunk


def _even(batch: ReplayBatch, mean_s: Mapping[tuple[OpType, int, int], Times], slowness: Mapping[Cell, float]) -> Work:
    def work_s(index: int, event: ReplayEvent) -> Times:
        if event.optype.computes:
            even: Times = slowness[event.takers[0].cell] * mean_s[_kind(event)][None, :]
            return even
        recorded: Times = batch.work_s[index][None, :]
        return recorded

    return work_s


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
