# SPDX-License-Identifier: Apache-2.0
"""Recordings of other tools, of pipelines whose times are known: each is read rightly, or refused in one line."""

from __future__ import annotations

import bz2
import gzip
import json
import re
import statistics
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from support.made_up import foreign
from support.made_up.foreign import B, Event, F, Ran, blocking, in_step, kineto, makespan, named, overlapped, with_args

from adaptra_megatron.schedule.costs import LinkCost, uniform_costs_for
from adaptra_megatron.schedule.simulator import simulate
from adaptra_megatron.schedule.v_shaped import dualpipe_v
from adaptra_megatron.tools.cli.main import main
from adaptra_megatron.tools.recordings.reading import read_recording
from adaptra_megatron.tools.replay.operations import OpType
from adaptra_megatron.tools.replay.pipelines import KINDS

HEALTHY = overlapped(2, 4)
FOUR = overlapped(4, 8, delay=200.0)
Figures = dict[str, Any]


class Right(NamedTuple):
    """What is right; None where nothing is expected of it."""

    replicas: int = 1
    stages: int = 2
    steps: int = 1
    milliseconds: float | None = 154.0
    slowdown: float | None = 1.0
    slow_links: tuple[str, ...] = ()


def analysed(capsys: pytest.CaptureFixture[str], path: Path, *options: str) -> tuple[int, Figures]:
    status = main(["analyze", str(path), "--json", "--no-progress", *options])
    return status, json.loads(capsys.readouterr().out)


def check(status: int, reported: Figures, right: Right) -> None:
    assert status == 0, reported
    assert reported["understood"], reported["doubt"]
    cells = list(reported["slowness"])
    assert len({cell.split(".")[0] for cell in cells}) == right.replicas
    assert len({cell.split(".")[1] for cell in cells}) == right.stages
    assert len(reported["steps"]) == right.steps
    assert reported["replayed_s"] == pytest.approx(reported["recorded_s"], rel=0.01)
    if right.milliseconds is not None:
        assert 1e3 * statistics.median(reported["recorded_s"]) == pytest.approx(right.milliseconds, rel=1e-6)
    if right.slowdown is not None:
        assert reported["slowdown"] == pytest.approx(right.slowdown, rel=0.01)
    slow = {link for link, slowdown in reported["slowdown_by_link"].items() if slowdown > 1.02}
    assert slow == set(right.slow_links)


def file(events: object) -> Callable[[Path], Path]:
    """Write `events` as one file."""

    def write(directory: Path) -> Path:
        path = directory / "trace.json"
        path.write_text(json.dumps(events))
        return path

    return write


def raw(data: bytes, name: str = "trace.json") -> Callable[[Path], Path]:
    def write(directory: Path) -> Path:
        (directory / name).write_bytes(data)
        return directory / name

    return write


def slow_link(source: int, target: int, slow: float = 20_000.0, quick: float = 100.0) -> Callable[[int, int], float]:
    return lambda a, b: slow if {a, b} == {source, target} else quick


def varying(way: Callable[[int, int], float]) -> Callable[[int, int], float]:
    """A third up or down, as messages do on a link that others use too."""
    random = Random(1)
    return lambda a, b: way(a, b) * random.lognormvariate(0.0, 0.3)


