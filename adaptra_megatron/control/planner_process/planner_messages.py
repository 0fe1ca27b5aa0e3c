# SPDX-License-Identifier: Apache-2.0
"""Define the messages between a leading rank and its planner process.

Reports, or a decision, go along as bytes. Before the first message the planner process is given the socket on which it
listens to the ranks that follow. No torch here: the planner process imports this.
"""

from __future__ import annotations

from dataclasses import dataclass

from adaptra_megatron.common.job.layout import Cell
from adaptra_megatron.common.typed_messages import TaggedMessage
from adaptra_megatron.control.beside.beside_process import Line, SidecarMessages
from adaptra_megatron.control.decisions import Decision, TelemetrySection
from adaptra_megatron.control.order.plan_book import Layout
from adaptra_megatron.transport.link_paths import Path


@dataclass(frozen=True, kw_only=True)
class PathPolicy:
    """Settings of the choice between the two paths of each link."""

    preferred: Path
    device_blocks: bool = False
    rendezvous: bool = False
    """See `path_decider.Setting` for both."""


@dataclass(frozen=True, kw_only=True)
class RoutePolicy:
    """Replicas that routes join."""

    pipelines: tuple[tuple[int, ...], ...]
    """First ranks of the pipelines of each replica: one for each lane."""
    pinned: tuple[int, ...] = ()
    """Stages whose micro-batches cannot be routed."""
    dead: tuple[Cell, ...] = ()
    """Cells that take no work, round which all routes lead."""
    avoids_slow: bool = True
    """True: routes lead round slow cells, too."""


class Begin(TaggedMessage, tag="begin", frozen=True, kw_only=True):
    """To the planner process, first: who it decides for. The options are AdaptraConfig's."""

    secret: str
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


class Measured(TaggedMessage, tag="measured", frozen=True, kw_only=True):
    """To the planner process: iterations to decide on, with what the leading rank itself measured in them."""

    iterations: tuple[int, ...]
    nbytes: tuple[int, ...]
    """Size of each iteration's report, in the bytes that go along."""
    number: int
    """Number of the plan that runs."""
    asked: TelemetrySection = TelemetrySection()
    """What users ask for, new since the message before."""


class Published(TaggedMessage, tag="published", frozen=True, kw_only=True):
    """To the planner process: a decision to pass on to all ranks that follow, which goes along."""

    iteration: int


class Waits(TaggedMessage, tag="waits", frozen=True, kw_only=True):
    """From the planner process, while it waits for reports, every `Begin.waits_s`: it is alive."""

    iteration: int
    missing: tuple[int, ...]
    """Ranks whose reports of this iteration have not come."""


class Decided(TaggedMessage, tag="decided", frozen=True, kw_only=True):
    """From the planner process: what follows from one or several iterations, once all ranks have reported them."""

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
_MESSAGES: SidecarMessages[Message] = SidecarMessages(Message)
receive, hear = _MESSAGES.receive, _MESSAGES.hear
