# SPDX-License-Identifier: Apache-2.0
"""Fixtures for all tests. Helpers to import are in tests/support."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.conjecture import providers
from support.processes import RankResult, run_ranks

from adaptra_megatron.elastic.launch.endpoint import ask_no_name_server
from adaptra_megatron.tools.local_ranks.launch_ranks import BRIEF_LOOKUPS
from testing.jobs.fork_server import ForkServer

# Test machines are shared: a slow example says nothing about the code, so time limits are pytest-timeout's alone.
# "fixed": the same examples in every run, so that none fails by chance, and no shrinking, which takes minutes. "random"
# (`make properties`) searches and shrinks.
EXAMPLES = os.environ.get("ADAPTRA_TEST_EXAMPLES", "fixed")
_ANYWHERE = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile(
    "fixed", derandomize=True, database=None, phases=(Phase.explicit, Phase.generate), max_examples=50, **_ANYWHERE
)
settings.register_profile("random", print_blob=True, **_ANYWHERE)
settings.load_profile(EXAMPLES)
if EXAMPLES == "fixed":
    # Hypothesis also draws constants of our modules, of those imported by then: each edit would change the examples.
    providers._get_local_constants = lambda: providers._local_constants


def pytest_configure() -> None:
    """Tests serve stores, too."""
    os.environ |= BRIEF_LOOKUPS
    ask_no_name_server()


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """The one process that has torch and Megatron imported, from which the ranks of all tests are forked."""
    with ForkServer() as server:
        yield server


@pytest.fixture
def start_ranks(fork_server: ForkServer, tmp_path: object) -> Callable[..., list[RankResult]]:
    """`launch.run_ranks` with ranks forked from the session's server and logs in the test's directory."""
    return partial(run_ranks, server=fork_server, log_directory=f"{tmp_path}/logs")
