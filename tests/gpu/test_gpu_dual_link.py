# SPDX-License-Identifier: Apache-2.0
"""Links with two paths between GPUs: what the ranks check is in gpu_dual_ranks.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu

RANKS = str(Path(__file__).with_name("gpu_dual_ranks.py"))
TIMEOUT_S = 120.0


def test_two_stages_on_one_gpu_use_the_host_path(device: torch.device, start_ranks: Callable[..., object]) -> None:
    start_ranks(2, [RANKS, "one_gpu"], timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("scenario", ["device_first", "sessions_end"])
def test_two_gpus(device: torch.device, start_ranks: Callable[..., object], scenario: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    start_ranks(2, [RANKS, scenario], timeout_s=TIMEOUT_S)
