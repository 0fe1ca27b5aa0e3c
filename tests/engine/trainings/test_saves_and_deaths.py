# SPDX-License-Identifier: Apache-2.0
"""Ranks die and come back while checkpoints are written in the background: the newest one is always complete, the next
comes early, and stock Megatron goes on from it to the numbers of the training without deaths."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from torch.distributed.checkpoint.filesystem import FileSystemReader

from campaigns.dying_trainings import KILLED, OVERLAPPED, Layout, dumped, problems, train
from testing.jobs.fork_server import ForkServer
from testing.results import fingerprint
from testing.training.checkpointing import LATEST, unreadable

INTERVAL = 3
LAYOUT = Layout(3, 2, flags=OVERLAPPED, micro_batches=3)
BACKGROUND = f"--async-save --save-interval {INTERVAL} --save"
LASTING, SHORT = f"--emulate-lasting-write {INTERVAL}", ""
PERSISTENT = f"{LASTING} --use-persistent-ckpt-worker"
GIVEN_UP = "it is given up, the one before it stays the newest"


@dataclass(frozen=True)
class Case:
    """Deaths, and the complete checkpoints that there are at the end: iteration, number of ranks that wrote it."""

    name: str
    flags: str
    complete: tuple[tuple[int, int], ...]
    deaths: tuple[str, ...] = ()
    at_save: tuple[str, ...] = ()
    back: tuple[int, ...] = ()
    given_up: tuple[int, ...] = ()

    @property
    def dead(self) -> set[int]:
        return {int(each.partition(":")[0]) for each in (*self.deaths, *self.at_save)}


# The checkpoint of 3 is under way as a rank dies in the fourth iteration, or is admitted in the fourth or fifth. Then
# it is given up, and at the iteration's end the next one is written. Where writers are quick, it is finalized in any
# later iteration.
CASES = (
    Case("writing", LASTING, ((5, 5), (6, 5), (8, 5)), ("1:3:2",), given_up=(3,)),
    Case("writing-persistent", PERSISTENT, ((5, 5), (6, 5), (8, 5)), ("1:3:2",), given_up=(3,)),
    Case("scheduling", SHORT, ((3, 5), (6, 5), (8, 5)), at_save=("4:3:scheduling",)),
    Case("finalizing", SHORT, ((8, 5),), at_save=("4:3:finalizing",), given_up=(3,)),
    Case("finalizing-first", SHORT, ((8, 5),), at_save=("0:3:finalizing",), given_up=(3,)),
    Case("at-the-end", SHORT, ((3, 6), (6, 6), (8, 5)), at_save=("2:8:finalizing",), given_up=(8,)),
    Case("rejoining", LASTING, ((6, 6), (8, 6)), ("1:2:2",), back=(3,), given_up=(3,)),
    Case("rejoining-persistent", PERSISTENT, ((6, 6), (8, 6)), ("1:2:2",), back=(3,), given_up=(3,)),
)


@pytest.fixture(scope="module")
def peace(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> Path:
    """Where the training without deaths has put its state."""
    directory = tmp_path_factory.mktemp("peace")
    assert not any(result.returncode for result in train(LAYOUT, directory, fork_server))
    return directory


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.name in ("writing", "rejoining") else pytest.mark.slow)
        for case in CASES
    ],
)
def test_the_newest_checkpoint_is_complete(case: Case, peace: Path, tmp_path: Path, fork_server: ForkServer) -> None:
    saved = tmp_path / "checkpoints"
    dying = " ".join(f"--emulate-death-at-save {each}" for each in case.at_save)
    layout = replace(LAYOUT, flags=f"{OVERLAPPED} {BACKGROUND} {saved} {case.flags} {dying}")
    results = train(layout, tmp_path / "deaths", fork_server, case.deaths, back=case.back)
    ended = {result.rank for result in results if result.returncode == KILLED}
    assert ended == (set() if case.back else case.dead)
    struck = {layout.cell(rank) for rank in case.dead} if case.back else ()
    assert not problems(layout, peace, tmp_path / "deaths", results, struck)
    assert sum(result.output.count(GIVEN_UP) for result in results) == len(case.given_up)
    for iteration, parts in case.complete:
        checkpoint = saved / f"iter_{iteration:07d}"
        assert (checkpoint / ".metadata").exists()
        assert parts == len(named_parts(checkpoint))
    if case.flags:  # writers were at it for long, so it is known when the early one comes, up to an iteration
        assert any((saved / f"iter_{early:07d}" / ".metadata").exists() for early in (4, 5))
    assert (saved / LATEST).read_text() == "8\n"
    check_stock_goes_on(case, saved, peace, tmp_path / "stock", fork_server)


def named_parts(checkpoint: Path) -> set[str]:
    """Ranks, as numbered then, whose files the checkpoint's metadata name."""
    metadata = FileSystemReader(checkpoint).read_metadata()
    return {part.relative_path.split("_")[2] for part in metadata.storage_data.values()}


def check_stock_goes_on(case: Case, saved: Path, peace: Path, directory: Path, fork_server: ForkServer) -> None:
    """From each complete checkpoint, to the parameters and states of the training without deaths, to the bit."""
    iteration = case.complete[0][0]
    (saved / LATEST).write_text(f"{iteration}\n")
    assert not unreadable(saved)
    stock = replace(LAYOUT, flags=f"{OVERLAPPED} --load {saved}", adaptra="")
    failed = [result for result in train(stock, directory, fork_server) if result.returncode]
    assert not failed, failed[0].output[-4000:]
    for rank in range(LAYOUT.world_size):
        found, expected = dumped(directory, rank), dumped(peace, rank)
        parameters = [name for name in expected if name.startswith("parameter ")]
        assert fingerprint({each: found[each] for each in parameters}) == fingerprint(
            {each: expected[each] for each in parameters}
        )
