# SPDX-License-Identifier: Apache-2.0
"""Write traces for Perfetto (ui.perfetto.dev), as Chrome trace JSON or in Perfetto's own format.

There is one process per pipeline stage, and two threads per rank: its actions, under one slice per iteration, and its
waits. Counters show the activations that each rank holds, and the time of messages on each link. Arrows lead from the
action that sent a message to the one that used it. Perfetto colours slices by their name without numbers, so "F 3" and
"F 4" share a colour; `cname` does the same for chrome://tracing.

Perfetto's own format, protocol buffers, is smaller, opens faster and has the time of day. It needs the package
perfetto (`pip install 'adaptra-megatron[perfetto]'`), imported when a trace is written. Its flows have no names, so
actions name the links of their messages. Events of the whole run have a track of their own.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from adaptra_megatron.schedule.ir import interleaved
from adaptra_megatron.telemetry.action_records import ActionRecord
from adaptra_megatron.telemetry.trace import RankTrace, TraceError, read_traces

SUFFIXES = (".pftrace", ".perfetto-trace")
HAPPENED = "findings, plans and faults"
_SEQUENCE = 1
"""Number of the one writer of all packets."""

_Event = Mapping[str, Any]


class Package(NamedTuple):
    """The used part of the package perfetto."""

    messages: Any
    builder: Callable[[IO[bytes]], Any]


def perfetto_package() -> Package:
    """Return the package. Raises TraceError if it is not installed."""
    try:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2
        from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder
    except ImportError as error:
        raise TraceError(
            f"traces that end in {' or '.join(SUFFIXES)} need the package perfetto: pip install "
            "'adaptra-megatron[perfetto]'; those that end in .json or .json.gz need nothing"
        ) from error
    return Package(perfetto_trace_pb2, StreamingTraceProtoBuilder)


def write_packets(package: Package, file: IO[bytes], events: Iterable[_Event], base_ns: int | None = None) -> None:
    """Write the `events` of `chrome_trace` in Perfetto's format. `base_ns`: their time 0, in nanoseconds since the
    epoch.

    Raises OSError if `file` cannot be written.
    """
    messages, builder = package.messages, package.builder(file)
    if base_ns is not None:
        packet = builder.create_packet()
        for clock, time_ns in ((messages.BUILTIN_CLOCK_BOOTTIME, 0), (messages.BUILTIN_CLOCK_REALTIME, base_ns)):
            packet.clock_snapshot.clocks.add(clock_id=clock, timestamp=time_ns)
        builder.write_packet(packet)
    for packet in _Packets(messages, list(events)).all():
        packet.trusted_packet_sequence_id = _SEQUENCE
        builder.write_packet(packet)


class _Packets:
    """Packets of one trace. Their order only matters at equal times: a slice ends before the next one begins."""

    def __init__(self, messages: Any, events: list[_Event]) -> None:
        self._messages, self._events = messages, events
        self._tracks: dict[Hashable, int] = {}
        """Numbers of the described tracks."""

    def all(self) -> Iterator[Any]:
        yield from self._described()
        threads: dict[tuple[int, int], list[_Event]] = defaultdict(list)
        flows = self._flows()
        for event in self._events:
            if event["ph"] == "X":
                threads[event["pid"], event["tid"]].append(event)
            elif event["ph"] == "C":
                yield from self._counted(event)
            elif event["ph"] == "i":
                yield from self._happened(event)
        for thread, slices in threads.items():
            yield from self._slices(self._tracks[thread], slices, flows)

    def _track(self, key: Hashable, **described: Any) -> Any:
        """Return the packet that describes a new track."""
        self._tracks[key] = len(self._tracks) + 1
        descriptor = self._messages.TrackDescriptor(uuid=self._tracks[key], **described)
        return self._messages.TracePacket(track_descriptor=descriptor)

    def _described(self) -> Iterator[Any]:
        """Yield the descriptions of stages and ranks."""
        found: dict[tuple[int, int], dict[str, Any]] = defaultdict(dict)
        for event in self._events:
            if event["ph"] == "M":
                found[event["pid"], event["tid"]].update(event["args"])
        for (process, thread), given in found.items():
            name, order = given["name"], given["sort_index"]
            if thread:
                described = self._messages.ThreadDescriptor(
                    pid=process, tid=thread, thread_name=name, legacy_sort_index=order
                )
                yield self._track((process, thread), parent_uuid=self._tracks[process], thread=described)
            else:
                described = self._messages.ProcessDescriptor(pid=process, process_name=name, legacy_sort_index=order)
                yield self._track(process, process=described)

    def _event(self, kind: str, event: _Event, time_ns: int, track: int, **more: Any) -> Any:
        """Return the packet of an event on `track`."""
        found = self._messages.TrackEvent(type=f"TYPE_{kind}", track_uuid=track, **more)
        if kind in ("SLICE_BEGIN", "INSTANT"):
            found.name = event["name"]
            found.categories.append(event["cat"])
            for name, value in event.get("args", {}).items():
                field = "int_value" if isinstance(value, int) else "string_value"
                found.debug_annotations.add(name=name, **{field: value})
        return self._messages.TracePacket(timestamp=time_ns, track_event=found)

    def _counted(self, event: _Event) -> Iterator[Any]:
        process, name = event["pid"], event["name"]
        ((unit, value),) = event["args"].items()
        if (process, name) not in self._tracks:
            described = self._messages.CounterDescriptor(unit_name=unit)
            yield self._track((process, name), parent_uuid=self._tracks[process], name=name, counter=described)
        track = self._tracks[process, name]
        yield self._event("COUNTER", event, _ns(event["ts"]), track, double_counter_value=value)

    def _happened(self, event: _Event) -> Iterator[Any]:
        if HAPPENED not in self._tracks:
            yield self._track(HAPPENED, name=HAPPENED)
        yield self._event("INSTANT", event, _ns(event["ts"]), self._tracks[HAPPENED])

    def _flows(self) -> dict[tuple[str, int, int, int], list[_Event]]:
        """Return the ends of arrows by phase, process, thread and time (at the sender, the end of its action)."""
        found = defaultdict(list)
        for event in self._events:
            if event["ph"] in "sf":
                moment_ns = _ns(event["ts"]) + (event["ph"] == "s")  # was drawn within the slice
                found[event["ph"], event["pid"], event["tid"], moment_ns].append(event)
        return found

    def _slices(
        self, track: int, slices: list[_Event], flows: Mapping[tuple[str, int, int, int], list[_Event]]
    ) -> Iterator[Any]:
        """Yield the packets of one thread's slices, given by start; they may nest."""
        open_slices: list[tuple[int, _Event]] = []
        for event in slices:
            start_ns = _ns(event["ts"])
            end_ns = start_ns + _ns(event["dur"])
            while open_slices and open_slices[-1][0] <= start_ns:
                ended_ns, ended = open_slices.pop()
                yield self._event("SLICE_END", ended, ended_ns, track)
            place = event["pid"], event["tid"]
            packet = self._event("SLICE_BEGIN", event, start_ns, track)
            if event["cat"] == "compute":
                begun = packet.track_event
                for sent in flows.get(("s", *place, end_ns), ()):
                    begun.flow_ids.append(sent["id"])
                    begun.debug_annotations.add(name="sends by", string_value=sent["name"])
                for used in flows.get(("f", *place, start_ns), ()):
                    begun.terminating_flow_ids.append(used["id"])
                    begun.debug_annotations.add(name="received by", string_value=used["name"])
            yield packet
            open_slices.append((end_ns, event))
        for ended_ns, ended in reversed(open_slices):
            yield self._event("SLICE_END", ended, ended_ns, track)


