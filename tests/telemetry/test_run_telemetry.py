# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest

from adaptra_megatron.control.decisions import PackedFigures
from adaptra_megatron.telemetry.action_records import ActionRecord
from adaptra_megatron.telemetry.changes import (
    MAX_BATCH,
    MAX_BATCH_S,
    MEASURED_OVER,
    IterationTimes,
    PathState,
    PathWatch,
    SwitchWatch,
)
from adaptra_megatron.telemetry.event_log import read_events
from adaptra_megatron.telemetry.events import (
    Fault,
    IterationsTimed,
    PathChanged,
    PlanSwitched,
    RunEnded,
    RunStarted,
    SwitchMeasured,
)
from adaptra_megatron.telemetry.run_telemetry import RankPlace, RunTelemetry, TelemetrySettings
from adaptra_megatron.telemetry.scalars import MEGATRON_VARIABLES, JobFigures, RankFigures
from adaptra_megatron.telemetry.trace import read_traces
from adaptra_megatron.telemetry.trace_requests import request_directory

START = RunStarted(layout={"stages": 2}, versions={}, config={})
DEVICE, HOST = PathState("device", 0, 0), PathState("host", 1, 1)


def place(*, leads: bool = True, rank: int = 0) -> RankPlace:
    return RankPlace(run="run", rank=rank, local_rank=rank, stage=rank, leads=leads)


def figures(seconds: float = 1.0) -> RankFigures:
    return RankFigures(iteration_s=seconds, peak_in_flight=4.0, plan_number=0)


def test_a_switch_is_measured_after_some_iterations() -> None:
    watch = SwitchWatch()
    for seconds in (9.0, 2.0, 2.0, 8.0):
        assert watch.iteration(seconds) is None
    assert watch.switched(0) is None
    assert watch.switched(1, predicted_s=1.0, before_predicted_s=2.0) == PlanSwitched(
        number=1, before=0, predicted_s=1.0, before_predicted_s=2.0, before_measured_s=2.0
    )
    assert watch.switched(1) is None
    found = [watch.iteration(seconds) for seconds in (1.0, 7.0, 1.5, 1.0)]
    gain = SwitchMeasured(number=1, before_measured_s=2.0, after_measured_s=1.5, iterations=MEASURED_OVER)
    assert found == [None, None, gain, None]


def test_a_switch_before_anything_was_measured_has_no_gain() -> None:
    watch = SwitchWatch()
    event = watch.switched(1)
    assert event is not None
    assert event.before_measured_s is None
    assert [watch.iteration(1.0) for _ in range(5)] == [None] * 5


def test_a_switch_soon_after_another_is_measured_alone() -> None:
    watch = SwitchWatch()
    watch.iteration(4.0)
    watch.switched(1)
    watch.iteration(3.0)
    watch.switched(2)
    found = [watch.iteration(2.0) for _ in range(MEASURED_OVER)]
    assert found[-1] == SwitchMeasured(number=2, before_measured_s=3.0, after_measured_s=2.0, iterations=MEASURED_OVER)


def test_times_are_reported_in_batches_of_iterations_in_a_row() -> None:
    times = IterationTimes()
    assert times.rest() is None
    assert [times.add(number, 0.5) for number in range(5, 5 + MAX_BATCH)] == [None] * MAX_BATCH
    full = times.add(5 + MAX_BATCH, 2.0)
    assert full == IterationsTimed(first=5, seconds=[0.5] * MAX_BATCH)
    after_evaluation = times.add(50, 3.0)
    assert after_evaluation == IterationsTimed(first=5 + MAX_BATCH, seconds=[2.0])
    assert times.rest() == IterationsTimed(first=50, seconds=[3.0])
    assert [times.add(number, 0.6 * MAX_BATCH_S) for number in (0, 1)] == [None] * 2
    assert times.add(2, 1.0) == IterationsTimed(first=0, seconds=[0.6 * MAX_BATCH_S] * 2), "soon enough to be watched"


def test_a_rank_that_leads_from_now_on_has_the_times_that_the_dead_one_took_with_it(tmp_path: Path) -> None:
    telemetry = RunTelemetry(TelemetrySettings(trace_dir=tmp_path), place(leads=False), START)
    for number in range(3):
        telemetry.begin(number)
        if number == 2:
            telemetry.lead(leads=True)
        telemetry.trained(figures(0.5))
    telemetry.close()
    reported = [found.event for found in read_events(tmp_path) if isinstance(found.event, IterationsTimed)]
    assert reported == [IterationsTimed(first=0, seconds=[0.5] * 3, step=1)]


def test_changes_of_path_are_failovers_only_if_a_session_was_lost() -> None:
    watch = PathWatch(3)
    assert watch.look({4: DEVICE}) == []
    assert watch.look({4: DEVICE}) == []
    (lost,) = watch.look({4: HOST})
    assert isinstance(lost, PathChanged)
    assert (lost.source, lost.target, lost.before, lost.after, lost.failover) == (3, 4, "device", "host", True)
    (back,) = watch.look({4: PathState("device", 2, 1)})
    assert isinstance(back, PathChanged)
    assert (back.before, back.after, back.failover) == ("host", "device", False)
    (preferred,) = watch.look({4: PathState("host", 3, 1)})
    assert isinstance(preferred, PathChanged)
    assert not preferred.failover
    (twice,) = watch.look({4: PathState("host", 5, 1)})
    assert isinstance(twice, PathChanged)
    assert "2 changes" in twice.cause
    assert watch.failovers == 1


