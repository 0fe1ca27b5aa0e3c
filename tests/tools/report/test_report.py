# SPDX-License-Identifier: Apache-2.0
"""`adaptra report` and `adaptra trace` on made-up runs."""

from __future__ import annotations

import json
import re
import threading
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.made_up.runs import Iteration, write_events, write_replicas, write_run
from support.played_schedules import played

from adaptra_megatron.schedule.classic import one_f_one_b
from adaptra_megatron.schedule.costs import LinkCost, uniform_costs
from adaptra_megatron.telemetry.action_records import ArrivalRecord
from adaptra_megatron.telemetry.event_log import EventLog
from adaptra_megatron.telemetry.events import (
    ArrivalsSeen,
    Fault,
    IterationsTimed,
    LinkDetection,
    PathChanged,
    PathChosen,
    PlanMade,
    PlanSwitched,
    RanksLost,
    RoutesChosen,
    RunStarted,
    StragglerDetection,
    SwitchMeasured,
)
from adaptra_megatron.telemetry.log_lines import duration, percent
from adaptra_megatron.telemetry.trace import TraceWriter, trace_path
from adaptra_megatron.telemetry.trace_requests import RequestBox
from adaptra_megatron.tools.cli.main import main

HOSTILE = "</script><img src=x onerror=alert(1)>&"


