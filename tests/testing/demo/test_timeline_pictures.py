# SPDX-License-Identifier: Apache-2.0
import sys
from pathlib import Path

import matplotlib.image
import numpy
import pytest
from matplotlib.colors import to_rgb
from support.played_schedules import played

from adaptra_megatron.schedule.classic import interleaved, one_f_one_b, zb_h1
from adaptra_megatron.schedule.costs import LinkCost, uniform_costs_for
from adaptra_megatron.schedule.ir import Schedule
from adaptra_megatron.telemetry.action_records import ActionRecord
from testing.demo import timeline_pictures
from testing.demo.timeline_pictures import TimelineRun, draw_timelines, picture_size


def run_of(schedule: Schedule, title: str, lower_bound_s: float | None = None) -> TimelineRun:
    slow = LinkCost(latency_s=0.06)
    costs = uniform_costs_for(
        schedule,
        forward_s=0.02,
        backward_input_s=0.02,
        backward_weight_s=0.02,
        links={(1, 2): slow, (2, 1): slow},
    )
    return TimelineRun(title=title, records=played(schedule, costs, start_s=77.0), lower_bound_s=lower_bound_s)


def pixels_of(picture: numpy.ndarray, colour: str) -> int:
    return int((numpy.abs(picture[:, :, :3] - numpy.array(to_rgb(colour))).max(axis=2) < 0.02).sum())


def test_two_runs_of_eight_stages(tmp_path: Path) -> None:
    runs = [
        run_of(one_f_one_b(8, 24), "stock 1F1B", lower_bound_s=1.7),
        run_of(zb_h1(8, 24), "adaptra", lower_bound_s=1.7),
    ]
    path = draw_timelines(runs, tmp_path / "new" / "two.png", title="link 1-2 at 60 ms")
    picture = matplotlib.image.imread(path)
    assert picture.shape[1::-1] == picture_size([8, 8])
    for look in timeline_pictures._LOOKS.values():
        assert pixels_of(picture, look.colour) > 10_000
    assert pixels_of(picture, timeline_pictures._IDLE_COLOUR) > 50_000
    assert pixels_of(picture, timeline_pictures._BOUND_COLOUR) > 500
    # Numbers stand in the bars: dark and light pixels amid the colours.
    assert pixels_of(picture, timeline_pictures._TEXT_COLOUR) > 2_000


def test_bars_cover_the_time_that_was_computed(tmp_path: Path) -> None:
    """Stage 0 computes in the first half of the iteration, stage 1 in the second."""
    records = [ActionRecord(0, 0, "F", 0, 0, 5.0, 5.0, 6.0), ActionRecord(0, 1, "F", 0, 0, 5.0, 6.0, 7.0)]
    picture = matplotlib.image.imread(
        draw_timelines([TimelineRun(title="halves", records=records)], tmp_path / "halves.png")
    )
    blue = numpy.abs(picture[:, :, :3] - numpy.array(to_rgb(timeline_pictures._LOOKS["F"].colour))).max(axis=2) < 0.02
    wide = blue.sum(axis=1) > 500  # pixel rows of bars, not of the legend
    (rows,) = numpy.nonzero(wide)
    middle = (rows[0] + rows[-1]) // 2
    (upper,) = numpy.nonzero(blue[rows[0] : middle].any(axis=0) & ~blue[middle : rows[-1]].any(axis=0))
    (lower,) = numpy.nonzero(blue[middle : rows[-1]].any(axis=0) & ~blue[rows[0] : middle].any(axis=0))
    assert upper.max() < lower.min()
    assert len(upper) == pytest.approx(len(lower), rel=0.02)


def test_chunks_have_shades_of_their_own(tmp_path: Path) -> None:
    picture = matplotlib.image.imread(
        draw_timelines([run_of(interleaved(4, 8, 2), "interleaved")], tmp_path / "chunks.png")
    )
    colour = timeline_pictures._LOOKS["F"].colour
    lighter = tuple(float(part) for part in timeline_pictures._shade(colour, 1, 2))
    assert lighter != to_rgb(colour)
    assert pixels_of(picture, colour) > 10_000
    assert pixels_of(picture, matplotlib.colors.to_hex(lighter)) > 10_000


def test_no_bound_no_dashed_line(tmp_path: Path) -> None:
    picture = matplotlib.image.imread(draw_timelines([run_of(one_f_one_b(4, 4), "stock")], tmp_path / "stock.png"))
    assert pixels_of(picture, timeline_pictures._BOUND_COLOUR) == 0


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run"):
        draw_timelines([], tmp_path / "none.png")
    record = ActionRecord(0, 0, "F", 0, 0, 0.0, 0.0, 1.0)
    two = TimelineRun(title="two iterations", records=[record, record._replace(iteration=1)])
    with pytest.raises(ValueError, match="one iteration"):
        draw_timelines([two], tmp_path / "two.png")
    with pytest.raises(ValueError, match="'nothing' has no records"):
        draw_timelines([TimelineRun(title="nothing", records=[])], tmp_path / "nothing.png")
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"adaptra-megatron\[plot\]"):
        draw_timelines([run_of(one_f_one_b(4, 4), "stock")], tmp_path / "stock.png")
