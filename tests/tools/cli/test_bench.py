# SPDX-License-Identifier: Apache-2.0
"""`adaptra bench transport`: real processes are measured, what cannot be is said, bad input gets one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from adaptra_megatron.tools.cli.main import main
from adaptra_megatron.tools.local_ranks.launch_ranks import free_port
from adaptra_megatron.tools.local_ranks.transport_bench import (
    BenchReport,
    BenchRequest,
    MeasuredTransport,
    draw,
    markdown,
)
from adaptra_megatron.transport.wires.verbs.verbs_device import why_unavailable

REPORT = BenchReport(
    [
        MeasuredTransport("shm", 4096, [1.0, 3.0, 2.0], [50.0, 70.0, 60.0]),
        MeasuredTransport("tcp", 1 << 20, [4.0, 2.0, 3.0], [800.0, 900.0, 850.0], {"iperf3 -P 4": [4.0, 4.0, 2.0]}),
    ],
    ["verbs is left out: there is no device"],
)


def test_two_processes_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "transport", "--transports", "shm,tcp,verbs", "--sizes", "1,64KiB", "--rounds", "2"]
    assert main([*command, "--output", str(tmp_path / "made" / "here")]) == 0
    printed = capsys.readouterr().out
    place = tmp_path / "made" / "here"
    report = json.loads((place / "transport.json").read_text())
    transports = ["shm", "tcp"] + ["verbs"] * (why_unavailable([]) is None)
    assert [(row["transport"], row["nbytes"]) for row in report["measured"]] == [
        (transport, nbytes) for transport in transports for nbytes in (1, 1 << 16)
    ]
    for row in report["measured"]:
        assert len(row["gb_per_s"]) == len(row["one_way_us"]) == 2
        assert all(0 < value < 1000 for value in row["gb_per_s"])
        assert all(0 < value < 1e6 for value in row["one_way_us"])
    assert ("verbs is left out: " in printed) == ("verbs" not in transports)
    assert printed in (place / "transport.md").read_text()
    assert (place / "transport.png").read_bytes().startswith(b"\x89PNG")


def test_a_launcher_such_as_torchrun_may_start_the_two_ranks() -> None:
    port = str(free_port())
    command = [sys.executable, "-m", "adaptra_megatron.tools.cli", "bench", "transport"]
    command += ["--transports", "tcp", "--sizes", "4KiB", "--rounds", "1"]
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **job, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=240.0) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert "| tcp | 4 KiB |" in outputs[0][0]
    assert outputs[1][0] == "", "the receiving rank has nothing to say"


def test_the_table_has_medians_and_ratios_of_the_same_round() -> None:
    text = markdown(REPORT, BenchRequest(rounds=3))
    assert "| shm | 4 KiB | 2.00 | 60.0 (50.0..70.0) | - | - | - |" in text
    assert "| tcp | 1 MiB | 3.00 | 850.0 (800.0..900.0) | iperf3 -P 4 | 4.00 | 1.00 (0.50..1.50) |" in text
    assert "- verbs is left out: there is no device" in text
    assert BenchReport.from_json(REPORT.to_json()) == REPORT


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"adaptra-megatron\[plot\]"):
        draw(REPORT, tmp_path / "plot.png")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--transports", "shm,pigeon"], "'pigeon' is none of shm, tcp, verbs"),
        (["--sizes", "4KiB,0"], "'0' is no size from 1 byte to 1 GiB"),
        (["--sizes", "2GiB"], "'2GiB' is no size"),
        (["--sizes", "4 parsecs"], "'4 parsecs' is no size"),
        (["--rounds", "0"], "'0' is no number from 1 to 64"),
    ],
)
def test_bad_options_get_one_line(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "transport", *arguments])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RANK": "0"}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not set"),
        ({"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, "WORLD_SIZE is 3"),
    ],
)
def test_half_a_job_or_too_large_a_one_is_refused(
    variables: dict[str, str], expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["bench", "transport"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line


def test_an_output_that_cannot_be_is_refused_before_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["bench", "transport", "--output", str(tmp_path / "file" / "below")]) == 2
    assert "name another --output" in capsys.readouterr().err
