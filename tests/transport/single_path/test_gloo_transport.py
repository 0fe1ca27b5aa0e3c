# SPDX-License-Identifier: Apache-2.0
"""The waiting-thread transport between real processes over gloo. What the ranks check is in transport_ranks.py."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

RANKS = str(Path(__file__).parents[1] / "ranks" / "transport_ranks.py")
TIMEOUT_S = 60.0


@pytest.mark.parametrize(
    ("ranks", "scenarios"),
    [
        (2, ("contents", "varying", "swapped", "times", "closed")),
        (3, ("other_order", "every_link")),
    ],
)
def test_messages_arrive_as_they_were_sent(
    start_ranks: Callable[..., object], ranks: int, scenarios: tuple[str, ...]
) -> None:
    start_ranks(ranks, [RANKS, "torch", *scenarios], timeout_s=TIMEOUT_S)


def test_a_silent_peer_is_an_error_at_the_deadline(start_ranks: Callable[..., object]) -> None:
    start_ranks(2, [RANKS, "torch", "silent"], timeout_s=TIMEOUT_S)


def test_a_killed_peer_is_an_error_and_never_a_hang(start_ranks: Callable[..., list]) -> None:
    dead, survivor = start_ranks(2, [RANKS, "torch", "killed"], timeout_s=TIMEOUT_S, check=False, stop_on_failure=False)
    assert dead.returncode == -signal.SIGKILL
    assert survivor.returncode == 0, survivor.output
    assert "survived" in survivor.output
