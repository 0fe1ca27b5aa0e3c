# SPDX-License-Identifier: Apache-2.0
"""Tables and verdict of the demonstration, from results made up for the purpose."""

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
from demo_results import demo_report

from adaptra_megatron.tools.local_ranks.launch_ranks import LaunchError
from testing.demo import demo
from testing.demo.demo_progress import ProgressReader, Step, progress
from testing.demo.demo_report import DemoReport
from testing.demo.demo_setup import ADAPTRA, STOCK, DemoSetup


def changed(report: DemoReport, **fields: Any) -> DemoReport:
    return dataclasses.replace(report, adaptra=dataclasses.replace(report.adaptra, **fields))


def test_bounds_of_the_setup_are_those_of_its_costs() -> None:
    setup = DemoSetup()
    work_s = (setup.forward_s + setup.backward_input_s + setup.backward_weight_s) * setup.micro_batches
    head_s = (setup.stages - 1) * setup.forward_s
    assert setup.lower_bound_s(slow=False) == pytest.approx(work_s + head_s)
    assert setup.lower_bound_s(slow=True) >= work_s + head_s + setup.latency_s - 1e-9


def test_a_run_without_two_halves_is_refused() -> None:
    with pytest.raises(ValueError, match="half before and after"):
        DemoSetup(iterations=1)
    with pytest.raises(SystemExit) as exit_status:
        demo.main(["--iterations", "1"])
    assert exit_status.value.code == 2


def test_summary_has_the_documented_form() -> None:
    report = demo_report()
    summary = json.loads(json.dumps(report.summary(png=Path("a/b.png"), trace=Path("a/c.json"))))
    assert summary == {
        "stock": {"healthy_s": 1.0, "slow_s": 3.0},
        "adaptra": {"healthy_s": 0.75, "slow_s": 0.875},
        "lower_bound": {
            "healthy_s": report.setup.lower_bound_s(slow=False),
            "slow_s": report.setup.lower_bound_s(slow=True),
        },
        "losses_equal": True,
        "iterations": 6,
        "png": "a/b.png",
        "trace": "a/c.json",
    }
    assert report.problems() == []


def test_tables_tell_times_factors_and_losses() -> None:
    report = demo_report()
    times = report.time_table()
    for expected in ("1,000 ms", "3,000 ms", "3.00 x", "750 ms", "875 ms", "1.17 x", "1.33 x", "3.43 x"):
        assert expected in times
    rows = report.iteration_table().splitlines()[1:]
    assert [row.split()[1] for row in rows] == ["healthy"] * 3 + ["slow"] * 3
    assert all(row.endswith("same") for row in rows)
    assert "5.500000" in rows[1]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"losses": [6.0, 5.5, 5.0, 4.5, 4.0, 3.5000000000000004]}, "losses of the two runs are not equal"),
        ({"losses": [6.0, 5.5]}, "losses of the two runs are not equal"),
        ({"losses": []}, "losses of the two runs are not equal"),
        ({"differences": ["rank 1: parameter x differs"]}, "rank 1: parameter x differs"),
        ({"elements_compared": 0}, "no parameter was compared"),
        ({"links_struck": {}}, "link 1-2 was never slow in the adaptra run"),
    ],
)
def test_whatever_does_not_hold_is_a_problem(fields: dict[str, Any], problem: str) -> None:
    report = changed(demo_report(), **fields)
    assert any(problem in found for found in report.problems())
    assert report.losses_equal is ("losses" not in fields)


def test_a_single_different_loss_is_marked_in_its_row() -> None:
    report = changed(demo_report(), losses=[6.0, 5.5, 5.0, 4.5, 4.25, 3.5])
    rows = report.iteration_table().splitlines()[1:]
    assert [row.split()[-1] for row in rows] == ["same"] * 4 + ["DIFFERENT", "same"]


def test_the_iteration_drawn_is_the_median_of_the_slow_half() -> None:
    report = demo_report()
    assert report.typical_slow_iteration(report.stock) == 4
    assert report.typical_slow_iteration(report.adaptra) == 5


