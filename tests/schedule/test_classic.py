# SPDX-License-Identifier: Apache-2.0
"""The classic orders: Megatron's against Megatron's own functions, zero-bubble ones against their paper's figures."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from adaptra_megatron.schedule import classic
from adaptra_megatron.schedule.classic import delay_weights, split_backward
from adaptra_megatron.schedule.ir import Action, Kind, Order, Schedule, ScheduleError
from adaptra_megatron.schedule.schedule_checks import check_schedule

STAGES = range(2, 17)


@pytest.fixture(scope="module")
def megatron() -> SimpleNamespace:
    """The functions of the installed Megatron-core that decide its orders."""
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    cuda_graphs = pytest.importorskip("megatron.core.transformer.cuda_graphs")
    return SimpleNamespace(
        rank_microbatches=schedules.get_pp_rank_microbatches,
        table=schedules.get_schedule_table,
        order=cuda_graphs.convert_schedule_table_to_order,
    )


def communicator(stages: int, stage: int, chunks: int) -> SimpleNamespace:
    """As much of Megatron's P2PCommunicator as decides the warm-up."""
    return SimpleNamespace(
        pp_group=SimpleNamespace(size=lambda: stages, rank=lambda: stage),
        virtual_pipeline_model_parallel_size=None if chunks == 1 else chunks,
    )


def megatron_order(
    megatron: SimpleNamespace,
    stages: int,
    stage: int,
    micro_batches: int,
    chunks: int,
    group: int,
    evaluate: bool,
    combined: bool = False,
) -> Order:
    """What rank `stage` runs, put together from Megatron's functions alone. Combined: each forward after the warm-up
    is, with the backward behind it.

    The table and the warm-up count give signed chunks (positive: forward). Micro-batches follow from how Megatron
    keeps its tensors: one first-in first-out list per chunk.
    """
    table = megatron.table(micro_batches, chunks, group)
    total, _, warm_up, _ = megatron.rank_microbatches(
        micro_batches,
        chunks,
        group,
        forward_only=evaluate,
        overlap_moe_expert_parallel_comm=combined,
        p2p_communicator=communicator(stages, stage, chunks),
    )
    signed = megatron.order(warm_up, chunks, table)
    if evaluate:
        signed = signed[:total]
    forwards, backwards = [0] * chunks, [0] * chunks
    actions = []
    for signed_chunk in signed:
        chunk = abs(signed_chunk) - 1
        counts, kind = (forwards, Kind.FORWARD) if signed_chunk > 0 else (backwards, Kind.BACKWARD)
        pair = combined and kind is Kind.FORWARD and len(actions) >= warm_up
        actions.append(Action(stage, kind, chunk, counts[chunk], pair))
        counts[chunk] += 1
    ours = [(action.micro_batch, action.chunk) for action in actions if action.kind is Kind.FORWARD]
    assert ours == [tuple(entry) for entry in table]
    return tuple(actions)


def group_sizes(stages: int, micro_batches: int) -> list[int | None]:
    """Megatron's default, and others it accepts: between the two, one that leaves a remainder, and everything."""
    candidates = {stages + 1, 2 * stages - 1, 2 * stages, micro_batches - stages, micro_batches}
    return [None] + sorted(
        size for size in candidates if stages <= size <= micro_batches and not 0 < micro_batches % size < stages
    )


@pytest.mark.parametrize("evaluate", [False, True], ids=["training", "evaluation"])
@pytest.mark.parametrize("stages", STAGES)
def test_one_f_one_b_is_megatrons(megatron: SimpleNamespace, stages: int, evaluate: bool) -> None:
    for micro_batches in (1, 2, stages - 1, stages, stages + 1, 2 * stages, 4 * stages + 3):
        schedule = (classic.forward_only if evaluate else classic.one_f_one_b)(stages, micro_batches)
        for stage in range(stages):
            expected = megatron_order(megatron, stages, stage, micro_batches, 1, micro_batches, evaluate)
            assert schedule.orders[stage] == expected


