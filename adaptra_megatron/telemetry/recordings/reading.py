# SPDX-License-Identifier: Apache-2.0
"""Finds out what a recording is, and has it read."""

from __future__ import annotations

from pathlib import Path

from adaptra_megatron.telemetry.recordings.chrome import Progress, read_chrome
from adaptra_megatron.telemetry.recordings.contents import PARQUET, head_of
from adaptra_megatron.telemetry.recordings.parquet import read_parquet
from adaptra_megatron.telemetry.recordings.places import Asked
from adaptra_megatron.telemetry.recordings.primus import read_primus, stages_in
from adaptra_megatron.telemetry.recordings.recording import ALL_STEPS, Recording, Wanted
from adaptra_megatron.telemetry.recordings.run_directory import read_run_directory
from adaptra_megatron.telemetry.tracing.trace import FILE_PATTERN


def read_recording(
    path: Path, wanted: Wanted = ALL_STEPS, *, asked: Asked | None = None, progress: Progress | None = None
) -> Recording:
    """The recording at `path`: a Parquet file, a run's directory, a Chrome trace, or a directory of one per rank.

    `asked`: what the user says of a job where a Chrome trace does not. Raises RecordingError, TraceError or
    EventLogError for what cannot be read, OSError for a file that cannot be opened.
    """
    if path.is_dir():
        if any(path.glob(FILE_PATTERN)):
            return read_run_directory(path, wanted)
        if stages_in(path):
            return read_primus(path, wanted)
    elif head_of(path).startswith(PARQUET):
        return read_parquet(path, wanted)
    return read_chrome(path, wanted, asked, progress)
