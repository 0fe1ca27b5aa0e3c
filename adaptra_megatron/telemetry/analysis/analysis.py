# SPDX-License-Identifier: Apache-2.0
"""The figures behind what `adaptra analyze` says of a recording."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from adaptra_megatron.schedule.replay.engine import batches_of
from adaptra_megatron.schedule.replay.graph import graph_of
from adaptra_megatron.schedule.replay.operations import RecordedStep, ReplayError
from adaptra_megatron.schedule.replay.pace import changed_at, paces_of, slowness_of, stage_paces_of
from adaptra_megatron.schedule.replay.remedies import Remedies, Remedy, remedies_for
from adaptra_megatron.schedule.replay.what_if import Stragglers, stragglers_of
from adaptra_megatron.schedule.routing.costs import Cell
from adaptra_megatron.telemetry.recordings.recording import Recording

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """What is known of a recording."""

    recording: Recording
    """The steps that could be replayed."""
    left_out: tuple[str, ...]
    """Why other steps could not."""
    stragglers: Stragglers
    slowness: dict[Cell, float]
    """Time of each cell as a multiple of the others' of its stage."""
    stage_shares: dict[int, float]
    """Computation of each stage, over the mean of all stages."""
    steps_changed_at: int | None
    """The step from which on steps took another time; None if they did not."""
    cells_changed_at: dict[Cell, int | None]
    stages_changed_at: dict[int, int | None]
    remedies: Remedies
    activation_gib: float | None
    """GiB of the activations of one micro-batch on a stage, where given."""

    @property
    def cells(self) -> tuple[Cell, ...]:
        return self.recording.steps[0].cells

    def extra_gib(self, remedy: Remedy) -> float | None:
        """Memory that a remedy takes on a stage; None where it is not known."""
        return None if self.activation_gib is None else self.activation_gib * remedy.extra_activations


def analyse(recording: Recording, *, activation_gib: float | None = None, progress: Progress | None = None) -> Analysis:
    """Replay `recording` and ask what would be if. Raises ReplayError if none of its steps can be replayed."""
    tell = progress or (lambda doing, done, total: None)
    tell("analysing", 0, 3)
    steps, left_out = replayable(recording.steps)
    batches = batches_of(steps)
    tell("analysing", 1, 3)
    stragglers = stragglers_of(steps, batches)
    tell("analysing", 2, 3)
    paces, stage_paces = paces_of(batches), stage_paces_of(batches)
    return Analysis(
        recording=replace(recording, steps=tuple(steps)),
        left_out=tuple(left_out),
        stragglers=stragglers,
        slowness=slowness_of(batches),
        stage_shares={stage: sum(shares.values()) / len(shares) for stage, shares in sorted(stage_paces.items())},
        steps_changed_at=changed_at(dict(zip(stragglers.numbers, stragglers.recorded_s, strict=True))),
        cells_changed_at={cell: changed_at(row) for cell, row in paces.items()},
        stages_changed_at={stage: changed_at(row) for stage, row in stage_paces.items()},
        remedies=remedies_for(typical(steps), batches),
        activation_gib=activation_gib,
    )


def figures(analysis: Analysis) -> dict[str, Any]:
    """Everything as one JSON object. Its keys are an interface: add, never rename."""
    found, remedies = analysis.stragglers, analysis.remedies
    return {
        "trace": analysis.recording.name,
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
        "slowdown_by_link": {f"{source}->{target}": each for (source, target), each in found.by_link.items()},
        "slowness": {str(cell): each for cell, each in analysis.slowness.items()},
        "steps_changed_at": analysis.steps_changed_at,
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


def replayable(steps: tuple[RecordedStep, ...]) -> tuple[list[RecordedStep], list[str]]:
    """The steps that have a graph and all cells, and why the others have not."""
    most = max(len(step.cells) for step in steps)
    kept, left_out = [], []
    for step in steps:
        try:
            graph_of(step)
        except ReplayError as error:
            left_out.append(str(error))
            continue
        if len(step.cells) < most:
            left_out.append(f"step {step.number} has records of {len(step.cells)} of {most} cells")
        else:
            kept.append(step)
    if not kept:
        raise ReplayError(f"no step can be replayed: {left_out[0]}")
    return kept, left_out


def typical(steps: list[RecordedStep]) -> RecordedStep:
    """The step whose time is the median."""
    return sorted(steps, key=lambda step: step.seconds)[len(steps) // 2]
