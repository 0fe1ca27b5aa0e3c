# SPDX-License-Identifier: Apache-2.0
"""Numbers behind the page's bars and tables: where time went, by part, stage, cause and link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from adaptra_megatron.telemetry.events.event_wording import duration
from adaptra_megatron.tools.report.report_findings import Link, PartFinding, Use
from adaptra_megatron.tools.report.report_wording import WORTH_SAYING, cause_name, percent, span
from adaptra_megatron.tools.traces.waiting import Cause

MOST_CAUSES = 12
MOST_STAGES = 64
MOST_COLUMNS = 8


def use_class(use: Use) -> str:
    """CSS class of the colour that stands for `use`."""
    return f"use-{use.name.lower().replace('_', '-')}"


class Bar(NamedTuple):
    """One bar, stacked of uses of time."""

    name: str
    use_s: Mapping[Use, float]
    text: str
    """Label on the right of the bar."""
    mark_s: float | None = None
    """Position of a mark on the bar, in seconds from its start."""
    mark_text: str = ""

    @property
    def seconds(self) -> float:
        """Length of the bar."""
        return sum(self.use_s.values())


def part_bar(finding: PartFinding) -> Bar:
    """An iteration of one part of the run, marked where it would end without a link's delay."""
    alike = f" and {finding.alike} like them" if finding.alike else ""
    name = f"iterations {span(finding.part)}{alike}"
    text = f"{duration(finding.seconds)}, idle {percent(finding.idle_share)}"
    pair = min(finding.without, key=lambda pair: finding.without[pair], default=None)
    if pair is None or finding.without[pair] >= (1.0 - WORTH_SAYING) * finding.seconds:
        return Bar(name, finding.use_s, text)
    mark_s = finding.without[pair]
    mark_text = f"without the delay of links {pair[0]}↔{pair[1]}: {duration(mark_s)}"
    return Bar(name, finding.use_s, text, mark_s, mark_text)


def stage_bars(finding: PartFinding) -> list[Bar]:
    """A bar per stage for one part of the run."""
    bars = []
    for stage, use_s in enumerate(finding.stage_use_s[:MOST_STAGES]):
        idle_s = sum(seconds for use, seconds in use_s.items() if use.idle)
        bars.append(Bar(f"stage {stage}", use_s, f"idle {percent(idle_s / sum(use_s.values()))}"))
    return bars


def idle_causes(columns: Sequence[PartFinding]) -> list[tuple[str, list[float]]]:
    """Names of causes, the largest first, each with its share of all stages' time in every part of `columns`."""
    largest: dict[Cause, float] = {}
    for finding in columns:
        for cause, share in finding.causes.items():
            largest[cause] = max(share, largest.get(cause, 0.0))
    causes = sorted(largest, key=lambda cause: -largest[cause])
    rows = [
        (cause_name(cause), [finding.causes.get(cause, 0.0) for finding in columns]) for cause in causes[:MOST_CAUSES]
    ]
    if rest := causes[MOST_CAUSES:]:
        sums = [sum(finding.causes.get(cause, 0.0) for cause in rest) for finding in columns]
        rows.append((f"{len(rest)} more", sums))
    return rows


def slowest_links(columns: Sequence[PartFinding]) -> list[Link]:
    """All links that carried a message, by their largest median time of a message in any part, the slowest first."""
    worst: dict[Link, float] = {}
    for finding in columns:
        for link, found in finding.links.items():
            worst[link] = max(found.median_s, worst.get(link, 0.0))
    return sorted(worst, key=lambda link: (-worst[link], link))


def slowest_parts(findings: Sequence[PartFinding], most: int) -> list[PartFinding]:
    """At most `most` parts, in order of time: those whose iterations took longest, and the last."""
    if len(findings) <= most:
        return list(findings)
    slowest = sorted(findings[:-1], key=lambda finding: -finding.seconds)[: most - 1]
    return sorted([*slowest, findings[-1]], key=lambda finding: finding.part.first)
