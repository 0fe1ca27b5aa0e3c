# SPDX-License-Identifier: Apache-2.0
"""Iteration time over the run as SVG, with what happened marked on it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from adaptra_megatron.telemetry.events import PlanMade, StampedEvent
from adaptra_megatron.telemetry.report.wording import duration
from adaptra_megatron.telemetry.run_record import RunIteration, RunRecord

WIDTH, HEIGHT = 900, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 34, 40
_FLAG = 18
"""Size of a marker's flag; flags that would overlap move to the right."""
_MOST_DOTS = 400
"""Of more iterations, only the line is drawn."""
_MOST_POINTS = 2000


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A numbered flag on the chart."""

    number: int
    iteration: int
    tone: str
    """CSS class: "bad", "good" or "plain"."""
    text: str


def iteration_chart(run: RunRecord, slow: Sequence[tuple[int, int]], marks: Sequence[Mark]) -> str:
    """An <svg>. `slow`: first and last iterations, in numbers, of the times when a link was slow."""
    longest_s = max(iteration.seconds for iteration in run.iterations)
    bounds = _bounds(run)
    top_s, step_s = _axis(max([longest_s, *(seconds for _from, seconds in bounds)]))
    frame = _Frame(run.iterations[0].number, run.iterations[-1].number, top_s)
    zones = (
        f'<rect class="slow-zone" x="{frame.x(start - 0.5):.1f}" y="{_TOP}" '
        f'width="{frame.x(end + 0.5) - frame.x(start - 0.5):.1f}" height="{HEIGHT - _TOP - _BOTTOM}"/>'
        for start, end in slow
    )
    return "".join(
        [
            f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Time of each iteration">',
            *zones,
            *_axes(frame, step_s),
            *_bound_lines(bounds, frame),
            *_curve(run, frame),
            *_flags(marks, frame),
            "</svg>",
        ]
    )


@dataclass(frozen=True)
class _Frame:
    """Where numbers and seconds lie on the drawing."""

    first: int
    last: int
    top_s: float

    def x(self, number: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * (number - self.first + 0.5) / (self.last - self.first + 1)

    def y(self, seconds: float) -> float:
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * seconds / self.top_s


def _axes(frame: _Frame, step_s: float) -> Iterator[str]:
    for index in range(round(frame.top_s / step_s) + 1):
        y = frame.y(index * step_s)
        yield f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield _tick(_LEFT - 8, y + 4, "end", duration(index * step_s) if index else "0")
    for number in _ticks(frame.first, frame.last):
        yield _tick(frame.x(number), HEIGHT - _BOTTOM + 18, "middle", str(number))
    yield _tick((WIDTH + _LEFT - _RIGHT) / 2, HEIGHT - 4, "middle", "iteration")


def _tick(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text class="tick" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _bound_lines(bounds: Sequence[tuple[int, float]], frame: _Frame) -> Iterator[str]:
    for index, (begin, seconds) in enumerate(bounds):
        end = bounds[index + 1][0] if index + 1 < len(bounds) else frame.last + 1
        left, right, y = frame.x(begin - 0.5), frame.x(end - 0.5), frame.y(seconds)
        yield f'<line class="bound" x1="{left:.1f}" x2="{right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _curve(run: RunRecord, frame: _Frame) -> Iterator[str]:
    points = [(entry, frame.x(entry.number), frame.y(entry.seconds)) for entry in _drawn(run.iterations)]
    yield f'<polyline class="time-line" points="{" ".join(f"{x:.1f},{y:.1f}" for _entry, x, y in points)}"/>'
    if len(points) > _MOST_DOTS:
        return
    for entry, x, y in points:
        yield (
            f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3.2">'
            f"<title>iteration {entry.number}: {duration(entry.seconds)}</title></circle>"
        )


def _drawn(iterations: Sequence[RunIteration]) -> Sequence[RunIteration]:
    """Of very many, the longest of each few in a row."""
    few = -(-len(iterations) // _MOST_POINTS)
    return [max(iterations[at : at + few], key=lambda entry: entry.seconds) for at in range(0, len(iterations), few)]


def _flags(marks: Sequence[Mark], frame: _Frame) -> Iterator[str]:
    taken_to = -math.inf
    for mark in sorted(marks, key=lambda mark: mark.iteration):
        at = frame.x(min(max(mark.iteration, frame.first), frame.last) - 0.5)
        left = max(at - 1, taken_to + 2)
        taken_to = left + _FLAG
        if taken_to > WIDTH:
            return  # no room for more; the table has them all
        yield (
            f'<g class="mark {mark.tone}"><title>{escape(mark.text)}</title>'
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP - 4}" y2="{HEIGHT - _BOTTOM}"/>'
            f'<line x1="{at:.1f}" x2="{left + 1:.1f}" y1="{_TOP - 4}" y2="{_TOP - 12}"/>'
            f'<rect x="{left:.1f}" y="{_TOP - 30}" width="{_FLAG}" height="{_FLAG}" rx="4"/>'
            f'<text x="{left + _FLAG / 2:.1f}" y="{_TOP - 17}" text-anchor="middle">{mark.number}</text></g>'
        )


def _bounds(run: RunRecord) -> list[tuple[int, float]]:
    """From which iteration on which proven lower bound holds, as far as plans say."""
    found: dict[int, float] = {}
    for stamped in run.events:
        event = stamped.event
        if isinstance(event, PlanMade) and event.lower_bound_s is not None and math.isfinite(event.lower_bound_s):
            found[_clamped(stamped, run)] = event.lower_bound_s
    return sorted(found.items())


def _clamped(stamped: StampedEvent, run: RunRecord) -> int:
    return min(max(stamped.stamp.iteration, run.iterations[0].number), run.iterations[-1].number)


def _axis(longest_s: float) -> tuple[float, float]:
    """End of the axis and the distance of its ticks: about five of them, at round numbers."""
    rough_s = longest_s / 4
    magnitude = 10.0 ** math.floor(math.log10(rough_s))
    step_s = next(magnitude * factor for factor in (1, 2, 2.5, 5, 10) if magnitude * factor >= rough_s)
    return math.ceil(longest_s / step_s) * step_s, step_s


def _ticks(first: int, last: int) -> list[int]:
    """About twelve round numbers from `first` to `last`."""
    rough = max(1.0, (last - first) / 12)
    magnitude = 10 ** math.floor(math.log10(rough))
    step = next(magnitude * factor for factor in (1, 2, 5, 10) if magnitude * factor >= rough)
    return list(range(-(-first // step) * step, last + 1, step))
