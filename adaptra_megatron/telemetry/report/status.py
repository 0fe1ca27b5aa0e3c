# SPDX-License-Identifier: Apache-2.0
"""A run in a few lines of text, while it runs: how far it is, what is slow, dead or gone, and what to do about it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from adaptra_megatron.telemetry.events.cables import RECENT, listed
from adaptra_megatron.telemetry.events.events import (
    Fault,
    IterationsTimed,
    PlanSwitched,
    PolicyChanged,
    RanksLost,
    RanksReturned,
    RoutesChosen,
    RunEnded,
    RunStarted,
    Stamp,
    StampedEvent,
)
from adaptra_megatron.telemetry.events.numbering import renumbered
from adaptra_megatron.telemetry.report.status_findings import StatusFinding, status_findings
from adaptra_megatron.telemetry.report.wording import duration
from adaptra_megatron.telemetry.run_record import replicas_of

Kind = TypeVar("Kind")

SILENT_S, SILENT_ITERATIONS = 120.0, 10
"""Without a word for both of these, a run is called silent: times of iterations are written every 20 s or so."""
MOST_LINES = 8
"""Number of lines of one kind."""
_NORMAL_END = "the program ended"


@dataclass(frozen=True, kw_only=True)
class Status:
    """A run as its log tells it. Field names are an interface of `adaptra status --json`: add, never rename."""

    state: str
    """"runs", "silent", "ended" or "failed"."""
    run: str
    speed: str
    iteration: int
    """The latest, by Megatron's number where the log tells it; -1 before the first."""
    iteration_s: float | None
    """Median of the latest iterations; None before one has ended."""
    wrote_s: float
    """When the run wrote its last record, in seconds since the epoch."""
    findings: Sequence[StatusFinding]
    """What `slow` and `paths` say, for programs."""
    slow: Sequence[str]
    paths: Sequence[str]
    dead: Sequence[str]
    routes: Sequence[str]
    faults: Sequence[str]
    to_do: Sequence[str]

    @property
    def over(self) -> bool:
        """Return whether nothing more is to be expected of the run."""
        return self.state != "runs"

    @property
    def healthy(self) -> bool:
        """Return whether there is nothing to look at."""
        return not (self.slow or self.to_do)

    def lines(self) -> list[str]:
        """All of it in lines of text."""
        return [
            f"run:    {self.run}",
            f"speed:  {self.speed}",
            *_kind("slow:   ", self.slow),
            *_kind("paths:  ", self.paths),
            *_kind("dead:   ", self.dead),
            *_kind("routes: ", self.routes),
            *_kind("faults: ", self.faults),
            *_kind("to do:  ", self.to_do or ["nothing"]),
        ]


def status_of(events: Sequence[StampedEvent], now_s: float) -> Status:
    """What is known of a run from its log (not empty), by time. `now_s`: the present, in seconds since the epoch."""
    events = renumbered(events)
    seconds = _seconds_by_iteration(events)
    losses = _of(events, RanksLost)
    findings = status_findings(events, seconds, _changed_at(events))
    slow = [found for found in findings if found.kind != "path"]
    moved = [found for found in findings if found.kind == "path"]
    dead, dead_do = _deaths(events, losses, seconds)
    wrote_s = max(found.stamp.wall_s for found in events)
    state, text, state_do = _state(events, now_s - wrote_s, seconds)
    recent_s = _recent(events, seconds)
    stale = ["(what was found before ranks died or came back last may not be so any more)"]
    return Status(
        state=state,
        run=f"{_layout(events)}; {text}",
        speed=_speed(events, seconds),
        iteration=max([*(found.stamp.iteration for found in events), *seconds]),
        iteration_s=median(recent_s) if recent_s else None,
        wrote_s=wrote_s,
        findings=findings,
        slow=[*(found.text for found in slow), *stale * any(found.stale for found in slow)],
        paths=[found.text for found in moved],
        dead=dead,
        routes=_routes(events, losses),
        faults=[f"{fault.what}: {fault.detail}" for _, fault in _of(events, Fault)],
        to_do=[*state_do, *dead_do, *dict.fromkeys(found.remedy for found in (*slow, *moved))],
    )


def _of(events: Iterable[StampedEvent], kind: type[Kind]) -> list[tuple[Stamp, Kind]]:
    return [(found.stamp, found.event) for found in events if isinstance(found.event, kind)]


def _kind(name: str, texts: Sequence[str]) -> list[str]:
    """Lines of one kind, the latest last; of too many the first ones are left out."""
    left_out = len(texts) - MOST_LINES
    head = [f"{name}{left_out} more are in the log; the latest:"] if left_out > 0 else []
    return [*head, *(f"{name}{text}" for text in texts[-MOST_LINES:])]


def _seconds_by_iteration(events: Iterable[StampedEvent]) -> dict[int, float]:
    found: dict[int, float] = {}
    for _, each in _of(events, IterationsTimed):
        found |= dict(enumerate(each.seconds, each.first))
    return dict(sorted(found.items()))


def _grid(events: Sequence[StampedEvent]) -> tuple[int, int]:
    """Replicas and stages."""
    stages = max(start.layout.get("stages", 1) for _, start in _of(events, RunStarted))
    return 1 + max(replicas_of(events).values()), stages


def _layout(events: Sequence[StampedEvent]) -> str:
    replicas, stages = _grid(events)
    _, first = _of(events, RunStarted)[0]
    world = f", {first.layout['world_size']} ranks" if "world_size" in first.layout else ""
    return f"{replicas} replica{'s' * (replicas > 1)} of {stages} stages{world}"


