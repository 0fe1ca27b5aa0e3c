# SPDX-License-Identifier: Apache-2.0
"""Findings of links that share their way between two hosts are one finding: whom it touches, and what it costs.

The detector judges each direction and each path of each pipeline's link apart; a cable that turns slow shows in all of
them, in every replica and lane. The log, `adaptra status` and the report name it once, by these functions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from adaptra_megatron.telemetry.events.events import LinkDetection

RECENT = 16
"""Iterations whose median stands for what they take."""
MEASURABLE = 0.01
"""Share of an iteration below which nothing is said to cost time."""
MOST_PAIRS = 3
"""Pairs of hosts that a line names."""


class Cable(NamedTuple):
    """Connection of two hosts; within one host, or where hosts are not known, between two stages."""

    hosts: tuple[str, ...]
    ends: tuple[int, ...]
    """The stages; none where two hosts tell it."""


class CableCost(NamedTuple):
    """Seconds of an iteration, by the median."""

    before_s: float
    now_s: float

    @property
    def seconds(self) -> float:
        """Return what is lost in each iteration."""
        return max(0.0, self.now_s - self.before_s)

    @property
    def share(self) -> float:
        """The same as a part of the iteration, 0..1."""
        return self.seconds / self.now_s if self.now_s > 0.0 else 0.0


def ends_of(event: LinkDetection) -> tuple[int, int]:
    """The two stages of a link, the lower one first."""
    return min(event.source, event.target), max(event.source, event.target)


def cable_of(event: LinkDetection) -> Cable:
    """The cable that the messages of a link take."""
    if event.source_host and event.target_host and event.source_host != event.target_host:
        return Cable(tuple(sorted((event.source_host, event.target_host))), ())
    return Cable((event.source_host,) if event.source_host else (), ends_of(event))


def cost_since(seconds: Mapping[int, float], since: int) -> CableCost | None:
    """Return what iterations took before iteration `since` and take since then. `seconds`: by iteration, in ascending
    order. None where one of them is not known."""
    before = [each for at, each in seconds.items() if at < since][-RECENT:]
    after = [each for at, each in seconds.items() if at >= since][-RECENT:]
    return CableCost(median(before), median(after)) if before and after else None


def links_in_words(events: Iterable[LinkDetection], both: str = "<->", one: str | None = None) -> str:
    """Such as "link 1<->2", "link 1->2, host path,", "links 0<->3 and 1<->2". `one`: between the ends of a link of
    which one direction is meant; None: the same."""
    events = list(events)
    directions: dict[tuple[int, int], set[int]] = defaultdict(set)
    for event in events:
        directions[ends_of(event)].add(event.source)
    names = []
    for (low, high), sources in sorted(directions.items()):
        source = low if one is None else min(sources)
        arrow = both if one is None or len(sources) > 1 else one
        names.append(f"{source}{arrow}{low + high - source}")
    path = ", host path," if all(event.path == "host" for event in events) else ""
    return f"link{'s' * (len(names) > 1)} {listed(names)}{path}"


def touched_in_words(events: Iterable[LinkDetection]) -> str:
    """Hosts, ranks, RNICs, replicas and lanes; "" where they are not known."""
    ends: dict[tuple[str, ...], dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    rnics: dict[str, set[str]] = defaultdict(set)
    replicas, lanes = set[int](), set[int]()
    for event in events:
        if event.source_rank is None or event.target_rank is None or not event.source_host or not event.target_host:
            continue
        pair = tuple(sorted((event.source_host, event.target_host)))
        ends[pair][event.source_host].add(event.source_rank)
        ends[pair][event.target_host].add(event.target_rank)
        rnics[event.source_host].update(event.source_rnics)
        rnics[event.target_host].update(event.target_rnics)
        replicas.update(() if event.replica is None else (event.replica,))
        lanes.update(() if event.lane is None else (event.lane,))
    if not ends:
        return ""
    pairs = [
        " to ".join(_host_in_words(host, ranks, rnics[host]) for host, ranks in sorted(of_hosts.items(), key=_first))
        for of_hosts in list(ends.values())[:MOST_PAIRS]
    ]
    if len(ends) > MOST_PAIRS:
        pairs.append(f"{len(ends) - MOST_PAIRS} more pairs of hosts")
    text = listed(pairs)
    text += f", {numbers_in_words('replica', replicas)}" if replicas else ""
    return text + (f", {numbers_in_words('lane', lanes)}" if lanes != {0} and lanes else "")


def numbers_in_words(what: str, numbers: Collection[int]) -> str:
    """Such as "rank 3", "ranks 0-3, 8"."""
    ordered = sorted(numbers)
    starts = [0, *(at for at, (one, next_) in enumerate(pairwise(ordered), 1) if next_ != one + 1), len(ordered)]
    spans = [(ordered[begin], ordered[end - 1]) for begin, end in pairwise(starts)]
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"{what}{'s' * (len(ordered) > 1)} {text}"


def listed(parts: Sequence[str]) -> str:
    """A, B and C."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _first(of_host: tuple[str, set[int]]) -> int:
    return min(of_host[1])


def _host_in_words(host: str, ranks: Collection[int], rnics: Collection[str]) -> str:
    by = f" ({', '.join(sorted(rnics))})" if rnics else ""
    return f"{numbers_in_words('rank', ranks)} on {host}{by}"
