# SPDX-License-Identifier: Apache-2.0
"""Form steps from placed actions. Incomplete steps, and steps recorded twice, are left out by name."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from adaptra_megatron.common.layout import Cell
from adaptra_megatron.schedule.ir import Placement
from adaptra_megatron.tools.recordings.recording import RecordingError, Wanted, no_such_step
from adaptra_megatron.tools.replay.operations import Operation, OpType, RecordedStep, ReplayError, with_sequence_numbers

_LONG_S = 5.0
"""If actions take longer, the unit of the recorded times is in doubt."""
_NOTHING_S = 1e-6
"""Rounding of times."""
_SIDE_BY_SIDE = 0.05
"""Share of a stage's computation that may overlap: more is no rounding."""
ONE_AT_A_TIME = (
    "as DualPipe's do, which cannot be replayed, for no range says what each takes alone. Record a schedule that runs "
    "one action at a time: 1F1B, interleaved, zero-bubble"
)
_BACKWARD = (OpType.BACKWARD, OpType.BACKWARD_INPUT)
_NAMES = {OpType.FORWARD: "forward", OpType.BACKWARD_WEIGHT: "weight gradient"}


class RecordedAction(NamedTuple):
    """One operation as read; None for what is unknown."""

    cell: Cell
    optype: OpType
    step: int | None
    chunk: int
    micro_batch: int | None
    start_s: float
    duration_s: float

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s


@dataclass
class Steps:
    """Steps formed from the actions of a recording."""

    steps: list[RecordedStep] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class _IncompleteError(Exception):
    """A step cannot be replayed, for the reason given."""


def steps_of(name: str, actions: Sequence[RecordedAction], wanted: Wanted, placement: Placement | None = None) -> Steps:
    """Form the steps of `actions`. Raises RecordingError if none of the `wanted` ones is there, or if steps are not
    named and cannot be distinguished."""
    found = Steps()
    by_step = _by_step(name, actions, found.notes)
    trained = {
        number: rows for number, rows in sorted(by_step.items()) if any(each.optype in _BACKWARD for each in rows)
    }
    if not trained:
        raise RecordingError(f"{name} names forwards and no backwards: it has no training step")
    if not any(number in wanted for number in trained):
        raise no_such_step(name, trained)
    dropped: Counter[str] = Counter()
    for number, rows in trained.items():
        if number not in wanted:
            continue
        try:
            dropped_here: Counter[str] = Counter()
            operations = _operations(number, rows, dropped_here)
            found.steps.append(
                RecordedStep(number=number, operations=operations, custom_placement=_megatrons_or(placement))
            )
            dropped += dropped_here
        except (_IncompleteError, ReplayError) as error:
            found.left_out.append(str(error))
    found.notes += [f"{count} {what}." for what, count in dropped.items()]
    durations_s = [each.duration_s for each in actions if each.optype.computes]
    if found.steps and statistics.median(durations_s) > _LONG_S:
        found.notes.append(
            f"An action takes {statistics.median(durations_s):.3g} s: if the file's times are not in the unit that its "
            "format has (microseconds in Chrome's), all times here are off by as much."
        )
    return found


def _megatrons_or(placement: Placement | None) -> Placement | None:
    """Return `placement`; None if it is Megatron's."""
    if placement is None or placement.stage_of == tuple(
        virtual % placement.stages for virtual in range(len(placement.stage_of))
    ):
        return None
    return placement


def _by_step(name: str, actions: Sequence[RecordedAction], notes: list[str]) -> dict[int, list[RecordedAction]]:
    by_step: dict[int, list[RecordedAction]] = defaultdict(list)
    unnamed = []
    for each in actions:
        if each.step is None:
            unnamed.append(each)
        else:
            by_step[each.step].append(each)
    if not by_step:
        return _split(name, actions, notes)
    if unnamed:
        notes.append(f"{len(unnamed)} actions lie in no step: left out.")
    return by_step


