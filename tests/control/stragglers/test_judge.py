# SPDX-License-Identifier: Apache-2.0
"""Reports of all cells become findings with their causes, once each, and a verdict for hosts."""

from __future__ import annotations

import logging

import pytest

from adaptra_megatron.common.layout import Cell
from adaptra_megatron.control.detector.straggler_arrivals import LEAST, UNUSUAL, WINDOW, HostFigures, Row
from adaptra_megatron.control.stragglers.straggler_judge import KEPT, StragglerDetector
from adaptra_megatron.control.stragglers.straggler_reports import CellReport, StragglerVerdict
from adaptra_megatron.telemetry.events import ArrivalsSeen, Event, StragglerDetection

BUSY, QUIET = HostFigures(others_cpu=0.97), HostFigures(others_cpu=0.01)


class Job:
    """Three replicas of two stages, of which the last replica may be late, on a host that may be busy."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        names = {
            Cell(replica, stage): (3 * stage + replica, f"node{replica}") for replica in range(3) for stage in (0, 1)
        }
        self.judge = StragglerDetector(names, self.events.append)
        self._names = names
        self._rows: dict[Cell, list[Row]] = {cell: [] for cell in names}
        self.now_s = 0.0

    def train(self, iterations: int, late_s: float = 0.0) -> None:
        for _ in range(iterations):
            for cell, rows in self._rows.items():
                late = cell.replica == 2
                rows.append(
                    Row(len(rows), 1.0 + late_s, 0.1 + late_s * (not late), 0.5 + late_s * (late and cell.stage))
                )

    def look(
        self, host: HostFigures | None = None, missing: tuple[str, ...] = (), skip: Cell | None = None
    ) -> StragglerVerdict:
        self.now_s += 5.0
        reports = {
            cell: CellReport(rows=tuple(rows[-60:]), host=host if cell.replica == 2 else QUIET, missing=missing)
            for cell, rows in self._rows.items()
            if cell != skip
        }
        for cell, report in reports.items():
            self.judge.take(cell, report)
        return self.judge.look(reports, self.now_s)

    @property
    def found(self) -> list[StragglerDetection]:
        return [event for event in self.events if isinstance(event, StragglerDetection)]


def test_a_finding_says_who_since_when_how_much_why_and_what_to_do() -> None:
    job = Job()
    job.train(30)
    assert job.look(BUSY).late == (), "a busy host for which no replica waits is no finding"
    job.train(WINDOW, late_s=0.25)
    verdict = job.look(BUSY)
    (event,) = job.found
    assert (event.replica, event.stage, event.first_rank, event.host) == (2, 1, 5, "node2")
    assert (event.before, event.after, event.since_iteration, event.last, event.of) == ("healthy", "late", 30, 20, 20)
    assert event.reason == (
        "by 250 ms, the last one in 20 of the last 20 iterations, which costs 20% of an iteration; its host's CPUs are "
        "97% busy with other processes; its stage 1 computes 250 ms of an iteration longer than others'"
    )
    assert event.remedy == "end or move these, or give the job CPUs of its own"
    assert list(event.causes) == ["cpu", "compute"]
    ((cell, cpu),) = [(late.cell, late.cpu) for late in verdict.late]
    assert (cell, cpu) == (Cell(2, 1), "its host's CPUs are 97% busy with other processes")
    assert verdict.lags_s[1] == pytest.approx((-0.25, -0.25, 0.25))
    seen = [event for event in job.events if isinstance(event, ArrivalsSeen)][-1]
    assert (seen.until, seen.iterations, list(seen.last[0])) == (49, 20, [0, 0, 20])


def test_a_cause_that_shows_later_is_said_once_and_counts_for_some_looks() -> None:
    job = Job()
    job.train(40, late_s=0.25)
    job.look(QUIET)
    assert [list(event.causes) for event in job.found] == [["compute"]]
    for host in (BUSY, QUIET, BUSY, QUIET, QUIET):
        job.train(1, late_s=0.25)
        verdict = job.look(host)
        assert verdict.late[0].cpu
    assert [(event.before, list(event.causes)) for event in job.found[1:]] == [("late", ["cpu", "compute"])]
    for _ in range(KEPT):
        job.train(1, late_s=0.25)
        verdict = job.look(QUIET)
    assert verdict.late[0].cpu == ""
    job.train(WINDOW)
    assert job.look(QUIET).late == ()
    assert (job.found[-1].before, job.found[-1].after) == ("late", "healthy")
    assert len(job.found) == 3


def test_iterations_that_a_cell_has_not_reported_are_waited_for() -> None:
    job = Job()
    job.train(UNUSUAL + LEAST, late_s=0.25)
    assert job.look(skip=Cell(0, 1)).late == ()
    assert [late.cell.replica for late in job.look().late] == [2]


def test_rows_of_reports_that_came_since_the_last_look_are_judged() -> None:
    """Rows are in a few reports only, and a judge that is late looks once many have come."""
    job, latest = Job(), dict[Cell, CellReport]()
    for _ in range(UNUSUAL + LEAST):
        job.train(1, late_s=0.25)
        for cell, rows in job._rows.items():
            latest[cell] = CellReport(rows=tuple(rows[-3:]), host=None, missing=())
            job.judge.take(cell, latest[cell])
    assert [late.cell.replica for late in job.judge.look(latest, 5.0).late] == [2]


def test_how_all_arrive_is_told_now_and_then() -> None:
    job = Job()
    for _ in range(30):  # 150 s
        job.train(4)
        job.look()
    seen = [event for event in job.events if isinstance(event, ArrivalsSeen)]
    assert [event.until for event in seen] == [19, 67, 115]
    job.judge.finish()
    assert job.events[-1].until == 119  # type: ignore[union-attr]
    job.judge.finish()
    assert len(job.events) == 4


def test_what_to_install_is_said_once_and_the_finding_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    job = Job()
    for late_s in (0.25, 0.0, 0.25):
        job.train(40, late_s)
        job.look(None, missing=("psutil", "nvidia-ml-py"))
    assert [event.after for event in job.found] == ["late", "healthy", "late"]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "psutil and nvidia-ml-py: pip install 'adaptra-megatron[monitor]'" in line


def test_a_finding_is_told_with_its_cause_once_the_hosts_figures_are_there() -> None:
    """They are read only while a cell is late."""
    job = Job()
    job.train(40, late_s=0.25)
    assert [late.logged for late in job.look().late] == [False]
    job.look()
    assert not job.found
    assert [late.logged for late in job.look(BUSY).late] == [True]
    assert [(event.before, list(event.causes)) for event in job.found] == [("healthy", ["cpu", "compute"])]


def test_a_finding_whose_hosts_figures_do_not_come_is_told_all_the_same() -> None:
    job = Job()
    job.train(40, late_s=0.25)
    while not job.found:
        assert job.look().late
        assert job.now_s <= 70.0
    assert [list(event.causes) for event in job.found] == [["compute"]]
    assert job.now_s > 50.0


def test_iterations_that_are_not_judged_yet_are_no_arrivals() -> None:
    job = Job()
    job.train(UNUSUAL - 1)
    job.look()
    job.judge.finish()
    assert not job.events


def test_what_is_over_or_ends_before_it_was_told_is_told_then() -> None:
    over, ended = Job(), Job()
    for job in (over, ended):
        job.train(40, late_s=0.25)
        job.look()
        assert not job.found
    over.train(40)
    over.look()
    ended.judge.finish()
    assert [event.after for event in over.found] == ["late", "healthy"]
    assert [event.after for event in ended.found] == ["late"]
