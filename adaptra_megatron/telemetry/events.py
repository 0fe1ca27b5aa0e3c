# SPDX-License-Identifier: Apache-2.0
"""Define the events of a run, one class per kind, and their encoding as lines of JSON.

A line is one flat object: the stamp (`run`, `rank`, `sequence`, `iteration`, `wall_s`, `monotonic_s`), `event` with
the kind's name, and the kind's own fields. Names of kinds and fields are an interface: add, never rename.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import UnionType
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

from adaptra_megatron.common.reasons import Reason, is_reason, reason_text

FORMAT_VERSION = 1


class EventError(ValueError):
    """A line that is no event of this format. Says what is wrong."""


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """Place and time of an event."""

    run: str
    """Name of this start of the job, the same on all ranks."""
    rank: int
    sequence: int
    """Number of the event among those of this rank in this run, from 0."""
    iteration: int
    """The current training iteration, counted from the start of this process; -1 before the first."""
    wall_s: float
    """Seconds since the epoch, by the rank's own host."""
    monotonic_s: float
    """Seconds on the job's common clock, as in traces."""


@dataclass(frozen=True, kw_only=True)
class RunStarted:
    """The run started. First event of every file, also of a file that continues one."""

    name: ClassVar[str] = "run_started"
    layout: Mapping[str, int]
    """Sizes, such as stages, chunks, world_size; and the rank's replica, if replicas have plans of their own."""
    versions: Mapping[str, str]
    """By package."""
    config: Mapping[str, Any]
    """The --adaptra settings."""
    host: str = ""
    version: int = FORMAT_VERSION


@dataclass(frozen=True, kw_only=True)
class RunEnded:
    """The rank ended in an orderly way. Missing if it was killed."""

    name: ClassVar[str] = "run_ended"
    reason: str


@dataclass(frozen=True, kw_only=True)
class LinkDetection:
    """The detector finds that the state of a directed link, or its level, has changed."""

    name: ClassVar[str] = "link"
    source: int
    target: int
    before: str
    """"healthy", "slow" or "dead"."""
    after: str
    reason: str
    reason_parts: Reason = ()
    """The reason in parts: iterations are numbers, and the evidence is nested. Other events have the same field."""
    latency_s: float | None = None
    """Estimated latency and bandwidth, if known."""
    bandwidth_bytes_s: float | None = None
    path: str | None = None
    """"device" or "host", if known."""
    pipeline: int | None = None
    """First global rank of the pipeline."""
    since_iteration: int | None = None
    """First iteration that showed the change, if known."""
    replica: int | None = None
    """Replica of the pipeline."""
    lane: int | None = None
    """Index of the pipeline within its replica."""
    source_rank: int | None = None
    """Global rank of the sender. This and the following fields are set if the job's layout is known."""
    target_rank: int | None = None
    source_host: str = ""
    target_host: str = ""
    source_rnics: Sequence[str] = ()
    """RDMA devices that the sender's host path uses, or would use."""
    target_rnics: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class StageDetection:
    """The detector finds that a stage computes at another speed."""

    name: ClassVar[str] = "stage"
    stage: int
    before: str
    after: str
    reason: str
    reason_parts: Reason = ()
    slow_down: float | None = None
    """Seconds of an action now relative to those when healthy."""
    pipeline: int | None = None
    """First global rank of the pipeline."""
    since_iteration: int | None = None
    """First iteration that showed the change, if known."""
    replica: int | None = None
    """Replica of the pipeline."""
    stage_rank: int | None = None
    """Global rank, if the job's layout is known."""
    host: str = ""


@dataclass(frozen=True, kw_only=True)
class StragglerDetection:
    """A data-parallel replica comes last to gradient synchronisation from now on, or no longer does; or a cause of
    that has been found. Logged by the job's lowest rank."""

    name: ClassVar[str] = "straggler"
    replica: int
    before: str
    """"healthy" or "late"."""
    after: str
    reason: str
    """Seconds, frequency, cost and causes, as text."""
    remedy: str = ""
    """What to do, as text."""
    stage: int | None = None
    """The stage that the others wait for, if known."""
    first_rank: int | None = None
    """First rank of that stage's cell."""
    host: str | None = None
    lag_s: float | None = None
    """Median seconds that it comes after most others."""
    last: int | None = None
    """Number of the latest `of` iterations in which it came last."""
    of: int | None = None
    share: float | None = None
    """Share of an iteration, 0..1, that would be saved if it came with the others."""
    causes: Sequence[str] = ()
    """Kinds, the likeliest first: data, cpu, cpu_stolen, cpu_limit, cpu_queue, network, memory, gpu, compute."""
    since_iteration: int | None = None
    """Iteration from which on it is nearly always late."""

    def describe(self) -> str:
        """Name the replica and the cell that the others wait for, such as "replica 5 (stage 2, rank 21 on node7)"."""
        place = "" if self.first_rank is None else f" (stage {self.stage}, rank {self.first_rank} on {self.host})"
        return f"replica {self.replica}{place}"


