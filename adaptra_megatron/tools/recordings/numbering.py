# SPDX-License-Identifier: Apache-2.0
"""Megatron's numbers of iterations, from 1 and over restarts, for those that a process counts from 0."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace

from adaptra_megatron.common.reasons import reason_text, with_numbers
from adaptra_megatron.telemetry.events.events import (
    ArrivalsSeen,
    IterationsTimed,
    LinkDetection,
    PathChosen,
    PlanMade,
    RoutesChosen,
    StageDetection,
    StampedEvent,
    StragglerDetection,
)


class Numbering:
    """Numbers of one start of a job. Evaluations, which a process counts too, have none of their own: they go by the
    training iteration that follows."""

    def __init__(self, events: Iterable[StampedEvent]) -> None:
        """`events`: the run's log, whose times of iterations tell; where they do not, as in old logs, numbers stay."""
        told = (found.event for found in events if isinstance(found.event, IterationsTimed))
        # By batch of iterations: the first one, Megatron's number of it, and how many there are.
        self._batches = sorted((each.first, each.step, len(each.seconds)) for each in told if each.step is not None)
        self._firsts = [first for first, _step, _count in self._batches]

    @property
    def known(self) -> bool:
        """Return whether Megatron's numbers are known."""
        return bool(self._batches)

    def of(self, iteration: int) -> int:
        """Megatron's number of `iteration`."""
        if not self._batches or iteration < 0:
            return iteration
        index = max(0, bisect_right(self._firsts, iteration) - 1)
        first, step, count = self._batches[index]
        within = iteration - first
        if within >= count and index + 1 < len(self._batches):
            return self._batches[index + 1][1]
        return step + within


def renumbered(events: Sequence[StampedEvent]) -> list[StampedEvent]:
    """`events` with Megatron's numbers of iterations, also in what they say in words."""
    numbering = Numbering(events)
    return [_renumbered(found, numbering) for found in events] if numbering.known else list(events)


def _renumbered(found: StampedEvent, numbering: Numbering) -> StampedEvent:
    event = found.event
    if isinstance(event, IterationsTimed):
        event = replace(event, first=event.first if event.step is None else event.step)
    elif isinstance(event, LinkDetection | StageDetection | PlanMade | PathChosen | RoutesChosen):
        if event.reason_parts:
            parts = with_numbers(event.reason_parts, numbering.of)
            event = replace(event, reason=reason_text(parts), reason_parts=parts)
    elif isinstance(event, ArrivalsSeen):
        event = replace(event, until=numbering.of(event.until))
    if isinstance(event, LinkDetection | StageDetection | StragglerDetection) and event.since_iteration is not None:
        event = replace(event, since_iteration=numbering.of(event.since_iteration))
    stamp = replace(found.stamp, iteration=numbering.of(found.stamp.iteration))
    return StampedEvent(stamp=stamp, event=event)
