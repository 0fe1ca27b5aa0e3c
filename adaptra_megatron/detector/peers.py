# SPDX-License-Identifier: Apache-2.0
"""What was slow from the start cannot be told from its own past: it is compared with its peers."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from adaptra_megatron.detector import words
from adaptra_megatron.detector.findings import State
from adaptra_megatron.detector.series import Change, Series
from adaptra_megatron.detector.settings import ChangeSettings

_MIN_REPLICAS = 2
_MIN_OTHERS = 3


class Place(NamedTuple):
    """Where a series belongs."""

    pipeline: int
    position: Any
    """The same in pipelines that do the same work."""
    sort: Any
    """Series of different sorts (paths; kinds of actions) are never compared."""
    work: Any = None
    """What it does: those of different positions are only compared where it is the same."""


def declare_slow_beside_peers(
    settled: Mapping[Place, Series],
    newly_settled: Iterable[Place],
    changes: ChangeSettings,
    iteration: int,
    action_s: float,
) -> dict[Place, Change]:
    """Declare those of `newly_settled` slow that are far above the median of their peers.

    Peers are the same position of the other pipelines, or, where those are too few, the other positions that do the
    same work: in an uneven pipeline (layouts, multi-token prediction) a stage with more layers is not slow.
    """
    newly_settled = list(newly_settled)
    if not newly_settled:
        return {}
    levels_s = {place: series.window.level().value for place, series in settled.items()}
    declared: dict[Place, Change] = {}
    for place in newly_settled:
        alike = {other: level_s for other, level_s in levels_s.items() if other.sort == place.sort and other != place}
        peers = [level_s for other, level_s in alike.items() if other.position == place.position]
        factor, who = changes.replica_factor, f"the same of {len(peers)} other pipelines"
        if len(peers) < _MIN_REPLICAS:
            own = [other for other in alike if (other.pipeline, other.work) == (place.pipeline, place.work)]
            peers = [alike[other] for other in own]
            factor, who = changes.peer_factor, f"{len(peers)} others of its pipeline"
            if len(peers) < _MIN_OTHERS:
                continue
        series, usual_s = settled[place], statistics.median(peers)
        excess_s = levels_s[place] - usual_s
        if series.state is State.SLOW or levels_s[place] <= factor * usual_s:
            continue
        if excess_s >= changes.material_s(usual_s, action_s):
            evidence = f"comparison with {who}, at {words.seconds(usual_s)}"
            declared[place] = series.declare_slow(max(0.0, usual_s), iteration, evidence)
    return declared
