# SPDX-License-Identifier: Apache-2.0
"""Define decisions: what all ranks run in one iteration, in sections that are decided separately, and when it begins.

Contract of decisions, for all ranks that one leader decides for:

1. *Making.* The planner process makes a decision from measurements of all ranks, and encodes it once. It sends these
   bytes to the leader alone, in its answer.
2. *Sealing.* The leader's `DecisionWriter` seals decisions, one per iteration, in ascending order, each iteration once.
   Nothing else gives a decision its iteration.
3. *Taking effect.* A measurement of iteration k leads to the decision of k + DELAY. If that is sealed already, the
   decision takes effect in the first iteration that is not. Late decisions are merged, section by section (`then`).
4. *Without a new decision.* When the leader's training begins an iteration that is not sealed, the writer seals what
   stays in force (`kept`). No training waits for a planner.
5. *Spreading.* The leader names a sealed decision, and the planner process sends the bytes that it has made to all
   other ranks, once. The leader sends bytes only of what it has made itself (rules 3 and 4). It writes the same bytes
   to the job's store, for ranks without a connection. So each process encodes or decodes a decision once. Routes are
   sent once the orders of all cells are in the store.
6. *Reading.* No rank begins an iteration before it has that iteration's decision.
7. *The planner process fails or hangs*: what it has not answered is lost, and what is in force stays. Another process
   starts from there. What is sealed spreads by the job's store.
8. *The leader fails*: a rank that waits raises ExchangeError within its timeout. A decision that only some ranks have
   read is not run: an iteration needs all of them. Live ranks agree anew (elastic), or the job ends. If the order is
   fixed (a given plan, stock's order), training goes on by it instead.
9. *Another rank fails*: it is not waited for; an iteration without its measurement makes no decision.

Why: two writers could seal different decisions of one iteration, and ranks that run different orders deadlock. So the
one that seals is in the process that knows when an iteration begins; a planner process that hangs or dies between
making and sealing then costs a plan, and no agreement. Content goes around the leader's encoder because that runs in a
training process.

To add a decider: a class that implements `Decider`, and a field of `Decision` whose type is a `Section`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from adaptra_megatron.common.typed_messages import Decoder, encoded
from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.schedule.ir import Schedule
from adaptra_megatron.schedule.native import CODES_PER_CHUNK, decode_orders, encode_schedule
from adaptra_megatron.telemetry.action_records import Iterations
from adaptra_megatron.telemetry.scalars import JobFigures

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has none in Python 3.10

DELAY = 2
"""Iterations from a measurement to the first iteration that its decision can change."""
MAX_DECISION_NBYTES, MOST_FIGURES_NBYTES = 1 << 26, 1 << 22
"""Limits of an encoded decision, and of the figures in it."""


class LinkName(NamedTuple):
    """A directed link of one of the job's parallel pipelines."""

    pipeline: int
    """Global rank of the pipeline's first stage."""
    source: int
    """Rank within the pipeline."""
    target: int

    def __str__(self) -> str:
        return f"link {self.source}->{self.target} of pipeline {self.pipeline}"


class Section:
    """The part of a decision that one decider makes. By default it takes effect once, in its iteration."""

    def kept(self) -> Self | None:
        """Return the section that stays in force after this iteration; None if there is none."""
        return None

    def then(self, later: Self) -> Self:
        """Merge this section, which has not taken effect yet, with a later one."""
        return later


