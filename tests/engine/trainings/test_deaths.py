# SPDX-License-Identifier: Apache-2.0
"""Ranks die while a GPT trains, and the others go on: the numbers of the training without deaths, up to rounding."""

from __future__ import annotations

import re
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from adaptra_megatron.telemetry.event_log import read_events
from adaptra_megatron.telemetry.events import (
    IterationsTimed,
    PlanMade,
    PlanSwitched,
    RanksLost,
    RanksReturned,
    RoutesChosen,
)
from adaptra_megatron.tools.cli.main import main
from campaigns.deaths import campaign
from campaigns.dying_trainings import (
    BACK,
    EXPERTS,
    INSTANCES,
    ITERATIONS,
    KILLED,
    LONGEST_S,
    LOST,
    MICRO_BATCHES,
    Layout,
    dumped,
    last,
    problems,
    train,
)
from testing.jobs.fault_tolerant_jobs import Host
from testing.jobs.fork_server import ForkServer

PER_TOKEN = "--calculate-per-token-loss --mock-data-padded"
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
PRECISION_AWARE = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
AVERAGED = "--ddp-average-in-collective"
SLOW_S = 1.0
"""By which a busy machine may be late."""
UNREACHED = "cannot send its measurements"
CHUNKS = "--num-layers 4 --num-virtual-stages-per-pipeline-rank 2"
GRAPHS = "--bf16 --cuda-graph-impl transformer_engine --cuda-graph-scope full --cuda-graph-warmup-steps 1"
COMBINED = f"{EXPERTS} {CHUNKS} --bf16 --overlap-moe-expert-parallel-comm --use-distributed-optimizer"
DELAYED = (
    "--delay-wgrad-compute --moe-shared-expert-intermediate-size 32 --emulate-fused-weight-gradient "
    "--disable-bias-linear"
)
OFFLOADS = "--fine-grained-activation-offloading --offload-modules qkv_linear core_attn attn_proj mlp_norm"
MTP = "--position-embedding-type rope --mtp-num-layers 1"
ROUTERS = GRAPHS.replace("full", "attn moe_router")
UNTIED = "--untie-embeddings-and-output-weights"


@dataclass(frozen=True)
class Case:
    """A layout, and the deaths in it: see --emulate-death."""

    name: str
    layout: Layout
    deaths: tuple[str, ...]
    slow: bool = True
    """True of a case that others cover: it tells where to look when one of them fails."""


