# SPDX-License-Identifier: Apache-2.0
"""The published cases: data, simulation, tables and pictures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from adaptra_megatron.schedule.costs import LinkCost
from campaigns.published import plots, real_report, report
from campaigns.published.__main__ import main
from campaigns.published.cases import UnknownCaseError, load_cases, select_cases
from campaigns.published.real import RealCase, RealSystem
from campaigns.published.simulated import SimulatedCase, System, median_error, simulate_case

REAL = RealCase(
    case="single/7B/0-1/30ms",
    seconds={system.value: 0.1 * (number + 4) for number, system in enumerate(RealSystem)},
    pipeline_s={system.value: 0.1 * (number + 3) for number, system in enumerate(RealSystem)},
    most_in_flight={RealSystem.FULL.value: 8.0, RealSystem.FULL_LARGER.value: 11.0},
    bound_s=0.36,
    larger_bound_s=0.35,
    healthy_bound_s=0.32,
    delayed_messages=1000,
    elements_compared=5,
    overruns=0.0123,
)


@pytest.fixture(scope="module")
def simulated() -> list[SimulatedCase]:
    return [simulate_case(case) for case in load_cases()]


def test_the_cases_are_the_published_ones() -> None:
    cases = load_cases()
    assert len({case.name for case in cases}) == len(cases) == 39
    (case,) = select_cases(cases, ["single/14B/0-1/60ms"])
    assert (case.stages, case.micro_batches, case.links) == (8, 24, ((0, 1),))
    assert (case.published.one_f_one_b_ms, case.published.full_ms, case.healthy.zero_bubble_ms) == (
        2531.5,
        964.2,
        754.6,
    )
    costs = case.costs(cap=16)
    assert costs.links == {(0, 1): LinkCost(0.06), (1, 0): LinkCost(0.06)}
    assert costs.forward_s[0] == (pytest.approx(0.008),)
    assert costs.max_in_flight == (16,) * 8
    assert case.costs(chunks=2).forward_s[0] == (pytest.approx(0.004),) * 2
    assert not case.costs(slow=False).links
    assert {case.model.name: case.stages for case in cases} == {"7B": 4, "A10-AE": 4, "14B": 8, "30B": 8, "60B": 8}
    assert {case.model.name for case in cases if not case.model.measured} == {"30B", "60B"}


def test_cases_are_chosen_by_pattern() -> None:
    cases = load_cases()
    assert len(select_cases(cases, ["single/7B/*", "single/14B/*"])) == 8
    with pytest.raises(UnknownCaseError, match=r"no published case is called 'double/\*'; there are, for example, "):
        select_cases(cases, ["single/*", "double/*"])


def test_simulated_cases_keep_what_must_hold(simulated: list[SimulatedCase]) -> None:
    for each in simulated:
        full_s = each.slow_s[System.FULL]
        assert each.bound_s <= full_s * (1 + 1e-9)
        assert full_s <= 1.02 * each.bound_s, f"{each.case.name}: planning leaves too much"
        slower = [
            system for system in System if system is not System.FULL_LARGER and each.slow_s[system] < full_s - 1e-9
        ]
        assert not slower, f"{each.case.name}: full is slower than {slower}"
        assert each.most_in_flight[System.FULL] <= 2 * each.case.stages
        assert each.most_in_flight[System.FULL_LARGER] <= 3 * each.case.stages
        assert each.slow_s[System.FULL_LARGER] <= full_s * (1 + 1e-9)
        for system in System:
            assert each.slow_s[system] >= each.healthy_s[system] - 1e-9


def test_the_simulation_explains_the_published_slowdowns(simulated: list[SimulatedCase]) -> None:
    """Slowdowns are compared: published times contain more than is simulated."""
    errors = {
        system: median_error(simulated, system) for system in (System.ONE_F_ONE_B, System.ZB_H2, System.HOST_PATH_H2)
    }
    assert all(error is not None and error < 0.12 for error in errors.values()), errors
    assert median_error(simulated, System.ONLINE) is None


def test_table(simulated: list[SimulatedCase]) -> None:
    text = report.markdown(simulated)
    (row,) = (line for line in text.splitlines() if line.startswith("| single/14B/0-1/60ms |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    (each,) = (each for each in simulated if each.case.name == "single/14B/0-1/60ms")
    assert cells[1] == f"{1e3 * each.slow_s[System.ONE_F_ONE_B]:.0f} (2532)"
    assert cells[11] == f"{each.slow_s[System.ONE_F_ONE_B] / each.slow_s[System.FULL]:.2f} (2.63)"
    assert "| single/30B/0-1/30ms \\* |" in text
    assert "Slowdowns by the delay, simulated against published" in text


def test_the_command_simulates_all_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "published.md"
    monkeypatch.setattr(sys, "argv", ["published", "--simulated", "--output", str(output)])
    main()
    printed = capsys.readouterr().out
    assert sum(line.startswith(("| single/", "| multiple/")) for line in printed.splitlines()) == 18
    assert output.read_text() in printed
    assert (tmp_path / "published.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "published-real.png").exists()


def test_unknown_cases_are_an_error_of_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["published", "--cases", "7B"])
    with pytest.raises(SystemExit):
        main()
    assert "no published case is called '7B'" in capsys.readouterr().err


def test_table_of_real_processes() -> None:
    text = real_report.markdown([REAL])
    assert "| single/7B/0-1/30ms | 400 | 500 | 600 | 700 | 800 | 900 | 360 | 350 | 0.62 | 1.14 | 2.000, 2.250 |" in text
    assert "| 1.125, 1.094 | 8, 11 | 1.2% |" in text
    assert RealCase.from_json(json.loads(json.dumps(REAL.to_json()))) == REAL


def test_pictures(simulated: list[SimulatedCase], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plots.draw(simulated[:5], tmp_path / "published.png")
    plots.draw_real([REAL], tmp_path / "real.png")
    for name in ("published.png", "real.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"adaptra-megatron\[plot\]"):
        plots.draw(simulated[:1], tmp_path / "none.png")