@dataclass(frozen=True)
class Order(Section):
    """A new order of actions.

    Raises ValueError at construction for actions that the costs do not have; rules of schedules are checked where it
    is installed.
    """

    # Numbers, not text: a decision travels to every rank, and a text would be parsed on each.
    codes: tuple[tuple[int, ...], ...]
    """By stage: the actions as numbers, see `schedule.native`."""
    costs: Costs
    """The costs it was planned for, with the caps that it keeps. All ranks post their receives by them."""

    def __post_init__(self) -> None:
        # Every rank decodes it here: an invalid order is an error on all of them, not a deadlock of those that run it.
        costs = self.costs
        limit = CODES_PER_CHUNK * costs.micro_batches * costs.chunks
        known = all(0 <= min(row, default=0) <= max(row, default=0) < limit for row in self.codes)
        if len(self.codes) != costs.stages or not known:
            raise ValueError(
                f"an order of {len(self.codes)} stages, with actions that are not all below {limit}, is none for costs "
                f"of {costs.stages} stages, {costs.micro_batches} micro-batches and {costs.chunks} chunks"
            )

    @classmethod
    def of(cls, schedule: Schedule, costs: Costs) -> Order:
        """Encode `schedule`, which was planned for `costs`."""
        return cls(tuple(map(tuple, encode_schedule(schedule))), costs)

    def schedule(self) -> Schedule:
        """Decode the schedule."""
        return decode_orders(self.codes, self.costs)


@dataclass(frozen=True)
class Forecast(Section):
    """Predicted seconds of an iteration, under the new plan and, at the same costs, under the plan before."""

    predicted_s: float
    before_predicted_s: float | None
    """None if it is not known."""

    def then(self, later: Forecast) -> Forecast:
        """Return a forecast from the plan before this one to the later plan."""
        before_s = later.before_predicted_s if self.before_predicted_s is None else self.before_predicted_s
        return Forecast(later.predicted_s, before_s)


@dataclass(frozen=True)
class Paths(Section):
    """The path of every link."""

    diverted: tuple[LinkName, ...] = ()
    """All links that do not take the preferred path."""
    probed: tuple[LinkName, ...] = ()
    """Links whose idle path is measured in this iteration."""

    def kept(self) -> Paths:
        """Return the same diverted links, without probes."""
        return Paths(self.diverted)


class Moved(NamedTuple):
    """Number of micro-batches that another replica's cell computes, at one stage."""

    stage: int
    source: int
    """Replica that the micro-batches belong to."""
    target: int
    micro_batches: int
    """Number of micro-batches in each iteration."""


@dataclass(frozen=True)
class RoutingSection(Section):
    """Routes of micro-batches between replicas."""

    number: int
    """Number of these routes, ascending. 0: nothing is routed, each replica runs the plan's order."""
    micro_batches: int
    """Micro-batches of each replica, in the iterations that the routes are made for."""
    moved: tuple[Moved, ...] = ()
    orders: Mapping[str, str] = field(default_factory=dict)
    """Packed `CellOrder` by cell ("replica.stage"). Each order is sent only to the ranks of its cell."""
    slowness: tuple[float, ...] = ()
    """Time of each replica relative to the fastest one, if nothing is routed; empty if all are equally fast."""


_figures_of: Decoder[JobFigures] = Decoder(JobFigures, MOST_FIGURES_NBYTES)


@dataclass(frozen=True)
class PackedFigures:
    """Encoded figures of the job: every rank receives them in every iteration, but few decode them."""

    content: bytes

    @classmethod
    def of(cls, figures: JobFigures) -> PackedFigures:
        """Encode `figures`."""
        return cls(encoded(figures))

    def unpacked(self) -> JobFigures:
        """Decode the figures. Raises ValueError if they are malformed."""
        return _figures_of(self.content)


@dataclass(frozen=True)
class TelemetrySection(Section):
    """Trace requests and figures, sent with a decision."""

    requests: tuple[Iterations, ...] = ()
    """Iterations that every rank is asked to trace, new since the decision before."""
    job: PackedFigures | None = None
    """Figures of the job, for the rank that exports them."""
    policy: str = ""
    """Policy from this iteration on: "adapt", "observe" or "off"; empty: unchanged."""

    def then(self, later: TelemetrySection) -> TelemetrySection:
        """Return this section merged with a `later` one: requests of both, figures and policy of the later."""
        return TelemetrySection(self.requests + later.requests, later.job, later.policy or self.policy)


