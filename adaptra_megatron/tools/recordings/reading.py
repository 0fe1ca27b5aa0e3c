# SPDX-License-Identifier: Apache-2.0
"""Finds out what a recording is, and has it read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from adaptra_megatron.telemetry.tracing.trace import FILE_PATTERN
from adaptra_megatron.tools.recordings.chrome import Progress, read_chrome
from adaptra_megatron.tools.recordings.contents import PARQUET, head_of
from adaptra_megatron.tools.recordings.parquet import read_parquet
from adaptra_megatron.tools.recordings.primus import read_primus, stages_in
from adaptra_megatron.tools.recordings.recorded_places import Asked
from adaptra_megatron.tools.recordings.recording import ALL_STEPS, Recording, Wanted
from adaptra_megatron.tools.recordings.run_directory import read_run_directory


def read_recording(
    path: Path, wanted: Wanted = ALL_STEPS, *, asked: Asked | None = None, progress: Progress | None = None
) -> Recording:
    """The recording at `path`: a Parquet file, a run's directory, a Chrome trace, or a directory of one per rank.

    `asked`: what the user says of a job where a Chrome trace does not. Raises RecordingError, TraceError or
    EventLogError for what cannot be read, OSError for a file that cannot be opened.
    """
    read: Callable[[], Recording]
    if path.is_dir() and any(path.glob(FILE_PATTERN)):
        read = partial(read_run_directory, path, wanted)
    elif path.is_dir() and stages_in(path):
        read = partial(read_primus, path, wanted)
    elif not path.is_dir() and head_of(path).startswith(PARQUET):
        read = partial(read_parquet, path, wanted)
    else:
        return read_chrome(path, wanted, asked, progress)
    if progress is None:
        return read()
    progress("reading traces", 0, 1)
    found = read()
    progress("reading traces", 1, 1)
    return found
