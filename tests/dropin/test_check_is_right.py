# SPDX-License-Identifier: Apache-2.0
"""What `adaptra check` says of a command line is what pretrain_gpt.py does with it, to the number of split layers."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from support.pretrain import CHECKOUT, LAUNCHER, MOCK_DATA, MODEL, NO_DROPOUT, TRAINING, needs_megatron_lm
from support.processes import LaunchError, run_ranks

from adaptra_megatron.megatron.job_settings import settings_of_command_line
from adaptra_megatron.megatron.prospects import prospects_of
from testing.megatron.megatron_lm import CPU_ARGUMENTS

pytestmark = needs_megatron_lm

MTP = ("--mtp-num-layers", "1", "--position-embedding-type", "rope")
UNTIED = "--untie-embeddings-and-output-weights"
RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
LATENT = (
    *("--multi-latent-attention", "--q-lora-rank", "32", "--kv-lora-rank", "16", "--qk-head-dim", "16"),
    *(
        "--qk-pos-emb-head-dim",
        "8",
        "--v-head-dim",
        "16",
        "--position-embedding-type",
        "rope",
        "--normalization",
        "RMSNorm",
    ),
)
EXPERTS = ("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "32", "--disable-bias-linear")
STARTS, LESS, REFUSED = "starts", "starts with less", "refused"

JOBS: dict[str, tuple[tuple[str, ...], str, str, int | None]] = {
    "plain": ((), STARTS, "all", 17),
    "chunks": (("--num-layers-per-virtual-pipeline-stage", "1", UNTIED), STARTS, "all", 17),
    "recompute": (RECOMPUTE, STARTS, "all", 17),
    "latent attention": (LATENT, STARTS, "all", 29),
    "experts": (EXPERTS, STARTS, "all", None),
    "MTP, untied": ((*MTP, UNTIED), STARTS, "all", 22),
    "MTP, tied": (MTP, LESS, "some", 21),
    "observed": (("--adaptra-policy", "observe"), STARTS, "none", 0),
    "one stage": (("--pipeline-model-parallel-size", "1"), LESS, "none", 0),
    "CUDA graphs": (("--cuda-graph-impl", "local"), REFUSED, "none", 0),
    "FSDP": (("--use-torch-fsdp2",), REFUSED, "none", 0),
}
"""Flags, verdict, split, and layers that are split; None: as many as each rank has of experts."""


@pytest.mark.parametrize("job", JOBS)
def test_a_job_does_what_check_says(job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT), prepend=os.pathsep)
    flags, verdict, split, layers = JOBS[job]
    line = (*CPU_ARGUMENTS, *MODEL, *TRAINING, *MOCK_DATA, *NO_DROPOUT, "--train-iters", "2", "--eval-iters", "0")
    line = (*line, "--adaptra", "--pipeline-model-parallel-size", "2", *flags)
    found = prospects_of(settings_of_command_line(line))
    assert (found.verdict, found.split) == (verdict, split)
    counting = str(Path(__file__).with_name("split_counting.py"))
    argv = [*LAUNCHER, counting, str(tmp_path), str(CHECKOUT / "pretrain_gpt.py"), *line]
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    if verdict == REFUSED:
        with pytest.raises(LaunchError) as failed:
            run_ranks(2, argv, timeout_s=100, log_directory=tmp_path / "logs", env=environment)
        assert f"--adaptra does not run with {found.features[0].name}" in str(failed.value)
        return
    run_ranks(2, argv, timeout_s=150, log_directory=tmp_path / "logs", env=environment)
    counted = sum(int((tmp_path / str(rank)).read_text()) for rank in range(2))
    if layers is None:
        assert counted > found.split_layers
    else:
        assert counted == layers == found.split_layers
