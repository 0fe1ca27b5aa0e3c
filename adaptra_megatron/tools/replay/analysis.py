# SPDX-License-Identifier: Apache-2.0
"""Compute the figures of `adaptra analyze`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from adaptra_megatron.common.layout import Cell
from adaptra_megatron.schedule.jobs.job_simulation import Progress
from adaptra_megatron.tools.recordings.recording import Recording
from adaptra_megatron.tools.replay.operations import RecordedStep, ReplayError
from adaptra_megatron.tools.replay.remedies import Remedies, Remedy, remedies_for
from adaptra_megatron.tools.replay.replay_engine import (
    ReplayBatch,
    batches_of,
    changed_at,
    paces_of,
    slowness_of,
    stage_paces_of,
)
from adaptra_megatron.tools.replay.replay_graph import StepGraph, StepTimes, graph_of
from adaptra_megatron.tools.replay.replayed_what_if import ReplayedStragglers, ideal_seconds, stragglers_of

CREDIBLE = 0.05
"""Share of a step by which a replay may differ from the recording and still explain it."""
_TOO_LONG = 0.02
"""Share of a step by which the ideal step may be longer than the recorded one."""


@dataclass(frozen=True, kw_only=True)
class PartAnalysis:
    """Consecutive steps between two changes in the log of a run."""

    why: str
    """The change that began it; empty for the first part."""
    stragglers: ReplayedStragglers
    """Compared with the ideals of the whole recording."""


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """Result of the analysis of a recording."""

    recording: Recording
    """The replayed steps."""
    left_out: tuple[str, ...]
    """Why other steps could not be replayed."""
    stragglers: ReplayedStragglers
    doubt: str
    """Why the replay does not explain the recording, so that neither cause nor remedy is named; empty if it does."""
    parts: tuple[PartAnalysis, ...]
    """Empty, or more than one."""
    slowness: dict[Cell, float]
    """Time of each cell relative to the others of its stage."""
    stage_shares: dict[int, float]
    """Computation of each stage relative to the mean of all stages."""
    steps_changed_at: int | None
    """The step from which on step times differ; None if they do not."""
    cells_changed_at: dict[Cell, int | None]
    stages_changed_at: dict[int, int | None]
    remedies: Remedies
    activation_gib: float | None
    """GiB of one micro-batch's activations on a stage, if given."""

    @property
    def cells(self) -> tuple[Cell, ...]:
        return self.recording.steps[0].cells

    def extra_gib(self, remedy: Remedy) -> float | None:
        """Return the additional GiB that a remedy takes on a stage; None if unknown."""
        return None if self.activation_gib is None else self.activation_gib * remedy.extra_activations


def analyse(recording: Recording, *, activation_gib: float | None = None, progress: Progress | None = None) -> Analysis:
    """Replay `recording` and its what-if questions. Raises ReplayError if no step can be replayed."""
    tell = progress or (lambda doing, done, total: None)
    tell("analysing", 0, 4)
    steps, batches, left_out = replayable(recording)
    tell("analysing", 1, 4)
    stragglers = stragglers_of(steps, batches)
    doubt = doubt_of(stragglers.recorded_s, stragglers.replayed_s, stragglers.prompt_s, stragglers.ideal_s)
    tell("analysing", 2, 4)
    parts = () if doubt else _parts(recording, steps, batches)
    tell("analysing", 3, 4)
    paces, stage_paces = paces_of(batches), stage_paces_of(batches)
    remedies = Remedies(step=typical(steps).number, now_s=0.0, pipelines_s=0.0, rows=(), why_not=doubt)
    return Analysis(
        recording=replace(recording, steps=tuple(steps)),
        left_out=tuple(left_out),
        stragglers=stragglers,
        doubt=doubt,
        parts=parts,
        slowness=slowness_of(batches),
        stage_shares={stage: sum(shares.values()) / len(shares) for stage, shares in sorted(stage_paces.items())},
        steps_changed_at=changed_at(dict(zip(stragglers.numbers, stragglers.recorded_s, strict=True))),
        cells_changed_at={cell: changed_at(row) for cell, row in paces.items()},
        stages_changed_at={stage: changed_at(row) for stage, row in stage_paces.items()},
        remedies=remedies if doubt else remedies_for(typical(steps), batches),
        activation_gib=activation_gib,
    )


def doubt_of(
    recorded_s: Sequence[float], replayed_s: Sequence[float], prompt_s: Sequence[float], ideal_s: float
) -> str:
    """Return why the replay does not explain the recording; empty if it does. Arguments are by step: seconds as
    recorded, as replayed, and as replayed without launch delays."""

    def off(made_s: Sequence[float]) -> float:
        return statistics.median(
            made / was - 1.0 if was > 0.0 else 0.0 for made, was in zip(made_s, recorded_s, strict=True)
        )

    if abs(replayed := off(replayed_s)) > CREDIBLE:
        return (
            f"replayed, a step takes {abs(replayed):.0%} {'longer' if replayed > 0 else 'less'} than recorded: actions "
            "began before the end of those that they should have waited for. The recording names wrong stages, "
            "micro-batches or clocks, or actions of a stage overlapped"
        )
    if abs(prompt := off(prompt_s)) > CREDIBLE:
        return (
            f"in {abs(prompt):.0%} of a step, no recorded work runs or is waited for: hosts launch late "
            "(garbage collection, data loading, processes that share cores), or work is missing in the recording "
            "(collectives, the optimizer, other ranks, messages)"
        )
    if ideal_s > (1.0 + _TOO_LONG) * statistics.fmean(recorded_s):
        return (
            f"with every operation at the mean of its kind a step would take {ideal_s:.3g} s, longer than the "
            f"{statistics.fmean(recorded_s):.3g} s recorded: times of some operations include waits, or belong to "
            "other operations"
        )
    return ""