LINES = [
    "adaptra: policy adapt",
    " iteration        1/       6 | elapsed time per iteration (ms): 1398.2 | lm loss: 5.747531E+00 | grad norm: 5.4 |",
    " iteration        4/       6 | elapsed time per iteration (ms): 2198.6 | lm loss: 4.415669E+00 | grad norm: 2.0 |",
    " iteration        1/       6 | elapsed time per iteration (ms): 1200.0 | lm loss: nan | grad norm: 5.4 |",
]


def test_lines_of_the_log_become_steps() -> None:
    steps: list[Step] = []
    reader = ProgressReader(DemoSetup(iterations=6), [STOCK, ADAPTRA], steps.append)
    for line in LINES:
        reader(line)
    assert steps[:2] == [
        Step(STOCK, 1, 1398.2, 5.747531, False),
        Step(STOCK, 4, 2198.6, 4.415669, True),
    ]
    assert (steps[2].run, steps[2].number, steps[2].slow) == (ADAPTRA, 1, False)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("output_type", [io.StringIO, Terminal])
def test_progress_shows_run_link_time_and_loss(output_type: type[io.StringIO], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    output = output_type()
    with progress(DemoSetup(iterations=6), [STOCK, ADAPTRA], output) as reader:
        for line in LINES[:3]:
            reader(line)
    shown = output.getvalue()
    for expected in ("stock", "link 1-2 +60 ms", "2,199 ms", "loss 4.4157"):
        assert expected in shown


@pytest.fixture
def made_up_trainings(monkeypatch: pytest.MonkeyPatch) -> list[DemoReport]:
    """What `train_twice` returns instead of training: the one report in the list, with traces to match."""
    reports = [demo_report()]

    def train_twice(setup: DemoSetup, out: Path, server: object) -> DemoReport:
        from demo_results import write_traces

        write_traces(setup, out / "traces")
        return reports[0]

    class NoServer:
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(demo, "train_twice", train_twice)
    monkeypatch.setattr(demo, "ForkServer", NoServer)
    return reports


def run_main(out: Path) -> int:
    return demo.main(["--out", str(out), "--iterations", "6", "--micro-batches", "4"])


def test_equal_numbers_exit_with_0(
    made_up_trainings: list[DemoReport], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(tmp_path) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["losses_equal"] is True
    assert Path(summary["png"]).read_bytes().startswith(b"\x89PNG")
    events = json.loads(Path(summary["trace"]).read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {f"{run} stage {stage}" for run in (STOCK, ADAPTRA) for stage in range(4)}
    assert "to the last bit" in capsys.readouterr().out


def test_unequal_losses_exit_with_1(
    made_up_trainings: list[DemoReport], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_up_trainings[0] = changed(made_up_trainings[0], losses=[6.0, 5.5, 5.0, 4.5, 4.0, 3.25])
    assert run_main(tmp_path) == 1
    assert json.loads((tmp_path / "summary.json").read_text())["losses_equal"] is False
    captured = capsys.readouterr()
    assert "losses of the two runs are not equal" in captured.err
    assert "to the last bit" not in captured.out


def test_a_busy_machine_is_said(
    made_up_trainings: list[DemoReport], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_up_trainings[0] = changed(made_up_trainings[0], overruns=0.25)
    assert run_main(tmp_path) == 0
    assert "25% of all actions took longer" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [(LaunchError("rank 2: the end of its log", []), 1, "the end of its log"), (KeyboardInterrupt(), 130, "ended")],
)
def test_failures_have_a_status_and_a_message(
    made_up_trainings: list[DemoReport],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    status: int,
    message: str,
) -> None:
    def fail(*_: object) -> DemoReport:
        raise error

    monkeypatch.setattr(demo, "train_twice", fail)
    assert run_main(tmp_path) == status
    assert message in capsys.readouterr().err
    assert not (tmp_path / "summary.json").exists()
