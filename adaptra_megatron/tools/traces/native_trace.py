# SPDX-License-Identifier: Apache-2.0
"""A Chrome trace in Perfetto's own format, protocol buffers: smaller than JSON, opens faster, knows the time of day.

Needs the package perfetto (`pip install 'adaptra-megatron[perfetto]'`), imported when a trace is written. Stages stay
processes and ranks threads; a flow has no name there, so actions say the links that they send and receive by; what
happened to the whole run has a track of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import IO, Any, NamedTuple

from adaptra_megatron.telemetry.tracing.trace import TraceError

SUFFIXES = (".pftrace", ".perfetto-trace")
HAPPENED = "findings, plans and faults"
_SEQUENCE = 1
"""All packets are of one writer."""

_Event = Mapping[str, Any]


class Package(NamedTuple):
    """Part of the package perfetto that is used."""

    messages: Any
    builder: Callable[[IO[bytes]], Any]


def perfetto_package() -> Package:
    """The package. Raises trace.TraceError where it is not installed."""
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
    """Write the `events` of `perfetto.chrome_trace` as a trace. `base_ns`: when its time 0 was, since the epoch.

    Raises OSError where `file` cannot be written.
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
    """Those of one trace. Their order matters at equal times alone: a slice ends before the next one begins."""

    def __init__(self, messages: Any, events: list[_Event]) -> None:
        self._messages, self._events = messages, events
        self._tracks: dict[Hashable, int] = {}
        """Numbers of those that have been described."""

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
        """The packet that describes a track."""
        self._tracks[key] = len(self._tracks) + 1
        descriptor = self._messages.TrackDescriptor(uuid=self._tracks[key], **described)
        return self._messages.TracePacket(track_descriptor=descriptor)

    def _described(self) -> Iterator[Any]:
        """Stages and ranks, by their names and in their order."""
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
        """A packet of an event that is shown on `track`."""
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
        """Ends of arrows by phase, process, thread, and moment: of a message's sending, when its action ended."""
        found = defaultdict(list)
        for event in self._events:
            if event["ph"] in "sf":
                moment_ns = _ns(event["ts"]) + (event["ph"] == "s")  # was drawn within the slice
                found[event["ph"], event["pid"], event["tid"], moment_ns].append(event)
        return found

    def _slices(
        self, track: int, slices: list[_Event], flows: Mapping[tuple[str, int, int, int], list[_Event]]
    ) -> Iterator[Any]:
        """Slices of one thread, which nest, by their beginnings."""
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
