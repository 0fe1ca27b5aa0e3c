# SPDX-License-Identifier: Apache-2.0
"""For tests of what several real threads or processes do in time, on a machine that does other work."""

from __future__ import annotations

import pytest

judged_by_the_clock = pytest.mark.flaky(reruns=1, only_rerun=["^AssertionError"])
"""An assertion may fail once because the machine was too busy; the test then runs again, as the summary says, and twice
is a failure. Other exceptions fail at once: `ResultsDifferError`, say, as numbers are right every time."""
