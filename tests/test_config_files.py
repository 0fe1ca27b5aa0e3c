# SPDX-License-Identifier: Apache-2.0
"""Files that settings name, damaged: each is refused in one line as the command line is parsed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from adaptra_megatron import config as given
from adaptra_megatron.config import AdaptraConfig, ConfigError, communicators_from, validate_files
from adaptra_megatron.engine.enabling import Enabling

COSTS = {"stages": 2, "micro_batches": 4, "forward_s": 1.0, "backward_input_s": 1.0, "backward_weight_s": 1.0}
HUGE = 10**400


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"forward_s": None}, "field 'forward_s' is missing"),
        ({"backward_weight_s": None}, "field 'backward_weight_s' is missing"),
        ({"stages": 10**9}, "stages must be at most 1048576"),
        ({"stages": HUGE}, "stages must be at most 1048576"),
        ({"chunks": 10**9}, "chunks must be at most 1048576"),
        ({"stages": 1 << 15, "chunks": 1 << 15}, "stages times chunks must be at most 1048576"),
        ({"micro_batches": 10**9}, "micro_batches must be at most 1048576"),
        ({"forward_s": HUGE}, "forward_s must be a number or a list"),
        ({"max_in_flight": HUGE}, "max_in_flight must be a number or one per stage"),
    ],
)
def test_damaged_costs_are_refused(change: dict[str, object], said: str, tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({**COSTS, **change}))
    with pytest.raises(ConfigError, match=f"--adaptra-costs {file}: {said}"):
        validate_files(AdaptraConfig(costs_json=file, host_transport="off"))


def test_a_number_of_thousands_of_digits_is_no_costs(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(COSTS).replace("1.0", "1" * 5000))
    with pytest.raises(ConfigError, match=f"--adaptra-costs {file} is not valid JSON: "):
        validate_files(AdaptraConfig(costs_json=file, host_transport="off"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pp: null", "settings by name are expected under pp"),
        ("pp: [1]", "settings by name are expected under pp"),
        ("pp: {min_ctas: a}", "min_ctas of pp must be a whole number from 1 to 2147483647, got 'a'"),
        ("pp: {max_ctas: 1.5}", "max_ctas of pp must be a whole number"),
        ("pp: {max_ctas: true}", "max_ctas of pp must be a whole number"),
        ("pp: {max_ctas: 100000000000000000000}", "max_ctas of pp must be a whole number"),
        ("pp: {cga_cluster_size: -5}", "cga_cluster_size of pp must be a whole number from 0 to 8, got -5"),
        ("pp: {net_name: [1]}", "net_name of pp must be a name"),
    ],
)
def test_damaged_settings_of_communicators_are_refused(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "nccl.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"--nccl-communicator-config-path {file}: {said}"):
        communicators_from(str(file))


def test_a_file_of_another_size_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "plan.csv"
    file.write_text("0F0,0B0\n")
    validate_files(AdaptraConfig(plan_csv=file))
    monkeypatch.setattr(given, "_MOST_NBYTES", 4)
    with pytest.raises(ConfigError, match=f"--adaptra-plan-csv {file} is larger than"):
        validate_files(AdaptraConfig(plan_csv=file))


def test_what_stands_in_a_file_makes_no_more_than_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "nccl.yaml"
    file.write_text("pp: {min_ctas: '" + "x\n\n" * 9999 + "'}")
    parser = argparse.ArgumentParser(prog="script", allow_abbrev=False)
    parser.add_argument("--nccl-communicator-config-path")
    Enabling(requested=True).extend(parser)
    with pytest.raises(SystemExit) as exit_:
        parser.parse_args(["--nccl-communicator-config-path", str(file)])
    (line,) = capsys.readouterr().err.splitlines()
    assert exit_.value.code == 2
    assert line.startswith(f"script: error: --nccl-communicator-config-path {file}: min_ctas of pp must be")
    assert len(line) < 2100
