# SPDX-License-Identifier: Apache-2.0
"""Layers captured as CUDA graphs are replayed in the order of their capture, whatever is planned: bit for bit stock's.

Graphs are emulated by `testing.megatron.captured_graphs`, which overwrites what another order leaves in memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from support.processes import RankResult

from adaptra_megatron.schedule.csv_format import schedule_from_csv
from testing.jobs.fork_server import ForkServer
from testing.jobs.variants import Variant, VariantReport, check_equal, run_variants

CHANGED = str(Path(__file__).with_name("changed_capture_ranks.py"))
JOB = (
    "--bf16 --pipeline-model-parallel-size 2 --num-layers 4 --hidden-size 32 --seq-length 16 --mock-data "
    "--no-gradient-accumulation-fusion --global-batch-size 8"
)
GRAPHS = "--cuda-graph-impl transformer_engine --cuda-graph-scope"
ADAPTS = (
    "--adaptra --adaptra-max-in-flight 6 --adaptra-timeout-s 60 --emulate-compute-ms 6,6,6 --emulate-exact-times "
    "--emulate-prompt-planner"
)
COMBINES = ADAPTS.replace("6,6,6", "6,6,6,0.6")
OFFLOADS = "--fine-grained-activation-offloading --offload-modules expert_fc1"
SLOW = "--emulate-slow-link 0-1:latency_ms=40,from=4,path=both"
EXPERTS = "--num-experts 4"
CHUNKS = "--num-virtual-stages-per-pipeline-rank 2"
COMBINED = (
    f"{CHUNKS} {EXPERTS} --expert-model-parallel-size 2 --overlap-moe-expert-parallel-comm --global-batch-size 16"
)


def job(*flags: str) -> tuple[str, ...]:
    return tuple(" ".join((JOB, *flags)).split())


@pytest.mark.timeout(200)
def test_captured_in_the_order_of_the_plan(tmp_path: Path, fork_server: ForkServer) -> None:
    some = "--train-iters 9 --cuda-graph-warmup-steps 5 --eval-iters 1 --eval-interval 3"
    wanted = [
        Variant("stock", job(some)),
        Variant("stock's graphs", job(some, GRAPHS, "full"), like="stock"),
        Variant("nothing planned", job(some, GRAPHS, "full --adaptra --adaptra-policy observe"), like="stock"),
        Variant("planned", job(some, GRAPHS, "full", ADAPTS), like="stock"),
        Variant("attention alone", job(some, GRAPHS, "attn", ADAPTS), like="stock"),
        Variant("chunks", job(some, CHUNKS)),
        Variant("chunks planned", job(some, CHUNKS, GRAPHS, "full", ADAPTS), like="chunks"),
        Variant("experts", job(some, EXPERTS)),
        Variant("experts planned", job(some, EXPERTS, GRAPHS, "attn moe_router", ADAPTS), like="experts"),
    ]
    reports = run_variants(2, wanted, timeout_s=180, server=fork_server, directory=tmp_path)
    check_equal(reports)
    # Planned before there were graphs: a plan that costs none.
    for report in (each for each in reports if "planned" in each.name and each.name != "nothing planned"):
        assert all(rank["graph_captures"] >= 1 for rank in report.adaptra), report.name
        assert len({fingerprint for _number, fingerprint in report.plans[0]}) > 1, "the plan changed"


@pytest.mark.timeout(300)
def test_layers_of_combined_actions_alternate_as_the_plan_has_them(tmp_path: Path, fork_server: ForkServer) -> None:
    some = f"{COMBINED} --train-iters 12 --cuda-graph-warmup-steps 2 --eval-iters 1 --eval-interval 3"
    wanted = [
        Variant("stock", job(some)),
        Variant("stock's graphs", job(some, GRAPHS, "attn moe_router"), like="stock"),
        Variant("planned", job(some, GRAPHS, "attn moe_router", COMBINES, SLOW), like="stock"),
        Variant("experts offloaded", job(some, GRAPHS, "moe_router", OFFLOADS, COMBINES, SLOW), like="stock"),
    ]
    reports = run_variants(
        4, wanted, timeout_s=280, server=fork_server, directory=tmp_path, program=(CHANGED, "offloads")
    )
    check_equal(reports)
    for report in reports[2:]:
        assert all(rank["graph_captures"] > 1 for rank in report.adaptra), report.name
        assert schedule_from_csv(report.adaptra[0]["schedule_csv"], chunks=2).combines, report.name
    assert all(rank["offload_records"] > 1 and rank["offloaded_bytes"] for rank in reports[-1].adaptra)


def changed(
    change: str, start_ranks: Callable[..., list[RankResult]], directory: Path, *flags: str
) -> tuple[VariantReport, str]:
    """Return the report on a run with a `change` of captured layers, compared with stock, and its log."""
    iterations = "--train-iters 28 --cuda-graph-warmup-steps 2"
    wanted = [
        Variant("stock", job(iterations)),
        Variant("changed", job(GRAPHS, *flags, ADAPTS, iterations), like="stock"),
    ]
    request, report = directory / "variants.json", directory / "report.json"
    request.write_text(json.dumps([asdict(each) for each in wanted]))
    results = start_ranks(2, [CHANGED, change, str(request), str(report)], timeout_s=100)
    return VariantReport(**json.loads(report.read_text())[1]), results[0].output


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("seconds", "switches"), [("0.5", True), ("60", False)])
def test_captured_anew_once_a_switch_has_paid_for_it(
    seconds: str, switches: bool, tmp_path: Path, start_ranks: Callable[..., list[RankResult]]
) -> None:
    """The slow link costs 0.2 s of each iteration, 23 times: busy machines also plan later."""
    report, log = changed(seconds, start_ranks, tmp_path, "full", SLOW)
    assert not report.differences
    assert report.elements_compared
    assert ("CUDA graphs captured anew for plan" in log) == switches
    assert (report.adaptra[0]["graph_captures"] > 1) == switches


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("change", "flags"),
    [("stale", ("full",)), ("lent", ("full", f"{SLOW} --adaptra-host-transport off")), ("lent", ("attn",))],
    ids=["not captured anew", "sent as it is", "kept as it is"],
)
def test_without_a_part_results_are_others(
    change: str, flags: tuple[str, ...], tmp_path: Path, start_ranks: Callable[..., list[RankResult]]
) -> None:
    report, _log = changed(change, start_ranks, tmp_path, *flags)
    assert any("losses" in line for line in report.differences), report.differences