def _ns(microseconds: float) -> int:
    return round(microseconds * 1000)


Event = dict[str, Any]

_CHROME_COLOURS = {"F": "rail_response", "B": "rail_animation", "I": "rail_animation", "W": "rail_idle"}
_USERS_OF = {"F": ("F",), "B": ("I", "B"), "I": ("I", "B"), "W": ()}
"""Kinds of actions that use the message of a kind."""
_SHORTEST_WAIT_S = 20e-6
"""Shorter waits are only the cost of asking for the message: they are left out."""


class _Numbers(NamedTuple):
    """Process and thread numbers, unique over runs. Above 0, which trace viewers take for the idle process."""

    run: int

    def process(self, stage: int) -> int:
        return 10_000 * self.run + stage + 1

    def compute_thread(self, rank: int) -> int:
        return 1_000_000 * self.run + 2 * rank + 1

    def waiting_thread(self, rank: int) -> int:
        return self.compute_thread(rank) + 1


class Instant(NamedTuple):
    """An event of the whole run."""

    time_s: float
    """On the clock of the records."""
    name: str
    why: str


def chrome_trace(
    ranks: Sequence[RankTrace],
    *,
    label: str = "",
    run: int = 0,
    instants: Iterable[Instant] = (),
    wall_clock_offset_s: float | None = None,
) -> Event:
    """Return the trace document of one run. `wall_clock_offset_s`: seconds to add to times of records to get seconds
    since the epoch; if given, the document also names its time 0, as torch.profiler's do.

    Time 0 is the run's first action, so `write_trace` can put several runs into one file for comparison, each with its
    `label` and number `run`.
    """
    numbers = _Numbers(run)
    records = [record for rank in ranks for record in rank.records]
    origin_s = min((record.wait_start_s for record in records), default=0.0)
    chunks = 1 + max((record.chunk for record in records), default=0)
    events: list[Event] = []
    for rank in ranks:
        events += _names(rank, label, numbers)
    timed: list[Event] = []
    for rank in ranks:
        process = numbers.process(rank.stage)
        compute, waiting = numbers.compute_thread(rank.rank), numbers.waiting_thread(rank.rank)
        timed += _iteration_slices(rank.records, origin_s, process, compute)
        for record in rank.records:
            timed.append(_compute_slice(record, chunks, origin_s, process, compute))
            if record.wait_s >= _SHORTEST_WAIT_S:
                timed.append(_wait_slice(record, origin_s, process, waiting))
        timed += _activations_held(rank, origin_s, process)
    timed += _arrows(ranks, chunks, origin_s, numbers)
    if ranks:
        first = ranks[0]
        thread = numbers.process(first.stage), numbers.compute_thread(first.rank)
        timed += [_instant(each, origin_s, *thread) for each in instants if each.time_s >= origin_s]
    timed.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    document: Event = {"displayTimeUnit": "ms", "traceEvents": events + timed}
    if wall_clock_offset_s is not None:
        document["baseTimeNanoseconds"] = round((origin_s + wall_clock_offset_s) * 1e9)
    return document


