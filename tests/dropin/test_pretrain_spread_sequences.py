# SPDX-License-Identifier: Apache-2.0
"""Sequences spread over ranks, in pretrain_gpt.py with layers that can do it (--spec): the numbers of stock."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.pretrain import MOCK_DATA, compare_with_stock, needs_megatron_lm, what_ran

pytestmark = needs_megatron_lm

TESTS = Path(__file__).parents[1]
LAYERS = ("--pipeline-model-parallel-size", "2", "--spec", "support.spread_layers", "two_layers")
SPREAD = {
    "context-parallel": ("--context-parallel-size", "2"),
    "context-parallel-per-token": (
        *("--context-parallel-size", "2", "--calculate-per-token-loss"),
        *("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    ),
    "sequence-parallel": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
}
ONLINE = ("--adaptra", "--adaptra-dispatch", "online", "--adaptra-host-transport", "shm", "--adaptra-path", "host")


@pytest.mark.parametrize("spread", SPREAD)
def test_the_numbers_are_those_of_stock(spread: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    compare_with_stock(4, tmp_path, *LAYERS, *MOCK_DATA, *SPREAD[spread])


def test_online_dispatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank of each stage decides for all that have part of its sequences."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    compare_with_stock(4, tmp_path, *LAYERS, *MOCK_DATA, *SPREAD["context-parallel"], adaptra=ONLINE)
    assert [what_ran(tmp_path / "ours", rank)["adaptra"]["online_iterations"] for rank in range(4)] == [4] * 4
