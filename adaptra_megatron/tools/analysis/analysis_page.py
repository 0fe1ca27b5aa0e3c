# SPDX-License-Identifier: Apache-2.0
"""Write the analysis of a recording on one HTML page: the parts of the report of runs, filled in by a replay."""

from __future__ import annotations

import statistics
from pathlib import Path

from adaptra_megatron.telemetry.action_records import ActionRecord
from adaptra_megatron.tools.analysis.analysis import Analysis
from adaptra_megatron.tools.analysis.analysis_wording import (
    OPTYPE_NAMES,
    WORTH_A_ROW,
    WORTH_SAYING,
    headline,
    sentences,
    share,
    times,
)
from adaptra_megatron.tools.recordings.run_record import RunIteration, RunRecord
from adaptra_megatron.tools.replay.operations import RecordedStep
from adaptra_megatron.tools.replay.pipelines import KINDS
from adaptra_megatron.tools.report.charts import IterationChart
from adaptra_megatron.tools.report.report_findings import SLOW_SHARE, Use
from adaptra_megatron.tools.report.report_page import Panel, page_environment
from adaptra_megatron.tools.report.report_wording import link_name
from adaptra_megatron.tools.report.timelines import Timeline

MOST_REPLICAS = 64
"""Rows of the table of workers."""


def analysis_page(analysis: Analysis, *, title: str = "") -> str:
    """The page; it needs no network and no other file. `title`: name of the job; empty: that of the file."""
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
    """Times of all steps, above the line of the ideal."""
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
    """The typical step's slowest replica, as it was recorded."""
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
    timeline = Timeline(iteration, SLOW_SHARE * statistics.fmean(actions_s))
    note = f"replica {replica}, the slowest of it"
    return Panel(iteration, note, timeline.svg(), timeline.data(), f"step {step.number}")


def _records(step: RecordedStep, replica: int) -> list[ActionRecord]:
    """Return what our own traces would hold: an action waits from the end of the one before."""
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
