# SPDX-License-Identifier: Apache-2.0
"""Turn figures of each iteration into events: gains of switches, durations, changed paths."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from adaptra_megatron.telemetry.events import (
    Event,
    Fault,
    IterationsTimed,
    PathChanged,
    PlanMade,
    PlanSwitched,
    StageDetection,
    SwitchMeasured,
)
from adaptra_megatron.telemetry.scalars import LeaderFigures

MEASURED_OVER = 3
"""Iterations before and after a switch whose medians are compared, so that one outlier does not count."""

MAX_BATCH, MAX_BATCH_S = 32, 20.0
"""Iterations per event of durations, and seconds after which an event may have fewer."""


class SwitchWatch:
    """Compares iteration times before and after each switch of plans. Pure. Not thread-safe."""

    def __init__(self) -> None:
        self._recent_s: deque[float] = deque(maxlen=MEASURED_OVER)
        self._number = 0
        self._before_s: float | None = None
        self._after_s: list[float] = []
        self._forecast_s: float | None = None
        self._gain_s = 0.0
        self.saved_s = 0.0
        """Approximate seconds saved by switches so far. Each iteration counts the lesser of the predicted and the
        measured gain, until the next switch or finding."""

    def found(self) -> None:
        """Stop counting the latest switch's gain: something else has changed."""
        self._gain_s = 0.0

    def switched(
        self, number: int, *, predicted_s: float | None = None, before_predicted_s: float | None = None
    ) -> PlanSwitched | None:
        """Note that plan `number` runs from now on. Return the event; None if it did already."""
        if number == self._number:
            return None
        event = PlanSwitched(
            number=number,
            before=self._number,
            predicted_s=predicted_s,
            before_predicted_s=before_predicted_s,
            before_measured_s=median(self._recent_s) if self._recent_s else None,
        )
        self._number, self._before_s, self._after_s = number, event.before_measured_s, []
        self._gain_s = 0.0
        self._forecast_s = None
        if predicted_s is not None and before_predicted_s is not None:
            self._forecast_s = before_predicted_s - predicted_s
        self._recent_s.clear()
        return event

    def iteration(self, seconds: float) -> SwitchMeasured | None:
        """Note that an iteration took `seconds`. Return the latest switch's gain, once it is measured."""
        self._recent_s.append(seconds)
        self.saved_s += self._gain_s
        if self._before_s is None:
            return None
        self._after_s.append(seconds)
        if len(self._after_s) < MEASURED_OVER:
            return None
        before_s, self._before_s = self._before_s, None
        after_s = median(self._after_s)
        gain_s = before_s - after_s
        self._gain_s = max(0.0, gain_s if self._forecast_s is None else min(gain_s, self._forecast_s))
        self.saved_s += MEASURED_OVER * self._gain_s
        return SwitchMeasured(
            number=self._number,
            before_measured_s=before_s,
            after_measured_s=after_s,
            iterations=MEASURED_OVER,
        )


class LeaderWatch:
    """Follows the current plan and the states of stages through the leader's events. `take` is thread-safe."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._plan: PlanMade | None = None
        self._slow: dict[tuple[int, int | None], str] = {}
        """By stage and pipeline, those that are not healthy."""

    def take(self, event: Event) -> None:
        """Update from `event`."""
        if isinstance(event, PlanMade):
            self._plan = event
        elif isinstance(event, StageDetection):
            slow = {place: state for place, state in self._slow.items() if place != (event.stage, event.pipeline)}
            if event.after != "healthy":
                slow[event.stage, event.pipeline] = event.after
            self._slow = slow  # replaced, not changed: another thread may be reading it

    def figures(self, saved_s: float) -> LeaderFigures:
        """Return the figures for Prometheus. `saved_s`: see SwitchWatch."""
        plan, states = self._plan, {stage: state for (stage, _pipeline), state in self._slow.items()}
        return LeaderFigures(
            predicted_s=None if plan is None else plan.predicted_s,
            lower_bound_s=None if plan is None else plan.lower_bound_s,
            saved_s=saved_s,
            stage_states=[states.get(stage, "healthy") for stage in range(self._stages)],
        )


class IterationTimes:
    """Collects durations of iterations, to be logged in batches. Pure. Not thread-safe."""

    def __init__(self) -> None:
        self._first = 0
        self._step: int | None = None
        self._seconds: list[float] = []

    def add(self, iteration: int, seconds: float, step: int | None = None) -> IterationsTimed | None:
        """Add the duration of `iteration`. `step`: Megatron's number of it.

        Returns a batch to log: a full one, or one that this iteration does not continue; else None.
        """
        batch = None
        due = len(self._seconds) >= MAX_BATCH or sum(self._seconds) >= MAX_BATCH_S
        if iteration != self._first + len(self._seconds) or due:
            batch = self.rest()
        if not self._seconds:
            self._first, self._step = iteration, step
        self._seconds.append(round(seconds, 6))
        return batch

    def rest(self) -> IterationsTimed | None:
        """Return the durations that have not been logged yet; None if there are none."""
        seconds, self._seconds = self._seconds, []
        return IterationsTimed(first=self._first, seconds=seconds, step=self._step) if seconds else None


@dataclass(frozen=True)
class PathState:
    """Path of one stage's messages to one peer."""

    path: str
    """"device" or "host"."""
    switches: int
    """Number of changes of the path so far."""
    sessions_lost: int
    """Device sessions, in either direction, that failed."""


class PathWatch:
    """Finds which of a stage's links have changed their path. Pure. Not thread-safe."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._links: dict[int, PathState] = {}
        self._delegate_starts: int | None = None
        self.failovers = 0
        """Changes of path after a failure, so far."""

    def look(self, links: Mapping[int, PathState], delegate_starts: int | None = None) -> list[PathChanged | Fault]:
        """Return the changes since the last call. `links`: by peer. `delegate_starts`: starts of this stage's
        delegate; None if there is none.

        A link that changed its path twice since then is described by its first and its last path.
        """
        found: list[PathChanged | Fault] = []
        if delegate_starts is not None:
            if self._delegate_starts is not None and delegate_starts > self._delegate_starts:
                times = delegate_starts - self._delegate_starts
                detail = f"{times} time{'' if times == 1 else 's'} since the iteration before"
                found.append(Fault(what="delegate restarted", detail=detail, stage=self._stage))
            self._delegate_starts = delegate_starts
        for peer, now in links.items():
            before = self._links.get(peer)
            self._links[peer] = now
            if before is None or now.switches == before.switches:
                continue
            failed = now.sessions_lost - before.sessions_lost
            failover = now.path == "host" and failed > 0
            self.failovers += failover
            if failover:
                cause = "a session of the device path was lost"
            elif now.path == before.path:
                cause = f"{now.switches - before.switches} changes since the iteration before"
            else:
                cause = "no failure: a plan chose it, or it is preferred and healthy again"
            found.append(
                PathChanged(
                    source=self._stage, target=peer, before=before.path, after=now.path, cause=cause, failover=failover
                )
            )
        return found