@pytest.mark.parametrize("evaluate", [False, True], ids=["training", "evaluation"])
@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("stages", STAGES)
def test_interleaved_is_megatrons(megatron: SimpleNamespace, stages: int, chunks: int, evaluate: bool) -> None:
    for micro_batches in (stages, 2 * stages, 3 * stages, 4 * stages):
        sizes = group_sizes(stages, micro_batches)
        assert len(sizes) > 1
        for size in sizes:
            generate = classic.forward_only if evaluate else classic.interleaved
            schedule = generate(stages, micro_batches, chunks, size)
            for stage in range(stages):
                expected = megatron_order(megatron, stages, stage, micro_batches, chunks, size or stages, evaluate)
                assert schedule.orders[stage] == expected, f"group size {size}, stage {stage}"


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("stages", STAGES)
def test_interleaved_combined_is_megatrons(megatron: SimpleNamespace, stages: int, chunks: int) -> None:
    for micro_batches in (stages, 2 * stages, 4 * stages):
        for size in group_sizes(stages, micro_batches):
            schedule = classic.interleaved_combined(stages, micro_batches, chunks, size)
            check_schedule(schedule)
            for stage in range(stages):
                expected = megatron_order(
                    megatron, stages, stage, micro_batches, chunks, size or stages, False, combined=True
                )
                assert schedule.orders[stage] == expected, f"group size {size}, stage {stage}"


def test_interleaved_takes_micro_batches_that_leave_a_full_last_group(megatron: SimpleNamespace) -> None:
    schedule = classic.interleaved(4, 15, 2, 11)
    for stage in range(4):
        assert schedule.orders[stage] == megatron_order(megatron, 4, stage, 15, 2, 11, False)


def test_stock_order_is_chosen_by_the_chunk_count() -> None:
    assert classic.stock_order(4, 8) == classic.one_f_one_b(4, 8)
    assert classic.stock_order(4, 8, 2, 8) == classic.interleaved(4, 8, 2, 8)


@pytest.mark.parametrize(
    "generate", [classic.interleaved, classic.forward_only, classic.interleaved_combined, classic.interleaved_split]
)
@pytest.mark.parametrize(
    ("micro_batches", "group_size", "message"),
    [
        (3, None, r"4 stages, group size 4 and 3 micro-batches: raise the micro-batches to at least 4"),
        (8, 9, r"group size 9 and 8 micro-batches: raise the micro-batches to at least 9"),
        (8, 3, r"4 stages, group size 3 and 8 micro-batches.*between 4 and"),
        (10, None, r"10 modulo 4 = 2 with 4 stages: take 8 or 12 micro-batches"),
        (9, 8, r"9 modulo 8 = 1 with 4 stages: take 8 or 12 micro-batches"),
    ],
)
def test_what_megatron_refuses_is_refused(
    generate: object, micro_batches: int, group_size: int | None, message: str
) -> None:
    assert callable(generate)
    with pytest.raises(ScheduleError, match=message):
        generate(4, micro_batches, 2, group_size)


def test_counts_below_one_and_interleaving_nothing_are_refused() -> None:
    with pytest.raises(ScheduleError, match="micro_batches must be a whole number of at least 1, got 0"):
        classic.one_f_one_b(2, 0)
    with pytest.raises(ScheduleError, match="stages must be a whole number of at least 1, got -1"):
        classic.gpipe(-1, 2)
    with pytest.raises(ScheduleError, match="at least 2 stages and 2 chunks per stage, got 4 and 1: take 1F1B"):
        classic.interleaved(4, 8, 1)
    with pytest.raises(ScheduleError, match="at least 2 stages and 2 chunks per stage, got 1 and 2"):
        classic.interleaved(1, 8, 2)


def all_schedules(stages: int, micro_batches: int) -> list[Schedule]:
    flat = [
        classic.gpipe(stages, micro_batches),
        classic.gpipe(stages, micro_batches, chunks=3),
        classic.one_f_one_b(stages, micro_batches),
        classic.zb_h1(stages, micro_batches),
        classic.zb_h2(stages, micro_batches),
    ]
    if stages > 1 and micro_batches % stages == 0:
        flat += [generate(stages, micro_batches, 2) for generate in (classic.interleaved, classic.interleaved_split)]
    return flat + [split_backward(s, delay) for s in flat if not s.splits_backward for delay in (0, 1, 3, None)]


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5, 8, 16])
def test_every_classic_schedule_is_valid(stages: int, micro_batches: int) -> None:
    for schedule in all_schedules(stages, micro_batches):
        check_schedule(schedule)


def test_gpipe_runs_all_forwards_before_any_backward() -> None:
    order = classic.gpipe(2, 2, chunks=2).orders[1]
    assert "".join(f"{action.kind}{action.chunk}{action.micro_batch} " for action in order) == (
        "F00 F01 F10 F11 B10 B11 B00 B01 "
    )


