# SPDX-License-Identifier: Apache-2.0
"""Describe findings and events for the report. The result is plain text; the page escapes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from itertools import pairwise
from statistics import median

from adaptra_megatron.telemetry.event_wording import change_of_seconds, link_name
from adaptra_megatron.telemetry.events import (
    LinkDetection,
    PlanSwitched,
    RanksLost,
    StageDetection,
    StampedEvent,
    StragglerDetection,
)
from adaptra_megatron.telemetry.log_lines import duration, ends_of, listed, percent
from adaptra_megatron.tools.recordings.run_record import Part, RunRecord
from adaptra_megatron.tools.report.report_findings import Change, Link, PartFinding, Use, repetitions
from adaptra_megatron.tools.report.waiting import Cause, CauseKind

WORTH_SAYING = 0.03
"""Share of an iteration's time below which a difference is not mentioned."""
MOST_SENTENCES = 8
MOST_REPETITIONS = 4
MOST_FAILED = 2
"""Maximum number of failed ranks that a sentence names."""
REGULAR = 0.2
"""Gaps count as regular if they differ by at most this share of their median."""


def link_names(links: Iterable[Link]) -> str:
    """Format links, such as "link 3→4", "links 3→4 and 4→3"."""
    names = [link_name(link) for link in sorted(links)]
    return f"link{'s' if len(names) > 1 else ''} {listed(names)}"


def _were(subjects: Sized) -> str:
    return "was" if len(subjects) == 1 else "were"


def span(part: Part) -> str:
    """Format the iterations of a part."""
    return str(part.first) if part.first == part.last else f"{part.first}–{part.last}"


def _iterations(part: Part) -> str:
    return f"iteration{'s' * (part.first != part.last)} {span(part)}"


def cause_name(cause: Cause) -> str:
    """Name what an idle stage waited for."""
    if cause.kind is CauseKind.LINK:
        return f"messages of link {cause.source}→{cause.target}"
    if cause.kind is CauseKind.STAGE:
        return f"stage {cause.source}, which was computing"
    if cause.kind is CauseKind.REPLICA:
        return f"another replica, for a micro-batch routed to or from stage {cause.source}"
    if cause.kind is CauseKind.OVERHEAD:
        return f"nothing: time between actions of stage {cause.source}"
    return "nothing: its work was done"


USE_NAMES = {
    Use.FORWARD: "forward",
    Use.BACKWARD: "backward",
    Use.BACKWARD_INPUT: "input gradient",
    Use.BACKWARD_WEIGHT: "weight gradient",
    Use.LINK: "waiting for a link",
    Use.STAGE: "waiting for another stage",
    Use.FILL: "filling the pipeline",
    Use.DRAIN: "work done, others not",
    Use.OVERHEAD: "between actions",
}


def mattering_pairs(findings: Sequence[PartFinding], events: Iterable[StampedEvent]) -> set[Link]:
    """Return the pairs of stages (a < b) whose link the detector named, or whose delay cost time in a part of the
    run."""
    named = {ends_of(found.event) for found in events if isinstance(found.event, LinkDetection)}
    for finding in findings:
        named |= {
            pair for pair, without_s in finding.without.items() if without_s < (1.0 - WORTH_SAYING) * finding.seconds
        }
    return named


def headline(findings: Sequence[PartFinding]) -> str:
    """Summarize the run in one line."""
    if not findings:
        return "No iteration is known to have ended"
    last = findings[-1]
    failed = [rank for finding in findings for rank in _failed(finding)]
    died = f"; {len(failed)} rank{'s' * (len(failed) > 1)} died" if failed else ""
    settled = [finding for finding in findings if finding is _settled(findings) or finding.part.first > 0]
    worst = max(settled, key=lambda finding: finding.seconds)
    before_s = [finding.seconds for finding in settled if finding.part.first < worst.part.first]
    if not before_s or worst.seconds <= (1.0 + WORTH_SAYING) * min(before_s):
        return f"Steady: {duration(last.seconds)} an iteration{died}"
    slowed = f"Slowed from {duration(min(before_s))} to {duration(worst.seconds)} an iteration"
    return f"{slowed}{died}" if last is worst else f"{slowed}; at the end {duration(last.seconds)}{died}"


