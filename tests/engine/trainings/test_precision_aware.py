# SPDX-License-Identifier: Apache-2.0
"""Ranks fail and come back while Transformer Engine's optimizer stores its state in few bits: the numbers of stock, and
each stored bit of the optimizer's state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from campaigns.dying_trainings import BACK, KILLED, Layout, dumped, problems, train
from testing.jobs.fork_server import ForkServer
from tests.engine.trainings.test_deaths import SHARDED, check_equal, copied, optimizer_state

KINDS = {
    "low-halves": "",
    "fp8": "--exp-avg-dtype fp8 --exp-avg-sq-dtype fp16 --main-params-dtype fp16",
    "bf16": "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
    "main-parameters-of-megatron": "--exp-avg-dtype fp16 --exp-avg-sq-dtype fp16 --fp8-recipe blockwise",
}
# With a loss per token, whose gradients are larger: those of a whole shard are not all rounded to 0, of which FP8
# moments have no scale.
LAYOUT = Layout(3, 2, flags=f"{SHARDED} --bf16 --use-precision-aware-optimizer --calculate-per-token-loss")
RUNS: tuple[tuple[str, tuple[str, ...], tuple[int, ...]], ...] = (
    ("healthy", (), ()),
    ("dead", ("1:2:3", "5:5:1"), ()),
    ("back", ("1:2:3", "5:4:1"), (3, 5)),
)
"""Directories, deaths, and iterations that wait until all have been started again."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in ("low-halves", "fp8") else pytest.mark.slow) for kind in KINDS]
)
def test_ranks_that_fail_and_come_back_have_each_stored_bit(kind: str, tmp_path: Path, fork_server: ForkServer) -> None:
    layout = replace(LAYOUT, flags=f"{LAYOUT.flags} {KINDS[kind]}")
    assert not any(each.returncode for each in train(replace(layout, adaptra=""), tmp_path / "stock", fork_server))
    stock = [dumped(tmp_path / "stock", rank) for rank in range(6)]
    assert all(each.isfinite().all() for tensors in stock for each in tensors.values())
    for name, deaths, back in RUNS:
        results = train(layout, tmp_path / name, fork_server, deaths, back=back)
        dead = set() if back else {int(death[0]) for death in deaths}
        assert [result.returncode for result in results] == [KILLED if rank in dead else 0 for rank in range(6)]
        assert sum(result.output.count(BACK) for result in results) == len(back)
        assert not problems(layout, tmp_path / "stock", tmp_path / name, results)
        for rank in set(range(6)) - dead:
            found, owner = dumped(tmp_path / name, rank), rank - rank % 3 + (rank - 1) % 3
            check_equal(found, optimizer_state(stock[rank]))
            check_equal(copied(found, stock[rank]), optimizer_state(stock[owner]))


@pytest.mark.timeout(200)
def test_copies_of_shards_are_those_of_a_checkpoint(tmp_path: Path, fork_server: ForkServer) -> None:
    checkpoints = tmp_path / "checkpoints"
    flags = f"{LAYOUT.flags} {KINDS['fp8']}"
    first = replace(LAYOUT, flags=f"{flags} --save {checkpoints} --train-iters 3", adaptra="")
    assert not any(result.returncode for result in train(first, tmp_path / "first", fork_server))
    layout = replace(LAYOUT, flags=f"{flags} --load {checkpoints}")
    assert not any(result.returncode for result in train(replace(layout, adaptra=""), tmp_path / "stock", fork_server))
    results = train(layout, tmp_path / "deaths", fork_server, ("1:3:2",))
    assert {result.rank for result in results if result.returncode == KILLED} == {1}
    assert not problems(layout, tmp_path / "stock", tmp_path / "deaths", results)
