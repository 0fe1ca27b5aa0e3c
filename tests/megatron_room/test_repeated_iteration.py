# SPDX-License-Identifier: Apache-2.0
"""An iteration that runs twice reads the same data and draws the same random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from adaptra_megatron.megatron import staggered_optimizer as repeated_iteration
from adaptra_megatron.megatron.megatron_call import PipelineCall
from adaptra_megatron.megatron.staggered_optimizer import RepeatableIteration


@dataclass(frozen=True)
class Call:
    """What is used of a PipelineCall."""

    data_iterators: list[Any] = field(default_factory=list)
    model_chunks: list[Any] = field(default_factory=list)
    config: Any = field(default_factory=lambda: SimpleNamespace(timers=None))


@pytest.fixture(autouse=True)
def _random_states(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_rng_state()
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", torch.set_rng_state)
    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    tracker.set_states({"some": torch.Generator().manual_seed(3).get_state()})
    yield
    tracker.set_states(states)
    torch.set_rng_state(before)


def _computed(call: Any, count: int) -> list[Any]:
    iterator = call.data_iterators[0]
    return [next(iterator) for _ in range(count)] + [torch.rand(2).tolist(), _tracked()]


def _tracked() -> list[int]:
    state = get_cuda_rng_tracker().get_states()["some"]
    generator = torch.Generator()
    generator.set_state(state)
    drawn = torch.randint(100, (4,), generator=generator).tolist()
    state.copy_(generator.get_state())  # in place, as on the device
    return cast(list[int], drawn)


def test_the_second_time_is_as_the_first_and_data_go_on_behind_it() -> None:
    data = iter(range(10))
    repeatable = RepeatableIteration(cast(PipelineCall, Call([data, None])))
    call = repeatable.call
    assert call.data_iterators[1] is None
    first = _computed(call, 3)
    repeatable.rewind()
    assert _computed(call, 3) == first
    assert first[:3] == [0, 1, 2]
    assert next(call.data_iterators[0]) == 3
    assert next(data) == 4


def test_gradients_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten = []
    monkeypatch.setattr(repeated_iteration, "forget_attempt", forgotten.append)
    given = cast(PipelineCall, Call([]))
    RepeatableIteration(given).rewind()
    assert forgotten == [given]
