# SPDX-License-Identifier: Apache-2.0
"""Figures of one iteration, from its records."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from adaptra_megatron.telemetry.action_records import ActionRecord


def iteration_span_s(records: Iterable[ActionRecord]) -> tuple[float, float]:
    """`(start_s, end_s)`: when the first action of any stage began to compute and when the last one ended.

    Raises ValueError without records.
    """
    starts_s, ends_s = zip(*((record.start_s, record.end_s) for record in records), strict=True)
    return min(starts_s), max(ends_s)


def bubble_fraction(records: Iterable[ActionRecord]) -> dict[int, float]:
    """For each stage, the fraction of one iteration (0..1) in which it did not compute.

    `records` are those of one iteration and of every stage; the iteration lasts from the first start to the last end
    over all stages. Ranks that share a stage (data or tensor parallel) count as one stage at their mean.
    Raises ValueError if there are no records or they are of several iterations.
    """
    records = list(records)
    iterations = {record.iteration for record in records}
    if len(iterations) != 1:
        raise ValueError(f"the bubble is that of one iteration; got records of iterations {sorted(iterations)}")
    start_s, end_s = iteration_span_s(records)
    computed_s: dict[int, float] = defaultdict(float)
    ranks: dict[int, Counter[tuple[str, int, int]]] = defaultdict(Counter)
    for record in records:
        computed_s[record.stage] += record.compute_s
        ranks[record.stage][record.kind, record.chunk, record.micro_batch] += 1
    return {
        stage: 1.0 - computed_s[stage] / max(ranks[stage].values()) / (end_s - start_s) for stage in sorted(computed_s)
    }
