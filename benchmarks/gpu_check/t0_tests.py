# SPDX-License-Identifier: Apache-2.0
"""T0: the tests that need a GPU, tests/gpu."""

from __future__ import annotations

import pytest

from gpu_check.building import REPOSITORY
from gpu_check.findings import Report

FOLDER = REPOSITORY / "tests" / "gpu"


class _Outcomes:
    """A plugin of pytest."""

    def __init__(self, report: Report) -> None:
        self.passed = 0
        self._report = report

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self._report.begin(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Part of a test has ended."""
        if report.skipped:
            self._report.leave_out(report.nodeid, str(report.longrepr))
        elif report.failed:
            self._report.show(report.nodeid, report.longreprtext.splitlines()[-1], False)
        elif report.when == "call":
            self.passed += 1


def run(machine: object, report: Report, folder: str = str(FOLDER)) -> None:
    """`folder`: of the tests."""
    outcomes = _Outcomes(report)
    # Not the conftest.py above it, which needs Hypothesis and has Megatron run on the CPU.
    status = pytest.main(["-v", "-p", "no:cacheprovider", f"--confcutdir={folder}", folder], plugins=[outcomes])
    seen = f"{outcomes.passed} passed; pytest ended with {int(status)}"
    report.show("tests that need a GPU pass", seen, status == 0 and outcomes.passed > 0)