# Stock's exchanges block: everybody waits for the slow link, and computation alone was recorded.
STOCK = {
    "stock, no slow link": (blocking(4, 8, lambda a, b: 100.0), Right(stages=4, milliseconds=331.9)),
    "stock, a slow link": (
        blocking(4, 8, slow_link(1, 2)),
        Right(stages=4, milliseconds=501.1, slowdown=501.1 / 331.9, slow_links=("1->2", "2->1")),
    ),
    "stock, a slow link, many micro-batches": (
        blocking(8, 24, slow_link(3, 4, 60_000.0)),
        Right(stages=8, milliseconds=2523.3, slowdown=2523.3 / 935.9, slow_links=("3->4", "4->3")),
    ),
    "stock, a link slow one way": (
        blocking(4, 8, lambda a, b: 20_000.0 if (a, b) == (1, 2) else 100.0),
        Right(stages=4, milliseconds=None, slowdown=None, slow_links=("1->2",)),
    ),
    "stock, the last link slow one way, many micro-batches": (
        blocking(8, 24, lambda a, b: 20_000.0 if (a, b) == (6, 7) else 100.0),
        Right(stages=8, milliseconds=None, slowdown=None, slow_links=("6->7",)),
    ),
    "stock, the last link slow on the way back": (
        blocking(4, 24, lambda a, b: 20_000.0 if (a, b) == (3, 2) else 100.0),
        Right(stages=4, milliseconds=None, slowdown=None, slow_links=("3->2",)),
    ),
    "stock, two stages, a link slow one way": (
        blocking(2, 8, lambda a, b: 20_000.0 if a == 0 else 100.0),
        Right(milliseconds=430.1, slowdown=430.1 / 270.9, slow_links=("0->1",)),
    ),
    "stock interleaved, a slow link": (
        blocking(4, 24, slow_link(1, 2, 60_000.0), chunks=2),
        Right(stages=4, milliseconds=None, slowdown=None, slow_links=("1->2", "2->1")),
    ),
    "stock interleaved, a link slow one way": (
        blocking(8, 8, lambda a, b: 20_000.0 if (a, b) == (3, 4) else 100.0, chunks=2),
        Right(stages=8, milliseconds=None, slowdown=None, slow_links=("3->4",)),
    ),
    "stock, a slow link whose messages vary": (
        blocking(4, 8, varying(slow_link(0, 1, 60_000.0))),
        Right(stages=4, milliseconds=None, slowdown=None, slow_links=("0->1", "1->0")),
    ),
    "during computation, a slow link whose messages vary": (
        overlapped(4, 24, delay=varying(lambda a, b: 60_000.0 if (a, b) == (3, 2) else 100.0)),
        Right(stages=4, milliseconds=None, slowdown=None, slow_links=("3->2",)),
    ),
    "stock, one of two links slow": (
        blocking(3, 6, slow_link(0, 1)),
        Right(stages=3, milliseconds=370.7, slowdown=370.7 / 241.3, slow_links=("0->1", "1->0")),
    ),
    "stock interleaved, a long last chunk and no slow link": (
        blocking(4, 8, lambda a, b: 100.0, chunks=2, long_last=4.0),
        Right(stages=4, milliseconds=None, slowdown=None),
    ),
    "no delay at all": (overlapped(4, 8, delay=0.0), Right(stages=4, milliseconds=330.0)),
    "during computation, many stages": (overlapped(8, 16, delay=100.0), Right(stages=8, milliseconds=694.0)),
    "during computation, a slow link": (
        overlapped(4, 8, delay=slow_link(1, 2)),
        Right(stages=4, milliseconds=490.6, slowdown=490.6 / 331.6, slow_links=("1->2", "2->1")),
    ),
    "really slow one way": (
        overlapped(4, 8, delay=lambda a, b: 3_200.0 if (a, b) == (1, 2) else 200.0),
        Right(stages=4, milliseconds=344.8, slowdown=344.8 / 333.2, slow_links=("1->2",)),
    ),
}