@dataclass(frozen=True, kw_only=True)
class ArrivalsSeen:
    """Recent arrivals of all cells at gradient synchronisation. Logged with each finding, and periodically."""

    name: ClassVar[str] = "arrivals"
    until: int
    """The latest of these iterations."""
    iterations: int
    lags_s: Sequence[Sequence[float]]
    """By stage and replica: median seconds that it came after most others; negative if it came before them."""
    last: Sequence[Sequence[int]]
    """By stage and replica: number of these iterations in which it came last."""


@dataclass(frozen=True, kw_only=True)
class PlanMade:
    """The leader has computed a plan. If it is not worth a switch, `number` is that of the current plan."""

    name: ClassVar[str] = "plan"
    number: int
    adopted: bool
    reason: str
    """Why a plan was computed."""
    reason_parts: Reason = ()
    memory: str = ""
    """The part of the reason that concerns memory."""
    findings: int = 0
    """Number of the detector's findings behind it."""
    predicted_s: float
    current_predicted_s: float | None
    """Predicted seconds of an iteration in the current order, at the same costs; None if unknown."""
    lower_bound_s: float | None = None
    planning_s: float | None = None
    costs: Mapping[str, Any] = field(default_factory=dict)
    """Costs in the format of COSTS.json, which `adaptra plan` and `adaptra simulate` read."""


@dataclass(frozen=True, kw_only=True)
class MemoryWanted:
    """Memory limits the plan: with more memory, a faster plan would be possible. Logged once per plan."""

    name: ClassVar[str] = "memory"
    held: float
    """Activations that a stage may hold: the largest cap."""
    predicted_s: float
    """Predicted seconds of an iteration within the caps."""
    caps: Mapping[str, float]
    """Seconds of an iteration by number of activations that every stage might hold. A number that saves less than the
    memory for it is worth is left out."""
    source: int | None = None
    """The link whose time cannot be hidden; null if no link is the cause."""
    target: int | None = None


@dataclass(frozen=True, kw_only=True)
class PolicyChanged:
    """A user has asked the running job for another policy. Takes effect with plan `number`."""

    name: ClassVar[str] = "policy"
    number: int
    before: str
    """"adapt", "observe" or "off"."""
    after: str


@dataclass(frozen=True, kw_only=True)
class PathChosen:
    """The leader has chosen another path for a directed link. Takes effect with plan `number`."""

    name: ClassVar[str] = "path_choice"
    number: int
    source: int
    target: int
    before: str
    """"device" or "host"."""
    after: str
    reason: str
    reason_parts: Reason = ()
    pipeline: int | None = None
    """First global rank of the pipeline."""
    message_s: Mapping[str, Any] = field(default_factory=dict)
    """By path: predicted seconds that a message costs the pipeline; null on a dead path."""
    gain_s: float | None = None
    """Predicted seconds saved per message; None if one of the paths is dead."""


@dataclass(frozen=True, kw_only=True)
class RoutesChosen:
    """The leader has chosen other routes of micro-batches between replicas. Takes effect with plan `number`. Without
    `moved`, each micro-batch stays in its replica."""

    name: ClassVar[str] = "routes"
    number: int
    reason: str
    reason_parts: Reason = ()
    predicted_s: float | None = None
    current_predicted_s: float | None = None
    """Predicted seconds of an iteration with the present routes."""
    lower_bound_s: float | None = None
    slow: Mapping[str, float] = field(default_factory=dict)
    """Straggling cells ("replica.stage"), each with its time relative to the fastest cell of its stage."""
    speeds: Mapping[str, float] = field(default_factory=dict)
    """By cell: speed relative to the fastest cell of its stage."""
    micro_batches: int | None = None
    """Micro-batches of each replica in an iteration."""
    moved: Sequence[Sequence[int]] = ()
    """Lists of stage, replica of the micro-batches, replica that computes them, number of them in an iteration."""


@dataclass(frozen=True, kw_only=True)
class PlanSwitched:
    """From this iteration on another plan runs."""

    name: ClassVar[str] = "switch"
    number: int
    before: int
    """The plan before; 0 is stock's order."""
    predicted_s: float | None = None
    before_predicted_s: float | None = None
    before_measured_s: float | None = None
    """Median seconds of the iterations just before."""


@dataclass(frozen=True, kw_only=True)
class SwitchMeasured:
    """Measured gain of a switch, logged some iterations after it."""

    name: ClassVar[str] = "gain"
    number: int
    before_measured_s: float
    after_measured_s: float
    iterations: int
    """Number of iterations behind the median."""


@dataclass(frozen=True, kw_only=True)
class IterationsTimed:
    """Durations of consecutive training iterations, logged by the leader for all iterations, traced or not."""

    name: ClassVar[str] = "times"
    first: int
    """Number of the first iteration."""
    seconds: Sequence[float]
    step: int | None = None
    """Megatron's number of the first iteration, from 1 and continued after restarts; the others follow without a
    gap."""


