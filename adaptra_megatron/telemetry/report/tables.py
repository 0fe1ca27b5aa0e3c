# SPDX-License-Identifier: Apache-2.0
"""Bars and tables of the page, as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from adaptra_megatron.telemetry.report.findings import Link, LinkFinding, PartFinding, Use
from adaptra_megatron.telemetry.report.wording import (
    USE_NAMES,
    WORTH_SAYING,
    cause_name,
    duration,
    link_name,
    percent,
    span,
)
from adaptra_megatron.telemetry.waiting import Cause

MOST_CAUSES = 12
MOST_STAGES = 64
MOST_LINKS = 24
MOST_COLUMNS = 8


def use_class(use: Use) -> str:
    """CSS class of the colour that stands for `use`."""
    return f"use-{use.name.lower().replace('_', '-')}"


def table(headings: Sequence[str], rows: Iterable[str]) -> str:
    """`rows` are <tr> elements. A heading that begins with "#" stands over numbers."""
    head = "".join(
        f'<th class="number">{escape(heading[1:])}</th>' if heading.startswith("#") else f"<th>{escape(heading)}</th>"
        for heading in headings
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


class _Bar(NamedTuple):
    name: str
    use_s: Mapping[Use, float]
    text: str
    """On its right."""
    mark_s: float | None = None
    """Where a mark stands on it."""
    mark_text: str = ""


def stacked_bars(findings: Sequence[PartFinding]) -> str:
    """A bar per part of the run, as long as an iteration of it, marked where it would end without a link's delay."""
    bars = []
    for finding in findings:
        pair = min(finding.without, key=lambda pair: finding.without[pair], default=None)
        mark_s, mark_text = None, ""
        if pair is not None and finding.without[pair] < (1.0 - WORTH_SAYING) * finding.seconds:
            mark_s = finding.without[pair]
            mark_text = f"without the delay of links {pair[0]}↔{pair[1]}: {duration(mark_s)}"
        text = f"{duration(finding.seconds)}, idle {percent(finding.idle_share)}"
        bars.append(_Bar(f"iterations {span(finding.part)}", finding.use_s, text, mark_s, mark_text))
    return _bars(bars)


def stage_bars(finding: PartFinding) -> str:
    """A bar per stage for one part of the run."""
    bars = []
    for stage, use_s in enumerate(finding.stage_use_s[:MOST_STAGES]):
        total_s = sum(use_s.values())
        idle_s = sum(seconds for use, seconds in use_s.items() if use.idle)
        bars.append(_Bar(f"stage {stage}", use_s, f"idle {percent(idle_s / total_s)}"))
    return _bars(bars)


def _bars(bars: Sequence[_Bar]) -> str:
    longest_s = max(sum(bar.use_s.values()) for bar in bars)
    parts = ['<div class="bars">']
    for bar in bars:
        pieces = "".join(
            f'<i class="{use_class(use)}" style="width:{100 * bar.use_s[use] / longest_s:.2f}%" '
            f'title="{escape(USE_NAMES[use])}: {duration(bar.use_s[use])}"></i>'
            for use in Use
            if bar.use_s.get(use, 0.0) > 1e-4 * longest_s
        )
        if bar.mark_s is not None:
            left = 100 * bar.mark_s / longest_s
            pieces += f'<b style="left:{left:.2f}%" title="{escape(bar.mark_text)}"></b>'
        parts.append(
            f'<div class="bar"><div class="name">{escape(bar.name)}</div><div class="stack">{pieces}</div>'
            f"<div>{escape(bar.text)}</div></div>"
        )
    return "".join([*parts, "</div>"])


def cause_table(findings: Sequence[PartFinding]) -> str:
    """Share of all stages' time by what was waited for, a column per part."""
    columns = _columns(findings)
    largest: dict[Cause, float] = {}
    for finding in columns:
        for cause, share in finding.causes.items():
            largest[cause] = max(share, largest.get(cause, 0.0))
    causes = sorted(largest, key=lambda cause: -largest[cause])
    rows = []
    for cause in causes[:MOST_CAUSES]:
        cells = "".join(f'<td class="number">{_share(finding.causes.get(cause, 0.0))}</td>' for finding in columns)
        rows.append(f"<tr><td>{escape(cause_name(cause))}</td>{cells}</tr>")
    rest = causes[MOST_CAUSES:]
    if rest:
        sums = (sum(finding.causes.get(cause, 0.0) for cause in rest) for finding in columns)
        cells = "".join(f'<td class="number">{_share(share)}</td>' for share in sums)
        rows.append(f"<tr><td>{len(rest)} more</td>{cells}</tr>")
    return table(("share of all stages' time, in iterations", *_headings(columns)), rows)


def link_table(findings: Sequence[PartFinding]) -> str:
    """Median time of a message by link, a column per part, the slowest links first."""
    columns = _columns(findings)
    worst: dict[Link, float] = {}
    for finding in columns:
        for link, found in finding.links.items():
            worst[link] = max(found.median_s, worst.get(link, 0.0))
    links = sorted(worst, key=lambda link: (-worst[link], link))
    rows = [
        f'<tr><td class="nowrap">{escape(link_name(link))}</td>'
        + "".join(_link_cell(finding.links.get(link)) for finding in columns)
        + "</tr>"
        for link in links[:MOST_LINKS]
    ]
    text = table(("link, in iterations", *_headings(columns)), rows)
    if len(links) > MOST_LINKS:
        text += f'<p class="note">{len(links) - MOST_LINKS} quicker links are left out.</p>'
    return text


def _link_cell(found: LinkFinding | None) -> str:
    if found is None:
        return '<td class="number">–</td>'
    details = f"{found.messages} messages, at most {duration(found.worst_s)}"
    tone = " bad" if found.slow else ""
    return f'<td class="number{tone}" title="{details}">{duration(found.median_s)}{" slow" if found.slow else ""}</td>'


def _columns(findings: Sequence[PartFinding]) -> list[PartFinding]:
    """The slowest parts and the last, in order of time."""
    if len(findings) <= MOST_COLUMNS:
        return list(findings)
    slowest = sorted(findings[:-1], key=lambda finding: -finding.seconds)[: MOST_COLUMNS - 1]
    return sorted([*slowest, findings[-1]], key=lambda finding: finding.part.first)


def _headings(columns: Sequence[PartFinding]) -> list[str]:
    return [f"#{span(finding.part)}" for finding in columns]


def _share(share: float) -> str:
    return percent(share) if share >= 0.0005 else "–"
