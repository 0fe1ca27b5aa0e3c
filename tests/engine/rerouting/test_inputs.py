# SPDX-License-Identifier: Apache-2.0
"""What cells compute where lengths are known: every micro-batch of the job once, as what it is at home."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.emulated_time import EmulatedTime
from support.made_up.job import SECRET, layout
from torch.distributed import HashStore

from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.common.layout import Cell
from adaptra_megatron.elastic import protocol_store
from adaptra_megatron.elastic.failure_errors import EpochEndedError
from adaptra_megatron.engine import rerouting
from adaptra_megatron.engine import routed_inputs as rerouted_inputs
from adaptra_megatron.engine.routed_inputs import RoutableInputs
from adaptra_megatron.megatron.refusals import UnsupportedFeatureError
from adaptra_megatron.megatron.state.attempt_state import MicroBatchRandom
from adaptra_megatron.routable_data import RoutableMicroBatches
from adaptra_megatron.schedule.ir import Place

REPLICAS, MICRO_BATCHES = 2, 4
TIMEOUT_S = 5.0
SECONDS = [[5.0, 1.0, 5.0, 5.0], [1.0, 1.0, 1.0, 4.0], [1.0] * 4, [1.0] * 4]
"""Times of the micro-batches of two iterations: those of replica 0, then those of replica 1, of either."""


def length(replica: int, number: int) -> float:
    iteration, place = divmod(number, MICRO_BATCHES)
    return SECONDS[iteration * REPLICAS + replica][place]


def data(replica: int, length: Any = length) -> RoutableMicroBatches:
    own: Iterator[Any] = ((replica, number) for number in range(2 * MICRO_BATCHES))
    return RoutableMicroBatches(own, lambda *place: place, length)


def call(iterator: Any, *, message_shape: Any = (1, 1, 1), dropout: float = 0.0) -> Any:
    chunk = torch.nn.Linear(1, 1)
    chunk.is_first_microbatch = chunk.disable_parameter_transpose_cache = False  # type: ignore[assignment]
    return SimpleNamespace(
        data_iterators=[iterator],
        model_chunks=[chunk],
        groups=SimpleNamespace(dp=object()),
        message_shape=message_shape,
        micro_batches=MICRO_BATCHES,
        forward_only=False,
        config=SimpleNamespace(hidden_dropout=dropout, disable_parameter_transpose_cache=False),
        last_place=Place(1, 0),
        stages=2,
    )


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch) -> ControlStore:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    return ControlStore(HashStore(), SECRET, "job")


def cell_inputs(
    control: ControlStore,
    rank: int,
    made: Any,
    pipelines: Sequence[Sequence[int]] = ((0, 1), (2, 3)),
    joined: Sequence[Sequence[int]] = (),
    **keywords: Any,
) -> RoutableInputs:
    """Return the inputs of one rank, in pipelines of two stages. `joined`: ranks of the groups that experts span."""
    job = layout(pipelines, rank, joined=joined)
    job.together = True
    replicas = [each[job.cell.stage] for each in pipelines]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.distributed, "get_process_group_ranks", lambda _group: replicas)
        return RoutableInputs(made, control, job, keywords.pop("timeout_s", TIMEOUT_S), **keywords)


def test_draws_follow_from_the_micro_batch_where_ranks_may_fail(
    control: ControlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a model whose configuration shows none: a failure interrupts tensor-parallel ranks at different ones."""
    drawn: list[tuple[int, ...]] = []
    random = SimpleNamespace(begin=lambda *what: drawn.append(what))
    monkeypatch.setattr(MicroBatchRandom, "agreed", lambda *_, **__: random)
    for fails in (False, True):
        made = call(data(0))
        inputs = cell_inputs(control, 0, made, swap=False, joins=True, fails=fails)
        inputs.begin(made, 5, routed=False)
        inputs(0, 1)
    assert drawn == [(5, 0, 1, 0)]