@dataclass(frozen=True, kw_only=True)
class PathChanged:
    """From now on a stage's messages over a link take another path."""

    name: ClassVar[str] = "path"
    source: int
    target: int
    before: str
    after: str
    cause: str
    failover: bool
    """Whether the old path failed. If not, a plan decided it, or the preferred path has recovered."""


@dataclass(frozen=True, kw_only=True)
class RanksLost:
    """Ranks have failed, and training continues without them. Logged by the lowest live rank."""

    name: ClassVar[str] = "lost"
    epoch: int
    """Number of the new generation."""
    ranks: Mapping[str, str]
    """By failed rank, as text: how it ended."""
    dead_cells: Sequence[str] = ()
    """All dead cells so far, as "replica.stage"."""
    live: int
    """Number of live ranks."""
    seconds: float
    """Seconds from the detection of the failure until the interrupted iteration was run again."""
    moved: Sequence[Sequence[int]] = ()
    """Moves of the new routes, as in `RoutesChosen`; empty if no training iteration was planned after the failure."""


@dataclass(frozen=True, kw_only=True)
class RanksReturned:
    """Failed ranks were restarted and have rejoined. Logged by the lowest live rank."""

    name: ClassVar[str] = "returned"
    epoch: int
    """Number of the new generation."""
    ranks: Sequence[str]
    """The ranks, as text."""
    dead_cells: Sequence[str] = ()
    """Cells that are still dead, as "replica.stage"."""
    live: int
    """Number of live ranks."""
    seconds: float
    """Seconds that the other ranks waited."""
    moved: Sequence[Sequence[int]] = ()
    """As in `RanksLost`."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A part of this package failed."""

    name: ClassVar[str] = "fault"
    what: str
    """Such as "delegate restarted" or "both paths dead"."""
    detail: str = ""
    stage: int | None = None
    peer: int | None = None


Event = (
    RunStarted
    | RunEnded
    | LinkDetection
    | StageDetection
    | StragglerDetection
    | ArrivalsSeen
    | PlanMade
    | MemoryWanted
    | PolicyChanged
    | PathChosen
    | RoutesChosen
    | PlanSwitched
    | SwitchMeasured
    | IterationsTimed
    | PathChanged
    | RanksLost
    | RanksReturned
    | Fault
)
_KINDS: dict[str, type[Event]] = {kind.name: kind for kind in get_args(Event)}


@dataclass(frozen=True, kw_only=True)
class StampedEvent:
    """An event with its place and time."""

    stamp: Stamp
    event: Event


def encode(stamped: StampedEvent) -> str:
    """Encode an event as one line of JSON, without line end. Infinite and undefined numbers become null: JSON has
    none.

    Raises TypeError or ValueError for a value that JSON cannot hold.
    """
    document = {**_fields_of(stamped.stamp), "event": stamped.event.name, **_fields_of(stamped.event)}
    return json.dumps(_finite(document), separators=(",", ":"), allow_nan=False)


def decode(line: str) -> StampedEvent:
    """Decode a line of `encode`. Unknown fields are ignored. Raises EventError."""
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise EventError(f"no JSON: {error}") from error
    if not isinstance(document, dict):
        raise EventError("no JSON object")
    kind = _KINDS.get(document.get("event", ""))
    if kind is None:
        raise EventError(f"event {document.get('event')!r} is none of {', '.join(_KINDS)}")
    if kind is RunStarted and document.get("version") != FORMAT_VERSION:
        raise EventError(f"event log of version {document.get('version')!r}; this package reads {FORMAT_VERSION}")
    return StampedEvent(stamp=_build(Stamp, document), event=_build(kind, document))


def short_reason(event: LinkDetection | StageDetection | PlanMade) -> str:
    """Return the reason without its evidence, which the event log has."""
    return reason_text(event.reason_parts or event.reason, 0)


def _fields_of(entry: Any) -> dict[str, Any]:
    return {part.name: getattr(entry, part.name) for part in fields(entry)}


def _build(kind: type[Any], document: Mapping[str, Any]) -> Any:
    """Return a `kind` from the fields of `document` that it knows. Raises EventError."""
    hints = {name: hint for name, hint in get_type_hints(kind).items() if get_origin(hint) is not ClassVar}
    known = {name: document[name] for name in hints if name in document}
    for name, value in known.items():
        if value is None and hints[name] is float:
            known[name] = math.nan  # what `encode` made of a number that is none
        elif not (is_reason(value) if name == "reason_parts" else _fits(value, hints[name])):
            raise EventError(f"{name} of event {document['event']!r} is {value!r}")
        elif value == []:
            known[name] = ()  # as an event has it where it is not given
    try:
        return kind(**known)
    except TypeError as error:
        raise EventError(f"a field of event {document['event']!r} is missing: {error}") from error


def _fits(value: Any, hint: Any) -> bool:
    options = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    plain = tuple(get_origin(option) or option for option in options)
    if isinstance(value, bool):
        return bool in plain
    return isinstance(value, plain) or (float in plain and isinstance(value, int))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return value
