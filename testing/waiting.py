# SPDX-License-Identifier: Apache-2.0
"""Waiting for what other threads or processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def until(condition: Callable[[], Found], otherwise: str | Callable[[], object] = "", limit_s: float = 20.0) -> Found:
    """Wait until `condition()` is true, and return it; an error that says `otherwise` after `limit_s`."""
    deadline_s = time.monotonic() + limit_s
    while not (found := condition()):
        if time.monotonic() > deadline_s:
            raise AssertionError(otherwise() if callable(otherwise) else otherwise or f"not within {limit_s} s")
        time.sleep(0.005)
    return found