class Page(HTMLParser):
    """What a browser would make of a page: text by element, and everything that refers to somewhere."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.text = ""
        self.scripts: list[str] = []
        self._inside = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._inside = tag
        if tag == "script":
            self.scripts.append("")
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.text += data + "\n"


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    """A link turns slow, a plan answers, the link heals."""
    directory = tmp_path / "my <run>"
    slow = Iteration(delay_s=2.0)
    planned = Iteration(delay_s=1.0, split=True)
    write_run(directory, [Iteration()] * 4 + [slow] * 2 + [planned] * 4 + [Iteration(split=True)] * 3)
    detection = LinkDetection(source=0, target=1, before="healthy", after="slow", reason=HOSTILE, latency_s=2.0)
    write_events(
        directory,
        [
            (detection, 4),
            (PlanMade(number=1, adopted=True, reason="costs changed", predicted_s=24.0, current_predicted_s=30.0), 5),
            (CHOICE, 5),
            (PlanSwitched(number=1, before=0, predicted_s=24.0, before_predicted_s=30.0), 6),
            (PathChanged(source=0, target=1, before="device", after="host", cause="stalled", failover=True), 7),
            (Fault(what="delegate restarted", detail="it was killed", stage=1), 8),
        ],
    )
    return directory


CHOICE = PathChosen(
    number=1, source=2, target=3, before="device", after="host", reason="the device path is slow", gain_s=0.058
)


def test_choices_of_paths_are_reported_with_what_they_gain(run_directory: Path) -> None:
    page = report(run_directory)
    assert "Plan 1 sends link 2→3 over the host path instead of the device path: 58.0 ms a message less" in page
    assert "the device path is slow" in page


LATE = StragglerDetection(
    replica=2,
    before="healthy",
    after="late",
    reason=f"by 180 ms, {HOSTILE}",
    remedy="end or move these",
    stage=1,
    first_rank=9,
    host="node7",
    since_iteration=3,
)


def test_arrivals_at_gradient_synchronisation_have_heat_maps(tmp_path: Path) -> None:
    write_run(tmp_path / "run", [Iteration()] * 12)
    seen = ArrivalsSeen(
        until=9, iterations=5, lags_s=((0.0, -0.02, 0.09), (0.0, -0.02, 0.18)), last=((0, 0, 5), (0, 1, 4))
    )
    over = StragglerDetection(replica=2, before="late", after="healthy", reason="it comes with the others")
    reported = replace(LATE, before="late", reason="still, for another cause", since_iteration=5)
    write_events(tmp_path / "run", [(LATE, 6), (seen, 9), (reported, 9), (over, 11)])
    html = report(tmp_path / "run")
    page = Page(html)
    text = " ".join(page.text.split())
    assert "Replica 2 (stage 1, rank 9 on node7) comes last by 180 ms" in text
    assert "Replica 2 comes with the others again" in text
    assert "1, rank 9 on node7 3–11 still, for another cause end or move these" in text
    assert "5 iterations, 5 to 9" in text
    assert "stage 0 stage 1 0 – – 1 – – last in 1 2 90.0 ms last in 5 180 ms last in 4" in text
    assert re.findall(r'style="--heat:([0-9.]+)"', html) == ["0.00", "0.00", "0.00", "0.00", "0.50", "1.00"]
    assert HOSTILE not in html
    html5lib = pytest.importorskip("html5lib")
    html5lib.HTMLParser(strict=True).parse(html)


def test_of_many_replicas_those_with_the_longest_lags_have_rows(tmp_path: Path) -> None:
    write_run(tmp_path / "run", [Iteration()] * 3)
    lags_s = tuple(0.001 * replica for replica in range(40))
    write_events(tmp_path / "run", [(ArrivalsSeen(until=2, iterations=3, lags_s=(lags_s,), last=((1,) * 40,)), 2)])
    page = Page(report(tmp_path / "run"))
    assert "16 other replicas, with shorter lags, are left out" in page.text
    assert "Replicas that were late" not in page.text


ROUTES = RoutesChosen(
    number=1,
    reason="stage 1 of replica 0 gives 3 of its 8 micro-batches to replica 2",
    predicted_s=11.0,
    current_predicted_s=17.0,
    lower_bound_s=10.5,
    slow={"0.1": 2.5},
    speeds={
        f"{replica}.{stage}": 0.4 if (replica, stage) == (0, 1) else 1.0 for replica in range(3) for stage in (0, 1)
    },
    micro_batches=8,
    moved=((1, 0, 2, 3),),
)


def test_routes_between_replicas_have_a_grid_of_cells_and_what_they_brought(tmp_path: Path) -> None:
    write_run(tmp_path, [Iteration()] * 8)
    switched = PlanSwitched(number=2, before=0, before_measured_s=17.2)  # nothing ran plan 1 by itself
    gained = SwitchMeasured(number=2, before_measured_s=17.2, after_measured_s=11.3, iterations=3)
    home = RoutesChosen(number=3, reason="no cell straggles any more: every micro-batch stays in its replica")
    write_events(tmp_path, [(ROUTES, 2), (switched, 4), (gained, 7), (home, 7)])
    text = " ".join(Page(report(tmp_path)).text.split())
    assert f"4 1 {ROUTES.reason} 17.0 s → 11.0 s 10.5 s 17.2 s → 11.3 s never ran 3 {home.reason}" in text
    assert "Cells under plan 1, since iteration 4" in text
    grid = "replica stage 0 stage 1 0 100% 40% 3 → replica 2 1 100% 100% 2 100% 100% 3 ← replica 0"
    assert text.count(grid) == 1, "one grid: no micro-batch moves under plan 3"


def test_of_many_replicas_those_that_give_or_take_have_rows(tmp_path: Path) -> None:
    write_run(tmp_path, [Iteration()] * 4)
    many = replace(ROUTES, speeds={f"{replica}.0": 1.0 for replica in range(99)}, slow={"98.0": 2.0})
    write_events(tmp_path, [(replace(many, moved=((0, 98, 97, 2),)), 2)])
    text = " ".join(Page(report(tmp_path)).text.split())
    assert "97 100% 2 ← replica 98 98 100% 2 → replica 97 75 other replicas are left out" in text


LOST = RanksLost(
    epoch=1,
    ranks={"rank 4 (stage 1 on node7)": "exit status -9"},
    dead_cells=["1.1"],
    live=8,
    seconds=0.75,
    moved=((1, 1, 0, 3), (1, 1, 2, 3)),
)


def test_dead_cells_are_dead_in_the_grid_and_begin_a_part(tmp_path: Path) -> None:
    for replica in range(3):
        slow = [Iteration(delay_s=1.0)] * 4 if replica != 1 else []  # a rank of it is dead
        write_run(tmp_path, [Iteration()] * 4 + slow, first_rank=replica, ranks_apart=3)
    write_replicas(tmp_path, 3, [(LOST, 4)])
    text = " ".join(Page(report(tmp_path)).text.split())
    grid = "0 – – 3 ← replica 1 – 1 – dead 3 → replica 0 3 → replica 2 – 2 – – 3 ← replica 1 –"
    caption = "Speed of each cell, and what flows from where to where"
    assert f"Cells that live, since iteration 4 {caption} replica stage 0 stage 1 stage 2 {grid}" in text
    row = "1 of the ranks died, and 8 went on 750 ms later rank 4 (stage 1 on node7): exit status -9; dead cells: 1.1"
    assert re.search(re.escape(row) + r" \S+ s → \S+ s", text), "what an iteration took before and after"
    assert "From iteration 4 on rank 4 (stage 1 on node7) was dead: 24.0 s → " in text
    assert "; 1 rank died" in text, "in the headline"


def test_the_chart_of_a_replica_that_plans_for_itself_has_no_marks_of_another(tmp_path: Path) -> None:
    for replica, delay_s in enumerate((0.0, 2.0)):
        write_run(tmp_path, [Iteration(delay_s=delay_s)] * 6, first_rank=replica, ranks_apart=2)
    plan = PlanMade(
        number=1, adopted=True, reason="costs", predicted_s=9.0, current_predicted_s=24.0, lower_bound_s=9.0
    )
    events = [(plan, 2), (PlanSwitched(number=1, before=0), 3)]
    for reroute, shown in (("off", 0), ("stragglers", 1)):
        write_replicas(tmp_path, 2, events, reroute=reroute)
        html = report(tmp_path)
        assert "the slowest of 2 pipelines (ranks 1, 3, 5)" in html
        assert (html.count('class="bound"'), html.count('class="mark good"')) == (shown, shown), reroute
        assert "Plan 1 runs instead of the first order" in html


def test_a_run_without_routes_has_no_word_about_them(run_directory: Path) -> None:
    assert "routed" not in Page(report(run_directory)).text


def report(directory: Path, *options: str) -> str:
    output = directory / "page.html"
    assert main(["report", str(directory), "-o", str(output), *options]) == 0
    return output.read_text(encoding="utf-8")


def test_the_page_is_valid_and_needs_nothing_but_itself(run_directory: Path) -> None:
    html5lib = pytest.importorskip("html5lib")
    html = report(run_directory)
    html5lib.HTMLParser(strict=True).parse(html)
    page = Page(html)
    assert page.references == []
    assert not {"link", "img", "iframe", "object", "embed", "base"} & set(page.tags)
    assert "url(" not in html
    assert "@import" not in html
    assert not re.search(r"https?://|fetch\(|XMLHttpRequest|WebSocket|import\(", html)
    assert page.tags.count("svg") == 1 + 4


def test_the_page_says_what_happened(run_directory: Path) -> None:
    text = Page(report(run_directory)).text
    assert "From iteration 4 on messages of links 0→1 and 1→0 took 2.00 s instead of 0 µs" in text
    assert re.search(r"From iteration 6 on plan 1 ran: \S+ s → \S+ s an iteration; \d+% of the loss was won back", text)
    assert re.search(r"Without the delay of links 0↔1 the same order of actions would take \S+ s, \d+% less", text)
    assert re.search(r"saved by 1 plan switch", text)
    for line in (
        "Link 0→1 is slow (was healthy)",
        "Plan 1 made: 24.0 s predicted, 30.0 s with the present order",
        "Plan 1 runs instead of the first order",
        "Link 0→1 failed over from the device to the host path",
        "Fault at stage 1: delegate restarted",
        "training finished",
    ):
        assert line in text
    assert "iterations 6–9" in text


def test_what_the_log_holds_cannot_become_part_of_the_page(run_directory: Path) -> None:
    html = report(run_directory, "--title", HOSTILE)
    page = Page(html)
    assert "img" not in page.tags
    assert page.text.count(HOSTILE) >= 2


def test_what_lies_under_the_pointer_is_the_trace(run_directory: Path) -> None:
    page = Page(report(run_directory, "--iterations", "5"))
    (data,) = (json.loads(script) for script in page.scripts if script.startswith("{"))
    assert len(data["rows"]) == len(data["tops"]) == 3
    for row in data["rows"]:
        assert row[0][0] == 0
        for (_start, end, _text), (start, _end, _next) in zip(row, row[1:], strict=False):
            assert abs(start - end) <= 1
    kinds = [data["texts"][text] for _start, _end, text in data["rows"][1]]
    assert sum(kind.startswith("forward of") for kind in kinds) == 6
    assert "idle, waiting for messages of link 0→1" in kinds


@pytest.mark.parametrize("replicas", [1, 2])
def test_events_name_their_replica_where_there_are_several(tmp_path: Path, replicas: int) -> None:
    write_run(tmp_path, [Iteration()] * 4)
    for rank in range(replicas):
        start = RunStarted(layout={"replica": rank}, versions={}, config={})
        log = EventLog(tmp_path, start, run="run", rank=rank)
        log.log(Fault(what=f"fault of rank {rank}", detail=""), 2)
        log.close()
    page = report(tmp_path)
    rows = [re.sub(r"\s+", " ", row) for row in re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)]
    assert any(">replica<" in row for row in rows) is (replicas > 1)
    for rank in range(replicas):
        (row,) = (row for row in rows if f"fault of rank {rank}" in row)
        assert re.findall(r'<td class="number"[^>]*>(\d*)</td>', row)[:2] == (
            [str(rank), "2"] if replicas > 1 else ["2", ""]
        )


def test_a_run_without_events_still_tells_its_story(tmp_path: Path) -> None:
    write_run(tmp_path, [Iteration()] * 4 + [Iteration(delay_s=2.0)] * 4)
    text = Page(report(tmp_path)).text
    assert "From iteration 5 on messages of links 0→1 and 1→0 took 2.00 s" in text, "as Megatron counts"
    assert "What happened" not in text


@pytest.mark.parametrize("traced", [(), (5, 9)], ids=["nothing", "two"])
def test_a_run_of_which_only_what_was_asked_for_was_traced(tmp_path: Path, traced: tuple[int, ...]) -> None:
    """The log has the time of every iteration, so the page lacks only what a trace alone can know."""
    slow, planned = Iteration(delay_s=2.0), Iteration(delay_s=1.0, split=True)
    write_run(tmp_path, [Iteration()] * 4 + [slow] * 2 + [planned] * 4, traced=traced)
    reason = {"before": "healthy", "after": "slow", "reason": "a message takes 2 s", "since_iteration": 4}
    write_events(
        tmp_path,
        [
            (LinkDetection(source=0, target=1, **reason), 5),
            (LinkDetection(source=1, target=0, **reason), 5),
            (PlanSwitched(number=1, before=0, predicted_s=30.0, before_predicted_s=40.0), 6),
            (IterationsTimed(first=0, seconds=[24.0] * 4 + [40.0] * 2 + [30.0] * 4), 9),
        ],
    )
    html = report(tmp_path)
    text = Page(html).text
    assert "Slowed from 24.0 s to 40.0 s an iteration; at the end 30.0 s" in text
    assert "From iteration 4 on links 0→1 and 1→0 were slow: 24.0 s → 40.0 s an iteration" in re.sub(
        r"messages of links 0→1 and 1→0 took .* instead of [^:]*:", "links 0→1 and 1→0 were slow:", text
    )
    assert "From iteration 6 on plan 1 ran: 40.0 s → 30.0 s an iteration; 62% of the loss was won back" in text
    assert re.search(r"40\.0 s\nsaved by 1 plan switch", text)
    assert html.count('class="dot"') == 10
    assert ("--request next-5" in text) is (not traced)
    assert ("Timelines of stages and links" in text) is bool(traced)


def test_the_page_is_written_into_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, [Iteration()] * 2)
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    assert "Steady: 24.0 s an iteration" in Page((tmp_path / "report.html").read_text()).text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--iterations", "99"], "iteration 99 is not in the trace"),
        (["-o", "/proc/nowhere/page.html"], "cannot write"),
    ],
)
def test_bad_input_is_one_line(
    run_directory: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["report", str(run_directory), *options]) == 2
    assert message in capsys.readouterr().err


def test_damage_is_one_line(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run_directory / "nothing")]) == 2
    assert "--adaptra-trace-dir" in capsys.readouterr().err
    trace_path(run_directory, 0).write_text("damage\n")
    assert main(["report", str(run_directory), "--strict"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(SystemExit, match="2"):
        main(["report", str(run_directory), "--iterations", "a,b"])


def test_what_comes_again_and_again_is_reported_once(tmp_path: Path) -> None:
    write_run(tmp_path, ([Iteration()] * 4 + [Iteration(delay_s=2.0)] * 2) * 6)
    text = " ".join(Page(report(tmp_path)).text.split())
    assert (
        "6 times an iteration went from 24.0 s to 36.0 s, every 6 iterations, first in iteration 5, last in 35." in text
    )
    assert (
        "5 times an iteration went from 36.0 s to 24.0 s, every 6 iterations, first in iteration 7, last in 31." in text
    )
    assert "smaller changes" not in text
    assert "iterations 1–4 and 5 like them" in text
    assert "iterations 5–6 and 4 like them" in text
    assert "iterations 35–36 36.0 s" in text, "the last part is shown whatever it is like"


def test_a_link_that_is_late_one_way_alone_is_not_called_slow_where_arrivals_are_not_known(tmp_path: Path) -> None:
    """Stock's receives end with the sends that they are bound to, so the links next to a slow one look slow, too."""
    page = report(one_way_slow(tmp_path / "stock", arrivals=False))
    assert "slow link, at the end" not in Page(page).text.replace("0\nslow links", "")
    assert " slow</td>" not in page
    page = report(one_way_slow(tmp_path / "ours", arrivals=True))
    assert page.count(" slow</td>") == 1