def test_a_delegate_started_again_is_a_fault() -> None:
    watch = PathWatch(3)
    assert watch.look({}, 1) == []
    assert watch.look({}, 1) == []
    assert watch.look({}, 3) == [Fault(what="delegate restarted", detail="2 times since the iteration before", stage=3)]


def test_a_rank_tells_its_story(tmp_path: Path) -> None:
    telemetry = RunTelemetry(TelemetrySettings(trace_dir=tmp_path), place(), START)
    for iteration in range(5):
        telemetry.begin(iteration)
        telemetry.switch(1 if iteration >= 2 else 0)
        telemetry.traced(iteration, [ActionRecord(iteration, 0, "F", 0, 0, 0.0, 0.0, 1.0)])
        telemetry.trained(figures(2.0 if iteration < 2 else 1.0), {1: HOST if iteration >= 3 else DEVICE})
    telemetry.close()
    telemetry.close()
    reported = [(found.event.name, found.stamp.iteration) for found in read_events(tmp_path)]
    assert reported == [("run_started", -1), ("switch", 2), ("path", 3), ("gain", 4), ("times", 4), ("run_ended", 4)]
    (trace,) = read_traces(tmp_path)
    assert [record.iteration for record in trace.records] == list(range(5))


@pytest.mark.parametrize(
    ("program", "reason"), [("pass", "the program ended"), ("raise ValueError('link 3')", "ValueError: link 3")]
)
def test_a_program_that_ends_says_why(tmp_path: Path, program: str, reason: str) -> None:
    lines = (
        "import sys; sys.path[:0] = [sys.argv[2]]; from test_run_telemetry import *",
        "telemetry = RunTelemetry(TelemetrySettings(trace_dir=Path(sys.argv[1])), place(), START)",
        program,
    )
    subprocess.run(
        [sys.executable, "-c", "\n".join(lines), tmp_path, Path(__file__).parent], stderr=subprocess.DEVNULL, timeout=60
    )
    assert read_events(tmp_path)[-1].event == RunEnded(reason=reason)


def test_only_the_leader_tells_of_plans(tmp_path: Path) -> None:
    telemetry = RunTelemetry(TelemetrySettings(trace_dir=tmp_path), place(leads=False, rank=1), START)
    telemetry.begin(0)
    telemetry.switch(1)
    telemetry.trained(figures())
    telemetry.close()
    assert [found.event.name for found in read_events(tmp_path)] == ["run_started", "run_ended"]


def test_iterations_asked_for_reach_every_rank(tmp_path: Path) -> None:
    settings = TelemetrySettings(trace_dir=tmp_path, every_iteration=False)
    ranks = [RunTelemetry(settings, place(leads=rank == 0, rank=rank), START) for rank in range(2)]
    for iteration in range(8):
        if iteration == 3:
            (request_directory(tmp_path) / "next-2").touch()
        requests = ranks[0].requests()
        assert ranks[1].requests() == ()
        for rank, telemetry in enumerate(ranks):
            telemetry.begin(iteration, requests)
            telemetry.traced(iteration, [ActionRecord(iteration, rank, "F", 0, 0, 0.0, 0.0, 1.0)])
            telemetry.trained(figures())
    for telemetry in ranks:
        telemetry.close()
    # Taken while iteration 2 was the latest that had begun: the next but one is the first that all ranks can know of.
    assert [[record.iteration for record in trace.records] for trace in read_traces(tmp_path)] == [[4, 5], [4, 5]]


def test_without_a_directory_there_are_still_scalars(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[dict[str, float], int]] = []
    variables = SimpleNamespace(
        get_tensorboard_writer=lambda: None,
        get_wandb_writer=lambda: SimpleNamespace(log=lambda values, step: written.append((values, step))),
        _GLOBAL_ARGS=SimpleNamespace(curr_iteration=10),
    )
    monkeypatch.setitem(sys.modules, MEGATRON_VARIABLES, variables)
    telemetry = RunTelemetry(TelemetrySettings(), place(), START)
    telemetry.begin(0, job=PackedFigures.of(JobFigures(bubble_fraction=0.5)))
    telemetry.traced(0, [])
    telemetry.trained(figures(), {1: DEVICE})
    variables._GLOBAL_ARGS.curr_iteration = 11
    telemetry.begin(1)
    telemetry.trained(figures(), {1: HOST})
    telemetry.close()
    assert [step for _values, step in written] == [11, 12]
    assert [values["adaptra/bubble_fraction"] for values, _step in written] == [0.5, 0.5]
    assert [values["adaptra/failovers"] for values, _step in written] == [0, 1]


def test_ranks_of_one_host_serve_at_ports_of_their_own() -> None:
    pytest.importorskip("prometheus_client")
    probe = RunTelemetry(TelemetrySettings(prometheus_port=0), place(), START)
    assert probe._endpoint is not None
    port = probe._endpoint.port
    probe.trained(figures(1.25))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert 'adaptra_iteration_seconds{rank="0",stage="0"} 1.25' in answer.read().decode()
    probe.close()
    probe.close()
