# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import numpy
import pytest

from testing.training.corpus import (
    END_OF_DOCUMENT,
    ByteTokenizer,
    standard_library_sources,
    write_corpus,
)


def test_megatron_reads_back_what_was_written(tmp_path: Path) -> None:
    sources = standard_library_sources(200_000)
    assert 100_000 < sum(path.stat().st_size for path in sources) <= 200_000
    assert sources == standard_library_sources(200_000)
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    tokens = write_corpus(tmp_path / "corpus", sources=sources)
    dataset = IndexedDataset(str(tmp_path / "corpus"))
    assert len(dataset) == len(sources)
    assert sum(len(document) for document in dataset) == tokens
    for document, path in zip(dataset, sources, strict=True):
        assert document.dtype == numpy.uint16
        assert document[-1] == END_OF_DOCUMENT
        assert bytes(document[:-1].astype(numpy.uint8)) == path.read_bytes()


def test_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no text"):
        write_corpus(tmp_path / "corpus", sources=[])


def test_tokenizer_round_trip() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.detokenize([*tokenizer.tokenize("naïve"), tokenizer.eod]) == "naïve"