def _split(name: str, actions: Sequence[RecordedAction], notes: list[str]) -> dict[int, list[RecordedAction]]:
    """Divide actions without step numbers: a step ends where every cell has run as many backwards as forwards."""
    computed: dict[Cell, list[RecordedAction]] = defaultdict(list)
    for each in sorted(actions, key=lambda each: each.start_s):
        if each.optype is OpType.FORWARD or each.optype in _BACKWARD:
            computed[each.cell].append(each)
    ends = [_balanced_after(rows) for rows in computed.values()]
    common = sorted(set.intersection(*map(set, ends))) if ends else []
    sizes = {later - earlier for earlier, later in pairwise([0, *common])}
    micro_batches = [
        (each.cell, each.optype, each.chunk, each.micro_batch) for rows in computed.values() for each in rows
    ]
    if len(common) <= 1 or (
        len(set(micro_batches)) == len(micro_batches) and None not in {m[3] for m in micro_batches}
    ):
        return {0: list(actions)}
    several_stages = len({cell.stage for cell in computed}) > 1
    if len(sizes) > 1 or sizes == {1} or not several_stages:
        raise RecordingError(
            f"{name} names no steps, and {common[-1]} forwards of a stage are not of one step: name it in args "
            "(iteration), or by ranges such as ProfilerStep#7 around steps"
        )
    notes.append(
        f"No event names its step: a new one is taken to begin where no micro-batch is under way, every {min(sizes)}."
    )
    found: dict[int, list[RecordedAction]] = defaultdict(list)
    for cell, rows in computed.items():
        over_s = [max(each.end_s for each in rows[: 2 * count]) for count in common]
        for each in (each for each in actions if each.cell == cell):
            found[min(sum(each.start_s >= end_s for end_s in over_s), len(common) - 1)].append(each)
    return found


def _balanced_after(rows: Sequence[RecordedAction]) -> list[int]:
    """Return the numbers of backwards after which a cell has no micro-batch in flight. `rows`: its actions, by
    start."""
    forwards = backwards = 0
    found = []
    for each in rows:
        forwards += each.optype is OpType.FORWARD
        backwards += each.optype is not OpType.FORWARD
        if forwards == backwards:
            found.append(backwards)
    return found


def _operations(number: int, actions: Sequence[RecordedAction], dropped: Counter[str]) -> tuple[Operation, ...]:
    """Return the operations of a step, with chunks and micro-batches counted from 0; if they are not named, in their
    order."""
    by_cell: dict[Cell, list[RecordedAction]] = defaultdict(list)
    for each in sorted(actions, key=lambda each: (each.start_s, each.end_s)):
        by_cell[each.cell].append(each)
    several = len({cell.replica for cell in by_cell}) > 1
    known: dict[Cell, list[RecordedAction]] = {}
    for cell, rows in by_cell.items():
        where = f"step {number}, stage {cell.stage}" + (f" of replica {cell.replica}" if several else "")
        known[cell] = _split_backwards(_named_once(where, _of_training(rows, dropped)))
        _check_one_at_a_time(where, known[cell])
    _check_chunks(number, known)
    renumbered = {}
    for replica in {cell.replica for cell in known}:
        cells = {cell: rows for cell, rows in known.items() if cell.replica == replica}
        renumbered[replica] = _check_alike(number, cells, several)
    return with_sequence_numbers(
        Operation(
            cell,
            each.optype,
            each.start_s,
            each.duration_s,
            0,
            each.chunk,
            renumbered[cell.replica][each.micro_batch or 0] if each.optype.computes else -1,
        )
        for cell, rows in known.items()
        for each in rows
    )


def _of_training(rows: Sequence[RecordedAction], dropped: Counter[str]) -> list[RecordedAction]:
    """Return the actions without forwards after the last backward: they are an evaluation's. `rows`: of one cell, by
    start."""
    last_s = max((each.start_s for each in rows if each.optype in _BACKWARD), default=None)
    if last_s is None:
        return list(rows)
    kept = [each for each in rows if each.optype is not OpType.FORWARD or each.start_s < last_s]
    if len(kept) < len(rows):
        dropped["forwards behind the last backward of their step are of an evaluation"] += len(rows) - len(kept)
    return kept