def one_way_slow(directory: Path, *, arrivals: bool) -> Path:
    """Messages from stage 0 to 1 take 2 s."""
    costs = uniform_costs(
        2,
        4,
        forward_s=1.0,
        backward_input_s=2.0,
        backward_weight_s=0.0,
        links={(0, 1): LinkCost(latency_s=2.0)},
    )
    writers = [TraceWriter(directory, stage, stage) for stage in range(2)]
    for number in range(4):
        records = played(one_f_one_b(2, 4), costs, iteration=number, start_s=100.0 * number)
        reached = [
            ArrivalRecord(number, 0, 1, "F", 0, record.micro_batch, record.end_s + 2.0)
            for record in records
            if (record.stage, record.kind) == (0, "F") and arrivals
        ]
        for stage, writer in enumerate(writers):
            writer.write(number, [each for each in records if each.stage == stage], reached if stage else [])
    for writer in writers:
        writer.close()
    return directory


def test_a_page_is_made_of_what_is_there_and_says_what_is_not(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace_path(run_directory, 1).write_text("")
    text = Page(report(run_directory)).text
    for sentence in ("rank-00001.jsonl is left out: ", "stage 1 left no trace: copy the files of all hosts"):
        assert sentence in text
        assert f"missing: {sentence}" in capsys.readouterr().err or sentence.startswith("stage")
    assert "Made of what is there" in text
    assert "Link 0→1 is slow (was healthy)" in text
    for path in run_directory.glob("rank-*"):
        path.unlink()
    text = Page(report(run_directory)).text
    assert "No iteration is known to have ended" in text
    assert "Link 0→1 is slow (was healthy)" in text


def test_a_request_is_left_for_the_job_and_taken_back_if_there_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", str(tmp_path), "--request", "next"]) == 2
    assert "cannot write" in capsys.readouterr().err
    box = RequestBox(tmp_path)
    assert main(["trace", str(tmp_path), "--request", "next-3", "--timeout-s", "0.1"]) == 2
    assert "no job has read" in capsys.readouterr().err
    assert box.take(5) == ()
    assert main(["trace", str(tmp_path), "--request", "soon"]) == 2
    assert "names no iterations" in capsys.readouterr().err
    taken: list[object] = []

    def job() -> None:
        deadline_s = time.monotonic() + 30
        while not taken and time.monotonic() < deadline_s:
            taken.extend(box.take(5))
            time.sleep(0.01)

    thread = threading.Thread(target=job)
    thread.start()
    assert main(["trace", str(tmp_path), "--request", "next-3"]) == 0
    thread.join()
    assert taken == [(7, 9)]


def test_the_perfetto_trace_is_made_of_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(tmp_path)]) == 2
    write_run(tmp_path, [Iteration()] * 2)
    assert main(["trace", str(tmp_path), "-o", str(tmp_path / "out.json")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out.json'}\n"
    names = {event["name"] for event in json.loads((tmp_path / "out.json").read_text())["traceEvents"]}
    assert {"iteration 0", "iteration 1"} <= names
    write_events(tmp_path, [(CHOICE, 1), (PlanSwitched(number=1, before=0), 1)])
    assert main(["trace", str(tmp_path), "-o", str(tmp_path / "out.json")]) == 0
    document = json.loads((tmp_path / "out.json").read_text())
    shown = [event["name"] for event in document["traceEvents"] if event["ph"] == "i"]
    assert "Plan 1 runs instead of the first order" in shown
    assert document["baseTimeNanoseconds"] == 100 * 10**9, "the clock of made-up logs begins with that of the records"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 µs"), (4e-6, "4 µs"), (0.0015, "1.50 ms"), (0.06, "60.0 ms"), (0.625, "625 ms"), (2.617, "2.62 s")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_percentages() -> None:
    assert [percent(share) for share in (0.0, 0.016, 0.44, 1.0)] == ["0%", "1.6%", "44%", "100%"]


def test_a_cable_is_reported_once_as_status_tells_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = [
        LinkDetection(
            source=source,
            target=1 - source,
            before="healthy",
            after="slow",
            reason="80 ms",
            path=path,
            pipeline=4 * replica,
            since_iteration=11,
            replica=replica,
            lane=0,
            source_rank=4 * replica + source,
            target_rank=4 * replica + 1 - source,
            source_host=f"node{7 + source}",
            target_host=f"node{8 - source}",
        )
        for replica in range(2)
        for path in ("device", "host")
        for source in range(2)
    ]
    times = IterationsTimed(first=0, seconds=[1.0] * 11 + [1.85] * 14)
    write_events(tmp_path, [(times, 25), *((each, 13) for each in found)])
    page = Page(report(tmp_path)).text
    assert page.count("Link 0↔1 is slow (was healthy)") == 2, "the row, and its mark in the chart"
    assert page.count("80 ms; ranks 0, 4 on node7 to ranks 1, 5 on node8, replicas 0-1") == 3, "these and the summary"
    capsys.readouterr()
    main(["status", str(tmp_path)])
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["slow"].strip()[1:] in page
    assert "it costs 850 ms of each iteration (46%)" in page
    assert "look at the network between node7 and node8" in page
    assert "None" not in page
    assert re.search(r"\n1\nslow link, at the end", re.sub(r"\s*\n\s*", "\n", page))
