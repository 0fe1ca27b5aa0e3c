# SPDX-License-Identifier: Apache-2.0
"""Encode measurements of a rank for its leader, and summarize them there."""

from __future__ import annotations

import statistics
import sys
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from adaptra_megatron.common.typed_messages import Decoder
from adaptra_megatron.control.stage_memory import StageMemory
from adaptra_megatron.telemetry.action_records import ActionRecord
from adaptra_megatron.transport.link_paths import Path, ProbeTimes
from adaptra_megatron.transport.message_keys import Direction, MessageKey, MessageTimes

MESSAGE = np.dtype(
    [
        ("peer", "<i2"),
        ("host", "?"),
        ("micro_batch", "<u4"),
        ("chunk", "<u2"),
        ("gradient", "?"),
        ("nbytes", "<u8"),
        ("posted_s", "<f4"),
        ("done_s", "<f4"),
    ]
)
"""One message, seen from one of its ends. Times are seconds since the start of the rank's iteration: in single
precision, they are exact to microseconds. The first five fields define the order of messages."""
Messages = npt.NDArray[np.void]
"""Array of dtype MESSAGE, in order of `message_order`."""
MAX_REPORT_NBYTES = 1 << 26
"""Largest encoded measurement."""


class ActionColumns(NamedTuple):
    """Actions of a rank as little-endian columns, one per property, in the order in which they ran."""

    kinds: str = ""
    """One letter per action: F, B, I or W; small ones for the halves of a combined action: f and, behind it, b or i."""
    chunks: bytes = b""
    """Unsigned 16-bit integers."""
    micro_batches: bytes = b""
    """Unsigned 32-bit integers."""
    starts_s: bytes = b""
    """64-bit floats: seconds on the rank's own clock."""
    ends_s: bytes = b""

    @classmethod
    def of(cls, records: Sequence[ActionRecord]) -> ActionColumns:
        """Return the columns of `records`."""
        if not records:
            return cls()
        _, _, kinds, chunks, micro_batches, _, starts_s, ends_s, combined = zip(*records, strict=True)
        if any(combined):
            kinds = tuple(kind.lower() if half else kind for kind, half in zip(kinds, combined, strict=True))
        columns = _column("H", chunks), _column("I", micro_batches), _column("d", starts_s), _column("d", ends_s)
        return cls("".join(kinds), *columns)


class MeasuredColumns(NamedTuple):
    """Messages, seen from one of their ends, as columns: the fields of MESSAGE, in its order and types."""

    peers: bytes = b""
    by_host: bytes = b""
    micro_batches: bytes = b""
    chunks: bytes = b""
    gradients: bytes = b""
    nbytes: bytes = b""
    posted_s: bytes = b""
    done_s: bytes = b""

    @classmethod
    def of(cls, times: Sequence[MessageTimes], start_s: float) -> MeasuredColumns:
        """Return the columns of messages with these `times`. `start_s`: start of the rank's iteration on the same
        clock."""
        if not times:
            return cls()
        keys, peers, posted_s, done_s, nbytes, paths = zip(*times, strict=True)
        _, directions, chunks, micro_batches, _ = zip(*keys, strict=True)
        return cls(
            _column("h", peers),
            bytes([path is _HOST for path in paths]),
            _column("I", micro_batches),
            _column("H", chunks),
            bytes([direction is _GRADIENT for direction in directions]),
            _column("Q", nbytes),
            _column("f", [at_s - start_s for at_s in posted_s]),
            _column("f", [at_s - start_s for at_s in done_s]),
        )

    def messages(self) -> Messages:
        """Return the messages as an array. Raises ValueError for malformed columns."""
        found = np.empty(len(self.by_host), MESSAGE)
        for name, column in zip(MESSAGE.names or (), self, strict=True):
            values = np.frombuffer(column, MESSAGE[name])
            if len(values) != len(found):
                raise ValueError(f"columns of messages have {len(found)} and {len(values)} rows")
            found[name] = values
        groups, keys = message_order(found)
        return found[np.lexsort((keys, groups))]


_ACTION_TYPES = tuple(map(np.dtype, ("<u1", "<u2", "<u4", "<f8", "<f8")))
"""Types of the columns of actions; letters as their codes."""
_HOST, _GRADIENT = Path.HOST, Direction.GRADIENT
"""Looked up once: the look-up by enum takes as long as everything else done with a message here."""


def _column(code: str, values: Iterable[Any]) -> bytes:
    column = array(code, values)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