def _named_once(where: str, rows: Sequence[RecordedAction]) -> list[RecordedAction]:
    """Return the actions with micro-batches, and with chunks counted from 0. Raises _IncompleteError for one that
    occurs twice."""
    chunks = sorted({each.chunk for each in rows if each.optype.computes})
    computed = [each for each in rows if each.optype.computes]
    unnamed = sum(each.micro_batch is None for each in computed)
    if 0 < unnamed < len(computed):
        raise _IncompleteError(f"{where}: some actions name their micro-batch, others do not")
    counts: Counter[tuple[OpType, int]] = Counter()
    seen: set[tuple[str, int, int]] = set()
    found = []
    for each in rows:
        if not each.optype.computes:
            found.append(each._replace(chunk=0))
            continue
        kind = (each.optype, each.chunk)
        each = each._replace(
            micro_batch=counts[kind] if each.micro_batch is None else each.micro_batch, chunk=chunks.index(each.chunk)
        )
        counts[kind] += 1
        what = (_name(each), each.chunk, each.micro_batch or 0)
        if what in seen:
            raise _IncompleteError(
                f"{where}: the {what[0]} of micro-batch {what[2]} is there twice, as if two runs were in one recording "
                "or the step was done again: name one run alone"
            )
        seen.add(what)
        found.append(each)
    return found


class _Together(NamedTuple):
    """Actions of one cell that ran at the same time."""

    share: float
    """Share of the cell's computation."""
    later: RecordedAction
    earlier: RecordedAction
    """The action that had not ended when `later` began; the first such pair."""

    def __str__(self) -> str:
        later, earlier = (
            f"the {_name(each)}" + ("" if each.micro_batch is None else f" of micro-batch {each.micro_batch}")
            for each in (self.later, self.earlier)
        )
        return f"{later} began before {earlier} was over"


def _together(rows: Iterable[RecordedAction], *, of_steps: bool = False) -> _Together | None:
    """Return the overlap of one cell's actions, given by start; None if it is rounding. `of_steps`: only between
    steps."""
    computed = [each for each in rows if each.optype.computes]
    both_s, pair = 0.0, None
    latest = computed[0] if computed else None
    for each in computed[1:]:
        assert latest is not None
        over_s = min(latest.end_s, each.end_s) - each.start_s
        if over_s > _NOTHING_S and (not of_steps or each.step != latest.step):
            both_s += over_s
            pair = pair or (each, latest)
        latest = max(latest, each, key=lambda one: one.end_s)
    share = both_s / sum(each.duration_s for each in computed) if pair else 0.0
    return None if pair is None or share <= _SIDE_BY_SIDE else _Together(share, *pair)


def _check_one_at_a_time(where: str, rows: Sequence[RecordedAction]) -> None:
    """Check that actions of one cell, given by start, did not overlap. Raises _IncompleteError."""
    found = _together(rows)
    if found is None:
        return
    if _name(found.later) == _name(found.earlier):
        raise _IncompleteError(
            f"{where}: {found}, and more of it ({found.share:.0%} of its computation), as if several jobs or ranks "
            "were one: name one run alone, and the rank or stage of each action"
        )
    raise _IncompleteError(
        f"{where}: {found}, and more of it: forwards and backwards ran side by side, {ONE_AT_A_TIME}"
    )


def check_one_job(name: str, actions: Sequence[RecordedAction]) -> None:
    """Check that no cell ran several steps at the same time. Raises RecordingError."""
    by_cell: dict[Cell, list[RecordedAction]] = defaultdict(list)
    for each in sorted(actions, key=lambda each: each.start_s):
        by_cell[each.cell].append(each)
    for cell, rows in by_cell.items():
        if (found := _together(rows, of_steps=True)) is not None:
            raise RecordingError(
                f"{name}: on stage {cell.stage}, {found} (of steps {found.later.step} and {found.earlier.step}), "
                "and more of it, as if several jobs were in one recording: name one run alone"
            )


def _split_backwards(rows: Sequence[RecordedAction]) -> list[RecordedAction]:
    """Turn backwards into input gradients if there are weight gradients, too: zero-bubble recordings name F, B and
    W."""
    weights = {(each.chunk, each.micro_batch) for each in rows if each.optype is OpType.BACKWARD_WEIGHT}
    return [
        each._replace(optype=OpType.BACKWARD_INPUT)
        if each.optype is OpType.BACKWARD and (each.chunk, each.micro_batch) in weights
        else each
        for each in rows
    ]