@dataclass(frozen=True)
class Decision:
    """Everything that an iteration runs: the number of its plan, and the sections that are new."""

    number: int
    """Number of the plan (an order of actions and a path for every link)."""
    order: Order | None = None
    forecast: Forecast | None = None
    paths: Paths | None = None
    routing: RoutingSection | None = None
    telemetry: TelemetrySection | None = None

    def kept(self) -> Decision:
        """Return the decision that stays in force if none is made after this one."""
        return Decision(
            self.number, **{name: None if part is None else part.kept() for name, part in self._sections().items()}
        )

    def then(self, later: Decision) -> Decision:
        """Return this decision merged with a later one, section by section."""
        merged = {}
        for name, part in later._sections().items():
            before = getattr(self, name)
            merged[name] = part if before is None else before if part is None else before.then(part)
        return Decision(later.number, **merged)

    def without_orders(self) -> Decision:
        """Return the decision without the orders of routes, as ranks get it."""
        return self if self.routing is None else replace(self, routing=replace(self.routing, orders={}))

    def _sections(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)[1:]}


decision_of: Decoder[Decision] = Decoder(Decision, MAX_DECISION_NBYTES)
"""Decode a decision. Raises ValueError if it is malformed."""


class MadeDecision(NamedTuple):
    """A decision of the planner process, and its bytes, which go to all ranks."""

    until: int
    """The latest iteration that it was made from."""
    decision: Decision
    packet: bytes
    """The encoded decision, without the orders of routes: each rank reads its own cell's in the store."""


class DecisionWriter:
    """Seals one decision per iteration, for the planner or for the training thread that needs it now (rules 2 to 4).

    `needed(k)` always comes before `decided(k, ...)`: an iteration has to run before it is measured. Thread-safe.
    """

    def __init__(self, write: Callable[[int, Decision, bytes | None], None], first: int = 0) -> None:
        """`write(iteration, decision, packet)` spreads once per iteration, in ascending order; it may raise
        RuntimeError. `packet`: None if the decision was made here. `first`: the first measured iteration."""
        self._write = write
        self._lock = threading.Lock()
        self._next = first + DELAY
        """The first iteration without a written decision."""
        self._latest = Decision(0)
        self._waiting: tuple[Decision, bytes | None] | None = None
        """The decision that is not sealed yet, and its bytes if the planner process has made it as it is."""
        self._recent: dict[int, Decision] = {}

    @property
    def in_force(self) -> Decision:
        """Return the decision that stays in force if no new one is made."""
        with self._lock:
            return (self._latest if self._waiting is None else self._waiting[0]).kept()

    def decided(self, iteration: int, decision: Decision, packet: bytes | None = None) -> None:
        """Take in `decision`, made from all measurements up to `iteration`. `packet`: its bytes; None if it was not
        made by the planner process."""
        with self._lock:
            # The packet holds one decision as it was made: merged with another, it would have to be encoded anew.
            self._waiting = (decision, packet) if self._waiting is None else (self._waiting[0].then(decision), None)
            while self._next <= iteration + DELAY:
                self._write_next()

    def needed(self, iteration: int) -> Decision:
        """Return the decision of `iteration`, which the training is about to run; without one, the latest stays."""
        with self._lock:
            while self._next <= iteration:
                self._write_next()
            return self._recent[iteration]

    def published(self, iteration: int) -> Decision | None:
        """Return the decision of a recent iteration; None if it is not made yet, or no longer kept."""
        with self._lock:
            return self._recent.get(iteration)

    def _write_next(self) -> None:
        # Only what stays in force: a forecast or a probe is for one iteration.
        decision, packet = (self._latest.kept(), None) if self._waiting is None else self._waiting
        self._write(self._next, decision, packet)
        self._waiting, self._latest = None, decision
        self._recent[self._next] = decision
        # The training thread is at most DELAY iterations behind the last written one, and may still read those.
        self._recent.pop(self._next - 2 * DELAY, None)
        self._next += 1
