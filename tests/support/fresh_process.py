# SPDX-License-Identifier: Apache-2.0
"""Tests that need an interpreter in which nothing has imported Megatron yet, whatever other tests did."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_VARIABLE = "ADAPTRA_TEST_IN_FRESH_PROCESS"


def in_fresh_process(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test function (not a method; without parameters) in a pytest of its own, which fails if it fails."""
    node = f"{Path(test.__code__.co_filename)}::{test.__name__}"

    @functools.wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        if os.environ.get(_VARIABLE) == node:
            test(*args, **fixtures)
            return
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", node],
            env={**os.environ, _VARIABLE: node},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "1 passed" in done.stdout, done.stdout

    return run
