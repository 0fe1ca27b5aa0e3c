# SPDX-License-Identifier: Apache-2.0
"""Holds what a run's event log says against the fault scenario of the run: nothing missed, nothing made up."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from adaptra_megatron.telemetry.events import (
    LinkDetection,
    PathChosen,
    PlanMade,
    PlanSwitched,
    StageDetection,
    StampedEvent,
)
from testing.faults.network.link_story import (
    FIRST_TURN,
    Direction,
    LinkFaultScenario,
    Turn,
    direction_of,
)

FOUND_WITHIN = 3
"""Iterations from an onset to the latest in which it is said: two must agree on it where one does not overwhelm."""
HEALED_WITHIN = 20
"""The same of a recovery: a link that keeps falling ill is believed ever later."""
DATED_WITHIN = 1
"""Iterations that a finding may be off when it says since when: an iteration in which the machine was busy looks like
the beginning, and a path that only probes measure tells of it with the next of them."""
TOLD_PRECISELY_WITHIN = 8
"""Iterations after a change within which estimates of the link still become more precise."""
PLANNED_WITHIN = 4
"""Iterations from the measurements that a plan was made of to the switch."""
MESSAGE_NBYTES = 32 * 16 * 4
"""Size of the messages that findings report: `Campaign.arguments` says how wide the network and how long its
sequences are."""
SAVES_MEMORY = "activations instead of"
"""A plan that is as fast and holds much less is reason enough for itself."""
DEVICE, HOST = "device", "host"


@dataclass(frozen=True)
class Said:
    """One finding about a link, and the iteration in which it was said."""

    iteration: int
    link: LinkDetection

    def __str__(self) -> str:
        link = self.link
        return (
            f"iteration {self.iteration}: link {link.source}->{link.target} of pipeline {link.pipeline}, {link.path} "
            f"path: {link.before} to {link.after} since iteration {link.since_iteration}, {link.reason}"
        )


def check_story(
    story: LinkFaultScenario, events: Sequence[StampedEvent], busy: Collection[int] = (), late_s: Sequence[float] = ()
) -> list[str]:
    """What is wrong with the log of a run of `story`, one line each; empty if nothing is.

    Every onset of a slow link must have been found and named, and every recovery; every finding must be of something
    that happened; and every plan that was switched to must name findings, but for the first ones.

    `busy`: iterations in which the machine was too busy for what was emulated; what is found then may be true.
    `late_s`: by iteration, how late the machine was with it. A finding that a message takes no longer than that, then
    or in half of all iterations, may be true, too: what the story tells is far beyond it.
    """
    said = [Said(e.stamp.iteration, e.event) for e in events if isinstance(e.event, LinkDetection)]
    problems = [problem for turn in story.turns() if (problem := _missed(turn, story, said)) is not None]
    for one in said:
        excused = _was_busy(one.link.since_iteration, one.iteration, busy) or _is_lateness(one, late_s)
        if not (_happened(one, story) or excused):
            problems.append(f"false alarm: {one}")
    for entry in events:
        stage = entry.event
        if isinstance(stage, StageDetection) and not _was_busy(stage.since_iteration, entry.stamp.iteration, busy):
            problems.append(f"false alarm: iteration {entry.stamp.iteration}: {stage}")
    leaders = sorted({entry.stamp.rank for entry in events})  # plans have numbers in each replica
    of_each = [[entry for entry in events if entry.stamp.rank == leader] for leader in leaders]
    return problems + [problem for own in of_each for problem in _unexplained_switches(own, busy)]


def _unexplained_switches(events: Sequence[StampedEvent], busy: Collection[int]) -> list[str]:
    """Switches of plans, after the first ones, whose reason is no finding of the log, nor what followed from one.

    A plan may follow a finding, or a link's change of path, which has findings for reasons itself. For some iterations
    after either, messages tell more precisely what the link costs, which may be worth another plan. And on a machine
    that is too busy all costs drift, without anything to be found.
    """
    findings = [entry.event for entry in events if isinstance(entry.event, (LinkDetection, StageDetection))]
    problems = []
    for entry in events:
        if not isinstance(entry.event, PlanSwitched) or entry.stamp.iteration < FIRST_TURN:
            continue
        iteration = entry.stamp.iteration
        reasons = _reasons(events, entry.event.number)
        causes = [finding.reason for finding in findings]
        causes += [*_links_in_question(events, iteration), SAVES_MEMORY]
        explained = any(cause in reason for reason in reasons for cause in causes)
        what = f"iteration {iteration}: switch to plan {entry.event.number}"
        if not reasons:
            problems.append(f"{what}, which was not made")
        elif not (explained or _was_busy(iteration - PLANNED_WITHIN, iteration, busy)):
            problems.append(f"{what} names no finding: {'; '.join(reasons)}")
    return problems


def _reasons(events: Iterable[StampedEvent], number: int) -> list[str]:
    """Why there is a plan `number`: another order, or other paths."""
    orders = [plan.reason for plan in _of(events, PlanMade) if plan.adopted and plan.number == number]
    chosen = [choice for choice in _of(events, PathChosen) if choice.number == number]
    return [*orders, *(f"link {choice.source}->{choice.target}: {choice.reason}" for choice in chosen)]


def _links_in_question(events: Iterable[StampedEvent], iteration: int) -> set[str]:
    """Those of which something was found, or which took another path, in the iterations before."""
    return {
        f"link {entry.event.source}->{entry.event.target}"
        for entry in events
        if isinstance(entry.event, (LinkDetection, PathChosen))
        and 0 <= iteration - entry.stamp.iteration <= TOLD_PRECISELY_WITHIN
    }


def check_agreement(
    plans: Sequence[Sequence[Sequence[Any]]],
    events: Sequence[StampedEvent],
    replicas: Sequence[Sequence[int]] | None = None,
) -> list[str]:
    """Return whether all ranks of each replica ran the same plans, and those that the log says. `plans`: by rank, per
    iteration, number and fingerprint. `replicas`: the ranks of each; None: all are one."""
    if not plans:
        return ["no rank says which plans it ran"]
    problems = []
    for ranks in replicas or [range(len(plans))]:
        own = [entry for entry in events if entry.stamp.rank in ranks]
        problems += _disagreement([plans[rank] for rank in ranks], own)
    return problems


def _disagreement(plans: Sequence[Sequence[Sequence[Any]]], events: Sequence[StampedEvent]) -> list[str]:
    problems = []
    for iteration, ran in enumerate(zip(*plans, strict=True)):
        distinct = {tuple(plan) for plan in ran}
        if len(distinct) > 1:
            problems.append(f"iteration {iteration}: ranks ran different plans, {sorted(distinct)}")
    numbers = [number for number, _ in plans[0]]
    logged = {(e.stamp.iteration, e.event.number) for e in events if isinstance(e.event, PlanSwitched)}
    changed = {(i, number) for i, number in enumerate(numbers) if number != (numbers[i - 1] if i else 0)}
    if logged != changed:
        problems.append(f"switches (iteration, plan) in the log are {sorted(logged)}, but ranks did {sorted(changed)}")
    return problems


def _missed(turn: Turn, story: LinkFaultScenario, said: Iterable[Said]) -> str | None:
    """Why `turn` was not found, in words; None if it was, or if the run ended too soon.

    Every turn is one of the device path, which is always measured: by messages or, while these go another way, probes.
    """
    limit = turn.iteration + (HEALED_WITHIN if turn.fault is None else FOUND_WITHIN)
    after = [other.iteration for other in story.turns() if other.direction == turn.direction]
    if limit >= min([story.iterations, *(other for other in after if other > turn.iteration)]):
        return None
    about = [one for one in said if _same(one, turn.direction) and one.link.path != HOST and one.iteration <= limit]
    before = [one.link.after for one in about if one.iteration < turn.iteration][-1:]
    states = [*(before or ["healthy"]), *(one.link.after for one in about if one.iteration >= turn.iteration)]
    if ("healthy" if turn.fault is None else "slow") in states:
        return None
    state = states[-1]
    return f"missed: {turn}; by iteration {limit} the link is said to be {state}"


def _happened(said: Said, story: LinkFaultScenario) -> bool:
    """Return whether the path was as it is said to be from about then on; one that is slow must have turned about then.

    But for the host path, which is measured now and then: it may be found to be slow later.
    """

    def about_then(turn: int | None) -> bool:
        return turn is not None and abs(turn - since) <= DATED_WITHIN and turn <= said.iteration

    since = said.iteration if said.link.since_iteration is None else said.link.since_iteration
    path = said.link.path or DEVICE
    spells = [
        spell
        for spell in story.spells
        if _same(said, direction_of(spell)) and path in (struck.value for struck in spell.paths)
    ]
    slow = any(spell.strikes(since) for spell in spells)
    if any(burst.strikes(since) and _same(said, direction_of(burst)) for burst in story.bursts):
        return True  # by chance all messages of a burst may be late alike
    healed = any(about_then(spell.until_iteration) for spell in spells)
    if said.link.after == "healthy":
        return not slow or healed
    begun = any(about_then(spell.from_iteration) for spell in spells) or (path == HOST and slow)
    return begun or (said.link.before == "slow" and healed)


def _was_busy(since: int | None, until: int, busy: Collection[int]) -> bool:
    return any(iteration in busy for iteration in range(until if since is None else since, until + 1))


def _is_lateness(said: Said, late_s: Sequence[float]) -> bool:
    """Return whether a message takes, as found, no longer than this machine is late anyway."""
    link = said.link
    if link.latency_s is None or not late_s:
        return False
    message_s = link.latency_s + (MESSAGE_NBYTES / link.bandwidth_bytes_s if link.bandwidth_bytes_s else 0.0)
    since = said.iteration if link.since_iteration is None else link.since_iteration
    return message_s <= max([median(late_s), *late_s[since : said.iteration + 1]])


def _same(said: Said, direction: Direction) -> bool:
    link = said.link
    ends = (link.source, link.target) == (direction.source, direction.target)
    return ends and direction.pipeline in (None, link.pipeline)


def _of(events: Iterable[StampedEvent], kind: type[Any]) -> list[Any]:
    return [entry.event for entry in events if isinstance(entry.event, kind)]