CASES = (
    Case("first-stage", Layout(3, 2), ("1:3:2",)),
    Case("last-stage-in-the-first-iteration", Layout(2, 2, flags=DROPOUT), ("3:0:1",)),
    Case("two-in-turn-of-the-same-stage", Layout(3, 2, flags=PER_TOKEN), ("4:2:4", "5:5:1"), slow=False),
    Case("two-at-once-tied-over-4-stages", Layout(2, 4, flags=f"{AVERAGED} --overlap-grad-reduce"), ("0:3:5", "7:3:2")),
    Case(
        "lane-of-a-cell-with-chunks",
        Layout(2, 2, tensor=2, flags=f"{CHUNKS} --sequence-parallel"),
        ("5:3:2",),
        slow=False,
    ),
    Case("chunks-of-two-stages-in-turn", Layout(3, 2, flags=f"{CHUNKS} {PER_TOKEN} {DROPOUT}"), ("1:3:2", "5:4:7")),
    Case(
        "owners-of-shards-in-two-stages",
        Layout(3, 2, flags=f"{SHARDED} {AVERAGED}"),
        ("1:3:2", "5:4:1"),
        slow=False,
    ),
    Case("lane-of-a-cell-with-shards", Layout(2, 2, tensor=2, flags=f"{SHARDED} --sequence-parallel"), ("1:3:2",)),
    Case("optimizer-instances", Layout(4, 2, flags=f"{SHARDED} {INSTANCES} 2"), ("1:3:2", "6:4:1")),
    Case("rank-0", Layout(3, 2, flags=UNTIED), ("0:4:0",)),
    Case("multi-token-prediction", Layout(3, 2, flags=f"{SHARDED} {MTP}"), ("1:3:2", "5:4:7")),
    Case("captured-layers-with-chunks", Layout(3, 2, flags=f"{GRAPHS} {CHUNKS}"), ("1:0:2", "5:4:7")),
    Case("offloaded-activations", Layout(3, 2, flags=f"{OFFLOADS} {CHUNKS}"), ("1:0:2", "5:4:7")),
    Case("experts-whose-bias-moves", Layout(3, 2, flags=EXPERTS), ("1:3:2", "5:4:1"), slow=False),
    Case("experts-that-span-replicas", Layout(2, 2, expert=2, flags=f"{EXPERTS} {PER_TOKEN}"), ("1:3:2",), slow=False),
    Case(
        "experts-that-span-replicas-sharded",
        Layout(2, 2, expert=2, flags=f"{EXPERTS} {SHARDED} {DROPOUT}"),
        ("2:3:2", "5:4:1"),
    ),
)


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow if case.slow else ()) for case in CASES],
    ids=lambda case: case.name,
)
def test_training_goes_on_without_ranks_that_have_died(case: Case, tmp_path: Path, fork_server: ForkServer) -> None:
    in_peace = train(case.layout, tmp_path / "peace", fork_server)
    assert [result.returncode for result in in_peace] == [0] * case.layout.world_size
    results = train(case.layout, tmp_path / "deaths", fork_server, case.deaths)
    dead = {int(death.split(":")[0]) for death in case.deaths}
    assert {result.rank for result in results if result.returncode == KILLED} == dead
    assert not problems(case.layout, tmp_path / "peace", tmp_path / "deaths", results)
    assert not any(UNREACHED in result.output for result in results), "the planner process has gone with its rank"


RETURNS = (
    Case("lane-of-a-cell-with-shards", Layout(2, 2, tensor=2, flags=f"{SHARDED} --sequence-parallel"), ("5:2:2",)),
    Case("rank-0-twice-and-another-cell", Layout(3, 2, flags=SHARDED), ("0:1:1", "0:5:3", "4:5:1"), slow=False),
    Case("chunks-of-two-stages-in-turn", Layout(3, 2, flags=f"{CHUNKS} {SHARDED} {DROPOUT}"), ("1:2:3", "5:4:2")),
    Case("captured-layers", Layout(3, 2, flags=f"{SHARDED} {GRAPHS}"), ("0:1:1", "0:5:3", "4:5:1"), slow=False),
    Case("optimizer-instances", Layout(4, 2, flags=f"{SHARDED} {INSTANCES} 2"), ("0:2:1", "6:2:3", "0:5:2")),
    Case("two-cells-at-once", Layout(3, 2, flags=f"{PER_TOKEN} {DROPOUT}"), ("0:2:1", "4:2:3")),
    Case(
        "experts-that-span-replicas",
        Layout(2, 2, expert=2, flags=f"{EXPERTS} {SHARDED}"),
        ("1:2:1", "6:2:3", "2:5:2"),
        slow=False,
    ),
    Case(
        "combined-and-offloaded",
        Layout(2, 2, expert=2, flags=f"{COMBINED} {SHARDED} {OFFLOADS} --align-param-gather"),
        ("1:2:1", "6:5:3"),
        slow=False,
    ),
    Case(
        "combined-with-captured-routers",
        Layout(2, 2, expert=2, flags=f"{COMBINED} {ROUTERS}"),
        ("0:2:1", "6:5:6"),
        slow=False,
    ),
)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow if case.slow else ()) for case in RETURNS],
    ids=lambda case: case.name,
)
def test_ranks_that_are_started_again_train_with_the_others(
    case: Case, tmp_path: Path, fork_server: ForkServer
) -> None:
    """Iterations 3 and 6 wait until they are ready; the next one runs with all."""
    in_peace = train(case.layout, tmp_path / "peace", fork_server)
    assert [result.returncode for result in in_peace] == [0] * case.layout.world_size
    waits = sorted({int(death.split(":")[1]) + 1 for death in case.deaths})
    results = train(case.layout, tmp_path / "deaths", fork_server, case.deaths, back=waits)
    assert [result.returncode for result in results] == [0] * case.layout.world_size
    for rank in {int(death.split(":")[0]) for death in case.deaths}:
        times = sum(death.startswith(f"{rank}:") for death in case.deaths)
        assert results[rank].output.count(BACK) == times
        assert len(dumped(tmp_path / "deaths", rank)["grad norms"]) < ITERATIONS
    assert not problems(case.layout, tmp_path / "peace", tmp_path / "deaths", results)
    assert not any(UNREACHED in result.output for result in results), "the planner process has gone with its rank"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_layers_that_delay_weight_gradients_themselves_keep_none_of_an_attempt_that_is_redone(tmp_path: Path) -> None:
    layout = Layout(2, 2, expert=2, flags=f"{COMBINED} {SHARDED} {DELAYED}")
    program = (str(Path(__file__).with_name("delayed_ranks.py")),)
    assert not any(result.returncode for result in train(layout, tmp_path / "peace", None, program=program))
    deaths = ("1:2:5", "6:5:7")
    results = train(layout, tmp_path / "deaths", None, deaths, back=(3, 6), program=program)
    assert [result.returncode for result in results] == [0] * layout.world_size
    assert [results[rank].output.count(BACK) for rank in (1, 6)] == [1, 1]
    assert not problems(layout, tmp_path / "peace", tmp_path / "deaths", results)


