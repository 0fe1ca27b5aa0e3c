# SPDX-License-Identifier: Apache-2.0
"""Define what all ranks run: one decision per iteration, in sections that are decided apart.

A further decider is a class as `Decider` and a field of `Decision`, whose type is a `Section`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from adaptra_megatron.common.typed_messages import Decoder, encoded
from adaptra_megatron.telemetry.action_records import Iterations
from adaptra_megatron.telemetry.figures.scalars import JobFigures

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has none in Python 3.10

MAX_DECISION_NBYTES, MOST_FIGURES_NBYTES = 1 << 26, 1 << 22
"""Longest decision, and the figures in it."""


class LinkName(NamedTuple):
    """A directed link of one of the job's parallel pipelines."""

    pipeline: int
    """First global rank of the pipeline."""
    source: int
    """Pipeline rank."""
    target: int

    def __str__(self) -> str:
        return f"link {self.source}->{self.target} of pipeline {self.pipeline}"


class Section:
    """Part of a decision that concerns one decider. Unless it says otherwise, it is new and takes effect once."""

    def kept(self) -> Self | None:
        """Section in force after this if no new one comes."""
        return None

    def then(self, later: Self) -> Self:
        """Return this decision merged with a later one, which was made before this one came into force."""
        return later


@dataclass(frozen=True)
class Order(Section):
    """A new order of actions."""

    csv: str
    costs: str
    """What it was planned for, as the JSON text of `costs_to_json`: all ranks post receives by it."""
    caps: tuple[float | None, ...]
    """Activations that each stage may hold under it."""
    released_at_backward_input: tuple[float, ...]
    """The fraction of an activation that the caps count as free after an input gradient, by stage."""


@dataclass(frozen=True)
class Forecast(Section):
    """Seconds of an iteration under a new plan, and under what ran before at the same costs."""

    predicted_s: float
    before_predicted_s: float | None
    """None where it cannot be said."""

    def then(self, later: Forecast) -> Forecast:
        """From what still runs to what will."""
        before_s = later.before_predicted_s if self.before_predicted_s is None else self.before_predicted_s
        return Forecast(later.predicted_s, before_s)


@dataclass(frozen=True)
class Paths(Section):
    """A path for every link."""

    diverted: tuple[LinkName, ...] = ()
    """All links whose messages take the other path than the preferred one."""
    probed: tuple[LinkName, ...] = ()
    """Links whose other path is to be measured in this iteration."""

    def kept(self) -> Paths:
        """Links stay diverted."""
        return Paths(self.diverted)


class Moved(NamedTuple):
    """Micro-batches of one replica that another one's cell of a stage computes."""

    stage: int
    source: int
    """Replica that they belong to."""
    target: int
    micro_batches: int
    """How many, in each iteration."""


@dataclass(frozen=True)
class RoutingSection(Section):
    """Other routes of micro-batches between replicas."""

    number: int
    """Number of these routes, ascending; 0: every micro-batch stays in its replica, in the plan's order."""
    micro_batches: int
    """Number of micro-batches of each replica, in the iterations that the routes are for."""
    moved: tuple[Moved, ...] = ()
    orders: Mapping[str, str] = field(default_factory=dict)
    """Packed `CellOrder` of each cell ("replica.stage"). Each is sent by itself, to the ranks of its cell alone."""
    slowness: tuple[float, ...] = ()
    """Time of each replica over the fastest one's, where nothing is routed; empty: all are alike."""


_figures_of: Decoder[JobFigures] = Decoder(JobFigures, MOST_FIGURES_NBYTES)


@dataclass(frozen=True)
class PackedFigures:
    """Figures of the job, packed: all ranks get them in every iteration, and only few unpack them."""

    content: bytes

    @classmethod
    def of(cls, figures: JobFigures) -> PackedFigures:
        """Pack `figures`; `unpacked` gives them back."""
        return cls(encoded(figures))

    def unpacked(self) -> JobFigures:
        """Raises ValueError for what is none."""
        return _figures_of(self.content)


@dataclass(frozen=True)
class TelemetrySection(Section):
    """Section for telemetry."""

    requests: tuple[Iterations, ...] = ()
    """Which iterations every rank is to trace, new since the decision before."""
    job: PackedFigures | None = None
    """What the leader has found, for the rank that has somewhere to show it."""
    policy: str = ""
    """From this iteration on: "adapt", "observe" or "off"; empty: as before."""

    def then(self, later: TelemetrySection) -> TelemetrySection:
        """No request is lost."""
        return TelemetrySection(self.requests + later.requests, later.job, later.policy or self.policy)


@dataclass(frozen=True)
class Decision:
    """Everything that an iteration runs: plan `number`, and what is new about it."""

    number: int
    """Counts plans, which are an order of actions and a path for every link."""
    order: Order | None = None
    forecast: Forecast | None = None
    paths: Paths | None = None
    routing: RoutingSection | None = None
    told: TelemetrySection | None = None

    def kept(self) -> Decision:
        """Decision in force if there is none after this."""
        return Decision(
            self.number, **{name: None if part is None else part.kept() for name, part in self._sections().items()}
        )

    def then(self, later: Decision) -> Decision:
        """This and a later decision as one, section by section."""
        merged = {}
        for name, part in later._sections().items():
            before = getattr(self, name)
            merged[name] = part if before is None else before if part is None else before.then(part)
        return Decision(later.number, **merged)

    def _sections(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)[1:]}


decision_of: Decoder[Decision] = Decoder(Decision, MAX_DECISION_NBYTES)
"""A decision as it travelled."""