def write_trace(path: Path | str, *documents: Event) -> Path:
    """Write the events of all `documents` (at least one) as one trace, and return its path. A name in .gz is
    compressed. A name in one of SUFFIXES (before .gz) means Perfetto's own format, any other JSON.

    Raises OSError if it cannot be written, TraceError if the format needs a missing package.
    """
    path = Path(path)
    events = [event for document in documents for event in document["traceEvents"]]
    package = perfetto_package() if path.name.removesuffix(".gz").endswith(SUFFIXES) else None
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wb") if path.suffix == ".gz" else path.open("wb") as opened:
        file = cast("IO[bytes]", opened)
        if package is not None:
            write_packets(package, file, events, documents[0].get("baseTimeNanoseconds"))
        else:
            file.write(json.dumps({**documents[0], "traceEvents": events}, separators=(",", ":")).encode())
    return path


def merge_traces(
    directory: Path | str,
    output: Path | str | None = None,
    *,
    instants: Iterable[Instant] = (),
    wall_clock_offset_s: float | None = None,
) -> Path:
    """Merge the files of all ranks in `directory` into one trace, `directory/trace.json.gz` unless `output` is given.
    Other arguments: see `chrome_trace`.

    Raises TraceError if there are no files or one is damaged, OSError if `output` cannot be written.
    """
    output = Path(directory) / "trace.json.gz" if output is None else Path(output)
    document = chrome_trace(read_traces(directory), instants=instants, wall_clock_offset_s=wall_clock_offset_s)
    return write_trace(output, document)


def _names(rank: RankTrace, label: str, numbers: _Numbers) -> Iterator[Event]:
    process = numbers.process(rank.stage)
    name = f"{label} stage {rank.stage}".strip()
    yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": {"sort_index": process}}
    compute, waiting = numbers.compute_thread(rank.rank), numbers.waiting_thread(rank.rank)
    for thread, what in ((compute, "compute"), (waiting, "waiting")):
        name = f"rank {rank.rank} {what}"
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": thread, "args": {"sort_index": thread}}


def _slice(name: str, category: str, process: int, thread: int, origin_s: float, start_s: float, end_s: float) -> Event:
    """Return a complete event. Both ends are rounded before subtraction, so that neighbours never overlap."""
    start_ns, end_ns = round((start_s - origin_s) * 1e9), round((end_s - origin_s) * 1e9)
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": process,
        "tid": thread,
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
    }


def _compute_slice(record: ActionRecord, chunks: int, origin_s: float, process: int, thread: int) -> Event:
    name = f"{record.kind} {record.micro_batch}" + (f" chunk {record.chunk}" if chunks > 1 else "")
    event = _slice(name, "compute", process, thread, origin_s, record.start_s, record.end_s)
    event["cname"] = _CHROME_COLOURS[record.kind]
    event["args"] = _arguments(record)
    return event


def _wait_slice(record: ActionRecord, origin_s: float, process: int, thread: int) -> Event:
    name = f"wait for {record.kind} {record.micro_batch}"
    event = _slice(name, "wait", process, thread, origin_s, record.wait_start_s, record.start_s)
    event["args"] = _arguments(record)
    return event


def _arguments(record: ActionRecord) -> dict[str, int]:
    return {"iteration": record.iteration, "chunk": record.chunk, "micro_batch": record.micro_batch}


