# SPDX-License-Identifier: Apache-2.0
"""Micro-batches of different lengths: a cell that has more to do is not a slow one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from adaptra_megatron.control.detector.detector import Detector, SizeModel
from adaptra_megatron.control.detector.observations import Finding, IterationSample, StageId, StageSample, State

PIPELINES, STAGES, MICRO_BATCHES, ITERATIONS, ONSET = 3, 2, 12, 30, 15
VICTIM = StageId(1, 1)

Seconds = Callable[[np.ndarray], np.ndarray]
GROWTH: dict[str, Seconds] = {
    "proportional": lambda tokens: 1e-5 * tokens,
    "attention": lambda tokens: 8e-6 * tokens + 2e-9 * tokens**2,
    "overhead": lambda tokens: 10e-3 + 2e-6 * tokens,
    "constant": lambda tokens: np.full(len(tokens), 20e-3),
}


def job(growth: Seconds, *, longer: float = 1.0, slower: float = 1.0, sizes: bool = True) -> list[IterationSample]:
    """From ONSET on the victim's micro-batches are `longer`, or the victim is `slower`, than those of its peers."""
    random = np.random.default_rng(7)
    found = []
    for iteration in range(ITERATIONS):
        stages = {}
        for identity in (StageId(pipeline, stage) for pipeline in range(PIPELINES) for stage in range(STAGES)):
            struck = identity == VICTIM and iteration >= ONSET
            tokens = random.uniform(500, 2000, MICRO_BATCHES) * (longer if struck else 1.0)
            noise = random.normal(1.0, 0.01, MICRO_BATCHES) * (slower if struck else 1.0)
            keys = [("F", 0), ("B", 0)]
            durations_s = {key: growth(tokens) * noise * (2.0 if key[0] == "B" else 1.0) for key in keys}
            stages[identity] = StageSample(durations_s, sizes=dict.fromkeys(keys, 64 * tokens) if sizes else {})
        found.append(IterationSample(iteration, stages=stages))
    return found


def findings(samples: list[IterationSample]) -> list[Finding]:
    """All of a detector."""
    detector = Detector()
    return [finding for sample in samples for finding in detector.observe(sample)]


@pytest.mark.parametrize("growth", GROWTH)
def test_longer_micro_batches_make_no_straggler(growth: str) -> None:
    assert not findings(job(GROWTH[growth], longer=2.0))


@pytest.mark.parametrize("growth", ["proportional", "attention"])
def test_without_sizes_they_would(growth: str) -> None:
    assert any(found.subject == VICTIM for found in findings(job(GROWTH[growth], longer=2.0, sizes=False)))


@pytest.mark.parametrize("growth", GROWTH)
def test_a_straggler_among_different_lengths_is_found(growth: str) -> None:
    (found, *_later) = findings(job(GROWTH[growth], slower=1.5))
    assert (found.subject, found.state, found.since_iteration) == (VICTIM, State.SLOW, ONSET)


def test_a_straggler_whose_micro_batches_are_short_is_found() -> None:
    """It takes no longer than before: what it had to do is half as much."""
    (found, *_later) = findings(job(GROWTH["proportional"], longer=0.5, slower=2.0))
    assert (found.subject, found.state) == (VICTIM, State.SLOW)


def test_estimates_are_those_of_the_usual_size() -> None:
    detector = Detector()
    for sample in job(GROWTH["proportional"], longer=2.0):
        detector.observe(sample)
    of_forward = [estimate.durations_s["F", 0] for estimate in detector.estimates().stages.values()]
    assert max(of_forward) <= 1.03 * min(of_forward)


def test_iterations_whose_micro_batches_are_alike_are_brought_to_the_first_ones_size() -> None:
    """A curriculum: lengths grow over the iterations, and no iteration tells how durations grow with them."""
    model, identity = SizeModel(), StageId(0, 0)
    for tokens in (512.0, 512.0, 1024.0, 4096.0):
        stage = StageSample({("F", 0): np.full(4, tokens)}, sizes={("F", 0): [tokens]})
        seen = model.alike(IterationSample(0, stages={identity: stage}))
        assert list(seen.stages[identity].durations_s["F", 0]) == [512.0] * 4


def test_the_power_is_found_however_fast_stages_are_and_disturbed_iterations_do_not_count() -> None:
    model = SizeModel()
    sizes = np.array([1.0, 2.0, 4.0])
    stages = {StageId(0, 0): 1.0, StageId(1, 0): 7.0}
    for disturbance, power in (("checkpoint", 0.5), (None, 1.5)):
        samples = {
            identity: StageSample({("F", 0): factor * sizes**power}, sizes={("F", 0): sizes})
            for identity, factor in stages.items()
        }
        model.alike(IterationSample(0, stages=samples, disturbance=disturbance))
    assert model.power((0, "F", 0)) == pytest.approx(1.5)


def test_what_has_no_size_stays_as_it_is() -> None:
    stage = StageSample({("F", 0): [3.0, 4.0]})
    sample = IterationSample(0, stages={StageId(0, 0): stage})
    assert SizeModel().alike(sample) is sample


def packed(attention: float, micro_batches: int, pipelines: int) -> list[IterationSample]:
    """Micro-batches of equally many tokens, in documents of 128 to 8192: attention takes up to `attention` times as
    long as all else. Sizes say nothing of it, and all stages of a pipeline have it alike."""
    random = np.random.default_rng(11)
    found = []
    for iteration in range(60):
        stages = {}
        for pipeline in range(pipelines):
            documents = 2.0 ** random.integers(7, 14, micro_batches)
            for stage in range(4):
                seconds = 8e-3 * (1 + attention * documents / 8192) * random.normal(1.0, 0.01, micro_batches)
                durations_s = {("F", 0): seconds, ("B", 0): 2 * seconds}
                sizes = dict.fromkeys(durations_s, np.full(micro_batches, 64.0 * 8192))
                stages[StageId(pipeline, stage)] = StageSample(durations_s, sizes=sizes)
        found.append(IterationSample(iteration, stages=stages))
    return found


@pytest.mark.parametrize(("attention", "micro_batches"), [(0.15, 4), (0.3, 16), (2.0, 64)])
@pytest.mark.parametrize("pipelines", [1, 3])
def test_documents_of_different_lengths_in_equal_micro_batches_make_no_straggler(
    attention: float, micro_batches: int, pipelines: int
) -> None:
    assert not findings(packed(attention, micro_batches, pipelines))
