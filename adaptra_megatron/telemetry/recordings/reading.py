# SPDX-License-Identifier: Apache-2.0
"""Finds out what a recording is, and has it read."""

from __future__ import annotations

from pathlib import Path

from adaptra_megatron.telemetry.recordings.chrome import read_chrome
from adaptra_megatron.telemetry.recordings.parquet import read_parquet
from adaptra_megatron.telemetry.recordings.recording import ALL_STEPS, Recording, Wanted
from adaptra_megatron.telemetry.recordings.run_directory import read_run_directory
from adaptra_megatron.telemetry.tracing.trace import FILE_PATTERN

_PARQUET = b"PAR1"


def read_recording(path: Path, wanted: Wanted = ALL_STEPS, *, stages: int | None = None) -> Recording:
    """The recording at `path`: a Parquet file, a run's directory, a Chrome trace, or a directory of one per rank.

    `stages`: pipeline size, where a Chrome trace does not say it. Raises RecordingError, TraceError or EventLogError
    for what cannot be read, OSError for a file that cannot be opened.
    """
    if path.is_dir():
        if any(path.glob(FILE_PATTERN)):
            return read_run_directory(path, wanted)
        return read_chrome(path, wanted, stages=stages)
    with path.open("rb") as file:
        is_parquet = file.read(len(_PARQUET)) == _PARQUET
    return read_parquet(path, wanted) if is_parquet else read_chrome(path, wanted, stages=stages)
