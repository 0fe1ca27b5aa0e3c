# SPDX-License-Identifier: Apache-2.0
"""Trainings whose replicas do not wait for a straggler: stock's to the bit without one, and replicas equal with one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from testing.jobs.fork_server import ForkServer
from testing.jobs.variants import Variant, VariantReport, check_equal, run_variants

ITERATIONS = 20
TRAINING = (
    "--mock-data --no-gradient-accumulation-fusion --num-layers 2 --hidden-size 32 --seq-length 16 --lr 1e-3 "
    f"--train-iters {ITERATIONS} --eval-iters 1 --eval-interval 7 --emulate-compute-ms 1,1,1 --emulate-exact-times"
)
MODE = "--adaptra --adaptra-timeout-s 100 --adaptra-sync-mode"
SLOW = "--emulate-slow-cell 1.0:3"


def train(
    replicas: int, flags: str, ways: dict[str, str], directory: Path, server: ForkServer, *, ranks: int
) -> dict[str, VariantReport]:
    """Train as stock, and in all ways; replicas of each are equal afterwards, to the bit."""
    base = f"{TRAINING} --global-batch-size {2 * replicas} {flags}"
    variants = [Variant("stock", tuple(base.split()))]
    variants += [
        Variant(name, tuple(f"{base} {way}".split()), like="stock", nearly=name != "no straggler")
        for name, way in ways.items()
    ]
    reports = run_variants(ranks, variants, timeout_s=280, server=server, directory=directory)
    for report in reports:
        assert len(set(report.fingerprints)) == ranks // replicas, report.name
        assert len(report.evaluation_losses) == len(reports[0].evaluation_losses), report.name
    return {report.name: report for report in reports}


def check_apart(report: VariantReport) -> None:
    """Some updates were made without the straggler, whose gradients were part of later ones."""
    counted = [Counter(rank["updates"]) for rank in report.adaptra]
    assert sum(each["partial"] for each in counted) > ITERATIONS / 4, counted
    assert any(each["missed"] and each["late"] + each["given"] for each in counted), counted
    for each in counted:
        assert each["together"] + each["partial"] + each["missed"] == ITERATIONS, counted
    assert 0 < report.distances["parameters"] < 0.5, report.distances


@pytest.mark.timeout(300)
def test_replicas_without_a_pipeline(tmp_path: Path, fork_server: ForkServer) -> None:
    ways = {"no straggler": f"{MODE} auto", "one late": f"{MODE} x-order {SLOW}"}
    reports = train(3, "", ways, tmp_path, fork_server, ranks=3)
    check_equal([reports["no straggler"]])
    assert [rank["updates"]["together"] for rank in reports["no straggler"].adaptra] == [ITERATIONS] * 3
    check_apart(reports["one late"])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("replicas", "ranks", "flags"),
    [
        (4, 4, ""),
        (3, 6, "--pipeline-model-parallel-size 2"),
        (3, 3, "--bf16"),
        (3, 6, "--tensor-model-parallel-size 2"),
        (2, 4, "--pipeline-model-parallel-size 2 --num-layers 4 --num-virtual-stages-per-pipeline-rank 2"),
    ],
    ids=["4 replicas", "pipelines", "bf16", "tensor parallel", "chunks"],
)
def test_layouts(replicas: int, ranks: int, flags: str, tmp_path: Path, fork_server: ForkServer) -> None:
    ways = {
        "x-order": f"{MODE} x-order {SLOW} --adaptra-max-staleness 2",
        "dynamic": f"{MODE} dynamic {SLOW}",
        "no straggler": f"{MODE} auto",
    }
    reports = train(replicas, flags, ways, tmp_path, fork_server, ranks=ranks)
    check_apart(reports["x-order"])
    check_apart(reports["dynamic"])
    check_equal([reports["no straggler"]])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_modes_come_and_go_with_a_straggler(tmp_path: Path, fork_server: ForkServer) -> None:
    ways = {"a while": f"{MODE} auto {SLOW},from=3,until=7"}
    counted = [
        rank["updates"]
        for rank in train(3, "--train-iters 40", ways, tmp_path, fork_server, ranks=3)["a while"].adaptra
    ]
    assert all(each["together"] > 10 for each in counted), counted
    assert all(each["partial"] for each in counted), counted


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_checkpoint_is_of_one_version_and_stock_goes_on_from_it(tmp_path: Path, fork_server: ForkServer) -> None:
    base = f"{TRAINING} --global-batch-size 6 {SLOW}"
    place = tmp_path / "checkpoints"
    variants = [
        Variant("saves", tuple(f"{base} {MODE} x-order --save {place} --save-interval 9".split())),
        Variant("goes on", tuple(f"{base} {MODE} dynamic --load {place} --train-iters 34".split())),
        Variant("stock", tuple(f"{base} --load {place} --train-iters 24".split())),
    ]
    for report in run_variants(3, variants, timeout_s=280, server=fork_server, directory=tmp_path):
        assert len(set(report.fingerprints)) == 1, report.name
        assert report.losses, report.name
