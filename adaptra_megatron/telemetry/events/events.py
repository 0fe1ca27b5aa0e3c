# SPDX-License-Identifier: Apache-2.0
"""Define the events of a run, one class for each kind, and the JSON line that says so.

A line is one flat object: the stamp (`run`, `rank`, `sequence`, `iteration`, `wall_s`, `monotonic_s`), `event` with the
kind's name, and the kind's own fields. Names of kinds and fields are an interface: add, never rename.
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
    """A line that is no event of this format; the message says what is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """Place and time of an event."""

    run: str
    """Same on all ranks of one start of the job, new each time."""
    rank: int
    sequence: int
    """Counts the events of this rank in this run, from 0."""
    iteration: int
    """The training iteration that ran, counted from the start of this process; -1 before the first."""
    wall_s: float
    """Seconds since the epoch, by the rank's own host."""
    monotonic_s: float
    """Seconds on the job's common clock, as in traces."""


@dataclass(frozen=True, kw_only=True)
class RunStarted:
    """First in every file, and again at the head of a file that continues one."""

    name: ClassVar[str] = "run_started"
    layout: Mapping[str, int]
    """Sizes, such as stages, chunks, world_size; and the replica that the rank belongs to, with plans of its own."""
    versions: Mapping[str, str]
    """By package."""
    config: Mapping[str, Any]
    """The --adaptra settings."""
    host: str = ""
    version: int = FORMAT_VERSION


@dataclass(frozen=True, kw_only=True)
class RunEnded:
    """The rank closed the pipeline in an orderly way; a run that was killed has none."""

    name: ClassVar[str] = "run_ended"
    reason: str


@dataclass(frozen=True, kw_only=True)
class LinkDetection:
    """The detector finds a directed link in another state."""

    name: ClassVar[str] = "link"
    source: int
    target: int
    before: str
    """"healthy", "slow" or "dead"."""
    after: str
    reason: str
    reason_parts: Reason = ()
    """The same with iterations as numbers, and the evidence nested; as in the other events with a reason."""
    latency_s: float | None = None
    """Estimates behind it, where there are any."""
    bandwidth_bytes_s: float | None = None
    path: str | None = None
    """"device" or "host", where it is known which one is meant."""
    pipeline: int | None = None
    """Which of the job's parallel pipelines, by its first global rank."""
    since_iteration: int | None = None
    """The first iteration that showed the change, where that is known."""
    replica: int | None = None
    """The pipeline's."""
    lane: int | None = None
    """Index of the pipeline among those of its replica."""
    source_rank: int | None = None
    """Global rank of the sender, as the others below where the job's layout is known."""
    target_rank: int | None = None
    source_host: str = ""
    target_host: str = ""
    source_rnics: Sequence[str] = ()
    """RDMA devices that the sender's host path takes, or would."""
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
    """Compute time now over compute time when healthy."""
    pipeline: int | None = None
    """Which of the job's parallel pipelines, by its first global rank."""
    since_iteration: int | None = None
    """The first iteration that showed the change, where that is known."""
    replica: int | None = None
    """The pipeline's."""
    stage_rank: int | None = None
    """Global rank, where the job's layout is known."""
    host: str = ""


@dataclass(frozen=True, kw_only=True)
class StragglerDetection:
    """A data-parallel replica comes last to gradient synchronisation from now on, or does not any more; or a cause of
    that has been found. Logged by the job's lowest rank."""

    name: ClassVar[str] = "straggler"
    replica: int
    before: str
    """"healthy" or "late"."""
    after: str
    reason: str
    """By how much, how often, what it costs, and why."""
    remedy: str = ""
    """What to do."""
    stage: int | None = None
    """The stage that the others wait for, as far as it is known."""
    first_rank: int | None = None
    """That of the stage."""
    host: str | None = None
    lag_s: float | None = None
    """By which it comes after most others, the median."""
    last: int | None = None
    """In how many of the latest `of` iterations it was the last one."""
    of: int | None = None
    share: float | None = None
    """Part of an iteration, 0..1, that would be saved if it came with the others."""
    causes: Sequence[str] = ()
    """Kinds, the likeliest first: data, cpu, cpu_stolen, cpu_limit, cpu_queue, network, memory, gpu, compute."""
    since_iteration: int | None = None
    """Iteration since which it is late nearly always."""

    def describe(self) -> str:
        """The replica and whom the others wait for, such as "replica 5 (stage 2, rank 21 on node7)"."""
        place = "" if self.first_rank is None else f" (stage {self.stage}, rank {self.first_rank} on {self.host})"
        return f"replica {self.replica}{place}"


