# SPDX-License-Identifier: Apache-2.0
"""Layers dealt out by --pipeline-model-parallel-layout, chunks without any among them: the numbers of stock."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.pretrain import MOCK_DATA, NO_DROPOUT, compare_with_stock, needs_megatron_lm

pytestmark = needs_megatron_lm

LAYOUTS = {
    "uneven": "Ettt|tL",
    "interleaved": "Et|tt|t|L",
    "embedding-alone": "E|tt|tt|L",
}
"""E: the embedding, t: a layer, L: the loss; chunks in the order of the model, two stages."""


def test_embedding_and_loss_have_stages_of_their_own(tmp_path: Path) -> None:
    arguments = ("--pipeline-model-parallel-size", "4", "--pipeline-model-parallel-layout", "E|tt|tt|L")
    compare_with_stock(4, tmp_path, *arguments, *MOCK_DATA, *NO_DROPOUT)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_numbers_are_those_of_stock(layout: str, tmp_path: Path) -> None:
    arguments = ("--pipeline-model-parallel-size", "2", "--pipeline-model-parallel-layout", LAYOUTS[layout])
    compare_with_stock(2, tmp_path, *arguments, *MOCK_DATA, *NO_DROPOUT)
