# SPDX-License-Identifier: Apache-2.0
"""Record the exact results of a training by megatron.training, as `train_gpt.py --dump-state` does."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.training import training

from testing.replacing import Replaced, Replacement
from testing.results import TrainingResult, model_tensors, optimizer_tensors, save_result

GRAD_NORM = 5
"""Index of the grad norm in the result of train_step, in all releases from 0.14 on."""


@contextlib.contextmanager
def recorded(directory: str | Path) -> Iterator[None]:
    """Record the training within the context; at its end, or at an exit, write this rank's part to `directory`."""
    record = _Record()
    reason = "what it returns is written down"
    step = Replacement(training, "train_step", record.watch_steps(training.train_step), reason)
    evaluation = Replacement(training, "evaluate", record.watch_evaluation(training.evaluate), reason)
    with Replaced([step, evaluation]):
        try:
            yield
        finally:
            record.save(Path(directory))


class _Record:
    def __init__(self) -> None:
        self._result = TrainingResult()
        self._model: list[Any] = []
        self._optimizer: Any = None

    def watch_steps(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(train_step)
        def watched(step: Any, data: Any, model: Any, optimizer: Any, *rest: Any, **keywords: Any) -> Any:
            self._model, self._optimizer = model, optimizer
            returned = train_step(step, data, model, optimizer, *rest, **keywords)
            self._result.losses += _values(returned[0])
            self._result.grad_norms.append(float(returned[GRAD_NORM]))
            return returned

        return watched

    def watch_evaluation(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(evaluate)
        def watched(*arguments: Any, **keywords: Any) -> Any:
            returned = evaluate(*arguments, **keywords)
            self._result.evaluation_losses += _values(returned[0] or {})
            return returned

        return watched

    def save(self, directory: Path) -> None:
        if self._optimizer is None:
            return
        result = self._result
        result.parameters = model_tensors(self._model)
        result.optimizer_state = optimizer_tensors(self._optimizer)
        path = save_result(result, directory, rank=dist.get_rank(), world_size=dist.get_world_size())
        path.with_suffix(".json").write_text(json.dumps(_what_ran()))


def _values(losses: Mapping[str, Any]) -> list[float]:
    """Return exact values, sorted by name."""
    return [float(value) for _, value in sorted(losses.items()) if isinstance(value, torch.Tensor | float)]


def _what_ran() -> dict[str, Any]:
    """Return the imported modules of this package, and the runtime's summary; None if Megatron's own code ran."""
    modules = sorted(name for name in sys.modules if name.partition(".")[0] == "adaptra_megatron")
    patches = sys.modules.get("adaptra_megatron.patches")
    applied = None if patches is None else patches.in_force()
    runtime = None if applied is None else applied.runtime
    return {"modules": modules, "adaptra": None if runtime is None else runtime.summary()}
