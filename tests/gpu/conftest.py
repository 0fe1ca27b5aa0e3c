# SPDX-License-Identifier: Apache-2.0
"""Tests that need a GPU: left out, loudly, where there is none."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", "gpu: needs a GPU; skipped where torch finds none")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU."""
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


@pytest.fixture(scope="session")
def stall(device: torch.device) -> Callable[[float], None]:
    """Put a kernel on the current stream that does nothing for so many seconds."""
    torch.cuda._sleep(1_000_000)
    torch.cuda.synchronize()
    cycles = 200_000_000
    start_s = time.monotonic()
    torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    cycles_per_s = cycles / (time.monotonic() - start_s)
    return lambda seconds: torch.cuda._sleep(int(seconds * cycles_per_s))
