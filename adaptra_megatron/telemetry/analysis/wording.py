# SPDX-License-Identifier: Apache-2.0
"""Figures of a recording in plain words."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from adaptra_megatron.schedule.replay.operations import OpType
from adaptra_megatron.schedule.replay.what_if import SLOWEST_WORKERS
from adaptra_megatron.schedule.routing.costs import Cell
from adaptra_megatron.telemetry.analysis.analysis import Analysis
from adaptra_megatron.telemetry.report.wording import duration, link_name, listed, percent

WORTH_SAYING = 1.03
"""Slowdowns below are no news."""
WORTH_A_ROW = 1.005
"""Links whose slowdown is below are not listed."""
_EXPLAINS = 0.25
"""Share of the slowdown from which on a cause is named."""
_SLOW_LINK = 1.02

OPTYPE_NAMES = {
    OpType.FORWARD: "forward",
    OpType.BACKWARD: "backward",
    OpType.BACKWARD_INPUT: "input gradient",
    OpType.BACKWARD_WEIGHT: "weight gradient",
    OpType.FORWARD_SEND: "activations on their way",
    OpType.BACKWARD_SEND: "gradients on their way",
    OpType.PARAMS_ALL_GATHER: "parameters, all-gather",
    OpType.GRADS_REDUCE_SCATTER: "gradients, reduce-scatter",
    OpType.LAYERNORM_ALL_REDUCE: "layernorm gradients, all-reduce",
    OpType.EMBEDDING_ALL_REDUCE: "embedding gradients, all-reduce",
    OpType.CLIP: "gradient norm and clipping",
    OpType.OPTIMIZER: "optimizer",
    OpType.GARBAGE: "garbage collection",
}


def cell_name(cell: Cell) -> str:
    """Such as "worker 0.3 (replica 0, stage 3)"."""
    return f"worker {cell} (replica {cell.replica}, stage {cell.stage})"


def times(slowdown: float) -> str:
    """Such as "1.98 ×"."""
    return f"{slowdown:.3f} ×"


def share(value: float) -> str:
    """M_W or M_S; never "-0.00"."""
    return f"{round(value, 2) + 0.0:.2f}"


def headline(analysis: Analysis) -> str:
    """The recording in one line."""
    found = analysis.stragglers
    if found.slowdown < WORTH_SAYING:
        return f"Nothing is slow: steps take {duration(_median(analysis))}"
    causes = list(_causes(analysis))
    because = listed(causes[:2]) if causes else "many small differences"
    return f"Steps take {found.slowdown:.2f} times as long as they need: {because}"


def _median(analysis: Analysis) -> float:
    return statistics.median(analysis.stragglers.recorded_s)


def _causes(analysis: Analysis) -> Iterator[str]:
    """The large ones, the largest first."""
    found = analysis.stragglers
    workers = "a slow worker" if len(found.slowest_workers) == 1 else "slow workers"
    shares = {
        workers: found.workers_share,
        "a long last stage": found.last_stage_share,
        "micro-batches of unequal length": found.lengths_share,
    }
    if max(shares.values()) < _EXPLAINS and max(found.by_link.values(), default=1.0) > _SLOW_LINK:
        yield "slow links"
    for name, explained in sorted(shares.items(), key=lambda entry: -entry[1]):
        if explained >= _EXPLAINS:
            yield name


def sentences(analysis: Analysis) -> list[str]:
    """What is slow, since when and what it costs, then the best remedy."""
    return [*_what_ran(analysis), *_what_is_slow(analysis), *_what_helps(analysis)]


def _what_ran(analysis: Analysis) -> Iterator[str]:
    found = analysis.stragglers
    replicas, stages = len({cell.replica for cell in analysis.cells}), len({cell.stage for cell in analysis.cells})
    count = len(found.numbers)
    yield (
        f"{count} step{'s' if count > 1 else ''} of {replicas} replica{'s' if replicas > 1 else ''} × {stages} "
        f"stages: {duration(_median(analysis))} a step. With every operation at the mean of its kind it would take "
        f"{duration(found.ideal_s)}: stragglers slow the job {found.slowdown:.3f} times."
    )
    worst = max(map(abs, found.replay_errors))
    yield f"Replayed, steps take what was recorded to within {worst:.2%}."
    at = analysis.steps_changed_at
    if at is not None:
        before_s, after_s = _around(analysis, at)
        yield f"From step {at} on a step took {duration(after_s)}, before {duration(before_s)}."
    if found.launch_slowdown >= WORTH_SAYING:
        yield (
            f"Hosts that issue their work late cost another {percent(found.launch_slowdown - 1.0)}: garbage "
            "collection, data loading, or processes that share cores."
        )


def _around(analysis: Analysis, step: int) -> tuple[float, float]:
    """Median seconds before a step, and from it on."""
    pairs = list(zip(analysis.stragglers.numbers, analysis.stragglers.recorded_s, strict=True))
    before, after = ([s for number, s in pairs if (number >= step) == late] for late in (False, True))
    return statistics.median(before), statistics.median(after)


def _what_is_slow(analysis: Analysis) -> Iterator[str]:
    found = analysis.stragglers
    if found.slowdown < WORTH_SAYING:
        return
    if found.workers_share >= _EXPLAINS:
        for cell in found.slowest_workers:
            since = _since(analysis.cells_changed_at[cell])
            slowness = analysis.slowness[cell]
            how = f"computes {slowness:.2f} times as long as its peers, {since}" if slowness > 1.0 else "is the slowest"
            yield f"{cell_name(cell).capitalize()} {how}."
        yield (
            f"The slowest {SLOWEST_WORKERS:.0%} of the workers explain {percent(found.workers_share)} of the slowdown "
            f"(M_W {share(found.workers_share)})."
        )
    if found.last_stage_share >= _EXPLAINS:
        last = max(analysis.stage_shares)
        yield (
            f"The last stage computes {analysis.stage_shares[last]:.2f} times as long as the mean stage, "
            f"{_since(analysis.stages_changed_at[last])}: it explains {percent(found.last_stage_share)} of the "
            f"slowdown (M_S {share(found.last_stage_share)}). Output layer and loss are work that others do not have."
        )
    if found.lengths_share >= _EXPLAINS:
        yield (
            f"Micro-batches take unequally long: {percent(found.lengths_share)} of the slowdown would go away if all "
            "of a step were equal. Long and short sequences do that, for attention grows with the square of a length."
        )
    slow_links = [link for link, each in found.by_link.items() if each > _SLOW_LINK]
    for link in slow_links[:3]:
        yield f"Messages of link {link_name(link)} cost {percent(found.by_link[link] - 1.0)} of a step."
    slowest = [optype for optype, each in found.by_optype.items() if each >= WORTH_SAYING]
    if slowest:
        costs = [f"{OPTYPE_NAMES[optype]} {percent(found.by_optype[optype] - 1.0)}" for optype in slowest]
        yield f"By operation, alone over the ideal: {listed(costs)}."


def _since(step: int | None) -> str:
    return "in all steps alike" if step is None else f"most clearly from step {step} on"


def _what_helps(analysis: Analysis) -> Iterator[str]:
    remedies = analysis.remedies
    if remedies.why_not:
        yield f"Remedies could not be tried: {remedies.why_not}."
        return
    best = max(remedies.rows, key=remedies.gain, default=None)
    if best is None or remedies.gain(best) < WORTH_SAYING - 1.0:
        yield "No remedy would bring much."
        return
    yield (
        f"Most is gained by this: {best.title[0].lower()}{best.title[1:]}. A step would take {duration(best.seconds)} "
        f"instead of {duration(remedies.now_s)}, {percent(remedies.gain(best))} less."
    )
    if analysis.left_out:
        yield f"{len(analysis.left_out)} steps are left out; the first: {analysis.left_out[0]}."
