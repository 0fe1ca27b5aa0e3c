# SPDX-License-Identifier: Apache-2.0
"""Define decisions: what all ranks run in one iteration, in sections that are decided separately.

To add a decider: a class that implements `Decider`, and a field of `Decision` whose type is a `Section`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from adaptra_megatron.common.typed_messages import Decoder, encoded
from adaptra_megatron.telemetry.action_records import Iterations
from adaptra_megatron.telemetry.scalars import JobFigures

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has none in Python 3.10

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
        """Return this section merged with a later one that was made before this one took effect."""
        return later


@dataclass(frozen=True)
class Order(Section):
    """A new order of actions."""

    csv: str
    costs: str
    """The costs it was planned for, as JSON of `costs_to_json`. All ranks post their receives by them."""
    caps: tuple[float | None, ...]
    """Activations that each stage may hold under this order."""
    released_at_backward_input: tuple[float, ...]
    """By stage: the fraction of an activation that the caps count as freed by an input gradient."""


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
        """Return both sections' requests, and the later figures and policy."""
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

    def _sections(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)[1:]}


decision_of: Decoder[Decision] = Decoder(Decision, MAX_DECISION_NBYTES)
"""Decode a decision. Raises ValueError if it is malformed."""