@dataclass(frozen=True, eq=False)
class StageMeasurement:
    """One rank's iteration, as columns: the training process has no time to summarize them.

    The properties below are computed once, where they are used. Their times are seconds on the pipeline's common
    clock.
    """

    pipeline: int
    """First global rank of the pipeline's group."""
    stage: int
    iteration: int
    """Number as in traces and message keys, where evaluations count, too."""
    micro_batches: int
    actions: ActionColumns = ActionColumns()
    sends: MeasuredColumns = MeasuredColumns()
    receives: MeasuredColumns = MeasuredColumns()
    begun_s: float = 0.0
    """Start of the first action, or of an iteration without actions, on the rank's own clock."""
    memory: StageMemory | None = None
    """None if memory is not measured, or not known yet."""
    clock_offset_s: float = 0.0
    """Seconds to add to this rank's clock to get the common one."""
    probes: tuple[ProbeTimes, ...] = ()
    """Times of probes that this rank has sent; each end's on its own clock."""
    broken: tuple[BrokenPath, ...] = ()
    """Paths of this rank's outgoing links that were broken when the iteration ended."""
    disturbance: str | None = None
    """What may have disturbed all timings of this rank; None if nothing."""
    nbytes: Mapping[int, int] = field(default_factory=dict)
    """Bytes of the messages of each micro-batch with messages, those with another replica's cells included."""
    work: tuple[str, ...] = ()
    """By chunk: text that describes its layers, equal for equal work."""
    switch_s: float = 0.0
    """Seconds that another order of forwards and backwards would cost this rank, as the last time; 0.0 if none."""

    @cached_property
    def _columns(self) -> tuple[npt.NDArray[Any], ...]:
        """Columns of the actions: kinds (codes of letters), chunks, micro-batches, starts, ends."""
        columns = self.actions.kinds.encode(), *self.actions[1:]
        found = tuple(np.frombuffer(column, dtype) for column, dtype in zip(columns, _ACTION_TYPES, strict=True))
        if len(counts := set(map(len, found))) > 1:
            raise ValueError(f"columns of actions have {' and '.join(map(str, sorted(counts)))} rows")
        return found

    @cached_property
    def _places(self) -> Mapping[tuple[str, int], npt.NDArray[np.intp]]:
        """Indices of the actions of each kind and chunk."""
        kinds, chunks, *_others = self._columns
        codes = kinds.astype(np.int64) << 16 | chunks
        return {
            (chr(code >> 16), code & 0xFFFF): np.flatnonzero(codes == code) for code in dict.fromkeys(codes.tolist())
        }

    @cached_property
    def span_s(self) -> tuple[float, float]:
        """Start of the first action and end of the last one."""
        end_s = float(self._columns[-1].max(initial=self.begun_s))
        return self.begun_s + self.clock_offset_s, end_s + self.clock_offset_s

    @cached_property
    def durations_s(self) -> Mapping[tuple[str, int], npt.NDArray[np.float32]]:
        """By kind ("F", "B", "I", "W") and chunk: seconds of each action alone, without waiting."""
        lasted_s = self._lasted_s
        return {key: lasted_s[places] for key, places in self._places.items() if key[0].isupper()}

    @cached_property
    def combined_s(self) -> Mapping[tuple[int, str, int], npt.NDArray[np.float32]]:
        """By chunk of the forward, kind of the backward ("B" or "I") and its chunk: seconds of each combined action,
        without waiting."""
        kinds, chunks, *_others = self._columns
        forwards = np.flatnonzero(kinds == ord("f"))
        if len(forwards) and (forwards[-1] + 1 == len(kinds) or (kinds[forwards + 1] < ord("a")).any()):
            raise ValueError("a combined action has no backward")
        ahead, behind = chunks[forwards].astype(np.int64), chunks[forwards + 1]
        codes = (ahead << 8 | kinds[forwards + 1]) << 16 | behind
        return {
            (code >> 24, chr(code >> 16 & 0xFF).upper(), code & 0xFFFF): self._lasted_s[forwards[codes == code]]
            for code in dict.fromkeys(codes.tolist())
        }

    @cached_property
    def computed_s(self) -> float:
        """Seconds of all actions, without waiting."""
        return float(self._lasted_s.sum())

    @cached_property
    def _lasted_s(self) -> npt.NDArray[np.float32]:
        *_others, starts_s, ends_s = self._columns
        lasted_s: npt.NDArray[np.float32] = (ends_s - starts_s).astype(np.float32)
        return lasted_s

    @cached_property
    def sizes(self) -> Mapping[tuple[str, int], npt.NDArray[np.float32]]:
        """By kind and chunk: bytes of the messages of each action's micro-batch, which are proportional to its tokens.
        One value if all are equal; no entry if any is unknown."""
        if not self.nbytes:
            return {}
        micro_batches = self._columns[2].tolist()
        nbytes = np.array([self.nbytes.get(each, 0) for each in micro_batches], dtype=np.float32)
        found = ((key, nbytes[places]) for key, places in self._places.items() if key[0].isupper())
        return {key: each[:1] if (each == each[0]).all() else each for key, each in found if each.all()}

    @cached_property
    def sent(self) -> Messages:
        """Messages sent: `peer` is the target; `posted_s` and `done_s` are both the time when the message could
        leave."""
        return self.sends.messages()

    @cached_property
    def received(self) -> Messages:
        """Messages received: `peer` is the source; posted when the receive was, done when the message had arrived."""
        return self.receives.messages()


