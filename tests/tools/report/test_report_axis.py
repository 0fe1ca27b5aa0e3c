# SPDX-License-Identifier: Apache-2.0
"""Timelines that are to be compared by eye have one scale."""

from __future__ import annotations

import re

import pytest

from adaptra_megatron.telemetry.action_records import ActionRecord
from adaptra_megatron.tools.recordings.run_record import RunIteration
from adaptra_megatron.tools.report.timelines import Timeline


def bar_widths(seconds: float, axis_s: float | None) -> list[float]:
    """Widths of the bars of one forward and one backward of half the iteration each."""
    half = seconds / 2
    records = (ActionRecord(0, 0, "F", 0, 0, 0.0, 0.0, half), ActionRecord(0, 0, "B", 0, 0, half, half, seconds))
    iteration = RunIteration(number=0, start_s=0.0, seconds=seconds, records=records)
    svg = Timeline(iteration, 0.1, axis_s=axis_s).svg()
    return [float(width) for width in re.findall(r'class="use-\w+" d="M[\d.]+ \d+h([\d.]+)v', svg)]


def test_bars_of_the_same_length_are_as_wide_whatever_the_iteration_takes() -> None:
    (short, _), (long, _) = bar_widths(1.0, 4.0), bar_widths(2.0, 4.0)
    assert long == pytest.approx(2 * short, rel=0.02)


def test_without_an_axis_of_its_own_the_iteration_fills_the_drawing() -> None:
    assert bar_widths(1.0, None) == bar_widths(2.0, None) == bar_widths(2.0, 2.0)