def _failed(finding: PartFinding) -> list[str]:
    """Return the ranks, as text, whose failure began a part."""
    events = (found.event for found in finding.part.beginning)
    return [rank for event in events if isinstance(event, RanksLost) for rank in event.ranks]


def _settled(findings: Sequence[PartFinding]) -> PartFinding:
    """Return the part that others are compared with: the first one, unless it is a single iteration of warm-up."""
    return findings[1] if len(findings) > 1 and len(findings[0].part.iterations) == 1 else findings[0]


def summary(run: RunRecord, findings: Sequence[PartFinding]) -> list[str]:
    """Return a few sentences: what ran, what happened, and where the time goes in the worst part and at the end."""
    if not findings:
        return ["The files of the run hold no time of any training iteration."]
    sentences = [_what_ran(run, findings)]
    matters = mattering_pairs(findings, run.events)
    changes = list(pairwise(findings))
    groups = repetitions(changes)
    sentences += [_repeated(group) for group in groups[:MOST_REPETITIONS]]
    once = [change for change in changes if not any(change in group for group in groups)]
    largest = sorted(
        sorted(once, key=lambda pair: -abs(pair[1].seconds / pair[0].seconds - 1.0))[:MOST_SENTENCES],
        key=lambda pair: pair[1].part.first,
    )
    for before, after in largest:
        best_s = min(finding.seconds for finding in findings if finding.part.first < after.part.first)
        sentences.append(_change(before, after, best_s, matters))
    if len(once) > len(largest):
        sentences.append(f"{len(once) - len(largest)} smaller changes show in the chart below.")
    traced = [finding for finding in findings if finding.traced]
    if not traced:
        return sentences
    worst = max(traced, key=lambda finding: finding.seconds)
    if worst is not findings[-1] and worst.seconds > (1.0 + WORTH_SAYING) * findings[-1].seconds:
        sentences.append(_where_time_goes(worst, f"In {_iterations(worst.part)}, the slowest part,", matters))
    if findings[-1].traced:
        last = findings[-1]
        sentences.append(_where_time_goes(last, f"At the end ({_iterations(last.part)}),", matters))
    return sentences


def _repeated(group: Sequence[Change]) -> str:
    """Describe repeated changes, such as "81 times an iteration went from 1.55 s to 2.05 s, every 24 iterations, first
    in 24, last in 1968."."""
    firsts = [after.part.first for _before, after in group]
    gaps = [later - earlier for earlier, later in zip(firsts, firsts[1:], strict=False)]
    usual = median(gaps)
    regular = max(abs(gap - usual) for gap in gaps) <= REGULAR * usual
    every = f", every {usual:.0f} iterations" if regular else f", about once in {usual:.0f} iterations"
    before_s, after_s = (median(finding.seconds for finding in column) for column in zip(*group, strict=True))
    return (
        f"{len(group)} times an iteration went from {duration(before_s)} to {duration(after_s)}{every}, first in "
        f"iteration {firsts[0]}, last in {firsts[-1]}."
    )


def _what_ran(run: RunRecord, findings: Sequence[PartFinding]) -> str:
    layout = f"{run.stages} stages"
    if run.traced:
        records = run.traced[0].records
        micro_batches = 1 + max(record.micro_batch for record in records)
        chunks = 1 + max(record.chunk for record in records)
        layout += f"{f' × {chunks} chunks' if chunks > 1 else ''}, {micro_batches} micro-batches"
    first = _settled(findings)
    text = (
        f"{len(run.iterations)} training iterations on {layout}. At first an iteration took {duration(first.seconds)}"
    )
    return f"{text}, with the stages idle {percent(first.idle_share)} of the time." if first.traced else f"{text}."