@pytest.mark.timeout(150)
def test_parameters_of_16_bits_are_those_after_the_last_step_where_a_rank_is_back(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    """Rank 0 hands over parameters, of which rank 1's shard is that before the last step; rank 2 has the copy of it."""
    layout = Layout(3, 2, flags=f"{SHARDED} --bf16", iterations=6)
    assert not any(result.returncode for result in train(layout, tmp_path / "peace", fork_server))
    assert not any(result.returncode for result in train(layout, tmp_path / "back", fork_server, ("1:3:1",), back=(4,)))
    found = dumped(tmp_path / "back", 1)
    norms = last(dumped(tmp_path / "peace", 1), found)["grad norms"]
    assert 0 < len(norms) < 3, "an evaluation, which gathers them, came between"
    assert torch.allclose(found["grad norms"], norms, rtol=1e-4, atol=0.0)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("death", "said"),
    [("0:0:sending+0", "has failed while rank 1 "), ("1:1:receiving+0", "not admitted after")],
    ids=["source", "rejoining"],
)
def test_a_hand_over_that_is_broken_off_is_done_again(
    death: str, said: str, tmp_path: Path, fork_server: ForkServer
) -> None:
    layout = Layout(3, 2)
    assert not any(result.returncode for result in train(layout, tmp_path / "peace", fork_server))
    results = train(layout, tmp_path / "deaths", fork_server, ("1:1:2", death), back=(2, 5))
    assert [result.returncode for result in results] == [0] * layout.world_size
    assert said in "".join(result.output for result in results)
    assert results[1].output.count(BACK) == 1
    assert results[0].output.count(BACK) == death.startswith("0")
    assert not problems(layout, tmp_path / "peace", tmp_path / "deaths", results)


