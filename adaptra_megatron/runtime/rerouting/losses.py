# SPDX-License-Identifier: Apache-2.0
"""Brings losses home: each replica hands its training script those of its own micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from adaptra_megatron.authentication.tagged_json import packed, unpacked
from adaptra_megatron.runtime.rerouting.micro_batches import Home

Reports = Mapping[str, torch.Tensor]
"""What a loss function returns last: tensors of numbers by name, alike for all micro-batches."""


_MOST_NBYTES = 1 << 16


class _Form(NamedTuple):
    """What all reports have alike."""

    names: list[str]
    shapes: list[list[int]]
    dtypes: list[str]
    """As torch writes them."""


def form_of(reports: Any) -> bytes | None:
    """Names, shapes and dtypes of reports, for processes that have seen none; None where those are no such reports."""
    if not isinstance(reports, Mapping) or not all(isinstance(each, torch.Tensor) for each in reports.values()):
        return None
    values = reports.values()
    return packed(_Form([*reports], [[*each.shape] for each in values], [str(each.dtype) for each in values]))


def reports_like(form: bytes, device: torch.device) -> Reports:
    """Reports of that form, of no meaning. Raises ValueError for anything else."""
    names, shapes, dtypes = unpacked(form, _Form, _MOST_NBYTES)
    known = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
    return {
        name: torch.empty(shape, dtype=known[dtype], device=device)
        for name, shape, dtype in zip(names, shapes, dtypes, strict=True)
    }


def brought_home(
    computed: Mapping[Home, Reports],
    wanted: Sequence[int],
    replicas: int,
    micro_batches: int,
    like: Reports,
    add_up: Callable[[torch.Tensor], None],
) -> Sequence[Reports]:
    """The reports of the micro-batches of `wanted` replicas in order, wherever they were computed.

    `computed`: those of this cell. `like`: of any micro-batch, for names, shapes and dtypes. `add_up`: sums a float64
    tensor [replicas, micro_batches, numbers] over the cells of the last stage, in place; each entry is one cell's and
    0 elsewhere, so that sums are what was computed, to the bit.
    """
    shapes = {name: value.shape for name, value in like.items()}
    numbers = torch.zeros(replicas, micro_batches, sum(shape.numel() for shape in shapes.values()), dtype=torch.float64)
    for home, reports in computed.items():
        flat = [reports[name].detach().reshape(-1).to("cpu", torch.float64) for name in shapes]
        numbers[home.replica, home.number] = torch.cat(flat)
    add_up(numbers)
    return [_unpacked(row, like) for replica in wanted for row in numbers[replica]]


def _unpacked(row: torch.Tensor, like: Reports) -> dict[str, Any]:
    parts = torch.split(row, [value.numel() for value in like.values()])
    return {
        name: part.reshape(value.shape).to(value.device, value.dtype)
        for (name, value), part in zip(like.items(), parts, strict=True)
    }
