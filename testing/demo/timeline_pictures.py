# SPDX-License-Identifier: Apache-2.0
"""Draw an iteration: a row per stage, a bar per action, and the idle time between them.

Needs matplotlib (`pip install 'adaptra-megatron[plot]'`), imported when a picture is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from adaptra_megatron.telemetry.action_records import ActionRecord
from adaptra_megatron.tools.recordings.run_files import bubble_fraction, iteration_span_s

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES = 20.0
DOTS_PER_INCH = 150
_ROW_INCHES = 0.38
_RUN_TITLE_INCHES = 0.60
_HEADER_INCHES = 0.74
_FOOTER_INCHES = 0.62
_LEFT_INCHES, _RIGHT_INCHES = 0.85, 0.95
_BAR_FRACTION = 0.82
"""Share of its row that a bar fills."""
_NUMBER_POINTS = (9.0, 8.0, 7.0, 6.0, 5.0)
"""Font sizes to try for the micro-batch numbers in the bars, largest first."""
_DIGIT_WIDTH = 0.66
"""Width of a digit with its margin, as a fraction of the font size."""


class _Look(NamedTuple):
    colour: str
    number_colour: str
    name: str


_LOOKS = {
    "F": _Look("#3f78b5", "white", "F  forward"),
    "B": _Look("#2f8f5b", "white", "B  backward, both gradients"),
    "I": _Look("#56b8a6", "#0c332c", "I  input gradient"),
    "W": _Look("#f2b84b", "#4a3400", "W  weight gradient"),
}
_IDLE_COLOUR = "#e8e9ed"
_BOUND_COLOUR = "#c62828"
_TEXT_COLOUR = "#1f2328"
_MUTED_COLOUR = "#6b7280"


@dataclass(frozen=True, kw_only=True)
class TimelineRun:
    """One iteration to draw."""

    title: str
    """Name of the run, such as "stock 1F1B"; the iteration's time is written next to it."""
    records: Sequence[ActionRecord]
    """Records of one iteration, with one rank per stage."""
    lower_bound_s: float | None = None
    """Proven lower bound of the iteration's time, drawn as a dashed line."""


