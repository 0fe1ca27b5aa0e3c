# SPDX-License-Identifier: Apache-2.0
"""Recognise a file by its first bytes and not by its name: compression, and formats of other tools."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, cast

from adaptra_megatron.telemetry.regular_files import is_no_file
from adaptra_megatron.tools.recordings.recording import RecordingError

MOST_NBYTES = 16 << 30
"""Of one file, after decompression."""
MOST_RATIO, UNSUSPICIOUS_NBYTES = 250, 64 << 20
"""Compressed traces are some 10 to 50 times as large when they are decompressed."""
HEAD_NBYTES = 4096
PARQUET = b"PAR1"
DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError)
"""What reading a damaged compressed file raises."""

INSTEAD = (
    "record forwards and backwards instead: record_function around each of them under torch.profiler, or a trace of "
    "Megatron's or MegaScan's with iteration, pp_rank and microbatch in args (docs/analyze.md)"
)
_COMPRESSED: dict[bytes, Callable[..., Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open}
_OTHERS = {
    b"\x28\xb5\x2f\xfd": "compressed with zstd: unpack it by zstd -d",
    b"PK\x03\x04": "a zip archive: unpack it and name the trace in it",
    b"SQLite format 3": f"an SQLite database, such as Nsight Systems exports, whose ranges name no stage: {INSTEAD}",
    b"NVIDIA": f"a report of an NVIDIA profiler, which its own tools read: {INSTEAD}",
    b"\x80": f"a pickle, as NCCL's flight recorder and memory snapshots leave, which is not opened: {INSTEAD}",
    b"\x89HDF": f"an HDF5 file: {INSTEAD}",
    b"\x0a": "a trace in Perfetto's own format: give the JSON, which `adaptra trace -o trace.json` writes",
    b"<": "a page of HTML or XML: save the trace itself",
}
_DOCUMENTS = (
    (("entries", "pg_config"), "a dump of the NCCL flight recorder, which has collectives and sends alone"),
    (("entries", "pg_status"), "a dump of the NCCL flight recorder, which has collectives and sends alone"),
    (("schema", "nodes"), "an execution trace (Chakra), which has operators and no times of micro-batches"),
    (("nodes", "start_ts"), "an execution trace (Chakra), which has operators and no times of micro-batches"),
    (("NvtxEvent",), "an export of Nsight Systems"),
    (("segments", "device_traces"), "a memory snapshot"),
    (("relative_perf_scores",), "a report of scores by rank (NVRx)"),
    (("gpu_relative_perf_scores",), "a report of scores by rank (NVRx)"),
    (("section_relative_perf_scores",), "a report of scores by rank (NVRx)"),
    (("scores",), "a report of scores"),
)
_COSTS = ("stages", "micro_batches")


def head_of(path: Path) -> bytes:
    """The first bytes, decompressed. Raises RecordingError for a damaged file, OSError if it cannot be read."""
    with opened(path) as file:
        try:
            return file.read(HEAD_NBYTES)
        except DAMAGED as error:
            raise _damaged(path, error) from error


def opened(path: Path) -> IO[bytes]:
    """The file, decompressed if its first bytes say that it is compressed. Raises RecordingError for what is no file:
    it is read more than once."""
    if is_no_file(path):
        raise RecordingError(f"{path} is no file")
    with path.open("rb") as file:
        head = file.read(8)
    for magic, way in _COMPRESSED.items():
        if head.startswith(magic):
            return cast("IO[bytes]", way(path, "rb"))
    return path.open("rb", buffering=io.DEFAULT_BUFFER_SIZE)


def _damaged(path: Path, error: BaseException) -> RecordingError:
    return RecordingError(f"{path} cannot be decompressed: {error or 'it is cut short'}; copy it again")


class Bounded:
    """Reads a file in blocks; raises RecordingError where it is damaged, or larger than anything worth reading."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path, self._file = path, file
        self._nbytes = 0

    def read(self, nbytes: int) -> bytes:
        """The next block; empty at the end."""
        try:
            block = self._file.read(nbytes)
        except DAMAGED as error:
            raise _damaged(self._path, error) from error
        self._nbytes += len(block)
        if self._nbytes > max(UNSUSPICIOUS_NBYTES, MOST_RATIO * self._path.stat().st_size):
            raise RecordingError(
                f"{self._path} is more than {MOST_RATIO} times as large when it is decompressed, as no trace is"
            )
        if self._nbytes > MOST_NBYTES:
            raise RecordingError(f"{self._path} holds more than {MOST_NBYTES >> 30} GiB: record fewer steps")
        return block


def refuse_other_formats(path: Path, head: bytes) -> None:
    """Raise RecordingError, which names the format, for a file that begins as none that can be read."""
    if not head.strip():
        raise RecordingError(f"{path} is empty")
    for magic, what in _OTHERS.items():
        if head.startswith(magic):
            raise RecordingError(f"{path} is {what}")
    if head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] not in (b"{", b"["):
        raise RecordingError(f"{path} is no trace that can be read: neither JSON nor Parquet; {INSTEAD}")


def is_other_format(head: bytes) -> bool:
    """Return whether a file that begins so is binary: Parquet, or one of the formats that are known by name."""
    return any(head.startswith(magic) for magic in (PARQUET, *_OTHERS) if magic not in (b"\x0a", b"<"))


def is_other_document(document: Mapping[str, Any]) -> bool:
    """Return whether a JSON object is a dump of a known tool."""
    return any(all(key in document for key in keys) for keys, _ in _DOCUMENTS)


def named_document(document: Mapping[str, Any]) -> str:
    """Return what a JSON object without traceEvents is, in words, with what to record instead."""
    for keys, what in _DOCUMENTS:
        if all(key in document for key in keys):
            return f"is {what}: {INSTEAD}"
    if all(key in document for key in _COSTS):
        return "is a file of costs, which `adaptra plan` and `adaptra simulate` take"
    return f"has no list of traceEvents: {INSTEAD}"
