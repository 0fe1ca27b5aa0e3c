# SPDX-License-Identifier: Apache-2.0
"""How data-parallel replicas came to gradient synchronisation: who was late, and heat maps of replicas and stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from adaptra_megatron.telemetry.events.events import ArrivalsSeen, StampedEvent, StragglerDetection
from adaptra_megatron.telemetry.report.routes import MOST_REPLICAS
from adaptra_megatron.telemetry.run_record import began_at

MOST_MAPS = 4


class HeatCell(NamedTuple):
    """One stage of one replica."""

    lag_s: float
    heat: float
    """Its lag as a share of the longest on the page, 0..1; 0 of those that came first."""
    last: int
    """In how many of the map's iterations it was the last one."""


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
    """Iteration in which it was found to be in time again; None: never."""
    reason: str
    remedy: str


class Arrivals(NamedTuple):
    """For the page."""

    late: Sequence[LateReplica]
    maps: Sequence[HeatMap]


def arrivals_of(events: Sequence[StampedEvent]) -> Arrivals | None:
    """None of a run whose replicas were not watched."""
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
    # The worst of each replica's being late would be many: the latest ones, and the worst of all.
    worst = max(seen, key=_longest_s)
    shown = [each for each in seen if each is worst or each in seen[-MOST_MAPS + 1 :]]
    return Arrivals(late, [_map(each, max(1e-9, _longest_s(worst))) for each in shown])


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
