# SPDX-License-Identifier: Apache-2.0
"""What is taken for a disturbance of an iteration, and what is not."""

from __future__ import annotations

import pytest

from adaptra_megatron.engine.pipeline import DisturbanceWatch


def run(watch: DisturbanceWatch, now_s: float, pause_s: float, *, evaluated: bool = False) -> tuple[str | None, float]:
    """An iteration of one second, after a pause; what disturbed it, and when it ended."""
    if evaluated:
        watch.evaluated()
    found = watch.began(now_s + pause_s)
    watch.ended(now_s + pause_s + 1.0)
    return found, now_s + pause_s + 1.0


def test_evaluations_and_long_pauses_are_told() -> None:
    watch, now_s = DisturbanceWatch(), 0.0
    for _ in range(6):
        found, now_s = run(watch, now_s, 0.05)
        assert found is None
    found, now_s = run(watch, now_s, 0.5, evaluated=True)
    assert found == "an evaluation just before"
    for _ in range(6):
        found, now_s = run(watch, now_s, 0.05)
        assert found is None
    found, now_s = run(watch, now_s, 12.0)
    assert found == "a pause of 12.0 s just before, as for a checkpoint"
    found, now_s = run(watch, now_s, 0.05)
    assert found is None


@pytest.mark.parametrize("every", [1, 2])
def test_what_comes_all_the_time_is_no_disturbance(every: int) -> None:
    """Otherwise nothing could ever be reported."""
    watch, now_s = DisturbanceWatch(), 0.0
    reported = []
    for iteration in range(40):
        found, now_s = run(watch, now_s, 0.5, evaluated=iteration % every == 0)
        reported.append(found is None)
    assert sum(reported[8:]) >= 16


def test_pauses_that_are_usual_or_short_are_none() -> None:
    watch, now_s = DisturbanceWatch(), 0.0
    for pause_s in (3.0, 3.1, 2.9, 3.0, 4.0, 3.0, 6.0):
        found, now_s = run(watch, now_s, pause_s)
        assert found is None
    watch, now_s = DisturbanceWatch(), 0.0
    for pause_s in (0.001, 0.001, 0.001, 0.001, 0.5):
        found, now_s = run(watch, now_s, pause_s)
        assert found is None
