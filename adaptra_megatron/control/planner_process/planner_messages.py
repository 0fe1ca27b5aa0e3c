# SPDX-License-Identifier: Apache-2.0
"""Define the messages between a leading rank and its planner process.

Reports, or a decision, go along as bytes. Before the first message the planner process is given the socket on which it
listens to the ranks that follow. No torch here: the planner process imports this.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from adaptra_megatron.control.beside.beside_process import Line, SidecarMessages
from adaptra_megatron.control.decisions import Decision, TelemetrySection
from adaptra_megatron.control.order.plan_book import Layout
from adaptra_megatron.control.path_decider import PathPolicy
from adaptra_megatron.control.routes.route_decider import RoutePolicy


@dataclass(frozen=True, kw_only=True)
class Begin:
    """To the planner process, first: who it decides for. The options are AdaptraConfig's."""

    name: ClassVar[str] = "begin"
    secret: str = field(repr=False)
    """Hexadecimal."""
    place: str
    """Place of the decisions in the job's store."""
    reporters: tuple[int, ...]
    """The ranks that are decided for, the leading one among them, which is the first."""
    layout: Layout
    measures_memory: bool
    policy: str
    max_in_flight: float | None
    plan_csv: str | None
    costs_json: str | None
    paths: PathPolicy | None
    log_level: int
    waits_s: float = 15.0
    """Between two words of a planner process that waits for reports."""
    routes: RoutePolicy | None = None
    running: Decision = Decision(0)
    """Decision in force, with the order of its plan if that was planned."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """To the planner process: iterations to decide on, with what the leading rank itself measured in them."""

    name: ClassVar[str] = "measured"
    iterations: tuple[int, ...]
    nbytes: tuple[int, ...]
    """Size of each iteration's report, in the bytes that go along."""
    number: int
    """Number of the plan that runs."""
    asked: TelemetrySection = TelemetrySection()
    """What users ask for, new since the message before."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """To the planner process: a decision to pass on to all ranks that follow, which goes along."""

    name: ClassVar[str] = "published"
    iteration: int


@dataclass(frozen=True, kw_only=True)
class Waits:
    """From the planner process, while it waits for reports, every `Begin.waits_s`: it is alive."""

    name: ClassVar[str] = "waits"
    iteration: int
    missing: tuple[int, ...]
    """Ranks whose reports of this iteration have not come."""


@dataclass(frozen=True, kw_only=True)
class Decided:
    """From the planner process: what follows from one or several iterations, once all ranks have reported them."""

    name: ClassVar[str] = "decided"
    until: int
    """The latest of them."""
    decision: Decision | None
    """None where none could be made."""
    failure: str
    """Why not."""
    lines: tuple[Line, ...]
    events: tuple[str, ...]
    """Lines of an event log; their stamps are not used."""
    costs: str | None
    """The latest estimate, as the JSON text of `costs_to_json`."""


Message = Begin | Measured | Published | Waits | Decided
_MESSAGES: SidecarMessages[Message] = SidecarMessages(Begin, Measured, Published, Waits, Decided)
receive, hear = _MESSAGES.receive, _MESSAGES.hear