@pytest.mark.parametrize("name", STOCK)
def test_a_slow_link_is_found_and_no_healthy_one_blamed(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran, right = STOCK[name]
    check(*analysed(capsys, file(with_args(ran))(tmp_path)), right)


def shifted(ran: list[Ran], ahead: Callable[[Ran], float]) -> list[Ran]:
    return [each._replace(start=each.start + ahead(each)) for each in ran]


@pytest.mark.parametrize("ahead_us", [3_000.0, -12_000.0, 5e9])
def test_clocks_that_are_apart_are_put_right(
    ahead_us: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = with_args(shifted(FOUR, lambda each: ahead_us if each.stage >= 2 else 0.0))
    status, reported = analysed(capsys, file(events)(tmp_path))
    check(status, reported, Right(stages=4, milliseconds=333.2))
    assert f"The clock of stage 2 is {ahead_us / 1e3:,.0f} ms ahead of that of stage 1" in " ".join(reported["notes"])


def test_clocks_that_drift_are_put_right_in_every_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events: list[Event] = []
    for step in range(3):
        drifted = shifted(FOUR, lambda each: 1e6 * step + 3e3 * step * (each.stage >= 2))  # noqa: B023
        events += with_args(drifted, iteration=step)
    status, reported = analysed(capsys, file(events)(tmp_path))
    check(status, reported, Right(stages=4, steps=3, milliseconds=333.2))
    assert "is 3 to 6 ms ahead" in " ".join(reported["notes"])


def with_gpu_copies(ran: list[Ran]) -> list[Event]:
    """Ranges on the host are launches; a copy on a GPU's stream says when they ran, another stream holds less."""
    events: list[Event] = []
    for index, host in enumerate(in_step(named(ran))):
        call = {"External id": index}
        gpu = {**host, "cat": "gpu_user_annotation", "pid": 0, "tid": 7, "args": call}
        copies = [gpu, {**gpu, "tid": 20, "dur": 10.0}]
        events += [{**host, "ts": host["ts"] - 5.0, "dur": 300.0, "args": call}, *copies]
    return events


def torch_names(ran: list[Ran]) -> list[Event]:
    """Two chunks per rank: virtual stage = chunk * 2 + stage; the range begins when the rank begins to wait."""
    over, events = 0.0, []
    for each in ran:
        name = f"PP:{each.chunk * 2 + each.stage}{'F' if each.kind is F else 'B'}{each.micro_batch}"
        (event,) = named([each])
        events.append({**event, "name": name, "ts": over, "dur": each.end - over})
        over = each.end
    return in_step(events)


def waits_inside(ran: list[Ran]) -> list[Event]:
    """torch's GPipe: a range begins when its stage is free, and the wait for the message is a range in it."""
    over, events = 0.0, []
    for each in ran:
        (event,) = named([each])
        events += [{**event, "ts": over, "dur": each.end - over}]
        events += [{**event, "name": "gloo:recv", "ts": over, "dur": each.start - over}]
        over = each.end
    return in_step(events)


GPIPE = [[(F, number) for number in range(4)] + [(B, number) for number in range(4)]] * 2
LONG_LAST = overlapped(
    2, 4, forward=lambda s, m: 2e3 + 4e3 * s, backward=lambda s, m: 4e3 + 8e3 * s, delay=300.0, orders=GPIPE
)


def megascan(ran: list[Ran]) -> list[Event]:
    """Its arguments and names, one process per global rank, warm-up apart; every rank has a twin of its cell."""
    events: list[Event] = []
    for each in ran:
        for lane in range(2):
            rank = 4 * each.stage + 2 * each.replica + lane
            name = NAMED_BY_PHASE[each.kind] if each.micro_batch == 0 else foreign.NAMES[each.kind]
            said = {"iteration": 3, "dp_rk": each.replica, "pp_rk": each.stage, "tp_rk": lane, "g_rk": rank}
            event = {"name": name, "ph": "X", "ts": each.start + 3.0 * lane, "dur": each.duration, "pid": rank}
            events.append({**event, "tid": 0, "args": said})
    return events


NAMED_BY_PHASE = {F: "forward-warmup", B: "backward-cooldown"}
ONE_SLOW = [
    *overlapped(2, 8, replica=0),
    *overlapped(2, 8, replica=1, forward=lambda s, m: 2e4 - 1e4 * s, backward=lambda s, m: 4e4 - 2e4 * s),
]


def processes_named(ran: list[Ran]) -> list[Event]:
    """As StragglerAnalysis draws: a process per replica, a thread per stage."""
    threads = {(each.replica, each.stage) for each in ran}
    events = foreign.without(with_args(ran), "pp_rank", "dp_rank", "iteration")
    for each, event in zip(ran, events, strict=True):
        event.update(pid=each.replica, tid=5 * each.stage + each.replica)
        event["args"]["step"] = 16
    names = [
        {"name": "thread_name", "ph": "M", "pid": replica, "tid": 5 * stage + replica,
         "args": {"name": f"PP rank {stage}, TP rank 0, compute"}}
        for replica, stage in threads
    ]  # fmt: skip
    names += [
        {"name": "process_name", "ph": "M", "pid": replica, "args": {"name": f"DP rank [{replica}]"}}
        for replica in {replica for replica, _ in threads}
    ]
    return names + events


def primus(directory: Path) -> Path:
    (directory / "config.json").write_text(json.dumps({"pp_size": 2, "dp_size": 1}))
    for stage in range(2):
        row: dict[str, list[float]] = {}
        for prefix, kind in (("fwd", F), ("bwd", B)):
            own = [each for each in HEALTHY if each.stage == stage and each.kind is kind]
            row |= {f"{prefix}_start": [each.start / 1e3 for each in own]}
            row |= {f"{prefix}_end": [each.end / 1e3 for each in own], f"{prefix}_minibatch": []}
        (directory / f"pp_rank_{stage}.json").write_text(json.dumps({"1": row, "2": row}))
    return directory


def chunked(ran: list[Ran]) -> list[Ran]:
    """Four stages' pipeline as two stages of two chunks, in the time that two ranks need for it."""
    orders = {stage: [each for each in ran if each.stage % 2 == stage] for stage in range(2)}
    done: dict[tuple[OpType, int, int], float] = {}
    free, found = [0.0, 0.0], []
    while any(orders.values()):
        for stage, rows in orders.items():
            each = rows[0] if rows else None
            while each is not None:
                source = each.stage - 1 if each.kind is F else each.stage + 1
                if 0 <= source < 4 and (each.kind, source, each.micro_batch) not in done:
                    break
                come = done.get((each.kind, source, each.micro_batch), 0.0)
                start = max(free[stage], come)
                done[each.kind, each.stage, each.micro_batch] = free[stage] = start + each.duration
                found.append(each._replace(stage=stage, chunk=each.stage // 2, start=start))
                rows.pop(0)
                each = rows[0] if rows else None
    return found


CHUNKED = chunked(sorted(overlapped(4, 4, delay=0.0), key=lambda each: each.start))


def pairs(*, name_ends: bool = True, asynchronous: bool = False) -> list[Event]:
    """Pairs of events; an end may stand behind the next beginning at the same time."""
    events: list[Event] = []
    for index, each in enumerate(with_args(HEALTHY)):
        begin, duration = {**each, "ph": "B"}, each["dur"]
        del begin["dur"]
        end: Event = {"ph": "E", "pid": each["pid"], "tid": 0, "ts": each["ts"] + duration}
        if asynchronous:
            begin |= {"ph": "b", "cat": "pp", "id": index}
            end |= {"ph": "e", "cat": "pp", "id": index}
        if name_ends:
            end["name"] = each["name"]
        events += [begin, end]
    return sorted(events, key=lambda each: (each["ts"], each["ph"] in "Ee"))


def inside(outer: OpType, shares: list[tuple[float, float]]) -> list[Event]:
    """Ranges called forward inside forwards or backwards."""
    events = with_args(HEALTHY)
    for each in HEALTHY:
        if each.kind is outer:
            for first, last in shares:
                (event,) = foreign.without(with_args([each._replace(kind=F)]), "dp_rank", "microbatch")
                start, duration = each.start + first * each.duration, (last - first) * each.duration
                events.append({**event, "ts": start, "dur": duration})
    return events


OPTYPES = {str(kind): optype for optype, kind in KINDS.items()}
LETTERS = {optype: letter for letter, optype in OPTYPES.items()}


def dualpipe(slow_s: float = 1e-4) -> list[Ran]:
    """DualPipe-V, two chunks per stage there and back, halves of backwards apart; `slow_s`: of link 1-2."""
    schedule = dualpipe_v(4, 12)
    links = {(a, b): LinkCost(latency_s=slow_s if {a, b} == {1, 2} else 1e-4) for a, b in schedule.placement.links}
    seconds = {"forward_s": 0.01, "backward_input_s": 0.01, "backward_weight_s": 0.01}
    found = simulate(schedule, uniform_costs_for(schedule, links=links, **seconds))
    return [
        Ran(stage, OPTYPES[str(action.kind)], action.micro_batch, 1e6 * start_s, 1e6 * (end_s - start_s), action.chunk)
        for stage, row in enumerate(zip(schedule.orders, found.start_s, found.end_s, strict=True))
        for action, start_s, end_s in zip(*row, strict=True)
    ]


def v_names(ran: list[Ran]) -> list[Event]:
    """torch's names: the virtual stage says where a chunk is."""
    return in_step(
        [
            {"ph": "X", "cat": "user_annotation", "ts": each.start, "dur": each.duration, "pid": 1, "tid": 1,
             "name": f"PP:{7 - each.stage if each.chunk else each.stage}{LETTERS[each.kind]}{each.micro_batch}"}
            for each in ran
        ]
    )  # fmt: skip


def in_pairs(ran: list[Ran]) -> list[Event]:
    """As `v_names`, but a forward and the backward of the other chunk behind it are one range, as torch has them."""
    events = v_names(sorted(ran, key=lambda each: each.start))
    found = [events[0]]
    for event in events[1:]:
        before = found[-1]
        if re.fullmatch(r"PP:\dF\d+", before["name"]) and re.fullmatch(r"PP:\dB\d+", event["name"]):
            name = f"PP:({before['name'][3:]};{event['name'][3:]})OVERLAP_F_B"
            event = {**before, "name": name, "dur": event["ts"] + event["dur"] - before["ts"]}
            found.pop()
        found.append(event)
    return found


def on_gpu(make: Callable[[list[Ran]], list[Event]]) -> Callable[[list[Ran]], list[Event]]:
    def copies(ran: list[Ran]) -> list[Event]:
        around, *events = make(ran)
        return [around, *({**each, "cat": "gpu_user_annotation"} for each in events)]

    return copies


def side_by_side(ran: list[Ran], *, threads: bool, late: float = 0.0) -> list[Event]:
    """Every forward together with the backward behind it, in both's time, as DualPipe does; on threads of their own,
    or on one; `late`: by how much the backward begins later."""
    rows = sorted(ran, key=lambda each: (each.stage, each.start))
    for at, (one, other) in enumerate(pairwise(rows)):
        if (one.stage, one.kind, other.kind) == (other.stage, F, B):
            both = one.duration + other.duration
            rows[at] = one._replace(duration=both)
            rows[at + 1] = other._replace(start=one.start + late, duration=both)
    events = with_args(rows)
    for event, each in zip(events, rows, strict=True):
        event["tid"] = int(threads and each.kind is B)
    return events


EVALUATION = [each._replace(start=each.start + 160_000.0) for each in overlapped(2, 4) if each.kind is F]
THREE = [(step, shifted(HEALTHY, lambda each, step=step: 200_000.0 * step)) for step in range(3)]  # type: ignore[misc]
FIVE_THREE = [each for step, ran in THREE for each in with_args(ran, iteration=step)]


def steps_of_processes(directory: Path) -> Path:
    """The last stage is still in its step when the first has begun the next one."""
    events: list[Event] = []
    for step, ran in THREE:
        for stage, late in ((0, 0.0), (1, 60_000.0)):
            own = named([each for each in ran if each.stage == stage])
            first, *rest = in_step([{**each, "pid": stage} for each in own], step)
            events += [{**first, "dur": first["dur"] + late}, *rest]
    return file(events)(directory)


def rank_without_info(stage: int) -> dict[str, Any]:
    return {}


def base_times(stage: int) -> dict[str, Any]:
    base_ns = 1_790_857_026_000_000_000 - 2_000_000_000 * stage
    return {"distributedInfo": {"rank": stage, "world_size": 2}, "baseTimeNanoseconds": base_ns}


def later(stage: int) -> float:
    return 2e6 * stage


def group_says(stage: int) -> dict[str, Any]:
    """Rank 0 and 2 are a pipeline, 1 and 3 another one."""
    groups = [
        {"pg_desc": "PIPELINE_MODEL_PARALLEL_GROUP", "ranks": [0, 1]},
        {"pg_desc": "DATA_PARALLEL_GROUP", "ranks": [stage]},
    ]
    return {"distributedInfo": {"rank": stage, "world_size": 2, "pg_config": groups}}


TWELVE = overlapped(
    12, 4, forward=lambda s, m: 30e3 if s == 2 else 10e3, backward=lambda s, m: 60e3 if s == 2 else 20e3
)
PLAIN = with_args(HEALTHY)
TEXT = json.dumps(PLAIN)
READ: dict[str, tuple[Callable[[Path], Path], list[str], Right]] = {
    "complete events": (file(PLAIN), [], Right()),
    "times as text": (file([{**e, "ts": str(e["ts"])} for e in PLAIN]), [], Right()),
    "a byte order mark": (raw(b"\xef\xbb\xbf" + TEXT.encode()), [], Right()),
    "gzip without its suffix": (raw(gzip.compress(TEXT.encode())), [], Right()),
    "bz2": (raw(bz2.compress(TEXT.encode()), "trace.json.bz2"), [], Right()),
    "plain text called gzip": (raw(TEXT.encode(), "trace.json.gz"), [], Right()),
    "a list without its bracket": (raw(TEXT[:-1].encode() + b",\n"), [], Right()),
    "NaN in an event that does not matter": (
        raw(TEXT[:-1].encode() + b', {"ph": "C", "name": "c", "ts": NaN}, 7]'), [], Right(),
    ),
    "an event in each line": (
        raw("\n".join(json.dumps(e) for e in PLAIN).encode() + b"\n", "trace.jsonl"), [], Right(),
    ),
    "arguments in capitals, of processes in another order": (
        file([{**e, "pid": 7 - e["pid"], "args": {"PP_Rank": e["args"]["pp_rank"], "Iteration": 0,
               "MicroBatch": e["args"]["microbatch"]}} for e in PLAIN]), [], Right(),
    ),
    "pairs": (file(pairs()), [], Right()),
    "ends without names": (file(pairs(name_ends=False)), [], Right()),
    "asynchronous pairs": (file(pairs(asynchronous=True)), [], Right()),
    "layers inside forwards": (file(inside(F, [(0.05, 0.4), (0.5, 0.9)])), [], Right()),
    "recomputation inside backwards": (file(inside(B, [(0.0, 0.45)])), [], Right()),
    "an evaluation behind the step": (file(PLAIN + with_args(EVALUATION)), [], Right()),
    "names of micro-batches and iterations": (
        file([{"name": f"{'fwd' if e.kind is F else 'bwd'}_mb{e.micro_batch}_iter0", "ph": "X", "ts": e.start,
               "dur": e.duration, "pid": e.stage, "tid": 0} for e in HEALTHY]), [], Right(),
    ),
    "micro-batches from 40 on": (
        file(with_args([e._replace(micro_batch=e.micro_batch + 40) for e in HEALTHY])), [], Right(),
    ),
    "micro-batches with a gap": (
        file(with_args([e._replace(micro_batch=3 * e.micro_batch) for e in HEALTHY])), [], Right(),
    ),
    "stages as text": (file([{**e, "args": {**e["args"], "pp_rank": f"stage{e['pid']}"}} for e in PLAIN]), [], Right()),
    "stages from 1 on": (
        file([{**e, "args": {**e["args"], "pp_rank": e["pid"] + 1}} for e in PLAIN]), [], Right(),
    ),
    "processes named by stage": (
        file([{"ph": "M", "name": "process_name", "pid": s, "args": {"name": f"stage {1 - s}"}} for s in range(2)]
             + [{**e, "pid": 1 - e["pid"]} for e in foreign.without(PLAIN, "pp_rank")]), [], Right(),
    ),
    "threads named by stage": (file(processes_named(HEALTHY)), [], Right()),
    "two replicas by process": (
        file(processes_named(ONE_SLOW)), [], Right(replicas=2, milliseconds=492.0, slowdown=1.42),
    ),
    "MegaScan": (file(megascan(ONE_SLOW)), [], Right(replicas=2, milliseconds=492.0, slowdown=1.42)),
    "three steps": (file(FIVE_THREE), [], Right(steps=3)),
    "three steps, not named": (
        file(foreign.without(FIVE_THREE, "iteration", "microbatch")), [], Right(steps=3),
    ),
    "steps of processes that overlap": (steps_of_processes, [], Right(steps=3)),
    "metadata with text for args": (
        file([{"ph": "M", "name": "process_name", "pid": 0, "args": "x"}, *PLAIN]), [], Right(),
    ),
    "Kineto": (lambda d: kineto(d / "run", HEALTHY), ["--stages", "2"], Right()),
    "Kineto, copies on the GPU": (lambda d: kineto(d / "run", HEALTHY, with_gpu_copies), ["--stages", "2"], Right()),
    "Kineto, groups say the stages": (lambda d: kineto(d / "run", HEALTHY, said=group_says), [], Right()),
    "Kineto, times from bases that differ": (
        lambda d: kineto(d / "run", shifted(HEALTHY, lambda e: later(e.stage)), said=base_times), ["--stages", "2"],
        Right(),
    ),
    "Kineto, ranks in names": (
        lambda d: kineto(d / "run", TWELVE, said=rank_without_info), ["--stages", "12"],
        Right(stages=12, milliseconds=makespan(TWELVE) / 1e3, slowdown=None),
    ),
    "Kineto, a directory for each step": (
        lambda d: kineto(d / "run" / "iteration_10", HEALTHY, name="rank{}_trace.json").parent, ["--stages", "2"],
        Right(),
    ),
    "per-rank files that say everything": (
        lambda d: kineto(d / "run", HEALTHY, with_args, name="r{}.json", said=rank_without_info), [], Right(),
    ),
    "torch.distributed.pipelining, waits in ranges": (
        lambda d: kineto(d / "run", CHUNKED, torch_names), [],
        Right(milliseconds=makespan(CHUNKED) / 1e3, slowdown=None),
    ),
    "DualPipe-V": (
        lambda d: kineto(d / "run", dualpipe(), v_names), [],
        Right(stages=4, milliseconds=makespan(dualpipe()) / 1e3),
    ),
    "DualPipe-V, a slow link": (
        lambda d: kineto(d / "run", dualpipe(0.02), v_names), [],
        Right(stages=4, milliseconds=makespan(dualpipe(0.02)) / 1e3,
              slowdown=makespan(dualpipe(0.02)) / makespan(dualpipe()), slow_links=("1->2", "2->1")),
    ),
    "DualPipe-V, pairs in one range": (
        lambda d: kineto(d / "run", dualpipe(), on_gpu(in_pairs)), [],
        Right(stages=4, milliseconds=makespan(dualpipe()) / 1e3),
    ),
    "DualPipe-V, pairs in one range, on hosts": (
        lambda d: kineto(d / "run", dualpipe(), in_pairs), [],
        Right(stages=4, milliseconds=makespan(dualpipe()) / 1e3),
    ),
    "DualPipe-V, pairs in one range, a slow link": (
        lambda d: kineto(d / "run", dualpipe(0.02), on_gpu(in_pairs)), [],
        Right(stages=4, milliseconds=makespan(dualpipe(0.02)) / 1e3,
              slowdown=makespan(dualpipe(0.02)) / makespan(dualpipe()), slow_links=("1->2", "2->1")),
    ),
    "torch's GPipe, waits in ranges": (
        lambda d: kineto(d / "run", LONG_LAST, waits_inside), ["--stages", "2"],
        Right(milliseconds=78.6, slowdown=78.6 / 60.6),
    ),
    "Primus": (primus, [], Right(steps=2)),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_what_other_tools_write_is_read(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write, options, right = READ[name]
    check(*analysed(capsys, write(tmp_path), *options), right)


def with_other_json(directory: Path) -> Path:
    path = kineto(directory / "run", HEALTHY)
    (path / "config.json").write_text('{"model": "gpt"}')
    return path


def test_json_that_is_no_trace_may_be_next_to_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, reported = analysed(capsys, with_other_json(tmp_path), "--stages", "2")
    check(status, reported, Right())
    assert "config.json is no trace" in reported["notes"][0]


def test_one_bad_event_costs_its_step_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [dict(each) for each in FIVE_THREE]
    events[3]["dur"] = -37.0
    status, reported = analysed(capsys, file(events)(tmp_path))
    check(status, reported, Right(steps=2))
    assert reported["left_out"] == ["step 0: stage 1 has no backward of micro-batch 0: it is not recorded as a whole"]
    assert "'backward' at ts 21000.0 lasts -37 µs" in " ".join(reported["notes"])


def test_a_step_that_one_stage_recorded_in_part_has_no_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The profiler of stage 1 ended early: its last forwards are not of an evaluation."""
    events = [each for each in FIVE_THREE if each["pid"] == 0 or each["ts"] < 470_000.0]
    status, reported = analysed(capsys, file(events)(tmp_path))
    check(status, reported, Right(steps=2))
    assert "step 2: stage 1 has no" in reported["left_out"][0]
    assert reported["notes"] == []


def test_progress_is_reported_before_the_first_file_is_read(tmp_path: Path) -> None:
    reported: list[tuple[str, int, int]] = []
    read_recording(kineto(tmp_path / "run", HEALTHY, with_args), progress=lambda *each: reported.append(each))
    assert reported == [("reading traces", done, 2) for done in range(3)]
    reported.clear()
    read_recording(primus(tmp_path), progress=lambda *each: reported.append(each))
    assert reported == [("reading traces", done, 1) for done in range(2)]


def one_without(key: str, value: object = None, at: int = 3) -> list[Event]:
    events = [dict(each) for each in PLAIN]
    events[at] = {**events[at], key: value}
    return events


def cut_short(directory: Path) -> Path:
    path = kineto(directory / "run", HEALTHY)
    whole = (path / "rank1.json").read_text()
    (path / "rank1.json").write_text(whole[: len(whole) // 2])
    return path


def two_runs(directory: Path) -> Path:
    kineto(directory / "run", HEALTHY, with_args, name="a-rank{}.json", said=rank_without_info)
    late = shifted(HEALTHY, lambda each: 5e5)
    return kineto(directory / "run", late, with_args, name="b-rank{}.json", said=rank_without_info)


def one_rank(directory: Path) -> Path:
    path = kineto(directory / "run", HEALTHY)
    (path / "rank1.json").unlink()
    return path


def launches(ran: list[Ran]) -> list[Event]:
    return [
        *in_step(named(ran)),
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1.0, "dur": 1.0, "pid": 0, "tid": 7},
    ]


AT_ONCE = "actions of a stage ran side by side: as DualPipe's do, which cannot be replayed"
REFUSED: dict[str, tuple[Callable[[Path], Path], list[str], str]] = {
    "no stage, one process": (
        file([{**e, "pid": 0} for e in foreign.without(PLAIN, "pp_rank", "dp_rank")]), [],
        "does not say on which stage its actions ran",
    ),
    "processes of a host": (
        file([{**e, "pid": 51234 + e["pid"]} for e in foreign.without(PLAIN, "pp_rank", "dp_rank")]), [],
        "does not say on which stage",
    ),
    "ranks as text": (
        file([{**e, "pid": f"rank {e['pid']}"} for e in foreign.without(PLAIN, "pp_rank", "dp_rank")]), [],
        "traces of 2 ranks that do not say on which stage they ran: give the pipeline size",
    ),
    "replicas not named": (
        file([{**e, "pid": f"{e['pid']}.{r.replica}"} for e, r in zip(
            foreign.without(with_args(ONE_SLOW), "dp_rank"), ONE_SLOW, strict=True)]), [],
        "2 processes name one stage and no replica",
    ),
    "pipelines side by side, on threads": (
        file(side_by_side(FOUR, threads=True)), [],
        "stage 0: the backward of micro-batch 0 began before the forward of micro-batch 3 was over, and more of it: "
        "forwards and backwards ran side by side, as DualPipe's do",
    ),
    "pipelines side by side, a little apart": (
        file(side_by_side(FOUR, threads=False, late=100.0)), [], "ran side by side, as DualPipe's do",
    ),
    "pipelines side by side, on one thread": (file(side_by_side(FOUR, threads=False)), [], AT_ONCE),
    "two jobs, neither steps nor micro-batches named": (
        file(foreign.without(PLAIN + with_args(shifted(HEALTHY, lambda e: 3e3)), "iteration", "microbatch")), [],
        "as if several jobs or ranks were one: name one run alone",
    ),
    "two jobs, of different steps": (
        file(with_args(HEALTHY, iteration=5) + with_args(shifted(HEALTHY, lambda e: 3e3), iteration=6)), [],
        "on stage 0, the forward of micro-batch 0 began before the forward of micro-batch 0 was over (of steps 6 and "
        "5), and more of it, as if several jobs were in one recording",
    ),
    "Megatron's OpenTelemetry spans": (
        file([{**e, "name": f"megatron.microbatch.{e['name']}"} for e in PLAIN]), [],
        "the ranges in it are called 'megatron.microbatch.forward'",
    ),
    "pairs in one range, and no action alone": (
        lambda d: kineto(d / "run", dualpipe(), lambda ran: [e for e in in_pairs(ran) if "OVER" in e["name"]]), [],
        "is one range, and no range of either alone says how long it takes",
    ),
    "some stages not named": (file(one_without("args", "text")), [], "some actions name their stage"),
    "stages from 2 on": (
        file([{**e, "args": {**e["args"], "pp_rank": e["pid"] + 2}} for e in PLAIN]), [], "missing: 0, 1",
    ),
    "two runs in a file": (file(PLAIN + with_args(shifted(HEALTHY, lambda e: 5e5))), [], "as if two runs"),
    "two runs in a directory": (two_runs, [], "as if two runs"),
    "a forward is missing": (file(PLAIN[:-4] + PLAIN[-3:]), [], "it is not recorded as a whole"),
    "a stage has no forwards": (
        file([e for e in PLAIN if not (e["name"] == "forward" and e["pid"])]), [], "stage 1 has no forward",
    ),
    "no duration": (file(one_without("dur")), [], "'backward' at ts 21000.0 has no duration"),
    "a process that is a list": (file([{**e, "pid": [1]} for e in PLAIN]), [], "neither a number nor a name"),
    "infinite times": (raw(TEXT.replace('"ts": 21000.0', '"ts": 1e400').encode()), [], "has no time"),
    "a rank is missing": (one_rank, ["--stages", "2"], "has rank 0 of a job of 2; missing: 1"),
    "one file of two ranks": (lambda d: kineto(d / "run", HEALTHY) / "rank0.json", [], "rank 0 of a job of 2"),
    "a stage's file is cut short": (cut_short, ["--stages", "2"], "rank1.json is cut short"),
    "launches alone, kernels on a GPU": (
        lambda d: kineto(d / "run", HEALTHY, launches), ["--stages", "2"], "are known on the host alone",
    ),
    "a damaged gzip": (raw(gzip.compress(TEXT.encode())[:60] + b"xxxx"), [], "cannot be decompressed"),
    "an empty file": (raw(b""), [], "is empty"),
    "a pickle": (raw(b"\x80\x04\x95"), [], "is a pickle, as NCCL's flight recorder"),
    "a database": (raw(b"SQLite format 3\x00"), [], "is an SQLite database, such as Nsight Systems"),
    "a page": (raw(b"<html>"), [], "is a page of HTML"),
    "Perfetto's own format": (raw(b"\x0a\x05abc"), [], "Perfetto's own format"),
    "the flight recorder": (file({"version": "2.10", "pg_config": {}, "entries": []}), [], "NCCL flight recorder"),
    "Chakra": (file({"schema": "1.1.1-chakra.0.0.4", "nodes": [], "start_ts": 1}), [], "execution trace (Chakra)"),
    "Nsight Systems": (raw(b'{"NvtxEvent":{"Text":"forward"}}\n' * 3), [], "export of Nsight Systems"),
    "scores": (file({"relative_perf_scores": {}}), [], "scores by rank (NVRx)"),
    "costs": (file({"stages": 2, "micro_batches": 4}), [], "a file of costs"),
    "no range of ours": (
        file([{"ph": "X", "cat": "user_annotation", "name": "my_forward_pass", "ts": 1, "dur": 1, "pid": 1}]), [],
        "the ranges in it are called 'my_forward_pass'",
    ),
    "no such step": (file(PLAIN), ["--steps", "99"], "has none of the steps asked for: there is 0"),
    "no backwards": (file([e for e in PLAIN if e["name"] == "forward"]), [], "names forwards and no backwards"),
    "steps of one stage, not named": (
        file(foreign.without(with_args(overlapped(1, 6)), "iteration", "microbatch")), [], "names no steps",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_said_is_asked_for_or_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write, options, words = REFUSED[name]
    status, reported = analysed(capsys, write(tmp_path), *options)
    assert status == 2
    assert words in reported["error"]
    assert not reported["understood"]
    assert reported["doubt"] == reported["error"]
    assert "('" not in reported["error"]


def test_a_gap_that_nothing_explains_is_said_to_be_not_understood(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A host that pauses half a step long: or work that was not recorded, who knows."""
    ran = [each._replace(start=each.start + (80_000.0 if each.start >= 60_000.0 else 0.0)) for each in HEALTHY]
    path = file(with_args(ran))(tmp_path)
    status, reported = analysed(capsys, path)
    assert status == 1
    assert not reported["understood"]
    assert "of a step, no recorded work runs or is waited for" in reported["doubt"]
    assert reported["slowdown"] is None
    assert reported["remedies"]["rows"] == []
    assert reported["slowdown_by_link"] == {}
    page = tmp_path / "page.html"
    assert main(["analyze", str(path), "--html", str(page), "--no-progress"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("The recording is not understood")
    assert "remed" not in said
    assert "Which workers slow it" not in page.read_text()
    assert main(["plan", str(path)]) == 2
    assert "is not understood, so no costs are taken from it" in capsys.readouterr().err


def test_of_two_replicas_the_slow_cell_is_compared_with_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, reported = analysed(capsys, file(with_args(ONE_SLOW))(tmp_path))
    assert reported["slowness"] == pytest.approx({"0.0": 1.0, "0.1": 1.0, "1.0": 2.0, "1.1": 1.0})
    exchanged = next(row for row in reported["remedies"]["rows"] if row["key"] == "exchange")
    healthy_s = makespan(overlapped(2, 8)) / 1e6
    assert exchanged["step_s"] == pytest.approx(healthy_s)


def test_with_one_replica_a_heavy_stage_is_no_slow_worker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = overlapped(4, 8, forward=lambda s, m: 10e3 * (1 + (s == 1)), backward=lambda s, m: 20e3 * (1 + (s == 1)))
    assert main(["analyze", str(file(with_args(ran))(tmp_path)), "--no-progress"]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[0].endswith("a long stage 1")
    assert "slow worker there would look the same" in said


def test_where_all_links_are_slow_alike_messages_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = blocking(2, 8, lambda a, b: 20_000.0)
    assert main(["analyze", str(file(with_args(ran))(tmp_path)), "--no-progress"]) == 0
    assert "Nothing is slower than its peers, but messages between stages cost 40%" in capsys.readouterr().out


@pytest.mark.parametrize("weight", ["W", "weight_grad", "grad_weight"])
def test_backwards_with_weight_gradients_are_their_input_halves(weight: str, tmp_path: Path) -> None:
    """Zero-bubble recordings name them F, B and W: taken for whole backwards, no remedy could be simulated."""
    events = with_args(HEALTHY)
    for each in [each for each in events if "backward" in str(each["name"])]:
        each["dur"] = float(each["dur"]) / 2
        each["name"] = "B"
        events.append({**each, "name": weight, "ts": float(each["ts"]) + each["dur"]})
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(events))
    (step,) = read_recording(path).steps
    counts = [sum(each.optype is kind for each in step.operations) for kind in OpType if kind.computes]
    kinds = {each.optype for each in step.operations if each.optype.computes}
    assert kinds == {OpType.FORWARD, OpType.BACKWARD_INPUT, OpType.BACKWARD_WEIGHT}
    assert sorted(counts) == [0, 8, 8, 8]
