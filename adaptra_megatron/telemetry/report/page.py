# SPDX-License-Identifier: Apache-2.0
"""Puts a run's findings on one HTML page that needs nothing but itself: no network, no other file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from adaptra_megatron.telemetry.events import (
    LinkDetection,
    PlanMade,
    PlanSwitched,
    RunEnded,
    RunStarted,
)
from adaptra_megatron.telemetry.report.charts import Mark, iteration_chart
from adaptra_megatron.telemetry.report.events_section import events_section, marks_of
from adaptra_megatron.telemetry.report.findings import SLOW_SHARE, PartFinding, Use, find, saved_seconds
from adaptra_megatron.telemetry.report.tables import cause_table, link_table, stacked_bars, stage_bars, use_class
from adaptra_megatron.telemetry.report.timelines import Timeline, slow_threshold_s
from adaptra_megatron.telemetry.report.wording import (
    USE_NAMES,
    duration,
    headline,
    mattering_pairs,
    percent,
    span,
    summary,
)
from adaptra_megatron.telemetry.run_record import Part, RunIteration, RunRecord, began_at

MOST_TIMELINES = 8
MOST_PARTS = 40
"""In bars and tables; of more, those whose iterations took longest and the last."""


class MissingIterationError(ValueError):
    """An iteration that the trace does not have; names those that it has."""


def report_page(run: RunRecord, *, iterations: Sequence[int] | None = None, title: str = "") -> str:
    """The page. `iterations`: which timelines to draw; None: a typical one of each part of the run.

    Raises MissingIterationError if one of `iterations` is not in the trace.
    """
    findings = find(run)
    shown = _shown_parts(findings)
    marks = marks_of(run)
    name = title or run.directory.resolve().name
    sections = [
        _header(run, findings, name),
        _summary_section(run, findings),
        _chart_section(run, findings, marks),
        events_section(run, findings, marks),
        *_traced_sections(run, [finding for finding in shown if finding.traced], iterations),
        _facts_section(run),
    ]
    assets = files("adaptra_megatron.telemetry.report")
    return (
        "<!DOCTYPE html>\n"
        '<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)}: {escape(headline(findings))}</title>"
        f"<style>{assets.joinpath('report.css').read_text(encoding='utf-8')}</style></head>\n"
        f"<body><main>{''.join(sections)}</main>"
        '<div class="tip" hidden></div>'
        f"<script>{assets.joinpath('report.js').read_text(encoding='utf-8')}</script></body></html>\n"
    )


def _traced_sections(run: RunRecord, shown: Sequence[PartFinding], iterations: Sequence[int] | None) -> list[str]:
    chosen = _chosen(run, shown, iterations)
    if not chosen:
        note = (
            "No iteration was traced, so nothing is known of where the time went. While the run goes on, ask for some: "
            f"adaptra trace {run.directory} --request next-5"
        )
        return [f'<section><h2>Where the time goes</h2><p class="note">{escape(note)}</p></section>']
    return [_time_section(shown), _links_section(shown), _timelines_section(chosen, shown)] if shown else []


def _header(run: RunRecord, findings: Sequence[PartFinding], name: str) -> str:
    facts = [name, f"{run.stages} pipeline stages"]
    if run.pipelines > 1:
        facts.append(f"the slowest of {run.pipelines} pipelines (ranks {', '.join(map(str, run.ranks))})")
    last = findings[-1]
    matters = mattering_pairs(findings, run.events)
    slow = sum((min(link), max(link)) in matters for link in _slow_links(run, last))
    switches = sum(isinstance(found.event, PlanSwitched) for found in run.events)
    tiles = [(duration(last.seconds), "an iteration, at the end", "")]
    if last.traced:
        tiles.append((percent(last.idle_share), "of the stages' time idle, at the end", ""))
    tiles += [
        (str(slow), f"slow link{'' if slow == 1 else 's'}, at the end", "bad" if slow else "good"),
    ]
    if run.events:
        saved = f"saved by {switches} plan switch{'' if switches == 1 else 'es'}, about"
        tiles.append((duration(saved_seconds(findings)), saved, ""))
    return (
        f"<header><h1>{escape(headline(findings))}</h1>"
        f'<p class="facts">{escape(" · ".join(facts))}</p></header><div class="tiles">'
        + "".join(
            f'<div class="tile"><b{_class(tone)}>{escape(value)}</b><span>{escape(label)}</span></div>'
            for value, label, tone in tiles
        )
        + "</div>"
    )


def _summary_section(run: RunRecord, findings: Sequence[PartFinding]) -> str:
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in summary(run, findings))
    return f'<section class="summary"><h2>In short</h2><ul>{items}</ul></section>'


def _chart_section(run: RunRecord, findings: Sequence[PartFinding], marks: Sequence[Mark]) -> str:
    matters = mattering_pairs(findings, run.events)
    slow = [
        (finding.part.first, finding.part.last)
        for finding in findings
        if any((min(link), max(link)) in matters for link in _slow_links(run, finding))
    ]
    legend = ['<li><span class="swatch line" style="border-color:var(--accent)"></span>time of an iteration</li>']
    if any(isinstance(found.event, PlanMade) for found in run.events):
        legend.append(
            '<li><span class="swatch line dashed" style="border-color:var(--good)"></span>'
            "no order of actions is faster (proven from the costs of the plan)</li>"
        )
    if slow:
        legend.append('<li><span class="swatch" style="background:var(--zone)"></span>a link is slow</li>')
    return (
        "<section><h2>Iteration time</h2>"
        '<p class="note">From the first action to the last one, over all stages. '
        "Iterations count from 0; Megatron's log is one ahead.</p>"
        f'<div class="scroll">{iteration_chart(run, slow, marks)}</div>'
        f'<ul class="legend">{"".join(legend)}</ul></section>'
    )


def _slow_links(run: RunRecord, finding: PartFinding) -> list[tuple[int, int]]:
    """As its trace shows, or else as the log says that they were at the end of that part."""
    if finding.traced:
        return finding.slow_links
    states = {}
    for found in run.events:
        if isinstance(found.event, LinkDetection) and began_at(found) <= finding.part.last:
            states[found.event.source, found.event.target] = found.event.after
    return [link for link, state in states.items() if state != "healthy"]


def _shown_parts(findings: Sequence[PartFinding]) -> list[PartFinding]:
    if len(findings) <= MOST_PARTS:
        return list(findings)
    slowest = sorted(findings[:-1], key=lambda finding: -finding.seconds)[: MOST_PARTS - 1]
    return sorted([*slowest, findings[-1]], key=lambda finding: finding.part.first)


def _time_section(shown: Sequence[PartFinding]) -> str:
    used = [use for use in Use if any(finding.share(use) > 0.0005 for finding in shown)]
    legend = "".join(f'<li><span class="swatch {use_class(use)}"></span>{escape(USE_NAMES[use])}</li>' for use in used)
    note = (
        "An iteration of each part of the run, as the mean over the stages. An idle stage waits for a link while the "
        "message is under way; before it is sent, for whatever keeps the sender, however far away."
    )
    if any(finding.without for finding in shown):
        legend += '<li><span class="swatch mark"></span>end, without the delay of the slowest link</li>'
        note += (
            " A delay also makes stages wait for each other: what it costs in all is what lies beyond the mark, where "
            "the same order of actions ends when simulated without the delay."
        )
    worst = max(shown, key=lambda finding: finding.idle_share)
    return (
        f'<section><h2>Where the time goes</h2><p class="note">{note}</p>'
        f'{stacked_bars(shown)}<ul class="legend">{legend}</ul>'
        f"<h2>What idle stages waited for</h2>{cause_table(shown)}"
        f"<h2>Stage by stage, iterations {span(worst.part)}</h2>{stage_bars(worst)}</section>"
    )


def _links_section(shown: Sequence[PartFinding]) -> str:
    if not any(finding.links for finding in shown):
        return ""
    return (
        "<section><h2>Links</h2>"
        '<p class="note">Median time of a message, from the end of the action that sent it to its arrival. Slow is '
        f"what takes more than {percent(SLOW_SHARE)} of a mean action's time in three of four messages. "
        "Receives that are bound to sends, as in stock's schedules, also show the delay of the next link.</p>"
        f"{link_table(shown)}</section>"
    )


def _chosen(
    run: RunRecord, shown: Sequence[PartFinding], iterations: Sequence[int] | None
) -> list[tuple[RunIteration, str]]:
    """The iterations to draw, each with what is to be said of it."""
    if iterations is None:
        ranked = sorted(shown, key=lambda finding: -len(finding.part.iterations) * finding.seconds)[:MOST_TIMELINES]
        parts = sorted((finding.part for finding in ranked), key=lambda part: part.first)
        return [(part.typical, _typical_of(part)) for part in parts]
    traced = {iteration.number: iteration for iteration in run.traced}
    for number in iterations:
        if number not in traced:
            what = (
                f"whose training iterations lie between {min(traced)} and {max(traced)}" if traced else "which is empty"
            )
            raise MissingIterationError(f"iteration {number} is not in the trace, {what}")
    return [(traced[number], "") for number in iterations]


def _typical_of(part: Part) -> str:
    return f"typical of iterations {span(part)}" if len(part.iterations) > 1 else ""


def _timelines_section(chosen: Sequence[tuple[RunIteration, str]], shown: Sequence[PartFinding]) -> str:
    slow_s = slow_threshold_s([iteration for iteration, _note in chosen], SLOW_SHARE)
    slowest = max(range(len(chosen)), key=lambda index: chosen[index][0].seconds)
    tabs = "".join(
        f'<button type="button" role="tab" aria-selected="false">iteration {iteration.number}</button>'
        for iteration, _note in chosen
    )
    panels = "".join(_panel(iteration, note, slow_s) for iteration, note in chosen)
    kinds = {record.kind for iteration, _note in chosen for record in iteration.records}
    uses = [use for use in Use if use.idle or use.value in kinds]
    legend = "".join(f'<li><span class="swatch {use_class(use)}"></span>{escape(USE_NAMES[use])}</li>' for use in uses)
    messages = (("f", "activation"), ("b", "gradient"), ("slow", "slow message"))
    legend += "".join(
        f'<li><span class="swatch line" style="border-color:var(--flight-{name})"></span>{text}</li>'
        for name, text in messages
    )
    return (
        "<section><h2>Timelines of stages and links</h2>"
        '<p class="note">A row per stage, the micro-batch in each bar. Lines between rows are messages: the flatter, '
        "the longer under way. Point at a bar, or touch it, to see what it is.</p>"
        f'<div class="tabs needs-script" data-first="{slowest}"><div class="tabs" role="tablist">{tabs}</div>'
        '<button type="button" class="zoom" aria-pressed="false">3 × wider</button></div>'
        f'{panels}<ul class="legend">{legend}</ul></section>'
    )


def _panel(iteration: RunIteration, note: str, slow_s: float) -> str:
    timeline = Timeline(iteration, slow_s)
    data = timeline.data()
    text = f"Iteration {iteration.number}, {duration(iteration.seconds)}{f', {note}' if note else ''}"
    script = ""
    if data is not None:
        # "</" would end the script for the parser, wherever it stands.
        encoded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
        script = f'<script type="application/json">{encoded}</script>'
    return f'<div class="panel"><h3>{escape(text)}</h3><div class="scroll">{timeline.svg()}</div>{script}</div>'


def _facts_section(run: RunRecord) -> str:
    start = next((found.event for found in run.events if isinstance(found.event, RunStarted)), None)
    facts: list[tuple[str, str]] = [("traces", str(run.directory)), ("ranks shown", ", ".join(map(str, run.ranks)))]
    if start is not None:
        facts += [(name, str(value)) for name, value in start.layout.items()]
        facts += [(name, str(value)) for name, value in start.versions.items()]
        facts += [(f"setting {name}", str(value)) for name, value in start.config.items()]
    ended = next((found.event.reason for found in run.events if isinstance(found.event, RunEnded)), None)
    if run.events:
        facts.append(("end", ended if ended is not None else "none in the log: it runs on, or was killed"))
    entries = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)
    return f"<section><details><summary>The run</summary><dl>{entries}</dl></details></section>"


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""
