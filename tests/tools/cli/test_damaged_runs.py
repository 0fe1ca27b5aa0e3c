# SPDX-License-Identifier: Apache-2.0
"""Run directories that hold anything: every command reads what there is, or says in one line why it cannot."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest
from support.made_up.runs import write_events

from adaptra_megatron.telemetry.events import Fault
from adaptra_megatron.tools.cli.main import main
from adaptra_megatron.tools.recordings import trace_events

WHOLE = '{"iteration":0,"records":[["F",0,0,0,0,1],["B",0,0,1,1,2]]}'


def header(rank: object = 0, stage: object = 0, offset: str = "0") -> str:
    return f'{{"version":1,"rank":{json.dumps(rank)},"stage":{json.dumps(stage)},"clock_offset_s":{offset}}}\n'


def row(kind: str = '"F"', chunk: str = "0", micro_batch: str = "0", start: str = "0") -> str:
    return f'{{"iteration":0,"records":[[{kind},{chunk},{micro_batch},{start},0,1],["B",0,0,1,1,2]]}}'


CASES = {
    "rank as text": (header("x"), WHOLE),
    "huge stage": (header(stage=10**9), WHOLE),
    "negative stage": (header(stage=-1), WHOLE),
    "offset missing": (header(offset="null"), WHOLE),
    "offset that is no number": (header(offset="NaN"), WHOLE),
    "header nested deeply": ("[" * 100_000 + "\n", WHOLE),
    "iteration as text": (header(), WHOLE.replace(":0,", ':"a",', 1)),
    "iteration as list": (header(), WHOLE.replace(":0,", ":[1],", 1)),
    "line nested deeply": (header(), "[" * 100_000),
    "other kind": (header(), row(kind='"<script>"')),
    "kind as list": (header(), row(kind="[1]")),
    "time missing": (header(), row(start="null")),
    "time without end": (header(), row(start="-1e308")),
    "time of many digits": (header(), row(start="1" + "0" * 400)),
    "huge chunk": (header(), row(chunk="1000000000")),
    "huge micro-batch": (header(), row(micro_batch="1000000000000")),
    "micro-batch as text": (header(), row(micro_batch='"<b>"')),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("command", ["analyze", "report", "trace", "status"])
@pytest.mark.parametrize("name", [*CASES, "a FIFO", "a FIFO as log", "a directory"])
def test_what_cannot_be_read_is_left_out_or_one_line(
    name: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    write_events(run, [(Fault(what="x"), 1)])
    trace = run / "rank-00000.jsonl"
    if name == "a FIFO":
        os.mkfifo(trace)
    elif name == "a directory":
        trace.mkdir()
    elif name == "a FIFO as log":
        trace.write_text(f"{header()}{WHOLE}\n")
        os.mkfifo(run / "events-00001.jsonl")
    else:
        trace.write_text("".join(CASES[name]) + "\n")
    output = ["-o", str(tmp_path / "out")] if command in ("report", "trace") else []
    given = main([command, str(run), *output])
    reported = capsys.readouterr()
    assert given in (0, 1, 2, 3)
    if given == 2:
        assert len(reported.err.strip().splitlines()) == 1
        assert reported.err.startswith("adaptra: ")
    if command in ("trace", "analyze") and name not in ("a FIFO as log",):
        assert given == 2, "there is nothing else in the directory that it could tell of"


@pytest.mark.timeout(60)
def test_a_fifo_or_a_bomb_as_trace_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "trace.json")
    assert main(["analyze", str(tmp_path / "trace.json")]) == 2
    assert capsys.readouterr().err == f"adaptra: {tmp_path / 'trace.json'} is no file\n"
    monkeypatch.setattr(trace_events, "UNSUSPICIOUS_NBYTES", 1 << 20)
    bomb = tmp_path / "bomb.json.gz"
    with gzip.open(bomb, "wb", 9) as file:
        file.write(b'{"traceEvents":[' + b'{"ph":"X","name":"zzz","ts":1,"dur":1},' * 400_000 + b"{}]}")
    assert main(["analyze", str(bomb)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "times as large when it is decompressed" in line
