# SPDX-License-Identifier: Apache-2.0
"""Convert simulations into recordings, so that they can be drawn like these."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.schedule.ir import Kind
from adaptra_megatron.schedule.simulator import Simulation
from adaptra_megatron.telemetry.action_records import ActionRecord, ArrivalRecord
from adaptra_megatron.telemetry.trace import RankTrace
from adaptra_megatron.tools.recordings.run_record import RunIteration


class Drawn(NamedTuple):
    """One order of actions to draw."""

    title: str
    simulation: Simulation
    costs: Costs


def simulated_iteration(simulation: Simulation, costs: Costs) -> RunIteration:
    """Return one iteration of one pipeline, each stage a rank. An action waits from the end of the one before.

    A link carries one message after the other. If a link or a queue waits for receives to be posted, messages count as
    arrived when they are used.
    """
    records = tuple(record for trace in simulated_traces(simulation) for record in trace.records)
    free = not (costs.has_rendezvous or costs.shared_queue)
    return RunIteration(
        number=0,
        start_s=0.0,
        seconds=simulation.makespan_s,
        records=records,
        arrivals=tuple(_arrivals(simulation, costs)) if free else (),
    )


def simulated_traces(simulation: Simulation) -> list[RankTrace]:
    """Return the traces that ranks would have written, without arrivals."""
    traces = []
    schedule = simulation.schedule
    for stage, order in enumerate(schedule.orders):
        records = []
        free_s = 0.0
        times = zip(order, simulation.start_s[stage], simulation.end_s[stage], strict=True)
        for (_, kind, chunk, micro_batch, _), start_s, end_s in times:
            records.append(ActionRecord(0, stage, str(kind), chunk, micro_batch, free_s, start_s, end_s))
            free_s = end_s
        traces.append(RankTrace(rank=stage, stage=stage, records=tuple(records)))
    return traces


def _arrivals(simulation: Simulation, costs: Costs) -> Iterator[ArrivalRecord]:
    """Yield the arrivals of all messages, by link and by the time at which they were sent."""
    placement = simulation.schedule.placement
    sent: dict[tuple[int, int], list[tuple[float, ArrivalRecord]]] = defaultdict(list)
    for order, ends_s in zip(simulation.schedule.orders, simulation.end_s, strict=True):
        for (stage, kind, chunk, micro_batch, _), end_s in zip(order, ends_s, strict=True):
            if kind is Kind.BACKWARD_WEIGHT:
                continue
            forward = kind is Kind.FORWARD
            place = (placement.next_place if forward else placement.previous_place)(stage, chunk)
            if place is not None and place.stage != stage:
                name = "F" if forward else "B"
                record = ArrivalRecord(0, stage, place.stage, name, place.chunk, micro_batch, end_s)
                sent[stage, place.stage].append((end_s, record))
    for link, messages in sent.items():
        cost, free_s = costs.link(*link), 0.0
        for handed_s, record in sorted(messages, key=lambda message: message[0]):
            free_s = max(free_s, handed_s) + cost.occupancy_s
            yield record._replace(arrived_s=free_s + cost.latency_s)
