# SPDX-License-Identifier: Apache-2.0
"""The host path between real processes: delegates, rings, shm and tcp. What the ranks check is in transport_ranks.py
and host_ranks.py."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

HOST_RANKS = str(Path(__file__).parents[1] / "ranks" / "host_ranks.py")
RANKS = str(Path(__file__).parents[1] / "ranks" / "transport_ranks.py")
TIMEOUT_S = 60.0
KNOWN_S = 15.0
"""Ten times what it takes: the machine may be busy with other things."""

PATHS = pytest.mark.parametrize("path", ["shm", "tcp"])


@PATHS
@pytest.mark.parametrize(
    ("ranks", "scenarios"),
    [
        (2, ("contents", "varying", "times")),
        (3, ("other_order", "every_link")),
    ],
)
def test_messages_arrive_as_they_were_sent(
    start_ranks: Callable[..., object], path: str, ranks: int, scenarios: tuple[str, ...]
) -> None:
    start_ranks(ranks, [RANKS, path, *scenarios], timeout_s=TIMEOUT_S)


@PATHS
def test_a_silent_peer_is_an_error_at_the_deadline(start_ranks: Callable[..., object], path: str) -> None:
    start_ranks(2, [RANKS, path, "silent"], timeout_s=TIMEOUT_S)


@PATHS
def test_a_killed_peer_is_an_error_and_never_a_hang(start_ranks: Callable[..., list], path: str) -> None:
    dead, survivor = start_ranks(2, [RANKS, path, "killed"], timeout_s=TIMEOUT_S, check=False, stop_on_failure=False)
    assert dead.returncode == -signal.SIGKILL
    assert survivor.returncode == 0, survivor.output
    assert "survived" in survivor.output


@PATHS
@pytest.mark.parametrize(
    "scenarios",
    [
        ("delegates_killed",),
        ("nothing_leaks",),
        ("intruders", "back_pressure", "closed", "held_until_acknowledged"),
        ("idle",),
        ("bound",),
    ],
    ids=lambda names: "-".join(names),
)
def test_host_path(start_ranks: Callable[..., object], path: str, scenarios: tuple[str, ...]) -> None:
    start_ranks(2, [HOST_RANKS, path, *scenarios], timeout_s=TIMEOUT_S)


def test_a_message_of_a_gigabyte(start_ranks: Callable[..., object]) -> None:
    start_ranks(2, [HOST_RANKS, "tcp", "gigabyte"], timeout_s=TIMEOUT_S)


def test_a_stopped_delegate_is_replaced(start_ranks: Callable[..., object]) -> None:
    """Over tcp: over shm it is not in the way."""
    start_ranks(2, [HOST_RANKS, "tcp", "delegate_stopped"], timeout_s=TIMEOUT_S)


@PATHS
def test_a_stopped_rank_changes_nothing(start_ranks: Callable[..., object], path: str) -> None:
    start_ranks(2, [HOST_RANKS, path, "rank_stopped"], timeout_s=TIMEOUT_S)


@PATHS
def test_a_stopped_rank_cannot_connect_and_is_waited_for(start_ranks: Callable[..., object], path: str) -> None:
    start_ranks(2, [HOST_RANKS, path, "stopped_while_the_link_is_down"], timeout_s=TIMEOUT_S)


@PATHS
def test_all_ranks_know_soon_which_one_died(start_ranks: Callable[..., list], path: str) -> None:
    results = start_ranks(4, [HOST_RANKS, path, "rank_lost"], timeout_s=TIMEOUT_S, check=False, stop_on_failure=False)
    assert results[2].returncode == -signal.SIGKILL
    (killed,) = re.findall(r"killed at (\S+)", results[2].output)
    for result in results[:2] + results[3:]:
        assert result.returncode == 0, result.output
        (failed,) = re.findall(r"failed at (\S+),", result.output)
        assert float(failed) - float(killed) < KNOWN_S, result.output


@PATHS
def test_a_delegate_dies_with_its_killed_parent(start_ranks: Callable[..., list], path: str) -> None:
    dead, survivor = start_ranks(
        2, [HOST_RANKS, path, "parent_killed"], timeout_s=TIMEOUT_S, check=False, stop_on_failure=False
    )
    assert dead.returncode == -signal.SIGKILL
    assert survivor.returncode == 0, survivor.output
    assert "survived" in survivor.output
