# SPDX-License-Identifier: Apache-2.0
"""Run `adaptra analyze`. Apart from its options, for it needs numpy."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from adaptra_megatron.telemetry.events.event_log import EventLogError
from adaptra_megatron.telemetry.events.event_wording import duration
from adaptra_megatron.telemetry.tracing.trace import TraceError
from adaptra_megatron.tools.analysis.analysis import Analysis, analyse, figures
from adaptra_megatron.tools.analysis.analysis_page import analysis_page
from adaptra_megatron.tools.analysis.analysis_wording import (
    OPTYPE_NAMES,
    WORTH_A_ROW,
    cell_name,
    headline,
    sentences,
    times,
)
from adaptra_megatron.tools.cli.planning.inputs import InputError
from adaptra_megatron.tools.cli.progress import no_cycle_collection, shown_progress
from adaptra_megatron.tools.cli.tables import print_table
from adaptra_megatron.tools.recordings.reading import read_recording
from adaptra_megatron.tools.recordings.recorded_places import Asked
from adaptra_megatron.tools.recordings.recording import ALL_STEPS, RecordingError
from adaptra_megatron.tools.replay.operations import ReplayError
from adaptra_megatron.tools.report.report_wording import link_name, percent

MOST_ROWS = 8
"""Workers, replicas and links that the text shows."""


def run(options: argparse.Namespace) -> int:
    """Analyse, write and print what `options` ask for; return the exit status: 1 for a recording that is not
    understood. Raises InputError for what cannot be read or written; with --json, what cannot be read is said there."""
    try:
        analysis = _analysed(options)
    except InputError as error:
        if not options.json:
            raise
        reason = str(error)
        print(json.dumps({"trace": str(options.trace), "understood": False, "doubt": reason, "error": reason}))
        return 2
    if options.html is not None:
        _write(options.html, analysis_page(analysis))
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


def _write(path: Path, page: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}; name another --html") from error


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
