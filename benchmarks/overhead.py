# SPDX-License-Identifier: Apache-2.0
"""What measuring costs: the same order of actions with everything measured, and with nothing.

    python benchmarks/overhead.py [--quick] [--output benchmarks/results/overhead.md]

Real processes: in one set of them a pipeline trains again and again, in turn with everything measured (actions,
messages, detector, exchange, telemetry's figures; policy observe) and with nothing (benchmarks/overhead_rank.py).
Compute is emulated: each F, B and W lasts a given time. Also what each part costs on its own, and the leader's
work.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from adaptra_megatron.common.typed_messages import encoded
from adaptra_megatron.control.deciders.decider import iteration_sample
from adaptra_megatron.control.detector.detector import Detector
from adaptra_megatron.control.measurements import measurement_of, stage_measurement
from adaptra_megatron.control.stragglers.straggler_host import HostSampler
from adaptra_megatron.engine.execution.executor import ClockTimer
from adaptra_megatron.engine.measuring import arrival_records
from adaptra_megatron.engine.sync_arrivals import ClockMoments, SyncWaits
from adaptra_megatron.schedule.classic import one_f_one_b
from adaptra_megatron.schedule.csv_format import schedule_to_csv
from adaptra_megatron.telemetry.action_records import ActionRecord
from adaptra_megatron.tools.local_ranks.launch_ranks import run_ranks
from adaptra_megatron.transport.link_paths import Path as LinkPath
from adaptra_megatron.transport.message_keys import Direction, MessageKey, MessageTimes
from testing.jobs.fork_server import ForkServer

STAGES = 4
RANK = str(Path(__file__).with_name("overhead_rank.py"))


@dataclass(frozen=True)
class Request:
    """What the ranks are to do."""

    arguments: list[str]
    nothing: list[str]
    """Arguments where nothing is measured,"""
    everything: list[str]
    """and where everything is."""
    rounds: int


@dataclass(frozen=True)
class Case:
    compute_ms: float
    micro_batches: int
    iterations: int
    rounds: int


@dataclass(frozen=True)
class Row:
    case: Case
    nothing_s: float
    everything_s: float
    ratios: list[float]
    """Ratio of each round."""
    cpu_s: tuple[float, float]
    """Per iteration of a rank, of all its threads: the leading rank's, and the median of the others; beyond nothing."""
    training_thread_s: dict[str, float]
    """Seconds per iteration that functions of measuring take on the training thread, waiting included; median over
    iterations and ranks."""
    deciding_s: float
    """CPU seconds of the leader's decision, median over iterations."""


def measure(case: Case, server: ForkServer) -> Row:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        csv = directory / "stock.csv"
        csv.write_text(schedule_to_csv(one_f_one_b(STAGES, case.micro_batches)))
        request = Request(
            arguments=(
                f"--pipeline-model-parallel-size {STAGES} --num-layers {STAGES} "
                f"--global-batch-size {case.micro_batches} --train-iters {case.iterations} --log-interval 1000 "
                "--mock-data --no-gradient-accumulation-fusion --hidden-size 32 --seq-length 16 "
                f"--emulate-compute-ms {','.join([f'{case.compute_ms:g}'] * 3)} --adaptra"
            ).split(),
            nothing=["--adaptra-plan-csv", str(csv)],
            everything=["--adaptra-policy", "observe"],
            rounds=case.rounds,
        )
        asked, report = directory / "request.json", directory / "report.json"
        asked.write_text(json.dumps(asdict(request)))
        run_ranks(
            STAGES, [RANK, str(asked), str(report)], timeout_s=270, log_directory=directory / "logs", server=server
        )
        ranks = json.loads(report.read_text())
    return summarise(case, ranks)


def summarise(case: Case, ranks: list[list[dict]]) -> Row:  # type: ignore[type-arg]
    first = ranks[0]
    assert all(run["losses"] == last["losses"] for last in ranks[-1][:1] for run in ranks[-1]), "losses differ"
    by_mode = {mode: [run for run in first if run["mode"] == mode] for mode in ("nothing", "everything")}
    medians = {mode: [statistics.median(run["pipeline_s"]) for run in runs] for mode, runs in by_mode.items()}
    ratios = [e / n for n, e in zip(medians["nothing"], medians["everything"], strict=True)]

    def cpu_s(rank: list[dict], mode: str) -> float:  # type: ignore[type-arg]
        return statistics.median(run["cpu_s_per_iteration"] for run in rank if run["mode"] == mode)

    more_s = [cpu_s(rank, "everything") - cpu_s(rank, "nothing") for rank in ranks]
    return Row(
        case,
        statistics.median(medians["nothing"]),
        statistics.median(medians["everything"]),
        ratios,
        (more_s[0], statistics.median(more_s[1:])),
        {
            name: statistics.median(
                run["training_thread_s"][name] for rank in ranks for run in rank if run["mode"] == "everything"
            )
            for name in by_mode["everything"][0]["training_thread_s"]
        },
        statistics.median(run["deciding_cpu_s"] for run in by_mode["everything"]),
    )


@dataclass(frozen=True)
class Part:
    """What one thing costs on its own."""

    what: str
    seconds: float
    where: str


