# SPDX-License-Identifier: Apache-2.0
"""Emulate the durations of actions in a training by megatron.training, longer at some cells, and make ranks fail."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.pipeline_parallel import schedules
from megatron.training import checkpointing, training

from adaptra_megatron.common.membership import START_VARIABLE
from testing.faults.deaths import Arrivals, Deaths, parse_death
from testing.faults.emulated_compute import parse_compute
from testing.faults.planners import exact_times
from testing.faults.slow_cells import CellSpeed, parse_slow_cell
from testing.megatron.checkpoint_writers import slowed
from testing.replacing import Replaced, Replacement


@contextlib.contextmanager
def timed_cells(times_ms: str, slow_cells: Sequence[str], *, exact: bool = False) -> Iterator[None]:
    """Make each forward_step and backward_step last for `times_ms` within this context.

    `times_ms`: "F,B,W" for all stages, as --emulate-compute-ms of `train_gpt.py`. `slow_cells`: see `parse_slow_cell`.
    `exact`: whether these are also the measured times. In a split backward the input gradient lasts as long as both
    parts, and the weight gradient is not slowed down. Raises EmulationError for invalid arguments.
    """
    cells = [parse_slow_cell(text) for text in slow_cells]

    @functools.cache
    def speed() -> CellSpeed:
        """Make the speed in the first iteration, when Megatron's replicas and stages exist."""
        place = parallel_state.get_data_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
        return CellSpeed(cells, *place)

    compute = parse_compute(times_ms, stage=0, stages=1, slow_down=lambda: speed().factor)
    with (
        compute.install_on_stock(schedules),
        _counted(lambda number: speed().set_iteration(number)),
        exact_times(compute) if exact else contextlib.nullcontext(),
    ):
        yield


@contextlib.contextmanager
def dying_ranks(deaths: Sequence[str], back: Sequence[int]) -> Iterator[None]:
    """Make ranks fail within this context, each once. `deaths`: see `parse_death`; failures at an action have no
    effect.

    `back`: see `Arrivals`.
    """
    if os.environ.get(START_VARIABLE):
        yield
        return
    parsed = [parse_death(text) for text in deaths]

    @functools.cache
    def ours() -> Deaths:
        """Make the failures in the first iteration, when Megatron's ranks exist."""
        return Deaths(parsed, torch.distributed.get_rank())

    arrivals = Arrivals(back)

    def begins(number: int) -> None:
        arrivals.set_iteration(number)
        ours().set_iteration(number)

    with _counted(begins):
        yield


@contextlib.contextmanager
def slow_writers(seconds: float) -> Iterator[None]:
    """Make writers of checkpoints in the background begin `seconds` late within this context."""
    schedule = checkpointing.schedule_async_save
    late = Replacement(
        checkpointing, "schedule_async_save", lambda request: schedule(slowed(request, seconds)), "writes are emulated"
    )
    with Replaced([late]):
        yield


@contextlib.contextmanager
def slow_datasets(seconds: float) -> Iterator[None]:
    """Make processes that are started again build datasets for `seconds` longer within this context."""
    build = BlendedMegatronDatasetBuilder.build

    @functools.wraps(build)
    def late(builder: Any) -> Any:
        if os.environ.get(START_VARIABLE, "0") != "0":
            time.sleep(seconds)
        return build(builder)

    with Replaced([Replacement(BlendedMegatronDatasetBuilder, "build", late, "long builds are emulated")]):
        yield


@contextlib.contextmanager
def _counted(begins: Callable[[int], None]) -> Iterator[None]:
    """Call `begins` with the number of each iteration (from 0) before it, within the context."""
    numbers, train_step = itertools.count(), training.train_step

    @functools.wraps(train_step)
    def step(*arguments: Any, **keywords: Any) -> Any:
        begins(next(numbers))
        return train_step(*arguments, **keywords)

    with Replaced([Replacement(training, "train_step", step, "something is emulated in some iterations")]):
        yield
