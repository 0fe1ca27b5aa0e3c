# SPDX-License-Identifier: Apache-2.0
"""Analyze a recording for `adaptra analyze`: print text or JSON, and write one HTML page."""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from adaptra_megatron.telemetry.action_records import ActionRecord
from adaptra_megatron.telemetry.event_log import EventLogError
from adaptra_megatron.telemetry.event_wording import link_name
from adaptra_megatron.telemetry.log_lines import duration, percent
from adaptra_megatron.telemetry.trace import TraceError
from adaptra_megatron.tools.cli.planning.inputs import InputError, write_page
from adaptra_megatron.tools.cli.terminal import no_cycle_collection, print_table, shown_progress
from adaptra_megatron.tools.recordings.reading import read_recording
from adaptra_megatron.tools.recordings.recorded_places import Asked
from adaptra_megatron.tools.recordings.recording import ALL_STEPS, RecordingError
from adaptra_megatron.tools.recordings.run_record import RunIteration, RunRecord
from adaptra_megatron.tools.replay.analysis import Analysis, analyse, figures
from adaptra_megatron.tools.replay.analysis_wording import (
    OPTYPE_NAMES,
    WORTH_A_ROW,
    WORTH_SAYING,
    cell_name,
    headline,
    sentences,
    share,
    times,
)
from adaptra_megatron.tools.replay.operations import RecordedStep, ReplayError
from adaptra_megatron.tools.replay.pipelines import KINDS
from adaptra_megatron.tools.report.iteration_chart import IterationChart
from adaptra_megatron.tools.report.report_findings import REPORT_SLOW_SHARE, Use
from adaptra_megatron.tools.report.report_page import Panel, page_environment
from adaptra_megatron.tools.report.timelines import Timeline

MOST_REPLICAS = 64
"""Maximum number of rows of the table of workers."""


def analysis_page(analysis: Analysis, *, title: str = "") -> str:
    """Return the page, which needs no network and no other file. `title`: name of the job; empty: the file's."""
    found, remedies = analysis.stragglers, analysis.remedies
    stages = sorted(found.by_stage)
    slowest = list(found.by_replica)[:MOST_REPLICAS]
    workers = {tuple(cell): slowdown for cell, slowdown in found.by_worker.items()}
    panel = _panel(analysis)
    kinds = {record.kind for record in panel.iteration.records}
    environment = page_environment()
    environment.filters.update(times=times, share=share)
    environment.globals["WORTH_SAYING"] = WORTH_SAYING
    return environment.get_template("analysis.html").render(
        analysis=analysis,
        found=found,
        remedies=remedies,
        name=title or Path(analysis.recording.name).name,
        headline=headline(analysis),
        sentences=sentences(analysis),
        typical_s=statistics.median(found.recorded_s),
        best=min(remedies.rows, key=lambda remedy: remedy.seconds, default=None),
        chart=_chart(analysis),
        stages=stages,
        grid=[(replica, [workers.get((replica, stage), 1.0) for stage in stages]) for replica in sorted(slowest)],
        left_out_replicas=len(found.by_replica) - len(slowest),
        optypes=[(OPTYPE_NAMES[optype], slowdown) for optype, slowdown in found.by_optype.items()],
        links=[(link_name(link), slowdown) for link, slowdown in found.by_link.items() if slowdown >= WORTH_A_ROW],
        panels=[panel],
        first_panel=0,
        drawn_uses=[use for use in Use if use.idle or use.value in kinds],
        facts=_facts(analysis),
    )


def _chart(analysis: Analysis) -> IterationChart:
    """Return the chart of the times of all steps, with the ideal as lower line."""
    found = analysis.stragglers
    rows = zip(found.numbers, found.recorded_s, strict=True)
    run = RunRecord(
        directory=Path(analysis.recording.name),
        ranks=(),
        pipelines=len(found.by_replica),
        iterations=tuple(RunIteration(number=number, start_s=0.0, seconds=seconds) for number, seconds in rows),
        events=(),
        parts=(),
    )
    chart = IterationChart(run, [], [], "step")
    chart.bounds = [(found.numbers[0], found.numbers[-1] + 1, found.ideal_s)]
    return chart


def _panel(analysis: Analysis) -> Panel:
    """Return the timeline of the typical step's slowest replica, as recorded."""
    step = next(each for each in analysis.recording.steps if each.number == analysis.remedies.step)
    ends_s: dict[int, float] = {}
    for operation in step.operations:
        if operation.optype.computes:
            ends_s[operation.cell.replica] = max(operation.end_s, ends_s.get(operation.cell.replica, 0.0))
    replica = max(ends_s, key=lambda each: ends_s[each])
    records = _records(step, replica)
    start_s = min(record.start_s for record in records)
    seconds = max(record.end_s for record in records) - start_s
    iteration = RunIteration(number=step.number, start_s=start_s, seconds=seconds, records=tuple(records))
    actions_s = [record.compute_s for record in records]
    timeline = Timeline(iteration, REPORT_SLOW_SHARE * statistics.fmean(actions_s))
    note = f"replica {replica}, the slowest of it"
    return Panel(iteration, note, timeline.svg(), timeline.data(), f"step {step.number}")


