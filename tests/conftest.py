# SPDX-License-Identifier: Apache-2.0
"""Fixtures for all tests. Helpers to import are in tests/support."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from hypothesis import HealthCheck, settings
from support.processes import RankResult, run_ranks
from support.timing import stretch_of

from adaptra_megatron.emulation.jobs.fork_server import ForkServer
from adaptra_megatron.emulation.jobs.launch import BRIEF_LOOKUPS

# Test machines are shared: a slow example says nothing about the code, so time limits are pytest-timeout's alone.
settings.register_profile("shared-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared-machine")


def pytest_configure() -> None:
    """Tests serve stores, too."""
    os.environ |= BRIEF_LOOKUPS


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """The one process that has torch and Megatron imported, from which the ranks of all tests are forked."""
    with ForkServer() as server:
        yield server


@pytest.fixture
def start_ranks(fork_server: ForkServer, tmp_path: object) -> Callable[..., list[RankResult]]:
    """`launch.run_ranks` with ranks forked from the session's server and logs in the test's directory."""
    return partial(run_ranks, server=fork_server, log_directory=f"{tmp_path}/logs")


@pytest.fixture
def stretch(request: pytest.FixtureRequest) -> float:
    """How many times as long this test's emulated times are: more each time that it runs again."""
    return stretch_of(getattr(request.node, "execution_count", 1))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say why a test had to run again: nothing else would."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"ran again: {report.nodeid}")
        terminalreporter.line(report.longreprtext)
