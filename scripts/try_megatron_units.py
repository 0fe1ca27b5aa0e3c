#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs Megatron-LM's own unit tests of pipelines on CPUs, each file without and with adaptra, and says what came of it.

    scripts/try_megatron_units.py build/megatron-lm [--only test_schedules.py] [--timeout-s 900]

They are written for 8 GPUs: 8 processes on this package's stand-ins of CUDA run them, with Megatron's own layers where
they ask for Transformer Engine's. A test that does not pass without adaptra either needs what CPUs do not have. Exit
status 1 if one passes without adaptra only.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import sys
import tempfile
import types
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

from adaptra_megatron.tools.local_ranks.launch_ranks import LaunchError, run_ranks

RANKS = 8
FOLDER = Path("tests/unit_tests/pipeline_parallel")
WITHOUT_CUDA = ("test_get_pipeline_parallel_order",)
"""Tests that Megatron skips without CUDA although they compute orders alone."""
REASON_LENGTH = 110
PASSED = "passed"

Outcomes = dict[str, str]
"""By test: "passed", or why not."""


def run_rank(checkout: Path, file: str, report: str, *, adaptra: bool) -> int:
    """One rank's pytest, in this process; its exit status."""
    import pytest

    from adaptra_megatron.config import AdaptraConfig
    from testing.megatron import megatron_lm

    os.chdir(checkout)
    sys.path.insert(0, str(checkout))
    # Its conftest fetches data, which none of these tests reads.
    assets = types.ModuleType("download_unit_tests_dataset")
    assets.download_and_extract_asset = lambda **_: None  # type: ignore[attr-defined]
    sys.modules["tests.test_utils.python_scripts.download_unit_tests_dataset"] = assets
    megatron_lm._prepare()
    # Asked by its conftest before each test; it compares None where Transformer Engine is missing.
    utils = importlib.import_module("megatron.core.utils")
    utils.is_te_min_version = lambda *_, **__: False  # type: ignore[attr-defined]
    _replace_layers()
    _adapt_groups()
    if adaptra:
        importlib.import_module("adaptra_megatron.patches").enable(AdaptraConfig())
    path = f"{report}{os.environ['RANK']}.xml"
    words = ["-q", "-p", "no:cacheprovider", f"--junitxml={path}", "-o", "addopts=", str(FOLDER / file)]
    return pytest.main(words, plugins=[_Collected()])


class _Collected:
    """Plugin of pytest's that runs what is skipped without CUDA although it uses none."""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        for item in items:
            if getattr(item, "originalname", None) in WITHOUT_CUDA:
                item.own_markers = [marker for marker in item.own_markers if marker.name != "skipif"]


def _replace_layers() -> None:
    """Have Megatron's specifications of layers be of its own ones."""
    specs: Any = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    specs.get_gpt_layer_with_transformer_engine_spec = specs.get_gpt_layer_local_spec
    for name in ("get_gpt_decoder_block_spec", "get_gpt_mtp_block_spec"):
        setattr(specs, name, _of_local_layers(getattr(specs, name)))


def _of_local_layers(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def specification(*arguments: Any, **keywords: Any) -> Any:
        return stock(*arguments, **{**keywords, "use_transformer_engine": False})

    return specification


def _adapt_groups() -> None:
    """Have groups be made as gloo's must be, and end with the model's parallelism: each test makes dozens, and each of
    gloo's has threads.

    Several models' grids ask for NCCL's. By one call ranks of different pipelines make different groups, under one
    name: NCCL's, which are not used, never connect, gloo's do at once, and wait for each other. So all make all.
    """
    import torch.distributed as dist

    new_group = dist.new_group

    @functools.wraps(new_group)
    def of_all_ranks(ranks: Any = None, *arguments: Any, **keywords: Any) -> Any:
        asked: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(asked, None if ranks is None else tuple(sorted(ranks)))
        mine = asked[dist.get_rank()]
        groups = {each: new_group(each and list(each), *arguments, **keywords) for each in dict.fromkeys(asked)}
        return groups[mine]

    dist.new_group = of_all_ranks
    by_enumeration = dist.new_subgroups_by_enumeration

    @functools.wraps(by_enumeration)
    def over_gloo(ranks: Any, **keywords: Any) -> Any:
        return by_enumeration(ranks, **{**keywords, "backend": "gloo"})

    dist.new_subgroups_by_enumeration = over_gloo
    state: Any = importlib.import_module("megatron.core.parallel_state")
    stock = state.destroy_model_parallel

    @functools.wraps(stock)
    def destroy_model_parallel() -> None:
        kept = [each for value in vars(state).values() for each in (value if isinstance(value, list) else [value])]
        groups = {each for each in kept if isinstance(each, dist.ProcessGroup)} - {dist.group.WORLD}
        stock()
        for group in groups.intersection(dist.distributed_c10d._world.pg_map):  # which has not ended before
            dist.destroy_process_group(group)

    state.destroy_model_parallel = destroy_model_parallel


def outcomes(checkout: Path, file: str, *, adaptra: bool, timeout_s: float) -> Outcomes:
    """What each test of `file` came to, on the first rank where it did not pass."""
    with tempfile.TemporaryDirectory(prefix="adaptra-units-") as directory:
        argv = [__file__, str(checkout), "--rank", file, f"{directory}/", *(["--adaptra"] if adaptra else [])]
        try:
            run_ranks(RANKS, argv, timeout_s=timeout_s, check=False, stop_on_failure=False)
        except LaunchError as error:
            print(error, file=sys.stderr)
            return {file: f"did not end in {timeout_s:g} s"}
        found: Outcomes = {}
        for rank in range(RANKS):
            for case in ElementTree.parse(Path(directory, f"{rank}.xml")).iter("testcase"):
                problems = [child for child in case if child.tag in ("failure", "error", "skipped")]
                outcome = _reason(problems[0]) if problems else PASSED
                if found.get(case.attrib["name"], PASSED) == PASSED:
                    found[case.attrib["name"]] = outcome
        return found


def _reason(problem: ElementTree.Element) -> str:
    return " ".join(problem.attrib.get("message", problem.tag).split())[:REASON_LENGTH]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--only", action="append", metavar="FILE", help="one file, or FILE::TEST; may be repeated")
    parser.add_argument("--timeout-s", type=float, default=900.0, help="for a file, without and with adaptra each")
    parser.add_argument("--rank", nargs=2, metavar=("FILE", "REPORT"), help=argparse.SUPPRESS)
    parser.add_argument("--adaptra", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    checkout = options.checkout.absolute()
    if options.rank:
        return run_rank(checkout, *options.rank, adaptra=options.adaptra)
    worse = False
    for file in options.only or sorted(path.name for path in (checkout / FOLDER).glob("test_*.py")):
        stock, ours = (
            outcomes(checkout, file, adaptra=adaptra, timeout_s=options.timeout_s) for adaptra in (False, True)
        )
        for test in {**stock, **ours}:
            without, with_it = stock.get(test, "not run"), ours.get(test, "not run")
            print(
                f"{file} {test}: {without}" + (f"; with adaptra: {with_it}" if with_it != without else ""), flush=True
            )
            worse |= without == PASSED != with_it
    return int(worse)


if __name__ == "__main__":
    sys.exit(main())
