# SPDX-License-Identifier: Apache-2.0
"""What is decided from measured times and norms, and when."""

from __future__ import annotations

import math

import numpy as np
import pytest

from adaptra_megatron.gradsync.mode_decider import LEAST, Gradient, ModeDecider
from adaptra_megatron.gradsync.sync_modes import Candidate, Mode, ModeKind
from adaptra_megatron.gradsync.update_order import Update

REPLICAS = 8
TOGETHER = Update(0, tuple(range(REPLICAS)), (), (), True, REPLICAS)


def decider() -> ModeDecider:
    return ModeDecider(REPLICAS, tuple(ModeKind), 4)


def update(of: ModeDecider, times_s: list[float]) -> Candidate | None:
    """All replicas hand in gradients that took so long, and make an update of them."""
    for replica, time_s in enumerate(times_s):
        of.arrived(replica, Gradient(time_s, 1.0, None))
    return of.decide(TOGETHER)


def test_decisions_follow_changes_of_stragglers_alone() -> None:
    deciding = decider()
    slow = [0.1] * 7 + [0.3]
    decided = [update(deciding, slow) for _ in range(12)]
    assert [each is not None for each in decided] == [False] * LEAST + [True] + [False] * (11 - LEAST)
    assert decided[LEAST] is not None
    assert decided[LEAST].mode.kind is not ModeKind.SSGD
    healed = [each for _ in range(8) if (each := update(deciding, [0.1] * 8)) is not None]
    assert [each.mode for each in healed] == [Mode.ssgd(REPLICAS)]


def test_the_first_gradient_and_an_outlier_decide_nothing() -> None:
    deciding = decider()
    assert update(deciding, [0.1] * 7 + [30.0]) is None
    assert all(update(deciding, [0.1] * 8) is None for _ in range(4))
    assert update(deciding, [0.1] * 7 + [30.0]) is None
    assert all(update(deciding, [0.1] * 8) is None for _ in range(4))


def test_the_noise_scale_is_found_from_norms() -> None:
    """Gradients of a known signal and variance."""
    random, deciding = np.random.default_rng(0), decider()
    signal, variance, dimensions = 2.0, 5.0, 2000
    true = random.normal(size=dimensions)
    true *= math.sqrt(signal) / np.linalg.norm(true)
    assert math.isinf(deciding.noise)
    before: float | None = None
    for _ in range(30):
        each = true + random.normal(size=(REPLICAS, dimensions)) * math.sqrt(variance / dimensions)
        for replica, gradient in enumerate(each):
            deciding.arrived(replica, Gradient(0.1, float(gradient @ gradient), before))
        deciding.decide(TOGETHER)
        mean = each.mean(axis=0)
        before = float(mean @ mean)
    assert deciding.noise == pytest.approx(variance / signal, rel=0.05)
