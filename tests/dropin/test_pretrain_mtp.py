# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction in Megatron-LM's own pretrain_gpt.py: the numbers of stock, with backwards that are split."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.pretrain import MOCK_DATA, NO_DROPOUT, compare_with_stock, needs_megatron_lm, what_ran

pytestmark = needs_megatron_lm

PP2 = ("--pipeline-model-parallel-size", "2")
MTP = ("--mtp-num-layers", "1", "--position-embedding-type", "rope", *NO_DROPOUT)
UNTIED = "--untie-embeddings-and-output-weights"
CHUNKS = ("--num-layers-per-virtual-pipeline-stage", "1")
DEEPSEEK = (
    *("--multi-latent-attention", "--q-lora-rank", "32", "--kv-lora-rank", "16", "--qk-head-dim", "16"),
    *("--qk-pos-emb-head-dim", "8", "--v-head-dim", "16", "--num-experts", "4", "--moe-router-topk", "2"),
    *("--expert-model-parallel-size", "2", "--moe-layer-freq", "([0]*1+[1]*3)", "--moe-ffn-hidden-size", "32"),
    *("--moe-shared-expert-intermediate-size", "32", "--moe-router-score-function", "sigmoid"),
    *("--moe-router-enable-expert-bias", "--moe-router-load-balancing-type", "seq_aux_loss"),
    *("--moe-aux-loss-coeff", "1e-4", "--disable-bias-linear", "--swiglu", "--normalization", "RMSNorm", UNTIED),
)
JOBS = {
    "tied": (2, PP2),
    "untied": (2, (*PP2, UNTIED)),
    "two-layers": (2, (*PP2, *CHUNKS, "--mtp-num-layers", "2")),
    "two-layers-untied": (2, (*PP2, UNTIED, "--mtp-num-layers", "2")),
    "alone-with-the-loss": (2, (*PP2, "--pipeline-model-parallel-layout", "Ett|t|t|mL")),
    "alone": (4, ("--pipeline-model-parallel-size", "4", "--pipeline-model-parallel-layout", "Ett|tt|m|L")),
    "two-alone": (
        4,
        (
            *("--pipeline-model-parallel-size", "4", "--pipeline-model-parallel-layout", "Et|t|t|t|||mm|L"),
            *("--mtp-num-layers", "2", UNTIED),
        ),
    ),
    "per-token": (4, (*PP2, UNTIED, "--calculate-per-token-loss", "--use-distributed-optimizer")),
    "deepseek": (4, (*PP2, *CHUNKS, *DEEPSEEK, "--bf16")),
    "recompute": (
        2,
        (
            *PP2,
            UNTIED,
            "--recompute-granularity",
            "full",
            "--recompute-method",
            "uniform",
            "--recompute-num-layers",
            "1",
        ),
    ),
}


@pytest.mark.parametrize("job", JOBS)
def test_multi_token_prediction(job: str, tmp_path: Path) -> None:
    ranks, arguments = JOBS[job]
    compare_with_stock(ranks, tmp_path, *MTP, *MOCK_DATA, *arguments)
    split = [what_ran(tmp_path / "ours", rank)["adaptra"]["split_weight_gradients"] for rank in range(ranks)]
    assert all(split), split


def test_multi_token_prediction_with_online_dispatch(tmp_path: Path) -> None:
    online = ("--adaptra", "--adaptra-dispatch", "online", "--adaptra-host-transport", "shm", "--adaptra-path", "host")
    arguments = (*PP2, *CHUNKS, UNTIED, "--mtp-num-layers", "2")
    compare_with_stock(2, tmp_path, *MTP, *MOCK_DATA, *arguments, adaptra=online)
    assert [what_ran(tmp_path / "ours", rank)["adaptra"]["online_iterations"] for rank in range(2)] == [4] * 2
