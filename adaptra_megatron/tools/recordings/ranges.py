# SPDX-License-Identifier: Apache-2.0
"""Read the actions of one Chrome trace: ranges of forwards and backwards, with their labels.

Complete events ("X"), pairs of "B" and "E", and asynchronous pairs of "b" and "e" are read. Of nested ranges on a
thread, the outermost is the action: layers and recomputation are parts of it. If a range has copies on the GPU
(Kineto's `gpu_user_annotation`), these count, because on the host it only spans the launches; of copies on several
streams, those of the stream with the most time. Waits for messages (`nccl:recv`, `gloo:recv`) are removed from a
range.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from adaptra_megatron.tools.recordings.naming import (
    Labels,
    Named,
    labels_of_args,
    labels_of_text,
    named,
    receives,
    seconds_of,
    step_of,
    whole,
)
from adaptra_megatron.tools.recordings.trace_events import Event, TraceEvents
from adaptra_megatron.tools.replay.operations import OpType

_ON_GPU = "gpu_user_annotation"
_MOST_NAMES = 6
_HALF_US = 0.5
"""Rounding of times: ranges count as nested if they are so within this tolerance."""

Thread = tuple[str, str]
PLACE = ("stage", "replica", "lane", "rank")
"""Labels of the place where a range ran."""


class Range(NamedTuple):
    """One range. Times are in microseconds of its file."""

    optype: OpType
    start_us: float
    end_us: float
    thread: Thread
    """Process and thread."""
    labels: Mapping[str, int]
    virtual_stage: int | None = None
    on_gpu: bool = False
    call: str = ""
    """Identifier that a range on the host shares with its copies on the GPU."""
    then: Named | None = None
    """The second action of this range; see `naming.Named`."""


@dataclass
class FileRanges:
    """Ranges of one file. A process returns it to another one, so it holds no events."""

    path: Path
    ranges: list[Range] = field(default_factory=list)
    base_ns: int = 0
    """Origin of its times, in nanoseconds."""
    rank: int | None = None
    world_size: int | None = None
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Ranks of each group by kind: "stage", "replica", "lane"."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Events that cannot be read: count by reason, with the first event named."""
    insides: int = 0
    """Number of ranges inside others."""
    waits: int = 0
    """Number of ranges from which a wait was removed."""
    divided: int = 0
    """Number of ranges with a forward and a backward."""
    hidden: str = ""
    """An action that is only known from a range inside another one, as text; empty if none."""
    on_host_alone: bool = False
    """Whether kernels ran on a GPU, but actions are known on the host only."""
    unfinished: bool = False
    names: tuple[str, ...] = ()
    """Some names of other ranges."""


class _Open(NamedTuple):
    event: Event
    time_us: float