def peak_in_flight(order: Order) -> int:
    held = peak = 0
    for action in order:
        held += {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_WEIGHT: -1}.get(action.kind, 0)
        peak = max(peak, held)
    return peak


def spans(schedule: Schedule) -> tuple[float, list[float]]:
    """Makespan, and per stage the time from its first to its last action, with F = I = W = 1 and free links."""
    ends: dict[tuple[bool, int, int], float] = {}
    clocks = [0.0] * schedule.stages
    starts: list[float | None] = [None] * schedule.stages
    rest = [list(reversed(order)) for order in schedule.orders]
    while any(rest):
        before = sum(map(len, rest))
        for stage, actions in enumerate(rest):
            while actions:
                action = actions[-1]
                virtual = action.chunk * schedule.stages + stage
                forward = action.kind is Kind.FORWARD
                needed = (forward, virtual + (-1 if forward else 1), action.micro_batch)
                depends = action.kind is not Kind.BACKWARD_WEIGHT and 0 <= needed[1] < schedule.virtual_stages
                if depends and needed not in ends:
                    break
                start = max(clocks[stage], ends[needed] if depends else 0.0)
                if starts[stage] is None:
                    starts[stage] = start
                clocks[stage] = start + (2.0 if action.kind is Kind.BACKWARD else 1.0)
                if action.kind is not Kind.BACKWARD_WEIGHT:
                    ends[forward, virtual, action.micro_batch] = clocks[stage]
                actions.pop()
        assert sum(map(len, rest)) < before, "deadlock"
    return max(clocks), [end - (start or 0.0) for start, end in zip(starts, clocks, strict=True)]


@pytest.mark.parametrize("stages", [2, 4, 8, 13])
def test_zb_h1_has_a_third_of_the_bubble_in_the_memory_of_1f1b(stages: int) -> None:
    for micro_batches in (stages, 2 * stages + 1, 4 * stages):
        schedule = classic.zb_h1(stages, micro_batches)
        assert [peak_in_flight(order) for order in schedule.orders] == [stages] * stages
        assert spans(classic.one_f_one_b(stages, micro_batches))[0] == 3 * micro_batches + 3 * (stages - 1)
        assert spans(schedule)[0] == 3 * micro_batches + (stages - 1)


@pytest.mark.parametrize("stages", [2, 4, 8, 13])
def test_zb_h2_has_no_bubble_in_twice_the_memory(stages: int) -> None:
    for micro_batches in (2 * stages, 4 * stages + 1):
        schedule = classic.zb_h2(stages, micro_batches)
        assert [peak_in_flight(order) for order in schedule.orders] == [2 * stages - 1] * stages
        assert spans(schedule)[1] == [3.0 * micro_batches] * stages


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("chunks", [2, 3])
def test_interleaved_split_shortens_the_bubble_in_the_memory_of_interleaved(stages: int, chunks: int) -> None:
    for micro_batches in (stages, 2 * stages, 4 * stages):
        whole = classic.interleaved(stages, micro_batches, chunks)
        split = classic.interleaved_split(stages, micro_batches, chunks)
        allowed = peak_in_flight(whole.orders[0])
        assert max(peak_in_flight(order) for order in split.orders) == allowed
        work = 3 * micro_batches * chunks
        assert spans(whole)[0] - work == 3 * (stages - 1)
        assert spans(split)[0] - work <= 1.5 * (stages - 1)


def test_split_backward_puts_weights_where_asked() -> None:
    def letters(delay: int | None) -> str:
        order = split_backward(classic.one_f_one_b(2, 3), delay).orders[0]
        return " ".join(f"{action.kind}{action.micro_batch}" for action in order)

    assert letters(0) == "F0 F1 I0 W0 F2 I1 W1 I2 W2"
    assert letters(1) == "F0 F1 I0 F2 I1 W0 I2 W1 W2"
    assert letters(None) == "F0 F1 I0 F2 I1 I2 W0 W1 W2"


def test_splitting_is_refused_where_it_makes_no_sense() -> None:
    with pytest.raises(ScheduleError, match=r"stage 0 I\(micro-batch 0, chunk 0\) is split already"):
        split_backward(classic.zb_h1(2, 4))
    with pytest.raises(ScheduleError, match="stage 1: weight delay -1 is negative") as caught:
        delay_weights(classic.one_f_one_b(2, 4), [0, -1])
    assert caught.value.stage == 1
    with pytest.raises(ScheduleError, match="got 1 for 2 stages"):
        delay_weights(classic.one_f_one_b(2, 4), [0])
