# SPDX-License-Identifier: Apache-2.0
"""Stock Megatron on the emulated cluster learns, repeats itself to the bit, resumes, and does not notice emulation."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.processes import REPOSITORY, TRAIN_GPT, LaunchError, RankResult, compare_dumps

from adaptra_megatron.tools.local_ranks.launch_ranks import rank_environment
from testing.jobs.fork_server import ForkServer
from testing.jobs.variants import Variant, VariantReport, check_equal, run_variants
from testing.training.training_arguments import TrainingArgumentsError, check_arguments, parse_arguments

COMMON = "--mock-data --hidden-size 32 --seq-length 16 --global-batch-size 8 --train-iters 4"
TWO, FOUR = "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4"
CHUNKS = "--num-virtual-stages-per-pipeline-rank 2 --num-layers 8"
DISTRIBUTED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
LAYOUTS = {
    "PP 4": "",
    "PP 4 x VPP 2 bf16": f"{CHUNKS} --bf16",
    "PP 2 x VPP 2 x DP 2 distributed optimizer": f"{TWO} {CHUNKS} {DISTRIBUTED} --align-param-gather",
    "PP 2 x DP 2 untied, evaluation": f"{TWO} --untie-embeddings-and-output-weights --eval-iters 1",
    "PP 2 x TP 2 sequence parallel": f"{TWO} --tensor-model-parallel-size 2 --sequence-parallel",
    "recompute": f"{TWO} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "dropout, fused weight gradient": "--hidden-dropout 0.1 --attention-dropout 0.1 --emulate-fused-weight-gradient",
    "rope, RMSNorm, experts": f"{TWO} --position-embedding-type rope --normalization RMSNorm --num-experts 2",
}

ALONE = ("PP 4", "PP 4 x VPP 2 bf16", "dropout, fused weight gradient", "rope, RMSNorm, experts")
"""Those of no quick case of test_bitwise.py: where ours is stock to the bit, and learns, stock repeats itself."""


def words(*texts: str) -> tuple[str, ...]:
    return tuple(" ".join(texts).split())


@pytest.mark.parametrize(
    "names", [ALONE, pytest.param([name for name in LAYOUTS if name not in ALONE], marks=pytest.mark.slow)], ids=len
)
def test_stock_repeats_itself_to_the_bit_and_learns(
    fork_server: ForkServer, tmp_path: Path, names: Sequence[str]
) -> None:
    variants = []
    for name in names:
        argv = words(COMMON, "--lr 3e-3 --eval-interval 2", FOUR, LAYOUTS[name])
        variants += [Variant(name, argv), Variant(f"{name} again", argv, like=name)]
    variants.append(
        Variant("another seed", words(COMMON, "--lr 3e-3", FOUR, LAYOUTS[names[0]], "--seed 5"), like=names[0])
    )
    reports = run_variants(4, variants, timeout_s=240, server=fork_server, directory=tmp_path)
    other = reports.pop()
    check_equal(reports)
    for report in reports:
        assert report.losses[-1] < report.losses[0], report
        assert bool(report.evaluation_losses) == ("evaluation" in report.name)
    assert any("parameter" in line for line in other.differences), "the comparison sees nothing"


def test_emulation_changes_times_not_numbers(fork_server: ForkServer, tmp_path: Path) -> None:
    argv = words(COMMON, FOUR)
    timed_argv = (*argv, *words("--emulate-compute-ms 20,20,20"))
    slow_argv = (*timed_argv, *words("--emulate-slow-link 1-2:latency_ms=100,from=2,until=4"))
    plain, timed, slowed = run_variants(
        4,
        [Variant("plain", argv), Variant("timed", timed_argv, "plain"), Variant("slow", slow_argv, "plain")],
        timeout_s=120,
        server=fork_server,
        directory=tmp_path,
    )
    check_equal([plain, timed, slowed])
    assert timed.overruns < 0.5
    # 1F1B without delays: (micro-batches + stages - 1) x (F + B + W)
    assert min(timed.iteration_seconds) >= 0.99 * (8 + 3) * 0.06
    assert timed.links_struck == {}
    assert slowed.links_struck == {"1>2": 2 * 8, "2>1": 2 * 8}
    assert min(slowed.iteration_seconds[2:]) > min(timed.iteration_seconds) + 0.2


def test_check_equal_fails_when_nothing_is_compared() -> None:
    with pytest.raises(AssertionError, match="nothing was compared"):
        check_equal([VariantReport("alone", None)])
    with pytest.raises(AssertionError, match="nothing was compared with stock"):
        check_equal([VariantReport("ours", "stock", elements_compared=0)])
    with pytest.raises(AssertionError, match="ours is not stock: rank 0: losses"):
        check_equal([VariantReport("ours", "stock", elements_compared=9, differences=["rank 0: losses"])])


@pytest.mark.parametrize(
    "layout", [pytest.param("", marks=pytest.mark.slow), "--use-distributed-optimizer --bf16 --hidden-dropout 0.1"]
)
def test_resumed_run_goes_on_to_the_bit(
    start_ranks: Callable[..., list[RankResult]], tmp_path: Path, layout: str
) -> None:
    argv = (TRAIN_GPT, *words("--emulate-cpu", COMMON, TWO, layout))
    saved, resumed, straight = (str(tmp_path / name) for name in ("saved", "resumed", "straight"))
    start_ranks(2, [*argv, "--train-iters", "2", "--save", saved], timeout_s=90)
    going_on = [*argv, "--train-iters", "3", "--load", saved, "--dump-state", resumed]
    output = start_ranks(2, going_on, timeout_s=90)[1].output
    assert " iteration        3/       3 | consumed samples:           24 | elapsed time" in output
    assert " iteration        2/" not in output
    start_ranks(2, [*argv, "--train-iters", "3", "--dump-state", straight], timeout_s=90)
    compare_final_state(tmp_path / "straight", tmp_path / "resumed")


def compare_final_state(straight: Path, resumed: Path) -> None:
    """The runs have other numbers of iterations, so losses are left out: parameters and optimizer state remain."""
    import torch

    for directory in (straight, resumed):
        for path in directory.glob("rank*.pt"):
            dump = torch.load(path, weights_only=True)
            dump["tensors"] = {name: t for name, t in dump["tensors"].items() if name.startswith(("parameter", "opti"))}
            torch.save(dump, path)
    assert compare_dumps(straight, resumed) > 10_000


def test_corpus_is_learnt_from(start_ranks: Callable[..., list[RankResult]], tmp_path: Path) -> None:
    from testing.training.corpus import write_corpus

    write_corpus(tmp_path / "corpus", limit_nbytes=500_000)
    options = COMMON.replace("--mock-data", f"--data-path {tmp_path}/corpus")
    argv = (TRAIN_GPT, *words("--emulate-cpu", options, TWO, "--train-iters 8 --lr 3e-3"))
    output = start_ranks(2, argv, timeout_s=90)[1].output
    losses = [float(line.split("lm loss: ")[1].split()[0]) for line in output.splitlines() if "lm loss: " in line]
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 0.5
    with pytest.raises(LaunchError, match="DataError: --split 1,1,0.0001 leaves the test part without any"):
        start_ranks(2, [*argv, "--split", "1,1,0.0001"], timeout_s=90)


def test_torchrun_starts_the_script() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", TRAIN_GPT]
        + [*words("--emulate-cpu", COMMON, TWO, "--train-iters 2")],
        env=rank_environment({}),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert " iteration        2/       2 |" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("argv", "world_size", "reason"),
    [
        (FOUR, 6, "start a multiple of 4"),
        (f"{TWO} --global-batch-size 3", 4, "no multiple of --micro-batch-size x data parallel size = 1 x 2"),
        (f"{TWO} --num-layers 6 --num-virtual-stages-per-pipeline-rank 2", 2, "split evenly"),
        (f"{TWO} --num-layers 6 --num-layers-per-virtual-pipeline-stage 2", 2, "no multiple of stages"),
        (f"{TWO} --data-path x", 2, "exactly one of --data-path and --mock-data"),
        (f"{TWO} --overlap-param-gather", 2, "needs --use-distributed-optimizer"),
        (f"{TWO} --sequence-parallel", 2, "at least 2"),
        (f"{TWO} --seq-length 9 --max-position-embeddings 8", 2, "is more than"),
    ],
)
def test_contradicting_arguments_are_refused(argv: str, world_size: int, reason: str) -> None:
    args = parse_arguments(words(COMMON, argv))
    with pytest.raises(TrainingArgumentsError, match=reason):
        check_arguments(args, world_size)
