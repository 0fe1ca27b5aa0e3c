# SPDX-License-Identifier: Apache-2.0
"""The demonstration: one link of a pipeline turns slow, under stock Megatron and under --adaptra.

    python -m testing.demo.demo [--out build/demo]

Trains the same GPT twice on 4 stages over gloo, on the CPU, with emulated compute times and an emulated slow link;
prints times and losses, and leaves a picture, a Perfetto trace and summary.json. Exit status: 0 if all numbers are
equal, 1 if they are not or a run failed, 2 for a wrong command line, 130 after Ctrl-C (which ends the ranks).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from adaptra_megatron.telemetry.trace import RankTrace, TraceError, read_traces
from adaptra_megatron.tools.local_ranks.launch_ranks import LaunchError
from adaptra_megatron.tools.report.perfetto import chrome_trace, write_trace
from testing.demo.demo_progress import progress
from testing.demo.demo_report import DemoReport
from testing.demo.demo_setup import ADAPTRA, STOCK, DemoSetup
from testing.demo.timeline_pictures import TimelineRun, draw_timelines
from testing.jobs.fork_server import ForkServer, ForkServerError
from testing.jobs.variants import Variant, VariantReport, run_variants

TIMEOUT_S = 330.0
"""Longest time of both trainings together; they take about two minutes."""

WORTH_A_WARNING = 0.03
"""Fraction of overlong actions from which the times say more about this machine than about schedules."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m testing.demo.demo", allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="directory of the results")
    parser.add_argument(
        "--iterations",
        type=int,
        default=DemoSetup.iterations,
        help="iterations per run; the second half is slow",
    )
    parser.add_argument(
        "--micro-batches", type=int, default=DemoSetup.micro_batches, help="micro-batches per iteration"
    )
    args = parser.parse_args(argv)
    try:
        setup = DemoSetup(iterations=args.iterations, micro_batches=args.micro_batches)
    except ValueError as error:
        parser.error(str(error))
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("the picture needs matplotlib: pip install 'adaptra-megatron[plot]'")
    try:
        return run_demo(setup, args.out)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; the ranks are ended\n")
        return 130
    except (LaunchError, ForkServerError, TraceError, OSError) as error:
        sys.stderr.write(f"the demonstration failed: {error}\n")
        return 1


def run_demo(setup: DemoSetup, out: Path) -> int:
    """Train twice, report, write everything below `out`. Returns 0 if the demonstration holds, else 1.

    Raises LaunchError with the end of the ranks' logs if a run fails, TraceError if a rank left no trace.
    """
    started_s = time.monotonic()
    _say(
        f"A GPT on {setup.stages} pipeline stages, {setup.micro_batches} micro-batches; forward, input gradient and "
        f"weight gradient last {setup.compute_ms.replace(',', ' / ')} ms.\nFrom iteration {setup.slow_from + 1} of "
        f"{setup.iterations} each message over {setup.link} takes {1e3 * setup.latency_s:g} ms more, both ways.\n"
    )
    with ForkServer() as server:
        report = train_twice(setup, out, server)
    traces = {name: read_traces(_trace_directory(out, name)) for name in (STOCK, ADAPTRA)}
    png = draw_slow_iterations(report, traces, out / "timeline.png")
    trace = write_trace(
        out / "trace.json",
        chrome_trace(traces[STOCK], label=STOCK),
        chrome_trace(traces[ADAPTRA], label=ADAPTRA, run=1),
    )
    summary = out / "summary.json"
    summary.write_text(json.dumps(report.summary(png=png, trace=trace), indent=2) + "\n")
    _say(f"\n{report.iteration_table()}\n\nMedian time of an iteration:\n{report.time_table()}\n")
    problems = report.problems()
    for problem in problems:
        sys.stderr.write(f"{problem}\n")
    if not problems:
        _say(
            f"Equal to stock to the last bit: the loss of each of {setup.iterations} iterations, and all parameters "
            f"and optimizer states ({report.adaptra.elements_compared:,} numbers compared).\n"
        )
    if report.overruns > WORTH_A_WARNING:
        _say(
            f"This machine was busy: {report.overruns:.0%} of all actions took longer than they were to last, "
            f"so times are above what the same run takes on an idle machine.\n"
        )
    _say(
        f"picture  {png}\ntrace    {trace}  (open in https://ui.perfetto.dev)\nsummary  {summary}\n"
        f"{time.monotonic() - started_s:.0f} s in all"
    )
    return 1 if problems else 0


def train_twice(setup: DemoSetup, out: Path, server: ForkServer) -> DemoReport:
    """Build the corpus and train on it, first stock, then with --adaptra. Raises LaunchError if a rank fails."""
    data = out / "data"
    shutil.rmtree(data, ignore_errors=True)  # Megatron's index cache goes by the corpus's name, not its content
    corpus = data / "corpus"
    _say(f"Corpus: {_write_corpus(corpus):,} tokens, the bytes of Python's standard library.\n")
    variants = [
        Variant(STOCK, setup.arguments(corpus, _trace_directory(out, STOCK))),
        Variant(
            ADAPTRA,
            (*setup.arguments(corpus, _trace_directory(out, ADAPTRA)), *setup.adaptra_arguments),
            like=STOCK,
        ),
    ]
    for variant in variants:
        shutil.rmtree(_trace_directory(out, variant.name), ignore_errors=True)
    with progress(setup, [variant.name for variant in variants], sys.stdout) as reader:
        stock, adaptra = run_variants(
            setup.stages, variants, timeout_s=TIMEOUT_S, server=server, directory=out / "ranks", echo=reader
        )
    return DemoReport(setup=setup, stock=stock, adaptra=adaptra)


def draw_slow_iterations(report: DemoReport, traces: dict[str, list[RankTrace]], path: Path) -> Path:
    """Draw the typical slow iteration of each run, stock above adaptra. Raises TraceError if its records are
    missing."""
    setup = report.setup
    bound_s = setup.lower_bound_s(slow=True)

    def run(title: str, result: VariantReport) -> TimelineRun:
        iteration = report.typical_slow_iteration(result)
        records = [record for rank in traces[result.name] for record in rank.iteration(iteration)]
        if {record.stage for record in records} != set(range(setup.stages)):
            raise TraceError(f"the trace of the {result.name} run lacks iteration {iteration} of some stage")
        return TimelineRun(title=title, records=records, lower_bound_s=bound_s)

    title = (
        f"One iteration while {setup.link} takes {1e3 * setup.latency_s:g} ms more: "
        f"{setup.stages} stages, {setup.micro_batches} micro-batches"
    )
    return draw_timelines([run("stock 1F1B", report.stock), run(ADAPTRA, report.adaptra)], path, title=title)


def _write_corpus(prefix: Path) -> int:
    from testing.megatron.megatron_on_cpu import cpu_megatron
    from testing.training.corpus import write_corpus

    with cpu_megatron():
        return write_corpus(prefix)


def _trace_directory(out: Path, name: str) -> Path:
    return out / "traces" / name


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
