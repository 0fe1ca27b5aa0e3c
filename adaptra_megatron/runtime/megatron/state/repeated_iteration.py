# SPDX-License-Identifier: Apache-2.0
"""An iteration that runs again because a staggered optimizer step was taken back: its data and its random numbers.

Iterations are redone after a death by `runtime.AdaptraRuntime._attempt_among`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from adaptra_megatron.runtime.megatron.iteration import forget_gradients
from adaptra_megatron.runtime.megatron.megatron_call import PipelineCall


class RepeatableIteration:
    """One call of Megatron's forward_backward function, made before anything of it is computed."""

    def __init__(self, call: PipelineCall) -> None:
        self._given = call
        self._data = [None if each is None else _KeptData(each) for each in call.data_iterators]
        self._states = torch.get_rng_state(), torch.cuda.get_rng_state(), _tracked()
        self.call = replace(call, data_iterators=list[Iterator[Any] | None](self._data))
        """The same, whose data are kept."""

    def rewind(self) -> None:
        """Have `call` begin once more: gradients are 0, data and random numbers the same again."""
        forget_gradients(self._given)
        for each in self._data:
            if each is not None:
                each.rewind()
        default, device, tracked = self._states
        torch.set_rng_state(default)
        torch.cuda.set_rng_state(device)
        get_cuda_rng_tracker().set_states(tracked)


def _tracked() -> dict[str, Any]:
    return {
        name: state.clone() if isinstance(state, torch.Tensor) else state.clone_state()
        for name, state in get_cuda_rng_tracker().get_states().items()
    }


class _KeptData(Iterator[Any]):
    """What an iterator yields, kept for a second time."""

    def __init__(self, own: Iterator[Any]) -> None:
        self._own = own
        self._read: list[Any] = []
        self._again: Iterator[Any] = iter(())

    def __next__(self) -> Any:
        for item in self._again:
            return item
        self._read.append(next(self._own))
        return self._read[-1]

    def rewind(self) -> None:
        self._again = iter(self._read[:])
