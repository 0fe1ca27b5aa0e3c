# SPDX-License-Identifier: Apache-2.0
"""`adaptra bench published`: simulated cases, real ones, bad input in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adaptra_megatron.cli.main import main
from adaptra_megatron.emulation.published.real import RealSystem


def test_all_cases_are_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "published", "--out", str(tmp_path / "made")]) == 0
    printed = capsys.readouterr().out
    assert sum(line.startswith(("| single/", "| multiple/")) for line in printed.splitlines()) == 18
    assert printed in (tmp_path / "made" / "published.md").read_text()
    document = json.loads((tmp_path / "made" / "published.json").read_text())
    assert len(document["simulated"]) == 39
    assert document["real"] == []
    assert (tmp_path / "made" / "published.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "made" / "published-real.png").exists()


def test_json_and_list_of_chosen_cases(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--cases", "single/*/60ms,figure-17/*"]
    assert main(["bench", "published", *chosen, "--list"]) == 0
    names = capsys.readouterr().out.split()
    assert len(names) == 8
    assert main(["bench", "published", *chosen, "--json"]) == 0
    assert [entry["case"] for entry in json.loads(capsys.readouterr().out)["simulated"]] == names


@pytest.mark.slow
def test_a_case_in_real_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own checks are that numbers are bitwise stock's and that messages were late."""
    assert main(["bench", "published", "--cases", "single/7B/2-3/30ms", "--real", "--out", str(tmp_path)]) == 0
    assert "| single/7B/2-3/30ms | " in capsys.readouterr().out
    (real,) = json.loads((tmp_path / "published.json").read_text())["real"]
    assert set(real["seconds"]) == {system.value for system in RealSystem}
    assert real["elements_compared"] > 0
    assert real["delayed_messages"] > 0
    assert (tmp_path / "published-real.png").exists()


def test_unknown_cases_get_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "published", "--cases", "7B"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no published case is called '7B'" in line
    assert "--list" in line


def test_an_output_that_cannot_be_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["bench", "published", "--out", str(tmp_path / "file" / "below")]) == 2
    assert "name another --out" in capsys.readouterr().err