class BrokenPath(NamedTuple):
    """A path of a link that its sender has given up."""

    peer: int
    path: Path
    cause: str


def stage_measurement(
    pipeline: int,
    stage: int,
    micro_batches: int,
    records: Sequence[ActionRecord],
    times: tuple[Sequence[MessageTimes], Sequence[MessageTimes]],
    clock_offset_s: float,
    ready_s: Mapping[MessageKey, float] | None = None,
    memory: StageMemory | None = None,
    *,
    probes: Sequence[ProbeTimes] = (),
    broken: Sequence[BrokenPath] = (),
    disturbance: str | None = None,
    nbytes: Mapping[int, int] | None = None,
    idle: tuple[int, float] | None = None,
    work: tuple[str, ...] = (),
    switch_s: float = 0.0,
) -> StageMeasurement:
    """Return one rank's measurement. `clock_offset_s`: seconds to add to its local times.

    `idle`: number and start of the iteration, for a cell whose work has all been rerouted and that has no records.

    `ready_s`: when messages were computed, if they are posted earlier (on a GPU). `nbytes`: bytes of the messages of
    each micro-batch with messages.
    """
    if records:
        iteration, begun_s = records[0].iteration, min(record.start_s for record in records)
    else:
        assert idle is not None, "a rank without records says of which iteration"
        iteration, begun_s = idle
    sent, received = times
    if ready_s is not None:
        leave_s = [max(entry.posted_s, ready_s[entry.key]) for entry in sent]
        sent = [entry._replace(posted_s=at_s, done_s=at_s) for entry, at_s in zip(sent, leave_s, strict=True)]
    return StageMeasurement(
        pipeline=pipeline,
        stage=stage,
        iteration=iteration,
        micro_batches=micro_batches,
        actions=ActionColumns.of(records),
        sends=MeasuredColumns.of(sent, begun_s),
        receives=MeasuredColumns.of(received, begun_s),
        begun_s=begun_s,
        memory=memory,
        clock_offset_s=clock_offset_s,
        probes=tuple(probes),
        broken=tuple(broken),
        disturbance=disturbance,
        nbytes=nbytes or {},
        work=work,
        switch_s=switch_s,
    )


_DECODED: Decoder[StageMeasurement] = Decoder(StageMeasurement, MAX_REPORT_NBYTES)


def measurement_of(packet: bytes) -> StageMeasurement:
    """Decode a measurement. Raises ValueError if it is malformed."""
    found = _DECODED(packet)
    # Computed now, so that malformed columns raise here and not in a decider.
    _ = found.span_s, found.durations_s, found.combined_s, found.sizes, found.sent, found.received  # which raise it
    return found


def mean_idle_share(measurements: Sequence[StageMeasurement]) -> float:
    """Return the fraction of its pipeline's iteration, 0..1, in which a rank did not compute: the mean of all."""
    spans_s = _spans_s(measurements)
    return statistics.fmean(
        1.0 - measurement.computed_s / spans_s[measurement.pipeline] for measurement in measurements
    )


def iteration_s(measurements: Sequence[StageMeasurement]) -> float:
    """Return the seconds from the first action to the last one, in the slowest pipeline; never 0."""
    return max(_spans_s(measurements).values())


def _spans_s(measurements: Sequence[StageMeasurement]) -> dict[int, float]:
    """Return the seconds of an iteration by pipeline; each pipeline has a clock of its own."""
    of_pipeline: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for measurement in measurements:
        of_pipeline[measurement.pipeline].append(measurement.span_s)
    return {
        pipeline: max(1e-6, max(end_s for _, end_s in spans_s) - min(start_s for start_s, _ in spans_s))
        for pipeline, spans_s in of_pipeline.items()
    }


def message_order(messages: Messages) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the sort keys of messages: by peer and path (2 * peer, plus 1 for the host path), then by message key."""
    groups = messages["peer"].astype(np.int64) << 1 | messages["host"]
    chunk, gradient = messages["chunk"].astype(np.int64), messages["gradient"]
    return groups, messages["micro_batch"].astype(np.int64) << 17 | chunk << 1 | gradient
