# SPDX-License-Identifier: Apache-2.0
"""What comes again and again in a long run, told once: parts that are alike, and changes that are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from adaptra_megatron.telemetry.report.findings import PartFinding

ALIKE = 0.05
"""Relative difference of iteration times, or of idle shares, up to which parts of a run are alike."""
LEAST_TIMES = 3
MOST_PARTS_ALONE = 8
"""Parts up to which each is shown, whatever it is like."""
Change = tuple[PartFinding, PartFinding]
"""A part of the run and the next one."""


def distinct(findings: Sequence[PartFinding]) -> list[PartFinding]:
    """The first of each kind of part, with the number of others like it, and the last part; all of a short run."""
    if len(findings) <= MOST_PARTS_ALONE:
        return list(findings)
    kinds: list[PartFinding] = []
    for finding in findings[:-1]:
        index = next((index for index, kind in enumerate(kinds) if _alike(kind, finding)), None)
        if index is None:
            kinds.append(finding)
        else:
            kinds[index] = replace(kinds[index], alike=kinds[index].alike + 1)
    return [*kinds, findings[-1]]


def repetitions(changes: Sequence[Change]) -> list[list[Change]]:
    """Changes of iteration time that come at least `LEAST_TIMES` times, the most frequent first."""
    groups: list[list[Change]] = []
    for change in changes:
        group = next((group for group in groups if _same_change(group[0], change)), None)
        if group is None:
            groups.append([change])
        else:
            group.append(change)
    return sorted((group for group in groups if len(group) >= LEAST_TIMES), key=lambda group: -len(group))


def _near(first: float, second: float) -> bool:
    return abs(first - second) <= ALIKE * max(first, second)


def _alike(one: PartFinding, other: PartFinding) -> bool:
    if not _near(one.seconds, other.seconds) or one.traced != other.traced:
        return False
    if not one.traced:
        return True
    return abs(one.idle_share - other.idle_share) <= ALIKE and set(one.slow_links) == set(other.slow_links)


def _same_change(one: Change, other: Change) -> bool:
    kinds = [{type(found.event) for found in after.part.beginning} for _before, after in (one, other)]
    return kinds[0] == kinds[1] and _near(one[0].seconds, other[0].seconds) and _near(one[1].seconds, other[1].seconds)
