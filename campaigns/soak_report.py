# SPDX-License-Identifier: Apache-2.0
"""What a fault campaign showed: what struck, how soon traffic flowed again, and what is wrong. Pure, but for reading
the ranks' records."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from campaigns.soak_driver import Done
from testing.soak.soak_plan import HASTY_PATHS, LONGEST_RECOVERY_S, Fault, Kind

_HELD_UP = frozenset({Kind.STOP_RANK, Kind.STOP_RANK_LONG, Kind.STOP_STORE})
"""Faults that stop what the training waits for, or what decides: no link can help standing meanwhile."""


@dataclass(frozen=True)
class Recovery:
    """How long a fault kept messages from arriving."""

    kind: Kind
    stage: int
    pause_s: float
    """The longest time without an arrival over one of the directed links concerned that begins between the fault and
    the next one, less that for which a rank or the store was stopped."""


@dataclass
class TrainingRecord:
    """What is known of one training of a campaign."""

    name: str
    planned: Sequence[Fault]
    done: Sequence[Done]
    ranks: Sequence[Mapping[str, Any]]
    """What `SoakRank` wrote, by stage."""
    problems: list[str] = field(default_factory=list)

    def strikes(self) -> dict[Kind, int]:
        """Faults that have demonstrably happened."""
        counts = dict.fromkeys(Kind, 0)
        for done in self.done:
            counts[done.fault.kind] += 1
        for kind, _link, _at_s in self._path_strikes():
            counts[kind] += 1
        return counts

    def recoveries(self) -> list[Recovery]:
        """One for each fault that happened."""
        links = {
            (int(source), target): sorted(times)
            for target, rank in enumerate(self.ranks)
            for source, times in rank["arrivals"].items()
        }
        struck: list[tuple[float, Kind, int, tuple[int, int] | None]] = [
            (done.at_s, done.fault.kind, done.fault.stage, None) for done in self.done
        ]
        struck += [(at_s, kind, link[0], link) for kind, link, at_s in self._path_strikes()]
        struck.sort(key=lambda strike: strike[0])
        stops = [(done.at_s, done.over_s) for done in self.done if done.fault.kind in _HELD_UP]
        found = []
        for index, (at_s, kind, stage, link) in enumerate(struck):
            until_s = struck[index + 1][0] if index + 1 < len(struck) else float("inf")
            concerned = [link] if link is not None else [each for each in links if stage in each]
            pauses = (longest_pause_s(links[each], at_s, until_s, stops) for each in concerned)
            found.append(Recovery(kind, stage, max(pauses)))
        return found

    def check(self, messages: int, longest_recovery_s: float = LONGEST_RECOVERY_S) -> None:
        """Add to `problems` whatever the records show to be wrong. `messages`: what all ranks together must receive."""
        counts = self.strikes()
        for kind in Kind:
            planned = sum(fault.kind is kind for fault in self.planned)
            if counts[kind] != planned:
                self.problems.append(f"{counts[kind]} of {planned} faults happened: {kind.value}")
        received = sum(rank["messages"] for rank in self.ranks)
        waited = sum(len(times) for rank in self.ranks for times in rank["arrivals"].values())
        if not received == waited == messages:
            self.problems.append(f"{received} messages were received in {waited} waits instead of {messages}")
        for stage, rank in enumerate(self.ranks):
            before, after = rank["held_before"], rank["held_after"]
            more = {name: f"{before[name]} -> {after[name]}" for name in after if after[name] > before[name]}
            if more:
                self.problems.append(f"stage {stage} holds more after the training than before: {more}")
            for peer in (peer for peer in (stage - 1, stage + 1) if 0 <= peer < len(self.ranks)):
                paths = rank["paths"].get(str(peer), {})
                other = {name: paths.get(name) for name, value in HASTY_PATHS.items() if paths.get(name) != value}
                if other:
                    self.problems.append(f"link {stage}>{peer} ran with {other} instead of {HASTY_PATHS}")
        for recovery in self.recoveries():
            if recovery.pause_s > longest_recovery_s:
                self.problems.append(
                    f"after {recovery.kind.value} of stage {recovery.stage}, a link stood for {recovery.pause_s:.2f} s"
                )

    def _path_strikes(self) -> list[tuple[Kind, tuple[int, int], float]]:
        found = []
        for stage, rank in enumerate(self.ranks):
            for strike in rank["begun"]:
                source, target = strike["link"]
                raising = Kind.FAILING_SENDS if source == stage else Kind.FAILING_RECEIVES
                kind = Kind.SILENT_PATH if strike["mode"] == "silent" else raising
                found.append((kind, (source, target), float(strike["at_s"])))
        return found


def longest_pause_s(
    arrivals: Sequence[float], from_s: float, until_s: float, stops: Sequence[tuple[float, float]] = ()
) -> float:
    """The longest time without an arrival that begins between the two; `arrivals` in ascending order.

    `stops`: from when until when time does not count.
    """
    points = [from_s, *(arrived_s for arrived_s in arrivals if arrived_s > from_s)]
    pauses = [
        after - before - sum(max(0.0, min(after, over_s) - max(before, at_s)) for at_s, over_s in stops)
        for before, after in itertools.pairwise(points)
        if before < until_s
    ]
    return max(pauses, default=0.0)


def percentile(values: Sequence[float], fraction: float) -> float:
    """The smallest value that at least this fraction of all does not exceed; 0 where there are none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, -(-int(fraction * 1000) * len(ordered) // 1000) - 1)]


def read_ranks(directory: Path, stages: int) -> list[dict[str, Any]]:
    """What the ranks of one training wrote. Raises FileNotFoundError if one did not come to its end."""
    return [json.loads((directory / f"rank{stage}.json").read_text()) for stage in range(stages)]


def table(records: Sequence[TrainingRecord]) -> str:
    """Faults and recoveries of all trainings, by kind, for people."""
    rows: list[tuple[str, ...]] = [("fault", "planned", "happened", "traffic stood, median", "99%", "longest")]
    counts = [record.strikes() for record in records]
    pauses = [(recovery.kind, recovery.pause_s) for record in records for recovery in record.recoveries()]
    for kind in Kind:
        planned = sum(fault.kind is kind for record in records for fault in record.planned)
        of_kind = [pause_s for each, pause_s in pauses if each is kind]
        figures = [f"{percentile(of_kind, fraction):.2f} s" for fraction in (0.5, 0.99, 1.0)]
        rows.append((kind.value, str(planned), str(sum(count[kind] for count in counts)), *figures))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