def _parts(
    recording: Recording, steps: Sequence[RecordedStep], batches: Sequence[ReplayBatch]
) -> tuple[PartAnalysis, ...]:
    """Return what slowed each part of a run, compared with the ideals of the whole."""
    ideals = ideal_seconds(steps, batches)
    whys = {each.step: each.why for each in recording.beginnings}
    found: list[tuple[str, list[RecordedStep]]] = []
    for step in sorted(steps, key=lambda step: step.number):
        begun = [number for number in whys if number <= step.number]
        why = whys[max(begun)] if begun else ""
        if not found or found[-1][0] != why:
            found.append((why, []))
        found[-1][1].append(step)
    if len(found) < 2:
        return ()
    return tuple(PartAnalysis(why=why, stragglers=stragglers_of(rows, batches_of(rows), ideals)) for why, rows in found)


def figures(analysis: Analysis) -> dict[str, Any]:
    """Return everything as one JSON object. Its keys are an interface: add, never rename. If the recording is not
    understood, findings are null or empty."""
    values = _figures(analysis)
    if analysis.doubt:
        for key, value in values.items():
            if key.startswith(_FINDINGS):
                values[key] = type(value)() if isinstance(value, dict | list) else None
    return values


_FINDINGS = ("slow", "m_w", "m_s", "lengths", "launch", "messages", "steps_changed")
"""Prefixes of the keys of findings."""


def _figures(analysis: Analysis) -> dict[str, Any]:
    found, remedies = analysis.stragglers, analysis.remedies
    return {
        "trace": analysis.recording.name,
        "understood": not analysis.doubt,
        "doubt": analysis.doubt or None,
        "notes": list(analysis.recording.notes),
        "steps": list(found.numbers),
        "left_out": list(analysis.left_out),
        "recorded_s": list(found.recorded_s),
        "replayed_s": list(found.replayed_s),
        "prompt_s": list(found.prompt_s),
        "ideal_s": found.ideal_s,
        "slowdown": found.slowdown,
        "launch_slowdown": found.launch_slowdown,
        "m_w": found.workers_share,
        "m_s": found.last_stage_share,
        "lengths_share": found.lengths_share,
        "slowest_workers": [str(cell) for cell in found.slowest_workers],
        "slowdown_by_optype": {str(optype): each for optype, each in found.by_optype.items()},
        "slowdown_by_stage": {str(stage): each for stage, each in found.by_stage.items()},
        "slowdown_by_replica": {str(replica): each for replica, each in found.by_replica.items()},
        "slowdown_by_worker": {str(cell): each for cell, each in found.by_worker.items()},
        "slowdown_by_link": _by_link(found),
        "slowness": {str(cell): each for cell, each in analysis.slowness.items()},
        "messages_slowdown": found.messages_slowdown,
        "steps_changed_at": analysis.steps_changed_at,
        "parts": [
            {
                "steps": list(part.stragglers.numbers),
                "why": part.why,
                "recorded_s": list(part.stragglers.recorded_s),
                "slowdown": part.stragglers.slowdown,
                "slowdown_by_link": _by_link(part.stragglers),
            }
            for part in analysis.parts
        ],
        "remedies": {
            "step": remedies.step,
            "now_s": remedies.now_s,
            "why_not": remedies.why_not,
            "rows": [
                {
                    "key": remedy.key,
                    "title": remedy.title,
                    "step_s": remedy.seconds,
                    "gain": remedies.gain(remedy),
                    "extra_activations": remedy.extra_activations,
                    "extra_gib": analysis.extra_gib(remedy),
                    "note": remedy.note,
                }
                for remedy in remedies.rows
            ],
        },
    }


def _by_link(found: ReplayedStragglers) -> dict[str, float]:
    return {f"{source}->{target}": each for (source, target), each in found.by_link.items()}


def replayable(recording: Recording) -> tuple[list[RecordedStep], list[ReplayBatch], list[str]]:
    """Return the steps that have a graph and all cells, their batches, and why others are left out. Raises ReplayError
    if there is none."""
    steps = recording.steps
    most = max(len(step.cells) for step in steps)
    kept: list[RecordedStep] = []
    graphs: list[tuple[StepGraph, StepTimes]] = []
    left_out = list(recording.left_out)
    for step in steps:
        try:
            graph = graph_of(step)
        except ReplayError as error:
            left_out.append(str(error))
            continue
        if len(step.cells) < most:
            left_out.append(f"step {step.number} has records of {len(step.cells)} of {most} cells")
        elif missing := step.missing():
            left_out.append(missing)
        else:
            kept.append(step)
            graphs.append(graph)
    if not kept:
        raise ReplayError(f"no step can be replayed: {left_out[0]}")
    return kept, batches_of(kept, graphs), left_out


def typical(steps: list[RecordedStep]) -> RecordedStep:
    """Return the step with the median time."""
    return sorted(steps, key=lambda step: step.seconds)[len(steps) // 2]