class _Reader:
    """Reader of the events of one file."""

    def __init__(self, path: Path) -> None:
        self.found = FileRanges(path)
        self.actions: list[Range] = []
        self.waits: dict[Thread, list[tuple[float, float]]] = defaultdict(list)
        self.steps: dict[str, list[tuple[float, float, int]]] = defaultdict(list)
        self.process_names: dict[str, Labels] = {}
        self.thread_names: dict[Thread, Labels] = {}
        self.kernels = 0
        self._names: Counter[str] = Counter()
        self._examples: dict[str, str] = {}
        self._pairs: list[tuple[float, Event]] = []
        self._begun: dict[tuple[str, ...], list[_Open]] = defaultdict(list)

    def read(self) -> None:
        events = TraceEvents(self.found.path)
        for event in events:
            if event.ph == "X":
                self._complete(event)
            elif event.ph in ("B", "E", "b", "e"):
                time_us = self._time_us(event)
                if time_us is not None:
                    self._pairs.append((time_us, event))
            elif event.ph == "M":
                self._metadata(event)
        if events.odd:
            self._leave_out("is no object", "an entry of traceEvents", events.odd)
        self.found.unfinished = events.unfinished
        self._pair()
        self._document(events.rest)
        self.found.names = tuple(name for name, _ in self._names.most_common(_MOST_NAMES))

    def _complete(self, event: Event) -> None:
        name = event.name
        if not isinstance(name, str):
            return
        if named(name) is None and step_of(name) is None and not receives(name):
            self.kernels += event.cat == "kernel"
            if event.cat in ("user_annotation", None) and len(self._names) < 1 << 10:
                self._names[name[:40]] += 1
            return
        start_us, duration_us = self._time_us(event), seconds_of(event.dur)
        if start_us is None:
            return
        if duration_us is None or duration_us < 0.0:
            self._leave_out(
                "has no duration" if duration_us is None else f"lasts {duration_us:g} µs", _described(event)
            )
            return
        self._add(event, start_us, start_us + duration_us)

    def _time_us(self, event: Event) -> float | None:
        time_us = seconds_of(event.ts)
        if time_us is None and isinstance(event.name, str) and named(event.name) is not None:
            self._leave_out("has no time", _described(event))
        return time_us

    def _leave_out(self, what: str, which: str, count: int = 1) -> None:
        self._examples.setdefault(what, f"{which} {what}")
        self.found.left_out[self._examples[what]] += count

    def _pair(self) -> None:
        """Pair each end with the latest earlier begin of the same thread and name, or of any name if the end has
        none."""
        self._pairs.sort(key=lambda pair: pair[0])
        for time_us, event in self._pairs:
            name = event.name if isinstance(event.name, str) else ""
            thread = _thread(event)
            if event.ph in ("b", "e"):
                key: tuple[str, ...] = ("async", str(event.cat), str(event.id), name, thread[0])
            else:
                key = thread
            begun = self._begun[key]
            if event.ph in ("B", "b"):
                begun.append(_Open(event, time_us))
                continue
            fitting = [at for at, each in enumerate(begun) if not name or each.event.name == name]
            earlier = [at for at in fitting if begun[at].time_us < time_us]
            if not fitting:
                continue  # begun before the recording was
            first = begun.pop((earlier or fitting)[-1])
            if isinstance(first.event.name, str) and _matters(first.event.name):
                self._add(first.event, first.time_us, time_us, _as_dict(event.args))
        for opened in self._begun.values():
            for each in opened:
                if isinstance(each.event.name, str) and named(each.event.name) is not None:
                    self._leave_out("has no end", _described(each.event))

    def _add(self, event: Event, start_us: float, end_us: float, more: Mapping[str, Any] | None = None) -> None:
        thread, on_gpu = _thread(event), event.cat == _ON_GPU
        if not isinstance(event.pid, int | str | None):
            self._leave_out("has a process that is neither a number nor a name", _described(event))
            return
        if (number := step_of(event.name)) is not None:
            self.steps[thread[0]].append((start_us, end_us, number))
            return
        if receives(event.name):
            self.waits[thread].append((start_us, end_us))
            return
        found = named(event.name)
        assert found is not None, "other events are not added"
        args = {**_as_dict(event.args), **(more or {})}
        labels = {**found.labels, **labels_of_args(args)}
        call = str(args.get("External id", "")) if event.cat in (_ON_GPU, "user_annotation") else ""
        self.actions.append(
            Range(found.optype, start_us, end_us, thread, labels, found.virtual_stage, on_gpu, call, found.then)
        )

    def _metadata(self, event: Event) -> None:
        name = _as_dict(event.args).get("name")
        process, thread = _thread(event)
        if event.name == "process_name":
            self.process_names[process] = labels_of_text(name)
        elif event.name == "thread_name":
            self.thread_names[process, thread] = labels_of_text(name)

    def _document(self, rest: Mapping[str, Any]) -> None:
        base = rest.get("baseTimeNanoseconds")
        self.found.base_ns = base if isinstance(base, int) and abs(base) < 1 << 63 else 0
        job = _as_dict(rest.get("distributedInfo"))
        self.found.rank, self.found.world_size = whole(job.get("rank")), whole(job.get("world_size"))
        groups = job.get("pg_config")
        for group in groups if isinstance(groups, list) else ():
            kind = _kind_of_group(_as_dict(group))
            ranks = _as_dict(group).get("ranks")
            if kind and isinstance(ranks, list) and self.found.rank in ranks:
                self.found.groups[kind] = tuple(each for each in ranks if isinstance(each, int))

    def placed(self, each: Range) -> Range:
        """Return `each` with the labels of its process and thread."""
        process = each.thread[0]
        labels = {
            **labels_of_text(process),
            **self.process_names.get(process, {}),
            **self.thread_names.get(each.thread, {}),
            **each.labels,
        }
        return each._replace(labels=labels)