@pytest.mark.parametrize("routed", [False, True])
def test_swapped_micro_batches_are_what_they_are_at_home(
    routed: bool, control: ControlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replica 0 has 16 seconds of work and replica 1 7 in the first iteration, and both have 4 in the second. `routed`:
    the first cell runs its micro-batches by numbers of the job."""
    drawn: list[tuple[int, ...]] = []
    random = SimpleNamespace(begin=lambda *what: drawn.append(what))
    monkeypatch.setattr(MicroBatchRandom, "agreed", lambda *_, **__: random)
    calls = [call(data(replica), dropout=0.1) for replica in range(REPLICAS)]
    cells = [cell_inputs(control, 2 * replica, each) for replica, each in enumerate(calls)]
    for iteration in range(2):
        computed: list[list[tuple[int, int]]] = []
        for replica, (cell, made) in enumerate(zip(cells, calls, strict=True)):
            cell.begin(made, iteration, routed=routed)
            computed.append([])
            for number in range(MICRO_BATCHES):
                given = cell(0, replica * MICRO_BATCHES + number if routed else number)
                assert given.iterator is not None
                assert given.routed is routed
                assert given.number == number, "CUDA graphs are replayed in the order that they were captured in"
                assert made.model_chunks[0].disable_parameter_transpose_cache is routed
                home, place = next(given.iterator)
                assert drawn[-1] == (iteration, home, place - iteration * MICRO_BATCHES, 0)
                computed[-1].append((home, place))
            assert cell.end([], losses_moved=False) == []
            cell.ended()
        assert sorted(computed[0] + computed[1]) == [
            (replica, iteration * MICRO_BATCHES + number)
            for replica in range(REPLICAS)
            for number in range(MICRO_BATCHES)
        ]
        work = [sum(length(*place) for place in row) for row in computed]
        assert work == ([12.0, 11.0] if iteration == 0 else [4.0, 4.0])
    assert [cell.swapped for cell in cells] == [1, 1]


def test_a_slow_replica_takes_the_short_ones(control: ControlStore) -> None:
    made = call(data(1))
    cell_inputs(control, 0, call(data(0)))
    cell = cell_inputs(control, 2, made)
    cell.begin(made, 0, routed=False, slowness=(1.0, 3.0))
    places = [next(cell(0, number).iterator or iter(())) for number in range(MICRO_BATCHES)]
    assert [length(*place) for place in places] == [1.0] * MICRO_BATCHES


def test_an_iteration_that_is_attempted_again_has_the_same_data(control: ControlStore) -> None:
    """The iterator is not wound back: what it has yielded is kept until the iteration has ended."""
    made = call(data(0, None))
    cell = cell_inputs(control, 0, made)
    for iteration in range(2):
        expected = [(0, iteration * MICRO_BATCHES + number) for number in range(MICRO_BATCHES)]
        for attempted in (1, MICRO_BATCHES, MICRO_BATCHES):
            cell.begin(made, iteration, routed=False)
            assert [next(cell(0, number).iterator or iter(())) for number in range(attempted)] == expected[:attempted]
            cell.end([], losses_moved=False)
        cell.ended()


def test_the_lowest_live_replica_has_the_losses_of_the_dead(
    control: ControlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of the last stage: 1 of replica 0 and 3 of replica 1, whose own cell is dead in turn."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda numbers, group: None)
    cell_inputs(control, 0, call(data(0, None)))
    for rank, replica in ((1, 0), (3, 1)):
        iterator = RoutableMicroBatches(iter([]), lambda *place: place, None)
        made = call(iterator)
        cell = cell_inputs(control, rank, made)
        cell.begin(made, 0, routed=True, dead=frozenset({Cell(1 - replica, 1)}))
        losses = []
        for number in range(REPLICAS * MICRO_BATCHES):
            cell(0, number)
            losses.append({"lm loss": torch.tensor([float(number)])})
        found = [float(entry["lm loss"]) for entry in cell.end(losses, losses_moved=True)]
        own = [replica * MICRO_BATCHES + number for number in range(MICRO_BATCHES)]
        assert found == [*own, *(number for number in range(REPLICAS * MICRO_BATCHES) if number not in own)]


def test_a_cell_that_computes_nothing_at_first_reads_what_its_replica_has_next(control: ControlStore) -> None:
    """Replica 1's last cell is dead, and the routes leave its first one without micro-batches."""
    calls = [call(data(replica, None)) for replica in range(REPLICAS)]
    cells = [cell_inputs(control, 2 * replica, each) for replica, each in enumerate(calls)]
    for cell, made in zip(cells, calls, strict=True):
        cell.begin(made, 0, routed=True, dead=frozenset({Cell(1, 1)}))
    for number in range(REPLICAS * MICRO_BATCHES):
        next(cells[0](0, number).iterator or iter(()))
    for cell in cells:
        cell.end([], losses_moved=True)
    for cell, made in zip(cells, calls, strict=True):
        cell.ended()
        cell.begin(made, 1, routed=False)
    found = [[next(cell(0, number).iterator or iter(())) for number in range(MICRO_BATCHES)] for cell in cells]
    assert found == [[(each, MICRO_BATCHES + number) for number in range(MICRO_BATCHES)] for each in range(REPLICAS)]


def test_a_stage_that_reads_no_data_reads_none_where_a_cell_computes_nothing(control: ControlStore) -> None:
    calls = [call(data(replica, None)) for replica in range(REPLICAS)]
    cells = [cell_inputs(control, 2 * replica, each) for replica, each in enumerate(calls)]
    for cell, made in zip(cells, calls, strict=True):
        cell.begin(made, 0, routed=True)
    for number in range(REPLICAS * MICRO_BATCHES):
        cells[0](0, number)
    for cell in cells:
        cell.end([], losses_moved=True)
    for cell in cells:
        cell.ended()
    assert [next(each.data_iterators[0]) for each in calls] == [(0, 0), (1, 0)]


def test_a_cell_of_the_last_stage_that_computes_nothing_at_first_has_the_losses_of_its_replica(
    control: ControlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replica 1's cell computes all. That of replica 0, whose first cell is dead, comes to the end before it."""
    sums: list[torch.Tensor] = []

    def all_reduce(numbers: torch.Tensor, group: object) -> None:
        sums.append(numbers.clone())
        met.wait(TIMEOUT_S)
        numbers.copy_(sums[0] + sums[1])

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    met = threading.Barrier(REPLICAS)
    calls = [call(RoutableMicroBatches(iter([]), lambda *place: place, None)) for _ in range(REPLICAS)]
    cell_inputs(control, 0, call(data(0, None)))
    cells = [cell_inputs(control, 2 * replica + 1, each) for replica, each in enumerate(calls)]
    for cell, made in zip(cells, calls, strict=True):
        cell.begin(made, 0, routed=True, dead=frozenset({Cell(0, 0)}))
    losses = []
    for number in range(REPLICAS * MICRO_BATCHES):
        cells[1](0, number)
        losses.append({"lm loss": torch.tensor([float(number), 1.0])})
    with ThreadPoolExecutor() as threads:
        idle = threads.submit(cells[0].end, [], losses_moved=True)
        time.sleep(0.02)
        busy = threads.submit(cells[1].end, losses, losses_moved=True)
        found = [[entry["lm loss"].tolist() for entry in each.result(TIMEOUT_S)] for each in (idle, busy)]
    numbers = [[float(number), 1.0] for number in range(REPLICAS * MICRO_BATCHES)]
    assert found == [numbers[:MICRO_BATCHES], numbers[MICRO_BATCHES:]]


def test_losses_that_no_cell_says_are_waited_for_until_a_rank_dies(
    control: ControlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A short limit would also be that of each request to the store.
    monkeypatch.setattr(protocol_store, "time", EmulatedTime())
    cell_inputs(control, 0, call(data(0, None)))
    made = call(RoutableMicroBatches(iter([]), lambda *place: place, None))
    for dies, says, timeout_s in ((True, "has ended", TIMEOUT_S), (False, "no cell of the last stage", 20.0)):

        def check(dies: bool = dies) -> None:
            if dies:
                raise EpochEndedError("epoch 1 has ended")

        cell = cell_inputs(control, 3, made, timeout_s=timeout_s, check=check)
        cell.begin(made, 0, routed=True, dead=frozenset({Cell(1, 0)}))
        with pytest.raises(RuntimeError, match=says):
            cell.end([], losses_moved=True)


@pytest.mark.parametrize(
    ("other", "says"), [(None, "says no lengths"), (lambda replica, number: 1.0 + number, "says other lengths")]
)
def test_ranks_that_would_swap_others_are_refused(other: Any, says: str, control: ControlStore) -> None:
    cell_inputs(control, 0, call(data(0)))
    with pytest.raises(UnsupportedFeatureError, match=f"data iterator of rank 3 {says}"):
        cell_inputs(control, 3, call(data(1, other)))


def test_lengths_of_some_ranks_alone_are_refused(control: ControlStore) -> None:
    cell_inputs(control, 0, call(data(0, None)))
    cell_inputs(control, 1, call(None))
    with pytest.raises(UnsupportedFeatureError, match="or one without on all"):
        cell_inputs(control, 2, call(data(1)))


SPANNED = ((0, 1), (2, 3), (4, 5), (6, 7))
"""Four pipelines, of which the experts of each pair meet: two replicas of two lanes."""
PAIRS = ((0, 2), (1, 3), (4, 6), (5, 7))


def test_lanes_that_experts_join_compute_the_same_number_of_other_replicas_each_of_its_own_data(
    control: ControlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replica 1's last cell is dead: the lanes of replica 0's, ranks 1 and 3, also have the losses of its two lanes."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda numbers, group: None)
    calls = [call(data(share, None)) for share in range(2)]
    cell_inputs(control, 0, call(data(0, None)), SPANNED, PAIRS)
    lanes = [cell_inputs(control, rank, made, SPANNED, PAIRS) for rank, made in zip((1, 3), calls, strict=True)]
    for share, (lane, made) in enumerate(zip(lanes, calls, strict=True)):
        lane.begin(made, 0, routed=True, dead=frozenset({Cell(1, 1)}))
        expected = [(each, number) for each in (share, share + 2) for number in range(MICRO_BATCHES)]
        read = [next(lane(0, number).iterator or iter(())) for number in range(REPLICAS * MICRO_BATCHES)]
        assert read == expected
        reports = [{"lm loss": torch.tensor(place, dtype=torch.float32)} for place in read]
        assert [tuple(each["lm loss"].tolist()) for each in lane.end(reports, losses_moved=True)] == expected


def test_lanes_swap_by_the_longest_of_what_they_compute_in_step(control: ControlStore) -> None:
    """Lanes of a replica compute in step, so the longer of their micro-batches counts: here the second lane's."""

    def of_pairs(share: int, number: int) -> float:
        return length(share // 2, number) / (2 - share % 2)

    calls = [call(data(share, of_pairs)) for share in range(4)]
    for share, rank in enumerate((0, 2, 4, 6)):
        lane = cell_inputs(control, rank, calls[share], SPANNED, PAIRS)
        lane.begin(calls[share], 0, routed=False)
        read = [next(lane(0, number).iterator or iter(())) for number in range(MICRO_BATCHES)]
        assert {each % 2 for each, _ in read} == {share % 2}
        assert sum(length(each // 2, number) for each, number in read) == [12.0, 11.0][share // 2]


@pytest.mark.parametrize(
    ("pipelines", "joined", "why"),
    [(SPANNED, ((0, 2, 4, 6),), "all 4 meet in each forward: their experts span"), (((0, 1),), (), "there is one")],
)
def test_replicas_that_cannot_help_each_other_are_refused(
    pipelines: Any, joined: Any, why: str, control: ControlStore
) -> None:
    with pytest.raises(UnsupportedFeatureError, match=why):
        cell_inputs(control, 0, call(data(0)), pipelines, joined)


def test_gpus_swap_what_they_cannot_route(control: ControlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rerouted_inputs, "current_device", lambda: torch.device("cuda", 0))
    made = call(data(0), message_shape=None)
    inputs = cell_inputs(control, 0, made)
    assert inputs.swaps
    assert list(rerouting._pinned(inputs, made)) == [0, 1]
    with pytest.raises(UnsupportedFeatureError, match="by which whole micro-batches are swapped instead"):
        cell_inputs(control.in_generation(1), 0, call(data(0, None), message_shape=None))