def _records(step: RecordedStep, replica: int) -> list[ActionRecord]:
    """Return records as in our own traces: an action waits from the end of the one before."""
    records = []
    for cell, operations in step.by_cell().items():
        over_s = step.start_s
        for each in operations:
            if cell.replica != replica or not each.optype.computes:
                continue
            kind = str(KINDS[each.optype])
            start_s = max(over_s, each.start_s)
            end_s = max(start_s, each.end_s)
            records.append(
                ActionRecord(step.number, cell.stage, kind, each.chunk, each.micro_batch, over_s, start_s, end_s)
            )
            over_s = end_s
    return records


def _facts(analysis: Analysis) -> list[tuple[str, str]]:
    found = analysis.stragglers
    errors = found.replay_errors
    return [
        ("recording", analysis.recording.name),
        ("steps replayed", f"{len(found.numbers)}; left out: {len(analysis.left_out)}"),
        ("replayed against recorded", f"{min(errors):+.3%} to {max(errors):+.3%} of a step's time"),
        ("late hosts", f"{found.launch_slowdown - 1.0:+.2%}: left out of all that is compared with the ideal"),
        ("ideal", "the mean of computation, the median of everything else, over all steps, stages and replicas"),
        ("slowdowns", "as in Lin et al., Understanding Stragglers in Large Model Training, OSDI '25"),
        *(("left out", reason) for reason in analysis.left_out[:5]),
    ]


MOST_ROWS = 8
"""Maximum number of workers, replicas and links in the text."""


def run(options: argparse.Namespace) -> int:
    """Run the command; return the exit status: 1 if the recording is not understood, 2 if it cannot be read and --json
    is given. Raises InputError if it cannot be read otherwise, or output cannot be written."""
    try:
        analysis = _analysed(options)
    except InputError as error:
        if not options.json:
            raise
        reason = str(error)
        print(json.dumps({"trace": str(options.trace), "understood": False, "doubt": reason, "error": reason}))
        return 2
    if options.html is not None:
        write_page(options.html, analysis_page(analysis), "--html")
    if options.json:
        print(json.dumps(figures(analysis), allow_nan=False))
    else:
        _print_text(analysis)
    return 1 if analysis.doubt else 0


def _analysed(options: argparse.Namespace) -> Analysis:
    wanted = ALL_STEPS if options.steps is None else options.steps
    try:
        with no_cycle_collection(), shown_progress(options.progress) as progress:
            asked = Asked(stages=options.stages, replicas=options.replicas)
            recording = read_recording(options.trace, wanted, asked=asked, progress=progress)
            return analyse(recording, activation_gib=options.activation_gib, progress=progress)
    except (RecordingError, TraceError, EventLogError) as error:
        raise InputError(str(error)) from error
    except ReplayError as error:
        raise InputError(f"{options.trace}: {error}") from error
    except OSError as error:
        raise InputError(f"cannot read {error.filename or options.trace}: {error.strerror or error}") from error


def _print_text(analysis: Analysis) -> None:
    found, remedies = analysis.stragglers, analysis.remedies
    print(headline(analysis))
    for sentence in sentences(analysis):
        print(f"- {sentence}")
    if analysis.doubt:
        return
    rows = {
        "operation": [(OPTYPE_NAMES[optype], each) for optype, each in found.by_optype.items()],
        "stage": [(str(stage), each) for stage, each in found.by_stage.items()],
        "replica": [(str(replica), each) for replica, each in found.by_replica.items()],
        "worker": [(cell_name(cell), each) for cell, each in found.by_worker.items()],
        "link": [(link_name(link), each) for link, each in found.by_link.items()],
    }
    for heading, entries in rows.items():
        if max((each for _, each in entries), default=1.0) >= WORTH_A_ROW:
            print_table((heading, "slowdown"), [(name, times(each)) for name, each in entries[:MOST_ROWS]])
    if remedies.rows:
        print_table(
            ("remedy", "a step", "less", "memory"),
            [
                (
                    remedy.title,
                    duration(remedy.seconds),
                    percent(remedies.gain(remedy)),
                    _memory(remedy.extra_activations, analysis.extra_gib(remedy)),
                )
                for remedy in remedies.rows
            ],
        )


def _memory(activations: float, gib: float | None) -> str:
    if not activations:
        return ""
    text = f"{activations:g} activation{'s' if activations != 1 else ''}"
    return text if gib is None else f"{text}, {gib:.3g} GiB"
