# SPDX-License-Identifier: Apache-2.0
"""Fixtures for all tests. Helpers to import are in tests/support."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
from support.processes import RankResult, run_ranks

from adaptra_megatron.emulation.fork_server import ForkServer


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """The one process that has torch and Megatron imported, from which the ranks of all tests are forked."""
    with ForkServer() as server:
        yield server


@pytest.fixture
def start_ranks(fork_server: ForkServer, tmp_path: object) -> Callable[..., list[RankResult]]:
    """`launch.run_ranks` with ranks forked from the session's server and logs in the test's directory."""
    return partial(run_ranks, server=fork_server, log_directory=f"{tmp_path}/logs")