def _iteration_slices(records: Sequence[ActionRecord], origin_s: float, process: int, thread: int) -> Iterator[Event]:
    spans_s: dict[int, tuple[float, float]] = {}
    for record in records:
        start_s, end_s = spans_s.get(record.iteration, (record.start_s, record.end_s))
        spans_s[record.iteration] = (min(start_s, record.start_s), max(end_s, record.end_s))
    for iteration, (start_s, end_s) in spans_s.items():
        event = _slice(f"iteration {iteration}", "iteration", process, thread, origin_s, start_s, end_s)
        yield {**event, "args": {"iteration": iteration}}


def _arrows(ranks: Sequence[RankTrace], chunks: int, origin_s: float, numbers: _Numbers) -> Iterator[Event]:
    """Yield a pair of flow events per message: the end of the sending action, and the start of the using one.

    Ranks of one stage are taken in order: the first ranks of all stages form the first pipeline, and so on.
    """
    replicas: dict[int, list[RankTrace]] = defaultdict(list)
    for rank in ranks:
        replicas[rank.stage].append(rank)
    if sorted(replicas) != list(range(len(replicas))):
        return  # a stage left no trace, so the senders of its neighbours' messages are unknown
    stages = len(replicas)
    placement = interleaved(stages, chunks)
    message = 100_000_000 * numbers.run
    arrived = _arrivals(ranks)
    for lane in range(min(len(same_stage) for same_stage in replicas.values())):
        threads = [numbers.compute_thread(replicas[stage][lane].rank) for stage in range(stages)]
        done = {
            (record.iteration, placement.virtual_stage(stage, record.chunk), record.kind, record.micro_batch): record
            for stage in range(stages)
            for record in replicas[stage][lane].records
        }
        for (iteration, virtual, kind, micro_batch), record in done.items():
            for user_kind in _USERS_OF[kind]:
                user = done.get((iteration, virtual + (1 if kind == "F" else -1), user_kind, micro_batch))
                if user is None:
                    continue
                message += 1
                sent_s, used_s = record.end_s - origin_s, user.start_s - origin_s
                link = f"link {record.stage}->{user.stage}"
                yield _flow("s", link, message, sent_s, numbers.process(record.stage), threads[record.stage], -1)
                yield _flow("f", link, message, used_s, numbers.process(user.stage), threads[user.stage], 0)
                receiver = replicas[user.stage][lane].rank
                key = (receiver, iteration, "F" if kind == "F" else "B", user.chunk, micro_batch)
                if (arrived_s := arrived.get(key)) is not None:
                    yield {
                        "ph": "C",
                        "name": f"{link}, rank {receiver}, ms",
                        "pid": numbers.process(user.stage),
                        "tid": 0,
                        "ts": round((arrived_s - origin_s) * 1e9) / 1000,
                        "args": {"ms": round((arrived_s - record.end_s) * 1e3, 3)},
                    }


def _arrivals(ranks: Sequence[RankTrace]) -> dict[tuple[int, int, str, int, int], float]:
    """Return arrival times by receiving rank, iteration, kind, chunk of the using action, and micro-batch."""
    return {
        (rank.rank, each.iteration, each.kind, each.chunk, each.micro_batch): each.arrived_s
        for rank in ranks
        for each in rank.arrivals
    }


def _activations_held(rank: RankTrace, origin_s: float, process: int) -> Iterator[Event]:
    """Yield a value at each change of the number of activations held: from the start of the forward to the end of the
    gradients."""
    split = {(each.iteration, each.chunk, each.micro_batch) for each in rank.records if each.kind == "W"}
    changes = []
    for record in rank.records:
        if record.kind == "F":
            changes.append((record.start_s, 1))
        elif record.kind in "BW" and not (
            record.kind == "B" and (record.iteration, record.chunk, record.micro_batch) in split
        ):
            changes.append((record.end_s, -1))
    if all(change > 0 for _time_s, change in changes):
        return  # an evaluation keeps nothing
    held = 0
    for time_s, change in sorted(changes):
        held += change
        yield {
            "ph": "C",
            "name": f"activations held, rank {rank.rank}",
            "pid": process,
            "tid": 0,
            "ts": round((time_s - origin_s) * 1e9) / 1000,
            "args": {"activations": held},
        }


def _instant(instant: Instant, origin_s: float, process: int, thread: int) -> Event:
    return {
        "ph": "i",
        "s": "g",
        "name": instant.name,
        "cat": "event",
        "pid": process,
        "tid": thread,
        "ts": round((instant.time_s - origin_s) * 1e9) / 1000,
        "args": {"why": instant.why},
    }


def _flow(phase: str, link: str, number: int, time_s: float, process: int, thread: int, shift_ns: int) -> Event:
    """Return one end of an arrow, shifted by `shift_ns` into its slice (which does not contain its own end)."""
    event = {"ph": phase, "id": number, "name": link, "cat": "message", "pid": process, "tid": thread}
    event["ts"] = (round(time_s * 1e9) + shift_ns) / 1000
    return {**event, "bp": "e"} if phase == "f" else event