def draw_timelines(runs: Sequence[TimelineRun], path: Path | str, *, title: str = "") -> Path:
    """Draw `runs` above each other on one time axis and write the picture; its format follows the suffix of `path`.

    Returns the path. Raises ImportError naming the extra if matplotlib is missing, ValueError if there is no run or a
    run's records are not those of one iteration, OSError if the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a timeline picture needs matplotlib: pip install 'adaptra-megatron[plot]'") from error
    if not runs:
        raise ValueError("there is no run to draw")
    for run in runs:
        if not run.records:
            raise ValueError(f"run {run.title!r} has no records to draw")
    spans_s = [_duration_s(run) for run in runs]
    axis_end_s = 1.006 * max(max(spans_s), *(run.lower_bound_s or 0.0 for run in runs))
    stage_counts = [_stages(run) for run in runs]
    height = _height_inches(stage_counts)
    figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DOTS_PER_INCH, facecolor="white")
    FigureCanvasAgg(figure)
    bottom = height - _HEADER_INCHES
    for run, stages in zip(runs, stage_counts, strict=True):
        bottom -= _RUN_TITLE_INCHES + stages * _ROW_INCHES
        width = WIDTH_INCHES - _LEFT_INCHES - _RIGHT_INCHES
        axes = figure.add_axes(
            (_LEFT_INCHES / WIDTH_INCHES, bottom / height, width / WIDTH_INCHES, stages * _ROW_INCHES / height)
        )
        _draw_rows(axes, run, stages, axis_end_s)
        _draw_marks(axes, run, axis_end_s)
        _draw_run_title(axes, run, runs[0])
    _label_time_axes(figure.axes)
    _draw_header(figure, runs, title, height)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def picture_size(stage_counts: Sequence[int]) -> tuple[int, int]:
    """Return width and height in pixels of a PNG with one run for each number of stages."""
    return int(WIDTH_INCHES * DOTS_PER_INCH), int(_height_inches(stage_counts) * DOTS_PER_INCH)


def _height_inches(stage_counts: Sequence[int]) -> float:
    return _HEADER_INCHES + _FOOTER_INCHES + sum(_RUN_TITLE_INCHES + count * _ROW_INCHES for count in stage_counts)


def _duration_s(run: TimelineRun) -> float:
    start_s, end_s = iteration_span_s(run.records)
    return end_s - start_s


def _stages(run: TimelineRun) -> int:
    return 1 + max(record.stage for record in run.records)


def _draw_rows(axes: Axes, run: TimelineRun, stages: int, axis_end_s: float) -> None:
    """Draw bars, numbers, stage names on the left and bubbles on the right. Stage 0 is the top row."""
    origin_s, end_s = iteration_span_s(run.records)
    chunks = 1 + max(record.chunk for record in run.records)
    axes.set_xlim(0.0, axis_end_s)
    axes.set_ylim(stages - 0.5, -0.5)
    points_per_second = (WIDTH_INCHES - _LEFT_INCHES - _RIGHT_INCHES) * 72 / axis_end_s
    for stage in range(stages):
        axes.broken_barh([(0.0, end_s - origin_s)], (stage - _BAR_FRACTION / 2, _BAR_FRACTION), color=_IDLE_COLOUR)
    for kind, look in _LOOKS.items():
        for chunk in range(chunks):
            bars = [record for record in run.records if record.kind == kind and record.chunk == chunk]
            _draw_bars(axes, bars, origin_s, _shade(look.colour, chunk, chunks))
            _draw_numbers(axes, bars, origin_s, look.number_colour, points_per_second)
    axes.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)])
    axes.tick_params(axis="y", length=0, labelsize=10, labelcolor=_TEXT_COLOUR)
    for stage, fraction in bubble_fraction(run.records).items():
        axes.annotate(
            f"{fraction:.0%} idle",
            (1.0, stage),
            (8, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=_MUTED_COLOUR,
            annotation_clip=False,
        )
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#b8bcc4")


def _draw_bars(
    axes: Axes, records: Sequence[ActionRecord], origin_s: float, colour: tuple[float, float, float]
) -> None:
    for stage in sorted({record.stage for record in records}):
        spans = [(record.start_s - origin_s, record.compute_s) for record in records if record.stage == stage]
        axes.broken_barh(
            spans, (stage - _BAR_FRACTION / 2, _BAR_FRACTION), facecolor=colour, edgecolor="white", linewidth=0.5
        )


def _draw_numbers(
    axes: Axes, records: Sequence[ActionRecord], origin_s: float, colour: str, points_per_second: float
) -> None:
    """Write the number of the micro-batch into each bar, in the largest font size that fits most bars. Bars that are
    too short get none.
    """
    if not records:
        return
    digits = max(len(str(record.micro_batch)) for record in records)
    common_room = median(record.compute_s for record in records) * points_per_second
    size = next((size for size in _NUMBER_POINTS if digits * _DIGIT_WIDTH * size <= common_room), _NUMBER_POINTS[-1])
    for record in records:
        text = str(record.micro_batch)
        if len(text) * _DIGIT_WIDTH * size <= record.compute_s * points_per_second:
            middle_s = (record.start_s + record.end_s) / 2 - origin_s
            axes.text(middle_s, record.stage, text, ha="center", va="center_baseline", fontsize=size, color=colour)


def _shade(colour: str, chunk: int, chunks: int) -> tuple[float, float, float]:
    """Return a lighter colour for later chunks, so that the passes of an interleaved schedule can be distinguished."""
    from matplotlib.colors import to_rgb

    lighter = 0.45 * chunk / max(chunks - 1, 1)
    red, green, blue = (part + (1.0 - part) * lighter for part in to_rgb(colour))
    return red, green, blue


def _draw_marks(axes: Axes, run: TimelineRun, axis_end_s: float) -> None:
    """Draw the makespan as a line, and the lower bound as a dashed one."""
    axes.axvline(_duration_s(run), color=_TEXT_COLOUR, linewidth=1.4)
    if run.lower_bound_s is not None:
        axes.axvline(run.lower_bound_s, color=_BOUND_COLOUR, linewidth=1.4, linestyle=(0, (5, 3)))


def _draw_run_title(axes: Axes, run: TimelineRun, reference: TimelineRun) -> None:
    duration_s = _duration_s(run)
    parts = [f"{duration_s * 1e3:,.0f} ms"]
    if run.lower_bound_s:
        parts.append(f"{duration_s / run.lower_bound_s:.2f} x the lower bound")
    if run is not reference:
        parts.append(f"{_duration_s(reference) / duration_s:.2f} x as fast as {reference.title}")
    name = axes.annotate(
        run.title,
        (0, 1),
        (0, 7),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=13,
        fontweight="bold",
        color=_TEXT_COLOUR,
        annotation_clip=False,
    )
    axes.annotate(
        "   " + "  ·  ".join(parts),
        (1, 1),
        (0, 7),
        xycoords=(name, "axes fraction"),
        textcoords="offset points",
        fontsize=12,
        color=_TEXT_COLOUR,
        annotation_clip=False,
    )


def _label_time_axes(all_axes: Sequence[Axes]) -> None:
    """Use one time scale for all runs, with numbers under the last one only."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    for axes in all_axes:
        axes.xaxis.set_major_locator(MaxNLocator(12, steps=[1, 2, 2.5, 5, 10]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds * 1e3:,.0f}"))
        axes.tick_params(axis="x", color="#b8bcc4", labelcolor=_TEXT_COLOUR, labelsize=9.5)
        axes.tick_params(axis="x", labelbottom=axes is all_axes[-1])
    all_axes[-1].set_xlabel("time since the iteration's first forward, ms", fontsize=10.5, color=_TEXT_COLOUR)


def _draw_header(figure: Figure, runs: Sequence[TimelineRun], title: str, height: float) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    kinds = {record.kind for run in runs for record in run.records}
    handles: list[Patch | Line2D] = [
        Patch(color=look.colour, label=look.name) for kind, look in _LOOKS.items() if kind in kinds
    ]
    if any(record.chunk for run in runs for record in run.records):
        handles.append(Patch(color=_shade(_LOOKS["F"].colour, 1, 2), label="lighter: later chunk"))
    handles.append(Patch(color=_IDLE_COLOUR, label="idle"))
    handles.append(Line2D([], [], color=_TEXT_COLOUR, linewidth=1.4, label="end"))
    if any(run.lower_bound_s is not None for run in runs):
        handles.append(
            Line2D([], [], color=_BOUND_COLOUR, linewidth=1.4, linestyle=(0, (5, 3)), label="proven lower bound")
        )
    left = _LEFT_INCHES / WIDTH_INCHES
    figure.text(left, 1 - 0.24 / height, title, fontsize=15, fontweight="bold", va="center", color=_TEXT_COLOUR)
    figure.legend(
        handles=handles,
        loc="center left",
        bbox_to_anchor=(left - 0.004, 1 - 0.62 / height),
        ncols=len(handles),
        frameon=False,
        fontsize=10,
        handlelength=1.3,
        columnspacing=1.8,
        handletextpad=0.5,
        borderaxespad=0.0,
    )