def _change(before: PartFinding, after: PartFinding, best_s: float, matters: set[Link]) -> str:
    if before.part.first == before.part.last == 0 and not after.part.beginning and not after.part.new_order:
        return f"The first iteration took {duration(before.seconds)}: it pays for what is set up once."
    numbers = f"{change_of_seconds(before.seconds, after.seconds)} an iteration"
    at = f"From iteration {after.part.first} on"
    faster = after.seconds < (1.0 - WORTH_SAYING) * before.seconds
    switch = next((found.event for found in after.part.beginning if isinstance(found.event, PlanSwitched)), None)
    if switch is not None or after.part.new_order:
        name = f"plan {switch.number} ran" if switch is not None else "another order of actions ran"
        lost_s, won_s = before.seconds - best_s, before.seconds - after.seconds
        won = ""
        if lost_s > WORTH_SAYING * best_s and won_s > 0:
            won = f"; {percent(min(1.0, won_s / lost_s))} of the loss was won back"
        return f"{at} {name}: {numbers}{won}."
    if failed := _failed(after):
        who = listed(failed) if len(failed) <= MOST_FAILED else f"{len(failed)} ranks"
        return f"{at} {who} {_were(failed)} dead: {numbers}."
    found = _states_of_links(after)
    # A link that was found slow does not explain why iterations became faster.
    said = "" if faster and "slow" in found.values() else _said_of_links(found)
    if changed := _changed_links(before, after, matters) or said:
        return f"{at} {changed}: {numbers}."
    stages = [found.event for found in after.part.beginning if isinstance(found.event, StageDetection)]
    if stages:
        return f"{at} {listed([f'stage {event.stage} was {event.after}' for event in stages])}: {numbers}."
    late = [found.event for found in after.part.beginning if isinstance(found.event, StragglerDetection)]
    if late:
        texts = [f"replica {event.replica} {'came last' if event.after == 'late' else 'was in time'}" for event in late]
        return f"{at} {listed(texts)}: {numbers}."
    if abs(after.seconds - before.seconds) < WORTH_SAYING * before.seconds:
        return f"{at} iterations took as long as before: {numbers}."
    return f"{at} iterations took {'longer' if after.seconds > before.seconds else 'less'}: {numbers}."


def _changed_links(before: PartFinding, after: PartFinding, matters: set[Link]) -> str:
    """Describe changes of links, such as "messages of links 3→4 and 4→3 took 81 ms instead of 0.7 ms"; slower ones
    first."""
    phrases: list[str] = []
    for slow in (True, False):
        changed = {
            link: (found.median_s, before.links[link].median_s)
            for link, found in after.links.items()
            if link in before.links
            and (min(link), max(link)) in matters
            and (found.slow, before.links[link].slow) == (slow, not slow)
        }
        if changed:
            now_s, before_s = (max(column) for column in zip(*changed.values(), strict=True))
            text = f"{link_names(changed)} took {duration(now_s)} instead of {duration(before_s)}"
            phrases.append(f"{'those' if phrases else 'messages'} of {text}")
    return ", ".join(phrases)


def _states_of_links(after: PartFinding) -> dict[Link, str]:
    """Return the detector's last state of each link at the beginning of a part."""
    said = [found.event for found in after.part.beginning if isinstance(found.event, LinkDetection)]
    return {(event.source, event.target): event.after for event in said}


def _said_of_links(states: Mapping[Link, str]) -> str:
    """Describe states of links, such as "links 3→4 and 4→3 were slow"; "" without links."""
    parts = []
    for state in sorted(set(states.values())):
        links = {link for link, said_of_it in states.items() if said_of_it == state}
        parts.append(f"{link_names(links)} {_were(links)} {state}")
    return listed(parts) if parts else ""


def _where_time_goes(finding: PartFinding, when: str, matters: set[Link]) -> str:
    idle = finding.idle_share
    text = f"{when} stages were idle {percent(idle)} of the time"
    uses = sorted((use for use in Use if use.idle), key=lambda use: -finding.share(use))[:2]
    reasons = [f"{percent(finding.share(use))} {USE_NAMES[use]}" for use in uses if finding.share(use) > 0.005]
    text += f": {listed(reasons)}." if reasons else "."
    for pair, without_s in finding.without.items():
        saved_s = finding.seconds - without_s
        if pair not in matters:
            continue
        if saved_s > WORTH_SAYING * finding.seconds:
            text += (
                f" Without the delay of links {pair[0]}↔{pair[1]} the same order of actions would take "
                f"{duration(without_s)}, {percent(saved_s / finding.seconds)} less."
            )
        else:
            text += f" The delay of links {pair[0]}↔{pair[1]} costs this order of actions next to nothing."
    return text
