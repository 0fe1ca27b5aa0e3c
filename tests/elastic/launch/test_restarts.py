# SPDX-License-Identifier: Apache-2.0
"""When ranks that have failed are started again, without processes."""

from __future__ import annotations

from adaptra_megatron.elastic.launch.launcher import HEALTHY_S, Restarts


def failures(
    restarts: Restarts, now_s: float, number: int, *, lasts_s: float = 0.5
) -> tuple[list[float | None], float]:
    """Pauses after starts that all fail, and the time after the last."""
    pauses: list[float | None] = []
    for _ in range(number):
        now_s += lasts_s
        pauses.append(pause_s := restarts.fail(now_s, trained=False))
        if pause_s is not None:
            assert not restarts.start(now_s + pause_s - 0.01)
            now_s += pause_s
            assert restarts.start(now_s)
            assert not restarts.start(now_s), "once"
    return pauses, now_s


def test_pauses_double_up_to_a_minute_until_all_are_used() -> None:
    assert failures(Restarts(9, 0.0), 0.0, 10)[0] == [1, 2, 4, 8, 16, 32, 60, 60, 60, None]


def test_a_process_that_took_part_is_followed_after_a_second_but_its_failure_counts() -> None:
    restarts = Restarts(5, 0.0)
    _, now_s = failures(restarts, 0.0, 4)
    assert restarts.fail(now_s + 60.0, trained=True) == 1.0
    assert restarts.start(now_s + 61.0)
    assert restarts.fail(now_s + 62.0, trained=True) is None


def test_an_hour_of_health_has_failures_forgotten_and_one_of_waiting_does_not() -> None:
    restarts = Restarts(2, 0.0)
    pauses, now_s = failures(restarts, 0.0, 3, lasts_s=HEALTHY_S)
    assert pauses == [1, 2, None]
    restarts = Restarts(2, 0.0)
    _, now_s = failures(restarts, 0.0, 2)
    assert restarts.count == 2
    assert restarts.fail(now_s + HEALTHY_S, trained=True) == 1.0
    assert restarts.count == 1