@pytest.mark.timeout(150)
def test_a_rank_that_is_stopped_as_it_receives_the_state_is_left_out_after_five_seconds_once(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    layout, host = Layout(3, 2), Host(6, restarts=1)
    assert not any(result.returncode for result in train(layout, tmp_path / "peace", fork_server))
    deaths = ("1:1:2", "1:1:receiving+0:stop")
    results = train(layout, tmp_path / "deaths", fork_server, deaths, back=(2,), host=host)
    assert [each.start for each in host.endings if each.exit_code == KILLED] == [0, 1]
    (waited_s,) = re.findall(r"not admitted after ([0-9.]+) s", results[0].output)
    assert 3.0 < float(waited_s) < 5.0 + SLOW_S
    assert not problems(layout, tmp_path / "peace", tmp_path / "deaths", results)


def slow_sender(target: int, seconds: float) -> tuple[str, ...]:
    return str(Path(__file__).with_name("slow_sender_ranks.py")), str(target), str(seconds)


@pytest.mark.timeout(150)
def test_a_rank_whose_state_takes_long_to_send_is_back(tmp_path: Path, fork_server: ForkServer) -> None:
    """Rank 0 decides, and rank 2 sends: for longer than rank 0 would wait for a rank that is late."""
    results = train(Layout(2, 2), tmp_path, fork_server, ("3:1:2",), back=(2,), program=slow_sender(3, 6.0))
    assert [result.returncode for result in results] == [0] * 4
    assert results[3].output.count(BACK) == 1
    (waited_s,) = re.findall(r"back, after ([0-9.]+) s", results[0].output)
    assert float(waited_s) > 6.0


@pytest.mark.timeout(150)
def test_all_hand_overs_end_where_one_rank_is_late(tmp_path: Path, fork_server: ForkServer) -> None:
    """Rank 3 is stopped as rank 2 sends to it. Neither rank 0 nor rank 1 waits for the state that goes between them."""
    deaths = ("1:1:2", "3:1:2", "3:1:receiving+0:stop")
    late, program = ("1:1:ready:60", "3:1:ready:60"), slow_sender(1, 30.0)
    results = train(Layout(2, 2), tmp_path, fork_server, deaths, late=late, back=(2,), program=program)
    assert [result.returncode for result in results if result.rank != 1] == [0, 0, KILLED]
    assert results[1].returncode
    assert "another rank was late or has failed while rank 1" in results[1].output
    (waited_s,) = re.findall(r"not admitted after ([0-9.]+) s", results[0].output)
    assert 3.0 < float(waited_s) < 5.0 + SLOW_S


@pytest.mark.timeout(150)
def test_all_ranks_that_stop_while_they_receive_the_state_are_started_again(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    """Each has another rank that sends to it, and one of the two finds its own late before the other does."""
    deaths = ("1:1:2", "3:1:2", "1:1:receiving+0:stop", "3:1:receiving+0:stop")
    layout = Layout(2, 2, flags="--emulate-compute-ms 100,100,100")  # else it ends before they do
    results = train(layout, tmp_path, fork_server, deaths, back=(2, 5))
    assert [result.returncode for result in results] == [0] * 4
    assert "not admitted after" in results[0].output
    assert [result.output.count(BACK) for result in results] == [0, 1, 0, 1]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_restarted_rank_that_waits_for_a_lane_which_has_failed_ends_and_is_started_again(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    """Ranks 4 and 5 are one cell. The second process of rank 5 dies when both have the state of the job, and that of
    rank 4 waits for it."""
    layout = Layout(2, 2, tensor=2, flags="--sequence-parallel")
    assert not any(result.returncode for result in train(layout, tmp_path / "peace", fork_server))
    results = train(layout, tmp_path / "deaths", fork_server, ("5:1:2", "5:1:joining+0"), back=(2, 3, 4, 5))
    assert [result.returncode for result in results] == [0] * layout.world_size
    assert "has failed while rank 4" in results[4].output
    assert not problems(layout, tmp_path / "peace", tmp_path / "deaths", results)


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("dying", [pytest.param((0, 1), id="a-stage"), pytest.param((0, 1, 2, 3), id="all")])
def test_what_the_job_does_not_survive_ends_those_that_are_started_again(
    dying: tuple[int, ...], tmp_path: Path, fork_server: ForkServer
) -> None:
    """They would wait to be admitted by ranks of which none is left."""
    begun_s = time.monotonic()
    results = train(Layout(2, 2), tmp_path, fork_server, [f"{rank}:2:1" for rank in dying], back=(7,))
    assert all(result.returncode == 1 and LOST in result.output for result in results)
    assert time.monotonic() - begun_s < LONGEST_S


@pytest.mark.timeout(150)
def test_without_deaths_all_numbers_and_copies_of_shards_are_stocks_to_the_bit(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    layout = Layout(3, 2, flags=f"{SHARDED} --bf16", exact=False)
    for directory, each in (("ours", layout), ("stock", replace(layout, adaptra=""))):
        assert not any(result.returncode for result in train(each, tmp_path / directory, fork_server))
    for rank in range(6):
        ours, stock = dumped(tmp_path / "ours", rank), dumped(tmp_path / "stock", rank)
        check_equal(ours, stock)
        owner = rank - rank % 3 + (rank - 1) % 3
        check_equal(copied(ours, stock), optimizer_state(dumped(tmp_path / "stock", owner)))


@pytest.mark.timeout(150)
def test_tensor_parallel_ranks_draw_the_same_dropout_for_what_they_all_hold(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    """Their gradients of norms are not summed, as without --sequence-parallel they are equal."""
    results = train(Layout(2, 2, tensor=2, flags=DROPOUT, iterations=2), tmp_path, fork_server)
    assert not any(result.returncode for result in results)
    for rank in range(0, 8, 2):
        first, second = dumped(tmp_path, rank), dumped(tmp_path, rank + 1)
        norms = {name: tensor for name, tensor in second.items() if "norm" in name and "grad norms" not in name}
        check_equal(first, norms)


def check_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Every tensor that is expected must be there, equal to the bit."""
    assert expected
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def optimizer_state(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name.startswith("optimizer state ")}


def copied(tensors: dict[str, torch.Tensor], own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What an optimizer has of another rank's shard, by the names there: in each group it stands after its `own`."""
    pattern = re.compile(r"optimizer state (\d+\.\d+)\.(\d+)\.(\w+)")
    sizes = Counter(match[1] for name in own if (match := pattern.fullmatch(name)) and match[3] == "main")
    found = {}
    for name, tensor in tensors.items():
        if (match := pattern.fullmatch(name)) and (place := int(match[2]) - sizes[match[1]]) >= 0:
            found[f"optimizer state {match[1]}.{place}.{match[3]}"] = tensor
    return found


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("replicas", "expert", "flags"),
    [
        pytest.param(3, 1, "", id="whole", marks=pytest.mark.slow),
        pytest.param(3, 1, SHARDED, id="sharded"),
        pytest.param(3, 1, f"{SHARDED} {PRECISION_AWARE}", id="precision-aware", marks=pytest.mark.slow),
        pytest.param(4, 1, f"{SHARDED} {INSTANCES} 2", id="optimizer-instances", marks=pytest.mark.slow),
        pytest.param(2, 2, f"{EXPERTS} {SHARDED}", id="experts-that-span-replicas-sharded", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_of_those_that_live_is_one_of_the_whole_job(
    replicas: int, expert: int, flags: str, tmp_path: Path, fork_server: ForkServer
) -> None:
    """Rank 0, which writes what all share, has died when it is written, and with another all of the replica that counts
    in checkpoints; stock Megatron goes on from it, with all ranks."""
    features, checkpoints = f"--bf16 {flags}", tmp_path / "checkpoints"
    layout = Layout(replicas, 2, expert=expert, flags=f"{features} --save {checkpoints}")
    world_size, second = layout.world_size, layout.world_size // 2
    results = train(layout, tmp_path / "deaths", fork_server, ("0:2:1", f"{second}:4:2"))
    ended = [result.returncode for result in results]
    assert ended == [(KILLED if r in (0, second) else 1) if not layout.cell(r)[0] else 0 for r in range(world_size)]
    stock = replace(layout, flags=f"{features} --load {checkpoints}", adaptra="")
    assert [result.returncode for result in train(stock, tmp_path / "stock", fork_server)] == [0] * world_size
    for rank in range(world_size):
        # Next to it is the copy of its shard; two ranks on, the same shard of another instance.
        live = rank if layout.cell(rank)[0] else rank + (2 if INSTANCES in flags else expert)
        ours, theirs = dumped(tmp_path / "deaths", live), dumped(tmp_path / "stock", rank)
        check_equal(ours, {name: tensor for name, tensor in theirs.items() if name.startswith("parameter ")})
        if SHARDED in flags and INSTANCES not in flags and live != rank:
            ours = copied(ours, dumped(tmp_path / "stock", live))
        check_equal(ours, optimizer_state(theirs))


@pytest.mark.timeout(150)
def test_a_training_that_goes_on_from_stocks_checkpoint_survives_failures(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    """Copies of shards are those of what was loaded: the numbers are those of stock, which goes on from there, too."""
    checkpoints = tmp_path / "checkpoints"
    first = Layout(3, 2, flags=f"{SHARDED} --save {checkpoints} --train-iters 3", adaptra="")
    assert not any(result.returncode for result in train(first, tmp_path / "first", fork_server))
    layout = Layout(3, 2, flags=f"{SHARDED} --load {checkpoints}")
    peace = train(replace(layout, adaptra=""), tmp_path / "peace", fork_server)
    assert [result.returncode for result in peace] == [0] * layout.world_size
    assert dumped(tmp_path / "peace", 5)["losses"].numel() == ITERATIONS - 3, "it has begun anew"
    results = train(layout, tmp_path / "deaths", fork_server, ("1:5:2",))
    assert {result.rank for result in results if result.returncode == KILLED} == {1}
    assert not problems(layout, tmp_path / "peace", tmp_path / "deaths", results)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_shard_that_is_lost_ends_all(tmp_path: Path, fork_server: ForkServer) -> None:
    layout = Layout(3, 2, flags=SHARDED)
    results = train(layout, tmp_path / "deaths", fork_server, ("4:2:1", "5:4:1"))
    assert {result.rank for result in results if result.returncode == KILLED} == {4, 5}
    assert "the optimizer's state of rank 4" in results[3].output
    assert not problems(layout, tmp_path / "peace", tmp_path / "deaths", results)


@pytest.mark.timeout(150)
def test_the_log_goes_on_where_the_rank_that_wrote_it_has_died(tmp_path: Path, fork_server: ForkServer) -> None:
    run = tmp_path / "run"
    layout = Layout(3, 2, flags=f"--adaptra-trace-dir {run}")
    results = train(layout, tmp_path / "deaths", fork_server, ("0:2:1",))
    assert [result.returncode for result in results] == [KILLED, *[0] * 5]
    events = [found.event for found in read_events(run)]
    (lost,) = (event for event in events if isinstance(event, RanksLost))
    assert (list(lost.dead_cells), lost.live) == (["0.0"], 5)
    assert {(stage, source) for stage, source, _, _ in lost.moved} == {(0, 0)}
    assert sum(count for *_, count in lost.moved) == MICRO_BATCHES
    times = [event for event in events if isinstance(event, IterationsTimed)]
    assert sum(len(event.seconds) for event in times) == ITERATIONS, (
        "also of those before, which rank 0 had not written"
    )
    assert main(["report", str(run), "-o", str(tmp_path / "page.html")]) == 0
    assert ">dead<br>" in (tmp_path / "page.html").read_text()


BATCH = "--global-batch-size 18 --train-iters 10"
SLOWED = f"{BATCH} --adaptra-max-in-flight 8 --emulate-compute-ms 8,8,8 --emulate-exact-times"
MEASURED = "--adaptra --adaptra-reroute all --adaptra-host-transport shm --emulate-prompt-planner"


def of_kind(kind: type, run: Path) -> list[Any]:
    """Events of a run, with the iterations that they were logged in."""
    return [found for found in read_events(run) if isinstance(found.event, kind)]


@pytest.mark.timeout(150)
def test_live_cells_that_turn_slow_are_routed_round(tmp_path: Path, fork_server: ForkServer) -> None:
    """The planner gets emulated times, and is waited for. Of three cells of the first stage one is dead, one slow."""
    slow, run = "--emulate-slow-cell 0.0:3,from=3", tmp_path / "run"
    layout = Layout(3, 2, flags=f"{SLOWED} {slow} --adaptra-trace-dir {run}", adaptra=MEASURED)
    peace = train(replace(layout, flags=BATCH, adaptra=""), tmp_path / "peace", fork_server)
    assert [result.returncode for result in peace] == [0] * layout.world_size
    results = train(layout, tmp_path / "deaths", fork_server, ("1:1:2",))
    assert {result.rank for result in results if result.returncode == KILLED} == {1}
    assert not problems(layout, tmp_path / "peace", tmp_path / "deaths", results)
    (lost,), chosen = of_kind(RanksLost, run), of_kind(RoutesChosen, run)
    around = next(found.event for found in chosen if found.event.slow)
    assert list(around.slow) == ["0.0"]
    assert around.predicted_s < around.current_predicted_s
    moved = [sum(count for stage, source, _, count in each.event.moved if (stage, source) == (0, 0)) for each in chosen]
    assert moved[-1] > 0, "the slow cell gives nothing away"
    assert all(found.stamp.iteration > lost.stamp.iteration for found in chosen)
    switched = [found.event.number for found in of_kind(PlanSwitched, run)]
    assert around.number in switched, "the routes were not followed"


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_links_that_turn_slow_are_planned_for_after_a_death_and_after_a_return(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    """By each link's paths of a pipeline, and by the order: without the dead by routes of all, with all by a plan."""
    flags = f"{SLOWED} --train-iters 20"
    link = "--emulate-slow-link 0>1:latency_ms=60,from=9,path=both"
    layout = Layout(3, 2, flags=flags, adaptra=MEASURED)
    peace = train(replace(layout, flags=f"{BATCH} --train-iters 20", adaptra=""), tmp_path / "peace", fork_server)
    assert [result.returncode for result in peace] == [0] * layout.world_size
    for name, back, kind in (("dead", (), RoutesChosen), ("back", (4,), PlanMade)):
        run = tmp_path / f"run-{name}"
        struck = replace(layout, flags=f"{flags} {link} --adaptra-trace-dir {run}")
        results = train(struck, tmp_path / name, fork_server, ("1:1:2",), back=back)
        assert [result.returncode for result in results] == [0, 0 if back else KILLED, 0, 0, 0, 0]
        assert not problems(layout, tmp_path / "peace", tmp_path / name, results)
        assert len(of_kind(RanksReturned, run)) == len(back)
        planned = [found.event for found in of_kind(kind, run) if "device path: slow since" in found.event.reason]
        assert planned, "nothing was planned for the slow link"
        assert {found.event.number for found in of_kind(PlanSwitched, run)} & {event.number for event in planned}


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_report_of_ranks_that_have_come_back(tmp_path: Path, fork_server: ForkServer) -> None:
    run = tmp_path / "run"
    layout = Layout(3, 2, flags=f"--adaptra-trace-dir {run}")
    results = train(layout, tmp_path / "deaths", fork_server, ("0:2:1",), back=(3,))
    assert [result.returncode for result in results] == [0] * 6
    events = [found.event for found in read_events(run)]
    (back,) = (event for event in events if isinstance(event, RanksReturned))
    assert (list(back.dead_cells), back.live, [name.split(" (")[0] for name in back.ranks]) == ([], 6, ["rank 0"])
    times = [event for event in events if isinstance(event, IterationsTimed)]
    assert sum(len(event.seconds) for event in times) == ITERATIONS, "each is written once, whichever rank leads"
    assert main(["report", str(run), "-o", str(tmp_path / "page.html")]) == 0
    assert "of the ranks came back" in (tmp_path / "page.html").read_text()
    assert main(["status", str(run)]) in (0, 3), "3 where a busy machine made links slow"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_short_campaign(tmp_path: Path, fork_server: ForkServer) -> None:
    said: list[str] = []
    assert not campaign(24, 3, tmp_path, fork_server, said.append), said