def _state(events: Sequence[StampedEvent], silent_s: float, seconds: dict[int, float]) -> tuple[str, str, list[str]]:
    """State of the run, in one word and in words, and what to do where it does not go on."""
    ends = [end.reason for _, end in _of(events, RunEnded)]
    if ends:
        wrong = [reason for reason in ends if reason != _NORMAL_END]
        state = "failed" if wrong else "ended"
        return (
            state,
            f"ended {duration(silent_s)} ago: {(wrong or ends)[0]}",
            ["the job ended with an error: see the log of the rank, and docs/troubleshooting.md"] * bool(wrong),
        )
    recent_s = max(list(seconds.values())[-RECENT:], default=0.0)
    if silent_s > max(SILENT_S, SILENT_ITERATIONS * recent_s):
        return (
            "silent",
            f"silent for {duration(silent_s)}: it hangs, or was killed",
            ["look at the first rank whose log stops; a job that was killed goes on from its last checkpoint"],
        )
    return "runs", f"runs, wrote {duration(max(silent_s, 0.0))} ago", []


def _speed(events: Sequence[StampedEvent], seconds: dict[int, float]) -> str:
    last = max(found.stamp.iteration for found in events)
    if not seconds:
        return f"iteration {last}, no times yet" if last >= 0 else "no iteration has ended yet"
    recent_s = _recent(events, seconds)
    switches = _of(events, PlanSwitched)[-1:]
    plan = "".join(f", plan {event.number} since iteration {at.iteration}" for at, event in switches)
    policies = _of(events, PolicyChanged)[-1:]
    plan += "".join(f", policy {event.after} since about iteration {at.iteration}" for at, event in policies)
    text = f"iteration {max(last, *seconds)}, {duration(median(recent_s))} each (median of the last {len(recent_s)})"
    return text + plan


def _recent(events: Sequence[StampedEvent], seconds: dict[int, float]) -> list[float]:
    """Seconds of the latest iterations that are alike."""
    changes = (*_of(events, PlanSwitched), *_of(events, RanksLost))
    since = max((stamp.iteration for stamp, _ in changes), default=-1)
    return [each for at, each in seconds.items() if at > since][-RECENT:] or list(seconds.values())[-1:]


def _deaths(
    events: Sequence[StampedEvent], losses: Sequence[tuple[Stamp, RanksLost]], seconds: dict[int, float]
) -> tuple[list[str], list[str]]:
    """Each loss with its effect, and what to do."""
    texts = []
    for number, (stamp, event) in enumerate(losses):
        names = listed([f"{rank} ({why})" for rank, why in event.ranks.items()])
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stamp.wall_s - event.seconds))
        until = losses[number + 1][0].iteration if number + 1 < len(losses) else max(seconds, default=0) + 1
        since = losses[number - 1][0].iteration if number else 0
        before_s = [each for at_, each in seconds.items() if since < at_ < stamp.iteration][-RECENT:]
        after_s = [each for at_, each in seconds.items() if stamp.iteration < at_ < until][-RECENT:]
        text = f"{names} since iteration {stamp.iteration}, {at}: {duration(event.seconds)} until redone"
        if before_s and after_s:
            text += f", then {duration(median(after_s))} an iteration instead of {duration(median(before_s))}"
        texts.append(text)
    if not losses:
        return [], []
    for stamp, returned in _of(events, RanksReturned):
        texts.append(f"{listed(list(returned.ranks))} came back in iteration {stamp.iteration}")
    left = _latest_members(events).dead_cells
    if not left:
        return texts, []
    replicas, _ = _grid(events)
    dead = Counter(int(cell.split(".")[1]) for cell in left)
    lonely = [f"stage {stage}" for stage, count in sorted(dead.items()) if count == replicas - 1]
    to_do = ["nothing at once: restart from the latest checkpoint with what died replaced, when it suits"]
    if lonely:
        to_do = [f"restart soon, with what died replaced: {listed(lonely)} has one cell left, whose death ends the job"]
    return texts, to_do


def _latest_members(events: Sequence[StampedEvent]) -> RanksLost | RanksReturned:
    """The last change of those that live, of which there is one."""
    changes: list[tuple[Stamp, RanksLost | RanksReturned]] = [*_of(events, RanksLost), *_of(events, RanksReturned)]
    return max(changes, key=lambda change: (change[1].epoch, change[0].iteration))[1]


def _changed_at(events: Sequence[StampedEvent]) -> int:
    """Iteration in which ranks died or came back last; -1: none did."""
    return max((stamp.iteration for stamp, _ in (*_of(events, RanksLost), *_of(events, RanksReturned))), default=-1)


def _routes(events: Sequence[StampedEvent], losses: Sequence[tuple[Stamp, RanksLost]]) -> list[str]:
    """Micro-batches that pass a stage at another replica, now."""
    if not losses:
        return [chosen.reason for _, chosen in _of(events, RoutesChosen)[-1:] if chosen.moved]
    targets: dict[tuple[int, int], list[str]] = {}
    later = [chosen.moved for stamp, chosen in _of(events, RoutesChosen) if stamp.iteration > _changed_at(events)]
    for stage, source, target, count in later[-1] if later else _latest_members(events).moved:
        targets.setdefault((stage, source), []).append(f"{count} at replica {target}")
    return [
        f"stage {stage} of replica {source}: {listed(texts)}, in each iteration"
        for (stage, source), texts in sorted(targets.items())
    ]
