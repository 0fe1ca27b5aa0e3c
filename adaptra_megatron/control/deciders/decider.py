# SPDX-License-Identifier: Apache-2.0
"""Define deciders, what they decide from (samples of iterations, context, costs), and which change of costs counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from adaptra_megatron.common.reasons import Reason
from adaptra_megatron.control.deciders.plan_state import Layout
from adaptra_megatron.control.decisions import Forecast, Section
from adaptra_megatron.control.detector.observations import (
    Array,
    Estimates,
    Finding,
    IterationSample,
    LinkEstimate,
    LinkId,
    LinkSample,
    MessageColumns,
    StageId,
    StageSample,
    State,
)
from adaptra_megatron.control.measurements import Messages, StageMeasurement, message_order
from adaptra_megatron.schedule.costs import Costs, LinkCost, PerChunk, PerPair
from adaptra_megatron.schedule.ir import Kind
from adaptra_megatron.telemetry.action_records import Iterations
from adaptra_megatron.telemetry.events import Event
from adaptra_megatron.telemetry.scalars import LinkFigures
from adaptra_megatron.transport.link_paths import Path

BUFFERED_NBYTES = 16 << 20
"""Bytes of a message that NCCL may have sent before its receive is posted. More than twice its buffers (NCCL_BUFFSIZE,
4 MiB) of 2 CTAs."""


def iteration_sample(measurements: Sequence[StageMeasurement], *, rendezvous: bool = False) -> IterationSample:
    """Join one iteration's measurements of all ranks into a sample for the detector.

    A message that was sent on a path and did not arrive by it counts as lost there, if its receiver reported.
    `rendezvous`: whether a message of the device path leaves once its receive is posted, as over NCCL.
    """
    received: dict[LinkId, _End] = {}
    for measurement in measurements:
        for source, path, end in _ends(measurement.received, measurement.span_s[0]):
            received[LinkId(measurement.pipeline, source, measurement.stage, path.value)] = end
    # Only the receiver's report shows whether a message has arrived.
    reported = {(measurement.pipeline, measurement.stage) for measurement in measurements}
    links = {}
    for measurement in measurements:
        for target, path, end in _ends(measurement.sent, measurement.span_s[0]):
            if (measurement.pipeline, target) in reported:
                link = LinkId(measurement.pipeline, measurement.stage, target, path.value)
                links[link] = LinkSample(_joined(end, received.get(link), path, rendezvous))
    _add_probes(links, measurements)
    stages = {
        StageId(measurement.pipeline, measurement.stage): StageSample(
            measurement.durations_s, sizes=measurement.sizes, work=measurement.work
        )
        for measurement in measurements
    }
    disturbances = (measurement.disturbance for measurement in measurements)
    # One disturbed rank delays all others.
    disturbance = next((what for what in disturbances if what is not None), None)
    return IterationSample(measurements[0].iteration, links, stages, disturbance)


class _End(NamedTuple):
    """The messages of one path of one link, seen from one end, in order of their keys. Times are on the common
    clock."""

    codes: npt.NDArray[np.int64]
    """Keys as numbers."""
    nbytes: Array
    posted_s: Array
    done_s: Array


def _ends(messages: Messages, start_s: float) -> Iterator[tuple[int, Path, _End]]:
    """Yield the messages by peer and path. `start_s`: common time that theirs are relative to."""
    if not len(messages):
        return
    groups, codes = message_order(messages)
    begins = np.concatenate([[0], np.flatnonzero(groups[1:] != groups[:-1]) + 1, [len(groups)]])
    nbytes = messages["nbytes"].astype(np.float64)
    posted_s = messages["posted_s"] + np.float64(start_s)
    done_s = messages["done_s"] + np.float64(start_s)
    for begin, until in pairwise(begins.tolist()):
        group = int(groups[begin])
        path = Path.HOST if group & 1 else Path.DEVICE
        part = slice(begin, until)
        yield group >> 1, path, _End(codes[part], nbytes[part], posted_s[part], done_s[part])


def _joined(sent: _End, received: _End | None, path: Path, rendezvous: bool) -> MessageColumns:
    """Return the sent messages, each with its arrival time (NaN if it did not arrive)."""
    nothing = np.full(len(sent.codes), np.nan)
    if received is None:
        return MessageColumns(sent.nbytes, sent.done_s, nothing, nothing)
    arrived_s, posted_s = received.done_s, received.posted_s
    # The receiver has not seen all of them, or others, too: match them by key.
    if not np.array_equal(sent.codes, received.codes):
        places = np.searchsorted(received.codes, sent.codes)
        # Beyond the end means not found; at any other index the codes differ, too.
        places[places == len(received.codes)] = 0
        here = received.codes[places] == sent.codes
        arrived_s, posted_s = (np.where(here, column[places], np.nan) for column in (arrived_s, posted_s))
    # Arrivals by the host path are seen when they happen, so the time of the receive's posting says nothing more.
    if path is Path.HOST:
        return MessageColumns(sent.nbytes, sent.done_s, arrived_s, nothing)
    if not rendezvous:
        return MessageColumns(sent.nbytes, sent.done_s, arrived_s, posted_s)
    # A large message waits for its receive. A small one is buffered, and leaves before.
    leaves = sent.nbytes > BUFFERED_NBYTES
    left_s = np.where(leaves, np.fmax(sent.done_s, posted_s), sent.done_s)
    return MessageColumns(sent.nbytes, left_s, arrived_s, np.where(leaves, np.nan, posted_s))


def _add_probes(links: dict[LinkId, LinkSample], measurements: Sequence[StageMeasurement]) -> None:
    """Add the results of probes, and broken paths."""
    offset_s = {(measurement.pipeline, measurement.stage): measurement.clock_offset_s for measurement in measurements}
    for measurement in measurements:
        pipeline, stage, own_offset_s = measurement.pipeline, measurement.stage, measurement.clock_offset_s
        for probe in measurement.probes:
            if (pipeline, probe.peer) in offset_s:
                link = LinkId(pipeline, stage, probe.peer, probe.path.value)
                # Each end stamps a probe by its own clock.
                arrived_s = probe.arrived_s + offset_s[pipeline, probe.peer]
                columns = probe.nbytes, probe.sent_s + own_offset_s, arrived_s, np.nan
                before = links.get(link, LinkSample())
                message = MessageColumns(*(np.array([value], dtype=np.float64) for value in columns))
                links[link] = replace(before, messages=before.messages.and_also(message))
        for peer, path, cause in measurement.broken:
            link = LinkId(pipeline, stage, peer, path.value)
            links[link] = replace(links.get(link, LinkSample()), broken=cause)


DirectedLink = tuple[int, int]
"""Source and target stage."""
InUse = dict[tuple[int, int, int], LinkId]
"""The path in use, by pipeline, source and target."""


def paths_in_use(before: InUse, sample: IterationSample) -> InUse:
    """Return the path that carried most messages of each link in `sample`; a link without messages keeps its path."""
    after, most = dict(before), dict[tuple[int, int, int], int]()
    for link, carried in sample.links.items():
        place = link.pipeline, link.source, link.target
        arrived = int(np.count_nonzero(carried.messages.arrived))
        if arrived > most.get(place, 0):
            after[place], most[place] = link, arrived
    return after


def estimate_costs(
    estimates: Estimates,
    in_use: InUse,
    layout: Layout,
    *,
    micro_batches: int,
    can_split: bool,
    caps: tuple[float | None, ...],
    released_at_backward_input: tuple[float, ...],
    combined_saving: PerPair = (),
) -> Costs | None:
    """Return the costs of the slowest pipeline, by stage and by link; None until every action has been measured.

    A stage that lately ran whole backwards (in stock's order, say) keeps its earlier costs of split ones, and vice
    versa. `can_split`: whether plans split backwards. If not, a whole backward counts as the input gradient. If all
    backwards ran whole so far (`layout.whole_first`), the costs of the parts are estimated. If of a stage with combined
    actions no whole backward of some chunk ever ran alone, it counts as its parts.
    """
    slowest = _slowest(estimates)
    if can_split and layout.whole_first:
        _guess_parts(slowest)
    if not can_split:
        for (stage, kind, chunk), seconds in list(slowest.items()):
            if kind is Kind.BACKWARD:
                slowest[stage, Kind.BACKWARD_INPUT, chunk] = seconds
                slowest[stage, Kind.BACKWARD_WEIGHT, chunk] = 0.0
    if layout.combined:
        _add_up_parts(slowest)
    tables = {kind: _table(slowest, kind, layout) for kind in Kind}
    forward_s, backward_input_s = tables[Kind.FORWARD], tables[Kind.BACKWARD_INPUT]
    backward_weight_s = tables[Kind.BACKWARD_WEIGHT]
    if forward_s is None or backward_input_s is None or backward_weight_s is None:
        return None
    by_device = {(used.source, used.target) for used in in_use.values() if used.path == Path.DEVICE.value}
    return Costs(
        stages=layout.stages,
        chunks=layout.chunks,
        micro_batches=micro_batches,
        forward_s=forward_s,
        backward_input_s=backward_input_s,
        backward_weight_s=backward_weight_s,
        links={
            link: _slowest_link(found)._replace(rendezvous=layout.rendezvous and link in by_device)
            for link, found in _by_link(estimates, in_use).items()
        },
        max_in_flight=caps,
        released_at_backward_input=released_at_backward_input,
        backward_s=tables[Kind.BACKWARD] if can_split else None,
        shared_queue=layout.shared_queue,
        serial_queue=layout.serial_queue,
        combined_saving=combined_saving,
    )


def link_figures(estimates: Estimates, in_use: InUse) -> dict[DirectedLink, LinkFigures]:
    """Return figures for TensorBoard and Prometheus: each link as in the pipeline where it is slowest."""
    figures = {}
    for link, found in _by_link(estimates, in_use).items():
        slowest = max(found, key=lambda estimate: estimate.transfer_s)
        states = {estimate.state for estimate in found}
        state = next(state for state in (State.DEAD, State.SLOW, State.HEALTHY) if state in states)
        figures[link] = LinkFigures(
            latency_s=slowest.latency_s, bandwidth_bytes_s=slowest.bandwidth_bytes_per_s, state=state.value
        )
    return figures


def _slowest(estimates: Estimates) -> dict[tuple[int, Kind, int], float]:
    """Return the seconds of the slowest pipeline, by stage, kind and chunk."""
    found: dict[tuple[int, Kind, int], float] = {}
    for identity, estimate in estimates.stages.items():
        for (kind, chunk), seconds in estimate.durations_s.items():
            place = identity.stage, Kind(kind), chunk
            found[place] = max(seconds, found.get(place, 0.0))
    return found


def _guess_parts(seconds: dict[tuple[int, Kind, int], float]) -> None:
    """Add estimates for input and weight gradients where only whole backwards were measured.

    Layers are recomputed in the backward then: the input gradient gets the time of a forward and half the rest.
    """
    for (stage, kind, chunk), whole_s in list(seconds.items()):
        parts = (stage, Kind.BACKWARD_INPUT, chunk), (stage, Kind.BACKWARD_WEIGHT, chunk)
        if kind is Kind.BACKWARD and not any(part in seconds for part in parts):
            forward_s = min(seconds.get((stage, Kind.FORWARD, chunk), 0.0), whole_s)
            half_s = (whole_s - forward_s) / 2
            seconds[parts[0]], seconds[parts[1]] = forward_s + half_s, half_s


def _add_up_parts(seconds: dict[tuple[int, Kind, int], float]) -> None:
    for (stage, kind, chunk), input_s in list(seconds.items()):
        weight_s = seconds.get((stage, Kind.BACKWARD_WEIGHT, chunk))
        if kind is Kind.BACKWARD_INPUT and weight_s is not None:
            seconds.setdefault((stage, Kind.BACKWARD, chunk), input_s + weight_s)


def _table(slowest: Mapping[tuple[int, Kind, int], float], kind: Kind, layout: Layout) -> PerChunk | None:
    """Return the seconds by stage and chunk; None if any has not been measured."""
    rows = [[slowest.get((stage, kind, chunk)) for chunk in range(layout.chunks)] for stage in range(layout.stages)]
    known = [[seconds for seconds in row if seconds is not None] for row in rows]
    return tuple(map(tuple, known)) if known == rows else None


def _by_link(estimates: Estimates, in_use: InUse) -> dict[DirectedLink, Sequence[LinkEstimate]]:
    """Return the estimates of each link, from all pipelines."""
    found: dict[DirectedLink, list[LinkEstimate]] = {}
    for identity in in_use.values():
        if identity in estimates.links:
            found.setdefault((identity.source, identity.target), []).append(estimates.links[identity])
    return dict(sorted(found.items()))


def _slowest_link(found: Iterable[LinkEstimate]) -> LinkCost:
    costs = [(estimate.latency_s, estimate.occupancy_s(estimate.nbytes)) for estimate in found]
    return LinkCost(latency_s=max(latency_s for latency_s, _ in costs), occupancy_s=max(busy_s for _, busy_s in costs))


class Context:
    """Shared state of one decision. A decider sees what those before it have changed."""

    routed = False
    """Whether micro-batches are routed between replicas, so that no pipeline has an order of its own."""
    forecast: Forecast | None = None
    """Forecast under the new plan; None if the plan does not change."""

    def __init__(
        self,
        latest: Sequence[StageMeasurement],
        estimates: Estimates,
        findings: Sequence[Finding],
        carried: InUse,
        number: int,
        estimate_costs: Callable[[Context], Costs | None],
    ) -> None:
        """`latest`: measurements of the last iteration. `findings`: new since the last decision. `carried`:
        the path that each link's messages took. `number`: number of the current plan."""
        self.latest, self.estimates, self.findings, self.carried = latest, estimates, findings, carried
        self.in_use = carried
        """The expected path of each link."""
        self.number = number
        self.reasons: list[Reason] = []
        """Why the plan changes."""
        self.before: Costs | None = None
        """The costs without these changes."""
        self._estimate_costs = estimate_costs

    @property
    def micro_batches(self) -> int:
        """Micro-batches of the latest iteration."""
        return self.latest[0].micro_batches

    @cached_property
    def costs(self) -> Costs | None:
        """The expected costs; None until every action has been measured."""
        return self._estimate_costs(self)

    def expect(self, in_use: InUse) -> None:
        """Set the expected path of each link. The costs follow."""
        self.in_use = in_use
        self.__dict__.pop("costs", None)

    def change(self, reasons: Sequence[Reason]) -> None:
        """Declare that this decision changes the plan, for `reasons`."""
        self.before = self.costs if self.before is None else self.before
        self.reasons += reasons


class DecisionTelemetry(Protocol):
    """The part of RunTelemetry that deciders use."""

    def log(self, event: Event) -> None:
        """Record an event of the current iteration."""

    def requests(self) -> tuple[Iterations, ...]:
        """Return the iterations that every rank is asked to trace, new since the last call."""


class Decider(Protocol):
    """Decides on one section of each decision."""

    def observe(self, measurements: Sequence[StageMeasurement], sample: IterationSample) -> None:
        """Take in one iteration. `measurements`: of all ranks. `sample`: the same, with both ends of each message
        joined."""

    def decide(self, context: Context) -> Section | None:
        """Return this decider's section; None if nothing changes."""


MATERIAL_CHANGE = 0.1
"""Change of a cost, relative to the mean action, that calls for planning again."""


def material_change(before: Costs, after: Costs) -> str | None:
    """Describe the largest difference, if it is large enough to change a plan (see MATERIAL_CHANGE); None otherwise."""
    if before.micro_batches != after.micro_batches:
        return f"{after.micro_batches} micro-batches instead of {before.micro_batches}"
    all_s = [seconds for table in after.tables().values() for row in table for seconds in row]
    threshold_s = MATERIAL_CHANGE * sum(all_s) / len(all_s)
    if (before.max_in_flight, before.released_at_backward_input) != (
        after.max_in_flight,
        after.released_at_backward_input,
    ):
        return _change_of_memory(before, after)
    what, old_s, new_s = max(_pairs(before, after), key=lambda pair: abs(pair[2] - pair[1]))
    if abs(new_s - old_s) <= threshold_s:
        return None
    return f"{what}: {new_s * 1e3:.1f} ms instead of {old_s * 1e3:.1f} ms"


def _change_of_memory(before: Costs, after: Costs) -> str:
    for stage, (old, new) in enumerate(zip(before.max_in_flight, after.max_in_flight, strict=True)):
        if old != new and old is not None and new is not None:
            return f"stage {stage} may hold {new:g} activations instead of {old:g}"
    pairs = zip(before.released_at_backward_input, after.released_at_backward_input, strict=True)
    stage, (old, new) = next((stage, pair) for stage, pair in enumerate(pairs) if pair[0] != pair[1])
    return f"input gradients of stage {stage} release {new:g} of an activation instead of {old:g}"


_KINDS = {
    "forward_s": "F",
    "backward_input_s": "input gradient",
    "backward_weight_s": "weight gradient",
    "backward_s": "whole backward",
}


def _pairs(before: Costs, after: Costs) -> Iterator[tuple[str, float, float]]:
    """Yield each cost: its name, its seconds before, its seconds now."""
    old_tables = before.tables() | {"backward_s": before.whole_backward_s}
    for name, table in after.tables().items():
        for stage, rows in enumerate(zip(old_tables[name], table, strict=True)):
            for chunk, (old_s, new_s) in enumerate(zip(*rows, strict=True)):
                yield f"{_KINDS[name]} of stage {stage}, chunk {chunk}", old_s, new_s
    old_saved_s = _saved_s(before)
    for (stage, ahead, behind), new_s in _saved_s(after).items():
        old_s = old_saved_s.get((stage, ahead, behind), 0.0)
        yield f"what F of chunk {ahead} and B of chunk {behind} save on stage {stage}, combined", old_s, new_s
    for source, target in sorted({*before.links, *after.links}):
        old, new = before.link(source, target), after.link(source, target)
        yield f"latency of link {source}->{target}", old.latency_s, new.latency_s
        yield f"occupancy of link {source}->{target}", old.occupancy_s, new.occupancy_s


def _saved_s(costs: Costs) -> dict[tuple[int, int, int], float]:
    """Return the seconds that a combined action saves, by stage and the chunks of forward and backward."""
    return {
        (stage, ahead, behind): saving * (costs.forward_s[stage][ahead] + costs.whole_backward_s[stage][behind])
        for stage, rows in enumerate(costs.combined_saving)
        for ahead, row in enumerate(rows)
        for behind, saving in enumerate(row)
    }
