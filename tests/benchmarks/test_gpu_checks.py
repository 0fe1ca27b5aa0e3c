# SPDX-License-Identifier: Apache-2.0
"""The checks for GPUs run on stand-ins, and find what they are for: each gives both verdicts."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpu_check import (
    building,
    first,
    t0_tests,
    t1_queues,
    t2_host_calls,
    t2_sessions,
    t3_resident,
    t4_stream_path,
    t5_sessions,
    t6_host_path,
    t7_training,
)
from gpu_check.findings import NOT_OK, NOT_RUN, OK, Report
from gpu_check.plan import first_call
from gpu_check.t7_memory import NotedMeter, judge_kept
from gpu_check.watchdog import watch
from support.gpu.dry_run import Modelled
from support.gpu.gpu_stand_in import ModelledGpu, StageOnSimulation
from support.gpu.simulated_pipeline import ProcessEndedError, SimulatedStage, play
from support.made_up.memory import MadeUpMemory, MadeUpStage

from adaptra_megatron.control.stage_memory import MemoryMeter
from adaptra_megatron.schedule.ir import Kind
from adaptra_megatron.schedule.schedule_checks import check_schedule
from adaptra_megatron.transport.setup.rendezvous import Rendezvous
from adaptra_megatron.transport.single_path import nccl_transport

RANKS = str(Path(__file__).with_name("check_ranks.py"))


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return Report(tmp_path / "report", "T")


def verdicts(report: Report) -> list[str]:
    return [finding.verdict for finding in report.read().findings]


def test_tests_that_need_a_gpu_are_run_by_themselves(tmp_path: Path) -> None:
    """Without the conftest.py of all tests: here all are skipped, and where none has passed nothing was shown."""
    tests = first_call()[-1]
    findings, log = watch(tests, tmp_path / "here")
    assert not log
    assert {finding.verdict for finding in findings[:-1]} == {NOT_RUN}
    assert findings[-1].verdict == NOT_OK
    assert len(findings) > 30


@pytest.mark.parametrize(("body", "expected"), [("pass", [OK]), ("assert 1 == 2", [NOT_OK, NOT_OK])])
def test_tests_that_fail_are_told(report: Report, tmp_path: Path, body: str, expected: list[str]) -> None:
    name = f"test_it_{len(expected)}"
    tmp_path.joinpath(f"{name}.py").write_text(f"def {name}(): {body}\n")
    t0_tests.run(None, report, str(tmp_path))
    assert verdicts(report) == expected
    assert (f"::{name}" in report.read().findings[0].promise) is (NOT_OK in expected)


@pytest.mark.parametrize(
    ("gpu", "asked", "expected"),
    [
        (ModelledGpu(1), "1", [OK, OK, OK]),
        (ModelledGpu(8, seed=1), "1", [OK, NOT_OK, NOT_OK]),
        (ModelledGpu(10_000), "32", [OK, OK, OK, OK, OK]),
        (ModelledGpu(1), "32", [OK, NOT_RUN, NOT_OK, NOT_OK]),
        (ModelledGpu(1, serial=True), "1", [NOT_OK, OK, OK]),
    ],
    ids=["one", "not one", "many", "not many", "serial"],
)
def test_queues_that_streams_share_are_found(
    report: Report, monkeypatch: pytest.MonkeyPatch, gpu: ModelledGpu, asked: str, expected: list[str]
) -> None:
    monkeypatch.setattr(t1_queues, "HELD_S", 0.002)
    t1_queues.run(gpu, report, asked)
    assert verdicts(report) == expected


class HoldingGpu(Modelled):
    """Where events that tell no time hold up the queue, too."""

    def record(self, stream: Any, *, timed: bool = False, blocking: bool = False) -> Any:
        return super().record(stream, timed=True)


@pytest.mark.parametrize(
    ("gpu", "expected", "held"),
    [(Modelled(1), OK, [0, 0, 8, 8, 8, 8]), (Modelled(10_000), OK, [0] * 6), (HoldingGpu(1), NOT_OK, [8] * 6)],
    ids=["one queue", "many", "all events hold"],
)
def test_events_that_hold_up_computation_are_found(
    report: Report, monkeypatch: pytest.MonkeyPatch, gpu: Modelled, expected: str, held: list[int]
) -> None:
    monkeypatch.setattr(first, "HELD_S", 0.002)
    first.run(gpu, report, "events")
    assert verdicts(report) == [expected] + [OK] * 5, "what links do without is only reported"
    assert [finding.seen for finding in report.read().findings] == [
        f"computation stood still on {count} of 8 streams" for count in held
    ]


def test_what_a_full_queue_keeps_and_what_spoils_a_capture_is_told(report: Report, monkeypatch: Any) -> None:
    monkeypatch.setattr(first, "BLOCKED_S", 0.1)
    gpu = Modelled()
    first.run(gpu, report, "full")
    assert [each.seen for each in report.read().findings][1:] == ["it returned", "it did not return within 0.1 s"]
    first.run(gpu, report, "capture")
    assert verdicts(report)[-2:] == [OK, OK]
    monkeypatch.setattr(gpu, "captured_with_thread", lambda ours: "operation not permitted")
    first.run(gpu, report, "capture")
    assert verdicts(report)[-2:] == [OK, NOT_OK]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"waits": "free"}, [OK, OK, NOT_OK, NOT_RUN, OK]),
        ({"waits": "query"}, [NOT_OK, OK, NOT_OK, NOT_RUN, OK]),
        ({"stuck": "free"}, [OK, NOT_OK]),
    ],
    ids=["may wait", "may not wait", "never returns"],
)
def test_calls_that_wait_are_reported_from_those_that_do_not(
    report: Report, monkeypatch: pytest.MonkeyPatch, how: dict[str, str], expected: list[str]
) -> None:
    monkeypatch.setattr(t2_host_calls, "RETURNS_S", 0.2)
    gpu = ModelledGpu(**how)
    t2_host_calls.run(gpu, report)
    gpu._stuck = ""  # else its thread would go on
    assert verdicts(report) == expected
    waited = [finding.promise for finding in report.read().findings if finding.seen == "it waited for the kernel"]
    assert len(waited) == ("waits" in how)


@pytest.mark.parametrize("call", list(t2_sessions.NAMES))
@pytest.mark.parametrize("waits", [False, True])
def test_calls_of_nccl_that_wait_are_reported_from_those_that_do_not(
    report: Report, monkeypatch: pytest.MonkeyPatch, call: str, waits: bool
) -> None:
    monkeypatch.setattr(t2_sessions, "AT_ONCE_S", 0.3 if waits else 10.0)
    function = {"init": "init_rank", "connect": "send", "abort": "abort"}[call]
    assert on_simulation(t2_sessions.run, report, call, waits=function if waits else "") == [None, None]
    (finding,) = report.read().findings
    assert (finding.seen == "it waited for the kernel") is waits
    assert finding.verdict == (NOT_OK if waits and call not in t2_sessions.MAY_WAIT else OK)


@pytest.mark.parametrize(("blocks", "expected"), [(132, {OK}), (98, {OK, NOT_OK})])
def test_multiprocessors_that_are_taken_cost_products_a_wave(report: Report, blocks: int, expected: set[str]) -> None:
    t3_resident.run(ModelledGpu(blocks=blocks), report)
    findings = report.read().findings
    assert len(findings) == 10
    assert {finding.verdict for finding in findings} == expected


def on_simulation(run: Callable[..., None], report: Report, part: str, **how: Any) -> list[Any]:
    def program(stage: SimulatedStage, rendezvous: Rendezvous) -> None:
        try:
            run(StageOnSimulation(stage, rendezvous, **how), report, part)
        finally:
            stage.nccl.abort_hangs.clear()

    return play(2, program)


def test_plans_with_many_in_flight_are_valid() -> None:
    for counts in t4_stream_path.PLANS.values():
        check_schedule(t4_stream_path.in_flight_schedule(*counts))


def test_iterations_over_nccl_bring_what_was_sent(report: Report) -> None:
    assert on_simulation(t4_stream_path.run, report, "iterations") == [None, None]
    assert verdicts(report) == [OK] * 5


def test_iterations_that_bring_something_else_are_found(report: Report) -> None:
    on_simulation(t4_stream_path.run, report, "iterations", adds=1)
    assert verdicts(report) == [OK] + [NOT_OK] * 4


def test_arrival_times_are_held_against_the_senders(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(t4_stream_path, "ROUNDS", 5)
    monkeypatch.setattr(t4_stream_path, "NEAR_S", 0.5)
    assert on_simulation(t4_stream_path.run, report, "arrivals") == [None, None]
    monkeypatch.setattr(t4_stream_path, "NEAR_S", -1.0)
    on_simulation(t4_stream_path.run, report, "arrivals")
    assert verdicts(report) == [OK, NOT_OK]


def test_an_error_ends_both_stages(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_transport, "GRACE_S", 0.2)
    monkeypatch.setattr(t4_stream_path, "PATIENCE_S", 0.3)
    waits, raises = on_simulation(t4_stream_path.run, report, "error")
    assert isinstance(waits, ProcessEndedError)
    assert str(raises) == "made to fail"
    assert report.read().begun == "an error of a stage ends all processes"
    assert verdicts(report) == []


def test_sessions_are_made_and_ended(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(t5_sessions, "SESSIONS", 6)
    monkeypatch.setattr(t5_sessions, "SETTLED", 2)
    assert on_simulation(t5_sessions.run, report, "sessions") == [None, None]
    assert verdicts(report) == [OK] * 4


@pytest.mark.parametrize(("leaks", "expected"), [("memory", [NOT_OK, OK, OK, OK]), ("streams", [OK, NOT_OK, OK, OK])])
def test_sessions_that_leave_something_behind_are_found(
    report: Report, monkeypatch: pytest.MonkeyPatch, leaks: str, expected: list[str]
) -> None:
    monkeypatch.setattr(t5_sessions, "SESSIONS", 4)
    monkeypatch.setattr(t5_sessions, "SETTLED", 2)
    on_simulation(t5_sessions.run, report, "sessions", leaks=leaks)
    assert verdicts(report) == expected


def test_communicators_that_are_never_freed_are_found(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(t5_sessions, "SESSIONS", 2)
    monkeypatch.setattr(t5_sessions, "SETTLED", 1)
    monkeypatch.setattr(t5_sessions, "FREED_S", 0.2)
    on_simulation(t5_sessions.run, report, "sessions", abort_hangs=True)
    assert verdicts(report) == [NOT_OK, OK, OK, NOT_OK]


@pytest.mark.parametrize("dies", [True, False])
def test_a_peer_that_dies_is_reported_from_one_that_lives(
    report: Report, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    monkeypatch.setattr(t5_sessions, "MADE_S", 6.0)
    if not dies:
        monkeypatch.setattr(t5_sessions, "_DiesAtInit", lambda library, die: library)
    _waits, ends = on_simulation(t5_sessions.run, report, "death")
    assert isinstance(ends, RuntimeError) is dies
    assert verdicts(report) == [OK if dies else NOT_OK]


@pytest.mark.parametrize(("least", "expected"), [(0.0, OK), (1e9, NOT_OK)])
def test_copies_into_a_ring_are_held_against_those_into_locked_memory(
    report: Report, monkeypatch: pytest.MonkeyPatch, least: float, expected: str
) -> None:
    monkeypatch.setattr(t6_host_path, "LEAST_OF_LOCKED", least)
    play(1, lambda stage, rendezvous: t6_host_path.run(StageOnSimulation(stage, rendezvous), report, "ring"))
    assert verdicts(report) == [expected]


@pytest.mark.parametrize(
    ("module", "part", "count"),
    [
        ("t5_sessions", "paths", 3),
        ("t5_sessions", "one_gpu", 1),
        ("t6_host_path", "stalls", 2),
        ("t6_host_path", "throughput shm", 2),
    ],
)
def test_checks_of_two_processes_give_both_verdicts(
    start_ranks: Callable[..., object], tmp_path: Path, module: str, part: str, count: int
) -> None:
    for machine, expected in (("CpuStage", OK), ("FailingCpuStage", NOT_OK)):
        report = Report(tmp_path / machine, "T")
        ranks = [RANKS, str(tmp_path / machine), "T", f"gpu_check.{module}", f"support.gpu.gpu_stand_in:{machine}"]
        start_ranks(2, [*ranks, *part.split()], timeout_s=60)
        findings = report.read().findings
        assert len(findings) == count
        # Probes are timed, not read.
        assert {each.verdict for each in findings if "probed" not in each.promise} == {expected}, findings


def test_training_is_compared_with_stock(start_ranks: Callable[..., object], tmp_path: Path) -> None:
    """On the CPU what has one path goes by threads that wait, which is not what a GPU is to show."""
    report = tmp_path / "report"
    start_ranks(
        2,
        [RANKS, str(report), "T", "gpu_check.t7_training", "support.gpu.gpu_stand_in:CpuTrainer", "device"],
        timeout_s=200,
    )
    findings = Report(report, "T").read().findings
    assert [finding.verdict for finding in findings] == [OK, OK, NOT_OK, OK, OK, OK]
    assert "WaitingThreadTransport" in findings[2].seen
    assert all("0.0 MiB allocated and 0.0 active" in finding.seen for finding in findings[3::2])


@pytest.mark.parametrize(("released", "shown"), [(0.25, True), (0.625, False)])
def test_what_a_split_backward_keeps_is_told(released: float, shown: bool) -> None:
    """Actions of a stage that gives 40% of an activation back in I; `released` is what plans reckon with."""
    memory = MadeUpMemory(10 << 30)
    stage = MadeUpStage(memory, 100 << 20, message=10 << 20, released=0.4)
    meter = NotedMeter(
        MemoryMeter(memory, 0.9, settled_iterations=0),
        lambda: {"allocated": memory.allocated, "active": memory.allocated + memory.lingering},
    )
    meter.begin(0)
    for kinds in (Kind.FORWARD, Kind.BACKWARD), (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
        for kind in kinds * 3:
            stage.receive(kind)
            meter.before()
            stage.compute(kind)
            meter.after(kind, 0)
            stage.end(kind)
    assert meter.kept() is None, "no activation's bytes are known before the iteration is over"
    meter.finish(10 << 20)
    seen, ok = judge_kept([meter.kept()], [released])
    assert "60.0 MiB allocated and 60.0 active, 0.50 of an activation" in seen
    assert ok is shown
    assert not judge_kept([meter.kept()], None)[1]
    assert not judge_kept([None], [0.0])[1]


def test_trainings_that_differ_are_found() -> None:
    rank = {"different": [], "compared": 5, "seconds": [1.0], "transports": [], "losses": [2.0, 1.0]}
    rank |= {"by_device": 0, "peaks": {}}
    assert t7_training.judge("stock again", [rank])[1]
    ours = {"transports": ["HostTransport"], "peaks": {"reserved": 0.1}}
    seen, shown = t7_training.judge("host path, shm", [{**rank, **ours}])
    assert shown
    assert "peaks of memory: reserved 0.1000" in seen
    wrong = [
        {"different": ["losses"]},
        {"compared": 0},
        {"transports": ["HostTransport"]},
        {"losses": [1.0, 1.0]},
        {"by_device": 1},
        {"peaks": {"reserved": 0.95}},
    ]
    for each in wrong:
        assert not t7_training.judge("stock again", [{**rank, **each}])[1], each


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_kernels_are_as_large_as_those_of_nccl(tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    assert nvcc is not None
    said = subprocess.run(
        [*building.kernel_command(nvcc, tmp_path / "kernels.so", "90"), "-Xptxas", "-v"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stderr
    assert "Used 96 registers" in said
    assert " 0 bytes spill stores" in said.partition("take_multiprocessor")[2]
    library = ctypes.CDLL(str(tmp_path / "kernels.so"))
    assert library.held_words() > 0
    assert library.stand_until_set(None, None) != 0, "there is no GPU here"
    assert Path(building.cuda_home(nvcc), "include", "cuda_runtime.h").exists()
