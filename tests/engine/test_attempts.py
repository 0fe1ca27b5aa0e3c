# SPDX-License-Identifier: Apache-2.0
"""Attempts of one rank compare replicas once in each generation."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from adaptra_megatron.common.layout import Cell, JobLayout, Worker
from adaptra_megatron.elastic.generation import FIRST, Generation, GenerationId
from adaptra_megatron.elastic.protocol_store import Word
from adaptra_megatron.engine import fault_tolerance
from adaptra_megatron.engine.fault_tolerance import Recovery

WORKERS = {each: Worker(Cell(each, 0), 0, "host", "boot/net") for each in range(3)}
NEXT, AFTER = GenerationId(1), GenerationId(2)


class Manager:
    """Commits each attempt, in the generation that it was made in; goes on in another one where a rank then fails."""

    turn = 0

    def __init__(self) -> None:
        self.generation = Generation(FIRST, frozenset(WORKERS), frozenset())
        self.fails: GenerationId | None = None

    def check(self) -> None:
        pass

    def enter(self, identity: GenerationId) -> None:
        self.generation = Generation(identity, frozenset({0, 1}), frozenset({Cell(2, 0)}))

    def carry_out(self, attempt: Callable[[Generation, int], Any], *, trains: bool) -> Any:
        assert not trains
        found = attempt(self.generation, 0)
        if self.fails is not None:
            self.enter(self.fails)
        return found


@pytest.mark.parametrize(
    ("fails", "compared"), [(None, [False, True, False]), (AFTER, [False, True, True])], ids=["peace", "at-the-commit"]
)
def test_replicas_are_compared_in_the_first_attempt_of_each_generation(
    fails: GenerationId | None, compared: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where this rank learns of a commit only from the ranks that live after it."""
    for name in ("_agreed_plan", "PlanExchange"):
        monkeypatch.setattr(fault_tolerance, name, MagicMock())
    pipeline = MagicMock(hooks=(), iterations=3)
    pipeline.job.layout = JobLayout(0, WORKERS)
    recovery, manager = Recovery(pipeline, MagicMock(training=None)), Manager()
    recovery.manager = cast(Any, manager)
    call: Any = SimpleNamespace(forward_only=True, model_chunks=[], config=SimpleNamespace(timers=None))
    found: list[bool] = []

    def attempt(*_given: Any) -> Any:
        found.append(bool(recovery._word(Word("1/0/0")).digests))

    recovery.carry_out(attempt, call, 0)
    manager.enter(NEXT)
    manager.fails = fails
    recovery.carry_out(attempt, call, 0)
    manager.fails = None
    recovery.carry_out(attempt, call, 0)
    assert found == compared


@pytest.mark.parametrize("repeats", [False, True])
def test_no_rank_is_admitted_where_megatron_repeats_an_iteration(
    repeats: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fault_tolerance, "repeats_iteration", lambda: repeats)
    recovery = Recovery(MagicMock(), MagicMock())
    recovery.manager = MagicMock()
    recovery.carry_out(lambda *_given: cast(Any, None), cast(Any, SimpleNamespace(forward_only=False)), 0)
    assert recovery.manager.carry_out.call_args.kwargs == {"trains": not repeats}
