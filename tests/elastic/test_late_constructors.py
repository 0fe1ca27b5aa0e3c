# SPDX-License-Identifier: Apache-2.0
"""Constructors of process groups whose threads start once their generation has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from adaptra_megatron.common.layout import Cell, JobLayout, Worker
from adaptra_megatron.elastic import process_group_manager as live_groups
from adaptra_megatron.elastic.failure_errors import EpochEndedError
from adaptra_megatron.elastic.generation import FIRST, Generation, GenerationId
from adaptra_megatron.elastic.process_group import FaultTolerantGroup
from adaptra_megatron.elastic.process_group_manager import FaultTolerantGroups

REPLICAS = 3


class Meetings:
    """The store of one generation: notes the places at which groups meet."""

    def __init__(self) -> None:
        self.places: list[str] = []

    @contextmanager
    def lent(self, place: str, _timeout_s: float, *, sealed: bool) -> Iterator[Any]:
        assert not sealed
        self.places.append(place)
        yield self


def test_a_constructor_that_starts_late_joins_no_group_of_the_next_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would meet the others in place of the constructor that its rank waits for: they connect to either, and this
    rank waits for them until the job's timeout."""
    layout = JobLayout(0, {each: Worker(Cell(each, 0), 0, "host", "boot/net") for each in range(REPLICAS)})
    groups, before, after = FaultTolerantGroups(), Meetings(), Meetings()
    groups._layout, groups._control, groups._timeout_s = layout, before, 20.0  # type: ignore[assignment]
    group = FaultTolerantGroup(groups, range(REPLICAS), 0, "model parallel")
    groups._groups.append(group)
    late: list[Callable[[], Any]] = []
    made: list[tuple[Any, int, int]] = []

    def interrupted(make: Callable[[], Any], *_given: Any) -> Any:
        late.append(make)
        raise EpochEndedError("a rank has failed")

    def connected(store: Any, rank: int, size: int, _timeout_s: float) -> tuple[Any, None]:
        made.append((store, rank, size))
        return object(), None

    monkeypatch.setattr(live_groups, "connected_group", connected)
    with monkeypatch.context() as patched:
        patched.setattr(live_groups, "interruptible", interrupted)
        with pytest.raises(EpochEndedError):
            groups.native(group, torch.device("cpu"))
    groups.leave()
    live = frozenset(range(REPLICAS - 1))
    groups.enter(Generation(GenerationId(FIRST.membership + 1), live, frozenset()), after)  # type: ignore[arg-type]
    late[0]()
    assert made == [(before, 0, REPLICAS)]
    assert not after.places
    groups.native(group, torch.device("cpu"))
    assert made[1:] == [(after, 0, REPLICAS - 1)]
    assert after.places != before.places