@dataclass(frozen=True, kw_only=True)
class ArrivalsSeen:
    """Recent arrivals of all cells at gradient synchronisation; at each finding, and now and then."""

    name: ClassVar[str] = "arrivals"
    until: int
    """The latest of the iterations that this is about."""
    iterations: int
    lags_s: Sequence[Sequence[float]]
    """By stage and replica: by how much it came after most others, the median; negative where it came before them."""
    last: Sequence[Sequence[int]]
    """By stage and replica: in how many of these iterations it was the last one."""


@dataclass(frozen=True, kw_only=True)
class PlanMade:
    """The leader has computed a plan. `number` stays the running one's where it was not worth a switch."""

    name: ClassVar[str] = "plan"
    number: int
    adopted: bool
    reason: str
    """Why one was computed."""
    reason_parts: Reason = ()
    memory: str = ""
    """What of it is about the memory that orders take."""
    findings: int = 0
    """Number of the detector's findings that it answers."""
    predicted_s: float
    current_predicted_s: float | None
    """Seconds of an iteration in the running order, at the same costs; None if unknown."""
    lower_bound_s: float | None = None
    planning_s: float | None = None
    costs: Mapping[str, Any] = field(default_factory=dict)
    """Costs in the format of COSTS.json, which `adaptra plan` and `adaptra simulate` read."""


@dataclass(frozen=True, kw_only=True)
class MemoryWanted:
    """The plan is as fast as memory allows; with more of it a faster one would do. Logged once per plan."""

    name: ClassVar[str] = "memory"
    held: float
    """Activations that a stage may hold, of the one that may hold most."""
    predicted_s: float
    """Seconds of an iteration within these."""
    caps: Mapping[str, float]
    """By number of activations: seconds of an iteration if every stage might hold so many, each worth its memory."""
    source: int | None = None
    """The link that cannot be hidden; null where it is no link that costs the time."""
    target: int | None = None


@dataclass(frozen=True, kw_only=True)
class PolicyChanged:
    """A user has asked the running job for another policy, as a part of plan `number`."""

    name: ClassVar[str] = "policy"
    number: int
    before: str
    """"adapt", "observe" or "off"."""
    after: str


@dataclass(frozen=True, kw_only=True)
class PathChosen:
    """The leader has decided that a directed link is to take another path, as a part of plan `number`."""

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
    """Which of the job's parallel pipelines, by its first global rank."""
    message_s: Mapping[str, Any] = field(default_factory=dict)
    """By path: predicted seconds that a message costs the pipeline; null on a dead path."""
    gain_s: float | None = None
    """Predicted, per message; None where one of the paths is dead."""


@dataclass(frozen=True, kw_only=True)
class RoutesChosen:
    """The leader has decided that micro-batches are to take other routes between replicas, as a part of plan `number`.
    Without `moved`, each stays in its replica."""

    name: ClassVar[str] = "routes"
    number: int
    reason: str
    reason_parts: Reason = ()
    predicted_s: float | None = None
    current_predicted_s: float | None = None
    """What the present routes would take."""
    lower_bound_s: float | None = None
    slow: Mapping[str, float] = field(default_factory=dict)
    """Cells ("replica.stage") that straggle, and how many times as long they take as the fastest of their stage."""
    speeds: Mapping[str, float] = field(default_factory=dict)
    """By cell: its speed as a share of that of the fastest of its stage."""
    micro_batches: int | None = None
    """Number of micro-batches of each replica in an iteration."""
    moved: Sequence[Sequence[int]] = ()
    """Stage, replica of the micro-batches, replica of the cell that computes them, and how many in an iteration."""