def _kind_of_group(group: Mapping[str, Any]) -> str:
    """Return the kind of a group in Kineto's pg_config, by Megatron's names and those of torch's meshes; "" if
    unknown."""
    name = " ".join(str(group.get(key, "")) for key in ("pg_desc", "pg_name")).lower()
    for kind, words in {
        "stage": ("pipeline_model_parallel_group", "pipeline_parallel", "mesh_pp"),
        "lane": ("tensor_model_parallel_group", "tensor_parallel", "mesh_tp"),
        "replica": ("data_parallel_group", "data_parallel", "mesh_dp"),
    }.items():
        if any(word in name.split() or name.startswith(word) for word in words):
            return kind
    return ""


def read_ranges(path: Path) -> FileRanges:
    """Read the ranges of a file. Raises RecordingError if it is no Chrome trace, OSError if it cannot be read."""
    reader = _Reader(path)
    reader.read()
    actions = [reader.placed(each) for each in reader.actions]
    hosts = [each for each in actions if not each.on_gpu]
    chosen = _on_main_streams([each for each in actions if each.on_gpu]) or hosts
    outermost = [each for group in _by_thread(chosen).values() for each in _outermost(group)]
    found = reader.found
    found.insides = len(chosen) - len(outermost)
    found.hidden = _hidden(chosen, outermost)
    found.on_host_alone = bool(reader.kernels and hosts and chosen is hosts)
    stepped = _with_steps(outermost, hosts, reader.steps)
    for rows in reader.waits.values():
        rows.sort()
    ranges = [_without_waits(each, reader.waits.get(each.thread, ())) for each in stepped]
    found.waits = sum(one.start_us != other.start_us for one, other in zip(stepped, ranges, strict=True))
    found.ranges = _divided(found, ranges)
    return found


def _hidden(chosen: Iterable[Range], outermost: Iterable[Range]) -> str:
    """Describe an action that `chosen` contains and `outermost` does not; empty if there is none."""

    def what(each: Range) -> tuple[str, int | None, int | None, int | None]:
        return str(each.optype), each.virtual_stage, each.labels.get("chunk"), each.labels.get("micro_batch")

    seen = set(map(what, outermost))
    first = next((each for each in chosen if what(each) not in seen and "micro_batch" in each.labels), None)
    return "" if first is None else f"{first.optype} of micro-batch {first.labels['micro_batch']}"


def _divided(found: FileRanges, ranges: Sequence[Range]) -> list[Range]:
    """Divide each range with two actions, in proportion to their times alone on the same virtual stages. If these are
    unknown, the range is left out."""
    alone_us: dict[tuple[int | None, OpType], float] = {}
    for each in ranges:
        if each.then is None:
            key = (each.virtual_stage, each.optype)
            alone_us[key] = min(each.end_us - each.start_us, alone_us.get(key, math.inf))

    def usual_us(virtual_stage: int | None, *optypes: OpType) -> float:
        return sum(alone_us.get((virtual_stage, optype), math.nan) for optype in optypes)

    divided = []
    for each in ranges:
        if each.then is None:
            divided.append(each)
            continue
        backward = each.then.virtual_stage
        first_us, then_us = usual_us(each.virtual_stage, OpType.FORWARD), usual_us(backward, OpType.BACKWARD)
        if math.isnan(then_us):
            then_us = usual_us(backward, OpType.BACKWARD_INPUT, OpType.BACKWARD_WEIGHT)
        if not first_us + then_us > 0.0:
            found.left_out[
                f"OVERLAP_F_B of a forward of stage {each.virtual_stage} and a backward of stage {backward} is one "
                "range, and no range of either alone says how long it takes"
            ] += 1
            continue
        # What is longer than both alone is the wait for the backward's message.
        part = min(1.0, (each.end_us - each.start_us) / (first_us + then_us))
        labels = {**each.labels, **each.then.labels}
        rest = (each.thread, labels, backward, each.on_gpu, each.call)
        found.divided += 1
        divided += [
            each._replace(end_us=each.start_us + part * first_us, then=None),
            Range(OpType.BACKWARD, each.end_us - part * then_us, each.end_us, *rest),
        ]
    return divided


