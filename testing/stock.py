# SPDX-License-Identifier: Apache-2.0
"""Record the actions of stock Megatron's own schedules, to draw their timeline next to ours."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from adaptra_megatron.telemetry.action_records import ActionRecord
from adaptra_megatron.telemetry.trace import TraceWriter

OnIteration = Callable[[int, list[ActionRecord]], None]

SCHEDULES = ("forward_backward_pipelining_without_interleaving", "forward_backward_pipelining_with_interleaving")


class IterationRecorder:
    """Collects one rank's records.

    Not thread-safe: the thread that runs the pipeline adds records, and takes them between iterations. An action costs
    one tuple and one append, so recording can stay on in every run.
    """

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self._records: list[ActionRecord] = []

    def __len__(self) -> int:
        return len(self._records)

    def add(
        self,
        iteration: int,
        kind: str,
        chunk: int,
        micro_batch: int,
        wait_start_s: float,
        start_s: float,
        end_s: float,
    ) -> None:
        """Append one action of this rank's stage, in the order in which actions ran."""
        self._records.append(
            ActionRecord(iteration, self.stage, kind, chunk, micro_batch, wait_start_s, start_s, end_s)
        )

    def take(self, iteration: int) -> list[ActionRecord]:
        """Remove and return the records of `iteration`, in the order in which they ran; empty if there are none.

        Records of earlier iterations are dropped, so that they cannot accumulate.
        """
        taken = [record for record in self._records if record.iteration == iteration]
        self._records = [record for record in self._records if record.iteration > iteration]
        return taken


class StockRecording:
    """Decorators around functions of `megatron.core.pipeline_parallel.schedules`, in place until `undo`.

    Megatron looks up its pipeline loops as module globals, and the loops look up `forward_step` and `backward_step`. So
    the decorators see every call, including other wrappers' work if they are installed last. `on_iteration(number,
    records)` is called after each training iteration, counted from 0. Evaluation is not recorded. Stock does not split
    backwards: kinds are "F" and "B" alone.
    """

    def __init__(self, schedules: ModuleType, stage: int, on_iteration: OnIteration) -> None:
        self._schedules = schedules
        self._recorder = IterationRecorder(stage)
        self._on_iteration = on_iteration
        self._iteration = 0
        self._chunks = 0
        """Model chunks of the iteration that runs; 0 outside training iterations."""
        self._forwards: list[tuple[int, int]] = []
        self._backwards = 0
        self._previous_end_s: float | None = None
        names = ("forward_step", "backward_step", *SCHEDULES)
        self._stock: dict[str, Callable[..., Any]] = {name: getattr(schedules, name) for name in names}
        self._ours = {
            "forward_step": self._recorded_step("forward_step", "F", self._next_forward),
            "backward_step": self._recorded_step("backward_step", "B", self._next_backward),
            **{name: self._recorded_iteration(name) for name in SCHEDULES},
        }
        for name, function in self._ours.items():
            setattr(schedules, name, function)

    def undo(self) -> None:
        """Restore Megatron's functions; does nothing the second time.

        Raises RuntimeError, and changes nothing, if one of them has been replaced since.
        """
        for name, function in self._ours.items():
            if getattr(self._schedules, name) is not function:
                raise RuntimeError(
                    f"{self._schedules.__name__}.{name} was replaced after recording began: undo that replacement first"
                )
        for name in self._ours:
            setattr(self._schedules, name, self._stock[name])
        self._ours = {}

    def _recorded_iteration(self, name: str) -> Callable[..., Any]:
        stock = self._stock[name]

        @functools.wraps(stock)
        def forward_backward(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("forward_only"):
                return stock(*args, **kwargs)
            model = kwargs["model"]
            self._chunks = len(model) if isinstance(model, list) else 1
            self._forwards, self._backwards, self._previous_end_s = [], 0, None
            try:
                result = stock(*args, **kwargs)
            finally:
                self._chunks = 0
            self._on_iteration(self._iteration, self._recorder.take(self._iteration))
            self._iteration += 1
            return result

        return forward_backward

    def _recorded_step(
        self, name: str, kind: str, identify: Callable[[dict[str, Any]], tuple[int, int]]
    ) -> Callable[..., Any]:
        stock = self._stock[name]

        @functools.wraps(stock)
        def step(*args: Any, **kwargs: Any) -> Any:
            if not self._chunks:
                return stock(*args, **kwargs)
            chunk, micro_batch = identify(kwargs)
            start_s = time.monotonic()
            result = stock(*args, **kwargs)
            end_s = time.monotonic()
            # Between two steps a stock rank does nothing but send and wait.
            wait_start_s = start_s if self._previous_end_s is None else self._previous_end_s
            self._recorder.add(self._iteration, kind, chunk, micro_batch, wait_start_s, start_s, end_s)
            self._previous_end_s = end_s
            return result

        return step

    def _next_forward(self, arguments: dict[str, Any]) -> tuple[int, int]:
        forward = (arguments.get("vp_stage") or 0, arguments["current_microbatch"])
        self._forwards.append(forward)
        return forward

    def _next_backward(self, _: dict[str, Any]) -> tuple[int, int]:
        """Return micro-batch and chunk of the next backward: the n-th mirrors the n-th forward, with chunks from the
        last.

        Megatron reads its schedule table backwards in this way (`get_model_chunk_id` of the interleaved schedule).
        """
        chunk, micro_batch = self._forwards[self._backwards]
        self._backwards += 1
        return self._chunks - 1 - chunk, micro_batch


@contextlib.contextmanager
def trace_stock(
    schedules: ModuleType, directory: Path | str, *, rank: int, stage: int, clock_offset_s: float = 0.0
) -> Iterator[None]:
    """Trace stock Megatron's actions on this rank to `directory` within this context, as `--adaptra-trace-dir` traces
    ours.

    `schedules` is `megatron.core.pipeline_parallel.schedules`; see StockRecording and TraceWriter.
    """
    writer = TraceWriter(directory, rank, stage, clock_offset_s=clock_offset_s)
    recording = StockRecording(schedules, stage, writer.write)
    try:
        yield
    finally:
        recording.undo()
        writer.close()
