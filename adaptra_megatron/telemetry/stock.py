# SPDX-License-Identifier: Apache-2.0
"""Records what stock Megatron's own schedules do, so that their timeline can be drawn beside ours."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any

from adaptra_megatron.telemetry.records import IterationRecorder

STEPS = ("forward_step", "backward_step")


class StockRecording:
    """Decorators around Megatron's `schedules.forward_step` and `schedules.backward_step`; see `record_stock`."""

    def __init__(self, schedules: ModuleType, recorder: IterationRecorder, chunks: int) -> None:
        self._schedules = schedules
        self._recorder = recorder
        self._chunks = chunks
        self.begin_iteration(0)
        self._stock: dict[str, Callable[..., Any]] = {name: getattr(schedules, name) for name in STEPS}
        self._ours = {
            "forward_step": self._recorded(self._stock["forward_step"], "F", self._next_forward),
            "backward_step": self._recorded(self._stock["backward_step"], "B", self._next_backward),
        }
        for name, function in self._ours.items():
            setattr(schedules, name, function)

    def begin_iteration(self, iteration: int) -> None:
        """Call before each training step: what runs from now on is recorded under this number."""
        self._iteration = iteration
        self._forwards: list[tuple[int, int]] = []
        self._backwards = 0
        self._previous_end_s: float | None = None

    def undo(self) -> None:
        """Put Megatron's functions back; does nothing the second time.

        Raises RuntimeError, and changes nothing, if somebody has replaced them since: undo that first.
        """
        if not self._ours:
            return
        for name, function in self._ours.items():
            if getattr(self._schedules, name) is not function:
                raise RuntimeError(
                    f"{self._schedules.__name__}.{name} was replaced after recording began: undo that replacement first"
                )
        for name, function in self._stock.items():
            setattr(self._schedules, name, function)
        self._ours = {}

    def __enter__(self) -> StockRecording:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undo()

    def _recorded(
        self, stock: Callable[..., Any], kind: str, identify: Callable[[dict[str, Any]], tuple[int, int]]
    ) -> Callable[..., Any]:
        @functools.wraps(stock)
        def step(*args: Any, **kwargs: Any) -> Any:
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

    def _next_backward(self, arguments: dict[str, Any]) -> tuple[int, int]:
        """The n-th backward mirrors the n-th forward: the same micro-batch, chunks counted from the last.

        That is how Megatron reads its schedule table backwards (`get_model_chunk_id` of the interleaved schedule).
        """
        chunk, micro_batch = self._forwards[self._backwards]
        self._backwards += 1
        return self._chunks - 1 - chunk, micro_batch


def record_stock(schedules: ModuleType, recorder: IterationRecorder, *, chunks: int = 1) -> StockRecording:
    """Record every forward and backward of `megatron.core.pipeline_parallel.schedules` until `undo` or the end of `with`.

    Stock's pipeline loops look both functions up as module globals, so this sees them all, whatever else wraps them, if
    it is put in place last. `chunks` is the number of model chunks of this rank. Before each training step call
    `begin_iteration`; after it, `recorder.take(iteration)`. Backwards are not split, so kinds are "F" and "B" alone.
    """
    return StockRecording(schedules, recorder, chunks)