def _name(action: RecordedAction) -> str:
    return _NAMES.get(action.optype, "backward")


def _check_chunks(number: int, known: Mapping[Cell, Sequence[RecordedAction]]) -> None:
    counts = {cell: len({each.chunk for each in rows if each.optype.computes}) for cell, rows in known.items()}
    few, many = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
    if counts[few] < counts[many]:
        raise _IncompleteError(
            f"step {number}: stage {few.stage} ran {counts[few]} chunks of the model, stage {many.stage} {counts[many]}"
        )


def _check_alike(number: int, cells: Mapping[Cell, Sequence[RecordedAction]], several: bool) -> dict[int, int]:
    """Return the micro-batches of a replica, counted from 0. Raises _IncompleteError if an action is missing."""
    ran = {
        cell: {
            name: {(each.chunk, each.micro_batch or 0) for each in rows if each.optype.computes and _name(each) == name}
            for name in ("forward", "backward", "weight gradient")
        }
        for cell, rows in cells.items()
    }
    every = set().union(*(parts[name] for parts in ran.values() for name in parts))
    for cell, parts in sorted(ran.items()):
        halves = {(each.chunk, each.micro_batch or 0) for each in cells[cell] if each.optype is OpType.BACKWARD_INPUT}
        for name, needed in (("forward", every), ("backward", every), ("weight gradient", halves)):
            if missing := sorted(needed - parts[name]):
                of = f" of replica {cell.replica}" if several else ""
                count = f" (and of {len(missing) - 1} more)" if len(missing) > 1 else ""
                raise _IncompleteError(
                    f"step {number}: stage {cell.stage}{of} has no {name} of micro-batch {missing[0][1]}{count}: "
                    "it is not recorded as a whole"
                )
    return {name: index for index, name in enumerate(sorted({micro_batch for _, micro_batch in every}))}


def without_waits(steps: Iterable[RecordedStep], notes: list[str]) -> list[RecordedStep]:
    """Remove waits from actions that were timed on hosts from before their message came: they start when it can have
    come.

    Durations of actions whose message had come before are an upper limit. Ends stay as recorded.
    """
    found, count = [], 0
    for step in steps:
        placement = step.placement
        ends_s = {
            (each.cell, each.optype is OpType.FORWARD, each.chunk, each.micro_batch): each.end_s
            for each in step.operations
            if each.optype is OpType.FORWARD or each.optype in _BACKWARD
        }
        come_s: dict[Operation, float] = {}
        usual_s: dict[tuple[Cell, OpType, int], list[float]] = defaultdict(list)
        for each in step.operations:
            if each.optype is not OpType.FORWARD and each.optype not in _BACKWARD:
                continue
            forward = each.optype is OpType.FORWARD
            place = (placement.previous_place if forward else placement.next_place)(each.cell.stage, each.chunk)
            if place is not None:
                key = (Cell(each.cell.replica, place.stage), forward, place.chunk, each.micro_batch)
                come_s[each] = ends_s.get(key, each.start_s)
            if come_s.get(each, each.start_s) <= each.start_s:
                usual_s[each.cell, each.optype, each.chunk].append(each.duration_s)
        operations = []
        for each in step.operations:
            at_s = come_s.get(each, each.start_s)
            if each.start_s + _NOTHING_S < at_s < each.end_s:
                usual = usual_s.get((each.cell, each.optype, each.chunk))
                longest_s = min(each.duration_s, statistics.median(usual)) if usual else each.end_s - at_s
                count += longest_s < each.duration_s
                each = each._replace(start_s=each.end_s - longest_s, duration_s=longest_s)
            operations.append(each)
        found.append(
            RecordedStep(
                number=step.number,
                operations=with_sequence_numbers(operations),
                custom_placement=step.custom_placement,
            )
        )
    if count:
        notes.append(
            f"{count} ranges contain the wait for their message: it is removed, as far as other ranges show it."
        )
    return found