def parts(micro_batches: int = 32) -> list[Part]:
    """On one core, medians of many calls; an iteration of a middle stage of a pipeline."""
    timer, records, times = ClockTimer(), made_up_records(1, micro_batches), made_up_times(1, micro_batches)
    measurement = stage_measurement(0, 1, micro_batches, records, times, 0.0)
    packet = encoded(measurement)
    sample_of = [
        stage_measurement(
            0, stage, micro_batches, made_up_records(stage, micro_batches), made_up_times(stage, micro_batches), 0.0
        )
        for stage in range(STAGES)
    ]
    detector, iterations = Detector(), itertools.count()

    def observe() -> None:
        detector.observe(dataclasses.replace(iteration_sample(sample_of), iteration=next(iterations)))

    key = times[0][0].key
    return [
        Part("2 marks around an action", 2 * each(timer.mark), "training thread, per action"),
        Part(
            "record of an action",
            each(lambda: ActionRecord(0, 0, "F", 0, 0, 0.0, 0.0, 0.0)),
            "training thread, per action, after the last one",
        ),
        Part(
            "times of a message",
            each(lambda: MessageTimes(key, 0, 0.0, 0.0, 2048, LinkPath.DEVICE)),
            "training thread, per message",
        ),
        Part("arrivals for the trace", each(lambda: arrival_records(1, times[1])), "training thread, per iteration"),
        Part("measurement, packed", each(lambda: encoded(measurement)), "exchange's thread, per iteration"),
        Part(
            "measurement, unpacked and condensed",
            each(lambda: measurement_of(packet)),
            "planner process, per iteration of each rank",
        ),
        Part("joined and judged", each(observe), "planner process, per iteration of all ranks"),
        *straggler_parts(),
    ]


def straggler_parts() -> Iterator[Part]:
    """What it costs to look for replicas that come last."""
    waits = SyncWaits()
    waits.want(ClockMoments())

    def iteration() -> None:
        waits.synchronize(int)
        waits.read(int)
        waits.take()

    yield Part("waits for replicas and data", each(iteration), "training thread, per iteration")
    where = "another thread, every 5 s while a cell of its stage is late"
    yield Part("figures of the host", each(HostSampler().sample), where)


def made_up_records(stage: int, micro_batches: int) -> list[ActionRecord]:
    return [
        ActionRecord(0, stage, kind, 0, number, 0.06 * number, 0.06 * number, 0.06 * number + 0.02)
        for number in range(micro_batches)
        for kind in ("F", "I", "W")
    ]


def made_up_times(stage: int, micro_batches: int) -> tuple[list[MessageTimes], list[MessageTimes]]:
    sent, received = [], []
    for number in range(micro_batches):
        for direction, step in ((Direction.ACTIVATION, 1), (Direction.GRADIENT, -1)):
            key, at_s = MessageKey(0, direction, 0, number), 0.06 * number
            if 0 <= stage + step < STAGES:
                sent.append(MessageTimes(key, stage + step, at_s, at_s, 2048, LinkPath.DEVICE))
            if 0 <= stage - step < STAGES:
                received.append(MessageTimes(key, stage - step, at_s - 0.01, at_s + 0.001, 2048, LinkPath.DEVICE))
    return sent, received


def each(function: Callable[[], object], seconds: float = 0.2) -> float:
    """Seconds of a call: median of batches."""
    function()
    begun_s = time.perf_counter()
    function()
    batch = max(1, int(1e-3 / max(time.perf_counter() - begun_s, 1e-8)))
    found = []
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        begun_s = time.perf_counter()
        for _ in range(batch):
            function()
        found.append((time.perf_counter() - begun_s) / batch)
    return statistics.median(found)


def describe(rows: list[Row], found: list[Part]) -> str:
    lines = [
        "# What measuring costs",
        "",
        "`python benchmarks/overhead.py`, 2 cores, 4 stages in as many processes over gloo, 1F1B. Milliseconds are",
        "medians over iterations of the forward_backward function, from the first stage's start to the last rank's",
        "end; a ratio compares two trainings that ran one after the other. CPU is what a rank that measures nothing",
        "does not use. On the training thread: records, measurement, handing in, and the decision that is read.",
        "",
        "| F = B = W, micro-batches | nothing measured ms | everything ms | ratio: median (least to most) | "
        "on the training thread, share of an iteration | CPU per iteration: leading rank, others | "
        "leader's decision, share of an iteration |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        total_s = sum(row.training_thread_s.values())
        each_ms = ", ".join(f"`{name}` {1e3 * seconds:.2f}" for name, seconds in row.training_thread_s.items())
        lines.append(
            f"| {row.case.compute_ms:g} ms, {row.case.micro_batches} | {1e3 * row.nothing_s:.2f} | "
            f"{1e3 * row.everything_s:.2f} | {statistics.median(row.ratios):.4f} "
            f"({min(row.ratios):.4f} to {max(row.ratios):.4f}) | "
            f"{1e3 * total_s:.2f} ms, {total_s / row.everything_s:.2%} ({each_ms}) | "
            f"{1e3 * row.cpu_s[0]:.2f} ms, {1e3 * row.cpu_s[1]:.2f} ms | "
            f"{1e3 * row.deciding_s:.2f} ms, {row.deciding_s / row.everything_s:.2%} |"
        )
    lines += ["", "| part (32 micro-batches) | microseconds | where |", "|---|---|---|"]
    lines += [f"| {part.what} | {1e6 * part.seconds:.2f} | {part.where} |" for part in found]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--parts", action="store_true", help="only what each part costs")
    parser.add_argument("--output", type=Path, default=None, metavar="FILE")
    options = parser.parse_args()
    rows: list[Row] = []
    if not options.parts:
        fast, slow = (2, 1) if options.quick else (8, 5)
        with ForkServer() as server:
            rows = [measure(Case(2.0, 32, 24, fast), server), measure(Case(20.0, 16, 8, slow), server)]
    text = describe(rows, parts())
    print(text)
    if options.output is not None:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
