# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes import RankResult


def test_messages_over_slow_links(start_ranks: Callable[..., list[RankResult]]) -> None:
    program = str(Path(__file__).with_name("slow_links.py"))
    for result in start_ranks(2, [program], timeout_s=60):
        assert "all checks passed" in result.output


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_host_paths_over_slow_links(start_ranks: Callable[..., list[RankResult]], transport: str) -> None:
    program = str(Path(__file__).with_name("slow_host_paths.py"))
    for result in start_ranks(2, [program, transport], timeout_s=60):
        assert "all checks passed" in result.output
