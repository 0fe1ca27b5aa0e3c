# SPDX-License-Identifier: Apache-2.0
"""Launchers that leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from launches import Launches

from testing.jobs.fork_server import ForkServer


@pytest.fixture
def launches(fork_server: ForkServer, tmp_path: Path) -> Iterator[Launches]:
    made = Launches(fork_server, tmp_path)
    try:
        yield made
        made.gone()
    finally:
        made.kill()
