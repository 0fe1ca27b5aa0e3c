# SPDX-License-Identifier: Apache-2.0
"""Chrome trace JSON in which forwards and backwards are named: Megatron's and MegaScan's, ours, and Kineto's.

Read are complete events ("X") and pairs of "B" and "E", times in microseconds. An event's name says what it is:
forward, fwd or F; backward, bwd or B; I and W for its halves; everything else as in `OpType`. Behind it may stand the
micro-batch ("F 3", "forward mb 3") and the chunk ("F 3 chunk 1"). Better, `args` says it: `microbatch` or
`micro_batch`, `model_chunk` or `chunk`, `iteration` or `step`, `pp_rank` or `stage`, `dp_rank` or `replica`. What is
in neither is taken from elsewhere: the stage from the process ("stage 3", else its number), the iteration from a range
named "iteration 7" or "ProfilerStep#7" that the event lies in, the micro-batch from the order of events. A directory of
Kineto's files has one per rank; their stages follow from the number of stages, as Megatron numbers ranks.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from adaptra_megatron.schedule.replay.messages import with_messages
from adaptra_megatron.schedule.replay.operations import Operation, OpType, RecordedStep, numbered
from adaptra_megatron.schedule.routing.costs import Cell
from adaptra_megatron.telemetry.recordings.recording import ALL_STEPS, Recording, RecordingError, Wanted

_NAMES = {
    "forward": OpType.FORWARD,
    "fwd": OpType.FORWARD,
    "f": OpType.FORWARD,
    "backward": OpType.BACKWARD,
    "bwd": OpType.BACKWARD,
    "b": OpType.BACKWARD,
    "i": OpType.BACKWARD_INPUT,
    "w": OpType.BACKWARD_WEIGHT,
}
_ACTION = re.compile(
    r"(forward|fwd|f|backward|bwd|b|i|w)(?:[ _-]?(?:step|compute))?"
    r"(?:[ _#:=-]*(?:mb|micro[ _-]?batch)?[ _#:=-]*(\d+))?(?:[ ,_-]*chunk[ _=]*(\d+))?",
    re.IGNORECASE,
)
_RANGE = re.compile(r"(?:iteration|step|ProfilerStep)[ _#]*(\d+)", re.IGNORECASE)
_PLACE = re.compile(r"stage\s*(\d+)", re.IGNORECASE)
_STEP_NAMES = ("iteration", "step")
_STAGE_NAMES = ("pp_rank", "stage")
_REPLICA_NAMES = ("dp_rank", "replica")
_CHUNK_NAMES = ("model_chunk", "chunk")
_MICRO_BATCH_NAMES = ("microbatch", "micro_batch", "mb_id")

Event = dict[str, Any]


class _Found(NamedTuple):
    step: int
    operation: Operation


def read_chrome(path: Path, wanted: Wanted = ALL_STEPS, *, stages: int | None = None) -> Recording:
    """The steps of a trace, or of the traces of a directory, one per rank.

    `stages`: pipeline size of files that do not name stages. Raises RecordingError for what is no such trace, for one
    without named forwards and backwards, and OSError if a file cannot be read.
    """
    documents = [_document(each) for each in _files(path)]
    ranks = [_rank(document, number) for number, document in enumerate(documents)]
    found: list[_Found] = []
    for rank, document in zip(ranks, documents, strict=True):
        cell = None if len(documents) == 1 else _cell_of_rank(path, rank, 1 + max(ranks), stages)
        found += _operations(path, _events(path, document), cell)
    steps: dict[int, list[Operation]] = defaultdict(list)
    for each in found:
        if each.step in wanted:
            steps[each.step].append(each.operation)
    trained = [number for number in sorted(steps) if any(each.optype is not OpType.FORWARD for each in steps[number])]
    if not trained:
        raise RecordingError(
            f"{path} names no forwards and backwards of the steps asked for: ranges have to be called forward and "
            "backward, or F and B, with micro-batches (record_function around the steps of the schedule makes them)"
        )
    return Recording(
        name=str(path),
        source="a Chrome trace",
        steps=tuple(_step(number, steps[number]) for number in trained),
    )


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(each for each in path.iterdir() if each.name.endswith((".json", ".json.gz")))
    if not found:
        raise RecordingError(f"{path} has neither rank-*.jsonl, which --adaptra-trace-dir writes, nor traces in JSON")
    return found


def _document(path: Path) -> Any:
    data = path.read_bytes()
    try:
        return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    except (ValueError, OSError, EOFError, RecursionError) as error:
        raise RecordingError(f"{path} is no Chrome trace in JSON: {error}") from error


def _events(path: Path, document: Any) -> list[Event]:
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise RecordingError(f"{path} has no list of traceEvents")
    return events


def _rank(document: Any, number: int) -> int:
    """Kineto writes the rank into its files."""
    told = document.get("distributedInfo", {}) if isinstance(document, dict) else {}
    return int(told.get("rank", number))


def _cell_of_rank(path: Path, rank: int, ranks: int, stages: int | None) -> Cell:
    """As Megatron numbers ranks: pipeline stages are outermost."""
    if stages is None or ranks % stages:
        raise RecordingError(
            f"{path} has traces of {ranks} ranks that do not name their stages: give the pipeline size, a divisor of "
            "that, by --stages"
        )
    each = ranks // stages
    return Cell(rank % each, rank // each)


def _operations(path: Path, events: Sequence[Event], cell: Cell | None) -> Iterator[_Found]:
    stages = _stages_of_processes(events)
    complete = list(_complete(path, events))
    ranges = [
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]), int(number[1]))
        for event in complete
        if (number := _RANGE.fullmatch(str(event.get("name", "")))) is not None
    ]
    for event in complete:
        named = _named(str(event.get("name", "")))
        if named is None:
            continue
        optype, micro_batch, chunk = named
        args = event.get("args") or {}
        start, duration = float(event["ts"]), float(event["dur"])
        within = next((number for first, end, number in ranges if first <= start <= end), 0)
        stage = _told(args, _STAGE_NAMES, stages.get(event.get("pid"), _whole(event.get("pid"))))
        place = cell or Cell(_told(args, _REPLICA_NAMES, 0), stage)
        yield _Found(
            _told(args, _STEP_NAMES, within),
            Operation(
                place,
                optype,
                start * 1e-6,
                duration * 1e-6,
                0,
                _told(args, _CHUNK_NAMES, chunk),
                _told(args, _MICRO_BATCH_NAMES, micro_batch),
            ),
        )


def _complete(path: Path, events: Sequence[Event]) -> Iterator[Event]:
    """Events with a start and a duration; what only its end tells of a pair is kept."""
    begun: dict[tuple[Any, Any, Any], list[Event]] = defaultdict(list)
    try:
        for event in sorted(
            (each for each in events if each.get("ph") in ("X", "B", "E")), key=lambda each: each["ts"]
        ):
            key = (event.get("pid"), event.get("tid"), event.get("name"))
            if event["ph"] == "X":
                yield event
            elif event["ph"] == "B":
                begun[key].append(event)
            elif begun[key]:
                first = begun[key].pop()
                args = {**(first.get("args") or {}), **(event.get("args") or {})}
                yield {**first, "ph": "X", "dur": event["ts"] - first["ts"], "args": args}
    except (KeyError, TypeError) as error:
        raise RecordingError(f"{path} has an event without a time: {error}") from error


def _named(name: str) -> tuple[OpType, int, int] | None:
    """Type, micro-batch (-1: not said) and chunk of an event; None for one that is none of ours."""
    if name in {optype.value for optype in OpType}:
        return OpType(name), -1, 0
    found = _ACTION.fullmatch(name.strip())
    if found is None:
        return None
    return _NAMES[found[1].lower()], int(found[2]) if found[2] else -1, int(found[3]) if found[3] else 0


def _stages_of_processes(events: Sequence[Event]) -> dict[Any, int]:
    found = {}
    for event in events:
        if event.get("ph") == "M" and event.get("name") == "process_name":
            place = _PLACE.search(str((event.get("args") or {}).get("name", "")))
            if place is not None:
                found[event.get("pid")] = int(place[1])
    return found


def _told(args: Mapping[str, Any], names: Sequence[str], default: int) -> int:
    return next((_whole(args[name]) for name in names if args.get(name) is not None), default)


def _whole(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return 0


def _step(number: int, operations: Sequence[Operation]) -> RecordedStep:
    """Stages and replicas counted from 0, chunks from 0 within their stage, micro-batches by order where not named."""
    stages = sorted({each.cell.stage for each in operations})
    chunks = {stage: sorted({each.chunk for each in operations if each.cell.stage == stage}) for stage in stages}
    placed = [
        each._replace(
            cell=Cell(each.cell.replica, stages.index(each.cell.stage)), chunk=chunks[each.cell.stage].index(each.chunk)
        )
        for each in operations
    ]
    counts: dict[tuple[Cell, OpType, int], int] = defaultdict(int)
    named = []
    for each in numbered(placed):
        key = (each.cell, each.optype, each.chunk)
        if each.optype.computes and each.micro_batch < 0:
            each = each._replace(micro_batch=counts[key])
        counts[key] += 1
        named.append(each)
    return with_messages([RecordedStep(number=number, operations=tuple(named))])[0]
