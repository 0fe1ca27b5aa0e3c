# SPDX-License-Identifier: Apache-2.0
"""Describe the figures of a recording in sentences."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from adaptra_megatron.common.layout import Cell
from adaptra_megatron.telemetry.event_wording import link_name
from adaptra_megatron.telemetry.log_lines import duration, listed, percent
from adaptra_megatron.tools.replay.analysis import Analysis
from adaptra_megatron.tools.replay.operations import OpType
from adaptra_megatron.tools.replay.remedies import SLOW_CELL
from adaptra_megatron.tools.replay.replayed_what_if import SLOWEST_WORKERS, ReplayedStragglers

WORTH_SAYING = 1.03
"""Slowdown from which on it is mentioned."""
WORTH_A_ROW = 1.005
"""Slowdown from which on a link is listed."""
_EXPLAINS = 0.25
"""Share of the slowdown from which on a cause is named."""
_SLOW_LINK = 1.02
_COSTLY = 1.1
"""Slowdown by messages from which on it is mentioned even if all links are alike."""
_LONG_STAGE = 1.05
"""Computation of a stage relative to the mean stage, from which on it is called long."""
_MOST_NOTES = 6

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
    """Format a cell, such as "worker 0.3 (replica 0, stage 3)"."""
    return f"worker {cell} (replica {cell.replica}, stage {cell.stage})"


def times(slowdown: float) -> str:
    """Format a slowdown, such as "1.980 ×"."""
    return f"{slowdown:.3f} ×"


def share(value: float) -> str:
    """Format M_W or M_S; never "-0.00"."""
    return f"{round(value, 2) + 0.0:.2f}"


def headline(analysis: Analysis) -> str:
    """Summarize the analysis in one line."""
    if analysis.doubt:
        return "The recording is not understood: its replay does not explain it"
    worst = max(analysis.parts, key=lambda part: part.stragglers.slowdown, default=None)
    found = analysis.stragglers if worst is None else worst.stragglers
    if found.slowdown < WORTH_SAYING:
        if found.messages_slowdown >= _COSTLY:
            return (
                f"Nothing is slower than its peers, but messages between stages cost "
                f"{percent(1.0 - 1.0 / found.messages_slowdown)} of a step"
            )
        return f"Nothing is slow: steps take {duration(_median(analysis))}"
    causes = list(_causes(analysis, found))
    because = listed(causes[:2]) if causes else "many small differences"
    one = worst is not None and len(found.numbers) == 1
    steps = "Steps" if worst is None else _steps(found)
    take, needs = ("takes", "it needs") if one else ("take", "they need")
    return f"{steps} {take} {found.slowdown:.2f} times as long as {needs}: {because}"


def _steps(found: ReplayedStragglers) -> str:
    first, last = found.numbers[0], found.numbers[-1]
    return f"Step {first}" if first == last else f"Steps {first} to {last}"


def _median(analysis: Analysis) -> float:
    return statistics.median(analysis.stragglers.recorded_s)


def _causes(analysis: Analysis, found: ReplayedStragglers) -> Iterator[str]:
    """Yield the large causes, the largest first."""
    slow, long = _slow_workers(analysis), _long_stage(analysis)
    lost = found.slowdown - 1.0
    shares = {
        "a slow worker" if len(slow) == 1 else "slow workers": found.workers_share if slow else 0.0,
        "a long last stage" if long == max(analysis.stage_shares) else f"a long stage {long}": (
            0.0 if long is None else max(found.last_stage_share, 0.0 if slow else found.workers_share)
        ),
        "micro-batches of unequal length": found.lengths_share,
        "slow links": (max(found.by_link.values(), default=1.0) - 1.0) / lost if _slow_links(found) else 0.0,
    }
    for name, explained in sorted(shares.items(), key=lambda entry: -entry[1]):
        if explained >= _EXPLAINS:
            yield name


def _slow_workers(analysis: Analysis) -> list[Cell]:
    """Return the slowest workers that are slower than their peers, if they explain something. Without peers, a slow
    worker cannot be distinguished from a long stage."""
    found = analysis.stragglers
    if len(found.by_replica) == 1 or found.workers_share < _EXPLAINS:
        return []
    return [cell for cell in found.slowest_workers if analysis.slowness[cell] >= SLOW_CELL]


def _long_stage(analysis: Analysis) -> int | None:
    """Return the stage that is longer than the others, apart from slow workers; None if that explains nothing."""
    found = analysis.stragglers
    paces: dict[int, list[float]] = {}
    for cell, slowness in analysis.slowness.items():
        paces.setdefault(cell.stage, []).append(slowness)
    usual = {stage: share / statistics.fmean(paces[stage]) for stage, share in analysis.stage_shares.items()}
    mean = statistics.fmean(usual.values())
    longest, last = max(usual, key=lambda stage: usual[stage]), max(usual)
    if found.last_stage_share >= _EXPLAINS and usual[last] > _LONG_STAGE * mean:
        return last
    explains = found.workers_share >= _EXPLAINS and found.slowest_workers[0].stage == longest
    return longest if explains and usual[longest] > _LONG_STAGE * mean else None


def _slow_links(found: ReplayedStragglers) -> list[tuple[int, int]]:
    return [link for link, each in found.by_link.items() if each > _SLOW_LINK]


def sentences(analysis: Analysis) -> list[str]:
    """Return sentences: what is slow, since when, at what cost, and the best remedy; or why the recording is not
    understood."""
    said = (
        [_of_all(analysis), f"{analysis.doubt[0].upper()}{analysis.doubt[1:]}."]
        if analysis.doubt
        else [
            *_what_ran(analysis),
            *_what_is_slow(analysis),
            *_what_helps(analysis),
        ]
    )
    notes = analysis.recording.notes
    more = [f"{len(notes) - _MOST_NOTES} more notes are in --json."] if len(notes) > _MOST_NOTES else []
    return [*said, *notes[:_MOST_NOTES], *more, *_what_is_left_out(analysis)]


def _of_all(analysis: Analysis) -> str:
    found = analysis.stragglers
    replicas, stages = len(found.by_replica), len(found.by_stage)
    count = len(found.numbers)
    return (
        f"{count} step{'s' if count > 1 else ''} of {replicas} replica{'s' if replicas > 1 else ''} × {stages} "
        f"stage{'s' if stages > 1 else ''}: {duration(_median(analysis))} a step."
    )


def _what_ran(analysis: Analysis) -> Iterator[str]:
    found = analysis.stragglers
    yield (
        f"{_of_all(analysis)} With every operation at the mean of its kind it would take "
        f"{duration(found.ideal_s)}: stragglers slow the job {found.slowdown:.3f} times."
    )
    worst = max(map(abs, found.replay_errors))
    yield f"Replayed, steps take what was recorded to within {worst:.2%}."
    for part in analysis.parts:
        found_then = part.stragglers
        median_s = statistics.median(found_then.recorded_s)
        slow = f", {found_then.slowdown:.2f} times what they need" if found_then.slowdown >= WORTH_SAYING else ""
        links = [
            f", link {link_name(link)} {percent(found_then.by_link[link] - 1.0)}"
            for link in _slow_links(found_then)[:2]
        ]
        why = f" ({part.why})" if part.why else ""
        yield f"{_steps(found_then)}{why}: {duration(median_s)}{slow}{''.join(links)}."
    at = None if analysis.parts else analysis.steps_changed_at
    if at is not None:
        before_s, after_s = _around(analysis, at)
        yield f"From step {at} on a step took {duration(after_s)}, before {duration(before_s)}."
    if found.launch_slowdown >= WORTH_SAYING:
        yield (
            f"Hosts that issue their work late cost another {percent(found.launch_slowdown - 1.0)}: garbage "
            "collection, data loading, or processes that share cores."
        )


def _around(analysis: Analysis, step: int) -> tuple[float, float]:
    """Return the median seconds before a step, and from it on."""
    pairs = list(zip(analysis.stragglers.numbers, analysis.stragglers.recorded_s, strict=True))
    before, after = ([s for number, s in pairs if (number >= step) == late] for late in (False, True))
    return statistics.median(before), statistics.median(after)


def _what_is_slow(analysis: Analysis) -> Iterator[str]:
    found = analysis.stragglers
    if found.messages_slowdown >= _COSTLY:
        yield f"Messages between stages cost {percent(1.0 - 1.0 / found.messages_slowdown)} of a step."
    if found.slowdown < WORTH_SAYING:
        return
    slow, long = _slow_workers(analysis), _long_stage(analysis)
    for cell in slow:
        since = _since(analysis.cells_changed_at[cell])
        slowness = analysis.slowness[cell]
        yield f"{cell_name(cell).capitalize()} computes {slowness:.2f} times as long as its peers, {since}."
    if slow:
        yield (
            f"The slowest {SLOWEST_WORKERS:.0%} of the workers explain {_explained(found.workers_share)} of the "
            f"slowdown (M_W {share(found.workers_share)})."
        )
    if long is not None:
        yield from _of_stage(analysis, long)
    if found.lengths_share >= _EXPLAINS:
        yield (
            f"Micro-batches take unequally long: {_explained(found.lengths_share)} of the slowdown would go away if "
            "all of a step were equal. Long and short sequences do that: attention grows with the square of a length."
        )
    for link in _slow_links(found)[:3]:
        yield f"Messages of link {link_name(link)} cost {percent(found.by_link[link] - 1.0)} of a step."
    if _slow_links(found):
        yield (
            "How the cost of a link is divided between its two directions depends on how well the clocks of its hosts "
            "agree; the cost of both together does not."
        )
    slowest = [optype for optype, each in found.by_optype.items() if each >= WORTH_SAYING]
    if slowest:
        costs = [f"{OPTYPE_NAMES[optype]} {percent(found.by_optype[optype] - 1.0)}" for optype in slowest]
        yield f"By operation, alone over the ideal: {listed(costs)}."


def _explained(value: float) -> str:
    """Format a share; shares above 1 are "all"."""
    return percent(value) if value < 1.0 else "all"


def _of_stage(analysis: Analysis, stage: int) -> Iterator[str]:
    found = analysis.stragglers
    last = stage == max(analysis.stage_shares)
    name = "The last stage" if last else f"Stage {stage}"
    explained, letters = (found.last_stage_share, "M_S") if last else (found.workers_share, "M_W")
    why = "Output layer and loss are work that others do not have." if last else ""
    if len(found.by_replica) == 1:
        why = f"{why} With one replica, a slow worker there would look the same.".strip()
    yield (
        f"{name} computes {analysis.stage_shares[stage]:.2f} times as long as the mean stage, "
        f"{_since(analysis.stages_changed_at[stage])}: it explains {_explained(explained)} of the slowdown "
        f"({letters} {share(explained)}). {why}".strip()
    )


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


def _what_is_left_out(analysis: Analysis) -> Iterator[str]:
    count = len(analysis.left_out)
    if count:
        yield f"{count} step{'s are' if count > 1 else ' is'} left out; the first: {analysis.left_out[0]}."
