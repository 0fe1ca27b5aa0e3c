# SPDX-License-Identifier: Apache-2.0
"""For tests of what several real threads or processes do in time, on a machine that does other work."""

from __future__ import annotations

import pytest

judged_by_the_clock = pytest.mark.flaky(reruns=2, rerun_except=["ResultsDifferError"])
"""Such a test may fail because the machine was too busy; it then runs again, as the summary says, with the emulated
times of its `stretch`, and failing in the third run is a failure. Numbers that differ fail at once: they are right
every time."""


def stretch_of(run: int) -> float:
    """How many times as long emulated times are in a test's run number `run` (from 1): what the machine does beside it
    then is little beside them."""
    return 2.0 ** (run - 1)