def _on_main_streams(actions: Sequence[Range]) -> list[Range]:
    """Return the copies on the main stream: for each process and type of action, the stream with the most time."""
    held: Counter[tuple[str, OpType, str]] = Counter()
    for each in actions:
        held[each.thread[0], each.optype, each.thread[1]] += round(each.end_us - each.start_us) + 1
    main: dict[tuple[str, OpType], str] = {}
    for (process, optype, stream), _ in held.most_common():
        main.setdefault((process, optype), stream)
    return [each for each in actions if main[each.thread[0], each.optype] == each.thread[1]]


def _by_thread(actions: Iterable[Range]) -> dict[Thread, list[Range]]:
    found: dict[Thread, list[Range]] = defaultdict(list)
    for each in sorted(actions, key=lambda each: (each.start_us, -each.end_us)):
        found[each.thread].append(each)
    return found


def _outermost(actions: Iterable[Range]) -> Iterable[Range]:
    """Yield the ranges of one thread that are inside no other, by start. After a merge, a thread may have ranges of
    several cells, which are never inside each other."""
    until_us: dict[tuple[int | None, ...], float] = {}
    for each in actions:
        if not each.optype.computes:
            yield each
            continue
        place = tuple(each.labels.get(label) for label in PLACE)
        open_us = max((end_us for other, end_us in until_us.items() if _may_be_one(place, other)), default=-math.inf)
        if each.end_us > open_us + _HALF_US or each.start_us >= open_us - _HALF_US:
            until_us[place] = max(each.end_us, until_us.get(place, -math.inf))
            yield each


def _may_be_one(place: Sequence[int | None], other: Sequence[int | None]) -> bool:
    return all(None in (one, its) or one == its for one, its in zip(place, other, strict=True))


def _without_waits(action: Range, waits: Sequence[tuple[float, float]]) -> Range:
    """Return `action` from the end of its last wait on. `waits`: of its thread, by start."""
    if not action.optype.computes or action.then is not None:
        return action
    start_us = action.start_us
    for at in range(bisect_left(waits, (action.start_us - _HALF_US, -math.inf)), len(waits)):
        if waits[at][0] >= action.end_us - _HALF_US:
            break
        start_us = max(start_us, min(waits[at][1], action.end_us))
    return action._replace(start_us=start_us)


def _with_steps(
    actions: Iterable[Range], hosts: Iterable[Range], steps: Mapping[str, list[tuple[float, float, int]]]
) -> list[Range]:
    """Return the actions with the number of the step that encloses them. Steps are ranges of the same process; a copy
    on the GPU takes the step of its range on the host."""
    for rows in steps.values():
        rows.sort()

    def number_of(each: Range) -> int | None:
        only = next(iter(steps.values())) if len(steps) == 1 else []
        rows = steps.get(each.thread[0], only)
        at = bisect_right(rows, (each.start_us + _HALF_US, math.inf, 0)) - 1
        while at >= 0 and rows[at][1] < each.start_us:
            at -= 1
        return rows[at][2] if at >= 0 else None

    by_call = {each.call: number for each in hosts if each.call and (number := number_of(each)) is not None}
    found = []
    for each in actions:
        number = by_call.get(each.call) if each.on_gpu else None
        number = number_of(each) if number is None else number
        labels = each.labels if number is None else {"step": number, **each.labels}
        found.append(each._replace(labels=labels))
    return found


def _matters(name: str) -> bool:
    return named(name) is not None or step_of(name) is not None or receives(name)


def _thread(event: Event) -> Thread:
    return str(event.pid), str(event.tid)


def _as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _described(event: Event) -> str:
    return f"{str(event.name)[:40]!r}{'' if event.ts is None else f' at ts {str(event.ts)[:20]}'}"
