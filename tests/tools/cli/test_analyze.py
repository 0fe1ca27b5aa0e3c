# SPDX-License-Identifier: Apache-2.0
"""`adaptra analyze` on made-up recordings."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import html5lib
import pytest
from support.made_up.recordings import Seconds, recorded_step
from support.made_up.runs import Iteration, write_run
from support.processes import REPOSITORY

from adaptra_megatron.common.layout import Cell
from adaptra_megatron.tools.cli.analyze_recording import analysis_page
from adaptra_megatron.tools.cli.main import main
from adaptra_megatron.tools.recordings.recording import Recording
from adaptra_megatron.tools.replay.analysis import Analysis, analyse, figures
from adaptra_megatron.tools.replay.analysis_wording import headline, sentences
from adaptra_megatron.tools.replay.operations import OpType

HOSTILE = "</script><img src=x onerror=alert(1)>&"


def even(optype: OpType, cell: Cell, micro_batch: int) -> float:
    return {OpType.FORWARD: 1.0, OpType.BACKWARD: 2.0}.get(optype, 0.01)


def slow_from(step: int, slow: Cell) -> list[Seconds]:
    """Eight steps; from `step` on a cell takes three times as long."""

    def seconds(number: int) -> Seconds:
        return lambda optype, cell, micro_batch: (
            even(optype, cell, micro_batch) * (3.0 if cell == slow and number >= step and optype.computes else 1.0)
        )

    return [seconds(number) for number in range(8)]


def analysed(steps: list[Seconds], *, replicas: int = 3, stages: int = 2, name: str = "job") -> Analysis:
    recorded = tuple(recorded_step(number, replicas, stages, 6, each) for number, each in enumerate(steps))
    return analyse(Recording(name=name, source="made up", steps=recorded), activation_gib=2.0)


def test_a_worker_that_turned_slow_is_named_with_the_step() -> None:
    analysis = analysed(slow_from(3, Cell(1, 0)))
    said = " ".join(sentences(analysis))
    assert headline(analysis).endswith("a slow worker")
    assert "Worker 1.0 (replica 1, stage 0) computes 3.00 times as long as its peers" in said
    assert "most clearly from step 3 on" in said
    assert "From step 3 on a step took" in said
    reported = figures(analysis)
    assert reported["slowest_workers"] == ["1.0"]
    assert reported["steps_changed_at"] == 3
    assert json.loads(json.dumps(reported, allow_nan=False)) == reported


def test_an_even_job_has_nothing_slow_and_no_remedy() -> None:
    analysis = analysed([even, even], replicas=2, stages=1)
    assert headline(analysis).startswith("Nothing is slow")
    assert sentences(analysis)[-1] == "No remedy would bring much."


def test_the_page_stands_alone_and_shows_every_part() -> None:
    analysis = analysed(slow_from(0, Cell(2, 1)), name=HOSTILE)
    page = analysis_page(analysis)
    parsed = html5lib.HTMLParser(strict=True, namespaceHTMLElements=False).parse(page)
    assert not [each for each in parsed.iter() if each.get("src") or each.get("href")]
    assert "<img" not in page
    words = " ".join("".join(parsed.itertext()).split())
    for part in (
        "In short",
        "What each remedy would bring",
        "Which workers slow it",
        "Which operations",
        "Time of each",
    ):
        assert part in words
    for remedy in analysis.remedies.rows:
        assert remedy.title in words
    assert page.count('class="number bad"') >= 3


def test_a_run_is_analysed_in_text_json_and_html(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, page = tmp_path / "run", tmp_path / "pages" / "run.html"
    write_run(run, [Iteration(delay_s=delay_s) for delay_s in (0.0, 0.0, 0.9, 0.9)])
    assert main(["analyze", str(run), "--html", str(page), "--no-progress"]) == 0
    said = capsys.readouterr().out
    assert "From step 3 on a step took" in said
    assert "Messages of link 0→1 cost" in said
    assert "divided between its two directions depends on how well the clocks of its hosts agree" in said
    assert "Re-planned order" in said
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert main(["analyze", str(run), "--json", "--steps", "3-4", "--no-progress"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["steps"] == [3, 4]
    assert reported["replayed_s"] == pytest.approx(reported["recorded_s"])
    assert {"order", "split-backward"} <= {row["key"] for row in reported["remedies"]["rows"]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "3-"], "is no list of steps such as"),
        (["--steps", "1,x"], "is no list of steps such as"),
        (["--steps", "0-99999999"], "is too long a range"),
        (["--stages", "0"], "is no count of stages"),
        (["--activation-gib", "-1"], "is no number of GiB"),
    ],
)
def test_options_that_cannot_be_are_refused_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["analyze", "trace", *arguments])
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_files_that_are_not_there_are_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(tmp_path / "none.parquet")]) == 2
    assert main(["analyze", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 2
    assert "cannot read" in said
    assert "neither rank-*.jsonl" in said


def test_it_works_without_torch(tmp_path: Path) -> None:
    write_run(tmp_path, [Iteration()])
    code = (
        "import sys; sys.modules['torch'] = sys.modules['megatron'] = None\n"
        "from adaptra_megatron.tools.cli.main import main\n"
        f"sys.exit(main(['analyze', {str(tmp_path)!r}, '--json', '--no-progress']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == [1]
