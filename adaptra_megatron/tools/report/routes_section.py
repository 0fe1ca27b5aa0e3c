# SPDX-License-Identifier: Apache-2.0
"""Prepare the report's sections on replicas: routes around slow and dead cells, with iteration times before and after,
and arrivals at gradient synchronisation, as heat maps of replicas and stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from adaptra_megatron.telemetry.events import (
    ArrivalsSeen,
    PlanSwitched,
    RanksLost,
    RoutesChosen,
    RunStarted,
    StampedEvent,
    StragglerDetection,
    SwitchMeasured,
)
from adaptra_megatron.tools.recordings.run_record import began_at, replicas_of

MOST_GRIDS = 4
MOST_REPLICAS = 24
"""Maximum number of rows of a grid; replicas that straggle or are rerouted come first."""

_Cell = tuple[int, int]
"""Replica and stage."""


class GridCell(NamedTuple):
    """One stage of one replica."""

    speed: float | None
    """Speed relative to the fastest of its stage; None in logs without it."""
    slow: bool
    flows: Sequence[str]
    """Texts: numbers of micro-batches, and the replicas that they go to or come from."""
    dead: bool = False


class Routes(NamedTuple):
    """One decision on routes, its reason and its effect."""

    number: int | None
    """Number of the plan; None for routes around dead cells, which belong to no plan."""
    reason: str
    since: int | None
    """First iteration with these routes; None if none ran."""
    micro_batches: int | None
    """Micro-batches of each replica in an iteration; None in logs without it."""
    predicted_s: tuple[float | None, float | None]
    """Seconds of an iteration before and after; None if unknown, as in the two fields below."""
    lower_bound_s: float | None
    measured_s: tuple[float | None, float | None]
    rows: Sequence[tuple[int, Sequence[GridCell]]]
    """By replica, its cells by stage; empty if every micro-batch stays in its replica."""
    left_out: int
    """Number of replicas without a row."""


def routes_of(events: Sequence[StampedEvent]) -> list[Routes]:
    """Return all decisions on routes, in order. If their plan never ran, they took effect with the next one that
    did."""
    return [
        _routes(found.event, found.stamp.rank, events)
        if isinstance(found.event, RoutesChosen)
        else _routes_of_failure(found.event, found.stamp.iteration, events)
        for found in events
        if isinstance(found.event, (RoutesChosen, RanksLost))
    ]


def _routes(chosen: RoutesChosen, rank: int, events: Sequence[StampedEvent]) -> Routes:
    by_leader = [found for found in events if found.stamp.rank == rank]
    ran = next(
        (
            (found.event, found.stamp.iteration)
            for found in by_leader
            if isinstance(found.event, PlanSwitched) and found.event.before < chosen.number <= found.event.number
        ),
        None,
    )
    number = None if ran is None else ran[0].number
    gained = next(
        (
            found.event
            for found in by_leader
            if isinstance(found.event, SwitchMeasured) and found.event.number == number
        ),
        None,
    )
    before_s = None if ran is None else ran[0].before_measured_s
    rows, left_out = _grid(chosen)
    return Routes(
        number=chosen.number,
        reason=chosen.reason,
        since=None if ran is None else ran[1],
        micro_batches=chosen.micro_batches,
        predicted_s=(chosen.current_predicted_s, chosen.predicted_s),
        lower_bound_s=chosen.lower_bound_s,
        measured_s=(before_s, None) if gained is None else (gained.before_measured_s, gained.after_measured_s),
        rows=rows,
        left_out=left_out,
    )


def _routes_of_failure(failed: RanksLost, iteration: int, events: Sequence[StampedEvent]) -> Routes:
    """Return the routes after a failure, with as many cells of the job as fit: the dead ones stand out."""
    starts = [found.event.layout for found in events if isinstance(found.event, RunStarted)]
    stages = range(max((start.get("stages", 0) for start in starts), default=0))
    dead, flows = set(map(_cell, failed.dead_cells)), _flows(failed.moved)
    touched = {replica for replica, _stage in {*flows, *dead}}
    replicas = sorted({*touched, *replicas_of(events).values()}, key=lambda replica: (replica not in touched, replica))
    rows = [
        (replica, [GridCell(None, False, flows.get((replica, s), ()), (replica, s) in dead) for s in stages])
        for replica in sorted(replicas[:MOST_REPLICAS])
    ]
    return Routes(
        number=None,
        reason=f"lost {', '.join(failed.ranks)}: live cells of the same stage compute the work of dead cells",
        since=iteration,
        micro_batches=None,
        predicted_s=(None, None),
        lower_bound_s=None,
        measured_s=(None, None),
        rows=rows,
        left_out=len(replicas) - len(rows),
    )


def _flows(moved: Sequence[Sequence[int]]) -> dict[_Cell, list[str]]:
    """Return texts by cell: numbers of micro-batches, and the replicas that they go to or come from."""
    flows: dict[_Cell, list[str]] = {}
    for stage, source, target, count in moved:
        flows.setdefault((source, stage), []).append(f"{count} → replica {target}")
        flows.setdefault((target, stage), []).append(f"{count} ← replica {source}")
    return flows


def _grid(chosen: RoutesChosen) -> tuple[Sequence[tuple[int, Sequence[GridCell]]], int]:
    """Return the rows of the grid, and the number of replicas without one."""
    if not chosen.moved:
        return (), 0
    flows = _flows(chosen.moved)
    speeds = {_cell(name): speed for name, speed in chosen.speeds.items()}
    slow = set(map(_cell, chosen.slow))
    known = {*flows, *speeds, *slow}
    touched = {replica for replica, _stage in {*flows, *slow}}
    replicas = sorted({replica for replica, _stage in known}, key=lambda replica: (replica not in touched, replica))
    stages = range(1 + max(stage for _replica, stage in known))
    rows = [
        (replica, [GridCell(speeds.get(cell), cell in slow, flows.get(cell, ())) for cell in places])
        for replica in sorted(replicas[:MOST_REPLICAS])
        for places in [[(replica, stage) for stage in stages]]
    ]
    return rows, len(replicas) - len(rows)


def _cell(name: str) -> _Cell:
    replica, stage = map(int, name.split("."))
    return replica, stage


MOST_MAPS = 4


class HeatCell(NamedTuple):
    """Arrivals of one stage of one replica."""

    lag_s: float
    heat: float
    """Its lag relative to the longest on the page, 0..1; 0 for those that came first."""
    last: int
    """Number of the map's iterations in which it came last."""