@dataclass(frozen=True, kw_only=True)
class PlanSwitched:
    """From this iteration on another plan runs."""

    name: ClassVar[str] = "switch"
    number: int
    before: int
    """The plan it replaces; 0 is stock's order."""
    predicted_s: float | None = None
    before_predicted_s: float | None = None
    before_measured_s: float | None = None
    """Median of the iterations just before."""


@dataclass(frozen=True, kw_only=True)
class SwitchMeasured:
    """Measured gain of a switch, said some iterations after it."""

    name: ClassVar[str] = "gain"
    number: int
    before_measured_s: float
    after_measured_s: float
    iterations: int
    """The median is over so many."""


@dataclass(frozen=True, kw_only=True)
class IterationsTimed:
    """Durations of training iterations in a row, by the leading rank: of all of them, also where none is traced."""

    name: ClassVar[str] = "times"
    first: int
    """Iteration of the first one."""
    seconds: Sequence[float]
    step: int | None = None
    """Megatron's number of the first one, from 1 and over restarts; the others follow without a gap."""


@dataclass(frozen=True, kw_only=True)
class PathChanged:
    """Messages of a stage over a link go another way from now on."""

    name: ClassVar[str] = "path"
    source: int
    target: int
    before: str
    after: str
    cause: str
    failover: bool
    """Because the old path failed; False: because the plan says so, or the preferred one is back."""


@dataclass(frozen=True, kw_only=True)
class RanksLost:
    """Ranks have failed, and training goes on without them. Logged by the lowest live rank."""

    name: ClassVar[str] = "lost"
    epoch: int
    """Number of the new generation."""
    ranks: Mapping[str, str]
    """Each rank that failed, in words, and how it ended."""
    dead_cells: Sequence[str] = ()
    """All so far, as "replica.stage"."""
    live: int
    """Number of ranks that go on."""
    seconds: float
    """From when the failure was detected until the interrupted iteration had been run again."""
    moved: Sequence[Sequence[int]] = ()
    """What the routes since then move, as in `RoutesChosen`; empty where no training iteration has been planned yet."""


@dataclass(frozen=True, kw_only=True)
class RanksReturned:
    """Ranks that had failed were started again and have rejoined. Logged by the lowest live rank."""

    name: ClassVar[str] = "returned"
    epoch: int
    """Number of the new generation."""
    ranks: Sequence[str]
    """In words."""
    dead_cells: Sequence[str] = ()
    """Cells that are still dead, as "replica.stage"."""
    live: int
    """Number of ranks that go on."""
    seconds: float
    """For how long the others waited."""
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
    """An event with where and when."""

    stamp: Stamp
    event: Event


def encode(stamped: StampedEvent) -> str:
    """One line of JSON, without its end. Infinite and undefined numbers become null: JSON has none.

    Raises TypeError or ValueError for a value that JSON cannot hold.
    """
    document = {**_fields_of(stamped.stamp), "event": stamped.event.name, **_fields_of(stamped.event)}
    return json.dumps(_finite(document), separators=(",", ":"), allow_nan=False)


def decode(line: str) -> StampedEvent:
    """Return what `encode` wrote. Fields that this version does not know are passed over. Raises EventError."""
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
    """A reason without the evidence behind it, which the event log has."""
    return reason_text(event.reason_parts or event.reason, 0)


def _fields_of(entry: Any) -> dict[str, Any]:
    return {part.name: getattr(entry, part.name) for part in fields(entry)}


def _build(kind: type[Any], document: Mapping[str, Any]) -> Any:
    """A `kind` from the fields of `document` that it knows. Raises EventError."""
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
