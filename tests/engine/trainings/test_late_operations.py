# SPDX-License-Identifier: Apache-2.0
"""A rank dies while another's operation is late, which writes when the next generation's attempt is about to use what
it writes into; or as another could be admitted to a generation whose number is taken. All come to the numbers of the
training without deaths, to the bit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from campaigns.dying_trainings import KILLED, OVERLAPPED, Layout, problems, train
from testing.faults.late_operations import MARK
from testing.faults.operation_board import LATE, read_deaths, read_lateness
from testing.jobs.fork_server import ForkServer

IDLE_S, READY_S = 3, 20
PLAIN, SHARDED = (Layout(3, 2, flags=flags, micro_batches=3, iterations=6) for flags in ("", OVERLAPPED))


@dataclass(frozen=True)
class Case:
    """A reduction of rank 5, in the last stage, that is late in iteration 2: in a call ("in") or outside, of the first
    group with this in its name. Rank 0, of the first stage, dies as it has been launched."""

    name: str
    where: str
    group: str
    layout: Layout = SHARDED


CASES = (
    Case("gradients", "in", "DATA_PARALLEL"),
    Case("gradients-without-overlap", "in", "DATA_PARALLEL", PLAIN),
    Case("gradient-norm", "out", "INTRA_DISTRIBUTED"),
    # Where all have the old sum before the new one, the mean loss hides it: three times the loss of as many tokens.
    Case("losses", "out", "DATA_PARALLEL"),
)


@pytest.fixture(scope="module")
def peace(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> dict[Layout, Path]:
    """Where trainings without deaths have put their state."""
    found = {}
    for layout in (PLAIN, SHARDED):
        found[layout] = tmp_path_factory.mktemp("peace")
        assert not any(result.returncode for result in train(layout, found[layout], fork_server))
    return found


@pytest.mark.timeout(150)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_an_interrupted_attempt_has_under_way_is_not_written_into_the_next(
    case: Case, peace: dict[Layout, Path], tmp_path: Path, fork_server: ForkServer
) -> None:
    late = (f"5:2:{case.where}:{case.group}:{IDLE_S}",)
    results = train(case.layout, tmp_path, fork_server, ("0:late+0",), late=late)
    held = (tmp_path / MARK).read_text()
    assert case.group in held
    assert len(held.splitlines()) == 3, "it has not been begun, or has not ended"
    assert read_lateness(tmp_path)["collectives"] == 1
    (death,) = read_deaths(tmp_path)
    assert death["rank"] == 0
    assert death[LATE] >= 1, "nothing was late as it died"
    assert [result.returncode for result in results] == [KILLED, 0, 0, 0, 0, 0]
    assert not problems(case.layout, peace[case.layout], tmp_path, results)


@pytest.mark.timeout(150)
def test_parameters_are_gathered_though_a_rank_dies_meanwhile_after_the_last_call(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    layout = Layout(3, 2, flags="--use-distributed-optimizer --eval-interval 9", micro_batches=1, iterations=2)
    assert not any(result.returncode for result in train(layout, tmp_path / "peace", fork_server))
    late = (f"4:1:out:DATA_PARALLEL:{IDLE_S}",)
    results = train(layout, tmp_path / "dead", fork_server, ("0:late+0",), late=late)
    assert read_lateness(tmp_path / "dead")["collectives"] == 1
    assert [result.returncode for result in results] == [KILLED, 0, 0, 0, 0, 0]
    assert not problems(layout, tmp_path / "peace", tmp_path / "dead", results)


@pytest.mark.timeout(200)
def test_a_rank_that_stands_ready_as_another_dies_is_admitted_to_a_generation_of_its_own(
    peace: dict[Layout, Path], tmp_path: Path, fork_server: ForkServer
) -> None:
    """Rank 0 dies and stands ready again after the commit of iteration 1; before that of iteration 2, which would say
    so, rank 5 dies. The newest membership is that of rank 5's death, in which the others go on."""
    flags = f"{SHARDED.flags} --adaptra-timeout-s 20"
    layout = Layout(3, 2, flags=flags, micro_batches=3, iterations=6)
    late = tuple(f"{rank}:1:ready:{READY_S}" for rank in (0, 5))
    results = train(layout, tmp_path, fork_server, ("0:1:0", "5:2:0"), late=late, back=(2, 3, 4, 5))
    assert [death["rank"] for death in read_deaths(tmp_path)] == [0, 5]
    assert [result.returncode for result in results] == [0] * 6
    assert not problems(layout, peace[SHARDED], tmp_path, results, {(0, 0), (2, 1)})
