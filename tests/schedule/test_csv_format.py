# SPDX-License-Identifier: Apache-2.0
"""CSV both ways, against the loader and the dumper of torch.distributed.pipelining."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from support.schedules import combined_schedules
from support.torch_stages import torch_stages
from torch.distributed.pipelining import schedules as torch_schedules

from adaptra_megatron.schedule import classic
from adaptra_megatron.schedule.classic import split_backward
from adaptra_megatron.schedule.csv_format import schedule_from_csv, schedule_to_csv
from adaptra_megatron.schedule.ir import Schedule, ScheduleError, interleaved, units, v_shape
from adaptra_megatron.schedule.order_registry import SCHEDULES, make_schedule
from adaptra_megatron.schedule.schedule_checks import check_schedule

NAMED = {name: make_schedule(name, 4, 8, named.chunks[0]) for name, named in SCHEDULES.items()}
CASES = {name: schedule for name, schedule in NAMED.items() if schedule.custom_placement is None} | {
    "few-micro-batches": classic.zb_h2(3, 2),
    "gpipe-2": classic.gpipe(3, 4, chunks=2),
    "interleaved-3": classic.interleaved(4, 8, 3),
    "weights-last": split_backward(classic.interleaved(2, 4, 2), None),
}


def torch_runtime(schedule: Schedule) -> torch_schedules._PipelineScheduleRuntime:
    return torch_schedules._PipelineScheduleRuntime(torch_stages(schedule.placement), schedule.micro_batches)


@pytest.mark.parametrize("schedule", CASES.values(), ids=CASES.keys())
def test_torch_loads_what_we_write_and_writes_what_we_load(schedule: Schedule, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.csv", tmp_path / "theirs.csv"
    ours.write_text(schedule_to_csv(schedule))
    runtime = torch_runtime(schedule)
    runtime._load_csv(str(ours), format="compute_only")
    for stage, order in enumerate(schedule.orders):
        halves = [half for action in runtime.pipeline_order[stage] for half in action.sub_actions or [action]]
        cells = [(half.stage_index, half.computation_type.value, half.microbatch_index) for half in halves]
        assert [len(unit) for unit in units(order)] == [
            len(action.sub_actions or [action]) for action in runtime.pipeline_order[stage]
        ]
        assert cells == [(a.chunk * schedule.stages + a.stage, a.kind.value, a.micro_batch) for a in order]
    runtime._dump_csv(str(theirs), format="compute_only")
    assert schedule_from_csv(theirs.read_text()) == schedule
    assert schedule_from_csv(theirs.read_text(), chunks=schedule.chunks) == schedule


@given(combined_schedules(placed=True))
def test_combined_actions_are_written_and_read(schedule: Schedule) -> None:
    assert schedule_from_csv(schedule_to_csv(schedule)) == schedule


def dumped_by_torch(name: str, tmp_path: Path) -> str:
    file = tmp_path / "torch.csv"
    schedule = getattr(torch_schedules, name)(torch_stages(interleaved(4, 2)), 8, loss_fn=SimpleNamespace())
    torch_schedules.PipelineScheduleMulti._dump_csv(schedule, str(file))
    return file.read_text()


def test_torchs_dualpipe_v_combines_forwards_and_backwards(tmp_path: Path) -> None:
    file = tmp_path / "torch.csv"
    theirs = torch_schedules.ScheduleDualPipeV(torch_stages(v_shape(4)), 8, loss_fn=SimpleNamespace())
    torch_schedules.PipelineScheduleMulti._dump_csv(theirs, str(file))
    schedule = schedule_from_csv(file.read_text())
    assert file.read_text().count("OVERLAP_F_B") == sum(
        action.combined for order in schedule.orders for action in order
    )
    assert schedule.combines
    check_schedule(schedule)


@pytest.mark.parametrize("name", ["ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"])
def test_torchs_own_schedules_are_read_and_can_run(name: str, tmp_path: Path) -> None:
    """Torch marks idle steps by empty cells: those must not shift or end an order."""
    text = dumped_by_torch(name, tmp_path)
    assert ",," in text
    schedule = schedule_from_csv(text, chunks=2)
    assert (schedule.stages, schedule.chunks, schedule.micro_batches) == (4, 2, 8)
    assert sum(map(len, schedule.orders)) == sum(1 for cell in text.replace("\n", ",").split(",") if cell.strip())
    check_schedule(schedule)


def test_torchs_breadth_first_schedule_is_read_but_sums_gradients_in_another_order(tmp_path: Path) -> None:
    schedule = schedule_from_csv(dumped_by_torch("ScheduleLoopedBFS", tmp_path))
    with pytest.raises(ScheduleError, match=r"stage 0 B\(micro-batch 7, chunk 1\).* must run in ascending"):
        check_schedule(schedule)


def test_the_format_is_pinned() -> None:
    assert schedule_to_csv(split_backward(classic.interleaved(2, 2, 2))) == (
        "0F0,0F1,2F0,2F1,2I0,2W0,2I1,2W1,0I0,0W0,0I1,0W1\n1F0,1F1,3F0,3I0,3W0,3F1,3I1,3W1,1I0,1W0,1I1,1W1\n"
    )


def test_blanks_line_ends_and_quotes_are_no_actions() -> None:
    text = '0F0, ,0B0\r\n"1F0" ,,1B0,\r\n\r\n , \r\n'
    assert schedule_from_csv(text) == classic.one_f_one_b(2, 1)


def test_chunks_can_be_more_than_the_csv_shows() -> None:
    """So that the check can say that a whole chunk is missing."""
    schedule = schedule_from_csv(schedule_to_csv(classic.one_f_one_b(2, 3)), chunks=2)
    assert schedule == replace(classic.one_f_one_b(2, 3), chunks=2)
    with pytest.raises(ScheduleError, match=r"stage 0 F\(micro-batch 0, chunk 1\) is missing"):
        check_schedule(schedule)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1X0", r"row 2, column 2: '1X0' is no action"),
        ("0F0,0SEND_X0\n", r"row 1, column 2: '0SEND_X0' is no action"),
        ("0F0,(0F1;0X0)OVERLAP_F_B\n", r"row 1, column 2: '0X0' is no action"),
        ("0F0,(0F1;0W0)OVERLAP_F_B\n", r"row 1, column 2: '\(0F1;0W0\)OVERLAP_F_B' overlaps other actions than"),
        ("0F0,(0B0;0F1)OVERLAP_F_B\n", r"column 2: '\(0B0;0F1\)OVERLAP_F_B' overlaps other actions than"),
        ("0F0,,0F\n", r"row 1, column 3: '0F' is no action"),
        ("-1F0\n", r"row 1, column 1: '-1F0' is no action"),
        ("0F0,0B0,1F0\n1B0\n", r"row 1, column 3: '1F0' is in rank 0's row.*virtual stage 1 on rank 1"),
        ("0F0,2F0\n1F0\n", r"row 1, column 2: '2F0' belongs to chunk 1 of rank 0, which has at most 1 chunks"),
        ("", "holds no action"),
        ("\n,\n", "holds no action"),
        ("0F0,0\rB0", "row 1, column 2: '0' is no action"),
    ],
)
def test_what_cannot_be_read_is_named_by_row_and_column(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        schedule_from_csv(text, chunks=1)


def test_numbers_out_of_any_reason_are_refused_without_building_anything() -> None:
    with pytest.raises(ScheduleError, match="belongs to chunk 999999999 of rank 0, which has at most 2 chunks"):
        schedule_from_csv("0F0,999999999F0\n")
    with pytest.raises(ScheduleError, match="is no action"):
        schedule_from_csv("0F12345678901234567890\n")
    with pytest.raises(ScheduleError, match="chunks must be at least 1, got 0"):
        schedule_from_csv("0F0,0B0\n", chunks=0)


@pytest.mark.parametrize(
    ("theirs", "plain"),
    [
        ("0F0,0B0,0W0\n1F0,1B0,1W0\n", "0F0,0I0,0W0\n1F0,1I0,1W0\n"),
        ("0F0,0SEND_F0,0RECV_B0,0BW0\n1RECV_F0,1F0,1B0,1SEND_B0,1W0\n", "0F0,0B0\n1F0,1I0,1W0\n"),
        ("0UNSHARD,0F0,0B0,0REDUCE_GRAD,0RESHARD\n1UNSHARD,1F0,1B0,1REDUCE_GRAD\n", "0F0,0B0\n1F0,1B0\n"),
        ("0F0,(0F1;0B0)OVERLAP_F_B,0B1,0W0\n1F0,1B0\n", "0F0,(0F1;0I0)OVERLAP_F_B,0B1,0W0\n1F0,1B0\n"),
    ],
    ids=["before torch 2.6", "with communication", "with FSDP's actions", "overlapped"],
)
def test_torch_s_other_forms_are_read(theirs: str, plain: str) -> None:
    assert schedule_from_csv(theirs) == schedule_from_csv(plain)
