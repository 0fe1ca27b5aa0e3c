# SPDX-License-Identifier: Apache-2.0
"""Build a corpus that every machine has: Python's standard library, byte by byte, as a Megatron indexed dataset."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import numpy

BYTES = 256
END_OF_DOCUMENT = 256
VOCABULARY = 257


class ByteTokenizer:
    """Tokenizer for Megatron's datasets whose tokens are bytes, and one end-of-document token."""

    vocab_size = VOCABULARY
    eod = END_OF_DOCUMENT
    pad = -1
    """Id of the padding token: none, as nothing is padded and 0 is a byte."""
    special_tokens_dict: dict[str, int] = {}
    unique_identifiers = {"class": "ByteTokenizer"}

    def tokenize(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of `text`."""
        return list(text.encode())

    def detokenize(self, tokens: list[int]) -> str:
        """Return the text of `tokens` without end-of-document tokens; invalid UTF-8 becomes replacement characters."""
        return bytes(token for token in tokens if token < BYTES).decode(errors="replace")


def standard_library_sources(limit_nbytes: int) -> list[Path]:
    """Return Python files of the standard library, sorted, that fit in `limit_nbytes` together.

    The same interpreter version gives the same list on every machine: installed packages and tests are left out.
    """
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
    chosen, total = [], 0
    for path in sorted(root.rglob("*.py")):
        if left_out.intersection(path.relative_to(root).parts):
            continue
        nbytes = path.stat().st_size
        if total + nbytes <= limit_nbytes:
            chosen.append(path)
            total += nbytes
    return chosen


def write_corpus(prefix: str | Path, *, limit_nbytes: int = 4_000_000, sources: list[Path] | None = None) -> int:
    """Write `<prefix>.bin` and `<prefix>.idx` (uint16 tokens, one document per file). Returns the number of tokens.

    Needs megatron.core to be importable (on a machine without CUDA: under `cpu_megatron()`). `limit_nbytes`: maximum
    bytes of text. `sources`: files to use instead of the standard library's. Raises ValueError if there is no text,
    OSError if a file cannot be read or written.
    """
    builder_module: Any = __import__("megatron.core.datasets.indexed_dataset", fromlist=["IndexedDatasetBuilder"])
    paths = standard_library_sources(limit_nbytes) if sources is None else sources
    if not paths:
        raise ValueError(f"no text for a corpus within {limit_nbytes} bytes: raise limit_nbytes or give sources")
    prefix = Path(prefix)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    builder = builder_module.IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    total = 0
    for path in paths:
        text = numpy.frombuffer(path.read_bytes(), dtype=numpy.uint8).astype(numpy.uint16)
        document = numpy.append(text, numpy.uint16(END_OF_DOCUMENT))
        builder.add_document(document, [len(document)])
        total += len(document)
    builder.finalize(f"{prefix}.idx")
    return total