class HeatMap(NamedTuple):
    """Arrivals in some iterations."""

    first: int
    until: int
    iterations: int
    rows: Sequence[tuple[int, Sequence[HeatCell]]]
    """By replica, its cells by stage."""
    left_out: int
    """Number of replicas without a row."""


class LateReplica(NamedTuple):
    """A replica that came last, and until when."""

    replica: int
    place: str
    since: int
    until: int | None
    """Iteration in which it was found healthy again; None: never."""
    reason: str
    remedy: str


class RouteArrivals(NamedTuple):
    """Arrivals for the page."""

    late: Sequence[LateReplica]
    maps: Sequence[HeatMap]


def arrivals_of(events: Sequence[StampedEvent]) -> RouteArrivals | None:
    """Return the arrivals of a run; None if it did not watch for stragglers."""
    seen = [found.event for found in events if isinstance(found.event, ArrivalsSeen) and found.event.lags_s]
    late: list[LateReplica] = []
    for found in events:
        if isinstance(event := found.event, StragglerDetection):
            same = [each for each in late if each.replica == event.replica and each.until is None]
            for each in same:
                late.remove(each)
            if event.after == "healthy":
                late += [each._replace(until=found.stamp.iteration) for each in same]
            else:
                place = f"{event.stage}, rank {event.first_rank} on {event.host}"
                since = same[0].since if same else began_at(found)
                late.append(LateReplica(event.replica, place, since, None, event.reason, event.remedy))
    if not seen:
        return None
    # A map for each late replica would be too many: the latest maps, and that with the longest lag.
    worst = max(seen, key=_longest_s)
    shown = [each for each in seen if each is worst or each in seen[-MOST_MAPS + 1 :]]
    return RouteArrivals(late, [_map(each, max(1e-9, _longest_s(worst))) for each in shown])


def _longest_s(seen: ArrivalsSeen) -> float:
    return max(max(lags_s) for lags_s in seen.lags_s)


def _map(seen: ArrivalsSeen, longest_s: float) -> HeatMap:
    by_replica = list(zip(*seen.lags_s, strict=True))
    shown = sorted(sorted(range(len(by_replica)), key=lambda replica: -max(by_replica[replica]))[:MOST_REPLICAS])
    rows = [
        (
            replica,
            [
                HeatCell(lag_s, max(0.0, lag_s) / longest_s, seen.last[stage][replica])
                for stage, lag_s in enumerate(by_replica[replica])
            ],
        )
        for replica in shown
    ]
    first = seen.until - seen.iterations + 1
    return HeatMap(first, seen.until, seen.iterations, rows, len(by_replica) - len(shown))
